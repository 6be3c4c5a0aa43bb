"""RMSNorm of rows: one kernel in place of the six that the written-out formula takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, x_t, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    tok = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    xx = tl.load(x + tok * x_t + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(xx * xx, 0) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    y = w.to(tl.float32) * (xx * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + tok * D + d, y.to(out.dtype.element_ty), mask=d < D)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise: weight * x / sqrt(mean(x^2) + eps), the mean in fp32, rounded before the weight.

    Args:
        x_TD: Rows, the last dimension contiguous.
        weight_D: Of the dtype of `x_TD`.
        eps: Added to the mean of squares.
    """
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    num, width = x_TD.shape
    if num:
        block = triton.next_power_of_2(width)
        _rms_norm[(num,)](
            x_TD, weight_D, out, x_TD.stride(0), eps, D=width, BLOCK=block,
            num_warps=8 if block >= 2048 else 4 if block >= 512 else 1,
        )  # fmt: skip
    return out
