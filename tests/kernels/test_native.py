import copy
import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.routers import Router
from qllm.models.discover import discover
from qllm.plan import NO_CUTS, Plan, Row
from qllm.runner import compute
from qllm.runner.cpu import cpu_runner
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step, install
from qllm.runner.layers.drivers import FastDriver
from qllm.runner.layers.experts import TorchBank
from qllm.runner.layers.native import NativeDriver
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.rows import PLAIN
from qllm.runner.layers.work import Work
from qllm.runner.rope_tables import RopeTable
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START
from qllm.types import Grain, SamplingParams

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())
WIDTH, HEADS, GROUPS, HEAD = 128, 4, 2, 32
COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    with torch.inference_mode():
        yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


class Never:
    """A stop word that nobody lowers."""

    word = 1 << 30
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def close(found: Tensor, expected: Tensor, ulps: float = 1.0) -> None:
    """Within so many bf16 steps of the value, or of the tensor's size where values cancel."""
    expected, found = expected.double(), found.double()
    size = expected.abs().clamp(min=float(expected.abs().mean()) / 8 + 1e-30)
    assert ((found - expected).abs() <= ulps * size / 128).all()


def qwen3(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{**COMMON, **more}, num_experts=8, moe_intermediate_size=80, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def mixtral(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(**{**COMMON, **more}, num_local_experts=8, intermediate_size=80)
    return MixtralForCausalLM(config).bfloat16().eval()


# -- products


@pytest.mark.sampled(120)
@pytest.mark.parametrize("num_out", [1, 15, 16, 17, 64, 65, 100, 200])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 97, 100])
@pytest.mark.parametrize("num_in", [70, 262, 1030])
def test_linear_is_the_rounded_product(num_out: int, num_in: int, rows: int) -> None:
    weight, x = rand(num_out, num_in, seed=1), rand(rows, num_in, seed=2)
    close(cpu.Matrix([weight]).linear(x), x.double() @ weight.double().t(), 0.6)


def test_linear_stacks_weights_and_adds_biases() -> None:
    weights, biases = [rand(20, 64), rand(7, 64, seed=1)], [rand(20, seed=2), rand(7, seed=3)]
    x = rand(2, 3, 64, seed=4)
    expected = torch.cat(
        [
            F.linear(x.double(), w.double(), b.double())
            for w, b in zip(weights, biases, strict=True)
        ],
        -1,
    )
    close(cpu.Matrix(weights, biases).linear(x), expected, 0.6)


def test_an_arena_gives_out_memory_once() -> None:
    arena = cpu.Arena()
    taken = [arena.take(3, 50), arena.take(7), arena.take(cpu.ARENA_NUMEL), arena.take(64)]
    for i, part in enumerate(taken):
        part.fill_(i)
    assert all((part == i).all() for i, part in enumerate(taken))
    assert all(part.data_ptr() % 64 == 0 for part in taken)


def test_a_transposed_weight_is_packed_by_its_strides() -> None:
    weight, x = rand(64, 40), rand(3, 64, seed=1)
    packed = cpu.Matrix([weight.t()]).linear(x)
    assert torch.equal(packed, cpu.Matrix([weight.t().contiguous()]).linear(x))


@pytest.mark.parametrize("num_in", [96, 700])
def test_rows_do_not_depend_on_their_number_or_the_threads(num_in: int) -> None:
    matrix, x = cpu.Matrix([rand(150, num_in)]), rand(211, num_in, seed=1)
    whole = matrix.linear(x)
    assert len(set(whole.flatten().tolist())) > 100
    for rows in (1, 2, 3, 5, 6, 7, 64, 97):
        assert torch.equal(matrix.linear(x[-rows:]), whole[-rows:])
    cpu.set_threads(3)
    for _ in range(20):
        assert torch.equal(matrix.linear(x), whole)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot pack"):
        cpu.Matrix([torch.zeros(4, 6)])
    with pytest.raises(ValueError, match="cannot pack"):
        cpu.Matrix([rand(4, 5)])
    with pytest.raises(ValueError, match="does not hold"):
        cpu.pack(rand(4, 6), rand(4, 6))
    with pytest.raises(ValueError, match="no 'MMX' kernels"):
        cpu.native.use("MMX")
    with pytest.raises(TypeError, match="arguments"):
        cpu.native.linear(1, 2)
    with pytest.raises(TypeError):
        cpu.native.linear("a", 2, 3, 4)


# -- rows


