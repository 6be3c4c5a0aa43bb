"""Sampling on the device, with the random numbers of `qllm.runner.sampler`.

The order of operations is that of `qllm.runner.sampler`: temperature, min_p, top_k, top_p, then the
inverse CDF in token-id order with the one number that Philox-4x32-10 gives for (seed, position).
Everything is summed in one fixed order and in fp64, so the same logits give the same token in any
batch, eager or replayed. Sums are taken chunk by chunk where the CPU adds one token after the
other: a number within about 1e-16 of a boundary may go the other way.

A row is divided into chunks, and a chunk is a program, so that one row keeps the whole device busy:

    scan      every chunk   largest logit, and how many logits have which first digit
    narrow    every chunk   the same of the next digit, behind the digits of the K-th logit
    weigh     every chunk   the weight of what stays, and its number
    keep      every chunk   top_p: what stays is copied, if it is few enough
    bound     every chunk   top_p, if it is not: weights above 16 bounds, digit by digit
    draw      every row     the token

Logits are seen as ordered 32-bit integers, *keys*, in digits of 8 bits. What a row does not need
ends at once. Where top_k does not say what top_p looks at, it is the `LIKELY` largest logits; only
if they weigh too little, or are too many to be copied, the search for the bound reads all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of a program."""
SEARCH = 1024
"""Tokens that are compared with 16 bounds at a time."""
KEPT = 1024
"""Most tokens that are copied."""
LIKELY = 512
"""What top_p alone looks at first; more may stay, which have equal logits."""
KEY_BITS = {torch.bfloat16: 16, torch.float16: 24}
"""Leading bits of a key that tell logits of a dtype apart; of others, all 32."""


@triton.jit
def _logits(row, at, num, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < num, other=float("-inf")).to(tl.float32) + 0.0, i


