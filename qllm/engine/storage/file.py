"""KV pages in one file: a header that names their model, a directory, and fixed slots.

    header 4 KiB | directory, 128 bytes per slot | slot 0 | slot 1 | ...

A page is written before its directory entry, and the entry has the checksum of the page. So a
process that dies at any byte leaves each page either complete or absent. The file belongs to one
engine at a time: the holder of the lock file next to it.
"""

import math
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qllm import block_file
from qllm.block_file import BLOCK, Blocks, FileLock, checksum_of, created, whole_blocks
from qllm.errors import ConfigError

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


class Lock(FileLock):
    """The right to use a folder, until it is closed or its process ends.

    Raises:
        ConfigError: Another engine has the right; the text names its process.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK)
        try:
            if (pid := self.take()) is not None:
                raise ConfigError(
                    f"kv_dir={str(folder)!r} is in use by process {pid}; give each engine a folder "
                    "of its own, or end that one"
                )
        except BaseException:
            self.close()
            raise


class KvFile:
    """The pages of one engine. One thread may read while another writes.

    Args:
        blocks: The file.
        layout: Layout of a page.
        num_slots: Largest number of pages.
    """

    def __init__(self, blocks: Blocks, layout: Layout, num_slots: int) -> None:
        self.blocks, self.layout, self.num_slots = blocks, layout, num_slots
        self._slot_bytes = whole_blocks(layout.num_bytes)
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
    return whole_blocks(num_slots * ENTRY.itemsize)


def num_slots_in(num_bytes: int, layout: Layout) -> int:
    """Return how many pages fit in a file of this many bytes."""
    room = num_bytes - 2 * BLOCK
    return max(0, room // (whole_blocks(layout.num_bytes) + ENTRY.itemsize))


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
        size = BLOCK + directory_bytes(num_slots) + num_slots * whole_blocks(layout.num_bytes)
        with suppress(FileNotFoundError):
            path.unlink()  # the new file may need the space
        new = path.with_suffix(".new")
        with created(path, new, size) as fd:
            os.pwrite(fd, header, 0)
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
    return block_file.make_header(MAGIC, says)


def why_foreign(path: Path, header: bytes) -> str | None:
    """Return the reason why a file does not have this header; None if it has."""
    with open(path, "rb") as file:
        found = file.read(BLOCK)
    texts = {"pages": "it has {} pages, and kv_dir_gib makes {}"}
    return block_file.why_foreign(found, header, "file of KV pages", texts)


def _entry_checksum(row: bytes, slot: int) -> int:
    return checksum_of(slot.to_bytes(8, "little"), row[:-8])
