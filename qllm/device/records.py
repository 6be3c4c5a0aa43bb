"""A block of memory of the native side: a head of numbers, and arrays at offsets in the head."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qllm.device import layout
from qllm.device.layout import Section
from qllm.ingress.structs import Dtype

Zeros = Callable[[int], np.ndarray[Any, np.dtype[np.int64]]]


def host_zeros(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return zeroed memory of the host, `count` numbers of eight bytes."""
    return np.zeros(count, np.int64)


class Records:
    """Memory of a head of numbers and arrays after it. The head has the offsets of the arrays.

    Args:
        head: Type of the head: fields of eight bytes, or arrays of these.
        sections: Arrays after the head.
        sizes: Values of head fields from which the sizes of sections are computed.
        version: Version of the block.
        zeros: Function that allocates the block's memory, in numbers of eight bytes.
    """

    def __init__(
        self,
        head: Dtype,
        sections: Sequence[Section],
        sizes: Mapping[str, int],
        version: int,
        zeros: Zeros = host_zeros,
    ) -> None:
        self.offsets, num_bytes = layout.place(head, sections, sizes)
        self.memory = zeros(-(-num_bytes // 8))
        self.address: int = self.memory.ctypes.data
        self._arrays: dict[str, np.ndarray[Any, Dtype]] = {
            s.name: np.frombuffer(
                self.memory.data, s.dtype, layout.count_of(s, sizes), self.offsets[s.name]
            )
            for s in sections
        }
        self._cells = memoryview(self.memory.data)
        assert head.fields is not None
        self.num_cells = head.itemsize // 8
        self._at = {name: field[1] // 8 for name, field in head.fields.items()}
        self.set(version=version, **sizes)
        self.set(**{f"at_{name}": at for name, at in self.offsets.items()})

    def index(self, name: str) -> int:
        """Return the index of a number of the head, in numbers of eight bytes."""
        return self._at[name]

    def get(self, name: str) -> int:
        """Return a number of the head."""
        return int(self._cells[self._at[name]])

    def set(self, **numbers: int) -> None:
        """Set numbers of the head."""
        for name, value in numbers.items():
            self._cells[self._at[name]] = int(value)

    def cell(self, name: str) -> memoryview:
        """Return a view of one number of the head, for callers that read it often."""
        at = self._at[name]
        return self._cells[at : at + 1]

    def span(self, name: str, index: int) -> tuple[int, int]:
        """Return the bytes [start, end) of a section's element in the block."""
        array = self._arrays[name]
        start = self.get(f"at_{name}") + index * array.itemsize
        return start, start + array.itemsize

    def head(self, copy: "np.ndarray[Any, np.dtype[np.uint8]]") -> dict[str, int]:
        """Return the numbers of the head in a copy of the block's bytes."""
        cells = copy[: 8 * self.num_cells].view(np.int64)
        return {name: int(cells[at]) for name, at in self._at.items()}

    def view(self, name: str, copy: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        """Return a section in a copy of the block's bytes."""
        array = self._arrays[name]
        return np.frombuffer(copy.data, array.dtype, len(array), self.get(f"at_{name}"))

    def array(self, name: str) -> np.ndarray[Any, Dtype]:
        """Return a section as a numpy array that shares the block's memory."""
        return self._arrays[name]
