"""Bytes of a file: copied where they are few, mapped where they are many, the same either way."""

from pathlib import Path

import pytest
import torch

from qllm.errors import ModelError
from qllm.models import raw_file
from qllm.models.raw_file import MAPPED, RawFile, reading_ahead


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = torch.Generator().manual_seed(0)
    data = torch.randint(256, (3 * MAPPED,), generator=made, dtype=torch.uint8)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    return tmp_path / "file"


@pytest.mark.parametrize("num", [1, 1000, MAPPED - 1, MAPPED, 2 * MAPPED])
@pytest.mark.parametrize("start", [0, 7, 8, 4096, 5000])
def test_bytes_are_those_of_the_file(path: Path, start: int, num: int) -> None:
    found = RawFile(path).read(start, num)
    assert bytes(found.numpy()) == path.read_bytes()[start : start + num]


def test_a_mapping_outlives_its_file_and_can_be_viewed(path: Path) -> None:
    found = RawFile(path).read(8, MAPPED)
    whole = path.read_bytes()
    path.unlink()
    wide = torch.frombuffer(bytearray(whole[8 : 8 + MAPPED]), dtype=torch.int64)
    assert torch.equal(found.view(torch.int64), wide)
    found[0] ^= 1  # its own copy of the page


def test_a_file_that_is_too_short_is_refused(path: Path) -> None:
    file = RawFile(path)
    for num in (1000, MAPPED):
        with pytest.raises(ModelError, match="ends too early; download it again"):
            file.read(3 * MAPPED - 8, num)


def test_reading_ahead_stays_a_bound_before_us(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_file, "AHEAD", MAPPED)
    monkeypatch.setattr(raw_file, "AT_ONCE", MAPPED // 4)
    file, asked = RawFile(path), list[int]()

    def advise(start: int, num_bytes: int) -> None:
        assert start - file.num_read <= MAPPED
        asked.append(start)

    monkeypatch.setattr(file, "advise", advise)
    with reading_ahead([file]):
        while len(asked) < 12:
            file.read(asked[-1] if asked else 0, MAPPED // 4)
    assert asked == list(range(0, 3 * MAPPED, MAPPED // 4))
    with pytest.raises(KeyError), reading_ahead([file]):
        raise KeyError
