"""Reads of a file that do not fill the page cache.

Large reads bypass the system's cache if the file is not in the cache. A page of the cache costs the
system more time than the disk needs to send it (measured: 1.1 s of a core per GB, against 0.04 s),
and a file of many gigabytes would push out everything else. Pages of a mapped file would count as
memory of the process as long as they are mapped.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from qllm.errors import ModelError

LARGE = 256 << 10
"""Bytes from which on a read may bypass the cache."""
ALIGNED = 8
"""Alignment of a large tensor, for views of any dtype."""
PAGE = 4096
"""Alignment of addresses and lengths of reads that bypass the cache."""
SPARE = 64 << 20
"""Most bytes of buffers that are kept for reuse."""
PROBES = 8
"""Number of places in a file that are checked for being in the cache."""
AT_ONCE = 1 << 20
"""Bytes per call that asks the system to read ahead. The system ignores the rest of longer
ranges."""


class Buffers:
    """Buffers for reads, which are reused once no tensor uses their memory."""

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._num_spare = 0

    def take(self, num_bytes: int, start: int, end: int) -> tuple[mmap.mmap, Tensor]:
        """Return memory of `num_bytes` on a page boundary, and a tensor of its bytes start to end.

        The caller writes to the memory while it holds the tensor.
        """
        try:
            whole = self._spare.get(num_bytes, []).pop()
            self._num_spare -= num_bytes
        except IndexError:
            # Python's default is shared: forked ranks would read into one buffer
            whole = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        part = memoryview(whole)  # every view of the tensor keeps this alive
        # codes that stay in memory must not keep the whole buffer alive
        weakref.finalize(part, _give_back, weakref.ref(self), whole).atexit = False
        return whole, torch.frombuffer(part, dtype=torch.uint8, count=end - start, offset=start)

    def give_back(self, whole: mmap.mmap) -> None:
        """Keep memory that no tensor uses, up to SPARE."""
        if self._num_spare + len(whole) <= SPARE:  # a soft limit, counted without a lock
            self._num_spare += len(whole)
            self._spare.setdefault(len(whole), []).append(whole)


def _give_back(to: weakref.ref[Buffers], whole: mmap.mmap) -> None:
    if (buffers := to()) is not None:
        buffers.give_back(whole)


class RawFile:
    """A file that several threads read at any place.

    Args:
        path: Path of the file, which is open until the object is gone.
        buffers: Buffers of large reads.
        early: Ranges [start, end) that the system reads ahead after the first read.
    """

    def __init__(self, path: Path, buffers: Buffers, early: Sequence[tuple[int, int]] = ()) -> None:
        self._path, self._buffers, self._early = path, buffers, list(early)
        self._number = self._opened(os.O_RDONLY)
        self._around: int | None = None
        self._is_begun = False
        self.size = os.fstat(self._number).st_size

    def _opened(self, flags: int) -> int:
        number = os.open(self._path, flags | os.O_CLOEXEC)
        weakref.finalize(self, os.close, number).atexit = False
        return number

    def read(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes from `start` on, uint8 [num_bytes], in memory of their own.

        Raises:
            ModelError: The file ends before.
        """
        if self.size < start + num_bytes:
            raise ModelError(f"{self._path} ends too early; download it again")
        if not self._is_begun:
            self._begin()
        if num_bytes < LARGE or start % ALIGNED:
            out = torch.empty(num_bytes, dtype=torch.uint8)
            self._fill(self._number, memoryview(out.numpy()), start)  # type: ignore[arg-type]
            return out
        first, last = start // PAGE * PAGE, -(-(start + num_bytes) // PAGE) * PAGE
        inside = start - first
        whole, out = self._buffers.take(last - first, inside, inside + num_bytes)
        around = self._around
        if around is None or not _read_around(around, whole, first, start + num_bytes):
            self._fill(self._number, memoryview(whole)[inside : inside + num_bytes], start)
        return out

    def _begin(self) -> None:
        """Start to read ahead, and decide whether large reads bypass the cache."""
        self._is_begun = True
        for start, end in self._early:
            for at in range(start, end, AT_ONCE):
                os.posix_fadvise(self._number, at, min(AT_ONCE, end - at), os.POSIX_FADV_WILLNEED)
        if not self._is_cached():
            with suppress(OSError):  # the file system has no such call
                self._around = self._opened(os.O_RDONLY | os.O_DIRECT)

    def _is_cached(self) -> bool:
        """Return True if the file is in the system's cache, or if that is unknown."""
        byte = bytearray(1)
        try:
            for i in range(PROBES):
                os.preadv(self._number, [byte], self.size * i // PROBES, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _fill(self, number: int, left: memoryview, start: int) -> None:
        while left:
            try:
                got = os.preadv(number, [left], start)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            if got == 0:
                raise ModelError(f"{self._path} ends too early; download it again")
            left, start = left[got:], start + got


def _read_around(number: int, whole: mmap.mmap, first: int, end: int) -> bool:
    """Read pages from `first` to `end`, bypassing the cache; return False if that is impossible."""
    left, at = memoryview(whole), first
    try:
        while at < end:
            got = os.preadv(number, [left], at)
            if got == 0 or (got % PAGE and at + got < end):
                return False
            left, at = left[got:], at + got
    except OSError:  # the file system requires another alignment
        return False
    return True
