"""The place inside an op that was left, with the memory of its tasks (`Course` of course.h).

An op is a row of tasks: a panel of outputs for some rows, a tile of queries and a range of keys, a
few rows of a norm. It can be left after any task. What is done is the first `done` of them.
"""

import ctypes
import weakref
from ctypes import c_int64

from qllm.kernels.cpu import native

OP_BYTES = 64 << 20
"""About the memory that one op may keep between its tasks; it bounds the op's rows."""


class PlaceStruct(ctypes.Structure):
    """`Place` of course.h, with which a `Course` begins."""

    _fields_ = (("done", c_int64), ("kept_bytes", c_int64))


class Course:
    """The place inside one op. A frame that is parked there keeps it; others are used again.

    Where the kernels were not built it is never inside one.
    """

    def __init__(self) -> None:
        self._struct, self.address = PlaceStruct(), 0
        if native is not None:
            self.address = native.new_course()
            self._struct = PlaceStruct.from_address(self.address)
            weakref.finalize(self, native.delete_course, self.address).atexit = False

    @property
    def done(self) -> int:
        """Tasks of the op that are done; 0 between two ops."""
        return int(self._struct.done)

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps."""
        return int(self._struct.kept_bytes)


_spare: list[Course] = []


def take() -> Course:
    """Return a course that is between two ops."""
    try:
        return _spare.pop()
    except IndexError:
        return Course()


def give_back(course: Course) -> None:
    """Let others use a course that is between two ops; the one with the most memory is kept."""
    if not _spare or course.num_bytes > _spare[0].num_bytes:
        _spare[:] = [course]


def keep(course: Course) -> Course | None:
    """Return a course that is inside an op; give back one that is not."""
    if course.done:
        return course
    give_back(course)
    return None
