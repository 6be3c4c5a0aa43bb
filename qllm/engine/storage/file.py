"""KV pages in one file: a header that names their model, a directory, and fixed slots.

    header 4 KiB | directory, 128 bytes per slot | slot 0 | slot 1 | ...

A page is written before its directory entry, and the entry has the checksum of the page. So a
process that dies at any byte leaves each page either complete or absent. The file belongs to one
engine at a time: the holder of the lock file next to it.
"""

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qllm.errors import ConfigError
from qllm.private import private_fd

BLOCK = 4096
"""Size and alignment in bytes of every write."""
MAGIC = b"qllm-kv\x02"
FILE, LOCK = "pages.kv", "lock"
ENTRY = np.dtype(
    [
        ("name", "V16"),
        ("tag", "V32"),
        ("checksum", "<u8"),
        ("is_ls", "<u4"),
        ("used_s", "<f8"),
        ("until_s", "<f8"),
        ("reserved", "V44"),
        ("own_checksum", "<u8"),
    ]
)
"""Times are of the wall clock. `own_checksum` covers the slot's number and all other fields."""
_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01


class Layout(NamedTuple):
    """Shapes and types of a page."""

    k: tuple[int, ...]
    """Shape of the page's keys: layers, heads, tokens, width."""
    v: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a page."""
        return (math.prod(self.k) + math.prod(self.v)) * self.dtype.itemsize


class Entry(NamedTuple):
    """A page in the file."""

    slot: int
    name: bytes
    tag: bytes
    checksum: int
    is_ls: bool
    used_s: float
    until_s: float


class Blocks:
    """A file read and written in whole blocks, without the page cache where the file system can.

    Args:
        path: A file that exists.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self.is_direct = self._go_direct()
        """True if the page cache is bypassed. Some file systems cannot bypass it."""
        _OPEN.add(self)

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

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Lock:
    """The right to use a folder, until it is closed or its process ends.

    Raises:
        ConfigError: Another engine has the right; the text names its process.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = private_fd(folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                f"kv_dir={str(folder)!r} is in use by process {pid}; give each engine a folder "
                "of its own, or end that one"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        _OPEN.add(self)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KvFile:
    """The pages of one engine. One thread may read while another writes.

    Args:
        blocks: The file.
        layout: Layout of a page.
        num_slots: Largest number of pages.
    """

    def __init__(self, blocks: Blocks, layout: Layout, num_slots: int) -> None:
        self.blocks, self.layout, self.num_slots = blocks, layout, num_slots
        self._slot_bytes = _whole(layout.num_bytes)
        self._directory = mmap.mmap(-1, directory_bytes(num_slots))
        self._entries = np.frombuffer(self._directory, ENTRY, num_slots)
        # shared by all pages: page faults of a fresh buffer take longer than the read
        self._in, self._out = (mmap.mmap(-1, self._slot_bytes) for _ in range(2))

    def _at(self, slot: int) -> int:
        return BLOCK + len(self._directory) + slot * self._slot_bytes

    def scan(self) -> list[Entry]:
        """Return all entries of the directory, most recently used last."""
        if not self.blocks.read(memoryview(self._directory), BLOCK):
            return []
        found: dict[bytes, Entry] = {}
        for slot in np.flatnonzero(self._entries["own_checksum"]).tolist():
            entry = self._entry(slot)
            if entry is not None and entry.name not in found:
                found[entry.name] = entry
        return sorted(found.values(), key=lambda entry: entry.used_s)

    def _entry(self, slot: int) -> Entry | None:
        row = self._entries[slot]
        if _entry_checksum(row.tobytes(), slot) != row["own_checksum"]:
            return None
        return Entry(
            slot,
            row["name"].tobytes(),
            row["tag"].tobytes(),
            int(row["checksum"]),
            bool(row["is_ls"]),
            float(row["used_s"]),
            float(row["until_s"]),
        )

    def write(
        self, slot: int, name: bytes, page: Any, tag: bytes, is_ls: bool, until_s: float = 0.0
    ) -> int:
        """Write a page and then its entry; return its checksum.

        Raises:
            OSError: The file cannot be written.
        """
        for part, view in zip(page, self._parts(self._out), strict=True):
            view.copy_(part)
        checksum = self._sum(self._out, name)
        self.blocks.write(memoryview(self._out), self._at(slot))
        row = np.zeros((), ENTRY)
        row["name"], row["tag"] = np.void(name), np.void(tag.ljust(32, b"\0"))
        row["checksum"], row["is_ls"] = checksum, is_ls
        row["used_s"], row["until_s"] = time.time(), until_s
        row["own_checksum"] = _entry_checksum(row.tobytes(), slot)
        self._entries[slot] = row
        self._write_entry(slot)
        return checksum

    def _write_entry(self, slot: int) -> None:
        at = slot * ENTRY.itemsize // BLOCK * BLOCK
        self.blocks.write(memoryview(self._directory)[at : at + BLOCK], BLOCK + at)

    def read(self, slot: int, name: bytes, checksum: int) -> tuple[Any, ...] | None:
        """Read a page, valid until the next read. Return None if the page is missing or damaged.

        Raises:
            OSError: The file cannot be read.
        """
        if not self.blocks.read(memoryview(self._in), self._at(slot)):
            return None
        return self._parts(self._in) if self._sum(self._in, name) == checksum else None

    def erase(self, slots: Sequence[int]) -> None:
        """Erase pages: both their entries and their KV.

        Raises:
            OSError: The file cannot be written.
        """
        for slot in slots:
            self._entries[slot] = np.zeros((), ENTRY)
        for slot in sorted({slot * ENTRY.itemsize // BLOCK * BLOCK for slot in slots}):
            self._write_entry(slot // ENTRY.itemsize)
        for slot in slots:
            self.blocks.erase(self._at(slot), self._slot_bytes)

    def _sum(self, memory: mmap.mmap, name: bytes) -> int:
        return checksum_of(name, memoryview(memory)[: self.layout.num_bytes])

    def _parts(self, memory: mmap.mmap) -> tuple[torch.Tensor, ...]:
        """Return views of the keys and values in a slot's memory."""
        parts, at = [], 0
        for shape in (self.layout.k, self.layout.v):
            count = math.prod(shape)
            flat = torch.frombuffer(memory, dtype=self.layout.dtype, count=count, offset=at)
            parts.append(flat.view(shape))
            at += flat.nbytes
        return tuple(parts)

    def close(self) -> None:
        """Close the file."""
        self.blocks.close()


