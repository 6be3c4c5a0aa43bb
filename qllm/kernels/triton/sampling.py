"""Sampling on the device, with the random numbers of `qllm.runner.sampling.definition`.

The order of operations is that of `qllm.runner.sampling.definition`: temperature, min_p, top_k,
top_p, then the inverse CDF in token-id order with the number that Philox-4x32-10 gives for (seed,
position). All sums have one fixed order and are fp64, so the same logits give the same token in any
batch, eager or replayed. On the CPU, weights are rounded to multiples of 2^-44 and added as whole
numbers. So a number within about 1e-9 of a boundary may give another token there.

A row is divided into chunks, and each chunk has a program, so that one row keeps the device busy:

    scan      every chunk   largest logit, and the number of logits per first digit
    narrow    every chunk   number of logits per next digit, of those that begin as the K-th does
    weigh     every chunk   weight and number of the logits that stay
    keep      every chunk   top_p: copies of the logits that stay, if they are few enough
    bound     every chunk   top_p, if not: weights above 16 bounds, half a digit at a time
    settle    every chunk   the weight above the bound that was found, and the logits equal to it
    draw      every row     the token

Logits are read as ordered 32-bit integers, *keys*, in digits of 8 bits. A kernel returns at once
for a row that does not need this kernel. If top_k does not limit the logits that top_p reads, top_p
reads the `LIKELY` largest ones first. If these weigh too little, or are too many to be copied, the
search for the bound reads all.

Outputs of a kernel that later kernels read, for each row, or for each of its chunks (C):

    scan      peaks_C, firsts_C, broken_C   the largest logit, its first token, the number of NaNs
              digits [DIGITS, 256]          number of logits per digit; narrow adds more digits
    weigh     whole_C                       the weight that top_p is a share of
              stays_C, counts_C             weight and number of the logits that top_p reads
    keep      kept, kept_ids [KEPT]         their logits and ids, by rising id
              wholes, bounds, searches      the whole weight; start of a search; if there is one
    bound     masses [STEPS, C, 16]         the weight from each of 16 bounds on
    settle    above_C, equal_C, each_C      weight above the bound, tokens at it, weight of one

Only `digits` start at 0. The other outputs are uninitialised for rows that do not need them and
must not be read there. Rows that are greedy or broken (a NaN, or no finite peak) have no weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of a program."""
KEPT = 1024
"""Most tokens that are copied."""
LIKELY = 512
"""Number of largest logits that top_p reads first, if top_k sets no limit. Equal logits may add
more."""
KEY_BITS = {torch.bfloat16: 16, torch.float16: 24}
"""Leading bits of a key that distinguish logits of a dtype; other dtypes need all 32."""


@triton.jit
def _logits(row, at, num, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < num, other=float("-inf")).to(tl.float32), i


@triton.jit
def _key(x):
    """Return integers in [0, 2**32), in the order of the floats. 0.0 and -0.0 are both 2**31.

    The bits that a narrower dtype lacks are 0, also for negative floats, so a bound can equal a
    key.
    """
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -bits, bits + 2147483648)


@triton.jit
def _weight(x, is_in, peak, heat, min_p):
    """Return weights after min_p, fp64: 1 at the peak, 0 outside of `is_in`."""
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
    """Return a row's temperature, top_k and top_p, and True if top_k or top_p omits logits."""
    heat, top_k, top_p = tl.load(temperatures + b), tl.load(top_ks + b), tl.load(top_ps + b)
    return heat, top_k, top_p, (heat > 0) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def _top(peaks_C, b, C: tl.constexpr, C_PAD: tl.constexpr):
    c = tl.arange(0, C_PAD)
    return tl.max(tl.load(peaks_C + b * C + c, mask=c < C, other=float("-inf")), 0)


