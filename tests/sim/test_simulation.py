"""The simulator as a product: cost files, presets, runs, calibration, capacity plans."""

import itertools
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.config import EngineConfig, parse_slo
from qllm.errors import ConfigError, ModelError, PolicyError
from qllm.measure.variants import Variant, parse_variants
from qllm.plan import ModelShape, Plan
from qllm.policy import View
from qllm.record.trace import Arrived, Finished, Trace
from qllm.scheduler.program import OpKind
from qllm.sim.calibrate import Sample, SimLoad, calibrate, fit, nonnegative_fit
from qllm.sim.capacity import Question, harvest
from qllm.sim.costs import CostFile
from qllm.sim.outcome import Outcome
from qllm.sim.presets import model_spec, preset, spec_of
from qllm.sim.run import Flood, Simulated, simulate
from qllm.sim.runner import SimCosts
from qllm.sim.timeline import Work
from qllm.types import Cap, FinishReason, Priority, Slo
from qllm.workloads.spec import RequestSpec
from tests.support.simulation import qllm

LS, BE = Priority.LS, Priority.BE
H100 = preset("h100", "qwen3-moe")
CONFIG = EngineConfig(max_kv_tokens=40_000, max_num_seqs=8)


def request(at_s: float, priority: int, prompt: int, output: int, slo: Slo | None = None) -> Any:
    return RequestSpec(
        at_s=at_s,
        priority=priority,
        num_prompt_tokens=prompt,
        max_tokens=output,
        slo=slo or Slo(),
    )


def mixed() -> list[RequestSpec]:
    be = [request(0.0, BE, 900 + 50 * i, 40) for i in range(12)]
    ls = [request(0.05 + 0.083 * i, LS, 80 + 7 * i, 12) for i in range(12)]
    return [*be, *ls]


def run(policy: str = "qllm2", **options: Any) -> Simulated:
    return simulate(mixed(), policy, H100, config=CONFIG, **options)


# -- runs


@pytest.mark.parametrize("policy", ["qllm2", "qllm", "chunked-priority", "mlfq"])
def test_the_same_arguments_give_the_same_events(policy: str) -> None:
    first, second = run(policy), run(policy)
    assert first.trace.events == second.trace.events
    assert len(first.trace) > 500
    assert run("fcfs").trace.events != first.trace.events


def test_every_request_is_served_when_there_is_no_window() -> None:
    done = [e for e in run().trace if isinstance(e, Finished)]
    assert [e.reason for e in done] == [FinishReason.LENGTH] * 24


@pytest.mark.parametrize("policy", ["fcfs", "qllm2"])
def test_who_arrives_while_the_last_request_runs_is_served(policy: str) -> None:
    pair = [request(0.0, BE, 900, 1), request(0.001, BE, 40, 1)]
    found = simulate(pair, policy, H100, config=CONFIG)
    first, second = [e for e in found.trace if isinstance(e, Finished)]
    assert first.reason is second.reason is FinishReason.LENGTH
    assert first.at_ns < second.at_ns


def test_what_is_unfinished_at_the_end_of_the_window_is_cancelled() -> None:
    cut = run(seconds=0.4)
    reasons = [e.reason for e in cut.trace if isinstance(e, Finished)]
    assert FinishReason.CANCELLED in reasons
    assert all(e.at_ns <= cut.end_ns == 400_000_000 for e in cut.events)


def test_a_lone_request_takes_what_the_cost_file_says() -> None:
    for prompt in (1, 37, 1500):
        only = simulate([request(0.0, LS, prompt, 1)], "fcfs", H100, config=CONFIG)
        (found,) = only.summary().requests
        assert found.ttft_ms == pytest.approx(H100.step_ns(0, prompt, 0) / 1e6, rel=1e-3)


def test_decode_steps_take_what_the_cost_file_says() -> None:
    only = simulate(
        [request(0.0, BE, 200, 50) for _ in range(8)], "fcfs", H100, config=CONFIG
    ).summary()
    for found in only.requests:
        assert found.tpot_ms == pytest.approx(H100.step_ns(8, 0, 225) / 1e6, rel=0.01)


def test_a_request_that_the_engine_could_not_hold_is_refused() -> None:
    long = request(0.0, BE, 39_990, 20)
    found = simulate([long, request(0.0, BE, 10, 2)], "fcfs", H100, config=CONFIG)
    assert found.refused == 1
    assert len(found.summary().requests) == 1


