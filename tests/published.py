"""Tiny checkpoints in the layouts in which quantised models are published, and their values.

Every writer makes codes, scales and zeros at random, lays them out as the format has them, and
gives the bf16 values by the format's formula, written for this file alone.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = torch.float8_e4m3fn
BLOCK = 24
"""Rows and columns of a block of FP8: no side of a weight is a whole number of them."""
Tensors = dict[str, Tensor]


class Written(NamedTuple):
    """Tensors of one weight by the end of their names, and its bf16 values [n, k]."""

    parts: Tensors
    values: Tensor


def rounded(exact: Tensor) -> Tensor:
    """bf16 of numbers that fp32 has exactly."""
    assert torch.equal(exact.float().double(), exact)
    return exact.float().bfloat16()


def _random(n: int, k: int, made: torch.Generator, top: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k], zeros [n, groups] and fp16 scales."""
    codes = torch.randint(top, (n, k), generator=made)
    zeros = torch.randint(top, (n, k // GROUP), generator=made)
    scales = (torch.rand((n, k // GROUP), generator=made) * 0.3 / top + 0.001).half()
    return codes, zeros, scales


def _values(codes: Tensor, zeros: Tensor, scales: Tensor, of_input: Tensor) -> Tensor:
    return rounded((codes - zeros[:, of_input]).double() * scales[:, of_input].double())


def _in_order(k: int) -> Tensor:
    return torch.arange(k) // GROUP


def _words(values: Tensor, bits: int) -> Tensor:
    """int32 [rows, columns * bits / 32]; the first of a word is the lowest."""
    per = 32 // bits
    parts = values.long().reshape(values.shape[0], -1, per)
    words = sum(parts[..., i] << bits * i for i in range(per))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(n: int, k: int, made: torch.Generator) -> Written:
    codes, zeros, scales = _random(n, k, made)

    def laid_out(by_output: Tensor) -> Tensor:  # [n, r] -> [r, n / 8]
        rows = by_output.t().reshape(by_output.shape[1], -1, 8)
        return _words(rows[..., AWQ_ORDER].flatten(1), 4)

    parts = {".qweight": laid_out(codes), ".qzeros": laid_out(zeros), ".scales": scales.t()}
    return Written(parts, _values(codes, zeros, scales, _in_order(k)))


def gptq(
    n: int, k: int, made: torch.Generator, bits: int = 4, plus: int = 1, act_order: bool = False
) -> Written:
    codes, zeros, scales = _random(n, k, made, 1 << bits)
    of_input = _in_order(k)
    if act_order:
        of_input = of_input[torch.randperm(k, generator=made)]
    stored = (zeros - plus) % (1 << bits)
    parts = {
        ".qweight": _words(codes, bits).t(),
        ".qzeros": _words(stored.t(), bits),
        ".scales": scales.t(),
        ".g_idx": of_input.int(),
    }
    return Written(parts, _values(codes, zeros, scales, of_input))


def gptq_v2(n: int, k: int, made: torch.Generator) -> Written:
    return gptq(n, k, made, plus=0)


def gptq_8(n: int, k: int, made: torch.Generator) -> Written:
    return gptq(n, k, made, bits=8)


def gptq_act_order(n: int, k: int, made: torch.Generator) -> Written:
    return gptq(n, k, made, act_order=True)


def packed(n: int, k: int, made: torch.Generator, bits: int = 4, has_zero: bool = False) -> Written:
    """pack-quantized of compressed-tensors, with bf16 scales."""
    codes, zeros, scales = _random(n, k, made, 1 << bits)
    half = 1 << bits - 1
    zeros = zeros if has_zero else torch.full_like(zeros, half)
    scales = scales.bfloat16()
    parts = {
        ".weight_packed": _words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([n, k]),
    }
    if has_zero:
        parts[".weight_zero_point"] = _words(zeros.t(), bits).t()
    return Written(parts, _values(codes, zeros, scales, _in_order(k)))


def packed_with_zeros(n: int, k: int, made: torch.Generator) -> Written:
    return packed(n, k, made, has_zero=True)


def packed_8(n: int, k: int, made: torch.Generator) -> Written:
    return packed(n, k, made, bits=8)


def int8(n: int, k: int, made: torch.Generator) -> Written:
    """int-quantized: a scale per output."""
    codes = torch.randint(-128, 128, (n, k), generator=made)
    scales = (torch.rand((n, 1), generator=made) * 0.002 + 0.0001).bfloat16()
    parts = {".weight": codes.to(torch.int8), ".weight_scale": scales}
    return Written(parts, rounded(codes.double() * scales.double()))


def _float8(n: int, k: int, made: torch.Generator) -> Tensor:
    return (torch.randn((n, k), generator=made) * 20).to(FP8)


def float8(n: int, k: int, made: torch.Generator) -> Written:
    """float-quantized: a scale per output."""
    codes = _float8(n, k, made)
    scales = (torch.rand((n, 1), generator=made) * 0.002 + 0.0001).bfloat16()
    return Written(
        {".weight": codes, ".weight_scale": scales}, rounded(codes.double() * scales.double())
    )


def blocks(n: int, k: int, made: torch.Generator) -> Written:
    """Block FP8 of DeepSeek."""
    codes = _float8(n, k, made)
    grid = -(-n // BLOCK), -(-k // BLOCK)
    scales = torch.rand(grid, generator=made) * 0.002 + 0.0001
    of_value = scales[torch.arange(n) // BLOCK][:, torch.arange(k) // BLOCK]
    values = (codes.float() * of_value).bfloat16()  # fp32 rounds a product of 4 and 24 bits, once
    return Written({".weight": codes, ".weight_scale_inv": scales}, values)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


LINEAR = re.compile(r"layers\..*(proj|\.w[123])")
Write = Callable[[int, int, torch.Generator], Written]
Others = Sequence[tuple[str, Write]]
EVERY = re.compile(r"layers\..*(proj|\.w[123])|lm_head")
"""Finds the head too."""
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Write, dict[str, Any], str]] = {
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, "e4m3"),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        "u4",
    ),
    "gptq": (gptq, _GPTQ, "u4"),
    "gptq-v2": (gptq_v2, {**_GPTQ, "checkpoint_format": "gptq_v2"}, "u4"),
    "gptq-8": (gptq_8, {**_GPTQ, "bits": 8}, "i8"),
    "gptq-act-order": (gptq_act_order, {**_GPTQ, "desc_act": True}, ""),
    "packed": (packed, _compressed("pack-quantized", num_bits=4), "i4"),
    "packed-zeros": (packed_with_zeros, _compressed("pack-quantized", num_bits=4), "u4"),
    "packed-8": (packed_8, _compressed("pack-quantized", num_bits=8), "i8"),
    "int8": (int8, _compressed("int-quantized", num_bits=8), "i8"),
    "float8": (float8, _compressed("float-quantized", num_bits=8), "e4m3"),
}
"""Format -> who writes a weight, `quantization_config`, and the code it is kept in."""


def mxfp4(stack: Tensor, made: torch.Generator) -> tuple[Tensors, Tensor]:
    """Experts of gpt-oss, whose parameter is [E, inputs, outputs]."""
    num, inner, outer = stack.shape
    codes = torch.randint(16, (num, outer, inner), generator=made, dtype=torch.uint8)
    scales = torch.randint(116, 122, (num, outer, inner // 32), generator=made)
    pairs = codes.view(num, outer, inner // 32, 16, 2)
    parts = {
        "_blocks": pairs[..., 0] | pairs[..., 1] << 4,
        "_scales": scales.to(torch.uint8),
    }
    values = torch.tensor([*FP4, *(-x for x in FP4)])[codes.long()]
    factors = torch.exp2(scales - 127.0).repeat_interleave(32, -1)
    return parts, rounded((values * factors).double()).transpose(1, 2).contiguous()


def configure(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def publish(
    plain: Path, form: str, place: Path, linear: re.Pattern[str] = LINEAR, others: Others = ()
) -> tuple[Path, Path]:
    """Two folders of a bf16 checkpoint: quantised in a format, and with its bf16 values.

    Args:
        plain: The checkpoint.
        form: A key of FORMATS, or "mxfp4".
        place: Where the folders are made.
        linear: Finds the names of weights that are quantised, other than in MXFP4.
        others: Patterns of names whose weights are written by another function.
    """
    folder, dense = place / "published", place / "values"
    shutil.copytree(plain, folder)
    shutil.copytree(plain, dense)
    made = torch.Generator().manual_seed(0)
    stored = load_file(plain / "model.safetensors")
    values = dict(stored)
    for name, weight in list(stored.items()):
        parts: Tensors | None = None
        if form == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, values[name] = mxfp4(weight, made)
        elif form != "mxfp4" and weight.dim() == 2 and linear.search(name):
            write = next((w for found, w in others if re.search(found, name)), FORMATS[form][0])
            parts, values[name] = write(*weight.shape, made)
        if parts is not None:
            del stored[name]
            stem = name if form == "mxfp4" else name.removesuffix(".weight")
            stored |= {stem + end: part.contiguous() for end, part in parts.items()}
    for where, tensors in ((folder, stored), (dense, values)):
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "mxfp4"} if form == "mxfp4" else FORMATS[form][1]
    configure(folder, quantization_config=method)
    return folder, dense
