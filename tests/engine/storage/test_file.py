"""The file of KV pages: whatever is torn, flipped, full or another's, it never gives other bits."""

import errno
import multiprocessing
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import block_file
from qllm.engine.storage.file import (
    BLOCK,
    ENTRY,
    FILE,
    Blocks,
    KvFile,
    Layout,
    Lock,
    directory_bytes,
    num_slots_in,
    open_file,
    why_foreign,
)
from qllm.errors import ConfigError

LAYOUT = Layout((2, 1, 4, 8), (2, 1, 4, 4), torch.bfloat16)
SLOTS = 3
IDENTITY = {"model and settings": "a", "weights": "b"}
Page = tuple[torch.Tensor, ...]


def page_of(seed: int) -> Page:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=random).bfloat16() for s in (LAYOUT.k, LAYOUT.v))


def name_of(seed: int) -> bytes:
    return bytes([seed + 1] * 16)


def opened(folder: Path, reset: bool = False, blocks: type[Blocks] = Blocks, **more: Any) -> KvFile:
    return open_file(folder, LAYOUT, SLOTS, IDENTITY | more, reset, blocks)


def found(file: KvFile) -> dict[bytes, Page]:
    """All that a new engine would find, as it would read it."""
    pages = {}
    for entry in file.scan():
        page = file.read(entry.slot, entry.name, entry.checksum)
        if page is not None:
            pages[entry.name] = tuple(part.clone() for part in page)
    return pages


