"""The model `talk` as published checkpoints quantise it: rounded to the nearest, in a folder.

Every writer rounds one weight [n, k]. `published.py` lays its codes out and returns the bf16
values, without any part of `qllm`. Next to the folder of codes there is one in bf16 with those
values.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.kernels import published
from bench.kernels.published import FP8, Written, compressed

GROUP = 64
BLOCK = 128
INDEX = "model.safetensors.index.json"
_QUANTISED = re.compile(r"layers\.\d+\..*(_proj|\.w[123])\.weight$")


def _in_order(weight: Tensor) -> Tensor:
    return published.in_order(weight.shape[1], GROUP)


def _symmetric(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return 4-bit codes [n, k] around 8, and scales [n, groups]."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 7).to(dtype)
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.flatten(1).long(), scales


def _awq(weight: Tensor) -> Written:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).half()
    wide = scales.float()
    zeros = (-least / wide).round().clamp(0, 15)
    codes = ((grouped / wide.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15).flatten(1)
    return published.awq(codes.long(), zeros.long(), scales, _in_order(weight))


def _gptq(weight: Tensor) -> Written:
    codes, scales = _symmetric(weight, torch.float16)
    zeros = torch.full_like(scales, 8, dtype=torch.int64)
    return published.gptq(codes, zeros, scales, _in_order(weight))


def _packed(weight: Tensor) -> Written:
    codes, scales = _symmetric(weight, torch.bfloat16)
    return published.packed(codes, None, scales, _in_order(weight))


def _int8(weight: Tensor) -> Written:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    return published.per_output(codes.to(torch.int8), scales)


def _float8(weight: Tensor) -> Written:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight.float() / scales.float()).clamp(-448, 448).to(FP8)
    return published.per_output(codes, scales)


def _blocks(weight: Tensor) -> Written:
    rows, columns = (published.in_order(size, BLOCK) for size in weight.shape)
    bands = [band.split(BLOCK, 1) for band in weight.float().split(BLOCK)]
    scales = torch.stack([torch.stack([block.abs().max() for block in band]) for band in bands])
    scales = scales / 448
    codes = (weight.float() / scales[rows][:, columns]).clamp(-448, 448).to(FP8)
    return published.blocks(codes, scales, BLOCK)


_INT32 = {"bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any], bool]] = {
    f"FP8, blocks of {BLOCK}": (
        _blocks,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
        False,
    ),
    f"AWQ g{GROUP}": (_awq, {"quant_method": "awq", "version": "gemm", **_INT32}, True),
    f"GPTQ g{GROUP}": (_gptq, {"quant_method": "gptq", **_INT32}, True),
    f"compressed-tensors int4 g{GROUP}": (_packed, compressed("pack-quantized", num_bits=4), True),
    "compressed-tensors int8": (_int8, compressed("int-quantized", num_bits=8), True),
    "compressed-tensors FP8": (_float8, compressed("float-quantized", num_bits=8), False),
}
"""Name -> writer of a weight, `quantization_config`, and True if codes are integers."""


def publish(plain: Path, form: str, place: Path) -> tuple[Path, Path]:
    """Write two folders of a bf16 checkpoint: quantised in a format, and its bf16 values.

    Args:
        plain: Folder of the checkpoint, with an index of its shards.
        form: Key of FORMATS.
        place: Folder that gets the two folders.
    """
    write, method, _ = FORMATS[form]
    folders = place / "codes", place / "values"
    shards = sorted(plain.glob("*.safetensors"))
    index: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for folder in folders:
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    for shard in shards:
        stored = load_file(shard)
        values = dict(stored)
        for name in filter(_QUANTISED.search, list(stored)):
            written = write(stored.pop(name))
            values[name] = written.values
            stem = name.removesuffix(".weight")
            stored |= {stem + end: part.contiguous() for end, part in written.parts.items()}
        for folder, tensors, names in zip(folders, (stored, values), index, strict=True):
            save_file(tensors, folder / shard.name, metadata={"format": "pt"})
            names.update(dict.fromkeys(tensors, shard.name))
    for folder, names in zip(folders, index, strict=True):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return folders