@pytest.mark.parametrize("make", [qwen3, mixtral])
def test_the_router_chooses_and_weighs_as_the_module(make: Any) -> None:
    parts = discover(make()).layers[0]
    ours, theirs = NativeDriver(parts, cpu.Arena()), FastDriver(parts)
    mid = rand(50, WIDTH, seed=5)
    found, expected = ours.route(mid, mid), theirs.route(mid, mid)
    same = (found.ids_TK == expected.ids_TK).all(1)
    assert same.float().mean() > 0.9  # else two experts are closer than a rounding
    assert found.weights_TK.dtype is expected.weights_TK.dtype
    torch.testing.assert_close(
        found.weights_TK[same], expected.weights_TK[same], rtol=0.03, atol=0.003
    )
    for row in (0, 17, 49):
        alone = ours.route(mid[row : row + 1], mid[row : row + 1])
        assert torch.equal(alone.ids_TK[0], found.ids_TK[row])
        assert torch.equal(alone.weights_TK[0], found.weights_TK[row])


def test_weights_that_are_not_renormalised_stay_probabilities() -> None:
    norm = Norm(torch.ones(64).bfloat16(), 1e-6)
    router = Router(rand(8, 64), norm, top_k=3, renormalise=False, wide=True)
    x, ids, weights = router(rand(5, 64, seed=1))
    logits = F.linear(x.double(), rand(8, 64).double()).bfloat16().double()
    expected = logits.softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-2, atol=1e-4)
    assert (weights.sum(1) < 0.999).any()


# -- attention


def attend_both(model: nn.Module, spans: list[tuple[int, int]], warm: int) -> tuple[Tensor, Tensor]:
    """Both drivers on requests that hold `warm` tokens; spans are (lo, hi) of one request each."""
    parts = discover(model)
    layer = parts.layers[1]
    rope = RopeTable(parts.rotary_emb, torch.device("cpu"), torch.bfloat16)
    num = sum(hi - lo for lo, hi in spans)
    outs = []
    for driver in (NativeDriver(layer, cpu.Arena()), FastDriver(layer)):
        install([p.self_attn for p in parts.layers])
        made, at = [], 0
        for i, (lo, hi) in enumerate(spans):
            kv = SlabKV(2, 400)
            if warm:
                kv.write(1, rand(1, GROUPS, warm, HEAD, seed=i), rand(1, GROUPS, warm, HEAD), 0)
            made.append(Span(kv, at, lo, hi))
            at += hi - lo
        step = Step(made, num, latent=False)
        outs.append(driver.attend(rand(num, WIDTH, seed=9), rope.of(spans), step))
        assert all(s.kv.written == max(warm, s.hi) for s in made)
    return outs[0], outs[1]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("make", "window"), [(qwen3, None), (mixtral, None), (mixtral, 40)])
@pytest.mark.parametrize(
    "spans",
    [
        [(200, 201)],
        [(200, 201), (7, 8), (130, 131)],
        [(0, 20)],
        [(16, 48), (200, 201), (3, 4), (0, 5)],
    ],
)
def test_attention_is_that_of_the_modules(
    make: Any, window: int | None, spans: list[tuple[int, int]]
) -> None:
    found, expected = attend_both(
        make(**({"sliding_window": window} if window else {})), spans, 210
    )
    close(found, expected, 4)


def attention(heads: int, groups: int, head: int, sinks_N: Tensor | None = None) -> Attention:
    """Only its products with keys: what goes before is not called."""
    qkv = cpu.Matrix([torch.zeros((heads + 2 * groups) * head, 2).bfloat16()])
    shape = {"num_heads": heads, "num_kv_heads": groups, "head_dim": head}
    norm = Norm(torch.ones(2).bfloat16(), 1e-6)
    return Attention(qkv, norm, **shape, scale=head**-0.5, sinks_N=sinks_N)


def attended(
    kernel: Attention, q: Tensor, kv: SlabKV, cuts: list[int], window: int | None
) -> Tensor:
    """The queries of positions [cuts[0], cuts[-1]), cut into spans there."""
    spans = [Span(kv, lo - cuts[0], lo, hi) for lo, hi in pairwise(cuts)]
    step = Step(spans, q.shape[0], latent=False)
    addresses = step.addresses(kernel.slab, q)
    return kernel.attend(q, 0, window, addresses.address, len(spans), True)