@triton.jit
def _key(x):
    """Integers from 0 on, in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weight(x, is_in, peak, heat, min_p):
    w = tl.exp((x.to(tl.float64) - peak) / heat)
    return tl.where(is_in & (w >= min_p), w, 0.0)


@triton.jit
def _uniform(seed, position):
    zero = (position * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    )
    fraction = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    return fraction.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _asked(temperatures, top_ks, top_ps, b):
    """Of a row: its temperature, top_k and top_p, and whether logits are left out by them."""
    heat, top_k, top_p = tl.load(temperatures + b), tl.load(top_ks + b), tl.load(top_ps + b)
    return heat, top_k, top_p, (heat > 0) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def _peak(peaks_C, broken_C, b, C: tl.constexpr, C_PAD: tl.constexpr):
    """Of a row: its largest logit, and whether a logit is no number or none is finite."""
    c = tl.arange(0, C_PAD)
    peak = tl.max(tl.load(peaks_C + b * C + c, mask=c < C, other=float("-inf")), 0)
    broken = tl.sum(tl.load(broken_C + b * C + c, mask=c < C, other=0), 0)
    return peak, (broken > 0) | (peak == float("-inf")) | (peak == float("inf"))


@triton.jit
def _floor(digits, b, wanted, DIGITS: tl.constexpr, STRIDE: tl.constexpr):
    """The first digits of the key of the K-th largest logit, zeros if there are fewer.

    Returns:
        They, and how many logits have these digits or larger ones.
    """
    d = tl.arange(0, 256)
    prefix, above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    reached = above
    for digit in tl.static_range(DIGITS):
        counts = tl.load(digits + b * STRIDE + digit * 256 + d)
        at_least = above + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        best = tl.max(tl.where(at_least >= wanted, d, 0), 0)
        reached = tl.sum(tl.where(d == best, at_least, 0), 0)
        above = reached - tl.sum(tl.where(d == best, counts, 0), 0)
        prefix = prefix * 256 + best
    return prefix, reached


@triton.jit
def _stays(digits, b, top_k, likely, DIGITS: tl.constexpr):
    """Of a row that leaves logits out: the key from which on they are looked at, and how many."""
    wanted = tl.where(top_k > 0, top_k, likely)
    prefix, reached = _floor(digits, b, wanted, DIGITS, DIGITS * 256)
    return prefix << (32 - 8 * DIGITS), reached


@triton.jit
def _whole(parts, b, C: tl.constexpr, C_PAD: tl.constexpr):
    c = tl.arange(0, C_PAD)
    return tl.sum(tl.load(parts + b * C + c, mask=c < C, other=0.0), 0)


@triton.jit
def _scan(
    logits, temperatures, top_ks, top_ps, peaks_C, firsts_C, broken_C, digits, logits_b,
    V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
    top = tl.max(x, 0)
    tl.store(peaks_C + b * C + c, top)
    tl.store(firsts_C + b * C + c, tl.min(tl.where(x == top, i, V), 0))
    tl.store(broken_C + b * C + c, tl.sum((x != x).to(tl.int32), 0))
    _heat, _top_k, _top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    if is_less:
        counts = tl.histogram((_key(x) >> 24).to(tl.int32), 256, i < V)
        d = tl.arange(0, 256)
        tl.atomic_add(digits + b * (DIGITS * 256) + d, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _narrow(
    logits, temperatures, top_ks, top_ps, digits, logits_b, likely,
    V: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _heat, top_k, _top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    if is_less:
        wanted = tl.where(top_k > 0, top_k, likely)
        prefix, _reached = _floor(digits, b, wanted, DIGIT, DIGITS * 256)
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        key = _key(x)
        is_in = (i < V) & ((key >> (32 - 8 * DIGIT)) == prefix)
        counts = tl.histogram(((key >> (24 - 8 * DIGIT)) & 255).to(tl.int32), 256, is_in)
        d = tl.arange(0, 256)
        at = digits + b * (DIGITS * 256) + DIGIT * 256 + d
        tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _weigh(
    logits, temperatures, top_ks, top_ps, min_ps, peaks_C, broken_C, digits, whole_C, likely_C,
    counts_C, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, top_k, _top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    peak, is_broken = _peak(peaks_C, broken_C, b, C, C_PAD)
    if (heat > 0) & (is_broken == 0):
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        w = _weight(x, i < V, peak.to(tl.float64), heat, tl.load(min_ps + b))
        floor = tl.full([], 0, tl.int64)
        if is_less:
            floor, _reached = _stays(digits, b, top_k, likely, DIGITS)
        stays = (i < V) & (_key(x) >= floor)
        above = tl.sum(tl.where(stays, w, 0.0), 0)
        whole = above
        if top_k <= 0:
            whole = tl.sum(w, 0)
        tl.store(whole_C + b * C + c, whole)
        tl.store(likely_C + b * C + c, above)
        tl.store(counts_C + b * C + c, tl.sum(stays.to(tl.int32), 0))


@triton.jit
def _keep(
    logits, temperatures, top_ks, top_ps, digits, counts_C, kept, kept_ids, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _heat, top_k, top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    if is_less & (top_p < 1.0):
        floor, reached = _stays(digits, b, top_k, likely, DIGITS)
        chunk = tl.arange(0, C_PAD)
        is_before = chunk < c
        before = tl.sum(tl.load(counts_C + b * C + chunk, mask=is_before, other=0), 0)
        if reached <= KEPT:
            x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
            stays = ((i < V) & (_key(x) >= floor)).to(tl.int32)
            place = b * KEPT + before + tl.cumsum(stays, 0) - 1
            tl.store(kept + place, x, mask=stays > 0)
            tl.store(kept_ids + place, i, mask=stays > 0)


@triton.jit
def _fits(whole_C, likely_C, b, top_k, top_p, reached, C: tl.constexpr, C_PAD: tl.constexpr,
          KEPT: tl.constexpr):  # fmt: skip
    """Whether the tokens that top_p keeps are among those copied; and the whole weight."""
    whole = _whole(whole_C, b, C, C_PAD)
    likely = _whole(likely_C, b, C, C_PAD)
    return (reached <= KEPT) & ((top_k > 0) | (likely >= top_p * whole)), whole


@triton.jit
def _bounded(masses, b, floor, top_p, whole, C: tl.constexpr, C_PAD: tl.constexpr,
             FOUND: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """The largest key that top_p of the weight reaches, as far as its digits were searched."""
    bound, j = floor, tl.arange(0, 16)
    c = tl.arange(0, C_PAD)
    step = tl.full([], 1 << 28, tl.int64)
    for found in tl.static_range(FOUND):
        at = masses + ((b * STEPS + found) * C + c[:, None]) * 16 + j[None, :]
        masses_16 = tl.sum(tl.load(at, mask=c[:, None] < C, other=0.0), 0)
        bound += tl.max(tl.where(masses_16 >= top_p * whole, j, 0), 0) * step
        step = step // 16
    return bound


@triton.jit
def _bound(
    logits, temperatures, top_ks, top_ps, min_ps, peaks_C, broken_C, digits, whole_C, likely_C,
    masses, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SEARCH: tl.constexpr, DIGITS: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, top_k, top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    if is_less & (top_p < 1.0):
        floor, reached = _stays(digits, b, top_k, likely, DIGITS)
        fits, whole = _fits(whole_C, likely_C, b, top_k, top_p, reached, C, C_PAD, KEPT)
        peak, is_broken = _peak(peaks_C, broken_C, b, C, C_PAD)
        if (fits | is_broken) == 0:
            floor = tl.where(top_k > 0, floor, 0)
            bound = _bounded(masses, b, floor, top_p, whole, C, C_PAD, STEP, STEPS)
            j = tl.arange(0, 16)
            bounds = bound + j.to(tl.int64) * (1 << (28 - 4 * STEP))
            min_p = tl.load(min_ps + b)
            found = tl.zeros([16], tl.float64)
            for at in range(c * CHUNK, tl.minimum((c + 1) * CHUNK, V), SEARCH):
                x, i = _logits(logits + b * logits_b, at, V, SEARCH)
                w = _weight(x, i < V, peak.to(tl.float64), heat, min_p)
                is_in = _key(x)[:, None] >= bounds[None, :]
                found += tl.sum(tl.where(is_in, w[:, None], 0.0), 0)
            tl.store(masses + ((b * STEPS + STEP) * C + c) * 16 + j, found)


@triton.jit
def _ties(top_p, whole, above, each, equal):
    """How many tokens of the bound's logit stay: as many as top_p of the weight takes."""
    equal = tl.maximum(equal, 1)
    needed = tl.ceil((top_p * whole - above) / tl.where(each > 0, each, 1.0)).to(tl.int64)
    return tl.minimum(tl.maximum(needed, 1), equal)


