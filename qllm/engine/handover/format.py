"""KV of one request as bytes: a header that lists the content, and tensors with checksums.

    magic | bytes of JSON | sum | JSON, 0... | tensor 0, 0... | tensor 1, 0... | ...

The header and each tensor begin at a multiple of 64 bytes. A checksum (XXH3) also covers the
zeros up to the next tensor, so every changed byte is found. `read_header` checks each number before
the number is used.
"""

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.block_file import checksum_of
from qllm.errors import CheckpointError

MAGIC = b"qllm-ho\x01"
HEAD = struct.Struct("<8sQQ")
"""Magic, bytes of the JSON, and checksum of the header, computed while the field is zero."""
ALIGN = 64
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TensorPart(NamedTuple):
    """A tensor of a parcel."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    """Offset of the tensor's first byte in the parcel."""
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the next tensor."""
        return self.at + _whole(self.num_bytes)


class Header(NamedTuple):
    """The header of a parcel."""

    says: dict[str, Any]
    parts: dict[str, TensorPart]


def seal(says: Mapping[str, Any], tensors: Mapping[str, Sequence[Tensor]]) -> mmap.mmap:
    """Return the bytes of a parcel.

    Args:
        says: Any JSON value.
        tensors: Lists of tensors by name. A list becomes one tensor, joined along the first
            dimension.
    """
    parts, at = [], 0
    for name, pieces in tensors.items():
        first = pieces[0]
        shape = (sum(map(len, pieces)), *first.shape[1:]) if len(pieces) > 1 else first.shape
        parts.append(TensorPart(name, first.dtype, tuple(shape), at, 0))
        at = parts[-1].end
    start = len(_header(says, parts))
    memory = mmap.mmap(-1, start + at)
    view = memoryview(memory)
    for i, part in enumerate(parts):
        part = part._replace(at=part.at + start)
        _fill(memory, part, tensors[part.name])
        parts[i] = part._replace(checksum=checksum_of(view[part.at : part.end]))
    shifted = [part._replace(at=part.at - start) for part in parts]
    view[:start] = _header(says, shifted)
    return memory


def _fill(memory: mmap.mmap, part: TensorPart, pieces: Sequence[Tensor]) -> None:
    """Copy tensors into the memory of a parcel."""
    at = part.at
    with torch.inference_mode():
        for piece in pieces:
            if piece.numel():
                flat = torch.frombuffer(memory, dtype=part.dtype, count=piece.numel(), offset=at)
                flat.view(piece.shape).copy_(piece)
            at += piece.nbytes


def _header(says: Mapping[str, Any], parts: Sequence[TensorPart]) -> bytes:
    """Return the header. Its length does not depend on the checksums."""
    listed = [
        [p.name, str(p.dtype).removeprefix("torch."), p.shape, f"{p.checksum:016x}"] for p in parts
    ]
    text = json.dumps({"says": dict(says), "parts": listed}).encode()
    body = text.ljust(_whole(HEAD.size + len(text)) - HEAD.size, b"\0")
    head = HEAD.pack(MAGIC, len(text), 0)
    return HEAD.pack(MAGIC, len(text), checksum_of(head, body)) + body


def header_bytes(head: bytes | memoryview) -> int:
    """Return the length of the header of a parcel that begins with these bytes.

    Raises:
        CheckpointError: The bytes are not of a parcel, or the header is longer than any real
            header.
    """
    if len(head) < HEAD.size:
        raise CheckpointError(f"a parcel of {len(head)} bytes has no header")
    magic, length, _ = HEAD.unpack(bytes(head[: HEAD.size]))
    if magic != MAGIC:
        raise CheckpointError("these bytes are no parcel of KV, or one of another release")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    return _whole(HEAD.size + int(length))


def read_header(memory: memoryview, num_bytes: int) -> Header:
    """Read the header of a parcel. The rest of the parcel may arrive later.

    Args:
        memory: First bytes of the parcel.
        num_bytes: Size in bytes of the whole parcel.

    Raises:
        CheckpointError: The header is damaged, or does not fit a parcel of that size.
    """
    start = header_bytes(memory)
    if start > len(memory):
        raise CheckpointError(f"a header of {start} bytes, of which {len(memory)} are there")
    _, length, checksum = HEAD.unpack(bytes(memory[: HEAD.size]))
    body = memory[HEAD.size : start]
    if checksum_of(HEAD.pack(MAGIC, length, 0), body) != checksum:
        raise CheckpointError("the header of a parcel is damaged")
    try:
        document = json.loads(bytes(body[:length]))
        says, listed = document["says"], document["parts"]
        if not isinstance(says, dict):
            raise TypeError("it says nothing")
        parts, at = {}, start
        for name, dtype, shape, digits in listed:
            part = TensorPart(str(name), DTYPES[dtype], _shape(shape), at, int(digits, 16))
            parts[part.name], at = part, part.end
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of a parcel makes no sense: {error!r:.200}") from error
    if at != num_bytes or len(parts) != len(listed):
        raise CheckpointError(f"a parcel of {num_bytes} bytes, of which its header names {at}")
    return Header(says, parts)


def _shape(listed: Any) -> tuple[int, ...]:
    shape = tuple(listed)
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise ValueError(f"a tensor of shape {listed!r:.80}")
    return shape


def tensor(memory: mmap.mmap, part: TensorPart) -> Tensor:
    """Return a tensor of a complete parcel, as a view of `memory`.

    Raises:
        CheckpointError: The tensor is damaged.
    """
    if checksum_of(memoryview(memory)[part.at : part.end]) != part.checksum:
        raise CheckpointError(f"{part.name!r:.40} of a parcel is damaged")
    if not part.num_bytes:
        return torch.empty(part.shape, dtype=part.dtype)
    count = math.prod(part.shape)
    flat = torch.frombuffer(memory, dtype=part.dtype, count=count, offset=part.at)
    return flat.view(part.shape)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