def check_right(pages: dict[bytes, Page]) -> None:
    for name, page in pages.items():
        assert all(map(torch.equal, page, page_of(name[0] - 1)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_what_was_written_is_found_again_and_is_for_its_owner_alone(folder: Path) -> None:
    file = opened(folder)
    for i in range(SLOTS):
        file.write(i, name_of(i), page_of(i), b"t" * 32, bool(i % 2), float(i))
    file.close()
    assert stat.S_IMODE(os.stat(folder / FILE).st_mode) == 0o600
    (folder / FILE).chmod(0o644)  # as a copy may have it
    again = opened(folder)
    assert stat.S_IMODE(os.stat(folder / FILE).st_mode) == 0o600
    entries = again.scan()
    assert [(e.slot, e.name, e.tag, e.is_ls, e.until_s) for e in entries] == [
        (i, name_of(i), b"t" * 32, bool(i % 2), float(i)) for i in range(SLOTS)
    ]
    pages = found(again)
    check_right(pages)
    assert len(pages) == SLOTS


def test_a_page_of_another_name_is_none(folder: Path) -> None:
    file = opened(folder)
    checksum = file.write(0, name_of(0), page_of(0), b"", False)
    assert file.read(0, name_of(0), checksum) is not None
    assert file.read(0, name_of(1), checksum) is None
    assert file.read(1, name_of(0), checksum) is None


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_an_entry_in_another_place_is_none(folder: Path) -> None:
    file = opened(folder)
    file.write(0, name_of(0), page_of(0), b"", False)
    file.write(1, name_of(1), page_of(1), b"", False)
    file.close()
    with (folder / FILE).open("r+b") as data:
        data.seek(BLOCK)
        entry = data.read(ENTRY.itemsize)
        data.seek(BLOCK + 2 * ENTRY.itemsize)
        data.write(entry)
        data.seek(BLOCK)
        data.write(bytes(ENTRY.itemsize))
    assert [e.slot for e in opened(folder).scan()] == [1]


class StoppedError(Exception):
    """The process is killed here."""


def dying(after: int) -> tuple[type[Blocks], list[int]]:
    """Blocks of a process that is killed once it has written so many bytes more; 512 at a time."""
    left = [after]

    class Dying(Blocks):
        def write(self, data: memoryview, at: int) -> None:
            count = min(len(data), left[0])
            # nothing that is killed aligns what it leaves
            fd = os.open(path_of(self), os.O_RDWR)
            os.pwrite(fd, data[:count], at)
            os.close(fd)
            left[0] -= count
            if count < len(data):
                raise StoppedError

        def erase(self, at: int, num_bytes: int) -> None:
            self.write(memoryview(bytes(num_bytes)), at)

    return Dying, left


def path_of(blocks: Blocks) -> str:
    return os.readlink(f"/proc/self/fd/{blocks._fd}")


def steps(file: KvFile) -> Iterator[Callable[[], Any]]:
    """A life: pages are written, one is displaced by another, one is deleted."""
    for i in range(SLOTS):
        yield lambda i=i: file.write(i, name_of(i), page_of(i), b"", False)
    yield lambda: file.write(1, name_of(5), page_of(5), b"", True)
    yield lambda: file.erase([0, 2])
    yield lambda: file.write(2, name_of(7), page_of(7), b"", True)


def life(folder: Path, after: int) -> int:
    """Live until killed; return how many bytes were not written."""
    (folder / FILE).unlink(missing_ok=True)
    blocks, left = dying(after)
    file = opened(folder, blocks=blocks)
    file.scan()
    try:
        for step in steps(file):
            step()
    except StoppedError:
        pass
    file.close()
    return left[0]


def test_killed_at_any_byte_of_any_write_there_is_the_page_or_none(folder: Path) -> None:
    total = 10**9 - life(folder, 10**9)
    assert set(found(opened(folder))) == {name_of(5), name_of(7)}
    cuts = sorted({*range(0, total, 512), *range(1, total, 4093), total - 1})
    sizes = set()
    for cut in cuts:
        life(folder, cut)
        pages = found(opened(folder))
        check_right(pages)
        sizes.add(len(pages))
    assert sizes == {0, 1, 2, 3}


def test_every_flipped_bit_of_the_header_is_a_refusal(folder: Path) -> None:
    opened(folder).close()
    path = folder / FILE
    header = path.read_bytes()[:BLOCK]
    for bit in range(8 * BLOCK):
        flip(path, bit)
        assert why_foreign(path, header) is not None
        if bit % 1000 == 0:
            with pytest.raises(ConfigError, match="kv_dir_reset=True"):
                opened(folder)
        flip(path, bit)
    opened(folder).close()


def test_every_flipped_bit_of_an_entry_or_a_page_is_a_miss(folder: Path) -> None:
    file = opened(folder)
    for i in range(SLOTS):
        file.write(i, name_of(i), page_of(i), b"x" * 32, False)
    file.close()
    path, again = folder / FILE, opened(folder)
    slot = BLOCK + directory_bytes(SLOTS)
    places = [(BLOCK, ENTRY.itemsize), (slot, LAYOUT.num_bytes)]
    for start, size in places:
        for bit in range(8 * size):
            flip(path, 8 * start + bit)
            entries = again.scan()
            assert {name_of(1), name_of(2)} <= {e.name for e in entries}
            for entry in entries:
                if entry.slot == 0:
                    assert again.read(0, entry.name, entry.checksum) is None
            flip(path, 8 * start + bit)
    check_right(found(again))
    assert len(found(again)) == SLOTS


def test_bytes_flipped_anywhere_are_a_refusal_or_a_miss(folder: Path) -> None:
    file = opened(folder)
    for i in range(SLOTS):
        file.write(i, name_of(i), page_of(i), b"x" * 32, False)
    file.close()
    path, rng = folder / FILE, random.Random(0)
    whole, outcomes = path.read_bytes(), Counter[int | None]()
    for trial in range(400):
        data, start = bytearray(whole), rng.choice([0, BLOCK, BLOCK + directory_bytes(SLOTS)])
        for at in rng.sample(range(start, len(data)), 4 ** (trial % 6)):
            data[at] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        try:
            pages = found(opened(folder))
        except ConfigError:
            outcomes[None] += 1
        else:
            check_right(pages)
            outcomes[len(pages)] += 1
    assert outcomes.keys() == {None, *range(SLOTS + 1)}


def test_a_truncated_file_is_refused_or_a_miss(folder: Path) -> None:
    file = opened(folder)
    for i in range(SLOTS):
        file.write(i, name_of(i), page_of(i), b"", False)
    file.close()
    path = folder / FILE
    size = path.stat().st_size
    for left in range(size - 1, -1, -509):
        os.truncate(path, left)
        try:
            check_right(found(opened(folder)))
        except ConfigError:
            assert left < BLOCK
    assert left < BLOCK


def test_anothers_file_is_refused_unless_it_may_be_replaced(folder: Path) -> None:
    file = opened(folder)
    file.write(0, name_of(0), page_of(0), b"", False)
    file.close()
    with pytest.raises(ConfigError, match="its weights is b, and here it is c"):
        opened(folder, weights="c")
    with pytest.raises(ConfigError, match="pages"):
        open_file(folder, LAYOUT, SLOTS + 1, IDENTITY, False)
    assert len(found(opened(folder, reset=True))) == 1, "one that fits stays"
    assert found(opened(folder, reset=True, weights="c")) == {}
    with pytest.raises(ConfigError, match="weights"):
        opened(folder)
    (folder / FILE).write_bytes(b"something else of the user's")
    with pytest.raises(ConfigError, match="no file of KV pages"):
        opened(folder)


def test_what_is_erased_is_not_in_the_file(folder: Path) -> None:
    file = opened(folder)
    for i in range(SLOTS):
        file.write(i, name_of(i), page_of(i), b"\xaa" * 32, False)
    file.erase([0, 2])
    file.close()
    data = (folder / FILE).read_bytes()
    for i, is_there in enumerate((False, True, False)):
        assert (name_of(i) in data) == is_there
        assert (page_of(i)[0].view(torch.uint8).numpy().tobytes() in data) == is_there


def test_erasing_needs_nothing_of_the_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_file, "_fallocate", lambda *_: -1)
    test_what_is_erased_is_not_in_the_file(folder)


def test_a_file_system_without_direct_io_serves_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(errno.EINVAL, "no direct I/O here")

    real, calls = os.preadv, []

    def preadv(fd: int, buffers: Any, at: int) -> int:
        calls.append(at)
        return refuses() if len(calls) == 1 else real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    file = opened(folder)
    assert not file.blocks.is_direct
    checksum = file.write(0, name_of(0), page_of(0), b"", False)
    page = file.read(0, name_of(0), checksum)
    assert page is not None
    assert all(map(torch.equal, page, page_of(0)))


def test_a_folder_has_one_engine(folder: Path) -> None:
    lock = Lock(folder)
    assert stat.S_IMODE(os.stat(folder / "lock").st_mode) == 0o600
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        Lock(folder)
    lock.close()
    Lock(folder).close()


def test_a_forked_child_does_not_hold_the_folder(folder: Path) -> None:
    lock = Lock(folder)
    context = multiprocessing.get_context("fork")
    is_there, gate = context.Event(), context.Event()
    child = context.Process(target=lambda: (is_there.set(), gate.wait()))
    child.start()
    is_there.wait()
    try:
        lock.close()
        Lock(folder).close()
    finally:
        gate.set()
        child.join()


def test_room_that_is_not_there_is_said_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        opened(folder)
    assert list(folder.iterdir()) == []


def test_a_file_has_room_for_as_many_pages_as_fit() -> None:
    slot = -(-LAYOUT.num_bytes // BLOCK) * BLOCK
    for size in (0, BLOCK, 3 * BLOCK, 10 * BLOCK + 5, 1 << 20):
        count = num_slots_in(size, LAYOUT)
        need = BLOCK + directory_bytes(count) + count * slot
        assert need <= size or not count
