"""`qllm plan` and `qllm calibrate`: traces, data sheets, why a policy wins, a busy machine."""

from pathlib import Path

import pytest

from qllm.config import EngineConfig, parse_slo
from qllm.errors import ConfigError
from qllm.measure.variants import parse_variants
from qllm.sim.calibrate import refuse_busy
from qllm.sim.capacity import Answer, Question, Tried, harvest, why
from qllm.sim.outcome import Outcome
from qllm.sim.presets import preset
from qllm.types import Priority
from qllm.workloads.files import read_requests, write_requests
from qllm.workloads.spec import RequestSpec
from tests.support.simulation import qllm

TRACE = [
    ("LS", 0.0, 200, 20), ("BE", 0.1, 3000, 100), ("LS", 1.0, 300, 30), ("BE", 1.5, 2000, 200),
    ("LS", 2.0, 100, 20), ("LS", 3.0, 250, 10),
]  # fmt: skip


def write_trace(path: Path) -> Path:
    write_requests(
        path,
        [
            RequestSpec(at_s=at, priority=Priority[c], num_prompt_tokens=n, max_tokens=m)
            for c, at, n, m in TRACE
        ],
    )
    return path


def test_plan_takes_a_trace_several_machines_and_a_data_sheet(tmp_path: Path) -> None:
    path, sheet = write_trace(tmp_path / "mine.jsonl"), tmp_path / "b200.toml"
    sheet.write_text(
        'title = "NVIDIA B200"\nmemory_gb = 180\nbandwidth_gb_per_s = 8000\ntflops = 2250\n'
    )
    found = qllm(
        "plan", "--slo", "ttft=500ms,tpot=50ms", "--requests", str(path), "--policy",
        "qllm2,fcfs", "--model", "qwen3-moe", "--preset", f"h100,{sheet}", "--out", str(tmp_path),
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "a trace of 4 LS and 2 BE requests, LS 1.33/s" in found.stdout
    assert "NVIDIA H100" in found.stdout
    assert "NVIDIA B200" in found.stdout
    assert found.stdout.count("carries most") == 2
    assert (tmp_path / "plan-1.png").exists()
    assert (tmp_path / "plan-2.png").exists()


def test_a_trace_is_scaled_to_the_rate_that_is_asked(tmp_path: Path) -> None:
    specs = tuple(read_requests(write_trace(tmp_path / "mine.jsonl")))
    question = Question(slo=parse_slo("ttft=500ms"), requests=specs, ls_rate=4.0)
    assert question.window_s == pytest.approx(1.0)
    assert [r.at_s for r in question.trace_ls] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert len(question.trace_be) == 2
    for only in (question.trace_ls, question.trace_be):
        with pytest.raises(ConfigError, match="the trace has no"):
            Question(slo=parse_slo("ttft=500ms"), requests=tuple(only))
    with pytest.raises(ConfigError, match="give ls_rate"):
        Question(slo=parse_slo("ttft=500ms"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory_gb = 80", "bandwidth_gb_per_s is missing"),
        ("memory_gb = -1", "memory_gb=-1 must be a number > 0"),
        ("memory = 80", "unknown name 'memory'"),
        ('like = "moon"', "like must be one of"),
        ("=", "cannot be read"),
    ],
)
def test_a_wrong_data_sheet_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        preset(str(tmp_path / "own.toml"), "300m")


def test_a_data_sheet_with_the_numbers_of_a_preset_costs_the_same(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("memory_gb = 80\nbandwidth_gb_per_s = 3350\ntflops = 989\n")
    own, known = preset(str(path), "qwen3-moe"), preset("h100", "qwen3-moe")
    assert own.costs == pytest.approx(known.costs)
    assert own.max_kv_tokens == known.max_kv_tokens


def outcome_of(be_per_s: float, met: float, ttft: float, shared: float = 0.5) -> Outcome:
    return Outcome(
        ls_arrived=100, ls_ttft_p50=1.0, ls_ttft_p99=ttft, ls_tpot_p50=1.0, ls_tpot_p99=2.0,
        attainment=met, be_prompt_per_s=be_per_s, be_output_per_s=0.0, preemptions=0,
        be_stall_ms=7.0, shared=shared,
    )  # fmt: skip


def test_a_plan_says_why_one_policy_wins() -> None:
    slo = parse_slo("ttft=500ms,tpot=50ms")

    def answer(label: str, *loads: tuple[float, float, float]) -> Answer:
        tried = tuple(Tried(be_rate=load[0], outcome=outcome_of(*load)) for load in loads)
        return Answer(label=label, tried=tried)

    good = answer("good", (1000.0, 1.0, 90.0))
    bad = answer("bad", (250.0, 1.0, 400.0), (900.0, 0.5, 2300.0))
    assert why([bad, good], slo) == (
        "good carries most, 1,000 BE tokens/s, 4 times those of bad: with more BE under that the "
        "LS TTFT p99 is 2,300 ms (target 500), and 50.0% of the LS requests meet both targets."
    )
    assert "as much" in why([good, answer("twin", (999.0, 1.0, 90.0))], slo)
    none = answer("none", (0.0, 0.2, 800.0))
    assert why([none], slo).startswith("No policy keeps the targets")
    assert why([good], slo) == "good carries most, 1,000 BE tokens/s."
    slow = answer("slow", (500.0, 1.0, 90.0))
    assert why([good, slow], slo) == (
        "good carries most, 1,000 BE tokens/s, 2 times those of slow, which keeps the targets too. "
        "LS pays nothing for it. Under slow BE stands still for up to 7 ms while LS is served."
    )


def test_a_plan_says_what_ls_pays_for_more_be_inside_its_targets() -> None:
    slo = parse_slo("ttft=500ms,tpot=50ms")
    gentle = Tried(be_rate=None, outcome=outcome_of(1000.0, 1.0, 100.0, shared=0.6))
    greedy = Tried(be_rate=None, outcome=outcome_of(1200.0, 1.0, 300.0, shared=0.98))
    answers = [Answer(label="gentle", tried=(gentle,)), Answer(label="greedy", tried=(greedy,))]
    assert why(answers, slo) == (
        "greedy carries most, 1,200 BE tokens/s, 1.2 times those of gentle, which keeps the "
        "targets too. LS pays for it: its TTFT p99 is 300 ms instead of 100. Under greedy LS and "
        "BE share a pass in 98% of the time, and the experts are read once for both; under gentle "
        "in 60%: there prompts run in passes of their own, so that LS stops them (0 times)."
    )


def test_the_default_harvests_less_than_ls_first_because_it_shares_less_and_ls_waits_less() -> None:
    """The planner's first question, asked: both keep the targets, and LS pays the difference."""
    costs = preset("h200", "qwen3-moe")
    config = EngineConfig(max_kv_tokens=costs.max_kv_tokens)
    slo = parse_slo("ttft=500ms,tpot=50ms")
    question = Question(slo=slo, ls_rate=2.0, seconds=25.0)
    default, other = harvest(question, costs, parse_variants("qllm2,ls-first"), config)
    mine, theirs = default.tried[-1].outcome, other.tried[-1].outcome
    assert theirs.be_per_s > 1.05 * mine.be_per_s
    assert theirs.shared > 0.9 > mine.shared
    assert theirs.ls_ttft_p50 > 1.2 * mine.ls_ttft_p50
    assert "LS pays for it: its TTFT p50" in why([default, other], slo)


def test_costs_are_not_measured_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([(100.0, 10.0), (101.0, 10.5), (200.0, 10.0), (200.05, 10.0)])
    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("qllm.sim.calibrate.cpu_seconds", lambda: next(used))
    monkeypatch.setattr("qllm.sim.calibrate.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("qllm.sim.calibrate.time.sleep", lambda _: None)
    with pytest.raises(ConfigError, match=r"use 0.5 of this machine's cores.*--busy"):
        refuse_busy()
    refuse_busy()
