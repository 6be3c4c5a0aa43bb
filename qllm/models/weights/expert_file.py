"""The packed experts of a model in one file, each of which is read without the others.

    header 4 KiB | expert 0 of layer 0 | expert 1 of layer 0 | ... | table | end 4 KiB

The header names the weights and the kernels. An expert starts on a boundary of 4 KiB, so a read
bypasses the page cache. Its bytes are those that the kernels compute with. The table has the place,
the format and the checksums of each layer. The last block has the table's place and digest.

A complete file never changes, so several engines read one file. One engine writes it, under another
name until it is complete.
"""

import ctypes
import json
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from qllm.block_file import (
    BLOCK,
    Blocks,
    checksum_of,
    created,
    make_header,
    said_in,
    whole_blocks,
    why_foreign,
)
from qllm.errors import ConfigError, ModelError
from qllm.models.weights.refused_forward import RefusedForward

MAGIC, END = b"qllm-ex\x01", b"qllm-ee\x01"
"""Kind and version of the first and of the last block. The version is also that of the layout in
which the kernels read packed weights."""
KIND = "file of experts"
IN_FILE = "qllm_in_file"
"""Attribute of a module of experts whose weights are in a file: an `InFile`."""
LINE = 64
"""Alignment in bytes of the parts of an expert: a cache line."""
LONGEST = (1 << 64) - 1
"""Largest checksum, which no number of the table exceeds."""


class Part(NamedTuple):
    """A range of an expert's bytes."""

    name: str
    """"up", "down", "up_scale" or "down_scale", as in `Experts` of kernels.h."""
    start: int
    num_bytes: int


class CodeFormat(NamedTuple):
    """The format of one quantised weight."""

    code: str
    group: int
    scale: str
    """Dtype of scales, as torch spells it."""
    offset: str | None
    products: int
    """Kind of product that the kernels use: `Products` in kernels.h."""


