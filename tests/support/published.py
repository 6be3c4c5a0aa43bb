"""Tiny checkpoints in the layouts in which quantised models are published, and their values.

Every writer makes codes, scales and zeros at random; `bench/kernels/published.py` lays them out as
the format has them, and gives the bf16 values by the format's formula.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.kernels import published
from bench.kernels.published import FP8, Written, compressed, rounded

GROUP = 16
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 24
"""Rows and columns of a block of FP8: no side of a weight is a whole number of them."""
Tensors = dict[str, Tensor]
_Made = tuple[Tensor, Tensor, Tensor, Tensor]


def _random(n: int, k: int, made: torch.Generator, bits: int = 4) -> _Made:
    """Codes [n, k], zeros [n, groups], fp16 scales, and the group of every input."""
    top = 1 << bits
    codes = torch.randint(top, (n, k), generator=made)
    zeros = torch.randint(top, (n, k // GROUP), generator=made)
    scales = (torch.rand((n, k // GROUP), generator=made) * 0.3 / top + 0.001).half()
    return codes, zeros, scales, published.in_order(k, GROUP)


def awq(n: int, k: int, made: torch.Generator) -> Written:
    return published.awq(*_random(n, k, made))


def gptq(n: int, k: int, made: torch.Generator, bits: int = 4, plus: int = 1) -> Written:
    return published.gptq(*_random(n, k, made, bits), bits, plus)


def gptq_v2(n: int, k: int, made: torch.Generator) -> Written:
    return gptq(n, k, made, plus=0)


def gptq_8(n: int, k: int, made: torch.Generator) -> Written:
    return gptq(n, k, made, bits=8)


def gptq_act_order(n: int, k: int, made: torch.Generator) -> Written:
    *parts, of_input = _random(n, k, made)
    return published.gptq(*parts, of_input[torch.randperm(k, generator=made)])


def packed(n: int, k: int, made: torch.Generator, bits: int = 4) -> Written:
    codes, _, scales, of_input = _random(n, k, made, bits)
    return published.packed(codes, None, scales.bfloat16(), of_input, bits)


def packed_with_zeros(n: int, k: int, made: torch.Generator) -> Written:
    codes, zeros, scales, of_input = _random(n, k, made)
    return published.packed(codes, zeros, scales.bfloat16(), of_input)


def packed_8(n: int, k: int, made: torch.Generator) -> Written:
    return packed(n, k, made, bits=8)


def _scales(*shape: int, made: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=made) * 0.002 + 0.0001


def int8(n: int, k: int, made: torch.Generator) -> Written:
    codes = torch.randint(-128, 128, (n, k), generator=made).to(torch.int8)
    return published.per_output(codes, _scales(n, 1, made=made).bfloat16())


def _float8(n: int, k: int, made: torch.Generator) -> Tensor:
    return (torch.randn((n, k), generator=made) * 20).to(FP8)


def float8(n: int, k: int, made: torch.Generator) -> Written:
    return published.per_output(_float8(n, k, made), _scales(n, 1, made=made).bfloat16())


def blocks(n: int, k: int, made: torch.Generator) -> Written:
    codes = _float8(n, k, made)
    return published.blocks(codes, _scales(-(-n // BLOCK), -(-k // BLOCK), made=made), BLOCK)


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
    "packed": (packed, compressed("pack-quantized", num_bits=4), "i4"),
    "packed-zeros": (packed_with_zeros, compressed("pack-quantized", num_bits=4), "u4"),
    "packed-8": (packed_8, compressed("pack-quantized", num_bits=8), "i8"),
    "int8": (int8, compressed("int-quantized", num_bits=8), "i8"),
    "float8": (float8, compressed("float-quantized", num_bits=8), "e4m3"),
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