@triton.jit
def _peak(peaks_C, broken_C, b, C: tl.constexpr, C_PAD: tl.constexpr):
    """Return a row's largest logit, and True if a logit is NaN or none is finite."""
    peak, c = _top(peaks_C, b, C, C_PAD), tl.arange(0, C_PAD)
    broken = tl.sum(tl.load(broken_C + b * C + c, mask=c < C, other=0), 0)
    return peak, (broken > 0) | (peak == float("-inf")) | (peak == float("inf"))


@triton.jit
def _prefix(digits, b, wanted, num, DIGITS: tl.constexpr):
    """Return the first `num` digits of the key of the `wanted`-th largest logit, as one number.

    Returns:
        The digits, or 0 if there are fewer logits. And the number of logits with these digits or
        larger ones.
    """
    d = tl.arange(0, 256)
    prefix, above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    reached = above
    for digit in range(num):
        counts = tl.load(digits + (b * DIGITS + digit) * 256 + d)
        at_least = above + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        best = tl.max(tl.where(at_least >= wanted, d, 0), 0)
        reached = tl.sum(tl.where(d == best, at_least, 0), 0)
        above = reached - tl.sum(tl.where(d == best, counts, 0), 0)
        prefix = prefix * 256 + best
    return prefix, reached


@triton.jit
def _floor(digits, b, top_k, likely, DIGITS: tl.constexpr):
    """Return the least key that is read, and the number of logits with this key or a larger one.

    Bits behind the digits are 0 in every key. The function is used only if logits are omitted.
    """
    wanted = tl.where(top_k > 0, top_k, likely)
    prefix, reached = _prefix(digits, b, wanted, DIGITS, DIGITS)
    return prefix << (32 - 8 * DIGITS), reached


@triton.jit
def _total(parts_C, b, C: tl.constexpr, C_PAD: tl.constexpr):
    c = tl.arange(0, C_PAD)
    return tl.sum(tl.load(parts_C + b * C + c, mask=c < C, other=0.0), 0)


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
    _heat, _top_k, _top_p, leaves_out = _asked(temperatures, top_ks, top_ps, b)
    if leaves_out:
        counts = tl.histogram((_key(x) >> 24).to(tl.int32), 256, i < V)
        d = tl.arange(0, 256)
        tl.atomic_add(digits + b * (DIGITS * 256) + d, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["digit"])
