"""Ends of rings for this machine.

x86-64 makes the stores of one core visible in program order, so Python's plain loads and stores
suffice. On other machines a sequence number may become visible before the data that it announces.
These machines use the ends in C++. They load every word of shared memory with acquire, and store it
with release.
"""

import platform
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from qllm.ingress.native_ring import NativeRingReader, NativeRingWriter, load_native
from qllm.ingress.ring import RingReader, RingWriter
from qllm.ingress.words import OrderedWords, Words

IN_ORDER = ("x86_64", "AMD64")
"""Names from `platform.machine` of machines that need no more than the compiler's order."""

Reader = RingReader | NativeRingReader
Writer = RingWriter | NativeRingWriter


class Ends(NamedTuple):
    """Classes for the two ends of a ring, and for single words of shared memory."""

    reader: Callable[[memoryview, Words], Reader]
    writer: Callable[[memoryview, Words], Writer]
    words: Callable[[memoryview], Words]


PYTHON_ENDS = Ends(RingReader, RingWriter, lambda raw: raw)


def native_ends() -> Ends:
    """Return the ends in C++.

    Raises:
        ConfigError: The ends were not built.
    """
    native = load_native()
    reader, writer = partial(NativeRingReader, native), partial(NativeRingWriter, native)
    return Ends(reader, writer, partial(OrderedWords, native))


@cache
def ring_ends() -> Ends:
    """Return the ends for this machine.

    Raises:
        ConfigError: The machine needs the ends in C++, and they were not built.
    """
    return PYTHON_ENDS if platform.machine() in IN_ORDER else native_ends()
