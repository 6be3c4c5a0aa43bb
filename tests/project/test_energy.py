"""The energy counter of benches: packages are added, parts are not, and a restart is seen."""

from pathlib import Path
from typing import Literal

import pytest

from bench import energy
from bench.energy import NO_COUNTER, Meter, computed_tokens, per_ktok
from qllm.plan import Row
from qllm.record.trace import Event, Planned, Ran
from qllm.scheduler.program import START
from qllm.types import Grain


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "nvml_joules", lambda: None)


def zone(root: Path, name: str, now: int, most: int = 10_000_000) -> None:
    (root / name).mkdir(exist_ok=True)
    (root / name / "energy_uj").write_text(f"{now}\n")
    (root / name / "max_energy_range_uj").write_text(f"{most}\n")


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"):
        zone(tmp_path, name, 1_000_000)
    meter = Meter(tmp_path)
    zone(tmp_path, "intel-rapl:0", 3_000_000)
    zone(tmp_path, "intel-rapl:0:0", 2_500_000)
    zone(tmp_path, "intel-rapl:1", 1_500_000)
    assert meter.joules() == 2.5


def test_a_counter_that_started_again_is_seen(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 9_000_000)
    meter = Meter(tmp_path)
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    assert meter.joules() == 2.0


def test_a_machine_without_a_counter_says_so(tmp_path: Path) -> None:
    assert Meter(tmp_path).joules() is None
    zone(tmp_path, "intel-rapl:0", 0)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert Meter(tmp_path).joules() is None
    assert per_ktok([{"joules": None, "computed_tokens": 100.0}]) == NO_COUNTER


def test_a_gpu_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", 0)
    monkeypatch.setattr(energy, "nvml_joules", lambda: 100.0)
    meter = Meter(tmp_path)
    monkeypatch.setattr(energy, "nvml_joules", lambda: 107.0)
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    assert meter.joules() == 8.0


def test_joules_are_per_thousand_tokens_over_all_runs() -> None:
    runs = [
        {"joules": 10.0, "computed_tokens": 1000.0},
        {"joules": 30.0, "computed_tokens": 3000.0},
        {"joules": None, "computed_tokens": 9000.0},
        {"joules": 5.0, "computed_tokens": 0.0},
    ]
    assert per_ktok(runs) == "10 J per 1,000 computed tokens"


def pass_of(
    frame_id: int, tokens: int, layers: int, why: Literal["done", "stopped"]
) -> list[Event]:
    row = Row(1, 0, tokens, 0, layers)
    planned = Planned(
        at_ns=0, frame_id=frame_id, rows=(row,), grain=Grain.EXPERT, stop_below=0
    )  # fmt: skip
    ran = Ran(
        start_ns=0, at_ns=1, frame_id=frame_id, start=START, end=START, segments=1,
        why=why,
    )  # fmt: skip
    return [planned, ran]


def test_tokens_of_passes_that_ended_are_counted_by_layers() -> None:
    whole, half = pass_of(1, 100, 4, "done"), pass_of(2, 100, 2, "done")
    stopped = pass_of(3, 100, 4, "stopped")
    assert computed_tokens([*whole, *half, *stopped]) == 150
    assert computed_tokens([*stopped, stopped[1], pass_of(3, 0, 4, "done")[1]]) == 100
