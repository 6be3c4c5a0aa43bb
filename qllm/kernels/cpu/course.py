"""The place at which an op stopped, with the memory of its tasks (`Course` in course.h).

An op is a sequence of tasks: a panel of outputs for some rows, a tile of queries and a range of
keys, a few rows of a norm. The kernels can stop after any task. The first `done` tasks are
complete.
"""

import ctypes
import weakref
from ctypes import c_int64
from typing import Any, Protocol

from qllm.kernels.cpu import native

OP_BYTES = 64 << 20
"""Approximate bytes that one op may store between its tasks, which limits the op's rows."""


class PlaceStruct(ctypes.Structure):
    """`Place` in course.h, the first member of a `Course`."""

    _fields_ = (("done", c_int64), ("kept_bytes", c_int64))


class Course:
    """The place inside one op. A frame that is parked there holds the course.

    A course that no frame holds is reused. If the kernels were not built, a course is never inside
    an op.
    """

    def __init__(self) -> None:
        self._struct, self.address = PlaceStruct(), 0
        if native is not None:
            self.address = native.new_course()
            self._struct = PlaceStruct.from_address(self.address)
            weakref.finalize(self, native.delete_course, self.address).atexit = False

    @property
    def done(self) -> int:
        """Completed tasks of the op; 0 between two ops."""
        return int(self._struct.done)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the course holds."""
        return int(self._struct.kept_bytes)


class Inside(Protocol):
    """A place inside an op, such as a course."""

    @property
    def address(self) -> int:
        """Address that native code gets."""
        ...

    @property
    def done(self) -> int:
        """Completed tasks of the op; 0 between two ops."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the place holds."""
        ...


class Courses(Protocol):
    """A pool of places inside ops. This module is the pool of courses."""

    def take(self) -> Inside:
        """Return a place that is between two ops."""
        ...

    def keep(self, course: Any) -> Inside | None:
        """Return the place if it is inside an op. Put any other place into the pool."""
        ...


_spare: list[Course] = []


def take() -> Course:
    """Return a course that is between two ops."""
    try:
        return _spare.pop()
    except IndexError:
        return Course()


def give_back(course: Course) -> None:
    """Put a course that is between two ops into the pool, which holds the one with most memory."""
    if not _spare or course.num_bytes > _spare[0].num_bytes:
        _spare[:] = [course]


def keep(course: Course) -> Course | None:
    """Return the course if it is inside an op. Put any other course into the pool."""
    if course.done:
        return course
    give_back(course)
    return None
