"""Bytes of a file: through the system's cache or around it, the same either way."""

import os
from pathlib import Path

import pytest
import torch

from qllm.errors import ModelError
from qllm.models.weights import raw_file
from qllm.models.weights.raw_file import LARGE, PAGE, Buffers, RawFile

SIZE = 3 * LARGE + 100
"""No multiple of a page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = torch.Generator().manual_seed(0)
    data = torch.randint(256, (SIZE,), generator=made, dtype=torch.uint8)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    return tmp_path / "file"


@pytest.fixture(params=["in the cache", "around it", "around it in pieces", "around it in vain"])
def file(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RawFile:
    """The file where the system has it in its cache, and where it has not."""
    how, preadv = request.param, os.preadv

    def around(number: int, into: list[memoryview], at: int, flags: int = 0) -> int:
        if at % PAGE or len(into[0]) % PAGE or "vain" in how:
            raise OSError("other pages are asked for")
        return preadv(number, [into[0][: PAGE if "pieces" in how else None]], at, flags)

    def read(number: int, into: list[memoryview], at: int, flags: int = 0) -> int:
        is_around = number == made._around
        return (around if is_around else preadv)(number, into, at, flags)

    monkeypatch.setattr(RawFile, "_is_cached", lambda _: how == "in the cache")
    monkeypatch.setattr(os, "O_DIRECT", 0)  # of what is tested on, some file systems lack it
    made = RawFile(path, Buffers())
    monkeypatch.setattr(raw_file.os, "preadv", read)
    return made


@pytest.mark.parametrize("num", [1, 1000, LARGE - 1, LARGE, 2 * LARGE])
@pytest.mark.parametrize("start", [0, 7, 8, 4096, 5000, SIZE])
def test_bytes_are_those_of_the_file(file: RawFile, path: Path, start: int, num: int) -> None:
    start = min(start, SIZE - num)
    found = file.read(start, num)
    assert found.data_ptr() % raw_file.ALIGNED == 0, "it may be viewed as any dtype"
    assert bytes(found.numpy()) == path.read_bytes()[start : start + num]


@pytest.mark.parametrize("is_cached", [False, True])
def test_only_what_is_not_in_the_cache_is_read_around_it(
    path: Path, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RawFile, "_is_cached", lambda _: is_cached)
    monkeypatch.setattr(os, "O_DIRECT", 0)
    numbers, preadv = list[int](), os.preadv

    def read(number: int, into: list[memoryview], at: int, flags: int = 0) -> int:
        numbers.append(number)
        return preadv(number, into, at, flags)

    monkeypatch.setattr(raw_file.os, "preadv", read)
    file = RawFile(path, Buffers())
    file.read(8, LARGE)
    file.read(8, 100)
    assert numbers == [file._number if is_cached else file._around, file._number]


def test_the_cache_is_asked_at_some_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = RawFile(path, Buffers()), list[int]()

    def answer(number: int, into: list[bytearray], at: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        asked.append(at)
        if at > missing:
            raise error
        return 1

    monkeypatch.setattr(raw_file.os, "preadv", answer)
    missing, error = SIZE, OSError()
    assert file._is_cached()
    assert len(asked) == raw_file.PROBES
    missing = SIZE // 2
    assert file._is_cached(), "a file system that cannot say is read as ever"
    error = BlockingIOError()
    assert not file._is_cached()


def test_a_file_that_is_not_in_the_cache_is_read_as_one_that_is(path: Path) -> None:
    os.sync()
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = RawFile(path, Buffers()).read(8, 2 * LARGE)
    assert bytes(found.numpy()) == path.read_bytes()[8 : 8 + 2 * LARGE]


def test_what_was_read_outlives_its_file_and_can_be_viewed(file: RawFile, path: Path) -> None:
    found, whole = file.read(8, LARGE), path.read_bytes()
    path.unlink()
    wide = torch.frombuffer(bytearray(whole[8 : 8 + LARGE]), dtype=torch.int64)
    assert torch.equal(found.view(torch.int64), wide)
    found[0] ^= 1  # memory of its own


def test_memory_is_used_again_after_its_last_view_is_gone(file: RawFile, path: Path) -> None:
    whole = path.read_bytes()
    first = file.read(8, LARGE)
    place, row = first.data_ptr(), first.view(torch.int64)[1:2]
    del first
    other = file.read(LARGE, LARGE)
    assert other.data_ptr() != place, "a view of it was held"
    assert row.view(torch.uint8).tolist() == list(whole[16:24])
    del row
    again = file.read(16, LARGE)
    assert again.data_ptr() == place + 8
    assert file.read(16, LARGE).data_ptr() != place + 8, "it is held once more"
    assert bytes(again.numpy()) == whole[16 : 16 + LARGE]
    assert bytes(other.numpy()) == whole[LARGE : 2 * LARGE]


def test_no_more_memory_is_kept_than_the_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_file, "SPARE", 2 * LARGE)
    buffers = Buffers()
    held = [buffers.take(LARGE, 0, LARGE) for _ in range(5)]
    del held
    assert sum(len(one) for kept in buffers._spare.values() for one in kept) == 2 * LARGE


def test_what_is_needed_early_is_asked_for_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, int]]()

    def advise(_: int, start: int, num_bytes: int, how: int) -> None:
        assert how == os.POSIX_FADV_WILLNEED
        asked.append((start, num_bytes))

    monkeypatch.setattr(raw_file.os, "posix_fadvise", advise)
    monkeypatch.setattr(raw_file, "AT_ONCE", 1000)
    file = RawFile(path, Buffers(), [(10, 1510), (LARGE, LARGE + 8)])
    assert not asked
    for _ in range(2):
        file.read(0, 4)
    assert asked == [(10, 1000), (1010, 500), (LARGE, 8)]


def test_a_file_that_is_too_short_is_refused(file: RawFile, path: Path) -> None:
    for num in (1000, LARGE):
        with pytest.raises(ModelError, match="ends too early; download it again"):
            file.read(SIZE - num + 1, num)
    with pytest.raises(ModelError, match="ends too early; download it again"):
        file.read(0, 1 << 60)  # no memory is asked for
    os.truncate(path, LARGE)  # while it is open
    for num in (1000, LARGE):
        with pytest.raises(ModelError, match="ends too early; download it again"):
            file.read(2 * LARGE, num)
