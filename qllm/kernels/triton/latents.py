"""MLA before its attention: norms, the key's rotation, and the write of latents, in one launch.

Two programs compute a token. One computes its compressed queries, the other its latent and its
rotated key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.routing import Angles, Norm
from qllm.kernels.triton.norm import weighted
from qllm.kernels.triton.rope import turned
from qllm.kernels.triton.tiles import column_block


@triton.jit
def _normed(x, weight, d, eps, D: tl.constexpr):
    """Return a row, normed like `norm.rms_norm`."""
    xx = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(xx * xx, 0) / D + eps)
    return weighted(weight, xx * scale, d, x.dtype.element_ty, D, False)


@triton.jit
def _write_latents(
    kv, weight, q, q_weight, q_out, cos, sin, c_pages, r_pages, slots, out,
    kv_t, q_t, r_t, eps, q_eps,
    Q: tl.constexpr, Q_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, F: tl.constexpr,
    F_PAD: tl.constexpr, PAIRS: tl.constexpr, APART: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tok = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        d = tl.arange(0, Q_PAD)
        tl.store(q_out + tok * Q + d, _normed(q + tok * q_t, q_weight, d, q_eps, Q), mask=d < Q)
        return
    slot = tl.load(slots + tok).to(tl.int64)
    if slot < 0:  # no attention tile covers this token
        for at in range(0, OUT, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(out + tok * OUT + i, tl.zeros([BLOCK], out.dtype.element_ty), mask=i < OUT)
        return
    d = tl.arange(0, R_PAD)
    own = kv + tok * kv_t
    tl.store(c_pages + slot * R + d, _normed(own, weight, d, eps, R), mask=d < R)
    i = tl.arange(0, F_PAD)
    key = turned(own + R, cos + tok * r_t, sin + tok * r_t, i, i < F, F, PAIRS, APART)
    tl.store(r_pages + slot * F + i, key, mask=i < F)


def write_latents(
    kv_TD: Tensor,
    norm: Norm,
    angles: Angles,
    c_SR: Tensor,
    k_rope_SF: Tensor,
    slots_T: Tensor,
    out_TNR: Tensor,
    q_TQ: Tensor | None = None,
    q_norm: Norm | None = None,
) -> Tensor | None:
    """Write normed latents and rotated keys to their slots; return normed compressed queries.

    For a slot of -1 the kernel writes no latents and keys. It writes zeros to the token's row of
    `out_TNR`, which no later kernel writes.

    Args:
        kv_TD: Latent of each token, then its key before rotation: D = R + F; rows contiguous.
        norm: Norm of the latents.
        angles: Angles of the keys.
        c_SR: Pages of latents, contiguous.
        k_rope_SF: Pages of rotated keys, contiguous.
        slots_T: Slot of each token, int64.
        out_TNR: Output of the attention that follows; contiguous.
        q_TQ: Compressed queries, rows contiguous; None if queries are not compressed.
        q_norm: Norm of the compressed queries; None if there are none.

    Returns:
        The normed queries [T, Q]; None if queries are not compressed.
    """
    num, rank, width = kv_TD.shape[0], c_SR.shape[1], k_rope_SF.shape[1]
    queries, weights, eps = kv_TD, norm.weight_D, 0.0
    normed = None
    if q_TQ is not None and q_norm is not None:
        queries, (weights, eps) = q_TQ, q_norm
        normed = torch.empty(q_TQ.shape, dtype=q_TQ.dtype, device=q_TQ.device)
    if num == 0:
        return normed
    blocks = [triton.next_power_of_2(n) for n in (queries.shape[1], rank, width)]
    _write_latents[(num, 1 if normed is None else 2)](
        kv_TD, norm.weight_D, queries, weights, kv_TD if normed is None else normed,
        angles.cos_TD, angles.sin_TD, c_SR, k_rope_SF, slots_T, out_TNR,
        kv_TD.stride(0), queries.stride(0), angles.cos_TD.stride(0), norm.eps, eps,
        Q=queries.shape[1], Q_PAD=blocks[0], R=rank, R_PAD=blocks[1], F=width, F_PAD=blocks[2],
        PAIRS=angles.in_pairs, APART=angles.apart == width, OUT=out_TNR[0].numel(),
        BLOCK=column_block(out_TNR[0].numel()),
    )  # fmt: skip
    return normed