class ExpertLayer(NamedTuple):
    """The experts of one layer in a file."""

    name: str
    """Path of the layer's module of experts."""
    num_experts: int
    width: int
    """Inner width of an expert."""
    hidden: int
    """Width of a token."""
    parts: tuple[Part, ...]
    group: int | None = None
    """Inputs that share a scale in int8; None without int8."""
    formats: tuple[CodeFormat | None, CodeFormat | None] = (None, None)
    """Formats of up and down; None is bf16, or int8 with a `group`."""
    start: int = 0
    """First byte of the layer in the file."""
    checksums: tuple[int, ...] = ()
    """Checksum of each expert."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, a multiple of BLOCK."""
        last = self.parts[-1]
        return whole_blocks(last.start + last.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        return self.num_experts * self.expert_bytes

    def place(self, expert: int) -> int:
        """Return the first byte of an expert in the file, a multiple of BLOCK."""
        return self.start + expert * self.expert_bytes


def parts_of(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """Return the parts of an expert, one after the other, each on a cache line.

    Args:
        sizes: Bytes of each part, by name.
    """
    found, at = [], 0
    for name, num_bytes in sizes.items():
        found.append(Part(name, at, num_bytes))
        at += -(-num_bytes // LINE) * LINE
    return tuple(found)


def room_for(num_bytes: int) -> memoryview:
    """Return zeroed memory that reads and writes of a file can use directly."""
    return memoryview(mmap.mmap(-1, num_bytes))


class ExpertFile:
    """A complete file. Several threads may read at the same time.

    Args:
        path: The file.
        says: Everything that decides the bytes of experts, by name.
        blocks: Class that reads the file.

    Raises:
        ConfigError: The path is no such file, or the file is damaged or says something else.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, says: Mapping[str, str], blocks: type[Blocks] = Blocks) -> None:
        self.path, self.says = path, dict(says)
        if path.is_symlink() or not path.is_file():
            what = "a symbolic link" if path.is_symlink() else "no regular file"
            raise _unusable(path, f"it is {what}")
        self._blocks = blocks(path, os.O_RDONLY | os.O_NOFOLLOW)
        weakref.finalize(self, self._blocks.close).atexit = False
        self.layers = self._layers(make_header(MAGIC, says))
        """All layers with experts, in the order of the model."""

    @property
    def is_direct(self) -> bool:
        """True if reads bypass the page cache."""
        return self._blocks.is_direct

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(layer.num_bytes for layer in self.layers)

    def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Read an expert.

        Args:
            layer: Number of the layer in `layers`.
            expert: Number of the expert in its layer.
            into: Memory for the layer's `expert_bytes` bytes, on a boundary of BLOCK.

        Raises:
            ModelError: The bytes are not those that were written.
            OSError: The file cannot be read.
        """
        own = self.layers[layer]
        if not 0 <= expert < own.num_experts:
            raise IndexError(f"{own.name} has no expert {expert}, but {own.num_experts} experts")
        if into.nbytes != own.expert_bytes or _address(into) % BLOCK:
            raise ValueError(
                f"an expert of {own.name} takes {own.expert_bytes} bytes on a boundary of {BLOCK}; "
                f"given are {into.nbytes} bytes at {_address(into):#x}"
            )
        is_whole = self._blocks.read(into, own.place(expert))
        if not is_whole or checksum_of(into) != own.checksums[expert]:
            what = "is damaged" if is_whole else "is cut off"
            raise ModelError(
                f"expert {expert} of {own.name} in {self.path} {what}; delete the file, and the "
                "next load writes it again"
            )

    def __deepcopy__(self, _: object) -> "ExpertFile":
        """Return the file itself, which copies of a model share."""
        return self

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._blocks.close()

    def _layers(self, header: bytes) -> tuple[ExpertLayer, ...]:
        texts = dict.fromkeys(("weights", "quantization"), "it was made from other weights")
        wrong = why_foreign(self._bytes(0, BLOCK), header, KIND, texts)
        if wrong is not None:
            raise _unusable(self.path, wrong)
        size = self.path.stat().st_size
        end = self._bytes(size // BLOCK * BLOCK - BLOCK, BLOCK) if size % BLOCK == 0 else b""
        says = said_in(end) if end.startswith(END) else None
        if says is None:
            raise _unusable(self.path, "its end is damaged or cut off")
        start, num_bytes = int(says["start"]), int(says["bytes"])
        text = self._bytes(start, whole_blocks(num_bytes))
        if _digest(text) != says["digest"]:
            raise _unusable(self.path, "its table is damaged")
        return tuple(map(_layer_of, json.loads(text[:num_bytes])))

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        room = room_for(num_bytes)
        return bytes(room) if self._blocks.read(room, start) else b""


class ExpertWriter:
    """A file that is being written, layer by layer. See `written`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._layers: list[ExpertLayer] = []
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}

    def start(self, layer: ExpertLayer) -> None:
        """Start a layer. A layer that was not finished is forgotten."""
        last = self._layers[-1] if self._layers else None
        at = BLOCK if last is None else last.start + last.num_bytes
        self._layer, self._checksums = layer._replace(start=at), {}

    def write(self, expert: int, data: memoryview) -> None:
        """Write an expert of the layer. Several threads may write at the same time.

        Args:
            expert: Number of the expert, in any order.
            data: The layer's `expert_bytes` bytes, from `room_for`.
        """
        self._blocks.write(data, self._layer.place(expert))
        checksum = checksum_of(data)
        with self._lock:
            self._checksums[expert] = checksum

    def finish(self, formats: tuple[CodeFormat | None, CodeFormat | None]) -> None:
        """Finish the layer: all its experts are written, in these formats."""
        sums = tuple(self._checksums[expert] for expert in range(self._layer.num_experts))
        self._layers.append(self._layer._replace(formats=formats, checksums=sums))

    def end(self, header: bytes) -> int:
        """Write table, end and header; return the size of the file."""
        last = self._layers[-1]
        start = last.start + last.num_bytes
        table, num_bytes = _table(self._layers)
        size = start + len(table) + BLOCK
        says = {"start": start, "bytes": num_bytes, "digest": _digest(table)}
        end = make_header(END, {name: str(value) for name, value in says.items()})
        for data, at in ((table, start), (end, size - BLOCK), (header, 0)):
            room = room_for(len(data))
            room[:] = data
            self._blocks.write(room, at)
        return size


@contextmanager
def written(
    path: Path,
    says: Mapping[str, str],
    layers: Sequence[ExpertLayer],
    blocks: type[Blocks] = Blocks,
) -> Iterator[ExpertWriter]:
    """Write a file, which gets its name when the `with` block ends without an error.

    Args:
        path: The file.
        says: Everything that decides the bytes of experts, by name.
        layers: Expected layers, for which room is reserved first.
        blocks: Class that writes the file.

    Raises:
        OSError: There is no room for the layers, or the file cannot be written. Nothing is left
            then.
    """
    header, new = make_header(MAGIC, says), path.with_name(path.name + ".new")
    with created(path, new, file_bytes(layers)):
        out = blocks(new)
        try:
            writer = ExpertWriter(out)
            yield writer
            os.truncate(new, writer.end(header))
        finally:
            out.close()


def file_bytes(layers: Sequence[ExpertLayer]) -> int:
    """Return the most bytes of a file of these layers."""
    full = [
        layer._replace(start=LONGEST, checksums=(LONGEST,) * layer.num_experts) for layer in layers
    ]
    table, _ = _table(full)
    return 2 * BLOCK + sum(layer.num_bytes for layer in layers) + len(table)


class InFile(NamedTuple):
    """The place of the weights of one module of experts."""

    file: ExpertFile
    number: int
    """Number of the layer in the file."""
    max_bytes: int
    """Most bytes of experts of all layers in memory."""

    @property
    def layer(self) -> ExpertLayer:
        """The layer in the file."""
        return self.file.layers[self.number]

    def digest(self) -> str:
        """Return a digest of every byte of the weights."""
        return repr((self.layer.formats, self.layer.checksums))


def refuse_too_few(max_bytes: int, slot_bytes: int, top_k: int, total: int) -> None:
    """Refuse memory that has no room for the experts of one token in one layer.

    Args:
        max_bytes: Most bytes of experts in memory.
        slot_bytes: Bytes of the largest expert.
        top_k: Experts per token.
        total: Bytes of all experts.

    Raises:
        ConfigError: There is no room.
    """
    if (num := max_bytes // slot_bytes) < top_k:
        raise ConfigError(
            f"max_expert_bytes={max_bytes} has room for {num} experts, and a token uses {top_k} "
            f"experts of a layer, of {slot_bytes} bytes each; give at least {top_k * slot_bytes}, "
            f"or {total} for all experts"
        )


def leave_in_file(module: Any, place: InFile) -> None:
    """Mark a module of experts whose weights are in a file. Its forward raises a ModelError."""
    setattr(module, IN_FILE, place)
    module.forward = RefusedForward(
        place.layer.name,
        str(place.file.path),
        "use a runner, or load the model without a file of experts",
    )


def in_file(module: object) -> InFile | None:
    """Return the place of a module's experts in a file; None if they are not in one."""
    found: InFile | None = getattr(module, IN_FILE, None)
    return found


def all_in_file(model: nn.Module) -> dict[str, InFile]:
    """Return the places of all experts that are in a file, by the name of their module."""
    found = {name: in_file(module) for name, module in model.named_modules()}
    return {name: place for name, place in found.items() if place is not None}


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the experts in {str(path)!r} cannot be used: {why}; give another file, or delete this one"
    )


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


def _table(layers: Sequence[ExpertLayer]) -> tuple[bytes, int]:
    """Return the table in whole blocks, and the bytes of its text."""
    text = json.dumps([layer._asdict() for layer in layers]).encode()
    return text.ljust(whole_blocks(len(text)), b"\0"), len(text)


def _layer_of(row: dict[str, Any]) -> ExpertLayer:
    """Return a layer of the table."""
    layer = ExpertLayer(**row)
    up, down = (None if one is None else CodeFormat(*one) for one in layer.formats)
    parts = tuple(Part(*part) for part in layer.parts)
    return layer._replace(parts=parts, formats=(up, down), checksums=tuple(layer.checksums))
