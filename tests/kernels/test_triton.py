"""Every Triton kernel against plain torch: interpreted on a CPU, compiled where there is a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, apply_rotary_pos_emb

from qllm.kernels import reference
from qllm.kernels.routing import (
    Activation,
    ExpertWeights,
    HeadNorms,
)
from qllm.kernels.tiles import Query, tiles_of
from qllm.kernels.triton import attention, moe, norm, rope
from tests.support.interpret import DEVICES, unwritten
from tests.support.triton_cases import DTYPES, FEW, Noise, cache, close, elsewhere


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
    more=st.sampled_from([0, 0, 1000, 3000]),
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
    more: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Sequences of less than a block of keys, and of more than there are ranges of a block."""
    noise = Noise(seed, device)
    counts = [1 if decode else n for n, _ in rows]
    lengths = [n + before + more for n, (_, before) in zip(counts, rows, strict=True)]
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
    with unwritten():
        attention.attend(q, k, v, tables, tiles, out_TNE=found, **how)
    reference.attend(q, k, v, tables, tiles, out_TNE=wanted, **how)
    assert (found[counts[0]] == 7.0).all(), "a dead token was written"
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
    halves=st.booleans(),
    limit=st.sampled_from([None, 0.7]),
)
def test_rotated_keys_are_written_and_queries_turn_in_place(
    device: str,
    num: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    normed: bool,
    halves: bool,
    limit: float | None,
) -> None:
    noise, (width, width_v) = Noise(num, device), widths
    weights = noise(width, dtype=dtype), noise(width, dtype=dtype)
    norms = HeadNorms(*weights, 1e-6, 1e-2) if normed else None
    q, k = (noise(n, num, width, dtype=dtype).transpose(0, 1) for n in heads)
    v = noise(num, heads[1], width_v, dtype=dtype)
    cos, sin = (noise(num, width // 2 if halves else width, dtype=dtype) for _ in "ab")
    slots = noise.order(12)[:num].long()
    slots[1::3] = -1
    live = slots[slots >= 0]
    pair = (x.transpose(0, 1)[None] for x in (q, k))
    if norms is not None:
        eps = norms.q_eps, norms.k_eps
        pair = (reference.rms_norm(x, w, e) for x, w, e in zip(pair, weights, eps, strict=True))
    wanted_v = v
    if limit is not None:
        pair = (x.clamp(-limit, limit) for x in pair)
        wanted_v = v.clamp(-limit, limit)
    both = (torch.cat((x, x), 1)[None] if halves else x[None] for x in (cos, sin))
    turned = apply_rotary_pos_emb(*pair, *both)
    by_hand_q, by_hand_k = (x[0].transpose(0, 1) for x in turned)
    for kernels in (rope, reference):
        own_q, pages = q.clone(), [noise(12, heads[1], w, dtype=dtype) for w in widths]
        before = [x.clone() for x in pages]
        out = torch.full((num, heads[0], width_v), 7.0, dtype=dtype, device=device)
        kernels.rotate_and_write(own_q, k, v, cos, sin, *pages, slots, out, norms, limit)
        assert (out[slots < 0] == 0).all(), "attention writes nothing there"
        assert (out[slots >= 0] == 7).all()
        close(own_q, by_hand_q)
        close(pages[0][live], by_hand_k[slots >= 0])
        assert torch.equal(pages[1][live], wanted_v[slots >= 0])
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


@DEVICES
@FEW
@given(
    num=st.sampled_from([1, 7, 60]),
    sizes=st.sampled_from([(16, 16), (40, 24), (96, 48)]),
    oss=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_experts_at_other_places_have_the_same_bits(
    device: str, num: int, sizes: tuple[int, int], oss: bool, dtype: torch.dtype, seed: int
) -> None:
    """An id of -1 is no expert, so the experts of a layer can run in any parts."""
    noise, experts = Noise(seed, device), 5
    weights = experts_of(noise, experts, *sizes, oss, dtype)
    places = noise.order(experts + 3)[:experts]
    up, down = weights.up_EFD, weights.down_EDI
    up = elsewhere(up.transpose(1, 2), places).transpose(1, 2) if oss else elsewhere(up, places)
    placed = weights._replace(up_EFD=up, down_EDI=elsewhere(down, places), place_E=places)
    assert placed.num_experts == experts
    assert placed.bytes_per_expert == weights.bytes_per_expert
    x = noise(num, sizes[0], dtype=dtype)
    ids = torch.stack([noise.order(experts)[:2] for _ in range(num)])
    live, hits = (torch.tensor([n], dtype=torch.int32, device=device) for n in (num, 0))
    for kernels in (moe, reference):
        wanted, found = (
            torch.full((num, 2, sizes[0]), 7.0, dtype=dtype, device=device) for _ in range(2)
        )
        routing = kernels.route(ids, live, experts, hits)
        kernels.run_experts(x, weights, routing, 0, experts, wanted)
        for part in (ids % 2 == 0, ids % 2 == 1):
            routing = kernels.route(torch.where(part, ids, -1), live, experts, hits)
            kernels.run_experts(x, placed, routing, 0, experts, found)
        assert torch.equal(found, wanted)


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


def test_ranges_of_decode_are_within_bounds_of_any_number_of_heads() -> None:
    found = [attention._splits(programs) for programs in range(1, 300)]
    assert found[:9] == [32, 32, 32, 32, 16, 16, 16, 16, 8]
    assert set(found[9:]) == {8}


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
@given(num=st.integers(0, 5), width=st.sampled_from([8, 33, 64]), dtype=DTYPES, wide=st.booleans())
def test_rms_norm(device: str, num: int, width: int, dtype: torch.dtype, wide: bool) -> None:
    noise = Noise(num, device)
    x, weight = noise(num, 2 * width, dtype=dtype)[:, :width] * 3, noise(width, dtype=dtype)
    found = norm.rms_norm(x, weight, 1e-6, wide)
    close(found, reference.rms_norm(x, weight, 1e-6, wide))
    module = (GptOssRMSNorm if wide else MixtralRMSNorm)(width, 1e-6).to(device, dtype)
    module.weight.data = weight
    assert torch.equal(reference.rms_norm(x, weight, 1e-6, wide), module(x))
