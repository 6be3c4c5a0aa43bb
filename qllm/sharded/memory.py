"""Memory that all ranks of a model see at the same addresses.

It is one file without a name, which a process maps once. Ranks are forked, so they inherit the
mapping. The file has no size to fill: pages take memory when they are written, and give it back
when their tensor is freed.
"""

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from qllm.errors import ConfigError

ADDRESS_BYTES = 1 << 41
"""Bytes of address space."""
LINE = 64
"""Bytes of a cache line, where each tensor starts."""
STEPS = 8
"""Sizes of ranges between two powers of two. A range is reused for tensors of its size alone."""
PAGE = mmap.PAGESIZE
LARGE = 1 << 20
"""Bytes from which a freed range gives its memory back."""


class SharedMemory:
    """Memory from which tensors are taken. A tensor that is freed gives its range back.

    Raises:
        ConfigError: The system has no such memory.
    """

    def __init__(self) -> None:
        try:
            file = os.memfd_create("qllm-ranks", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, ADDRESS_BYTES)
                self.start = self._map(file)
                """First address."""
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"ranks need {ADDRESS_BYTES >> 40} TiB of addresses of shared memory, and the "
                f"system refuses them ({error}); raise the limit of virtual memory (ulimit -v), or "
                "use tp=1"
            ) from error
        self._next, self._owner = 0, os.getpid()
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Starts of free ranges, by size."""

    def _map(self, file: int) -> int:
        """Map the file, and return its first address."""
        self._memory = mmap.mmap(file, ADDRESS_BYTES)
        return ctypes.addressof((ctypes.c_byte * 1).from_buffer(self._memory))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor. Callable from any thread."""
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        num_bytes = numel * dtype.itemsize
        size = _rounded(num_bytes)
        free = self._free[size]
        try:
            at = free.pop()
        except IndexError:
            at = self._take(size)
        array = (ctypes.c_byte * num_bytes).from_address(self.start + at)
        weakref.finalize(array, self._give_back, at, size).atexit = False
        return torch.frombuffer(array, dtype=dtype, count=numel).view(tuple(shape))

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor, which all ranks have."""
        copy = self.empty(tensor.shape, tensor.dtype).copy_(tensor)
        self.share(copy)
        return copy

    def share(self, tensor: Tensor, rank: int | None = None) -> None:
        """Let the next call read values of this memory that Python has written in rank 0.

        Args:
            tensor: Tensor of this memory, or a part whose rows are contiguous.
            rank: The only rank that reads it; None is all ranks.
        """
        # ranks of one host see them

    def fetch(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Let rank 0 read tensors that other ranks have written, each with its rank."""
        # rank 0 sees them

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a contiguous tensor lies in this memory."""
        at = tensor.data_ptr() - self.start
        return 0 <= at < ADDRESS_BYTES and tensor.is_contiguous()

    def _take(self, size: int) -> int:
        with self._lock:
            at = self._next if size < LARGE else -(-self._next // PAGE) * PAGE
            self._next = at + size
        if self._next > ADDRESS_BYTES:
            raise ConfigError(
                f"ranks have no addresses left for {size} bytes of shared memory: "
                f"{ADDRESS_BYTES >> 40} TiB are in use; serve fewer or shorter requests at once"
            )
        return at

    def _give_back(self, at: int, size: int) -> None:
        if os.getpid() != self._owner:  # another process has a copy of the tensor's object
            return
        if size >= LARGE:
            self._drop(at, size)
        self._free[size].append(at)

    def _drop(self, at: int, size: int) -> None:
        """Give the memory of pages back to the system."""
        self._memory.madvise(mmap.MADV_REMOVE, at, size)


def _rounded(num_bytes: int) -> int:
    """Return the size of the range for a tensor: a multiple of a line, of large ones of a page."""
    step = max(LINE, 1 << max(0, num_bytes.bit_length() - STEPS.bit_length()))
    return -(-num_bytes // step) * step
