"""Rotary embedding of queries and keys, and the write of keys and values, in one launch.

One program takes one head of one token. It rounds where the modules of the model round: products
and sum each to the dtype of the queries.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(x, first, second, cos, sin, half, is_half):
    """Both halves of a head, rotated: first * cos - second * sin, second * cos + first * sin."""
    kind = x.dtype.element_ty
    a = tl.load(x + first, mask=is_half, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=is_half, other=0.0).to(tl.float32)
    cos_a = tl.load(cos, mask=is_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + half, mask=is_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin, mask=is_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + half, mask=is_half, other=0.0).to(tl.float32)
    left = (a * cos_a).to(kind).to(tl.float32) + (-b * sin_a).to(kind).to(tl.float32)
    right = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
    return left.to(kind), right.to(kind)


@triton.jit
def _rotate_and_write(
    q, k, v, cos, sin, k_pages, v_pages, slots, q_t, q_n, k_t, k_g, v_t, v_g, r_t,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    tok, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HP)
    is_half = i < half
    if head < N:
        x = q + tok * q_t + head * q_n
        left, right = _turn(x, i, i + half, cos + tok * r_t + i, sin + tok * r_t + i, half, is_half)
        tl.store(x + i, left, mask=is_half)
        tl.store(x + half + i, right, mask=is_half)
        return
    slot = tl.load(slots + tok).to(tl.int64)
    if slot < 0:
        return
    g = head - N
    x = k + tok * k_t + g * k_g
    left, right = _turn(x, i, i + half, cos + tok * r_t + i, sin + tok * r_t + i, half, is_half)
    page = k_pages + (slot * G + g) * D
    tl.store(page + i, left, mask=is_half)
    tl.store(page + half + i, right, mask=is_half)
    j = tl.arange(0, VP)
    value = tl.load(v + tok * v_t + g * v_g + j, mask=j < DV, other=0.0)
    tl.store(v_pages + (slot * G + g) * DV + j, value, mask=j < DV)


def rotate_and_write(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    slots_T: Tensor,
) -> None:
    """Rotate queries in place; put rotated keys, and values, into their slots.

    The two halves of a head rotate with each other. A slot of -1 writes nothing.

    Args:
        q_TND: Queries, changed; the last dimension is contiguous.
        k_TGD: Keys, likewise, not changed.
        v_TGE: Values, likewise.
        cos_TD: Of each token's position, contiguous rows.
        sin_TD: Likewise, with the strides of `cos_TD`.
        k_SGD: Pages of keys, contiguous.
        v_SGE: Pages of values, contiguous.
        slots_T: Slot of each token, int64.
    """
    num, heads, d = q_TND.shape
    groups, dv = v_TGE.shape[1:]
    if num == 0:
        return
    _rotate_and_write[(num, heads + groups)](
        q_TND, k_TGD, v_TGE, cos_TD, sin_TD, k_SGD, v_SGE, slots_T,
        q_TND.stride(0), q_TND.stride(1), k_TGD.stride(0), k_TGD.stride(1),
        v_TGE.stride(0), v_TGE.stride(1), cos_TD.stride(0),
        N=heads, G=groups, D=d, DV=dv,
        HP=triton.next_power_of_2(d // 2), VP=triton.next_power_of_2(dv),
        num_warps=1,
    )  # fmt: skip
