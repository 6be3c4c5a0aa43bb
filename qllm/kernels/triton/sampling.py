"""Sampling on the device: one program per row, with the random numbers of `qllm.runner.sampler`.

The order of operations is that of `qllm.runner.sampler`: temperature, min_p, top_k, top_p, then the
inverse CDF in token-id order with the one number that Philox-4x32-10 gives for (seed, position).
Everything is done by passes over the row in blocks, in one fixed order and in fp64, so the same
logits give the same token in any batch, eager or replayed. Sums are taken block by block where
the CPU adds one token after the other: a number within about 1e-16 of a boundary may go the other
way.

top_k and top_p search for their threshold by halving the range of logits, seen as ordered 32-bit
integers: 32 passes. Rows that ask for neither take none of them.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _logits(row, at, V: tl.constexpr, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32) + 0.0, i


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
def _at_least(row, key, peak, heat, min_p, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens and weight at or above a key, of those at or above `floor`."""
    count = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.float64)
    for at in range(0, V, BLOCK):
        x, _ = _logits(row, at, V, BLOCK)
        k, w = _key(x), _weight(x, peak, heat, min_p)
        is_in = (k >= key) & (k >= floor) & (w > 0)
        count += is_in.to(tl.int64)
        mass += tl.where(is_in, w, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _uniform(seed, position):
    zero = (position * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    )
    fraction = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    return fraction.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, peaks, logits_b,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * logits_b
    peak = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for at in range(0, V, BLOCK):
        x, i = _logits(row, at, V, BLOCK)
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
        top = peak.to(tl.float64)
        floor = tl.full([], -(2**31), tl.int64)
        if top_k > 0:
            low, high = floor, tl.full([], 2**31 - 1, tl.int64)
            for _ in range(32):  # the largest key that top_k tokens reach
                middle = low + (high - low + 1) // 2
                count, _m = _at_least(row, middle, top, heat, min_p, floor, V, BLOCK)
                is_enough = count >= top_k
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            floor = low
        _c, total = _at_least(row, floor, top, heat, min_p, floor, V, BLOCK)
        ties = tl.full([], 2**31 - 1, tl.int64)  # tokens of the key `floor` that stay
        if top_p < 1.0:
            low, high = floor, tl.full([], 2**31 - 1, tl.int64)
            for _ in range(32):  # the largest key that top_p of the weight reaches
                middle = low + (high - low + 1) // 2
                _c, mass = _at_least(row, middle, top, heat, min_p, floor, V, BLOCK)
                is_enough = mass >= top_p * total
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            above, mass = _at_least(row, low + 1, top, heat, min_p, floor, V, BLOCK)
            reached, mass_all = _at_least(row, low, top, heat, min_p, floor, V, BLOCK)
            equal = tl.maximum(reached - above, 1)
            each = (mass_all - mass) / equal.to(tl.float64)
            ties = tl.ceil((top_p * total - mass) / each).to(tl.int64)
            ties = tl.minimum(tl.maximum(ties, 1), equal)
            floor = low
            total = mass + each * ties.to(tl.float64)
        target = _uniform(tl.load(seeds + b), tl.load(positions + b)) * total
        before = tl.full([], 0.0, tl.float64)
        num_ties = tl.full([], 0, tl.int64)
        drawn = tl.full([], -1, tl.int32)
        last = best
        for at in range(0, V, BLOCK):
            x, i = _logits(row, at, V, BLOCK)
            k, w = _key(x), _weight(x, top, heat, min_p)
            is_tie = k == floor
            nth = num_ties + tl.cumsum(is_tie.to(tl.int64), 0)
            w = tl.where((k > floor) | (is_tie & (nth <= ties)), w, 0.0)
            num_ties += tl.sum(is_tie.to(tl.int64), 0)
            sums = before + tl.cumsum(w, 0)
            hit = tl.min(tl.where((sums > target) & (w > 0), i, V), 0)
            drawn = tl.where((drawn < 0) & (hit < V), hit, drawn)
            last = tl.maximum(last, tl.max(tl.where(w > 0, i, 0), 0))
            before += tl.sum(w, 0)
        tl.store(tokens + b, tl.where(drawn < 0, last, drawn).to(tl.int64))


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
    _sample[(num,)](
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seeds_B, positions_B, tokens_B,
        peaks_B, logits_BV.stride(0), V=vocabulary, BLOCK=block, num_warps=8,
    )  # fmt: skip
