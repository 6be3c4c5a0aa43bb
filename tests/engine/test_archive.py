"""Checkpoint files: whole, ours and undamaged, or refused."""

from pathlib import Path

import pytest
import torch

from qllm.engine import archive
from qllm.errors import CheckpointError

TENSORS = {
    "k": torch.arange(12, dtype=torch.bfloat16).view(2, 6),
    "masks": torch.tensor([True, False, True]),
    "none": torch.empty(0, 3),
    "one": torch.tensor(7.0),
}


def test_a_bad_checkpoint_is_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    archive.write(good, {"a": 1}, {"x": torch.arange(100)})
    assert archive.read(good)[0] == {"a": 1}
    whole = good.read_bytes()
    for data in (whole[:-7], whole[:40], b"", b"hello", whole.replace(b"qllm-ch", b"abcd-ch")):
        bad.write_bytes(data)
        with pytest.raises(CheckpointError):
            archive.read(bad)
    bad.write_bytes(whole.replace(f'"version":"{archive.VERSION}"'.encode(), b'"version":"9"'))
    with pytest.raises(CheckpointError, match="version 9"):
        archive.read(bad)
    with pytest.raises(CheckpointError):
        archive.read(tmp_path / "missing")


def same(path: Path) -> bool:
    """Return True if the file has the written values, and False if it is refused."""
    try:
        meta, tensors = archive.read(path)
    except CheckpointError:
        return False
    assert meta == {"a": "text"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    return True


def test_no_flipped_bit_of_a_checkpoint_gives_other_values(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    archive.write(path, {"a": "text"}, TENSORS)
    whole = path.read_bytes()
    assert same(path)
    num_refused = 0
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        num_refused += not same(path)
    assert num_refused > 0.9 * 8 * len(whole)


def test_a_damaged_checkpoint_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    archive.write(path, {"a": "text"}, TENSORS)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its sum is not that of what it holds"):
        archive.read(path)
