"""Bytes of a file, of which no more stays in memory than somebody holds.

Pages of a mapped file count as memory of the process for as long as they are mapped. A file that is
mapped as a whole, and whose codes are packed as they come, would be in memory twice.
"""

import mmap
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from qllm.errors import ModelError

MAPPED = 256 << 10
"""Bytes from which on a tensor is mapped and not copied."""
ALIGNED = 8
"""Where a mapped tensor may begin, for views of any dtype."""
AHEAD = 64 << 20
"""Bytes that the system reads before they are asked for."""


class RawFile:
    """A file that is read here and there, mostly forwards.

    Args:
        path: Of the file, which is open until the object is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        self._advised = (0, 0)

    def read(self, start: int, num_bytes: int) -> Tensor:
        """Bytes from `start` on, uint8 [num_bytes]; where they are many, a mapping of them alone.

        Raises:
            ModelError: The file ends before.
        """
        self._look_ahead(start, start + num_bytes)
        if num_bytes >= MAPPED and start % ALIGNED == 0:
            return self._mapped(start, num_bytes)
        out = torch.empty(num_bytes, dtype=torch.uint8)
        left = memoryview(out.numpy())
        while left:
            got = os.preadv(self._number, [left], start + num_bytes - len(left))
            if got == 0:
                raise ModelError(f"{self._path} ends too early; download it again")
            left = left[got:]
        return out

    def _mapped(self, start: int, num_bytes: int) -> Tensor:
        inside = start % mmap.ALLOCATIONGRANULARITY
        if os.fstat(self._number).st_size < start + num_bytes:
            raise ModelError(f"{self._path} ends too early; download it again")
        flags, pages = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        found = mmap.mmap(self._number, inside + num_bytes, flags, pages, offset=start - inside)
        return torch.frombuffer(found, dtype=torch.uint8, count=num_bytes, offset=inside)

    def _look_ahead(self, start: int, end: int) -> None:
        first, last = self._advised
        if first <= start and end + AHEAD // 2 <= last:
            return
        begin = max(start, last) if first <= start <= last else start
        self._advised = (start, end + AHEAD)
        length = end + AHEAD - begin
        os.posix_fadvise(self._number, begin, length, os.POSIX_FADV_WILLNEED)
