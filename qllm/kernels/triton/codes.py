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
    if NUM == 1 or GROUP % BLOCK_K == 0:  # one value for each output
        is_in = is_col & (k // GROUP < NUM)
        one = tl.load(per_group + n * n_stride + k // GROUP, mask=is_in, other=0.0)
        return one.to(tl.float32)[None, :]
    if BLOCK_K % GROUP == 0:
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
def _halves(byte, CODE: tl.constexpr):
    """Return the bits of an fp32 for each half of a byte, exact but for a constant.

    e2m1 has its sign, exponent and fraction in the places of an fp32's, so the fp32 is 2**-126
    times the value. An integer is in the fraction of 2**23, so the fp32 is 2**23 more.
    """
    if CODE == 3:
        low, high = ((byte << 28) >> 6) & -0x7E400000, ((byte << 24) >> 6) & -0x7E400000
    else:
        low, high = (byte & 15) | 0x4B000000, (byte >> 4) | 0x4B000000
    return low, high


@triton.jit
def code_values(
    w, scale, offset, n, k, is_col, w_n, scale_n,
    D: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return quantised weights of inputs [k, k + BLOCK_K) and outputs n, bf16 [BLOCK_K, BLOCK_N].

    The function does the same fp32 operations as `Quantised.dequantised`, so the bits are the same.
    It loads words of four bytes where rows have whole words. From bytes Triton makes instructions
    that add the inputs of a row in another order than those of bf16 weights do.
    """
    PER_BYTE: tl.constexpr = 2 if CODE <= 3 else 1  # the low half first
    PER_WORD: tl.constexpr = 4 * PER_BYTE if D % (4 * PER_BYTE) == 0 else PER_BYTE
    if PER_WORD >= 4:
        words, stride = w.to(tl.pointer_type(tl.int32), bitcast=True), w_n // 4
    else:
        words, stride = w.to(tl.pointer_type(tl.uint8), bitcast=True), w_n
    # The mask is by words. A bound by codes would divide the load into its smallest pieces.
    word = tl.arange(0, BLOCK_K // PER_WORD)
    is_in = (word < D // PER_WORD - k // PER_WORD)[:, None] & is_col[None, :]
    at = words + n[None, :] * stride + (k // PER_WORD + word)[:, None]
    packed = tl.load(at, mask=is_in, other=0).to(tl.int32)[:, None, :]
    first = (tl.arange(0, PER_WORD) * (8 // PER_BYTE))[None, :, None]
    if CODE == 3:  # e2m1: sign, exponent and fraction in their places of an fp32 below 2**-124
        bits = ((packed << (28 - first)) >> 6) & -0x7E400000
    elif CODE == 5:  # e4m3: the same, below 2**-110
        bits = ((packed << (24 - first)) >> 4) & -0x78100000
    elif CODE == 4:
        bits = (packed << (24 - first)) >> 24
    else:  # the code is in the fraction of 2**23
        bits = ((packed >> first) & 15) | 0x4B000000
    bits = tl.reshape(bits, [BLOCK_K, BLOCK_N])
    if CODE == 4:
        value = bits.to(tl.float32)
    elif CODE == 3:
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    elif CODE == 5:
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    else:
        value = bits.to(tl.float32, bitcast=True) - (8388616.0 if CODE == 2 else 8388608.0)
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
