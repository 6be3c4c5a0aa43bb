"""Values of quantised weights inside a kernel, loaded by blocks of inputs and outputs."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qllm.kernels.quantised import Code, Quantised

CODES: tuple[Code, ...] = ("u4", "i4", "e2m1", "i8", "e4m3")
"""Codes in the order of their numbers in the kernels, from 1. Codes of 4 bits come first."""


@triton.jit
def _worths(
    per_group, n, k, is_col, n_stride,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return group values of inputs [k, k + BLOCK_K), fp32 [BLOCK_K, BLOCK_N] or [1, BLOCK_N]."""
    NUM: tl.constexpr = (D + GROUP - 1) // GROUP
    if NUM == 1 or GROUP % BLOCK_K == 0:
        rows = k // GROUP + tl.arange(0, 1)
    elif BLOCK_K % GROUP == 0:
        rows = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
    else:
        rows = (k + tl.arange(0, BLOCK_K)) // GROUP
    at = per_group + n[None, :] * n_stride + rows[:, None]
    found = tl.load(at, mask=(rows < NUM)[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    if NUM > 1 and GROUP < BLOCK_K and BLOCK_K % GROUP == 0:
        whole = tl.broadcast_to(found[:, None, :], [BLOCK_K // GROUP, GROUP, BLOCK_N])
        found = tl.reshape(whole, [BLOCK_K, BLOCK_N])
    return found


@triton.jit
def code_values(
    w, scale, offset, n, k, is_col, w_n, scale_n,
    D: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return quantised weights of inputs [k, k + BLOCK_K) and outputs n, bf16 [BLOCK_K, BLOCK_N].

    The function does the same fp32 operations as `Quantised.dequantised`, so the bits are the same.
    """
    if CODE <= 3:  # two codes in a byte, the low half first
        pair = tl.arange(0, BLOCK_K // 2)
        is_in = (k + 2 * pair < D)[:, None] & is_col[None, :]
        both = tl.load(w + n[None, :] * w_n + (k // 2 + pair)[:, None], mask=is_in, other=0)
        codes = tl.permute(tl.join(both & 15, both >> 4), [0, 2, 1])
        codes = tl.reshape(codes, [BLOCK_K, BLOCK_N]).to(tl.int32)
    else:
        d = tl.arange(0, BLOCK_K)
        is_in = (k + d < D)[:, None] & is_col[None, :]
        codes = tl.load(w + n[None, :] * w_n + (k + d)[:, None], mask=is_in, other=0).to(tl.int32)
    if CODE == 3:  # e2m1
        power, part = (codes >> 1) & 3, codes & 1
        size = tl.where(power == 0, part, (2 + part) << (power - 1)).to(tl.float32) * 0.5
        value = tl.where(codes > 7, size * -1.0, size)  # 0.0 - size would give no -0
    elif CODE == 5:  # e4m3: below 2**-6 multiples of 2**-9, else with an implicit leading bit
        power, part = (codes >> 3) & 15, codes & 7
        tiny = part.to(tl.float32) * 0.001953125
        size = tl.where(
            power == 0, tiny, (((power + 120) << 23) | (part << 20)).to(tl.float32, bitcast=True)
        )
        value = tl.where(codes > 127, size * -1.0, size)
    else:
        value = codes.to(tl.float32)
        if CODE == 2:
            value -= 8.0
    value *= _worths(scale, n, k, is_col, scale_n, D, GROUP, BLOCK_N, BLOCK_K)
    if HAS_OFFSET:
        value += _worths(offset, n, k, is_col, scale_n, D, GROUP, BLOCK_N, BLOCK_K)
    elif CODE == 2:
        value += 0.0  # no weight is -0
    return value.to(tl.bfloat16)


def code_arguments(stack: Quantised | None, nothing: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return scales, offsets and their strides, and the compile-time constants of the codes."""
    if stack is None:
        return [nothing, nothing, 0, 0], {"CODE": 0, "GROUP": 1, "HAS_OFFSET": False}
    scale = stack.scale_NG
    offset = scale if stack.offset_NG is None else stack.offset_NG
    how = {
        "CODE": 1 + CODES.index(stack.code), "GROUP": min(stack.group, stack.shape[1]),
        "HAS_OFFSET": stack.offset_NG is not None,
        "enable_fp_fusion": False,  # the product and the sum are each rounded
    }  # fmt: skip
    return [scale, offset, scale.stride(0), scale.stride(1)], how
