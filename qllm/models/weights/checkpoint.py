"""An open checkpoint of safetensors: its tensors by name, read on demand."""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels.quantised import Quantised
from qllm.models.folders import first_line
from qllm.models.weights.formats.layout import Format, Layout, Stored, Weight, check_scales
from qllm.models.weights.raw_file import LARGE, Buffers, RawFile

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


Places = dict[str, tuple[int, int, Stored]]
"""First byte, end byte and type of each tensor in its file, by name."""


class Checkpoint(NamedTuple):
    """Functions that read each weight of a checkpoint, by its name in the family."""

    format: str
    plain: Mapping[str, Callable[[], Tensor]]
    quantised: Mapping[str, Callable[[], Weight]]
    one: Callable[[str, int | None], Weight]
    """Function that reads a weight, or one weight of a stack, into memory of its own."""
    rows: Callable[[str, int | None, range], Weight]
    """Function that reads consecutive rows of a weight of `in_rows`, or of one of a stack."""
    in_rows: Container[str]
    """Weights whose rows are read without the others."""


class _Shard:
    """An open and mapped file.

    Raises:
        ModelError: The file is truncated, is no safetensors file, or cannot be opened.
    """

    def __init__(self, path: Path, buffers: Buffers) -> None:
        self.mapped, self.places = _opened(path)
        with _opening(path):
            self._raw = RawFile(path, buffers, _small_in(self.places))

    def map(self, name: str) -> Tensor:
        """Return a mapped tensor, see `Shards.map`."""
        found: Tensor = self.mapped.get_tensor(name)
        return found

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own, see `Shards.read`."""
        start, end, stored = self.places[name]
        dtype = DTYPES.get(stored.dtype)
        if dtype is None or start == end:
            return self.map(name)
        return self._raw.read(start, end - start).view(dtype).view(stored.shape)

    def read_one(self, name: str, index: int) -> Tensor:
        """Return one tensor of a stack in memory of its own, see `Shards.read_one`."""
        start, end, (kind, (num, *shape)) = self.places[name]
        dtype, size = DTYPES.get(kind), (end - start) // num
        if dtype is None or not size:
            return self.map(name)[index]
        return self._raw.read(start + index * size, size).view(dtype).view(shape)

    def read_rows(self, name: str, index: int | None, rows: range) -> Tensor:
        """Return consecutive rows in memory of their own, see `Shards.read_rows`."""
        start, end, (kind, shape) = self.places[name]
        num = shape[0] if index is None else shape[0] * shape[1]
        first = rows.start if index is None else index * shape[1] + rows.start
        dtype, size = DTYPES.get(kind), (end - start) // max(1, num)
        if dtype is None or not size:
            whole = self.map(name) if index is None else self.map(name)[index]
            return whole[rows.start : rows.stop]
        found = self._raw.read(start + first * size, len(rows) * size)
        return found.view(dtype).view(len(rows), *shape[1 if index is None else 2 :])


class Shards:
    """Tensors of some files by name.

    Raises:
        ModelError: A file is truncated, or no safetensors file; or two files have different values
            of one tensor.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.stored: dict[str, Stored] = {}
        """Dtype and shape of every tensor."""
        self._files: dict[str, _Shard] = {}
        buffers = Buffers()
        for path in files:
            file = _Shard(path, buffers)
            for name in file.places.keys() & self._files.keys():
                if not torch.equal(_bytes_of(file.map(name)), _bytes_of(self.map(name))):
                    raise ModelError(
                        f"{name} is in two files, and {path} has other values of it; "
                        "download the checkpoint again"
                    )
            self._files.update(dict.fromkeys(file.places, file))
            self.stored.update({name: place[2] for name, place in file.places.items()})

    def keep(self, names: Set[str]) -> None:
        """Forget all tensors except these."""
        self.stored = {name: stored for name, stored in self.stored.items() if name in names}

    def map(self, name: str) -> Tensor:
        """Return a tensor that shares the file's memory until its first write."""
        return self._files[name].map(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        return self._files[name].read(name)

    def read_one(self, name: str, index: int) -> Tensor:
        """Return one tensor of a stack, whose first dimension is its number, as `read` does."""
        return self._files[name].read_one(name, index)

    def read_rows(self, name: str, index: int | None, rows: range) -> Tensor:
        """Return consecutive rows of a tensor, or of one of a stack, as `read` does."""
        return self._files[name].read_rows(name, index, rows)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name, from its header.

    Raises:
        ModelError: The file is truncated, or no safetensors file.
    """
    return {name: stored for name, (_, _, stored) in _opened(path)[1].items()}


def _opened(path: Path) -> tuple[Any, Places]:
    """Return a mapped file with checked header and length, and the places of its tensors."""
    with _opening(path):
        return safe_open(path, framework="pt"), _places_in(path)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Add the file's name to an error, or the reason why it cannot be opened."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises its own error for a mapped file
        raise ModelError(
            f"{path} cannot be opened ({first_line(error)}); see that it may be read, and that "
            "the process may open a file more (ulimit -n)"
        ) from error
    except (SafetensorError, TypeError, ValueError) as error:
        text = str(error).strip().splitlines() or ["no message"]
        raise ModelError(
            f"{path} is truncated or no safetensors file ({text[0][:300]}); download it again"
        ) from error


def _places_in(path: Path) -> Places:
    """Return the places of tensors in a file with a valid header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found: Places = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        stored = Stored(entry["dtype"], tuple(entry["shape"]))
        found[name] = (8 + size + start, 8 + size + end, stored)
    return found


def _small_in(places: Places) -> list[tuple[int, int]]:
    """Return runs of tensors that are not large, as first byte and end byte."""
    found: list[tuple[int, int]] = []
    for start, end, _ in sorted(place for place in places.values() if place[1] - place[0] < LARGE):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def checkpoint_in(
    name: str, shards: Shards, form: Format, *, mapped: bool = True
) -> tuple[Checkpoint, dict[str, Stored]]:
    """Return the weights of an open checkpoint.

    Args:
        name: Name of the model.
        shards: Files of the checkpoint.
        form: Format of its weights.
        mapped: False reads plain tensors into memory of their own. A disk reads ahead of a mapped
            tensor, which may be as much as a small layer.

    Returns:
        The checkpoint, and the types of tensors that are no part of a quantised weight.

    Raises:
        ModelError: Codes lack a tensor that belongs to them, or a weight occurs twice.
    """
    tensors = shards.stored
    quantised: dict[str, Callable[[], Weight]] = {}
    of_weight: dict[str, tuple[Layout, Mapping[str, str]]] = {}
    claimed = {key for key in tensors if form.unused and key.endswith(form.unused)}
    try:
        for weight, layout, parts in form.weights(tensors):
            if weight in quantised or (weight in tensors and weight not in parts.values()):
                raise ModelError(
                    f"{weight} is there twice, as {', '.join(parts.values())} and "
                    "in another form; download the checkpoint again"
                )
            quantised[weight] = partial(_read, name, weight, shards, layout, parts)
            of_weight[weight] = layout, parts
            claimed.update(parts.values())
    except ModelError as error:
        raise ModelError(f"checkpoint of model {name!r}: {error}") from error
    rest = {key: stored for key, stored in tensors.items() if key not in claimed}
    plain = {key: partial(shards.map if mapped else shards.read, key) for key in rest}

    def one(weight: str, index: int | None) -> Weight:
        if weight in quantised:
            return quantised[weight]() if index is None else of_stack(weight, index)
        return shards.read(weight) if index is None else shards.read_one(weight, index)

    def of_stack(weight: str, index: int) -> Weight:
        with naming(f"checkpoint of model {name!r}, {weight}"):
            return _one_of_stack(shards, *of_weight[weight], index)

    return Checkpoint(form.name, plain, quantised, one, shards.read_rows, plain), rest


def _one_of_stack(shards: Shards, layout: Layout, parts: Mapping[str, str], index: int) -> Weight:
    """Read one weight of a stack."""
    shapes = [shards.stored[key].shape for key in parts.values()]
    nums = {shape[0] if shape else 0 for shape in shapes}
    if len(nums) != 1:
        raise ModelError(
            f"{', '.join(parts.values())} have {sorted(nums)} weights: one weight of them cannot "
            "be read alone"
        )
    own = {end: shards.read_one(key, index).unsqueeze(0) for end, key in parts.items()}
    found = _put_together(layout, parts, own)
    return found.one(0) if isinstance(found, Quantised) else found[0]


def _read(
    name: str, weight: str, shards: Shards, layout: Layout, parts: Mapping[str, str]
) -> Weight:
    with naming(f"checkpoint of model {name!r}, {weight}"):
        return _put_together(layout, parts, {end: shards.read(key) for end, key in parts.items()})


@contextmanager
def naming(weight: str) -> Iterator[None]:
    """Add the name of the weight to an error of reading or packing, on any thread."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{weight}: {error}") from error
    except (OSError, MemoryError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{weight} could not be read ({what})") from error


def _put_together(layout: Layout, names: Mapping[str, str], parts: Mapping[str, Tensor]) -> Weight:
    try:
        found = layout.read(parts)
        if isinstance(found, Quantised):
            check_scales(found)
        return found
    except (ArithmeticError, RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{key} {tuple(parts[end].shape)}" for end, key in names.items())
        raise ModelError(
            f"{shapes} do not fit each other ({first_line(error)}); download it again"
        ) from error
