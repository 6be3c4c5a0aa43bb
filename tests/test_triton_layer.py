"""Choice of experts, sums and activations against plain torch: see test_triton.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpret import DEVICES
from test_triton import DTYPES, FEW, Noise, close

from qllm.kernels import reference
from qllm.kernels.routing import Routing, Rule, RuleKind, Sum
from qllm.kernels.triton import choose, moe, norm


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
    close(weights.to(dtype), wanted.to(dtype))  # wide ones are rounded on the way, too
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
    wide=st.booleans(),
)
def test_a_sum_is_kept_and_normed(
    device: str, num: int, width: int, multiplier: float | None, dtype: torch.dtype, wide: bool
) -> None:
    noise = Noise(num, device)
    residual, x = noise(num, 2 * width, dtype=dtype)[:, ::2].contiguous(), noise(num, width + 8)
    x = x.to(dtype)[:, :width]
    given_ = residual, x, multiplier, noise(width, dtype=dtype), 1e-6, wide
    found, wanted = norm.add_rms_norm(*given_), reference.add_rms_norm(*given_)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@DEVICES
@FEW
@given(num=st.integers(0, 5), width=st.sampled_from([8, 40, 1100]), dtype=DTYPES)
def test_gates_times_ups(device: str, num: int, width: int, dtype: torch.dtype) -> None:
    x = Noise(num, device)(num, 2 * width, dtype=dtype)
    close(norm.silu_mul(x), reference.silu_mul(x))
