"""A block of memory of the native side: a head of numbers, and the arrays that it says where."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qllm.device import layout
from qllm.device.block import Zeros, host_zeros
from qllm.device.layout import Section
from qllm.structs import Dtype


class Records:
    """One block.

    Args:
        head: What it begins with: numbers of eight bytes.
        sections: What follows.
        sizes: What the sizes of sections are products of; fields of the head.
        version: Of the block.
        zeros: Makes its memory, so many numbers of eight bytes.
    """

    def __init__(
        self,
        head: Dtype,
        sections: Sequence[Section],
        sizes: Mapping[str, int],
        version: int,
        zeros: Zeros = host_zeros,
    ) -> None:
        offsets, num_bytes = layout.place(head, sections, sizes)
        self.memory = zeros(-(-num_bytes // 8))
        self.address: int = self.memory.ctypes.data
        self._arrays: dict[str, np.ndarray[Any, Dtype]] = {
            s.name: np.frombuffer(
                self.memory.data, s.dtype, layout.count_of(s, sizes), offsets[s.name]
            )
            for s in sections
        }
        self._cells = memoryview(self.memory.data)
        self._at = {name: i for i, name in enumerate(head.names or ())}
        self.set(version=version, **sizes)
        self.set(**{f"at_{name}": at for name, at in offsets.items()})

    @property
    def num_cells(self) -> int:
        """Numbers of the head."""
        return len(self._at)

    def index(self, name: str) -> int:
        """Where a number of the head lies, in numbers."""
        return self._at[name]

    def get(self, name: str) -> int:
        """A number of the head."""
        return int(self._cells[self._at[name]])

    def set(self, **numbers: int) -> None:
        """Change numbers of the head."""
        for name, value in numbers.items():
            self._cells[self._at[name]] = value

    def cell(self, name: str) -> memoryview:
        """A number of the head as a view of one, for who looks often."""
        at = self._at[name]
        return self._cells[at : at + 1]

    def array(self, name: str) -> np.ndarray[Any, Dtype]:
        """A section as a numpy array that shares its memory."""
        return self._arrays[name]
