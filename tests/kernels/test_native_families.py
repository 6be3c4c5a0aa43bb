"""Attention, norms and routers of all eight families with our kernels, against torch in fp64."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Latents
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.routers import Router, terms_of
from qllm.models.discover import discover
from qllm.models.parts.known import norm_kind
from qllm.runner.cpu import cpu_runner
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step, install
from qllm.runner.layers.drivers import FastDriver
from qllm.runner.layers.native import NativeDriver
from qllm.runner.rope_tables import RopeTable
from tests.support.families import FAMILIES, MAKERS, WIDTH, make_model

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())
CAPACITY, LAYER = 150, 2


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    with torch.inference_mode():
        yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def off(found: Tensor, expected: Tensor) -> Tensor:
    """Distances, as parts of the mean size of what is expected."""
    expected = expected.double()
    return (found.double() - expected).abs() / expected.abs().mean()


# -- norms


def modules(width: int) -> dict[str, Any]:
    """One norm of each kind."""
    return {
        "rms": type(discover(make_model("mixtral")).norm)(width, eps=1e-5),
        "rms_wide": type(discover(make_model("gpt_oss")).norm)(width, eps=1e-5),
        "layer": nn.LayerNorm(width, eps=1e-5),
    }


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ["rms", "rms_wide", "layer"])
@pytest.mark.parametrize("width", [16, 70, 128])
def test_norms_are_those_of_the_modules(name: str, width: int) -> None:
    module = modules(width)[name].bfloat16()
    for i, p in enumerate(module.parameters()):
        p.copy_(rand(width, seed=3 + i))
    assert norm_kind(module) == name
    x = rand(9, width, seed=1, scale=30) + 7
    norm = Norm(module.weight, 1e-5, name, getattr(module, "bias", None))
    found, expected = norm(x), module(x)
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert torch.equal(norm(x[4:5]), found[4:5])


def test_a_norm_that_rounds_once_reads_a_weight_in_fp32() -> None:
    module = modules(64)["rms_wide"]
    module.weight.copy_(1 + torch.rand(64) / 1000)
    x = rand(5, 64, seed=1)
    assert torch.equal(Norm(module.weight, 1e-5, "rms_wide")(x), module(x))
    assert not torch.equal(Norm(module.weight.bfloat16(), 1e-5, "rms_wide")(x), module(x))
    layer = discover(make_model("gpt_oss", torch.bfloat16)).layers[LAYER]
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        assert norm is not None
        norm.float()  # as `from_pretrained` leaves them
    assert set(NativeDriver(layer, cpu.Arena()).names) == {"attention", "router"}


# -- attention


def attended(driver: FastDriver, parts: Any, x_TD: Tensor, spans: list[Span], **how: Any) -> Tensor:
    """What attention adds to the residual stream."""
    rope = RopeTable(parts.rotary_emb, torch.device("cpu"), x_TD.dtype)
    ranges = [(span.lo, span.hi) for span in spans]
    step = Step(spans, x_TD.shape[0], parts.latent_kv)
    driver._scale = None
    return driver.attend(x_TD, rope.of(ranges), step) - x_TD


def in_parts(driver: NativeDriver, parts: Any, x_TD: Tensor, num_keys: int) -> Tensor:
    """The same for one request, over so many keys at a time."""
    rope = RopeTable(parts.rotary_emb, torch.device("cpu"), x_TD.dtype)
    spans = spans_of([[0, 37, x_TD.shape[0]]])
    step, pos, begun, num_parts = Step(spans, x_TD.shape[0], parts.latent_kv), 0, None, 0
    while pos or not num_parts:
        ranges = [(span.lo, span.hi) for span in spans]
        mid, begun, pos = driver.attend_some(x_TD, rope.of(ranges), step, pos, begun, num_keys)
        num_parts += 1
    assert num_parts == -(-x_TD.shape[0] // num_keys)
    assert mid is not None
    return mid - x_TD


def spans_of(cuts: list[list[int]]) -> list[Span]:
    """One request per list, its queries cut there."""
    out, at = [], 0
    for marks in cuts:
        kv = SlabKV(3, CAPACITY)
        for lo, hi in pairwise(marks):
            out.append(Span(kv, at + lo - marks[0], lo, hi))
        at += marks[-1] - marks[0]
    return out


def is_near_fp64(model: Any) -> None:
    """Its attention with our kernels, and as its modules compute it in bf16, against fp64."""
    wide = copy.deepcopy(model).double()
    x, cuts = rand(91, WIDTH, seed=9), [[0, 70], [0, 1], [0, 20]]
    outs = []
    for one, make in ((wide, FastDriver), (model, FastDriver), (model, _native)):
        parts = discover(one)
        install([p.self_attn for p in parts.layers])
        dtype = parts.lm_head.weight.dtype
        driver = make(parts.layers[LAYER])
        outs.append(attended(driver, parts, x.to(dtype), spans_of(cuts)))
    exact, theirs, ours = outs
    assert off(ours, exact).mean() <= 1.05 * off(theirs, exact).mean()
    assert off(ours, exact).max() <= 1.3 * off(theirs, exact).max()


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_as_near_to_fp64_as_the_modules_in_bf16(family: str) -> None:
    is_near_fp64(make_model(family, torch.bfloat16))


@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_with_whole_queries_and_biases(interleaved: bool) -> None:
    make_config, make = MAKERS["deepseek_v3"]
    config = make_config()
    config.q_lora_rank, config.attention_bias = None, True
    config.rope_interleave, config._attn_implementation = interleaved, "sdpa"
    torch.manual_seed(0)
    model = make(config).eval()
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.1 + 1 if p.dim() == 1 else torch.randn_like(p) / 8)
    is_near_fp64(model.bfloat16())


def _native(layer: Any) -> NativeDriver:
    driver = NativeDriver(layer, cpu.Arena())
    assert "attention" in driver.names
    return driver


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cut_no_neighbour_and_no_thread_changes_a_bit(family: str) -> None:
    parts = discover(make_model(family, torch.bfloat16))
    driver, x = _native(parts.layers[LAYER]), rand(130, WIDTH, seed=9)
    whole = attended(driver, parts, x, spans_of([[0, 100], [0, 30]]))
    assert whole.unique().numel() > 100
    cuts = [0, *range(1, 40), 41, 64, 65, 99, 100]
    assert torch.equal(attended(driver, parts, x, spans_of([cuts, [0, 30]])), whole)
    assert torch.equal(attended(driver, parts, x[:100], spans_of([[0, 100]])), whole[:100])
    assert torch.equal(attended(driver, parts, x[100:], spans_of([[0, 29, 30]])), whole[100:])
    (prefix, *rest), outs = spans_of([[0, 37, 38, 90, 100]]), []
    for span in (prefix, *rest):  # one after the other, as ops are
        alone = Span(span.kv, 0, span.lo, span.hi)
        outs.append(attended(driver, parts, x[span.lo : span.hi], [alone]))
    assert torch.equal(torch.cat(outs), whole[:100])
    for num_keys in (64, 1 << 20):
        assert torch.equal(in_parts(driver, parts, x[:100], num_keys), whole[:100])
    for threads in (2, 3):
        cpu.set_threads(threads)
        assert torch.equal(in_parts(driver, parts, x[:100], 64), whole[:100])
        assert torch.equal(attended(driver, parts, x, spans_of([[0, 100], [0, 30]])), whole)


@pytest.mark.parametrize("rotation", ["pairs", "complex"])
@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("heads", [2, 50])
def test_latents_attend_as_the_keys_and_values_they_stand_for(
    heads: int, low_rank: bool, rotation: str
) -> None:
    """MLA written out in fp64: rotation in pairs, latents expanded, one softmax per head."""
    d, rank, tail, key, value, q_rank, num = 48, 64, 32, 16, 24, 40, 80
    q_width = heads * (key + tail)
    first = rand(q_rank if low_rank else q_width, d, seed=1, scale=d**-0.5)
    second = rand(q_width, q_rank, seed=2, scale=q_rank**-0.5)
    kv_down = rand(rank + tail, d, seed=3, scale=d**-0.5)
    expand = rand(heads, key + value, rank, seed=4, scale=rank**-0.5)
    norms = [Norm(torch.ones(n).bfloat16(), 1e-6) for n in (d, q_rank, rank)]
    kernel = Latents(
        cpu.Matrix([first, kv_down]),
        (cpu.Matrix([second]), norms[1]) if low_rank else None,
        norms[0],
        norms[2],
        expand,
        num_rotated=tail,
        value_dim=value,
        scale=(key + tail) ** -0.5,
        rotation=rotation,
        arena=cpu.Arena(),
    )
    x, angle = rand(num, d, seed=5), torch.arange(num)[:, None] * 0.9 ** torch.arange(tail // 2)
    cos, sin = (t.repeat(1, 2).bfloat16() for t in (angle.cos(), angle.sin()))
    if rotation == "complex":
        cos = sin = torch.polar(torch.ones_like(angle), angle)
    spans = [Span(SlabKV(1, 100), 0, 0, num)]
    at = Step(spans, num, latent=True).addresses(kernel.slab, x)
    q = kernel.enter(x, cos, sin, 0, at.address, 1)
    found = kernel.attend(q, 0, None, at.address, 1, True).view(num, heads, value)

    def normed(t: Tensor) -> Tensor:
        return t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def rotated(t_THF: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t_THF.reshape(*t_THF.shape[:-1], -1, 2).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
        return torch.cat([turned[..., 0], turned[..., 1]], -1)

    x64, angle = normed(x.double()), angle.double()
    q64 = x64 @ first.double().t()
    q64 = normed(q64) @ second.double().t() if low_rank else q64
    q64 = q64.view(num, heads, key + tail)
    latent, turn = (x64 @ kv_down.double().t()).split([rank, tail], 1)
    both = torch.einsum("hvr,tr->thv", expand.double(), normed(latent))
    scores = torch.einsum("qhk,shk->hqs", q64[..., :key], both[..., :key])
    scores += torch.einsum("qhk,sk->hqs", rotated(q64[..., key:]), rotated(turn[:, None])[:, 0])
    hidden = torch.ones(num, num, dtype=torch.bool).triu(1)
    p = (scores * (key + tail) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqs,shv->qhv", p, both[..., key:])
    wrong = (found.double() - expected).abs() / expected.abs().mean((1, 2), keepdim=True)
    assert wrong.max() < 0.1
    assert wrong.mean() < 0.006


def test_latents_that_the_kernels_are_not_made_for_are_refused() -> None:
    ones = Norm(torch.ones(8).bfloat16(), 1e-6)
    for rank, tail in ((48, 32), (32, 16), (32, 288)):
        with pytest.raises(ValueError, match=f"latents of {rank} and {tail}"):
            Latents(
                cpu.Matrix([rand(rank + tail, 8)]), None, ones, ones, rand(1, 8, rank),
                num_rotated=tail, value_dim=4, scale=1.0, rotation="pairs", arena=cpu.Arena(),
            )  # fmt: skip


# -- routers


def sorted_by_id(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    order = ids_TK.argsort(1)
    return ids_TK.gather(1, order), weights_TK.gather(1, order)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_routers_choose_and_weigh_as_the_modules(family: str) -> None:
    parts = discover(make_model(family, torch.bfloat16)).layers[LAYER]
    ours, theirs = NativeDriver(parts, cpu.Arena()), FastDriver(parts)
    assert "router" in ours.names
    mid = rand(300, WIDTH, seed=5)
    found, expected = ours.route(mid, mid), theirs.route(mid, mid)
    assert found.weights_TK.dtype is expected.weights_TK.dtype
    ids, weights = sorted_by_id(found.ids_TK, found.weights_TK)
    their_ids, their_weights = sorted_by_id(expected.ids_TK, expected.weights_TK)
    same = (ids == their_ids).all(1)
    assert same.float().mean() > 0.97  # else two experts are closer than a rounding
    near = 1e-5 if family in {"mixtral", "deepseek_v3"} else 2**-7
    torch.testing.assert_close(weights[same], their_weights[same], rtol=near, atol=1e-6)
    for row in (0, 17, 299):
        alone = ours.route(mid[row : row + 1], mid[row : row + 1])
        assert torch.equal(alone.ids_TK[0], found.ids_TK[row])
        assert torch.equal(alone.weights_TK[0], found.weights_TK[row])


@pytest.mark.parametrize("is_exact", [True, False], ids=["of values of bf16", "of any"])
def test_a_router_whose_weight_is_fp32_chooses_and_weighs_as_the_module(is_exact: bool) -> None:
    """Releases of transformers differ in whether they load this weight in fp32."""
    model = make_model("deepseek_v3", torch.bfloat16)
    parts = discover(model).layers[LAYER]
    router: Any = parts.router
    noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(3))
    wide = router.weight.detach().float() * (1 if is_exact else 1 + noise / 100)
    narrow = NativeDriver(parts, cpu.Arena())
    router.weight = torch.nn.Parameter(wide)
    ours, theirs = NativeDriver(parts, cpu.Arena()), FastDriver(parts)
    assert "router" in ours.names
    assert ours.is_complete == narrow.is_complete
    mid = rand(300, WIDTH, seed=5)
    found, expected = ours.route(mid, mid), theirs.route(mid, mid)
    ids, weights = sorted_by_id(found.ids_TK, found.weights_TK)
    their_ids, their_weights = sorted_by_id(expected.ids_TK, expected.weights_TK)
    same = (ids == their_ids).all(1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(weights[same], their_weights[same], rtol=1e-5, atol=1e-6)
    of_bf16 = narrow.route(mid, mid)
    assert torch.equal(found.weights_TK, of_bf16.weights_TK) == is_exact
    assert torch.equal(found.ids_TK, of_bf16.ids_TK) or not is_exact
    alone = ours.route(mid[17:18], mid[17:18])
    assert torch.equal(alone.weights_TK[0], found.weights_TK[17])


def test_the_terms_of_a_weight_are_all_of_it() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)) * 1e-3
    assert len(terms_of(weight)) == 3
    assert torch.equal(sum(t.float() for t in reversed(terms_of(weight))), weight)
    assert [len(terms_of(x)) for x in (weight.bfloat16(), weight.bfloat16().float())] == [1, 1]


def test_a_bias_counts_once_beside_a_weight_of_several_terms() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    norm, x, bias = Norm(torch.ones(64).bfloat16(), 1e-6), rand(50, 64), rand(8)
    how: dict[str, Any] = {"kind": "softmax_fp32", "renormalise": False, "wide": True}
    normed, ids, weights = Router(weight, norm, top_k=8, bias_E=bias, **how)(x)
    scores = (normed.double() @ weight.double().t() + bias.double()).softmax(-1)
    torch.testing.assert_close(weights.double(), scores.gather(1, ids), rtol=1e-4, atol=1e-6)


def test_the_sparse_mixer_rounds_as_the_module() -> None:
    """Logits that are the input itself, and a limit near which many of them lie."""
    parts = discover(make_model("phimoe", torch.bfloat16)).layers[LAYER]
    router: Any = parts.router
    router.router_jitter_noise = 0.4
    router.weight.copy_(torch.eye(*router.weight.shape))
    mid = rand(4000, WIDTH, seed=5)
    found = NativeDriver(parts, cpu.Arena()).route(mid, mid)
    expected = FastDriver(parts).route(mid, mid)
    same = (found.x_TD == expected.x_TD).all(1)
    assert same.float().mean() > 0.9
    assert torch.equal(found.ids_TK[same], expected.ids_TK[same])
    off = (found.weights_TK - expected.weights_TK)[same].abs()
    assert off.max() < 2**-7


def test_the_softmax_router_in_fp32_keeps_to_the_groups_with_the_best_experts() -> None:
    weight, norm, x = rand(24, 64, seed=1), Norm(torch.ones(64).bfloat16(), 1e-6), rand(200, 64)
    how: dict[str, Any] = {"kind": "softmax_fp32", "renormalise": False, "wide": True}
    router = Router(weight, norm, top_k=5, groups=6, top_groups=2, scaling=16.0, **how)
    normed, ids, weights = router(x)
    scores = (normed.double() @ weight.double().t()).softmax(-1)
    best = scores.view(-1, 6, 4).amax(-1).topk(2, -1)[1]
    in_groups = F.one_hot(best, 6).sum(1).repeat_interleave(4, 1).bool()
    expected = scores.masked_fill(~in_groups, -torch.inf).topk(5, -1)[1]
    assert torch.equal(ids.sort(1)[0], expected.sort(1)[0])
    torch.testing.assert_close(weights.double(), 16 * scores.gather(1, ids), rtol=1e-5, atol=1e-9)
    _, ids, weights = Router(weight, norm, top_k=5, **how)(x)
    assert torch.equal(ids.sort(1)[0], scores.topk(5, -1)[1].sort(1)[0])
    torch.testing.assert_close(weights.double(), scores.gather(1, ids), rtol=1e-5, atol=1e-9)


def test_the_sigmoid_router_keeps_to_the_best_groups() -> None:
    weight, correction = rand(24, 64, seed=1, scale=0.2), torch.randn(24) * 0.3
    norm, x = Norm(torch.ones(64).bfloat16(), 1e-6), rand(200, 64, seed=2)
    how: dict[str, Any] = {"kind": "sigmoid", "renormalise": True, "wide": True}
    router = Router(
        weight, norm, top_k=5, groups=6, top_groups=2, scaling=2.5, correction_E=correction, **how
    )
    normed, ids, weights = router(x)
    scores = (normed.double() @ weight.double().t()).sigmoid()
    choice = scores + correction.double()
    best = choice.view(-1, 6, 4).topk(2, -1)[0].sum(-1).topk(2, -1)[1]
    in_groups = F.one_hot(best, 6).sum(1).repeat_interleave(4, 1).bool()
    expected = choice.masked_fill(~in_groups, -torch.inf).topk(5, -1)[1]
    assert torch.equal(ids.sort(1)[0], expected.sort(1)[0])
    kept = scores.gather(1, ids)
    torch.testing.assert_close(weights.double(), 2.5 * kept / kept.sum(1, keepdim=True))
    plain = Router(weight, norm, top_k=5, **how)(x)[1]
    assert torch.equal(plain.sort(1)[0], scores.topk(5, -1)[1].sort(1)[0])


def test_routers_that_cannot_choose_so_many_are_refused() -> None:
    norm = Norm(torch.ones(16).bfloat16(), 1e-6)
    how: dict[str, Any] = {"renormalise": True, "wide": True}
    for more in (
        {"top_k": 9},
        {"top_k": 0},
        {"top_k": 3, "groups": 4, "top_groups": 1},
        {"top_k": 1, "groups": 3},
        {"top_k": 1, "groups": 8},
        {"top_k": 1, "kind": "sparse_mixer"},
    ):
        with pytest.raises(ValueError, match="of 8 experts"):
            Router(rand(8, 16), norm, **how, **more)


# -- the whole


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_native(family: str) -> None:
    model = make_model(family, torch.bfloat16)
    names, moe = cpu_runner(model).backend.compute.names, sum(discover(model).shape.is_moe)
    ours = f"qllm {KINDS[0]} (3 of 3 layers)"
    assert names["attention"] == ours
    assert names["router"] == f"qllm {KINDS[0]} ({moe} of 3 layers)"
    assert "torch linear" not in names["linear"]


def test_heads_that_the_kernels_are_not_made_for_stay_with_torch() -> None:
    model = make_model("gpt_oss", torch.bfloat16)
    attn: Any = discover(model).layers[1].self_attn
    attn.head_dim = 48
    compute = cpu_runner(model).backend.compute
    names = compute.names
    assert names["attention"].startswith(f"qllm {KINDS[0]} (2 of 3 layers), sdpa")
    assert not compute.stops_between_keys


def of_all_rows(kind: Any, driver: NativeDriver, parts: Any, x_TD: Tensor) -> Tensor:
    """What shared experts give, or a dense layer, as one of the drivers has it."""
    if parts.is_moe:
        return kind._shared(driver, x_TD)["shared"]  # type: ignore[no-any-return]
    return kind.dense(driver, x_TD, x_TD)  # type: ignore[no-any-return]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("rows", [1, 7, 40, 200])
def test_shared_experts_and_dense_layers_are_near_fp64(family: str, rows: int) -> None:
    layers: Any = discover(make_model(family, torch.bfloat16)).layers
    x = rand(rows, 64, seed=rows)
    for parts in layers:
        driver = NativeDriver(parts, cpu.Arena())
        exact = copy.deepcopy(parts.shared if parts.is_moe else parts.mlp).double()
        if parts.is_moe:
            wide = exact(x.double())
            if parts.shared_gate is not None:
                wide = copy.deepcopy(parts.shared_gate).double()(x.double()).sigmoid() * wide
        else:
            wide = x.double() + exact(parts.post_attention_layernorm(x).double())
        found, kept = (of_all_rows(kind, driver, parts, x) for kind in (NativeDriver, FastDriver))
        error, theirs = ((y.double() - wide).abs().mean() for y in (found, kept))
        assert error <= 1.05 * theirs
        assert wide.abs().mean() > 0.01
        assert torch.equal(found[:1], of_all_rows(NativeDriver, driver, parts, x[:1]))


def test_a_gate_that_is_not_the_usual_one_stays_with_torch() -> None:
    parts = discover(make_model("qwen2_moe", torch.bfloat16)).layers[0]
    shared: Any = parts.shared
    assert "mlp" in set(NativeDriver(parts, cpu.Arena()).names)
    shared.act_fn = nn.GELU()
    driver = NativeDriver(parts, cpu.Arena())
    assert "mlp" not in set(driver.names)
    assert driver.whole is None