def test_a_flood_is_topped_up_and_ends_with_the_window() -> None:
    jobs = itertools.repeat(request(0.0, BE, 100, 5))
    found = simulate([], "fcfs", H100, config=CONFIG, seconds=1.0, flood=Flood(jobs, 6))
    there = [0]
    for event in found.events:
        if isinstance(event, Arrived | Finished):
            there.append(there[-1] + (1 if isinstance(event, Arrived) else -1))
    arrived = sum(isinstance(e, Arrived) for e in found.events)
    assert arrived > 60
    assert there[:7] == list(range(7))
    assert max(there) == 6
    ends = {e.at_ns for e in found.events if isinstance(e, Finished)}
    again = {e.at_ns for e in found.events if isinstance(e, Arrived)}
    assert ends <= again
    with pytest.raises(ConfigError, match="never ends"):
        run(flood=Flood(jobs, 6))


def test_expert_loads_are_counted_once_per_op() -> None:
    one = simulate([request(0.0, BE, 1, 1)], "fcfs", H100, config=CONFIG)
    assert one.expert_loads == 48 * 8
    many = simulate([request(0.0, BE, 4000, 1)], "fcfs", H100, config=CONFIG)
    assert many.expert_loads == 48 * 128


@dataclass
class Lazy:
    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        return Plan(wait_until_ns=view.now_ns)


class Broken(Lazy):
    def plan(self, view: View) -> Plan:
        raise ZeroDivisionError


def test_a_policy_that_breaks_or_stalls_is_named() -> None:
    with pytest.raises(PolicyError, match=r"Broken raised ZeroDivisionError"):
        simulate(mixed(), Broken(), H100, config=CONFIG)
    with pytest.raises(ConfigError, match=r"unknown policy 'nope'; installed: .*qllm2"):
        run("nope")


def test_a_policy_that_waits_for_ever_has_stalled() -> None:
    with pytest.raises(PolicyError, match=r"Lazy stalls with 24 requests live"):
        simulate(mixed(), Lazy(), H100, config=CONFIG)


def test_a_policy_that_waits_with_work_there_comes_to_the_end_of_the_window() -> None:
    found = simulate(mixed(), Lazy(), H100, config=CONFIG, seconds=0.2)
    assert found.summary().classes[LS].ttft_ms is None


# -- outcomes


def test_attainment_counts_late_requests_and_none_that_can_still_be_in_time() -> None:
    slo = Slo(ttft_ms=100.0, tpot_ms=50.0)
    first = simulate([request(0.0, LS, 50, 4)], "fcfs", H100, config=CONFIG, seconds=1.0)
    assert Outcome.of(first, slo).attainment == 1.0
    late = [request(0.0, BE, 20_000, 2), request(0.01, LS, 50, 4), request(0.4, LS, 50, 4)]
    fcfs = simulate(late, "fcfs", H100, config=CONFIG, seconds=0.45)
    assert Outcome.of(fcfs, slo).ls_arrived == 2
    assert Outcome.of(fcfs, slo).attainment == 0.0  # the second has waited 50 ms: not judged
    assert Outcome.of(fcfs, Slo(ttft_ms=10.0)).attainment == 0.0
    assert Outcome.of(fcfs).attainment is None


# -- cost files


def test_a_cost_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    H100.write(tmp_path / "costs.json")
    again = CostFile.read(tmp_path / "costs.json")
    assert again == H100
    assert again.sim_costs() == H100.sim_costs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": {"attn_ns": 1.0}}, r"costs: .*missing"),
        ({"costs": {**H100.costs, "attn_sn": 1.0}}, r"costs: .*unknown attn_sn; known: .*attn_ns"),
        ({"costs": {**H100.costs, "attn_ns": -1.0}}, r"costs: .*attn_ns=-1.0 must be"),
        ({"qllm_costs": 2}, r"qllm_costs: .*1"),
        ({"shape": {"num_layers": 2}}, r"shape.num_experts: .*required"),
        ({"machina": "x"}, r"machina: .*not permitted"),
        ({"cuts": {"max_cost": 1.0}}, r"cuts: .*missing"),
    ],
)
def test_a_malformed_cost_file_says_which_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**H100.model_dump(mode="json"), **change}))
    with pytest.raises(ConfigError, match=f"costs.json: {message}"):
        CostFile.read(path)


