"""Norm of heads, rotary embedding, and the write of keys and values, in one launch.

One program computes a few heads of one token. It rounds where the modules of the model round: the
norm, its weight, products and sum, each to the dtype of the queries.
"""

import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import HeadNorms
from qllm.kernels.triton.tiles import HEADS


@triton.jit
def _within(x, limit):
    """Return x clipped to [-limit, limit]. A NaN stays a NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _turn(
    x, weight, cos, sin, i, is_in, eps, limit, D: tl.constexpr, NORM: tl.constexpr,
    APART: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Return the rotated halves: first * cos - second * sin, second * cos + first * sin.

    `x` points to heads, and `i` counts the elements of a half. `is_in` masks heads and elements. If
    APART, the second half has angles of its own, after those of the first half in the tables.
    Otherwise both halves use the same angles.
    """
    kind = x.dtype.element_ty
    half: tl.constexpr = D // 2
    second: tl.constexpr = half if APART else 0
    is_half = i < half
    a = tl.load(x + i, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(x + half + i, mask=is_in, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        w_a = tl.load(weight + i, mask=is_half, other=0.0).to(tl.float32)
        w_b = tl.load(weight + half + i, mask=is_half, other=0.0).to(tl.float32)
        a = (w_a * (a * scale[:, None]).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        b = (w_b * (b * scale[:, None]).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    if CLIP:
        a, b = _within(a, limit), _within(b, limit)
    cos_a = tl.load(cos + i, mask=is_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + second + i, mask=is_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + i, mask=is_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + second + i, mask=is_half, other=0.0).to(tl.float32)
    left = (a * cos_a).to(kind).to(tl.float32) + (-b * sin_a).to(kind).to(tl.float32)
    right = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
    return left.to(kind), right.to(kind)


@triton.jit
def turned(
    x, cos, sin, i, is_in, F: tl.constexpr, PAIRS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return elements `i` of rotated heads. Each is made of itself and its rotation partner.

    `x` points to heads of F elements, `cos` and `sin` to the angles of their tokens; `is_in` masks
    heads and elements. If PAIRS, the halves alternate in the input.
    """
    kind = x.dtype.element_ty
    half: tl.constexpr = F // 2
    is_left = i < half
    angle = tl.where(is_left, i, i - half)
    if PAIRS:
        own = tl.where(is_left, 2 * angle, 2 * angle + 1)
        other = tl.where(is_left, own + 1, own - 1)
    else:
        own = i
        other = tl.where(is_left, i + half, i - half)
    if APART:
        angle = i
    a = tl.load(x + own, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(x + other, mask=is_in, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=is_in, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_in, other=0.0).to(tl.float32)
    b = tl.where(is_left, -b, b)
    return ((a * c).to(kind).to(tl.float32) + (b * s).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _rotate_and_write(
    q, k, v, q_weight, k_weight, cos, sin, k_pages, v_pages, slots, out,
    q_t, q_n, k_t, k_g, v_t, v_g, r_t, out_t, out_n, q_eps, k_eps, limit,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HP: tl.constexpr, VP: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    APART: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    tok, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    q_parts: tl.constexpr = (N + HEADS - 1) // HEADS
    i, j = tl.arange(0, HP)[None, :], tl.arange(0, VP)[None, :]
    cos_at, sin_at = cos + tok * r_t, sin + tok * r_t
    slot = tl.load(slots + tok).to(tl.int64)
    if part < q_parts:
        n = (part * HEADS + tl.arange(0, HEADS))[:, None]
        is_in = (n < N) & (i < half)
        x = q + tok * q_t + n * q_n
        left, right = _turn(
            x, q_weight, cos_at, sin_at, i, is_in, q_eps, limit, D, NORM, APART, CLIP
        )
        tl.store(x + i, left, mask=is_in)
        tl.store(x + half + i, right, mask=is_in)
        if slot < 0:
            nothing = tl.zeros([HEADS, VP], out.dtype.element_ty)
            tl.store(out + tok * out_t + n * out_n + j, nothing, mask=(n < N) & (j < DV))
        return
    if slot < 0:
        return
    g = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
    is_in = (g < G) & (i < half)
    x = k + tok * k_t + g * k_g
    left, right = _turn(x, k_weight, cos_at, sin_at, i, is_in, k_eps, limit, D, NORM, APART, CLIP)
    page = k_pages + (slot * G + g) * D
    tl.store(page + i, left, mask=is_in)
    tl.store(page + half + i, right, mask=is_in)
    is_value = (g < G) & (j < DV)
    value = tl.load(v + tok * v_t + g * v_g + j, mask=is_value, other=0.0)
    if CLIP:
        value = _within(value.to(tl.float32), limit).to(value.dtype)
    tl.store(v_pages + (slot * G + g) * DV + j, value, mask=is_value)


def rotate_and_write(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    slots_T: Tensor,
    out_TNE: Tensor,
    norms: HeadNorms | None = None,
    limit: float | None = None,
) -> None:
    """Normalise and rotate queries in place, and keys and values into their slots.

    The two halves of a head rotate with each other. Values are only written. For a slot of -1 the
    kernel writes no keys and values. It writes zeros to the token's row of `out_TNE`, which no
    later kernel writes.

    Args:
        q_TND: Queries, changed in place; the last dimension is contiguous.
        k_TGD: Keys, not changed; the last dimension is contiguous.
        v_TGE: Values, not changed; the last dimension is contiguous.
        cos_TD: Cosines of each token's position, with contiguous rows. [T, D / 2] is used for both
            halves.
        sin_TD: Sines, with the shape and the strides of `cos_TD`.
        k_SGD: Pages of keys, contiguous.
        v_SGE: Pages of values, contiguous.
        slots_T: Slot of each token, int64.
        out_TNE: Output of the attention that follows; the last dimension is contiguous.
        norms: RMS norms of each head of queries and keys.
        limit: Largest size of queries and keys before rotation, and of values. Larger values are
            clipped.
    """
    num, heads, d = q_TND.shape
    groups, dv = v_TGE.shape[1:]
    if num == 0:
        return
    q_weight, k_weight, q_eps, k_eps = norms or (q_TND, k_TGD, 0.0, 0.0)
    _rotate_and_write[(num, triton.cdiv(heads, HEADS) + triton.cdiv(groups, HEADS))](
        q_TND, k_TGD, v_TGE, q_weight, k_weight, cos_TD, sin_TD, k_SGD, v_SGE, slots_T, out_TNE,
        q_TND.stride(0), q_TND.stride(1), k_TGD.stride(0), k_TGD.stride(1),
        v_TGE.stride(0), v_TGE.stride(1), cos_TD.stride(0), out_TNE.stride(0), out_TNE.stride(1),
        q_eps, k_eps, limit or 0.0,
        N=heads, G=groups, D=d, DV=dv,
        HP=triton.next_power_of_2(d // 2), VP=triton.next_power_of_2(dv),
        NORM=norms is not None, HEADS=HEADS, APART=cos_TD.shape[1] == d,
        CLIP=limit is not None, num_warps=1,
    )  # fmt: skip
