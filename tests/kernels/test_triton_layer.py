"""Choice of experts, sums and activations against plain torch: see test_triton.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qllm.kernels import reference
from qllm.kernels.routing import (
    Activation,
    ExpertWeights,
    Groups,
    Routing,
    Rule,
    RuleKind,
    SharedWeights,
    Sum,
)
from qllm.kernels.triton import choose, moe, norm
from tests.support.interpret import DEVICES
from tests.support.triton_cases import DTYPES, FEW, Noise, close


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
        [*(Rule(RuleKind(i), 0.02) for i in range(3)), Rule(RuleKind.SPARSE_MIXER, 1)]
    ),
    shared=st.sampled_from([0, 0, 1, 2]),
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
    shared: int,
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
    check_choice(logits, rule, top_k, num_live, kind, shared)


def check_choice(
    logits: torch.Tensor,
    rule: Rule,
    top_k: int,
    num_live: torch.Tensor,
    kind: torch.dtype,
    shared: int,
) -> None:
    (num, experts), live = logits.shape, int(num_live)
    results = []
    for kernels in (choose, reference):
        hits = torch.tensor([5], dtype=torch.int32, device=logits.device)
        routing, weights = kernels.choose(logits, rule, top_k, num_live, hits, kind, shared)
        assert weights.dtype is kind
        assert weights.shape == (num, top_k)
        ids, counts = routing.ids_TK.long()[:live], routing.counts_E.tolist()
        assert ids[:, top_k:].tolist() == [list(range(experts, experts + shared))] * live
        assert counts[experts:] == [live] * shared
        assert int(hits) == 5 + sum(count > 0 for count in counts[:experts])
        results.append((ids, weights[:live], counts))
        if kernels is choose:
            rows = moe.tile_rows(num * (top_k + shared), experts)
            check_sorted(routing, live, experts + shared, rows)
    (ids, weights, counts), (wanted_ids, wanted, wanted_counts) = results
    assert torch.equal(ids, wanted_ids)
    close(weights.to(logits.dtype), wanted.to(logits.dtype))  # wide ones are rounded, too
    assert counts == wanted_counts


@DEVICES
@FEW
@given(
    num=st.sampled_from([1, 7, 40, 65]),
    live=st.floats(0, 1),
    sizes=st.sampled_from(
        [(8, 4, 2, 1), (16, 4, 4, 2), (60, 4, 3, 2), (64, 8, 8, 4), (24, 6, 1, 1)]
    ),
    normed=st.booleans(),
    shared=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_groups_are_chosen_first(
    device: str,
    num: int,
    live: float,
    sizes: tuple[int, int, int, int],
    normed: bool,
    shared: int,
    seed: int,
) -> None:
    noise, (experts, top_k, groups, num_open) = Noise(seed, device), sizes
    how = Groups(noise(experts) * 0.3, groups, num_open, normed, 2.5)
    num_live = torch.tensor([int(live * num)], dtype=torch.int32, device=device)
    rule = Rule(RuleKind.SIGMOID, groups=how)
    check_choice(noise(num, experts), rule, top_k, num_live, torch.float32, shared)


def test_the_choice_of_groups_is_that_of_transformers() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    from qllm.cuda.experts import known_router

    noise, live = Noise(4, "cpu"), torch.tensor([50], dtype=torch.int32)
    sizes = {"n_routed_experts": 32, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}
    for normed in (False, True):
        config = DeepseekV3Config(hidden_size=40, norm_topk_prob=normed, **sizes)
        module = DeepseekV3TopkRouter(config)
        module.weight.data = noise(32, 40)
        module.e_score_correction_bias = noise(32) * 0.5
        x = noise(50, 40)
        _, wanted, wanted_ids = module(x)
        router = known_router(module)
        assert router is not None
        for kernels in (choose, reference):
            given_ = router.logits(x), router.rule, router.top_k, live, live.clone(), router.dtype
            routing, weights = kernels.choose(*given_)
            ids, order = routing.ids_TK.long().sort(1)
            wanted_sorted, wanted_order = wanted_ids.sort(1)
            assert torch.equal(ids, wanted_sorted)
            close(weights.gather(1, order), wanted.gather(1, wanted_order))


@DEVICES
@pytest.mark.parametrize("num", [3, 70])
def test_a_token_without_numbers_gets_experts_of_open_groups(device: str, num: int) -> None:
    logits = Noise(3, device)(num, 8)
    logits[1, 5], logits[2] = math.nan, math.nan
    live, hits = (torch.tensor([n], dtype=torch.int32, device=device) for n in (num, 0))
    correction = torch.tensor([0.0, -math.inf] * 4, device=device)
    rule = Rule(RuleKind.SIGMOID, groups=Groups(correction, 4, 2, True, 2.5))
    routing, weights = choose.choose(logits, rule, 4, live, hits, torch.float32, 1)
    assert all(len(set(row)) == 5 and set(row) <= set(range(9)) for row in routing.ids_TK.tolist())
    assert weights[1:3].isnan().all()
    assert not weights[0].isnan().any()
    check_sorted(routing, num, 9, moe.tile_rows(num * 5, 8))


@DEVICES
@pytest.mark.parametrize("shared", [1, 3])
@FEW
@given(
    num=st.integers(1, 70),
    live=st.floats(0.5, 1),
    sizes=st.sampled_from([(16, 16), (40, 24), (96, 48)]),
    gated=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_shared_experts_run_beside_the_others(
    device: str,
    num: int,
    live: float,
    shared: int,
    sizes: tuple[int, int],
    gated: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """One after the other, as a dense MLP of their width would."""
    noise, (width, inner), top_k = Noise(seed, device), sizes, 2
    up, down = (
        noise(4, 2 * inner, width, dtype=dtype) * 0.2,
        noise(4, width, inner, dtype=dtype) * 0.2,
    )
    wide = SharedWeights(
        noise(2 * shared * inner, width, dtype=dtype) * 0.2,
        noise(width, shared * inner, dtype=dtype) * 0.2,
    )
    weights = ExpertWeights(up, down, None, None, False, Activation.SILU)
    x, residual = noise(num, width, dtype=dtype), noise(num, width, dtype=dtype)
    gate = noise(num, 1, dtype=dtype) if gated else None
    num_live = torch.tensor([int(live * num)], dtype=torch.int32, device=device)
    logits, rule = noise(num, 4), Rule(RuleKind.RENORMALISED)
    outs = []
    for kernels, own in ((moe, None), (moe, wide), (reference, None), (reference, wide)):
        w, count = weights._replace(shared=own), 0 if own is None else shared
        chooses = choose if kernels is moe else reference
        given_ = logits, rule, top_k, num_live, num_live.clone(), torch.float32, count
        routing, gates = chooses.choose(*given_)
        slots = torch.full((num, top_k + count, width), math.nan, dtype=dtype, device=device)
        kernels.run_experts(x, w, routing, 0, 4 + count, slots)
        both = (x.float() @ wide.up_FD.float().t()).to(dtype)
        dense = reference.silu_mul(both).float() @ wide.down_DF.float().t()
        dense[int(num_live) :] = 0
        out = torch.full((num, width), math.nan, dtype=dtype, device=device)
        add = Sum(residual, None, dense.to(dtype) if own is None else None, gate)
        kernels.combine(slots, gates, num_live, out, add)
        outs.append(out)
    for out in outs[1:]:
        close(out, outs[0])


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
    for in_fp32 in (False, True):
        found = norm.add_rms_norm(*given_, in_fp32)
        wanted = reference.add_rms_norm(*given_, in_fp32)
        for a, b in zip(found, wanted, strict=True):
            close(a.to(dtype), b.to(dtype))
        assert found[2].dtype is (torch.float32 if in_fp32 else dtype)
        assert torch.equal(found[2].to(dtype), found[1])


@DEVICES
@FEW
@given(num=st.integers(0, 5), width=st.sampled_from([8, 40, 1100]), dtype=DTYPES)
def test_gates_times_ups(device: str, num: int, width: int, dtype: torch.dtype) -> None:
    x = Noise(num, device)(num, 2 * width, dtype=dtype)
    close(norm.silu_mul(x), reference.silu_mul(x))
