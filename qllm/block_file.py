"""Private files that are read and written in whole blocks, under a header that names their content.

A file gets its name when it is complete. So a process that dies while it makes a file leaves no
file of that name.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

from qllm.errors import ConfigError
from qllm.private import private_fd

BLOCK = 4096
"""Size and alignment in bytes of every read and write."""
MAGIC_BYTES = 8
NO_TEXTS: Mapping[str, str] = MappingProxyType({})
_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01


class _Open:
    """An open file, which a forked child closes.

    Args:
        fd: Number of the file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _OPEN.add(self)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Blocks(_Open):
    """A file read and written in whole blocks, without the page cache where the file system can.

    Args:
        path: A file that exists.
        flags: Flags of `os.open`.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR) -> None:
        super().__init__(os.open(path, flags | os.O_CLOEXEC))
        self.is_direct = self._go_direct()
        """True if the page cache is bypassed. Some file systems cannot bypass it."""

    def _go_direct(self) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [mmap.mmap(-1, BLOCK)], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def write(self, data: memoryview, at: int) -> None:
        """Write blocks."""
        while data:
            count = os.pwritev(self._fd, [data], at)
            data, at = data[count:], at + count

    def read(self, data: memoryview, at: int) -> bool:
        """Read blocks; return True if the file has all of them."""
        while data:
            count = os.preadv(self._fd, [data], at)
            if not count:
                return False
            data, at = data[count:], at + count
        return True

    def erase(self, at: int, num_bytes: int) -> None:
        """Overwrite blocks with zeros."""
        how = _ZERO_RANGE | _KEEP_SIZE
        if _fallocate(self._fd, how, ctypes.c_int64(at), ctypes.c_int64(num_bytes)):
            zeros = memoryview(mmap.mmap(-1, num_bytes))
            self.write(zeros, at)


class FileLock(_Open):
    """A lock that one process at a time has, until it is closed or its process ends.

    Args:
        path: A file whose only use is the lock.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(private_fd(path, os.O_RDWR))

    def take(self, wait: bool = False) -> str | None:
        """Take the lock. Return None, or the id of the process that has it, as text.

        Args:
            wait: True waits until the lock is free.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        return None


def make_header(magic: bytes, says: Mapping[str, str]) -> bytes:
    """Return the first block of a file.

    Args:
        magic: Kind and version of the file, MAGIC_BYTES bytes.
        says: Everything that decides the file's content, by name.

    Raises:
        ConfigError: The text does not fit in a block.
    """
    text = json.dumps(dict(says), sort_keys=True).encode()
    body = magic + len(text).to_bytes(4, "little") + text
    if len(body) > BLOCK - 16:
        raise ConfigError(f"what the header says takes {len(body)} bytes, and {BLOCK - 16} fit")
    body = body.ljust(BLOCK - 16, b"\0")
    return body + blake2b(body, digest_size=16).digest()


def why_foreign(
    found: bytes, header: bytes, kind: str, texts: Mapping[str, str] = NO_TEXTS
) -> str | None:
    """Return the reason why a file's first block is not this header; None if it is.

    Args:
        found: First block of the file, or less if the file has less.
        header: Result of `make_header`.
        kind: Name of such files: "file of KV pages".
        texts: Templates of reasons by the name of a value, for the file's value and ours.
    """
    if found == header:
        return None
    if len(found) < BLOCK or found[:MAGIC_BYTES] != header[:MAGIC_BYTES]:
        return f"it is no {kind}, or one of another release"
    says, ours = said_in(found), said_in(header)
    if says is None or ours is None:
        return "its header is damaged"
    wrong = next((name for name in ours if says.get(name) != ours[name]), "version")
    text = texts.get(wrong, f"its {wrong} is {{}}, and here it is {{}}")
    return text.format(f"{says.get(wrong)!s:.60}", f"{ours.get(wrong)!s:.60}")


def said_in(header: bytes) -> dict[str, str] | None:
    """Return what a block of `make_header` says; None if it is damaged."""
    if blake2b(header[:-16], digest_size=16).digest() != header[-16:]:
        return None
    at = MAGIC_BYTES + 4
    length = int.from_bytes(header[at - 4 : at], "little")
    return dict(json.loads(header[at : at + length]))


@contextmanager
def created(path: Path, new: Path, num_bytes: int) -> Iterator[int]:
    """Create a file of this size, which gets its name when the `with` block ends without an error.

    Room for all bytes is reserved first. The `with` block gets the number of the open file.

    Args:
        path: Name of the complete file.
        new: Name of the file during the `with` block. An older file of this name is removed.
        num_bytes: Size of the file.

    Raises:
        OSError: There is no room, or the folder cannot be written. Nothing is left then.
    """
    with suppress(FileNotFoundError):
        new.unlink()
    fd = private_fd(new, os.O_RDWR | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        yield fd
        os.fsync(fd)
        new.rename(path)
    except BaseException:
        new.unlink()
        raise
    finally:
        os.close(fd)


def whole_blocks(num_bytes: int) -> int:
    """Return the bytes of the blocks that so many bytes need."""
    return -(-num_bytes // BLOCK) * BLOCK


def checksum_of(*parts: bytes | memoryview) -> int:
    """Return a 64-bit checksum (XXH3). It is never 0, because 0 marks an empty entry."""
    from xxhash import xxh3_64  # imported here: an engine without a file does not need it

    state = xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() or 1


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_OPEN: weakref.WeakSet[_Open] = weakref.WeakSet()


def _close_all() -> None:
    """Close the parent's locks and files in a forked child."""
    for held in list(_OPEN):
        held.close()


os.register_at_fork(after_in_child=_close_all)