SHAPES = [(4, 2, 32), (3, 3, 128), (12, 4, 64), (6, 1, 96), (50, 1, 32), (4, 2, 160)]
"""Query heads, KV heads and their width."""


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("heads", "groups", "head"), SHAPES)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (1, False), (100, False), (90, True)])
def test_queries_attend_the_keys_before_them_and_no_others(
    heads: int, groups: int, head: int, window: int | None, sinks: bool
) -> None:
    sinks_N = rand(heads, seed=4) * 3 if sinks else None
    kernel, kv = attention(heads, groups, head, sinks_N), SlabKV(1, 300)
    k, v = rand(1, groups, 280, head, seed=1), rand(1, groups, 280, head, seed=2)
    kv.write(0, k, v, 0)
    keys, values = (t[0].double().repeat_interleave(heads // groups, 0) for t in (k, v))
    for lo, hi in ((0, 1), (14, 15), (15, 16), (127, 128), (256, 257), (0, 70), (190, 258)):
        q = rand(hi - lo, heads * head, seed=3)
        found = attended(kernel, q, kv, [lo, hi], window).view(-1, heads, head)
        scores = q.view(-1, heads, head).double().transpose(0, 1) @ keys.transpose(1, 2)
        behind = torch.arange(lo, hi)[:, None] - torch.arange(280)
        hidden = (behind < 0) | (behind >= (window or 300))
        scores = (scores * head**-0.5).masked_fill(hidden, -torch.inf)
        if sinks_N is not None:
            sink = sinks_N.double()[:, None, None].expand(-1, hi - lo, 1)
            scores = torch.cat([scores, sink], -1)
        p = scores.softmax(-1)[..., :280]
        exact = (p @ values).transpose(0, 1)
        # weights are rounded to bf16, and divided by the sum of the rounded ones
        rounding = (p @ values.abs()).transpose(0, 1) / 256
        far = (found.double() - exact).abs()
        assert (far <= rounding + 0.7 / 128 * exact.abs()).all()
        if hi - lo > 50 and sinks_N is None and (window or 300) > 1:
            others = [t.repeat_interleave(heads // groups, 1) for t in (k, v)]
            theirs = F.scaled_dot_product_attention(
                q.view(1, -1, heads, head).transpose(1, 2), *others, attn_mask=~hidden
            )
            farther = (theirs[0].transpose(0, 1).double() - exact).abs()
            assert far.mean() <= 1.05 * farther.mean()


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("heads", "groups", "head"), SHAPES)
@pytest.mark.parametrize("window", [None, 90])
def test_no_cut_of_the_queries_and_no_thread_changes_a_bit(
    heads: int, groups: int, head: int, window: int | None
) -> None:
    kernel, kv = attention(heads, groups, head, rand(heads)), SlabKV(1, 400)
    kv.write(0, *(rand(1, groups, 310, head, seed=s, scale=3) for s in (1, 2)), 0)
    q = rand(110, heads * head, seed=3)
    whole = attended(kernel, q, kv, [200, 310], window)
    assert whole.unique().numel() > 100
    for cuts in (range(200, 311), [200, 201, 208, 230, 309, 310], [200, 255, 256, 310]):
        assert torch.equal(attended(kernel, q, kv, list(cuts), window), whole)
    for threads in (2, 3):
        cpu.set_threads(threads)
        for _ in range(5):
            assert torch.equal(attended(kernel, q, kv, [200, 205, 310], window), whole)


@pytest.mark.parametrize("make", [qwen3, mixtral])
def test_cutting_a_prompt_changes_no_bit(make: Any) -> None:
    model, ids = make(), torch.arange(130).tolist()
    rules = [NO_CUTS, NO_CUTS._replace(max_cost=9.0, min_block=1, max_block=8)]
    logits: list[Tensor] = []
    for rule, chunks in ((rules[0], [130]), (rules[1], [130]), (rules[0], [1, 64, 77, 130])):
        runner = cpu_runner(model)
        runner.backend.cuts = rule
        runner.on_logits = lambda request, position, x: logits.append(x.clone())
        runner.add(0, ids, SamplingParams(temperature=0), 130, 140)
        for frame, (lo, hi) in enumerate(pairwise([0, *chunks])):
            program = compile_program(
                Plan(rows=(Row(0, lo, hi, 0, 2),), grain=Grain.STEP, stop_below=0),
                frame_id=frame,
                samples=[hi == 130],
                shape=runner.shape,
                cuts=rule,
            )
            runner.accept(program)
            assert runner.run(program, START, Never()) == program.end
            runner.finish(program)
        runner.close()
    assert len(logits) == 3
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])


def test_shapes_that_the_kernels_are_not_made_for_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=48"):
        attention(4, 2, 48)
    with pytest.raises(ValueError, match="5 heads on 2"):
        attention(5, 2, 32)


def test_dead_tokens_give_zeros_to_the_projection() -> None:
    model = qwen3()
    driver = NativeDriver(discover(model).layers[0], cpu.Arena())
    parts = discover(model)
    rope = RopeTable(parts.rotary_emb, torch.device("cpu"), torch.bfloat16)
    x = rand(3, WIDTH)
    alive = Step([Span(SlabKV(2, 64), 1, 5, 6)], 3, latent=False)
    out = driver.attend(x, rope.of([(5, 6)] * 3), alive)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[2], x[2])
    assert not torch.equal(out[1], x[1])


