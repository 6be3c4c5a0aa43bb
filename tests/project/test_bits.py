"""`bench.gpu.bits` without a GPU: its answers by the published rule, and what it refuses."""

import sys
from typing import Any

import pytest
import torch

from bench.gpu import bits
from bench.gpu import check as gpu_check
from tests.support import fused_sums

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")


def answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> dict[str, Any]:
    """Run sections, and return what each reports."""
    monkeypatch.setattr(sys, "argv", ["bits", "--dry-run", *given])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    num_threads = torch.get_num_threads()
    try:
        assert bits.main() == 0
    finally:
        torch.set_num_threads(num_threads)
    return gpu_check.sections(capsys.readouterr().out)


def test_answers_by_the_published_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("table", "dots", "model", "skinny", "choose")
    said = answered(monkeypatch, capsys, "--only", *wanted)
    assert list(said) == list(wanted)
    for name in ("table", "dots", "model", "choose"):
        assert said[name]["found"] == bits.PREDICTED[name]
    assert said["model"]["different"]["mma"]["ascending"] == 0
    assert said["model"]["different"]["wgmma"]["eights"] > 50
    tiles = [tile for each in said["skinny"]["shapes"]["tiny"].values() for tile in each.values()]
    assert [tile["different"] for tile in tiles] == [0, 0]


def test_sections_that_need_a_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answered(monkeypatch, capsys, "--only", *bits.ON_GPU)
    assert [section["skipped"] for section in said.values()] == ["it needs a GPU"] * 5
    assert set(bits.ON_GPU) | set(bits.ON_ANY) == set(bits.ORDER)


def test_a_card_with_another_rule_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in with the arithmetic of sm_80: its bits are those of the table's other column."""
    from tests.support.hopper import matrix_unit

    monkeypatch.setattr(bits, "arithmetic", lambda dry, width=2: matrix_unit(80, width))
    said = answered(monkeypatch, capsys, "--only", "table", "model", "dots")
    assert said["table"]["found"] == {"mma": False, "wgmma": False}
    assert said["model"]["found"]["ascending"] is False
    assert said["dots"]["found"] == {"all_equal": True}
    columns = fused_sums.read().bits
    others = {int(i): text for i, text in said["table"]["others"]["mma"].items() if i != "by"}
    differ = (columns["80"] != columns["90"]).nonzero()[0].tolist()
    assert others == {i: f"{columns['80'][i]:08x}" for i in differ}


def test_without_a_gpu_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bits"])
    assert bits.main() == 1
    assert "no CUDA device; use --dry-run" in capsys.readouterr().out


def test_it_is_a_part_that_runs_if_it_is_named() -> None:
    assert "bits" in gpu_check.PARTS
    assert "bits" not in gpu_check.IN_ALL
    command = gpu_check.command_of("bits", True)
    assert command[1:] == ["-m", "bench.gpu.bits", "--dry-run"]
