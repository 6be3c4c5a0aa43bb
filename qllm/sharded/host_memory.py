"""Memory of the ranks of several hosts: each process maps its own, at the same addresses.

Rank 0 takes tensors from it, as from memory that is shared. What Python writes there goes to the
other ranks with the next call. What ranks write in a call goes to the others at its gathers, except
KV: that stays where it is written, and rank 0 fetches what it reads.
"""

import ctypes
import gc
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from qllm.errors import ConfigError
from qllm.sharded.memory import ADDRESS_BYTES, SharedMemory

STARTS = tuple((32 << 40) + i * ADDRESS_BYTES for i in range(24))
"""Addresses that no program uses by itself, for the memory of that many models in one process."""
ALL_RANKS = -1
"""`kAllRanks` in link.h."""
MAP_FIXED_NOREPLACE = 0x100000
"""Flag of `mmap`, from asm-generic/mman-common.h."""
FAILED = c_void_p(-1).value


class RegionStruct(ctypes.Structure):
    """`Region` in link.h."""

    _fields_ = (
        ("at", c_void_p),
        ("row_bytes", c_int64),
        ("stride", c_int64),
        ("rows", c_int64),
        ("rank", c_int64),
    )


class FetchStruct(ctypes.Structure):
    """`FetchCall` in link.h."""

    _fields_ = (("regions", c_void_p), ("num", c_int64))


class HostMemory(SharedMemory):
    """Memory at the addresses of other hosts' memory.

    Args:
        start: First address, which rank 0 has chosen; None chooses one.

    Raises:
        ConfigError: The system has no such memory there.
    """

    def __init__(self, start: int | None = None) -> None:
        self._starts = STARTS if start is None else (start,)
        try:
            super().__init__()
        except ConfigError:
            gc.collect()  # models that have ended may be in cycles
            super().__init__()
        self._changed: deque[tuple[Tensor, int]] = deque()
        """Tensors that Python has written since the last call, with the ranks that read them."""
        self._dropped: deque[RegionStruct] = deque()
        """Pages that have been given back since the last call."""
        self.fetcher: weakref.WeakMethod[Callable[[int], None]] | None = None
        """Method that makes a FETCH call with the arguments at an address."""

    def _map(self, file: int) -> int:
        libc = _libc()
        for start in self._starts:
            flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
            rights = mmap.PROT_READ | mmap.PROT_WRITE
            found = libc.mmap(start, ADDRESS_BYTES, rights, flags, file, 0)
            if found == start:
                weakref.finalize(self, _unmap, start, os.getpid()).atexit = False
                return start
            error = ctypes.get_errno()
            if found != FAILED:  # an old kernel, which does not know the flag
                libc.munmap(found, ADDRESS_BYTES)
        taken = ", ".join(f"{start:#x}" for start in self._starts)
        raise OSError(error, f"{os.strerror(error)}, at address {taken}")

    def share(self, tensor: Tensor, rank: int | None = None) -> None:
        if tensor.numel() and rank != 0:
            self._changed.append((tensor, ALL_RANKS if rank is None else rank))

    def changes(self) -> tuple["ctypes.Array[RegionStruct]", list[Tensor]]:
        """Return what the next call carries, and the tensors that it reads."""
        regions, held = [], []
        while self._dropped:
            regions.append(self._dropped.popleft())
        while self._changed:
            tensor, rank = self._changed.popleft()
            regions.append(region_of(tensor, rank))
            held.append(tensor)
        return (RegionStruct * len(regions))(*regions), held

    def fetch(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        regions = [region_of(x, rank) for x, rank in tensors if rank and x.numel()]
        make = None if self.fetcher is None else self.fetcher()
        if not regions or make is None:
            return
        array, size = (RegionStruct * len(regions))(*regions), ctypes.sizeof(FetchStruct)
        place = self.empty((size + ctypes.sizeof(array),), torch.uint8)
        ctypes.memmove(place.data_ptr() + size, array, ctypes.sizeof(array))
        call = FetchStruct.from_address(place.data_ptr())
        call.regions, call.num = place.data_ptr() + size, len(regions)
        self.share(place)
        make(place.data_ptr())

    def _drop(self, at: int, size: int) -> None:
        _libc().madvise(self.start + at, size, mmap.MADV_REMOVE)
        self._dropped.append(RegionStruct(self.start + at, size, 0, 0, ALL_RANKS))


def region_of(tensor: Tensor, rank: int) -> RegionStruct:
    """Return the bytes of a tensor, contiguous or with contiguous rows."""
    at = tensor.data_ptr()
    if tensor.is_contiguous():
        return RegionStruct(at, tensor.nbytes, 0, 1, rank)
    assert tensor[0].is_contiguous()
    stride = tensor.stride(0) * tensor.itemsize
    return RegionStruct(at, tensor[0].nbytes, stride, len(tensor), rank)


def _unmap(start: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process may have other memory there
        _libc().munmap(start, ADDRESS_BYTES)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = c_void_p
    libc.mmap.argtypes = (c_void_p, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (c_void_p, size)
    libc.madvise.argtypes = (c_void_p, size, number)
    return libc
