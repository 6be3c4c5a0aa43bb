"""Fused experts: sort the slots by expert, two grouped products, weighted sum of the slots.

    ids_TK -> count, sort             Routing: order of the slots, tiles of at most BLOCK_M rows
    experts [lo, hi) of the tiles     h = act(x @ gate, x @ up); slot(t, k) = h @ down
    combine                           out[t] = sum over k of weight[t, k] * slot(t, k), k ascending

Each slot has its own row, so the sum does not depend on which experts ran together. The grid of a
range is an upper bound known on the host; programs after the last tile of the range return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import ExpertWeights, Routing, Sum, empty_routing, max_tiles
from qllm.kernels.triton.codes import code_arguments, code_values
from qllm.kernels.triton.tiles import column_block, expert_tile, scan_block, tile_rows


@triton.jit
def _count(
    ids, num_tokens, counts, hits, num_slots, num_counted, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    live = tl.minimum(tl.load(num_tokens).to(tl.int32) * K, num_slots)
    found = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_slots, BLOCK):
        i = at + tl.arange(0, BLOCK)
        found += (tl.load(ids + i, mask=i < live, other=-1) == expert).to(tl.int32)
    total = tl.sum(found, 0)
    tl.store(counts + expert, total)
    if (total > 0) & (expert < num_counted):
        tl.atomic_add(hits, 1)


@triton.jit
def _sort(
    ids, num_tokens, counts, order, tile_start, tile_expert, tile_row, tile_end, num_slots,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    counts_E = tl.load(counts + e, mask=e < E, other=0)
    tiles_E = (counts_E + ROWS - 1) // ROWS
    start = tl.sum(tl.where(e < expert, counts_E, 0), 0)
    first = tl.sum(tl.where(e < expert, tiles_E, 0), 0)
    mine = tl.sum(tl.where(e == expert, counts_E, 0), 0)
    num_tiles = (mine + ROWS - 1) // ROWS
    tl.store(tile_start + expert, first)
    tl.store(tile_start + E, first + num_tiles, mask=expert == E - 1)
    for at in range(0, num_tiles, BLOCK):
        i = at + tl.arange(0, BLOCK)
        is_tile = i < num_tiles
        tl.store(tile_expert + first + i, tl.zeros([BLOCK], tl.int32) + expert, mask=is_tile)
        tl.store(tile_row + first + i, start + i * ROWS, mask=is_tile)
        tl.store(tile_end + first + i, tl.zeros([BLOCK], tl.int32) + start + mine, mask=is_tile)
    if mine == 0:
        return
    live = tl.minimum(tl.load(num_tokens).to(tl.int32) * K, num_slots)
    place = start
    for at in range(0, num_slots, BLOCK):
        i = at + tl.arange(0, BLOCK)
        is_mine = (tl.load(ids + i, mask=i < live, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, i, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)


@triton.jit
def _up(
    x, w, shared, bias, scale, offset, h, order, tile_start, tile_expert, tile_row, tile_end, lo,
    hi, places, x_t, w_e, w_f, w_d, bias_e, scale_e, scale_f,
    D: tl.constexpr, I: tl.constexpr, K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    F_STEP: tl.constexpr, F_UP: tl.constexpr, HAS_BIAS: tl.constexpr, GPT_OSS: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PLACED: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tile_start + lo) + tl.program_id(0)
    if tile >= tl.load(tile_start + hi):
        return
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    expert = tl.load(tile_expert + tile).to(tl.int64)
    stored = expert
    if PLACED:
        stored = tl.load(places + expert)
    place = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(tile_end + tile)
    tok = (tl.load(order + place, mask=is_row, other=0) // K).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = n < I
    d = tl.arange(0, BLOCK_K)
    x_at = x + tok[:, None] * x_t + d[None, :]
    INTERLEAVED: tl.constexpr = F_STEP == 2
    if INTERLEAVED:  # gate and up alternate, so one wide load reads 2 * BLOCK_N neighbours
        f = tl.program_id(1) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        is_f = f < 2 * I
        both_at = w + stored * w_e + f[None, :] * w_f + d[:, None] * w_d
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
    else:
        own, ups = w + stored * w_e, F_UP * w_f
        if S > 0:
            if expert >= E:
                own = shared + (expert - E) * I * w_f
            ups = tl.where(expert < E, F_UP, S * I) * w_f
        gate_at = own + n[None, :] * w_f + d[:, None] * w_d
        up_at = gate_at + ups
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, D, BLOCK_K):
        is_in = d < D - k
        xx = tl.load(x_at + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
        if CODE > 0:
            gate_w, gate_s = w + stored * w_e, scale + stored * scale_e
            gate_o = offset + stored * scale_e
            ww = code_values(
                gate_w, gate_s, gate_o, n, k, is_col, w_f, scale_f, D, CODE, GROUP, HAS_OFFSET,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            gate += tl.dot(xx, ww)
            ww = code_values(
                gate_w, gate_s, gate_o, n + F_UP, k, is_col, w_f, scale_f, D, CODE, GROUP,
                HAS_OFFSET, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            up += tl.dot(xx, ww)
        elif INTERLEAVED:
            mask = is_in[:, None] & is_f[None, :]
            ww = tl.load(both_at + k * w_d, mask=mask, other=0.0)
            both += tl.dot(xx, ww, input_precision=precision)
        else:
            mask = is_in[:, None] & is_col[None, :]
            ww = tl.load(gate_at + k * w_d, mask=mask, other=0.0)
            gate += tl.dot(xx, ww, input_precision=precision)
            ww = tl.load(up_at + k * w_d, mask=mask, other=0.0)
            up += tl.dot(xx, ww, input_precision=precision)
    if INTERLEAVED:
        if HAS_BIAS:
            b = tl.load(bias + expert * bias_e + f, mask=is_f, other=0.0)
            both += b.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
    elif HAS_BIAS:
        at = bias + expert * bias_e + n
        gate += tl.load(at, mask=is_col, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + F_UP, mask=is_col, other=0.0).to(tl.float32)[None, :]
    # Like transformers, which stores the product before the activation.
    gate = gate.to(h.dtype.element_ty).to(tl.float32)
    up = up.to(h.dtype.element_ty).to(tl.float32)
    if GPT_OSS:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        y = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(
        h + place.to(tl.int64)[:, None] * I + n[None, :],
        y.to(h.dtype.element_ty),
        mask=is_row[:, None] & is_col[None, :],
    )


@triton.jit
def _down(
    h, w, shared, bias, scale, offset, slots, order, tile_start, tile_expert, tile_row, tile_end,
    lo, hi, places, w_e, w_d, w_i, bias_e, scale_e, scale_d,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, S: tl.constexpr, HAS_BIAS: tl.constexpr,
    IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PLACED: tl.constexpr,
    CODE: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tile_start + lo) + tl.program_id(1)
    if tile >= tl.load(tile_start + hi):
        return
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    expert = tl.load(tile_expert + tile).to(tl.int64)
    stored = expert
    if PLACED:
        stored = tl.load(places + expert)
    place = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(tile_end + tile)
    slot = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = n < D
    i = tl.arange(0, BLOCK_K)
    h_at = h + place.to(tl.int64)[:, None] * I + i[None, :]
    own, row = w + stored * w_e, w_d
    if S > 0:
        if expert >= E:
            own = shared + (expert - E) * I
        row = tl.where(expert < E, w_d, S * I)
    w_at = own + n[None, :] * row + i[:, None] * w_i
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, I, BLOCK_K):
        is_in = i < I - k
        hh = tl.load(h_at + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
        if CODE > 0:
            ww = code_values(
                w + stored * w_e, scale + stored * scale_e, offset + stored * scale_e, n, k, is_col,
                w_d, scale_d, I, CODE, GROUP, HAS_OFFSET, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            ww = tl.load(w_at + k * w_i, mask=is_in[:, None] & is_col[None, :], other=0.0)
        acc += tl.dot(hh, ww, input_precision=precision)
    if HAS_BIAS:
        b = tl.load(bias + expert * bias_e + n, mask=is_col, other=0.0)
        acc += b.to(tl.float32)[None, :]
    tl.store(
        slots + slot[:, None] * D + n[None, :],
        acc.to(slots.dtype.element_ty),
        mask=is_row[:, None] & is_col[None, :],
    )


@triton.jit
def _combine(
    slots, weights, num_tokens, residual, shared, shared_gate, out, weights_t, residual_t, out_t,
    multiplier,
    D: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    kind = out.dtype.element_ty
    tok = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc, more = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    own = slots + tok * (K + S) * D + d
    if tok < tl.load(num_tokens):
        for k in range(K):
            w = tl.load(weights + tok * weights_t + k).to(tl.float32)
            acc += w * tl.load(own + k * D, mask=d < D, other=0.0).to(tl.float32)
        for k in range(K, K + S):
            more += tl.load(own + k * D, mask=d < D, other=0.0).to(tl.float32)
    # Each step is rounded, like the torch operation that it replaces.
    if SHARED:
        if S == 0:
            more = tl.load(shared + tok * D + d, mask=d < D, other=0.0).to(tl.float32)
        more = more.to(kind)
        if GATED:
            gate = tl.load(shared_gate + tok).to(tl.float32)
            gate = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
            more = (more.to(tl.float32) * gate).to(kind)
        acc = acc.to(kind).to(tl.float32) + more.to(tl.float32)
    if SCALED:
        acc = acc.to(kind).to(tl.float32) * multiplier
    if ADDED:
        old = tl.load(residual + tok * residual_t + d, mask=d < D, other=0.0).to(tl.float32)
        acc = old + acc.to(kind).to(tl.float32)
    tl.store(out + tok * out_t + d, acc.to(kind), mask=d < D)


def route(
    ids_TK: Tensor, num_tokens: Tensor, num_experts: int, hits: Tensor, num_shared: int = 0
) -> Routing:
    """Sort slots by expert, and the slots of one expert by number, in two small kernels.

    Args:
        ids_TK: Experts of each token, contiguous.
        num_tokens: Number of tokens, on the device. Later tokens are padding and get no slot.
        num_experts: Experts E, without the shared ones.
        hits: One integer on the device, increased by the number of routed experts with a slot.
        num_shared: Number of shared experts. Their ids start at E.
    """
    num_slots, top_k = ids_TK.numel(), ids_TK.shape[1]
    rows, every = tile_rows(num_slots, num_experts), num_experts + num_shared
    out = empty_routing(ids_TK.contiguous(), every, rows)
    block = scan_block(num_slots)
    _count[(every,)](
        out.ids_TK, num_tokens, out.counts_E, hits, num_slots, num_experts, K=top_k, BLOCK=block
    )
    _sort[(every,)](
        out.ids_TK, num_tokens, *out[1:], num_slots, E=every,
        E_PAD=triton.next_power_of_2(every), K=top_k, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


def run_experts(
    x_TD: Tensor, weights: ExpertWeights, routing: Routing, lo: int, hi: int, slots_TKD: Tensor
) -> None:
    """Run experts [lo, hi) on the slots routed to them, in two kernels.

    Args:
        x_TD: Input of the experts, rows contiguous.
        weights: Weights of the layer's experts.
        routing: Result of `route` for these tokens.
        lo: First expert.
        hi: End of the experts. Shared experts come last and may be in the range.
        slots_TKD: Outputs, contiguous. Slots of other experts do not change.
    """
    num_slots, width = routing.ids_TK.numel(), x_TD.shape[1]
    inner, top_k = weights.inner, routing.ids_TK.shape[1]
    rows = tile_rows(num_slots, weights.num_experts)
    tiles = max_tiles(num_slots, hi - lo, rows)
    if tiles == 0:
        return
    h_SI = torch.empty((num_slots, inner), dtype=x_TD.dtype, device=x_TD.device)
    up, down, up_bias, down_bias = weights[:4]
    if up.dtype is torch.float8_e4m3fn:
        up, down = up.view(torch.uint8), down.view(torch.uint8)
    shared_up, shared_down = weights.shared or (up, down)
    tile = expert_tile(rows, x_TD.dtype, x_TD.device)
    meta = {
        "IEEE": x_TD.dtype is torch.float32, "D": width, "I": inner, "BLOCK_M": rows,
        "BLOCK_N": tile.columns, "BLOCK_K": tile.inputs, "E": weights.num_experts,
        "S": weights.num_shared, "PLACED": weights.place_E is not None, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
    if weights.first:  # the kernels look up experts by their place in the weights
        routing = routing._replace(tile_expert=routing.tile_expert - weights.first)
    places = routing.order_S if weights.place_E is None else weights.place_E
    plan = (routing.order_S, *routing[3:], lo, hi, places)
    packed_up, packed_down = weights.packed or (None, None)
    (*up_worths, up_e, up_f), up_how = code_arguments(packed_up, x_TD)
    (*down_worths, down_e, down_d), down_how = code_arguments(packed_down, x_TD)
    # Tiles are the first grid axis: those of one expert run together and share its columns in L2.
    # _down keeps columns first: its rows (of h) are too many to be read again for each block.
    _up[(tiles, triton.cdiv(inner, tile.columns))](
        x_TD, up, shared_up, x_TD if up_bias is None else up_bias, *up_worths, h_SI, *plan,
        x_TD.stride(0), *up.stride(), 0 if up_bias is None else up_bias.stride(0), up_e, up_f,
        K=top_k, F_STEP=2 if weights.interleaved else 1, F_UP=1 if weights.interleaved else inner,
        HAS_BIAS=up_bias is not None, GPT_OSS=weights.activation.value == 1, **meta,
        **up_how,
    )  # fmt: skip
    _down[(triton.cdiv(width, tile.columns), tiles)](
        h_SI, down, shared_down, x_TD if down_bias is None else down_bias, *down_worths, slots_TKD,
        *plan, *down.stride(), 0 if down_bias is None else down_bias.stride(0), down_e, down_d,
        HAS_BIAS=down_bias is not None, **meta, **down_how,
    )  # fmt: skip


def combine(
    slots_TKD: Tensor,
    weights_TK: Tensor,
    num_tokens: Tensor,
    out_TD: Tensor,
    add: Sum | None = None,
) -> None:
    """Sum weight times slot over k in fp32 (0 for padding), then apply `add` with rounding.

    Args:
        slots_TKD: Outputs of the experts, contiguous; slots without a weight are those of shared
            experts.
        weights_TK: Routing weights.
        num_tokens: One int on the device.
        out_TD: Destination.
        add: Terms that the sum is added to; None is nothing.
    """
    num, slots, width = slots_TKD.shape
    top_k = weights_TK.shape[1]
    if num == 0:
        return
    block = column_block(width)
    residual, multiplier, shared, gate = add or Sum(out_TD)
    _combine[(num, triton.cdiv(width, block))](
        slots_TKD, weights_TK, num_tokens, residual, out_TD if shared is None else shared,
        out_TD if gate is None else gate, out_TD, weights_TK.stride(0), residual.stride(0),
        out_TD.stride(0), 1.0 if multiplier is None else multiplier,
        D=width, K=top_k, S=slots - top_k, BLOCK=block, ADDED=add is not None,
        SHARED=shared is not None or slots > top_k, GATED=gate is not None,
        SCALED=multiplier is not None,
    )  # fmt: skip