def test_a_file_that_is_no_json_says_so(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("not json")
    with pytest.raises(ConfigError, match=r"costs.json: Invalid JSON"):
        CostFile.read(tmp_path / "costs.json")


# -- presets


@pytest.mark.parametrize(
    ("name", "weights"), [("qwen3-moe", 30.5e9), ("mixtral", 46.7e9), ("olmoe", 6.9e9)]
)
def test_known_models_have_their_published_size(name: str, weights: float) -> None:
    assert model_spec(name).weights == pytest.approx(weights, rel=0.01)


def test_a_config_is_read_under_the_names_it_uses() -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(num_local_experts=4, intermediate_size=96, hidden_size=32)
    found = spec_of(config, "mine")
    assert (found.num_experts, found.moe_intermediate_size) == (4, 96)
    config.kv_lora_rank = 8
    with pytest.raises(ConfigError, match="latent attention"):
        spec_of(config, "mine")


def test_presets_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'b200'; known: h100, h200, gh200, cpu"):
        preset("b200", "qwen3-moe")
    with pytest.raises(ConfigError, match=r"93 GB of weights.*80 GB"):
        preset("h100", "mixtral")
    with pytest.raises(ModelError, match=r"no config of '/nowhere'"):
        preset("h100", "/nowhere")


def test_a_faster_memory_decodes_faster_and_prefills_alike() -> None:
    h200 = preset("h200", "qwen3-moe")
    assert 1.2 < H100.step_ns(16, 0, 1000) / h200.step_ns(16, 0, 1000) < 4.8 / 3.35
    assert h200.max_kv_tokens > 4 * H100.max_kv_tokens


# -- calibration

SHAPE = ModelShape(12, 24, 4, (True,) * 12, 97, 4096)
TRUE = SimCosts(
    op_ns=0,
    embed_ns=9e3,
    embed_token_ns=400,
    attn_ns=3e5,
    attn_token_ns=9e3,
    attn_row_ns=4e4,
    kv_token_ns=60,
    pair_ns=35,
    route_ns=4e4,
    route_token_ns=700,
    experts_ns=2e4,
    expert_ns=2.5e5,
    expert_token_ns=9e3,
    combine_ns=3e4,
    combine_token_ns=1500,
    dense_ns=0,
    dense_token_ns=0,
    head_ns=4e6,
    head_row_ns=1e5,
    skew=0.4,
)


def samples(noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    out = []
    for rows, context, prefill in itertools.product((0, 1, 4, 16), (30, 900), (0, 64, 700)):
        tokens = rows + prefill
        if not tokens:
            continue
        pairs = prefill * (prefill + 1) // 2
        work = Work(tokens, rows + bool(prefill), rows * context, pairs)
        for kind in OpKind:
            ns = TRUE.of(kind, work, SHAPE, is_moe=kind is not OpKind.HEAD)
            ns *= float(np.exp(rng.normal(0, noise)))
            out.append(Sample(kind, kind is not OpKind.HEAD, work, ns))
    return out


def test_the_fit_finds_the_costs_that_made_the_times() -> None:
    found, errors = fit(samples(), SHAPE)
    for name, value in asdict(TRUE).items():
        assert asdict(found)[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert all(e.p90_percent == 0 for e in errors.values())


def test_the_fit_of_noisy_times_predicts_their_sums() -> None:
    _, errors = fit(samples(noise=0.1), SHAPE)
    for kind, error in errors.items():
        assert abs(error.total_percent) < 8, kind
        assert error.p50_percent < 15, kind


def test_a_fit_of_noisy_times_is_in_their_middle() -> None:
    noisy = [s for s in samples(noise=0.4) if s.kind is OpKind.ATTN]
    costs, _ = fit(noisy, SHAPE)
    ratios = [s.ns / costs.of(s.kind, s.work, SHAPE, is_moe=True) for s in noisy]
    assert np.median(ratios) == pytest.approx(1.0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_a_fit_is_never_negative_and_no_worse_than_the_truth(true: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.uniform(0.1, 10, (20, 3))
    times = features @ np.array(true) + 1.0 + rng.uniform(0, 5, 20)
    found = nonnegative_fit(features, times)
    assert (found >= 0).all()

    def error(coefficients: Any) -> float:
        return float(((features @ coefficients / times - 1) ** 2).sum())

    assert error(found) <= error(np.array(true)) + 1e-9


def test_a_calibration_of_the_small_model_gives_a_file_that_simulates(tmp_path: Path) -> None:
    loads = [SimLoad(1, 40, 4), SimLoad(4, 60, 4), SimLoad(1, 120, 1, chunk_tokens=32)]
    seen: list[SimLoad] = []
    found = calibrate("1m", loads=loads, rounds=1, on_load=seen.append)
    assert seen == loads
    assert found.shape.num_layers == 4
    assert found.expert_bytes == 3 * 64 * 64 * 2
    assert set(found.fit) == {kind.name for kind in OpKind}
    assert all(error.samples >= 8 for error in found.fit.values())
    found.write(tmp_path / "costs.json")
    again = CostFile.read(tmp_path / "costs.json")
    assert again.cut_rule() == found.cut_rule()
    assert again.cuts is not None
    served = simulate([request(0.0, LS, 100, 4)], "qllm2", again)
    assert served.summary().classes[LS].finished == {"length": 1}


# -- capacity


def test_a_plan_asks_a_full_backlog_first_and_bisects_where_it_is_too_much() -> None:
    question = Question(slo=Slo(ttft_ms=400.0, tpot_ms=100.0), ls_rate=3.0, seconds=8.0)
    seen: list[str] = []
    qllm2, fcfs = harvest(
        question,
        H100,
        parse_variants("qllm2,fcfs"),
        replace(CONFIG, max_num_seqs=16),
        on_try=lambda label, _: seen.append(label),
    )
    assert seen == ["qllm2"] + ["fcfs"] * (2 + 6)
    assert qllm2.best is not None
    assert qllm2.best.be_rate is None
    assert fcfs.best is not None
    assert fcfs.best.be_rate is not None
    assert not fcfs.tried[-1].carried
    assert fcfs.best.outcome.be_per_s < fcfs.tried[-1].outcome.be_per_s
    rates = [t.be_rate or 0.0 for t in fcfs.tried[:-1]]
    assert rates == sorted(rates)
    too_much = min(t.be_rate or 0.0 for t in fcfs.tried[:-1] if not t.carried)
    assert 0.8 * too_much < fcfs.best.be_rate < too_much


def test_a_target_that_ls_alone_misses_has_no_answer() -> None:
    question = Question(slo=Slo(ttft_ms=1.0), ls_rate=3.0, seconds=4.0)
    (answer,) = harvest(question, H100, [Variant("qllm2", "qllm2", {})], CONFIG)
    assert answer.best is None
    assert len(answer.tried) == 2


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_question_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="ls_rate"):
        Question(slo=Slo(), ls_rate=rate)


# -- what is typed


def test_variants_are_read_with_every_value() -> None:
    found = parse_variants("qllm2, qllm2:ride_frac=0.1/0.5:max_be_stall_ms=500,fcfs")
    assert [v.label for v in found] == [
        "qllm2",
        "qllm2:ride_frac=0.1:max_be_stall_ms=500",
        "qllm2:ride_frac=0.5:max_be_stall_ms=500",
        "fcfs",
    ]
    assert found[2].make().ride_frac == 0.5


@pytest.mark.parametrize("text", ["", "fcfs,fcfs", "fcfs:x", "fcfs:nope=1", "nope"])
def test_variants_that_cannot_be_made_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_variants(text)


def test_targets_are_read_in_both_units() -> None:
    assert parse_slo("ttft=0.5s,tpot=50ms") == Slo(ttft_ms=500.0, tpot_ms=50.0)
    assert parse_slo("tpot=20") == Slo(tpot_ms=20.0)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "e2e=5ms", "ttft=-1ms", "tpot=1,tpot=2"])
def test_targets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be like"):
        parse_slo(text)


def test_sim_prints_the_tables_and_writes_what_can_be_opened(tmp_path: Path) -> None:
    args = ["--preset", "h100", "--model", "qwen3-moe", "--seconds", "4", "--slo", "ttft=500ms"]
    found = qllm("sim", "--workload", "S2", "--policy", "qllm2,mlfq", *args, "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    assert "TTFT p50 / p99" in found.stdout
    assert "never compared with such a machine" in found.stdout
    trace = Trace.read_jsonl(tmp_path / "qllm2.jsonl")
    assert trace.meta["simulated"] is True
    assert json.loads((tmp_path / "mlfq.perfetto.json").read_text())["traceEvents"]
    assert (tmp_path / "sim.png").stat().st_size > 10_000


def test_sim_serves_a_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:0{i}.0000000,{100 + i},{3 + i}" for i in range(5)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    found = qllm("sim", "--requests", str(path), "--preset", "cpu", "--be-share", "0.5")
    assert found.exit_code == 0, found.output
    assert "5 requests" in found.stdout


def test_plan_prints_a_table_and_a_figure(tmp_path: Path) -> None:
    args = ["--preset", "h100", "--model", "qwen3-moe", "--seconds", "3", "--policy", "qllm2"]
    asked = ["--slo", "ttft=500ms,tpot=50ms", "--ls-rate", "4", "--out", str(tmp_path)]
    found = qllm("plan", *asked, *args)
    assert found.exit_code == 0, found.output
    assert "full backlog" in found.stdout
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "nope"], r"unknown policy 'nope'; installed: "),
        (["--workload", "S99"], r"unknown workload 'S99'; known: S1"),
        (["--preset", "b200"], r"unknown preset 'b200'; known: h100"),
        (["--preset", "cpu", "--costs", "x.json"], r"not both"),
        (["--set", "max_seats=3"], r"unknown setting 'max_seats'"),
    ],
)
def test_bad_input_is_one_line_that_lists_what_is_known(args: list[str], message: str) -> None:
    base = {"--workload": "S2", "--preset": "cpu", "--seconds": "1"}
    given_names = args[::2]
    words = [w for name, value in base.items() if name not in given_names for w in (name, value)]
    found = qllm("sim", *words, *args)
    assert found.exit_code == 2
    assert len(found.stderr.splitlines()) == 1
    assert re.search(message, found.stderr), found.stderr