def _narrow(
    logits, temperatures, top_ks, top_ps, digits, logits_b, likely, digit,
    V: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _heat, top_k, _top_p, leaves_out = _asked(temperatures, top_ks, top_ps, b)
    if leaves_out:
        wanted = tl.where(top_k > 0, top_k, likely)
        prefix, _reached = _prefix(digits, b, wanted, digit, DIGITS)
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        key = _key(x)
        is_in = (i < V) & ((key >> (32 - 8 * digit)) == prefix)
        counts = tl.histogram(((key >> (24 - 8 * digit)) & 255).to(tl.int32), 256, is_in)
        d = tl.arange(0, 256)
        at = digits + (b * DIGITS + digit) * 256 + d
        tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _weigh(
    logits, temperatures, top_ks, top_ps, min_ps, peaks_C, broken_C, digits, whole_C, stays_C,
    counts_C, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, top_k, _top_p, leaves_out = _asked(temperatures, top_ks, top_ps, b)
    peak, is_broken = _peak(peaks_C, broken_C, b, C, C_PAD)
    if (heat > 0) & (is_broken == 0):
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        w = _weight(x, i < V, peak.to(tl.float64), heat, tl.load(min_ps + b))
        floor = tl.full([], 0, tl.int64)
        if leaves_out:
            floor, _reached = _floor(digits, b, top_k, likely, DIGITS)
        stays = (i < V) & (_key(x) >= floor)
        above = tl.sum(tl.where(stays, w, 0.0), 0)
        whole = above
        if top_k <= 0:
            whole = tl.sum(w, 0)
        tl.store(whole_C + b * C + c, whole)
        tl.store(stays_C + b * C + c, above)
        tl.store(counts_C + b * C + c, tl.sum(stays.to(tl.int32), 0))


@triton.jit
def _keep(
    logits, temperatures, top_ks, top_ps, broken_C, peaks_C, digits, whole_C, stays_C, counts_C,
    kept, kept_ids, wholes, bounds, searches, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _heat, top_k, top_p, leaves_out = _asked(temperatures, top_ks, top_ps, b)
    is_search = tl.full([], 0, tl.int32)
    _top_b, is_broken = _peak(peaks_C, broken_C, b, C, C_PAD)
    if leaves_out & (top_p < 1.0) & (is_broken == 0):  # a broken row has no weights
        floor, reached = _floor(digits, b, top_k, likely, DIGITS)
        if reached <= KEPT:
            chunk = tl.arange(0, C_PAD)
            before = tl.sum(tl.load(counts_C + b * C + chunk, mask=chunk < c, other=0), 0)
            x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
            stays = ((i < V) & (_key(x) >= floor)).to(tl.int32)
            place = b * KEPT + before + tl.cumsum(stays, 0) - 1
            tl.store(kept + place, x, mask=stays > 0)
            tl.store(kept_ids + place, i, mask=stays > 0)
        if c == 0:
            whole = _total(whole_C, b, C, C_PAD)
            weighs = (top_k > 0) | (_total(stays_C, b, C, C_PAD) >= top_p * whole)
            is_search = ((reached > KEPT) | (weighs == 0)).to(tl.int32)
            tl.store(wholes + b, whole)
            tl.store(bounds + b, tl.where(top_k > 0, floor, 0))
    if c == 0:
        tl.store(searches + b, is_search)


@triton.jit
def _bounded(masses, wholes, bounds, b, top_p, steps, C: tl.constexpr, C_PAD: tl.constexpr,
             STEPS: tl.constexpr):  # fmt: skip
    """Return the largest key so far with top_p of the weight at or above it, and the step."""
    bound, least, j = tl.load(bounds + b), top_p * tl.load(wholes + b), tl.arange(0, 16)
    c = tl.arange(0, C_PAD)
    step = tl.full([], 1 << 28, tl.int64)
    for done in range(steps):
        at = masses + ((b * STEPS + done) * C + c[:, None]) * 16 + j[None, :]
        above = tl.sum(tl.load(at, mask=c[:, None] < C, other=0.0), 0)
        bound += tl.max(tl.where(above >= least, j, 0), 0) * step
        step = step // 16
    return bound, step


@triton.jit(do_not_specialize=["steps"])
def _bound(
    logits, temperatures, top_ps, min_ps, peaks_C, wholes, bounds, searches, masses, logits_b,
    steps,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(searches + b) > 0:
        bound, step = _bounded(
            masses, wholes, bounds, b, tl.load(top_ps + b), steps, C, C_PAD, STEPS
        )
        peak = _top(peaks_C, b, C, C_PAD).to(tl.float64)
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        key, w = _key(x), _weight(x, i < V, peak, tl.load(temperatures + b), tl.load(min_ps + b))
        for j in tl.static_range(16):
            above = tl.sum(tl.where(key >= bound + j * step, w, 0.0), 0)
            tl.store(masses + ((b * STEPS + steps) * C + c) * 16 + j, above)


@triton.jit
def _settle(
    logits, temperatures, top_ps, min_ps, peaks_C, wholes, bounds, searches, masses, above_C,
    equal_C, each_C, logits_b,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(searches + b) > 0:
        top_p = tl.load(top_ps + b)
        bound, _step = _bounded(masses, wholes, bounds, b, top_p, STEPS, C, C_PAD, STEPS)
        peak = _top(peaks_C, b, C, C_PAD).to(tl.float64)
        x, i = _logits(logits + b * logits_b, c * CHUNK, V, CHUNK)
        key, w = _key(x), _weight(x, i < V, peak, tl.load(temperatures + b), tl.load(min_ps + b))
        tl.store(above_C + b * C + c, tl.sum(tl.where(key > bound, w, 0.0), 0))
        tl.store(equal_C + b * C + c, tl.sum(((key == bound) & (w > 0)).to(tl.int64), 0))
        tl.store(each_C + b * C + c, tl.max(tl.where(key == bound, w, 0.0), 0))


@triton.jit
def _ties(top_p, whole, above, each, equal):
    """Return how many tokens with the bound's logit stay, as many as top_p needs."""
    equal = tl.maximum(equal, 1)
    needed = tl.ceil((top_p * whole - above) / tl.where(each > 0, each, 1.0))
    return tl.minimum(tl.maximum(needed, 1.0), equal.to(tl.float64)).to(tl.int64)  # may be 1e300


@triton.jit
def _draw_of_row(row, masses, ties, bound, peak, heat, min_p, uniform, V: tl.constexpr,
              C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Draw a row's chunk, then the token in it; return -1 if no token has weight.

    `masses` [C_PAD] has the weight of each chunk. `ties` [C_PAD] has the number of its tokens with
    the bound's logit that stay. These are the tokens with the lowest ids.
    """
    c = tl.arange(0, C_PAD)
    sums = tl.cumsum(masses, 0)
    target = uniform * tl.sum(masses, 0)
    hit = tl.min(tl.where((sums > target) & (masses > 0), c, C), 0)
    chunk = tl.where(hit < C, hit, tl.max(tl.where(masses > 0, c, 0), 0))
    before = tl.sum(tl.where(c == chunk - 1, sums, 0.0), 0)
    num_ties = tl.sum(tl.where(c == chunk, ties, 0), 0)
    x, i = _logits(row, chunk * CHUNK, V, CHUNK)
    key, w = _key(x), _weight(x, i < V, peak, heat, min_p)
    is_tie = (key == bound) & (i < V)
    nth = tl.cumsum(is_tie.to(tl.int64), 0)
    w = tl.where((key > bound) | (is_tie & (nth <= num_ties)), w, 0.0)
    found = before + tl.cumsum(w, 0)
    drawn = tl.min(tl.where((found > target) & (w > 0), i, V), 0)
    return tl.where(drawn < V, drawn, tl.max(tl.where(w > 0, i, -1), 0))


@triton.jit
def _draw_of_kept(kept, kept_ids, b, num, whole, peak, heat, min_p, top_p, uniform,
             KEPT: tl.constexpr, KEY_BITS: tl.constexpr):  # fmt: skip
    """Return the token of a row with `num` copied tokens; -1 if no token has weight.

    The bound is the largest key at and above which the weight is at least top_p. It is found bit by
    bit.
    """
    j = tl.arange(0, KEPT)
    x = tl.load(kept + b * KEPT + j, mask=j < num, other=float("-inf"))
    key, w = _key(x), _weight(x, j < num, peak, heat, min_p)
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
def _draw(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, peaks, peaks_C,
    firsts_C, broken_C, digits, whole_C, wholes, bounds, searches, masses, above_C, equal_C,
    each_C, kept, kept_ids, logits_b, likely,
    V: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, CHUNK: tl.constexpr,
    DIGITS: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, leaves_out = _asked(temperatures, top_ks, top_ps, b)
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
        bound, reached = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
        if leaves_out:
            bound, reached = _floor(digits, b, top_k, likely, DIGITS)
        if (top_p < 1.0) & (tl.load(searches + b) == 0):
            drawn = _draw_of_kept(
                kept, kept_ids, b, reached, tl.load(wholes + b), top, heat, min_p, top_p, uniform,
                KEPT, 8 * DIGITS,
            )  # fmt: skip
        else:
            ties = tl.full([C_PAD], CHUNK, tl.int64)
            masses_C = tl.load(whole_C + b * C + c, mask=c < C, other=0.0)
            if top_p < 1.0:
                bound, _step = _bounded(masses, wholes, bounds, b, top_p, STEPS, C, C_PAD, STEPS)
                masses_C = tl.load(above_C + b * C + c, mask=c < C, other=0.0)
                equals = tl.load(equal_C + b * C + c, mask=c < C, other=0)
                each = tl.max(tl.load(each_C + b * C + c, mask=c < C, other=0.0), 0)
                whole, above = tl.load(wholes + b), tl.sum(masses_C, 0)
                left = _ties(top_p, whole, above, each, tl.sum(equals, 0))
                left -= tl.cumsum(equals, 0) - equals
                ties = tl.minimum(tl.maximum(left, 0), equals)
                masses_C += each * ties.to(tl.float64)
            drawn = _draw_of_row(
                row, masses_C, ties, bound, top, heat, min_p, uniform, V, C, C_PAD, CHUNK
            )
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
        temperature_B: Temperature, fp64; 0 is greedy, where the lowest id wins a tie.
        top_k_B: Number of kept logits, int64; 0 and numbers above the vocabulary keep all.
        top_p_B: Share of kept weight, fp64; 1 keeps all.
        min_p_B: Least weight relative to the peak, fp64; 0 keeps all.
        seeds_B: Seeds, int64.
        positions_B: Index in the whole sequence of the token to choose, int64.
        tokens_B: Chosen tokens, int64; written in place.
        peaks_B: Largest logit of the row, fp32; NaN if a logit is NaN. A row without a finite peak
            is broken.
    """
    num, vocabulary = logits_BV.shape
    if num == 0:
        return
    device, num_chunks = logits_BV.device, triton.cdiv(vocabulary, CHUNK)
    num_digits = KEY_BITS.get(logits_BV.dtype, 32) // 8
    steps = 2 * num_digits

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num, *shape), dtype=dtype, device=device)

    f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
    peaks, firsts, broken = (new(d, num_chunks) for d in (f32, i32, i32))
    whole, stays, counts = (new(d, num_chunks) for d in (f64, f64, i32))
    digits = torch.zeros((num, num_digits, 256), dtype=i32, device=device)
    kept = new(f32, KEPT), new(i32, KEPT)
    search = new(f64), new(i64), new(i32), new(f64, steps, num_chunks, 16)
    ends = tuple(new(d, num_chunks) for d in (f64, i64, f64))
    asked = logits_BV, temperature_B, top_k_B, top_p_B
    stride, grid = logits_BV.stride(0), (num, num_chunks)
    sizes = {"V": vocabulary, "CHUNK": CHUNK}
    chunks = {**sizes, "C": num_chunks, "C_PAD": triton.next_power_of_2(num_chunks)}
    _scan[grid](*asked, peaks, firsts, broken, digits, stride, C=num_chunks, **sizes,
                DIGITS=num_digits)  # fmt: skip
    for digit in range(1, num_digits):
        _narrow[grid](*asked, digits, stride, LIKELY, digit, **sizes, DIGITS=num_digits)
    _weigh[grid](
        *asked, min_p_B, peaks, broken, digits, whole, stays, counts, stride, LIKELY, **chunks,
        DIGITS=num_digits,
    )  # fmt: skip
    _keep[grid](
        *asked, broken, peaks, digits, whole, stays, counts, *kept, *search[:3], stride, LIKELY,
        **chunks, DIGITS=num_digits, KEPT=KEPT,
    )  # fmt: skip
    of_row = logits_BV, temperature_B, top_p_B, min_p_B, peaks, *search
    for step in range(steps):
        _bound[grid](*of_row, stride, step, **chunks, STEPS=steps)
    _settle[grid](*of_row, *ends, stride, **chunks, STEPS=steps)
    _draw[(num,)](
        *asked, min_p_B, seeds_B, positions_B, tokens_B, peaks_B, peaks, firsts, broken, digits,
        whole, *search, *ends, *kept, stride, LIKELY, num_warps=8, **chunks, DIGITS=num_digits,
        KEPT=KEPT, STEPS=steps,
    )  # fmt: skip
