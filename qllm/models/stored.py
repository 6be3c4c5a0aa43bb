"""The bytes of a checkpoint's weights, read from the headers of its files. Needs no torch."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from qllm.models.folders import GGUF, locate, weight_files

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by its type in a safetensors file. A load changes only these types."""
LOADED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|h|blk)\.(\d+)\.")


def stored_bytes(
    name_or_path: str,
    depth: int | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Return the bytes of a model's weights after a load.

    The result is the sum over the tensors of the checkpoint. Layers are found by the names of the
    tensors.

    Args:
        name_or_path: Alias, folder, GGUF file or hub id. Weights that are not on this machine are
            downloaded.
        depth: Number of layers that are loaded; None is all.
        dtype: Type of loaded numbers; None is the type of the checkpoint.
        trust_remote_code: True downloads the checkpoint's code too.

    Raises:
        ConfigError: The model is unknown.
        ModelError: A file is missing or broken.
    """
    _, where = locate(os.fspath(name_or_path), weights=True, code=trust_remote_code)
    if where.suffix == GGUF:
        return sum(size for name, size in _in_gguf(where) if _is_kept(name, depth))
    tensors = (tensor for file in weight_files(where) for tensor in _in_safetensors(file))
    return sum(_loaded(kind, size, dtype) for name, kind, size in tensors if _is_kept(name, depth))


def _loaded(kind: str, size: int, dtype: str | None) -> int:
    """Return the bytes of a tensor of a type once it is loaded as `dtype`."""
    if dtype not in LOADED_BYTES or kind not in ITEM_BYTES:
        return size
    return size // ITEM_BYTES[kind] * LOADED_BYTES[dtype]


def _is_kept(name: str, depth: int | None) -> bool:
    layer = None if depth is None else _LAYER.search(name)
    return layer is None or depth is None or int(layer[1]) < depth


def _in_safetensors(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and bytes of each tensor. A broken header yields the file as a whole.

    The load refuses a broken file, and says why.
    """
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, 1 << 28)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, str(entry["dtype"]), end - start
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        yield "", "", file.stat().st_size


def _in_gguf(file: Path) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each tensor; without the package gguf, the file as a whole."""
    try:
        from gguf import GGUFReader

        tensors = GGUFReader(file).tensors
    except (ModuleNotFoundError, OSError, ValueError, KeyError, IndexError):
        yield "", file.stat().st_size
        return
    for tensor in tensors:
        yield str(tensor.name), int(tensor.n_bytes)
