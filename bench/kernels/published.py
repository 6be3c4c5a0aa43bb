"""Quantised weights in the layouts of published checkpoints, and their values by each formula.

The module uses nothing of `qllm`, so that it can check what `qllm` reads. Codes are [n, k], zeros
and scales [n, groups], and `of_input` names the group of every input.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8 = torch.float8_e4m3fn


class Written(NamedTuple):
    """Tensors of one weight by the end of their names, and its bf16 values [n, k]."""

    parts: dict[str, Tensor]
    values: Tensor


def rounded(exact: Tensor) -> Tensor:
    """Return bf16 of numbers that fp32 has exactly."""
    assert torch.equal(exact.float().double(), exact)
    return exact.float().bfloat16()


def in_order(k: int, group: int) -> Tensor:
    """Return the group of every input, if the inputs of a group are contiguous."""
    return torch.arange(k) // group


def awq(codes: Tensor, zeros: Tensor, scales: Tensor, of_input: Tensor) -> Written:
    """Write AutoAWQ's gemm layout, 4 bits."""

    def laid_out(by_output: Tensor) -> Tensor:  # [n, r] -> [r, n / 8]
        rows = by_output.t().reshape(by_output.shape[1], -1, 8)
        return _words(rows[..., AWQ_ORDER].flatten(1), 4)

    parts = {".qweight": laid_out(codes), ".qzeros": laid_out(zeros), ".scales": scales.t()}
    return Written(parts, _values(codes, zeros, scales, of_input))


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, of_input: Tensor, bits: int = 4, plus: int = 1
) -> Written:
    """Write GPTQ, whose first version stores zeros less one."""
    parts = {
        ".qweight": _words(codes, bits).t(),
        ".qzeros": _words(((zeros - plus) % (1 << bits)).t(), bits),
        ".scales": scales.t(),
        ".g_idx": of_input.int(),
    }
    return Written(parts, _values(codes, zeros, scales, of_input))


def packed(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, of_input: Tensor, bits: int = 4
) -> Written:
    """Write pack-quantized of compressed-tensors; without zeros codes are around the middle."""
    parts = {
        ".weight_packed": _words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        parts[".weight_zero_point"] = _words(zeros.t(), bits).t()
    half = torch.full_like(scales, 1 << bits - 1, dtype=torch.int64)
    return Written(parts, _values(codes, half if zeros is None else zeros, scales, of_input))


def per_output(codes: Tensor, scales: Tensor) -> Written:
    """Write int-quantized or float-quantized of compressed-tensors: a scale per output."""
    values = rounded(codes.double() * scales.double())
    return Written({".weight": codes, ".weight_scale": scales}, values)


def blocks(codes: Tensor, scales: Tensor, block: int) -> Written:
    """Write FP8 of DeepSeek: an fp32 scale per block; the last block may be smaller."""
    rows, columns = (in_order(size, block) for size in codes.shape)
    values = (codes.float() * scales[rows][:, columns]).bfloat16()  # fp32 rounds once
    return Written({".weight": codes, ".weight_scale_inv": scales}, values)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    method = {"quant_method": "compressed-tensors", "format": form}
    return {**method, "config_groups": {"group_0": group}}


def _values(codes: Tensor, zeros: Tensor, scales: Tensor, of_input: Tensor) -> Tensor:
    return rounded((codes - zeros[:, of_input]).double() * scales[:, of_input].double())


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack values into int32 [rows, columns * bits / 32]; the first one has the lowest bits."""
    parts = values.long().unflatten(1, (-1, 32 // bits))
    words = (parts << bits * torch.arange(32 // bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
