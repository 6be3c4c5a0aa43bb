"""RMSNorm of rows, alone or of a sum; and the gated activation of a dense or shared MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.triton.tiles import column_block, row_block


@triton.jit
def weighted(weight, x, d, kind: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Return the weight times a row in fp32. Unless WIDE, the row is rounded before."""
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if WIDE:
        return (w * x).to(kind)
    return (w * x.to(kind).to(tl.float32)).to(kind)


@triton.jit
def _rms_norm(x, weight, out, x_t, eps, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    tok = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    xx = tl.load(x + tok * x_t + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(xx * xx, 0) / D + eps)
    y = weighted(weight, xx * scale, d, out.dtype.element_ty, D, WIDE)
    tl.store(out + tok * D + d, y, mask=d < D)


@triton.jit
def _add_rms_norm(
    residual, x, weight, total, out, exact, residual_t, x_t, eps, multiplier,
    D: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    kind = out.dtype.element_ty
    tok = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    xx = tl.load(x + tok * x_t + d, mask=d < D, other=0.0).to(tl.float32)
    if SCALED:
        xx = (xx * multiplier).to(kind).to(tl.float32)
    old = tl.load(residual + tok * residual_t + d, mask=d < D, other=0.0).to(tl.float32)
    xx = (old + xx).to(kind)
    tl.store(total + tok * D + d, xx, mask=d < D)
    xx = xx.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(xx * xx, 0) / D + eps)
    y = weighted(weight, xx * scale, d, kind, D, WIDE)
    tl.store(out + tok * D + d, y, mask=d < D)
    if EXACT:
        tl.store(exact + tok * D + d, y.to(tl.float32), mask=d < D)


@triton.jit
def _silu_mul(x, out, x_t, I: tl.constexpr, BLOCK: tl.constexpr):
    kind = out.dtype.element_ty
    tok = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + tok * x_t + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(x + tok * x_t + I + i, mask=i < I, other=0.0).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(out + tok * I + i, y.to(kind), mask=i < I)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, wide: bool = False) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps); the mean is fp32, rounded before the weight.

    Args:
        x_TD: Rows, the last dimension contiguous.
        weight_D: Weight, of the dtype of `x_TD`.
        eps: Number added to the mean of squares.
        wide: True if the norm rounds only after the weight.
    """
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    num, width = x_TD.shape
    if num:
        rows = x_TD, weight_D, out, x_TD.stride(0), eps
        _rms_norm[(num,)](*rows, WIDE=wide, **_blocks(width))
    return out


def add_rms_norm(
    residual_TD: Tensor,
    x_TD: Tensor,
    multiplier: float | None,
    weight_D: Tensor,
    eps: float,
    wide: bool = False,
    in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum residual + x * multiplier, rounded as torch rounds it, and its `rms_norm`.

    Args:
        residual_TD: Rows, the last dimension contiguous.
        x_TD: Rows, the last dimension contiguous.
        multiplier: Factor of `x_TD`; None is 1.
        weight_D: Weight of the norm.
        eps: Number that the norm adds to the mean of squares.
        wide: True if the norm rounds only after the weight.
        in_fp32: True if the norm is also returned in fp32, with the same values.

    Returns:
        The sum; its norm; and the norm in fp32 with `in_fp32`, else the norm again.
    """
    num, width = x_TD.shape
    total, out = (torch.empty((num, width), dtype=x_TD.dtype, device=x_TD.device) for _ in "ab")
    is_more = in_fp32 and x_TD.dtype is not torch.float32
    exact = torch.empty(out.shape, dtype=torch.float32, device=x_TD.device) if is_more else out
    if num:
        _add_rms_norm[(num,)](
            residual_TD, x_TD, weight_D, total, out, exact, residual_TD.stride(0), x_TD.stride(0),
            eps, 1.0 if multiplier is None else multiplier,
            SCALED=multiplier is not None, WIDE=wide, EXACT=is_more, **_blocks(width),
        )  # fmt: skip
    return total, out, exact


def silu_mul(x_TF: Tensor) -> Tensor:
    """Return silu(gate) * up of rows that hold gates first, then ups: [T, F / 2]."""
    num, width = x_TF.shape[0], x_TF.shape[1] // 2
    out = torch.empty((num, width), dtype=x_TF.dtype, device=x_TF.device)
    if num and width:
        block = column_block(width)
        grid = num, triton.cdiv(width, block)
        _silu_mul[grid](x_TF, out, x_TF.stride(0), I=width, BLOCK=block)
    return out


def _blocks(width: int) -> dict[str, int]:
    block, warps = row_block(width)
    return {"D": width, "BLOCK": block, "num_warps": warps}
