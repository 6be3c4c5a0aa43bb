"""The model `talk` as it would be published quantised: rounded to the nearest, written as a folder.

Every writer rounds one weight [n, k], lays its codes out as the format has them, and gives the
bf16 values by the format's own formula; nothing of `qllm` takes part. Beside the folder of codes
there is one in bf16 with those values.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 64
BLOCK = 128
FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INDEX = "model.safetensors.index.json"
_QUANTISED = re.compile(r"layers\.\d+\..*(_proj|\.w[123])\.weight$")


class _Written(NamedTuple):
    """Tensors of one weight by the end of their names, and its bf16 values [n, k]."""

    parts: dict[str, Tensor]
    values: Tensor


def _words(codes: Tensor) -> Tensor:
    """int32 [rows, columns / 8] of 4-bit codes; the first of a word is the lowest."""
    parts = codes.long().reshape(codes.shape[0], -1, 8)
    words = (parts << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _values(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> Tensor:
    """bf16 of scale * (code - zero), each scale and zero being of some inputs that follow."""
    wide = codes.double().unflatten(1, (scales.shape[1], -1))
    zero = zeros if isinstance(zeros, int) else zeros.double().unsqueeze(-1)
    return ((wide - zero) * scales.double().unsqueeze(-1)).float().bfloat16().flatten(1)


def _symmetric(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """4-bit codes [n, k] around 8, and scales [n, groups]."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 7).to(dtype)
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.flatten(1), scales


def _awq(weight: Tensor) -> _Written:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).half()
    wide = scales.float()
    zeros = (-least / wide).round().clamp(0, 15)
    codes = ((grouped / wide.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15).flatten(1)

    def laid_out(by_output: Tensor) -> Tensor:
        rows = by_output.t().unflatten(1, (-1, 8))
        return _words(rows[..., AWQ_ORDER].flatten(1))

    parts = {".qweight": laid_out(codes), ".qzeros": laid_out(zeros), ".scales": scales.t()}
    return _Written(parts, _values(codes, zeros, scales))


def _gptq(weight: Tensor) -> _Written:
    codes, scales = _symmetric(weight, torch.float16)
    zeros = torch.full_like(scales, 8 - 1, dtype=torch.int64)  # this version stores one less
    parts = {
        ".qweight": _words(codes).t(),
        ".qzeros": _words(zeros.t()),
        ".scales": scales.t(),
        ".g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return _Written(parts, _values(codes, 8, scales))


def _packed(weight: Tensor) -> _Written:
    codes, scales = _symmetric(weight, torch.bfloat16)
    parts = {
        ".weight_packed": _words(codes),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return _Written(parts, _values(codes, 8, scales))


def _int8(weight: Tensor) -> _Written:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    parts = {".weight": codes.to(torch.int8), ".weight_scale": scales}
    return _Written(parts, _values(codes, 0, scales))


def _float8(weight: Tensor) -> _Written:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight.float() / scales.float()).clamp(-448, 448).to(FP8)
    return _Written({".weight": codes, ".weight_scale": scales}, _values(codes.float(), 0, scales))


def _blocks(weight: Tensor) -> _Written:
    (n, k), wide = weight.shape, weight.float()
    rows, columns = torch.arange(n) // BLOCK, torch.arange(k) // BLOCK
    scales = (
        torch.stack(
            [
                torch.stack([block.abs().max() for block in band.split(BLOCK, 1)])
                for band in wide.split(BLOCK)
            ]
        )
        / 448
    )
    of_value = scales[rows][:, columns]
    codes = (wide / of_value).clamp(-448, 448).to(FP8)
    values = (codes.float() * of_value).bfloat16()
    return _Written({".weight": codes, ".weight_scale_inv": scales}, values)


def _compressed(form: str, bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits}, "format": form}
    method = {"quant_method": "compressed-tensors", "format": form}
    return {**method, "config_groups": {"group_0": group}}


_INT32 = {"bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[Tensor], _Written], dict[str, Any], bool]] = {
    f"FP8, blocks of {BLOCK}": (
        _blocks,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
        False,
    ),
    f"AWQ g{GROUP}": (_awq, {"quant_method": "awq", "version": "gemm", **_INT32}, True),
    f"GPTQ g{GROUP}": (_gptq, {"quant_method": "gptq", **_INT32}, True),
    f"compressed-tensors int4 g{GROUP}": (_packed, _compressed("pack-quantized", 4), True),
    "compressed-tensors int8": (_int8, _compressed("int-quantized", 8), True),
    "compressed-tensors FP8": (_float8, _compressed("float-quantized", 8), False),
}
"""Name -> who writes a weight, `quantization_config`, and whether codes are integers."""


def publish(plain: Path, form: str, place: Path) -> tuple[Path, Path]:
    """Two folders of a bf16 checkpoint: quantised in a format, and with its bf16 values.

    Args:
        plain: The checkpoint, with an index of its shards.
        form: A key of FORMATS.
        place: Where the folders are made.
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
