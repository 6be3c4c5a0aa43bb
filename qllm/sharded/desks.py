"""Places of frames on ranks. They replace courses, which are places in one process.

A rank has its course, the units of its experts and its part of the head on a desk. Rank 0 names
desks by number. Desks exist in the processes of ranks (`Desk` in kernels/cpu/group.h).
"""

import weakref

from torch import Tensor


class Desk:
    """The place of one frame on every rank. A frame that is parked inside an op holds it."""

    def __init__(self, number: int) -> None:
        self.address = number + 1
        """Number of the desk, from 1 on. It stands in the place of a course's address."""
        self.done = 0
        """Tasks of an op that rank 0 has done; 0 between two ops and in EXPERTS."""
        self.is_held = False
        """True if a rank is inside an op of the frame."""
        self.num_bytes = 0
        """Bytes of memory that ranks hold for the op."""
        self.is_new = True
        """True if nothing on the desk is done."""
        self.held: tuple[Tensor, ...] = ()
        """Tensors of the head that ranks read and write."""


class Desks:
    """A pool of desks: see `qllm.kernels.cpu.course.Courses`."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0
        self._used: weakref.WeakValueDictionary[int, Desk] = weakref.WeakValueDictionary()

    def take(self) -> Desk:
        """Return a desk for a frame that is between two ops."""
        if self._free:
            number = self._free.pop()
        else:
            number, self._num = self._num, self._num + 1
        desk = Desk(number)
        weakref.finalize(desk, self._free.append, number).atexit = False
        self._used[desk.address] = desk
        return desk

    def keep(self, desk: Desk) -> Desk | None:
        """Return the desk if a rank is inside an op of its frame."""
        return desk if desk.is_held else None

    def at(self, address: int) -> Desk:
        """Return the desk with an address."""
        return self._used[address]