@triton.jit
def _of_chunk(row, whole_C, b, floor, peak, heat, min_p, uniform, V: tl.constexpr,
              C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The token of a row without top_p: first its chunk, then itself; -1 if of no weight."""
    c = tl.arange(0, C_PAD)
    masses = tl.load(whole_C + b * C + c, mask=c < C, other=0.0)
    sums = tl.cumsum(masses, 0)
    target = uniform * tl.sum(masses, 0)
    hit = tl.min(tl.where((sums > target) & (masses > 0), c, C), 0)
    chunk = tl.where(hit < C, hit, tl.max(tl.where(masses > 0, c, 0), 0))
    before = tl.sum(tl.where(c == chunk - 1, sums, 0.0), 0)
    x, i = _logits(row, chunk * CHUNK, V, CHUNK)
    w = _weight(x, (i < V) & (_key(x) >= floor), peak, heat, min_p)
    found = before + tl.cumsum(w, 0)
    drawn = tl.min(tl.where((found > target) & (w > 0), i, V), 0)
    return tl.where(drawn < V, drawn, tl.max(tl.where(w > 0, i, -1), 0))


@triton.jit
def _of_kept(kept, kept_ids, b, num, whole, top_k, peak, heat, min_p, top_p, uniform,
             KEPT: tl.constexpr, KEY_BITS: tl.constexpr):  # fmt: skip
    """The token of a row whose tokens were copied; -1 if of no weight."""
    j = tl.arange(0, KEPT)
    x = tl.load(kept + b * KEPT + j, mask=j < num, other=float("-inf"))
    key, w = _key(x), _weight(x, j < num, peak, heat, min_p)
    if top_k > 0:
        whole = tl.sum(w, 0)
    bound = tl.full([], 0, tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    for _ in range(KEY_BITS):
        mass = tl.sum(tl.where(key >= bound + step, w, 0.0), 0)
        bound = tl.where(mass >= top_p * whole, bound + step, bound)
        step = step // 2
    above = tl.sum(tl.where(key > bound, w, 0.0), 0)
    each = tl.max(tl.where(key == bound, w, 0.0), 0)
    is_tie = (key == bound) & (j < num)
    equal = tl.sum((is_tie & (w > 0)).to(tl.int64), 0)
    ties = _ties(top_p, whole, above, each, equal)
    nth = tl.cumsum(is_tie.to(tl.int64), 0)
    w = tl.where((key > bound) | (is_tie & (nth <= ties)), w, 0.0)
    target = uniform * (above + each * ties.to(tl.float64))
    drawn = tl.min(tl.where((tl.cumsum(w, 0) > target) & (w > 0), j, KEPT), 0)
    drawn = tl.where(drawn < KEPT, drawn, tl.max(tl.where(w > 0, j, -1), 0))
    ids = tl.load(kept_ids + b * KEPT + j, mask=j < num, other=0)
    return tl.where(drawn < 0, -1, tl.sum(tl.where(j == drawn, ids, 0), 0))


@triton.jit
def _of_all(row, bound, whole, peak, heat, min_p, top_p, uniform, V: tl.constexpr,
            CHUNK: tl.constexpr):  # fmt: skip
    """The token of a row with keys from `bound` on, by two passes over all; -1 if of no weight."""
    above = tl.full([], 0.0, tl.float64)
    each = tl.full([], 0.0, tl.float64)
    equal = tl.full([], 0, tl.int64)
    for at in range(0, V, CHUNK):
        x, i = _logits(row, at, V, CHUNK)
        key, w = _key(x), _weight(x, i < V, peak, heat, min_p)
        above += tl.sum(tl.where(key > bound, w, 0.0), 0)
        equal += tl.sum(((key == bound) & (w > 0)).to(tl.int64), 0)
        each = tl.maximum(each, tl.max(tl.where(key == bound, w, 0.0), 0))
    ties = _ties(top_p, whole, above, each, equal)
    target = uniform * (above + each * ties.to(tl.float64))
    before = tl.full([], 0.0, tl.float64)
    num_ties = tl.full([], 0, tl.int64)
    drawn, last = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    for at in range(0, V, CHUNK):
        x, i = _logits(row, at, V, CHUNK)
        key, w = _key(x), _weight(x, i < V, peak, heat, min_p)
        is_tie = (key == bound) & (i < V)
        nth = num_ties + tl.cumsum(is_tie.to(tl.int64), 0)
        w = tl.where((key > bound) | (is_tie & (nth <= ties)), w, 0.0)
        num_ties += tl.sum(is_tie.to(tl.int64), 0)
        sums = before + tl.cumsum(w, 0)
        hit = tl.min(tl.where((sums > target) & (w > 0), i, V), 0)
        drawn = tl.where((drawn < 0) & (hit < V), hit, drawn)
        last = tl.maximum(last, tl.max(tl.where(w > 0, i, -1), 0))
        before += tl.sum(w, 0)
    return tl.where(drawn < 0, last, drawn)


@triton.jit
def _draw(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, peaks, peaks_C,
    firsts_C, broken_C, digits, whole_C, likely_C, masses, kept, kept_ids, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, is_less = _asked(temperatures, top_ks, top_ps, b)
    c = tl.arange(0, C_PAD)
    tops = tl.load(peaks_C + b * C + c, mask=c < C, other=float("-inf"))
    peak, is_broken = _peak(peaks_C, broken_C, b, C, C_PAD)
    firsts = tl.load(firsts_C + b * C + c, mask=c < C, other=V)
    best = tl.min(tl.where(tops == peak, firsts, V), 0)
    has_nan = tl.sum(tl.load(broken_C + b * C + c, mask=c < C, other=0), 0) > 0
    tl.store(peaks + b, tl.where(has_nan, float("nan"), peak))
    token = tl.where(best < V, best, 0)
    if (heat > 0) & (is_broken == 0):
        row, min_p, top = logits + b * logits_b, tl.load(min_ps + b), peak.to(tl.float64)
        uniform = _uniform(tl.load(seeds + b), tl.load(positions + b))
        floor, reached = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
        if is_less:
            floor, reached = _stays(digits, b, top_k, likely, DIGITS)
        if top_p >= 1.0:
            drawn = _of_chunk(row, whole_C, b, floor, top, heat, min_p, uniform, V, C, C_PAD, CHUNK)
        else:
            fits, whole = _fits(whole_C, likely_C, b, top_k, top_p, reached, C, C_PAD, KEPT)
            if fits:
                drawn = _of_kept(
                    kept, kept_ids, b, reached, whole, top_k, top, heat, min_p, top_p, uniform,
                    KEPT, 8 * DIGITS,
                )  # fmt: skip
            else:
                floor = tl.where(top_k > 0, floor, 0)
                bound = _bounded(masses, b, floor, top_p, whole, C, C_PAD, STEPS, STEPS)
                drawn = _of_all(row, bound, whole, top, heat, min_p, top_p, uniform, V, CHUNK)
        token = tl.where(drawn >= 0, drawn, token)
    tl.store(tokens + b, token.to(tl.int64))


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
    device, num_chunks = logits_BV.device, triton.cdiv(vocabulary, CHUNK)
    num_digits = KEY_BITS.get(logits_BV.dtype, 32) // 8
    steps = 2 * num_digits

    def per_chunk(dtype: torch.dtype) -> Tensor:
        return torch.empty((num, num_chunks), dtype=dtype, device=device)

    peaks, firsts, broken = map(per_chunk, (torch.float32, torch.int32, torch.int32))
    whole, weights, counts = map(per_chunk, (torch.float64, torch.float64, torch.int32))
    digits = torch.zeros((num, num_digits, 256), dtype=torch.int32, device=device)
    masses = torch.empty((num, steps, num_chunks, 16), dtype=torch.float64, device=device)
    kept = torch.empty((num, KEPT), dtype=torch.float32, device=device)
    ids = torch.empty((num, KEPT), dtype=torch.int32, device=device)
    asked = logits_BV, temperature_B, top_k_B, top_p_B
    stride, grid = logits_BV.stride(0), (num, num_chunks)
    sizes = {"V": vocabulary, "CHUNK": CHUNK, "DIGITS": num_digits}
    chunks = {**sizes, "C": num_chunks, "C_PAD": triton.next_power_of_2(num_chunks)}
    _scan[grid](*asked, peaks, firsts, broken, digits, stride, C=num_chunks, **sizes)
    for digit in range(1, num_digits):
        _narrow[grid](*asked, digits, stride, LIKELY, DIGIT=digit, **sizes)
    found = peaks, broken, digits, whole, weights
    _weigh[grid](*asked, min_p_B, *found, counts, stride, LIKELY, **chunks)
    _keep[grid](*asked, digits, counts, kept, ids, stride, LIKELY, KEPT=KEPT, **chunks)
    search = {"SEARCH": min(SEARCH, CHUNK), "KEPT": KEPT, "STEPS": steps}
    for step in range(steps):
        _bound[grid](*asked, min_p_B, *found, masses, stride, LIKELY, STEP=step, **search, **chunks)
    _draw[(num,)](
        *asked, min_p_B, seeds_B, positions_B, tokens_B, peaks_B, peaks, firsts, broken, digits,
        whole, weights, masses, kept, ids, stride, LIKELY, KEPT=KEPT, STEPS=steps, **chunks,
        num_warps=8,
    )  # fmt: skip
