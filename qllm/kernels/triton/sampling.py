"""Sampling on the device: one program per row, with the random numbers of `qllm.runner.sampler`.

The order of operations is that of `qllm.runner.sampler`: temperature, min_p, top_k, top_p, then the
inverse CDF in token-id order with the one number that Philox-4x32-10 gives for (seed, position).
Everything is done by passes over the row in blocks, in one fixed order and in fp64, so the same
logits give the same token in any batch, eager or replayed. Sums are taken block by block where
the CPU adds one token after the other: a number within about 1e-16 of a boundary may go the other
way.

Logits are seen as ordered 32-bit integers. Passes over the row:

    greedy           1
    temperature      3
    top_k            6: four count a digit of 8 bits each, which finds the K-th logit; one copies
                     the at most `KEPT` tokens that stay, and all else, top_p too, is done on these
    top_p alone     11: eight weigh 16 bounds each, which finds the last logit that stays
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEPT = 1024
"""Most tokens that are copied; more equals of the K-th, or a larger K, are left where they are."""


@triton.jit
def _logits(row, at, num, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < num, other=float("-inf")).to(tl.float32) + 0.0, i


@triton.jit
def _key(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _weight(x, peak, heat, min_p):
    w = tl.exp((x.to(tl.float64) - peak) / heat)
    return tl.where(w < min_p, 0.0, w)


@triton.jit
def _uniform(seed, position):
    zero = (position * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    )
    fraction = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    return fraction.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _kth(row, num, top_k, BLOCK: tl.constexpr):
    """Key of the K-th largest logit, the lowest if there are fewer; and how many reach it."""
    d = tl.arange(0, 256)
    prefix, above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    reached = above
    for digit in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for at in range(0, num, BLOCK):
            x, i = _logits(row, at, num, BLOCK)
            key = _key(x) + 2147483648
            is_in = (i < num) & ((key >> (32 - 8 * digit)) == prefix)
            counts += tl.histogram(((key >> (24 - 8 * digit)) & 255).to(tl.int32), 256, is_in)
        at_least = above + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        best = tl.max(tl.where(at_least >= top_k, d, 0), 0)
        reached = tl.sum(tl.where(d == best, at_least, 0), 0)
        above = reached - tl.sum(tl.where(d == best, counts, 0), 0)
        prefix = prefix * 256 + best
    return prefix - 2147483648, reached


@triton.jit
def _draw(
    row, num, floor, peak, heat, min_p, top_p, uniform,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Index of the token that is drawn, of those with keys from `floor` on; -1 if of no weight."""
    bound, j = tl.full([], 0, tl.int64) + floor, tl.arange(0, 16)
    total = tl.full([], 0.0, tl.float64)
    ties = tl.full([], 2**31 - 1, tl.int64)  # tokens of the key `bound` that stay
    if top_p < 1.0:
        step = tl.full([], 1 << 28, tl.int64)
        for digit in range(8):  # the largest key that top_p of the weight reaches
            bounds = bound + j * step
            masses = tl.zeros([16], tl.float64)
            for at in range(0, num, SEARCH):
                x, i = _logits(row, at, num, SEARCH)
                w = tl.where(i < num, _weight(x, peak, heat, min_p), 0.0)
                is_in = _key(x)[:, None] >= bounds[None, :]
                masses += tl.sum(tl.where(is_in, w[:, None], 0.0), 0)
            if digit == 0:
                total = tl.sum(tl.where(j == 0, masses, 0.0), 0)
            best = tl.max(tl.where(masses >= top_p * total, j, 0), 0)
            bound += best * step
            step = step // 16
        above = tl.full([], 0.0, tl.float64)
        each = tl.full([], 0.0, tl.float64)
        equal = tl.full([], 0, tl.int64)
        for at in range(0, num, BLOCK):
            x, i = _logits(row, at, num, BLOCK)
            k, w = _key(x), tl.where(i < num, _weight(x, peak, heat, min_p), 0.0)
            above += tl.sum(tl.where(k > bound, w, 0.0), 0)
            equal += tl.sum(((k == bound) & (w > 0)).to(tl.int64), 0)
            each = tl.maximum(each, tl.max(tl.where(k == bound, w, 0.0), 0))
        equal = tl.maximum(equal, 1)
        needed = tl.ceil((top_p * total - above) / tl.where(each > 0, each, 1.0)).to(tl.int64)
        ties = tl.minimum(tl.maximum(needed, 1), equal)
        total = above + each * ties.to(tl.float64)
    else:
        for at in range(0, num, BLOCK):
            x, i = _logits(row, at, num, BLOCK)
            w = tl.where(i < num, _weight(x, peak, heat, min_p), 0.0)
            total += tl.sum(tl.where(_key(x) >= bound, w, 0.0), 0)
    target = uniform * total
    before = tl.full([], 0.0, tl.float64)
    num_ties = tl.full([], 0, tl.int64)
    drawn, last = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    for at in range(0, num, BLOCK):
        x, i = _logits(row, at, num, BLOCK)
        k, w = _key(x), tl.where(i < num, _weight(x, peak, heat, min_p), 0.0)
        is_tie = (k == bound) & (i < num)
        nth = num_ties + tl.cumsum(is_tie.to(tl.int64), 0)
        w = tl.where((k > bound) | (is_tie & (nth <= ties)), w, 0.0)
        num_ties += tl.sum(is_tie.to(tl.int64), 0)
        sums = before + tl.cumsum(w, 0)
        hit = tl.min(tl.where((sums > target) & (w > 0), i, num), 0)
        drawn = tl.where((drawn < 0) & (hit < num), hit, drawn)
        last = tl.maximum(last, tl.max(tl.where(w > 0, i, -1), 0))
        before += tl.sum(w, 0)
    return tl.where(drawn < 0, last, drawn)


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, peaks, kept, kept_ids,
    logits_b, V: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * logits_b
    num = V
    peak = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for at in range(0, V, BLOCK):
        x, i = _logits(row, at, num, BLOCK)
        broken += tl.sum((x != x).to(tl.int32), 0)
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, i, V), 0)
        best = tl.where(top > peak, first, best)
        peak = tl.maximum(peak, top)
    tl.store(peaks + b, tl.where(broken > 0, float("nan"), peak))
    tl.store(tokens + b, best.to(tl.int64))
    heat = tl.load(temperatures + b)
    is_broken = (broken > 0) | (peak == float("-inf")) | (peak == float("inf"))
    if (heat > 0) & (is_broken == 0):
        top_k, top_p, min_p = tl.load(top_ks + b), tl.load(top_ps + b), tl.load(min_ps + b)
        uniform = _uniform(tl.load(seeds + b), tl.load(positions + b))
        top = peak.to(tl.float64)
        floor = tl.full([], -(2**31), tl.int64)
        reached = tl.full([], V, tl.int32)
        if top_k > 0:
            floor, reached = _kth(row, num, top_k, BLOCK)
        if reached <= KEPT:
            mine, my_ids = kept + b * KEPT, kept_ids + b * KEPT
            found = tl.full([], 0, tl.int32)
            for at in range(0, V, BLOCK):
                x, i = _logits(row, at, num, BLOCK)
                stays = ((_key(x) >= floor) & (i < V)).to(tl.int32)
                place = found + tl.cumsum(stays, 0) - 1
                tl.store(mine + place, x, mask=stays > 0)
                tl.store(my_ids + place, i, mask=stays > 0)
                found += tl.sum(stays, 0)
            tl.debug_barrier()  # other threads read what this one has stored
            at = _draw(mine, found, floor, top, heat, min_p, top_p, uniform, KEPT, KEPT)
            if at >= 0:
                tl.store(tokens + b, tl.load(my_ids + at).to(tl.int64))
        else:
            at = _draw(row, num, floor, top, heat, min_p, top_p, uniform, BLOCK, SEARCH)
            if at >= 0:
                tl.store(tokens + b, at.to(tl.int64))


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    tokens_B: Tensor,
    peaks_B: Tensor,
) -> None:
    """Choose one token per row.

    Args:
        logits_BV: Raw logits of any float dtype, rows contiguous.
        temperature_B: fp64; 0 is greedy, where the lowest id wins a tie.
        top_k_B: int32; 0 keeps all.
        top_p_B: fp64; 1 keeps all.
        min_p_B: fp64; 0 keeps all.
        seeds_B: int64.
        positions_B: int64; index in the whole sequence of the token to choose.
        tokens_B: The answer, int64.
        peaks_B: fp32, the largest logit of the row, NaN if one is NaN: not finite is broken.
    """
    num, vocabulary = logits_BV.shape
    if num == 0:
        return
    block = min(4096, triton.next_power_of_2(vocabulary))
    kept = torch.empty((num, KEPT), dtype=torch.float32, device=logits_BV.device)
    ids = torch.empty((num, KEPT), dtype=torch.int32, device=logits_BV.device)
    _sample[(num,)](
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seeds_B, positions_B, tokens_B,
        peaks_B, kept, ids, logits_BV.stride(0),
        V=vocabulary, BLOCK=block, SEARCH=min(1024, block), KEPT=KEPT, num_warps=8,
    )  # fmt: skip
