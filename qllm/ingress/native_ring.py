"""Ends of rings in C++: `qllm.ingress.ring` byte for byte, with acquire and release.

These ends are for machines whose stores become visible in any order. The same source is compiled
for GPUs.
"""

import time
from importlib import import_module
from typing import Any

import numpy as np

from qllm.errors import ConfigError
from qllm.ingress.ring import BROKEN_AFTER_NS, Record, RingError, record_bytes
from qllm.ingress.structs import RING_END
from qllm.ingress.words import Words, address_of, raw_bytes


def load_native() -> Any:
    """Import the extension.

    Raises:
        ConfigError: The extension was not built.
    """
    try:
        return import_module("qllm.ingress._ends")
    except ImportError as error:
        raise ConfigError(
            f"the ends of rings in C++ were not built ({error}), and those in Python need x86-64, "
            "where stores become visible in order; install qllm where a C++ compiler is, or from "
            "a wheel"
        ) from error


class _NativeEnd:
    """The common part of both ends.

    Args:
        native: The extension.
        buffer: The ring's bytes, at a multiple of eight.
        tail: The reader's word.
    """

    def __init__(self, native: Any, buffer: memoryview, tail: Words) -> None:
        self._native = native
        self._held = (buffer, raw_bytes(tail))
        self._end = np.zeros(1, RING_END)
        self._end[0] = (*map(address_of, self._held), len(buffer), *[0] * 7)
        self._address = self._end.ctypes.data


class NativeRingReader(_NativeEnd):
    """The reading end. One thread at a time."""

    @property
    def has_news(self) -> bool:
        """True if the next record, or its beginning, has arrived."""
        news: bool = self._native.has_news(self._address)
        return news

    def read(self) -> Record | None:
        """Take the next record; return None if no complete record has arrived.

        Raises:
            RingError: The next record is permanently broken.
        """
        found: Any = self._native.read(self._address, time.monotonic_ns())
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
        """Number of bytes written so far."""
        return int(self._end["at"][0])

    @property
    def num_used(self) -> int:
        """Number of bytes that the reader has not freed."""
        return self.head - int(self._native.load(int(self._end["tail"][0])))

    @property
    def fill(self) -> float:
        """Fill of the ring, 0 to 1."""
        return self.num_used / len(self._held[0])

    def write(self, kind: int, flags: int, body: bytes) -> bool:
        """Write one record; return False if there is no room for it now.

        Raises:
            ValueError: The record is larger than the ring.
        """
        done: int = self._native.write(self._address, kind, flags, body)
        if done < 0:
            length = record_bytes(len(body))
            raise ValueError(f"a record of {length} bytes exceeds a ring of {len(self._held[0])}")
        return bool(done)
