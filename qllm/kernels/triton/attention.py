"""Paged attention: ragged prefill and decode over pages of keys and values.

    pages       k_SGD: slot s = page * page_size + offset holds the keys of one token
    tables      tables_RP[r, p]: the page of tokens [p * page_size, ...) of sequence r
    tiles       up to BLOCK_Q consecutive queries of one sequence; a tile of length 0 is skipped

One program computes a tile for a KV head and up to 16 of its query heads; the (query, head) pairs
are the rows of its matrix products. Decode tiles have one query. Its keys are divided into ranges,
which a second kernel joins. The division depends only on the model and on the length of the
sequence, so a sequence has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import Angles
from qllm.kernels.tiles import Tiles
from qllm.kernels.triton.rope import turned
from qllm.kernels.triton.tiles import attention_tile

LOG2E = 1.4426950408889634
PROGRAMS = 128
"""Approximate number of programs for a decode tile, enough to fill a GPU at batch 1."""
SPLITS = 8, 32
"""Fewest and most key ranges of a decode tile, both powers of two."""
SHORT_BLOCKS = 16
"""Most key blocks of a sequence with one block per range. Longer sequences have two or more per
range."""
MAX_HEADS = 16
"""Most query heads of one program."""
MAX_SUMS = 128 * 128
"""Most fp32 numbers that a program sums into: rows times value width."""


@triton.jit
def _ranges(
    first_pos, n, window, BLOCK_S: tl.constexpr, NUM_SPLITS: tl.constexpr, SHORT: tl.constexpr
):
    """Return the first key of `n` queries from `first_pos` on, and key blocks (all, per range)."""
    low = 0
    if window > 0:
        low = tl.maximum(first_pos - window + 1, 0) // BLOCK_S * BLOCK_S
    num_blocks = tl.cdiv(first_pos + n - low, BLOCK_S)
    fewest = tl.where(num_blocks <= SHORT, 1, 2)
    return low, num_blocks, tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), fewest)


@triton.jit
def _attend(
    q, k, v, q2, k2, cos, sin, sinks, out, part, tables, t_seq, t_tok, t_len, t_pos,
    q_t, q_n, q2_t, q2_n, r_t, k_s, k_g, k2_s, v_s, v_g, out_t, out_n, table_r, scale, window,
    R: tl.constexpr, RC: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    D2: tl.constexpr, D2_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_S: tl.constexpr, NUM_SPLITS: tl.constexpr, SINKS: tl.constexpr,
    SHORT: tl.constexpr, IEEE: tl.constexpr, TURN: tl.constexpr, PAIRS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    n = tl.load(t_len + tile).to(tl.int32)
    if n == 0:
        return
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    chunks: tl.constexpr = R // RC
    g, chunk = tl.program_id(1) // chunks, tl.program_id(1) % chunks
    seq, first_tok = tl.load(t_seq + tile), tl.load(t_tok + tile)
    first_pos = tl.load(t_pos + tile).to(tl.int32)
    low, num_blocks, per_split = _ranges(first_pos, n, window, BLOCK_S, NUM_SPLITS, SHORT)
    begin = split * per_split
    if (NUM_SPLITS > 1) & (begin >= num_blocks):
        return
    row = tl.arange(0, ROWS)
    query = row // RC
    head = g * R + chunk * RC + row % RC
    is_row = query < n
    pos = first_pos + query
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    tok = (first_tok + query).to(tl.int64)
    qq = tl.load(
        q + tok[:, None] * q_t + head[:, None] * q_n + d[None, :],
        mask=is_row[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if D2 > 0:
        d2 = tl.arange(0, D2_PAD)
        q2_at = q2 + tok[:, None] * q2_t + head[:, None] * q2_n
        is_in = is_row[:, None] & (d2 < D2)[None, :]
        if TURN:
            angle = tok[:, None] * r_t
            qq2 = turned(q2_at, cos + angle, sin + angle, d2[None, :], is_in, D2, PAIRS, APART)
        else:
            qq2 = tl.load(q2_at + d2[None, :], mask=is_in, other=0.0)
    num_keys = first_pos + n
    end = tl.minimum(begin + per_split, num_blocks)
    if NUM_SPLITS == 1:
        end = num_blocks
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    for block in range(begin, end):
        j = low + block * BLOCK_S + tl.arange(0, BLOCK_S)
        is_key = j < num_keys
        page = tl.load(tables + seq * table_r + j // PAGE, mask=is_key, other=0)
        slot = page.to(tl.int64) * PAGE + j % PAGE
        kk = tl.load(
            k + slot[None, :] * k_s + g * k_g + d[:, None],
            mask=is_key[None, :] & (d < D)[:, None],
            other=0.0,
        )
        s = tl.dot(qq, kk, input_precision=precision)
        if D2 > 0:
            kk2 = tl.load(
                k2 + slot[None, :] * k2_s + d2[:, None],
                mask=is_key[None, :] & (d2 < D2)[:, None],
                other=0.0,
            )
            s += tl.dot(qq2, kk2, input_precision=precision)
        seen = is_key[None, :] & (j[None, :] <= pos[:, None])
        if window > 0:
            seen = seen & (j[None, :] > pos[:, None] - window)
        s = tl.where(seen, s * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        shrink = tl.exp2(m - m_safe)
        total = total * shrink + tl.sum(p, 1)
        vv = tl.load(
            v + slot[:, None] * v_s + g * v_g + dv[None, :],
            mask=is_key[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        acc = acc * shrink[:, None] + tl.dot(p.to(vv.dtype), vv, input_precision=precision)
        m = m_new
    if NUM_SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
            m_new = tl.maximum(m, sink)
            shrink = tl.exp2(m - m_new)
            total = total * shrink + tl.exp2(sink - m_new)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(is_row, total, 1.0)[:, None]
        tl.store(
            out + tok[:, None] * out_t + head[:, None] * out_n + dv[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_row[:, None] & (dv < DV)[None, :],
        )
    else:
        # One query per tile: the rows are heads. [tile, head, split, DV + 2]
        heads = tl.num_programs(1) * RC
        at = ((tile * heads + head) * NUM_SPLITS + split).to(tl.int64) * (DV + 2)
        tl.store(part + at[:, None] + dv[None, :], acc, mask=is_row[:, None] & (dv < DV)[None, :])
        tl.store(part + at + DV, m, mask=is_row)
        tl.store(part + at + DV + 1, total, mask=is_row)


@triton.jit
def _join(
    part, sinks, out, t_tok, t_len, t_pos, out_t, out_n, window,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_S: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SHORT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    n = tl.load(t_len + tile).to(tl.int32)
    if n == 0:
        return
    first_pos = tl.load(t_pos + tile).to(tl.int32)
    _low, num_blocks, per_split = _ranges(first_pos, n, window, BLOCK_S, NUM_SPLITS, SHORT)
    split, dv = tl.arange(0, NUM_SPLITS), tl.arange(0, DV_PAD)
    at = ((tile * tl.num_programs(1) + head).to(tl.int64) * NUM_SPLITS + split) * (DV + 2)
    is_range = split * per_split < num_blocks
    m_S = tl.load(part + at + DV, mask=is_range, other=float("-inf"))
    m = tl.max(m_S, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    share_S = tl.exp2(m_S - m)
    total = tl.sum(tl.load(part + at + DV + 1, mask=is_range, other=0.0) * share_S, 0)
    if SINKS:
        total += tl.exp2(sink - m)
    is_in = is_range[:, None] & (dv < DV)[None, :]
    acc = tl.load(part + at[:, None] + dv[None, :], mask=is_in, other=0.0)
    y = tl.sum(acc * share_S[:, None], 0) / total
    tok = tl.load(t_tok + tile).to(tl.int64)
    tl.store(out + tok * out_t + head * out_n + dv, y.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def _write(
    k, v, k_pages, v_pages, slots, k_t, k_g, v_t, v_g,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    tok = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + tok).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, KP)
    x = tl.load(k + tok * k_t + i // D * k_g + i % D, mask=i < G * D, other=0.0)
    tl.store(k_pages + slot * (G * D) + i, x, mask=i < G * D)
    i = tl.arange(0, VP)
    x = tl.load(v + tok * v_t + i // DV * v_g + i % DV, mask=i < G * DV, other=0.0)
    tl.store(v_pages + slot * (G * DV) + i, x, mask=i < G * DV)


def write(k_TGD: Tensor, v_TGE: Tensor, k_SGD: Tensor, v_SGE: Tensor, slots_T: Tensor) -> None:
    """Write keys and values of tokens to their slots; a slot of -1 writes nothing.

    Args:
        k_TGD: Keys; the last dimension is contiguous.
        v_TGE: Values; the last dimension is contiguous.
        k_SGD: Pages of keys, contiguous.
        v_SGE: Pages of values, contiguous.
        slots_T: Slot of each token, int64.
    """
    num, groups, d = k_TGD.shape
    dv = v_TGE.shape[2]
    if num == 0:
        return
    _write[(num,)](
        k_TGD, v_TGE, k_SGD, v_SGE, slots_T,
        k_TGD.stride(0), k_TGD.stride(1), v_TGE.stride(0), v_TGE.stride(1),
        G=groups, D=d, DV=dv,
        KP=triton.next_power_of_2(groups * d), VP=triton.next_power_of_2(groups * dv),
    )  # fmt: skip


def _heads_per_program(ratio: int, block: int, width: int) -> int:
    """Return the heads of one KV head whose sums fit into a program's registers together."""
    most = max(1, min(MAX_HEADS, MAX_SUMS // (width * block)))
    return max(n for n in range(1, ratio + 1) if ratio % n == 0 and n <= most)


def _splits(programs: int) -> int:
    """Return the most ranges of a tile with `programs` programs per range: a power of two."""
    fewest, most = SPLITS
    return min(most, max(fewest, 1 << (PROGRAMS // programs).bit_length() >> 1))


def attend(
    q_TND: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    tables_RP: Tensor,
    tiles: Tiles,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    sinks_N: Tensor | None = None,
    q_rope_TNF: Tensor | None = None,
    k_rope_SF: Tensor | None = None,
    q_angles: Angles | None = None,
    out_TNE: Tensor,
) -> None:
    """Compute causal attention of every query of the tiles over its sequence's pages.

    The keys of the queries are already in their pages. The outputs of queries in no tile are not
    written.

    Args:
        q_TND: Queries.
        k_SGD: Pages of keys, G KV heads.
        v_SGE: Pages of values; for MLA the latents, which are also the keys.
        tables_RP: Pages of each sequence, int32.
        tiles: Tiles of the queries.
        page_size: Tokens per page.
        scale: Factor of the scores.
        window: Keys that a query sees, itself included; None is all.
        sinks_N: Logit per head of a key that takes weight and has no value.
        q_rope_TNF: Second part of the queries (MLA), multiplied with `k_rope_SF`.
        k_rope_SF: Second part of the keys, one KV head for all.
        q_angles: Angles by which the kernel rotates `q_rope_TNF`; None if it is rotated already.
        out_TNE: Output, written in place.
    """
    _, num_heads, d = q_TND.shape
    groups, dv = k_SGD.shape[1], v_SGE.shape[2]
    ratio = num_heads // groups
    is_mla = q_rope_TNF is not None
    q2, k2 = (q_TND, k_SGD) if q_rope_TNF is None or k_rope_SF is None else (q_rope_TNF, k_rope_SF)
    turn = q_angles or Angles(q2, q2, False)
    meta = {
        "R": ratio, "D": d, "D_PAD": max(16, triton.next_power_of_2(d)),
        "D2": q2.shape[2] if is_mla else 0, "D2_PAD": max(16, triton.next_power_of_2(q2.shape[2])),
        "DV": dv, "DV_PAD": max(16, triton.next_power_of_2(dv)), "PAGE": page_size,
        "SINKS": sinks_N is not None, "SHORT": SHORT_BLOCKS,
        "IEEE": q_TND.dtype is torch.float32, "TURN": q_angles is not None,
        "PAIRS": turn.in_pairs, "APART": q_angles is not None and turn.apart == q2.shape[2],
    }  # fmt: skip
    widths = meta["D_PAD"], meta["D2_PAD"] if is_mla else 0, meta["DV_PAD"]
    for part in tiles.parts:
        num = part.num_tiles
        if num == 0:
            continue
        per_program = _heads_per_program(ratio, part.block, meta["DV_PAD"])
        splits = _splits(groups * (ratio // per_program)) if part.block == 1 else 1
        rows = max(16, triton.next_power_of_2(part.block * per_program))
        tile = attention_tile(rows, widths, q_TND.dtype, q_TND.device)
        shape = (num * num_heads * splits * (dv + 2),) if splits > 1 else (1,)
        partial = torch.empty(shape, dtype=torch.float32, device=q_TND.device)
        _attend[(num, groups * (ratio // per_program), splits)](
            q_TND, k_SGD, v_SGE, q2, k2, turn.cos_TD, turn.sin_TD,
            q_TND if sinks_N is None else sinks_N, out_TNE, partial,
            tables_RP, part.seq, part.tok, part.num, part.pos,
            q_TND.stride(0), q_TND.stride(1), q2.stride(0), q2.stride(1), turn.cos_TD.stride(0),
            k_SGD.stride(0), k_SGD.stride(1), k2.stride(0), v_SGE.stride(0), v_SGE.stride(1),
            out_TNE.stride(0), out_TNE.stride(1), tables_RP.stride(0), scale * LOG2E, window or 0,
            RC=per_program, ROWS=rows, NUM_SPLITS=splits, BLOCK_S=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, **meta,
        )  # fmt: skip
        if splits > 1:
            _join[(num, num_heads)](
                partial, q_TND if sinks_N is None else sinks_N, out_TNE, part.tok, part.num,
                part.pos, out_TNE.stride(0), out_TNE.stride(1), window or 0,
                DV=dv, DV_PAD=meta["DV_PAD"], BLOCK_S=tile.inputs, NUM_SPLITS=splits,
                SHORT=SHORT_BLOCKS, SINKS=meta["SINKS"],
            )  # fmt: skip
