"""A checkpoint of safetensors that is open: its tensors by name, read when they are asked for."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from qllm.errors import ModelError
from qllm.models.folders import first_line
from qllm.models.formats.layout import Format, Layout, Stored, Weight
from qllm.models.raw_file import LARGE, Buffers, RawFile

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes of the tensors of quantised weights, as safetensors spells them."""


class Checkpoint(NamedTuple):
    """How each weight of a checkpoint is read, by its name in the family."""

    format: str
    plain: Mapping[str, Callable[[], Tensor]]
    quantised: Mapping[str, Callable[[], Weight]]


class Shards:
    """Tensors of some files by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Any] = {}
        self._raw: dict[str, tuple[RawFile, int, int, Stored]] = {}
        buffers = Buffers()
        for path in files:
            file: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
            places = _places_in(path)
            raw = RawFile(path, buffers, _small_in(places))
            self._raw.update({name: (raw, *place) for name, place in places.items()})

    def map(self, name: str) -> Tensor:
        """One tensor, whose memory is the file's until somebody writes to it."""
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def read(self, name: str) -> Tensor:
        """One tensor in memory of its own."""
        file, start, end, stored = self._raw[name]
        dtype = DTYPES.get(stored.dtype)
        if dtype is None or start == end:
            return self.map(name)
        return file.read(start, end - start).view(dtype).view(stored.shape)


def _places_in(path: Path) -> dict[str, tuple[int, int, Stored]]:
    """Where the tensors of a file lie in it: first byte, and the one after the last."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found: dict[str, tuple[int, int, Stored]] = {}
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = (start, end, Stored(entry["dtype"], tuple(entry["shape"])))
    return found


def _small_in(places: Mapping[str, tuple[int, int, Stored]]) -> list[tuple[int, int]]:
    """Runs of tensors of a file that are not large, as first byte and the one after the last."""
    found: list[tuple[int, int]] = []
    for start, end, _ in sorted(place for place in places.values() if place[1] - place[0] < LARGE):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def open_checkpoint(
    name: str, files: Sequence[Path], tensors: Mapping[str, Stored], form: Format
) -> tuple[Checkpoint, dict[str, Stored]]:
    """Open the files of a checkpoint.

    Args:
        name: Of the model.
        files: Its shards.
        tensors: All that they hold.
        form: How its weights are held.

    Returns:
        The checkpoint, and what is stored of tensors that are no part of a quantised weight.

    Raises:
        ModelError: Codes lack a tensor that belongs to them.
    """
    shards = Shards(files)
    quantised: dict[str, Callable[[], Weight]] = {}
    claimed = {key for key in tensors if form.unused and key.endswith(form.unused)}
    try:
        for weight, layout, parts in form.weights(tensors):
            quantised[weight] = partial(_read, name, weight, shards, layout, parts)
            claimed.update(parts.values())
    except ModelError as error:
        raise ModelError(f"checkpoint of model {name!r}: {error}") from error
    rest = {key: stored for key, stored in tensors.items() if key not in claimed}
    plain = {key: partial(shards.map, key) for key in rest}
    return Checkpoint(form.name, plain, quantised), rest


def _read(
    name: str, weight: str, shards: Shards, layout: Layout, parts: Mapping[str, str]
) -> Weight:
    with naming(f"checkpoint of model {name!r}, {weight}"):
        return _put_together(layout, parts, {end: shards.read(key) for end, key in parts.items()})


@contextmanager
def naming(weight: str) -> Iterator[None]:
    """Say in an error which weight was read or packed, by whichever thread."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{weight}: {error}") from error
    except (OSError, MemoryError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{weight} could not be read ({what})") from error


def _put_together(layout: Layout, names: Mapping[str, str], parts: Mapping[str, Tensor]) -> Weight:
    try:
        return layout.read(parts)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{key} {tuple(parts[end].shape)}" for end, key in names.items())
        raise ModelError(
            f"{shapes} do not fit each other ({first_line(error)}); download it again"
        ) from error
