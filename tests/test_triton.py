"""Every Triton kernel against plain torch: interpreted on a CPU, compiled where there is a GPU."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpret import DEVICES
from transformers.models.mixtral.modeling_mixtral import apply_rotary_pos_emb
from triton.runtime.interpreter import InterpreterBuilder

from qllm.kernels import reference
from qllm.kernels.routing import (
    Activation,
    ExpertWeights,
    HeadNorms,
    Routing,
    Rule,
    RuleKind,
    Sum,
)
from qllm.kernels.tiles import Query, tiles_of
from qllm.kernels.triton import attention, choose, moe, norm, rope, sampling
from qllm.runner import sampler
from qllm.types import SamplingParams

FEW = settings(max_examples=8, deadline=None, phases=[Phase.generate])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """bf16 is rounded twice on the way, and the interpreter rounds towards zero."""
    if found.dtype is torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    elif wanted.numel():
        assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()


class Noise:
    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def order(self, num: int) -> torch.Tensor:
        return torch.randperm(num, generator=self.generator).to(self.device)


def cache(
    noise: Noise,
    lengths: list[int],
    page: int,
    groups: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Pages in a random order, what no sequence owns is NaN."""
    per = max(math.ceil(n / page) for n in lengths)
    pages = noise.order(per * len(lengths) + 1)
    tables = pages[: per * len(lengths)].view(len(lengths), per).to(torch.int32)
    out = []
    for width in widths:
        x = torch.full(
            ((len(pages)) * page, groups, width), math.nan, dtype=dtype, device=noise.device
        )
        for r, n in enumerate(lengths):
            j = torch.arange(n, device=noise.device)
            x[tables[r].long()[j // page] * page + j % page] = noise(n, groups, width, dtype=dtype)
        out.append(x)
    return out, tables


@DEVICES
@FEW
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90)), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 1), (6, 2), (3, 3), (32, 1)]),
    widths=st.sampled_from([(16, 16), (24, 40), (64, 64)]),
    page=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 64]),
    sinks=st.booleans(),
    decode=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_attention(
    device: str,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    widths: tuple[int, int],
    page: int,
    window: int | None,
    sinks: bool,
    decode: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    noise = Noise(seed, device)
    counts = [1 if decode else n for n, _ in rows]
    lengths = [n + before for n, (_, before) in zip(counts, rows, strict=True)]
    (k, v), tables = cache(noise, lengths, page, heads[1], widths, dtype)
    queries, at = [], 0
    for r, n in enumerate(counts):
        queries.append(Query(r, at, lengths[r] - n, n))
        at += n + (r == 0)  # a dead token after the first row
    tiles = tiles_of(queries, at, 16, torch.device(device))
    q = noise(at, heads[0], widths[0], dtype=dtype)
    found, wanted = (
        torch.full((at, heads[0], widths[1]), 7.0, dtype=dtype, device=device) for _ in "ab"
    )
    how = {
        "page_size": page,
        "scale": widths[0] ** -0.5,
        "window": window,
        "sinks_N": noise(heads[0], dtype=dtype) if sinks else None,
    }
    attention.attend(q, k, v, tables, tiles, out_TNE=found, **how)
    reference.attend(q, k, v, tables, tiles, out_TNE=wanted, **how)
    assert (found[counts[0]] == 7.0).all(), "a dead token was written"
    close(found, wanted)


@DEVICES
@pytest.mark.parametrize("rope_width", [16, 8])
@pytest.mark.parametrize("counts", [(1, 1), (5, 1)])
def test_attention_over_latents(device: str, counts: tuple[int, ...], rope_width: int) -> None:
    """MLA: 32 heads of queries over one latent, which is key and value, and one rope part."""
    noise, lengths, num = Noise(3, device), [33, 70], sum(counts)
    (c, kr), tables = cache(noise, lengths, 16, 1, (128, rope_width), torch.float32)
    q, qr = noise(num, 32, 128), noise(num, 32, rope_width)
    queries = [Query(0, 0, 33 - counts[0], counts[0]), Query(1, counts[0], 69, 1)]
    tiles = tiles_of(queries, num, 16, torch.device(device))
    found, wanted = (torch.zeros(num, 32, 128, device=device) for _ in "ab")
    for run, out in ((attention.attend, found), (reference.attend, wanted)):
        run(
            q, c, c, tables, tiles, page_size=16, scale=0.1,
            q_rope_TNF=qr, k_rope_SF=kr[:, 0], out_TNE=out,
        )  # fmt: skip
    close(found, wanted)


@DEVICES
@FEW
@given(
    num=st.integers(0, 9),
    groups=st.integers(1, 5),
    widths=st.sampled_from([(16, 24), (5, 3)]),
    dtype=DTYPES,
)
def test_kv_is_written_to_its_slots(
    device: str, num: int, groups: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    noise = Noise(num, device)
    k, v = (noise(groups, num, w, dtype=dtype).transpose(0, 1) for w in widths)
    slots = noise.order(12)[:num].long()
    slots[1::3] = -1
    found = [noise(12, groups, w, dtype=dtype) for w in widths]
    wanted, by_hand = [x.clone() for x in found], [x.clone() for x in found]
    attention.write(k, v, *found, slots)
    reference.write(k, v, *wanted, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            by_hand[0][slot], by_hand[1][slot] = k[t], v[t]
    for a, b, c in zip(found, wanted, by_hand, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


@DEVICES
@FEW
@given(
    num=st.integers(0, 9),
    heads=st.sampled_from([(4, 1), (6, 3), (2, 2)]),
    widths=st.sampled_from([(16, 16), (6, 5), (128, 128)]),
    dtype=DTYPES,
    normed=st.booleans(),
)
def test_rotated_keys_are_written_and_queries_turn_in_place(
    device: str,
    num: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    normed: bool,
) -> None:
    noise, (width, width_v) = Noise(num, device), widths
    weights = noise(width, dtype=dtype), noise(width, dtype=dtype)
    norms = HeadNorms(*weights, 1e-6, 1e-2) if normed else None
    q, k = (noise(n, num, width, dtype=dtype).transpose(0, 1) for n in heads)
    v = noise(num, heads[1], width_v, dtype=dtype)
    cos, sin = (noise(num, width, dtype=dtype) for _ in "ab")
    slots = noise.order(12)[:num].long()
    slots[1::3] = -1
    live = slots[slots >= 0]
    pair = (x.transpose(0, 1)[None] for x in (q, k))
    if norms is not None:
        eps = norms.q_eps, norms.k_eps
        pair = (reference.rms_norm(x, w, e) for x, w, e in zip(pair, weights, eps, strict=True))
    turned = apply_rotary_pos_emb(*pair, cos[None], sin[None])
    by_hand_q, by_hand_k = (x[0].transpose(0, 1) for x in turned)
    for kernels in (rope, reference):
        own_q, pages = q.clone(), [noise(12, heads[1], w, dtype=dtype) for w in widths]
        before = [x.clone() for x in pages]
        out = torch.full((num, heads[0], width_v), 7.0, dtype=dtype, device=device)
        kernels.rotate_and_write(own_q, k, v, cos, sin, *pages, slots, out, norms)
        assert (out[slots < 0] == 0).all(), "attention writes nothing there"
        assert (out[slots >= 0] == 7).all()
        close(own_q, by_hand_q)
        close(pages[0][live], by_hand_k[slots >= 0])
        assert torch.equal(pages[1][live], v[slots >= 0])
        rest = torch.ones(12, dtype=torch.bool, device=device)
        rest[live] = False
        assert all(torch.equal(x[rest], y[rest]) for x, y in zip(pages, before, strict=True))


def experts_of(
    noise: Noise, num: int, width: int, inner: int, oss: bool, dtype: torch.dtype
) -> ExpertWeights:
    up, down = (
        noise(num, 2 * inner, width, dtype=dtype) * 0.2,
        noise(num, width, inner, dtype=dtype) * 0.2,
    )
    if not oss:
        return ExpertWeights(up, down, None, None, False, Activation.SILU)
    up = up.transpose(1, 2).contiguous().transpose(1, 2)  # as it is stored: [E, H, 2I]
    biases = noise(num, 2 * inner, dtype=dtype), noise(num, width, dtype=dtype)
    return ExpertWeights(up, down, *biases, True, Activation.GPT_OSS)


@DEVICES
@FEW
@given(
    num=st.integers(1, 70),
    live=st.floats(0, 1),
    experts=st.sampled_from([2, 5, 8]),
    top_k=st.integers(1, 2),
    sizes=st.sampled_from([(16, 16), (40, 24), (96, 48)]),
    oss=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_experts(
    device: str,
    num: int,
    live: float,
    experts: int,
    top_k: int,
    sizes: tuple[int, int],
    oss: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    noise = Noise(seed, device)
    weights = experts_of(noise, experts, *sizes, oss, dtype)
    x, gates = noise(num, sizes[0], dtype=dtype), noise(num, top_k).softmax(1)
    ids = torch.stack([noise.order(experts)[:top_k] for _ in range(num)])
    num_live = torch.tensor([int(live * num)], dtype=torch.int32, device=device)
    outs = []
    for kernels in (moe, reference):
        hits = torch.tensor([5], dtype=torch.int32, device=device)
        routing = kernels.route(ids, num_live, experts, hits)
        wanted_counts = torch.bincount(ids[: int(num_live)].flatten(), minlength=experts)
        assert routing.counts_E.tolist() == wanted_counts.tolist()
        assert int(hits) == 5 + int((wanted_counts > 0).sum())
        slots = torch.full((num, top_k, sizes[0]), math.nan, dtype=dtype, device=device)
        cut = experts // 2
        kernels.run_experts(x, weights, routing, cut, experts, slots)  # ranges in any order
        first = slots.clone()
        kernels.run_experts(x, weights, routing, 0, cut, slots)
        is_late = (ids >= cut) & (torch.arange(num, device=device) < num_live)[:, None]
        assert torch.equal(first[is_late], slots[is_late]), "a range touched others' slots"
        assert not first[is_late].isnan().any()
        assert first[~is_late].isnan().all()
        out = torch.full((num, sizes[0]), math.nan, dtype=dtype, device=device)
        kernels.combine(slots, gates, num_live, out)
        assert (out[int(num_live) :] == 0).all()
        outs.append(out)
    close(*outs)


def sorted_by_hand(ids: torch.Tensor, live: int, experts: int, rows: int) -> list[list[int]]:
    """Counts, order, starts of tiles, and expert, row and end of each tile."""
    top_k, slots = ids.shape[1], ids[:live].flatten().tolist()
    order = sorted(range(live * top_k), key=lambda slot: (slots[slot], slot))
    counts = [slots.count(e) for e in range(experts)]
    starts, tiles, at = [0], [], 0
    for e, count in enumerate(counts):
        tiles += [(e, at + i, at + count) for i in range(0, count, rows)]
        starts.append(len(tiles))
        at += count
    return [counts, order, starts, *(list(column) for column in zip(*tiles, strict=True))]


def check_sorted(routing: Routing, live: int, experts: int, rows: int) -> None:
    wanted = sorted_by_hand(routing.ids_TK.cpu(), live, experts, rows)
    for found, by_hand in zip(routing[1:], wanted, strict=False):
        assert found[: len(by_hand)].tolist() == by_hand


@DEVICES
@FEW
@given(
    num=st.sampled_from([1, 2, 7, 33, 64, 65, 100]),
    live=st.floats(0, 1),
    sizes=st.sampled_from([(4, 2), (5, 5), (16, 2), (60, 4), (128, 8)]),
    rule=st.sampled_from(
        [*(Rule(kind, 0.02) for kind in RuleKind), Rule(RuleKind.SPARSE_MIXER, 1)]
    ),
    wide=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_experts_are_chosen_and_sorted(
    device: str,
    num: int,
    live: float,
    sizes: tuple[int, int],
    rule: Rule,
    wide: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    noise, (experts, top_k) = Noise(seed, device), sizes
    # distinct in bf16 too: who is first of equals is torch's secret
    steps = torch.stack([noise.order(experts) for _ in range(num)])
    logits = ((steps - experts // 3) / 16).to(dtype)
    num_live = torch.tensor([int(live * num)], dtype=torch.int32, device=device)
    kind = torch.float32 if wide else dtype
    results = []
    for kernels in (choose, reference):
        hits = torch.tensor([5], dtype=torch.int32, device=device)
        routing, weights = kernels.choose(logits, rule, top_k, num_live, hits, kind)
        assert weights.dtype is kind
        results.append((routing.ids_TK.long(), weights, int(hits), routing.counts_E.tolist()))
        if kernels is choose:
            rows = moe.tile_rows(num * top_k, experts)
            check_sorted(routing, int(num_live), experts, rows)
    (ids, weights, *rest), (wanted_ids, wanted, *wanted_rest) = results
    assert torch.equal(ids[: int(num_live)], wanted_ids[: int(num_live)])
    close(weights, wanted)
    assert rest == wanted_rest


def test_the_sparse_mixer_is_that_of_transformers() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    noise = Noise(2, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        logits = noise(40, 16, dtype=dtype)
        wanted, wanted_ids = sparsemixer(logits, jitter_eps=0.1, training=False, top_k=2)
        live, hits = (torch.tensor([n], dtype=torch.int32) for n in (40, 0))
        for kernels in (choose, reference):
            rule = Rule(RuleKind.SPARSE_MIXER, 0.2)
            routing, weights = kernels.choose(logits, rule, 2, live, hits, dtype)
            is_same = (routing.ids_TK == wanted_ids).all(1)
            assert is_same.sum() >= 38  # of equals in bf16 torch takes any
            close(weights[is_same], wanted[is_same])


@DEVICES
@pytest.mark.parametrize("num", [4, 70])
def test_a_token_of_broken_logits_gets_experts_and_broken_weights(device: str, num: int) -> None:
    """Its ids must be whole, or it would break the order of the others' slots."""
    logits = Noise(3, device)(num, 8)
    logits[1, 5] = math.nan
    logits[2] = math.nan
    logits[3] = -math.inf
    live, hits = (torch.tensor([n], dtype=torch.int32, device=device) for n in (num, 0))
    rule = Rule(RuleKind.RENORMALISED)
    routing, weights = choose.choose(logits, rule, 3, live, hits, torch.float32)
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in routing.ids_TK.tolist())
    assert weights[1:3].isnan().all()
    assert not weights[0].isnan().any()
    check_sorted(routing, num, 8, moe.tile_rows(num * 3, 8))


@DEVICES
@FEW
@given(
    num=st.integers(0, 5),
    width=st.sampled_from([8, 40, 1100]),
    live=st.integers(0, 5),
    multiplier=st.sampled_from([None, 0.22]),
    shared=st.sampled_from(["no", "yes", "gated"]),
    dtype=DTYPES,
)
def test_what_experts_give_is_added(
    device: str,
    num: int,
    width: int,
    live: int,
    multiplier: float | None,
    shared: str,
    dtype: torch.dtype,
) -> None:
    noise = Noise(num, device)
    slots, weights = noise(num, 2, width, dtype=dtype), noise(num, 2)
    residual = noise(num, width + 3, dtype=dtype)[:, :width]
    add = Sum(
        residual,
        multiplier,
        None if shared == "no" else noise(num, width, dtype=dtype),
        noise(num, 1, dtype=dtype) if shared == "gated" else None,
    )
    num_live = torch.tensor([live], dtype=torch.int32, device=device)
    found, wanted = (torch.full((num, width), math.nan, device=device).to(dtype) for _ in "ab")
    moe.combine(slots, weights, num_live, found, add)
    reference.combine(slots, weights, num_live, wanted, add)
    close(found, wanted)
    if shared == "no":
        assert torch.equal(found[live:], residual[live:])


@DEVICES
@FEW
@given(
    num=st.integers(0, 5),
    width=st.sampled_from([8, 40, 1100]),
    multiplier=st.sampled_from([None, 0.22]),
    dtype=DTYPES,
)
def test_a_sum_is_kept_and_normed(
    device: str, num: int, width: int, multiplier: float | None, dtype: torch.dtype
) -> None:
    noise = Noise(num, device)
    residual, x = noise(num, 2 * width, dtype=dtype)[:, ::2].contiguous(), noise(num, width + 8)
    x = x.to(dtype)[:, :width]
    given_ = residual, x, multiplier, noise(width, dtype=dtype), 1e-6
    found, wanted = norm.add_rms_norm(*given_), reference.add_rms_norm(*given_)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@DEVICES
@FEW
@given(num=st.integers(0, 5), width=st.sampled_from([8, 40, 1100]), dtype=DTYPES)
def test_gates_times_ups(device: str, num: int, width: int, dtype: torch.dtype) -> None:
    x = Noise(num, device)(num, 2 * width, dtype=dtype)
    close(norm.silu_mul(x), reference.silu_mul(x))


def test_tiles_of_an_expert_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Launch:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    noise = Noise(1, "cpu")
    weights = experts_of(noise, 2, 160, 128, False, torch.float32)
    ids, one = torch.zeros(40, 1, dtype=torch.int64), torch.tensor([40], dtype=torch.int32)
    routing = moe.route(ids, one, 2, one.clone())
    monkeypatch.setattr(moe, "_up", Launch())
    monkeypatch.setattr(moe, "_down", Launch())
    moe.run_experts(noise(40, 160), weights, routing, 0, 2, torch.zeros(40, 1, 160))
    tiles = moe.max_tiles(40, 2, moe.tile_rows(40, 2))
    assert grids == [(tiles, 4), (5, tiles)]  # 128 and 160 columns in blocks of 32
    assert tiles not in (4, 5)


@DEVICES
def test_slots_are_sorted_by_expert_then_token(device: str) -> None:
    noise = Noise(1, device)
    ids = torch.stack([noise.order(6)[:3] for _ in range(50)])
    one = torch.tensor([50], dtype=torch.int32, device=device)
    routing = moe.route(ids, one, 6, one.clone())
    assert routing.order_S.tolist() == ids.flatten().argsort(stable=True).tolist()
    rows = moe.tile_rows(150, 6)
    counts, starts = routing.counts_E.tolist(), routing.tile_start_E.tolist()
    place = 0
    for e, count in enumerate(counts):
        assert starts[e + 1] - starts[e] == math.ceil(count / rows)
        for i, tile in enumerate(range(starts[e], starts[e + 1])):
            assert routing.tile_expert[tile] == e
            assert routing.tile_row[tile] == place + i * rows
            assert routing.tile_end[tile] == place + count
        place += count


@DEVICES
@FEW
@given(num=st.integers(0, 5), width=st.sampled_from([8, 33, 64]), dtype=DTYPES)
def test_rms_norm(device: str, num: int, width: int, dtype: torch.dtype) -> None:
    noise = Noise(num, device)
    x, weight = noise(num, 2 * width, dtype=dtype)[:, :width] * 3, noise(width, dtype=dtype)
    close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


# -- sampling


def columns(
    params: Sequence[SamplingParams], seeds: list[int], positions: list[int], device: str
) -> tuple[torch.Tensor, ...]:
    def of(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        of([p.temperature for p in params], torch.float64),
        of([p.top_k for p in params], torch.int32),
        of([p.top_p for p in params], torch.float64),
        of([p.min_p for p in params], torch.float64),
        of(seeds, torch.int64),
        of(positions, torch.int64),
    )


def sampled(
    kernels: Any, logits: torch.Tensor, *columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((len(logits),), -1, device=logits.device)
    peaks = torch.zeros(len(logits), device=logits.device)
    kernels.sample(logits, *columns, tokens, peaks)
    return tokens, peaks


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 4, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.4]),
    seed=st.integers(0, 2**62),
)


@DEVICES
@FEW
@given(
    params=st.lists(PARAMS, min_size=1, max_size=3),
    vocabulary=st.sampled_from([5, 97, 130]),
    position=st.integers(0, 2**40),
    coarse=st.booleans(),
    kept=st.sampled_from([4, 16, sampling.KEPT]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_the_device_samples_what_the_cpu_samples(
    device: str,
    params: list[SamplingParams],
    vocabulary: int,
    position: int,
    coarse: bool,
    kept: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Whether the tokens that stay are few enough to be copied or not."""
    logits = Noise(seed, device)(len(params), vocabulary, dtype=dtype) * 3
    if coarse:  # many ties
        logits = logits.round()
    positions = [position + i for i in range(len(params))]
    cpu = sampler.Sampler()
    for i, p in enumerate(params):
        cpu.add(i, p, [])
    rows = list(range(len(params)))
    wanted = [s.token_id for s in cpu.sample(logits, rows, positions, [[]] * len(rows))]
    given_columns = columns(params, [p.seed or 0 for p in params], positions, device)
    for kernels in (sampling, reference):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "KEPT", kept)
            tokens, peaks = sampled(kernels, logits, *given_columns)
        assert tokens.tolist() == wanted
        assert torch.equal(peaks, logits.float().max(1).values)


def test_a_long_row_is_read_as_often_as_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of the docstring, over a row of three blocks."""
    reads = [0]
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, *how: Any) -> Any:
        reads[0] += pointers.data.size > 1
        return load(self, pointers, *how)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    logits = Noise(5, "cpu")(1, 9000)
    passes = []
    for how in ({"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}):
        params = [SamplingParams(**{"temperature": 0.8, **how})]
        reads[0] = 0
        sampled(sampling, logits, *columns(params, [3], [7], "cpu"))
        passes.append(reads[0])
    searches = 8 * -(-9000 // 1024)  # in blocks of 1024; the others in blocks of 4096
    assert passes == [3, 3 * 3, 6 * 3 + 8 + 2, 3 * 3 + searches]


@DEVICES
@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, 2**63 - 1])
def test_there_is_one_random_number(device: str, seed: int) -> None:
    positions = [0, 1, 77, 2**33 + 5]
    column = torch.tensor([seed] * 4, device=device), torch.tensor(positions, device=device)
    assert reference.uniforms(*column).tolist() == [sampler.uniform(seed, p) for p in positions]


@DEVICES
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_broken_logits_show_in_the_peak(device: str, wrong: float) -> None:
    logits = Noise(0, device)(3, 50)
    logits[1, 20] = wrong
    given_columns = columns([SamplingParams(temperature=1.0)] * 3, [1, 2, 3], [5, 5, 5], device)
    for kernels in (sampling, reference):
        _, peaks = sampled(kernels, logits, *given_columns)
        assert peaks.isfinite().tolist() == [True, False, True]
