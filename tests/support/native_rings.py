"""Ends of rings in C++: `qllm.ingress.ring` byte for byte, from the source that a GPU compiles."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qllm.ingress.ring import (
    BROKEN_AFTER_NS,
    Record,
    RingError,
    RingReader,
    RingWriter,
    record_bytes,
)
from qllm.ingress.structs import RING_END


class _NativeEnd:
    """What both ends have.

    Args:
        native: The extension (`qllm.device.native.load_native`).
        buffer: The ring's bytes, at a multiple of eight.
        tail: The reader's word.
    """

    def __init__(self, native: Any, buffer: memoryview, tail: memoryview) -> None:
        self._native = native
        self._held = (np.frombuffer(buffer, "u1"), np.frombuffer(tail, "<u8"))
        self._end = np.zeros(1, RING_END)
        ring, word = (part.ctypes.data for part in self._held)
        self._end[0] = (ring, word, len(buffer), *[0] * 7)
        self._address = self._end.ctypes.data


class NativeRingReader(_NativeEnd):
    """The reading end. One thread at a time."""

    @property
    def has_news(self) -> bool:
        """Whether the next record, or its beginning, is there."""
        news: bool = self._native.ring_has_news(self._address)
        return news

    def read(self) -> Record | None:
        """Take the next record; None while there is none that is whole.

        Raises:
            RingError: The next record is broken for good.
        """
        found: Any = self._native.ring_read(self._address, time.monotonic_ns())
        if found is False:
            raise RingError(
                f"record {int(self._end['seq'][0]) + 1} of a ring has had a wrong checksum for "
                f"{BROKEN_AFTER_NS // 10**9} s: its memory was overwritten"
            )
        return None if found is None else Record(*found)


class NativeRingWriter(_NativeEnd):
    """The writing end. One thread at a time."""

    @property
    def head(self) -> int:
        """Bytes written so far."""
        return int(self._end["at"][0])

    @property
    def num_used(self) -> int:
        """Bytes that the reader has not given back."""
        return self.head - int(self._held[1][0])

    @property
    def fill(self) -> float:
        """How full it is, 0 to 1."""
        return self.num_used / len(self._held[0])

    def write(self, kind: int, flags: int, body: bytes) -> bool:
        """Write one record; False if there is no room for it now.

        Raises:
            ValueError: It is larger than the ring.
        """
        done: int = self._native.ring_write(self._address, kind, flags, body)
        if done < 0:
            length = record_bytes(len(body))
            raise ValueError(f"a record of {length} bytes exceeds a ring of {len(self._held[0])}")
        return bool(done)


class Ends(NamedTuple):
    """The two ends of a ring, each made of its bytes and its reader's word."""

    reader: Callable[[memoryview, memoryview], Any]
    writer: Callable[[memoryview, memoryview], Any]


ENDS = Ends(RingReader, RingWriter)
"""Those of the product, in Python."""


def native_ends(native: Any) -> Ends:
    """The ends that the extension makes."""
    return Ends(partial(NativeRingReader, native), partial(NativeRingWriter, native))
