"""Words of memory that several processes, or a network card, read and write."""

from collections.abc import Iterator
from typing import Any, overload

import numpy as np


class OrderedWords:
    """Words of eight bytes, of which each load acquires and each store releases.

    Args:
        native: The extension.
        raw: The words, of format "Q".
    """

    def __init__(self, native: Any, raw: memoryview) -> None:
        self._native, self.raw = native, raw
        self._address = address_of(raw)

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "OrderedWords": ...
    def __getitem__(self, at: int | slice) -> "int | OrderedWords":
        if isinstance(at, slice):
            return OrderedWords(self._native, self.raw[at])
        word: int = self._native.load(self._place(at))
        return word

    def __setitem__(self, at: int, value: int) -> None:
        self._native.store(self._place(at), value)

    def __iter__(self) -> Iterator[int]:
        return (self[at] for at in range(len(self)))

    def _place(self, at: int) -> int:
        if not 0 <= at < len(self.raw):
            raise IndexError(f"word {at} of {len(self.raw)}")
        return self._address + 8 * at


Words = memoryview | OrderedWords
"""Words of shared memory, as this machine needs them."""


def raw_bytes(words: Words) -> memoryview:
    """Return the memory of words, to take its address."""
    return words.raw if isinstance(words, OrderedWords) else words


def address_of(words: Words) -> int:
    """Return the address of words, or of the bytes of a view. The caller keeps the memory alive."""
    return int(np.frombuffer(raw_bytes(words), "u1").ctypes.data)
