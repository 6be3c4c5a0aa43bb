"""A ring of records between one writer and one reader, over any shared bytes.

    bytes   ... taken | record k | record k+1 | 0 | free or taken before ...
                      ^ tail                  ^ head (known to the writer alone)

A record is contiguous but for the wrap, and starts at a multiple of LINE. Its sequence number is in
its header and, written last, in its trailer. A record counts when both are the next number and the
checksum is right. So a reader needs no index from the writer. A torn write reads as "nothing yet",
in whatever order its bytes become visible. The writer zeroes the word after a record before it
writes the record. So a reader never takes old bytes of the ring for a header.

Order in memory: these ends are for x86-64, which makes the stores of one core visible in program
order. A reader that sees the trailer's number sees the record. On other machines
`qllm.ingress.ends` chooses the ends in C++. Over RDMA only the checksum protects a record. The
reader looks again until all bytes have arrived, and frees the bytes only then.
"""

import time
import zlib
from typing import NamedTuple

from qllm.errors import QllmError
from qllm.ingress.layout import HEADER, LINE, TRAILER, body_struct
from qllm.ingress.words import Words

_HEAD, _TAIL = body_struct(HEADER), body_struct(TRAILER)
_BEFORE_SEQ = TRAILER.itemsize - 8
OVERHEAD = _HEAD.size + _TAIL.size
BROKEN_AFTER_NS = 1_000_000_000
"""Nanoseconds after which a record with a wrong checksum counts as broken, not as torn."""


class RingError(QllmError):
    """An error: a ring holds bytes that our writers never leave, so its memory was overwritten."""


class Record(NamedTuple):
    """The content of one write."""

    kind: int
    flags: int
    body: bytes
    """Bytes without header and trailer. Zeros may follow the bytes that were written."""


def record_bytes(num_body_bytes: int) -> int:
    """Return the number of bytes that a record takes in a ring."""
    return -(-(num_body_bytes + OVERHEAD) // LINE) * LINE


def encode(seq: int, kind: int, flags: int, body: bytes) -> bytes:
    """Return the bytes of one record."""
    length = record_bytes(len(body))
    padding = bytes(length - OVERHEAD - len(body))
    start = _HEAD.pack(seq, length, kind, flags) + body + padding
    return start + _TAIL.pack(zlib.crc32(start), 0, seq)


class RingWriter:
    """The writing end. One thread at a time.

    Args:
        buffer: The ring's bytes, zero at first; a multiple of LINE.
        tail: The reader's word.
    """

    def __init__(self, buffer: memoryview, tail: Words) -> None:
        self._bytes, self._tail = buffer, tail
        self._words = buffer.cast("Q")
        self._capacity = len(buffer)
        self._head = self._seq = 0

    @property
    def head(self) -> int:
        """Number of bytes written so far."""
        return self._head

    @property
    def num_used(self) -> int:
        """Number of bytes that the reader has not freed."""
        return int(self._head - self._tail[0])

    @property
    def fill(self) -> float:
        """Fill of the ring, 0 to 1."""
        return self.num_used / self._capacity

    def write(self, kind: int, flags: int, body: bytes) -> bool:
        """Write one record; return False if there is no room for it now.

        Raises:
            ValueError: The record is larger than the ring.
        """
        length = record_bytes(len(body))
        if length + LINE > self._capacity:
            raise ValueError(f"a record of {length} bytes exceeds a ring of {self._capacity}")
        if self.num_used + length + LINE > self._capacity:
            return False
        record = encode(self._seq + 1, kind, flags, body)
        start, end = self._head % self._capacity, (self._head + length) % self._capacity
        self._words[end // 8] = 0
        last = end or self._capacity
        self._copy(start, record[: length - 8])
        self._words[last // 8 - 1] = self._seq + 1
        self._seq += 1
        self._head += length
        return True

    def _copy(self, start: int, data: bytes) -> None:
        end = start + len(data)
        if end <= self._capacity:
            self._bytes[start:end] = data
        else:
            first = self._capacity - start
            self._bytes[start:] = data[:first]
            self._bytes[: end - self._capacity] = data[first:]


class RingReader:
    """The reading end. One thread at a time.

    Args:
        buffer: The ring's bytes.
        tail: The reader's own word: the number of bytes taken so far.
    """

    def __init__(self, buffer: memoryview, tail: Words) -> None:
        self._bytes, self._tail = buffer, tail
        self._words = buffer.cast("Q")
        self._capacity = len(buffer)
        self._at = self._seq = 0
        self._wrong_since_ns: int | None = None

    @property
    def has_news(self) -> bool:
        """True if the next record, or its beginning, has arrived."""
        return bool(self._words[self._at % self._capacity // 8] == self._seq + 1)

    def read(self) -> Record | None:
        """Take the next record; return None if no complete record has arrived.

        Raises:
            RingError: The next record is permanently broken.
        """
        start, seq = self._at % self._capacity, self._seq + 1
        if self._words[start // 8] != seq:
            return None
        length = int.from_bytes(self._bytes[start + 8 : start + 12], "little")
        if length % LINE or not LINE <= length <= self._capacity - LINE:
            return None
        raw = self._copy(start, length)
        crc, _, last_seq = _TAIL.unpack_from(raw, length - _TAIL.size)
        if last_seq != seq:
            return None
        found_seq, _, kind, flags = _HEAD.unpack_from(raw)
        if found_seq != seq or crc != zlib.crc32(raw[: length - _TAIL.size]):
            self._wrong(seq)
            return None
        self._wrong_since_ns = None
        self._seq, self._at = seq, self._at + length
        self._tail[0] = self._at
        return Record(kind, flags, raw[_HEAD.size : length - _TAIL.size])

    def _wrong(self, seq: int) -> None:
        now = time.monotonic_ns()
        if self._wrong_since_ns is None:
            self._wrong_since_ns = now
        elif now - self._wrong_since_ns > BROKEN_AFTER_NS:
            raise RingError(
                f"record {seq} of a ring has had a wrong checksum for "
                f"{BROKEN_AFTER_NS // 10**9} s: its memory was overwritten"
            )

    def _copy(self, start: int, length: int) -> bytes:
        end = start + length
        if end <= self._capacity:
            return bytes(self._bytes[start:end])
        return bytes(self._bytes[start:]) + bytes(self._bytes[: end - self._capacity])
