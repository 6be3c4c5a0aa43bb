"""Checkpoint files: tensors and a JSON document in one safetensors file, written atomically.

Only the owner may read the file. `read` refuses a file that is damaged, foreign or of another
version. The header has a checksum of the content, which shows damage. The runner defines the
tensors; the engine defines everything else.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qllm.block_file import checksum_of
from qllm.errors import CheckpointError
from qllm.private import private_fd

FORMAT = "qllm-checkpoint"
VERSION = 2


def write(path: str | Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint. The file appears whole or not at all.

    Raises:
        CheckpointError: `meta` is not JSON, or the file cannot be written.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        whole = {name: t.cpu().contiguous() for name, t in tensors.items()}
        text = json.dumps(dict(meta))
        header = {"format": FORMAT, "version": str(VERSION), "meta": text}
        os.close(private_fd(part, os.O_WRONLY))
        save_file(whole, part, metadata={**header, "sum": _sum(text, whole)})
        part.replace(path)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint.

    Raises:
        CheckpointError: The file is missing, truncated, damaged, foreign, or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _sum(header["meta"], tensors) != header["sum"]:
            raise CheckpointError(f"{path} is damaged: its sum is not that of what it holds")
        meta = json.loads(header["meta"])
    except (OSError, KeyError, ValueError, SafetensorError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path} is not a checkpoint: its document is no object")
    return meta, tensors


def _check_header(path: str | Path, header: Mapping[str, str]) -> None:
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a safetensors file but not a {FORMAT}")
    if header.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path} has version {header.get('version')}; this build reads version {VERSION}"
        )


def _sum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a document and CPU tensors: their names, types, shapes and bytes."""
    parts: list[bytes | memoryview] = [text.encode()]
    for name in sorted(tensors):
        tensor = tensors[name]
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts.append(tensor.view(-1).view(torch.uint8).numpy().data)
    return f"{checksum_of(*parts):016x}"
