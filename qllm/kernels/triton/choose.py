"""The experts of each token out of its router's logits, and the slots sorted by expert.

    few tokens      one launch of one program: choose, count, sort
    many            a program per few tokens chooses; then `moe.route` counts and sorts

The best logit goes first, the lowest expert of equals. A token whose logits hold a NaN gets some
experts, with weights of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import Routing, Rule, empty_routing
from qllm.kernels.triton.moe import route, tile_rows

FEW = 64
"""Tokens that one program may choose for and sort."""
MOST_LOGITS = 64 * 256
"""Logits that a program may hold."""


@triton.jit
def _pick(
    logits, ids, weights, t, num, logits_t, jitter,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Choose for a block of tokens; return at which place each expert was chosen, or -1."""
    kind = logits.dtype.element_ty
    e = tl.arange(0, E_PAD)
    is_real = (t < num)[:, None] & (e < E)[None, :]
    at = logits + t.to(tl.int64)[:, None] * logits_t + e[None, :]
    x = tl.load(at, mask=is_real, other=0.0).to(tl.float32)
    is_broken = tl.max((x != x).to(tl.int32), 1) > 0
    lowest: tl.constexpr = -3.0e38  # above what is taken, so K experts are found in any row
    x = tl.where(x != x, lowest, tl.maximum(x, lowest))
    left = tl.where((e < E)[None, :], x, float("-inf"))
    top = tl.max(left, 1)
    nth = tl.full([T_PAD, E_PAD], -1, tl.int32)
    share = tl.zeros([T_PAD, E_PAD], tl.float32)
    for k in tl.static_range(K):
        peak = tl.max(left, 1)
        best = tl.min(tl.where(left == peak[:, None], e[None, :], E_PAD), 1)
        is_best = e[None, :] == best[:, None]
        nth = tl.where(is_best, k, nth)
        if RULE == 2:  # each among those that are close to it, rounded where the model rounds
            gap = (peak[:, None] - x).to(kind).to(tl.float32)
            size = tl.maximum(tl.abs(x), peak[:, None])
            ratio = gap / tl.where(size > 0, size, 1.0)
            is_far = (size > 0) & (ratio.to(kind).to(tl.float32) > jitter)
            near = tl.where(is_far, 0.0, tl.exp(left - peak[:, None]))
            share = tl.where(is_best, 1.0 / tl.sum(near, 1)[:, None], share)
        left = tl.where(is_best, float("-inf"), left)
    is_chosen = nth >= 0
    if RULE == 2:
        share = share.to(kind).to(tl.float32)
    else:
        share = tl.where((e < E)[None, :], tl.exp(x - top[:, None]), 0.0)
        total = tl.sum(tl.where(is_chosen, share, 0.0) if RULE == 1 else share, 1)
        share = share / total[:, None]
    share = tl.where(is_broken[:, None], float("nan"), share)
    place = t.to(tl.int64)[:, None] * K + nth
    is_chosen = is_chosen & (t < num)[:, None]
    tl.store(ids + place, tl.zeros([T_PAD, E_PAD], tl.int32) + e[None, :], mask=is_chosen)
    tl.store(weights + place, share.to(weights.dtype.element_ty), mask=is_chosen)
    return nth


@triton.jit
def _choose(
    logits, ids, weights, num, logits_t, jitter,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * T_PAD + tl.arange(0, T_PAD)
    _pick(logits, ids, weights, t, num, logits_t, jitter, E, E_PAD, T_PAD, K, RULE)


@triton.jit
def _choose_and_sort(
    logits, num_tokens, ids, weights, hits, counts, order, tile_start, tile_expert, tile_row,
    tile_end, num, logits_t, jitter,
    E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, T_PAD), tl.arange(0, E_PAD)
    nth = _pick(logits, ids, weights, t, num, logits_t, jitter, E, E_PAD, T_PAD, K, RULE)
    live = tl.minimum(tl.load(num_tokens).to(tl.int32), num)
    is_slot = ((nth >= 0) & (t < live)[:, None]).to(tl.int32)
    # A token has an expert at most once, so tokens before it are slots before it.
    before = tl.cumsum(is_slot, 0) - is_slot
    counts_E = tl.sum(is_slot, 0)
    tiles_E = (counts_E + ROWS - 1) // ROWS
    start = tl.cumsum(counts_E, 0) - counts_E
    first = tl.cumsum(tiles_E, 0) - tiles_E
    tl.store(order + start[None, :] + before, t[:, None] * K + nth, mask=is_slot > 0)
    tl.store(counts + e, counts_E, mask=e < E)
    tl.store(tile_start + e, first, mask=e < E)
    tl.store(tile_start + E, tl.sum(tiles_E, 0))
    for j in tl.static_range((T_PAD + ROWS - 1) // ROWS):
        is_tile = j < tiles_E
        tl.store(tile_expert + first + j, e, mask=is_tile)
        tl.store(tile_row + first + j, start + j * ROWS, mask=is_tile)
        tl.store(tile_end + first + j, start + counts_E, mask=is_tile)
    tl.atomic_add(hits, tl.sum((counts_E > 0).to(tl.int32), 0))


def choose(
    logits_TE: Tensor,
    rule: Rule,
    top_k: int,
    num_tokens: Tensor,
    hits: Tensor,
    dtype: torch.dtype,
) -> tuple[Routing, Tensor]:
    """Choose `top_k` experts per token and sort the slots by expert, those of one by token.

    Args:
        logits_TE: Of the router, rows contiguous.
        rule: How logits become weights.
        top_k: K.
        num_tokens: One int on the device: tokens past it are padding and go nowhere.
        hits: One int32 on the device; grows by the experts that got a slot.
        dtype: Of the weights.

    Returns:
        The routing, and weights [T, K].
    """
    num, experts = logits_TE.shape
    ids = torch.empty((num, top_k), dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty((num, top_k), dtype=dtype, device=logits_TE.device)
    padded = triton.next_power_of_2(experts)
    meta = {"E": experts, "E_PAD": padded, "K": top_k, "RULE": rule.kind.value}
    given = num, logits_TE.stride(0), rule.jitter
    if num <= FEW and triton.next_power_of_2(num) * padded <= MOST_LOGITS:
        rows = tile_rows(ids.numel(), experts)
        out = empty_routing(ids, experts, rows)
        block = triton.next_power_of_2(num)
        _choose_and_sort[(1,)](
            logits_TE, num_tokens, ids, weights, hits, *out[1:], *given, **meta,
            T_PAD=block, ROWS=rows, num_warps=8 if block * padded >= 4096 else 4,
        )  # fmt: skip
        return out, weights
    block = max(1, min(16, 2048 // padded))
    _choose[(triton.cdiv(num, block),)](logits_TE, ids, weights, *given, **meta, T_PAD=block)
    return route(ids, num_tokens, experts, hits), weights
