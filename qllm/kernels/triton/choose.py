"""Choice of each token's experts from the router's logits, and the slots sorted by expert.

    few tokens      one launch of one program: choose, count, sort
    many            a program per few tokens chooses; then `moe.route` counts and sorts

The best logit comes first; of equal logits, the lowest expert. A token whose logits hold a NaN gets
some experts, with weights of NaN.

The number of tokens of a program is not in the bits of the weights. Few numbers are added in the
order of their choice, many as whole numbers: compiled `tl.sum` adds floats in an order that depends
on the layout of all tokens.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import Groups, Routing, Rule, RuleKind, empty_routing
from qllm.kernels.triton.moe import route
from qllm.kernels.triton.tiles import tile_rows

FEW = 64
"""Most tokens that one program chooses for and sorts."""
MOST_LOGITS = 64 * 256
"""Most logits that a program holds."""


@triton.jit
def _closed(
    left, e, E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, GROUPS: tl.constexpr,
    OPEN: tl.constexpr,
):  # fmt: skip
    """Mask the experts of all groups but the OPEN best; two experts decide a group's score."""
    group: tl.constexpr = E // GROUPS
    g_pad: tl.constexpr = triton.next_power_of_2(GROUPS)
    g = tl.arange(0, g_pad)[None, :]
    of_expert = e[None, :] // group
    worth = tl.full([T_PAD, g_pad], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        own = tl.where(of_expert == i, left, float("-inf"))
        first = tl.max(own, 1)
        best = tl.min(tl.where(own == first[:, None], e[None, :], E_PAD), 1)
        second = tl.max(tl.where(e[None, :] == best[:, None], float("-inf"), own), 1)
        worth = tl.where(g == i, (first + second)[:, None], worth)
    is_open = tl.zeros([T_PAD, E_PAD], tl.int32)
    for _ in tl.static_range(OPEN):
        peak = tl.max(worth, 1)
        best = tl.min(tl.where(worth == peak[:, None], g, g_pad), 1)[:, None]
        is_open = tl.where(of_expert == best, 1, is_open)
        worth = tl.where(g == best, float("-inf"), worth)
    return tl.where(is_open > 0, left, float("-inf"))


@triton.jit
def _total(shares):
    """Sum each row of [T_PAD, E_PAD] shares in [0, 1], cut off at 2**-40: any order gives its bits.

    One share of the row is 1, so the sum is as exact as one of fp32 numbers.
    """
    is_number = shares == shares
    scale: tl.constexpr = 1099511627776.0  # 2**40
    whole = tl.sum(tl.where(is_number, shares * scale, 0.0).to(tl.int64), 1).to(tl.float32)
    return tl.where(tl.min(is_number.to(tl.int32), 1) > 0, whole * (1.0 / scale), float("nan"))


@triton.jit
def _pick(
    logits, correction, ids, weights, t, num, logits_t, jitter, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    RULE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Choose for a block of tokens; return the rank at which each expert was chosen, or -1."""
    kind = logits.dtype.element_ty
    e = tl.arange(0, E_PAD)
    is_real = (t < num)[:, None] & (e < E)[None, :]
    at = logits + t.to(tl.int64)[:, None] * logits_t + e[None, :]
    x = tl.load(at, mask=is_real, other=0.0).to(tl.float32)
    is_broken = tl.max((x != x).to(tl.int32), 1) > 0
    lowest: tl.constexpr = -3.0e38  # above -inf, which marks chosen experts, so every row finds K
    x = tl.where(x != x, lowest, tl.maximum(x, lowest))
    score = x
    if RULE == 3:
        small = tl.exp(-tl.abs(x))
        score = tl.where(x < 0, small, 1.0) / (1.0 + small)
        more = tl.load(correction + e, mask=e < E, other=0.0).to(tl.float32)
        x = tl.maximum(score + more[None, :], lowest)
    left = tl.where((e < E)[None, :], x, float("-inf"))
    if OPEN < GROUPS:
        left = _closed(left, e, E, E_PAD, T_PAD, GROUPS, OPEN)
    top = tl.max(left, 1)
    nth = tl.full([T_PAD, E_PAD], -1, tl.int32)
    share = tl.zeros([T_PAD, E_PAD], tl.float32)
    total = tl.zeros([T_PAD], tl.float32)
    for k in tl.static_range(K):
        peak = tl.max(left, 1)
        best = tl.min(tl.where(left == peak[:, None], e[None, :], E_PAD), 1)
        is_best = e[None, :] == best[:, None]
        nth = tl.where(is_best, k, nth)
        if RULE == 1:
            total += tl.exp(peak - top)
        elif RULE == 3 and NORMED:
            total += tl.max(tl.where(is_best, score, float("-inf")), 1)
        if RULE == 2:  # each among the experts near it, rounded where the model rounds
            gap = (peak[:, None] - x).to(kind).to(tl.float32)
            size = tl.maximum(tl.abs(x), peak[:, None])
            ratio = gap / tl.where(size > 0, size, 1.0)
            is_far = (size > 0) & (ratio.to(kind).to(tl.float32) > jitter)
            near = tl.where(is_far, 0.0, tl.exp(left - peak[:, None]))
            share = tl.where(is_best, 1.0 / _total(near)[:, None], share)
        left = tl.where(is_best, float("-inf"), left)
    is_chosen = nth >= 0
    if RULE == 2:
        share = share.to(kind).to(tl.float32)
    elif RULE == 3:
        share = score
        if NORMED:
            share = share / (total + 1e-20)[:, None]
        share = share * scaling
    else:
        share = tl.where((e < E)[None, :], tl.exp(x - top[:, None]), 0.0)
        if RULE == 0:
            total = _total(share)
        share = share / total[:, None]
    share = tl.where(is_broken[:, None], float("nan"), share)
    tok = t.to(tl.int64)[:, None]
    is_chosen = is_chosen & (t < num)[:, None]
    each = tl.zeros([T_PAD, E_PAD], tl.int32) + e[None, :]
    tl.store(ids + tok * (K + S) + nth, each, mask=is_chosen)
    tl.store(weights + tok * K + nth, share.to(weights.dtype.element_ty), mask=is_chosen)
    for i in tl.static_range(S):
        tl.store(ids + tok * (K + S) + K + i, tl.full([T_PAD, 1], E + i, tl.int32), mask=tok < num)
    return nth


@triton.jit
def _choose(
    logits, correction, ids, weights, num, logits_t, jitter, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    RULE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * T_PAD + tl.arange(0, T_PAD)
    _pick(
        logits, correction, ids, weights, t, num, logits_t, jitter, scaling,
        E, E_PAD, T_PAD, K, S, RULE, GROUPS, OPEN, NORMED,
    )  # fmt: skip


@triton.jit
def _choose_and_sort(
    logits, correction, num_tokens, ids, weights, hits, counts, order, tile_start, tile_expert,
    tile_row, tile_end, num, logits_t, jitter, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    RULE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, NORMED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, T_PAD), tl.arange(0, E_PAD)
    nth = _pick(
        logits, correction, ids, weights, t, num, logits_t, jitter, scaling,
        E, E_PAD, T_PAD, K, S, RULE, GROUPS, OPEN, NORMED,
    )  # fmt: skip
    live = tl.minimum(tl.load(num_tokens).to(tl.int32), num)
    is_slot = ((nth >= 0) & (t < live)[:, None]).to(tl.int32)
    # A token has an expert at most once, so the tokens before it are the slots before it.
    before = tl.cumsum(is_slot, 0) - is_slot
    counts_E = tl.sum(is_slot, 0)
    tiles_E = (counts_E + ROWS - 1) // ROWS
    start = tl.cumsum(counts_E, 0) - counts_E
    first = tl.cumsum(tiles_E, 0) - tiles_E
    tl.store(order + start[None, :] + before, t[:, None] * (K + S) + nth, mask=is_slot > 0)
    tl.store(counts + e, counts_E, mask=e < E)
    tl.store(tile_start + e, first, mask=e < E)
    num_slots, num_tiles, more = tl.sum(counts_E, 0), tl.sum(tiles_E, 0), (live + ROWS - 1) // ROWS
    tl.store(tile_start + E, num_tiles)
    for i in tl.static_range(S):  # every token uses each shared expert
        at, tile = num_slots + i * live, num_tiles + i * more
        tl.store(order + at + t, t * (K + S) + K + i, mask=t < live)
        tl.store(counts + E + i, live)
        tl.store(tile_start + E + i + 1, tile + more)
        for j in tl.static_range((T_PAD + ROWS - 1) // ROWS):
            tl.store(tile_expert + tile + j, E + i, mask=j < more)
            tl.store(tile_row + tile + j, at + j * ROWS, mask=j < more)
            tl.store(tile_end + tile + j, at + live, mask=j < more)
    for j in tl.static_range((T_PAD + ROWS - 1) // ROWS):
        is_tile = j < tiles_E
        tl.store(tile_expert + first + j, e, mask=is_tile)
        tl.store(tile_row + first + j, start + j * ROWS, mask=is_tile)
        tl.store(tile_end + first + j, start + counts_E, mask=is_tile)
    tl.atomic_add(hits, tl.sum((counts_E > 0).to(tl.int32), 0))


@functools.cache
def _compared(number: float, dtype: torch.dtype) -> float:
    """Return the number with which torch compares tensors of a dtype, if it receives this one."""
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


def choose(
    logits_TE: Tensor,
    rule: Rule,
    top_k: int,
    num_tokens: Tensor,
    hits: Tensor,
    dtype: torch.dtype,
    num_shared: int = 0,
) -> tuple[Routing, Tensor]:
    """Choose `top_k` experts per token and sort the slots by expert, then by token.

    Args:
        logits_TE: Logits of the router, rows contiguous.
        rule: Rule that makes weights of logits.
        top_k: Experts per token, K.
        num_tokens: Number of tokens, on the device. Later tokens are padding and get no slot.
        hits: One integer on the device, increased by the number of routed experts with a slot.
        dtype: Dtype of the weights.
        num_shared: Number of shared experts, S. Every token uses experts E to E + S, in slots K to
            K + S.

    Returns:
        The routing, and weights [T, K].
    """
    num, experts = logits_TE.shape
    slots = top_k + num_shared
    ids = torch.empty((num, slots), dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty((num, top_k), dtype=dtype, device=logits_TE.device)
    padded = triton.next_power_of_2(experts)
    groups = rule.groups or Groups(logits_TE, 1, 1, False, 1.0)
    meta = {
        "E": experts, "E_PAD": padded, "K": top_k, "S": num_shared, "RULE": rule.kind.value,
        "GROUPS": groups.num, "OPEN": groups.num_open, "NORMED": groups.renormalised,
    }  # fmt: skip
    jitter = _compared(rule.jitter, logits_TE.dtype) if rule.kind is RuleKind.SPARSE_MIXER else 0.0
    given = num, logits_TE.stride(0), jitter, groups.scaling
    if num <= FEW and triton.next_power_of_2(num) * padded <= MOST_LOGITS:
        rows = tile_rows(ids.numel(), experts)
        out = empty_routing(ids, experts + num_shared, rows)
        block = triton.next_power_of_2(num)
        _choose_and_sort[(1,)](
            logits_TE, groups.correction_E, num_tokens, ids, weights, hits, *out[1:], *given,
            **meta, T_PAD=block, ROWS=rows, num_warps=8 if block * padded >= 4096 else 4,
        )  # fmt: skip
        return out, weights
    block = max(1, min(16, 2048 // padded))
    grid = (triton.cdiv(num, block),)
    _choose[grid](logits_TE, groups.correction_E, ids, weights, *given, **meta, T_PAD=block)
    return route(ids, num_tokens, experts, hits, num_shared), weights
