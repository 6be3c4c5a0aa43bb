"""Bytes of a file, of which no more stays in memory than somebody holds.

Pages of a mapped file count as memory of the process for as long as they are mapped. A file that is
mapped as a whole, and whose codes are packed as they come, would be in memory twice.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from qllm.errors import ModelError

MAPPED = 256 << 10
"""Bytes from which on a tensor is mapped and not copied."""
ALIGNED = 8
"""Where a mapped tensor may begin, for views of any dtype."""
AHEAD, AT_ONCE = 1 << 30, 8 << 20
"""Bytes that the system reads before they are asked for, and at once."""
WAIT_S = 0.01


class RawFile:
    """A file that is read here and there, mostly forwards.

    Args:
        path: Of the file, which is open until the object is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        self.size = os.fstat(self._number).st_size
        self.num_read = 0
        """Bytes that were asked for; a hint, as threads count together."""

    def read(self, start: int, num_bytes: int) -> Tensor:
        """Bytes from `start` on, uint8 [num_bytes]; where they are many, a mapping of them alone.

        Raises:
            ModelError: The file ends before.
        """
        self.num_read += num_bytes
        if num_bytes >= MAPPED and start % ALIGNED == 0:
            return self._mapped(start, num_bytes)
        out = torch.empty(num_bytes, dtype=torch.uint8)
        left = memoryview(out.numpy())  # type: ignore[arg-type]
        while left:
            got = os.preadv(self._number, [left], start + num_bytes - len(left))
            if got == 0:
                raise ModelError(f"{self._path} ends too early; download it again")
            left = left[got:]
        return out

    def advise(self, start: int, num_bytes: int) -> None:
        """Tell the system that some bytes are read soon."""
        os.posix_fadvise(self._number, start, num_bytes, os.POSIX_FADV_WILLNEED)

    def _mapped(self, start: int, num_bytes: int) -> Tensor:
        inside = start % mmap.ALLOCATIONGRANULARITY
        if self.size < start + num_bytes:
            raise ModelError(f"{self._path} ends too early; download it again")
        flags, pages = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        found = mmap.mmap(self._number, inside + num_bytes, flags, pages, offset=start - inside)
        return torch.frombuffer(found, dtype=torch.uint8, count=num_bytes, offset=inside)


@contextmanager
def reading_ahead(files: Sequence[RawFile]) -> Iterator[None]:
    """Let the system read some files one after the other, no more than AHEAD before us."""
    over = threading.Event()

    def run() -> None:
        asked = 0
        for file in files:
            for start in range(0, file.size, AT_ONCE):
                while asked - sum(one.num_read for one in files) > AHEAD:
                    if over.wait(WAIT_S):
                        return
                file.advise(start, AT_ONCE)
                asked += AT_ONCE

    thread = threading.Thread(target=run, name="qllm-read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