# -- experts


def bank_of(model: nn.Module) -> tuple[NativeBank, TorchBank]:
    """Two banks of the same weights; the first has packed its own."""
    ours: Any = NativeBank(discover(copy.deepcopy(model)).layers[0].experts)
    ours.pack()
    return ours, TorchBank(discover(model).layers[0].experts, PLAIN, in_place=False)


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 60])
def test_experts_are_those_of_the_modules(num_tokens: int) -> None:
    ours, theirs = bank_of(qwen3())
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(num_tokens)])
    x, weights = rand(num_tokens, WIDTH, seed=6, scale=4), rand(num_tokens, 4, seed=7).abs()
    outs = []
    for bank in (ours, theirs):
        work = Work(bank, ids, 1024)
        work.run(x, 0, len(work.units))
        outs.append((work.slots_SD, work.combine(0, num_tokens, weights, torch.bfloat16)))
    close(outs[0][0], outs[1][0], 3)
    close(outs[0][1], outs[1][1], 4)
    again = theirs.combine(outs[0][0], work.inverse_S, weights)
    assert torch.equal(ours.combine(outs[0][0], work.inverse_S, weights), again)


def test_any_partition_of_the_units_gives_the_same_bits() -> None:
    bank, _ = bank_of(qwen3())
    ids = torch.arange(40).reshape(10, 4) % 8
    x = rand(10, WIDTH, seed=6)
    whole = Work(bank, ids, 1024)
    whole.run(x, 0, len(whole.units))
    for rows in (1, 3):
        cut = Work(bank, ids, rows)
        for i in reversed(range(len(cut.units))):
            cut.run(x, i, i + 1)
        assert torch.equal(cut.slots_SD, whole.slots_SD)
    cpu.set_threads(2)
    for _ in range(10):
        again = Work(bank, ids, 1024)
        again.run(x, 0, len(again.units))
        assert torch.equal(again.slots_SD, whole.slots_SD)


# -- the whole


def test_a_runner_names_its_kernels(kind: str) -> None:
    names = cpu_runner(qwen3()).backend.compute.names
    ours = f"qllm {KINDS[0]}"
    assert names["experts"] == f"{ours} (2)"
    assert names["head"] == ours
    assert names["router"] == names["attention"] == f"{ours} (2 of 2 layers)"
    assert cpu_runner(qwen3(), kernels="reference").backend.compute.names["router"] == "torch"
    half = cpu_runner(qwen3(), max_packed_bytes=0).backend.compute.names
    assert half["experts"] == f"{ours} (2)"  # packed in place, they cost nothing
    assert half["head"] == "torch linear"


def test_without_a_build_torch_computes_and_the_names_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "MISSING", "no compiler")
    runner = cpu_runner(qwen3())
    assert "no compiler" in caplog.text
    names = runner.backend.compute.names
    assert names["missing"] == "no compiler"
    assert names["router"] == "torch"
    assert "qllm" not in " ".join(names.values())
    assert compute.cpu is cpu


class Machine:
    """Our kernels under the names of a machine with AMX."""

    def __init__(self, wrong: bool) -> None:
        self.wrong, self.used = wrong, ""

    def available(self) -> list[str]:
        return ["AMX", "portable", "emulated AMX"]

    def use(self, name: str) -> None:
        self.used = name
        cpu.native.use("emulated AMX" if name == "AMX" else name)

    def linear(self, out: int, x: int, matrix: int, rows: int) -> None:
        cpu.native.linear(out, x, matrix, rows)
        if self.wrong and self.used == "AMX" and rows == 17:
            ctypes.c_uint16.from_address(out + 2 * 80 * 16).value ^= 1 << 9


@pytest.mark.parametrize("wrong", [False, True])
def test_tiles_that_multiply_wrongly_are_not_used(
    wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(wrong)
    try:
        assert cpu.choose(machine) == machine.used == ("portable" if wrong else "AMX")
    finally:
        cpu.native.use(cpu.kind())
    assert ("AMX gives other products than portable" in caplog.text) == wrong