def directory_bytes(num_slots: int) -> int:
    """Return the bytes of the directory of this many slots."""
    return _whole(num_slots * ENTRY.itemsize)


def num_slots_in(num_bytes: int, layout: Layout) -> int:
    """Return how many pages fit in a file of this many bytes."""
    room = num_bytes - 2 * BLOCK
    return max(0, room // (_whole(layout.num_bytes) + ENTRY.itemsize))


def open_file(
    folder: Path,
    layout: Layout,
    num_slots: int,
    identity: dict[str, Any],
    reset: bool,
    blocks: type[Blocks] = Blocks,
) -> KvFile:
    """Open the file of a folder, or create it. The caller holds the `Lock`.

    Args:
        folder: A folder that exists.
        layout: Layout of a page.
        num_slots: Largest number of pages.
        identity: Everything that decides the bits of a page, by name.
        reset: True replaces a file that cannot be used.
        blocks: Class that reads and writes the file.

    Raises:
        ConfigError: The file is damaged, of another model or of another size, and `reset` is False.
        OSError: The file cannot be created or read.
    """
    path = folder / FILE
    header = make_header(layout, num_slots, identity)
    wrong = why_foreign(path, header) if path.exists() else None
    if wrong is not None and not reset:
        raise ConfigError(
            f"the KV in kv_dir={str(folder)!r} cannot be used: {wrong}; give another folder, or "
            "kv_dir_reset=True to replace it"
        )
    if wrong is not None or not path.exists():
        size = BLOCK + directory_bytes(num_slots) + num_slots * _whole(layout.num_bytes)
        _make(path, header, size)
    path.chmod(0o600)  # the file may be a copy with other permissions
    return KvFile(blocks(path), layout, num_slots)


def make_header(layout: Layout, num_slots: int, identity: dict[str, Any]) -> bytes:
    """Return the first block of a file."""
    says = {
        **{name: str(value) for name, value in identity.items()},
        "keys": str(layout.k),
        "values": str(layout.v),
        "dtype": str(layout.dtype),
        "pages": str(num_slots),
    }
    text = json.dumps(says, sort_keys=True).encode()
    body = MAGIC + len(text).to_bytes(4, "little") + text
    if len(body) > BLOCK - 16:
        raise ConfigError(f"the header of a KV file has {len(body)} bytes and {BLOCK - 16} fit")
    body = body.ljust(BLOCK - 16, b"\0")
    return body + blake2b(body, digest_size=16).digest()


def why_foreign(path: Path, header: bytes) -> str | None:
    """Return the reason why a file does not have this header; None if it has."""
    with open(path, "rb") as file:
        found = file.read(BLOCK)
    if found == header:
        return None
    if len(found) < BLOCK or found[: len(MAGIC)] != MAGIC:
        return "it is no file of KV pages, or one of another release"
    if blake2b(found[:-16], digest_size=16).digest() != found[-16:]:
        return "its header is damaged"
    says, ours = _said(found), _said(header)
    wrong = next((name for name in ours if says.get(name) != ours[name]), "version")
    if wrong == "pages":
        return f"it has {says.get(wrong)!s:.60} pages, and kv_dir_gib makes {ours[wrong]}"
    return f"its {wrong} is {says.get(wrong)!s:.60}, and here it is {ours.get(wrong)!s:.60}"


def _said(header: bytes) -> dict[str, str]:
    at = len(MAGIC) + 4
    length = int.from_bytes(header[at - 4 : at], "little")
    return dict(json.loads(header[at : at + length]))


def _make(path: Path, header: bytes, size: int) -> None:
    """Create a file with room for all pages. The file gets its name when it is complete."""
    new = path.with_suffix(".new")
    with suppress(FileNotFoundError):
        path.unlink()  # the new file may need the space
    with suppress(FileNotFoundError):
        new.unlink()
    fd = private_fd(new, os.O_RDWR | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, header, 0)
        os.fsync(fd)
    except BaseException:
        new.unlink()
        raise
    finally:
        os.close(fd)
    new.rename(path)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _entry_checksum(row: bytes, slot: int) -> int:
    return checksum_of(slot.to_bytes(8, "little"), row[:-8])


def checksum_of(*parts: bytes | memoryview) -> int:
    """Return a 64-bit checksum (XXH3). It is never 0, because 0 marks an empty entry."""
    from xxhash import xxh3_64  # imported here: an engine without a file does not need it

    state = xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() or 1


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_OPEN: "weakref.WeakSet[Blocks | Lock]" = weakref.WeakSet()


def _close_all() -> None:
    """Close the parent's lock and file in a forked child."""
    for held in list(_OPEN):
        held.close()


os.register_at_fork(after_in_child=_close_all)
