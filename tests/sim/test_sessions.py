"""Sessions in the simulator: turns wait for answers, and prefixes are found."""

from typing import Any

import pytest

from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.record.summary import request_metrics
from qllm.record.trace import Arrived, Finished
from qllm.sim.capacity import Question, harvest
from qllm.sim.fleet import simulate_fleet
from qllm.sim.presets import preset
from qllm.sim.run import Flood, Simulated, simulate
from qllm.types import NS_PER_S, FinishReason, Priority, Slo
from qllm.workloads.generators import Workload
from qllm.workloads.spec import RequestSpec
from tests.support.simulation import qllm

H100 = preset("h100", "qwen3-moe")
CONFIG = EngineConfig(max_kv_tokens=40_000, prefix_cache_tokens=40_000, max_num_seqs=8)


def requests(**more: Any) -> list[RequestSpec]:
    how = {"seconds": 4.0, "length_scale": 1 / 64, "wait_scale": 0.05, "load": 0.01}
    capacity = H100.capacity(CONFIG)
    return Workload(name="S15", capacity=capacity, **how | more).requests(1)


def ls_alone() -> list[RequestSpec]:
    """Return the turns of one agent."""
    return [r for r in requests() if not r.name.startswith("be-")]


def run(specs: list[RequestSpec], **more: Any) -> Simulated:
    return simulate(specs, "qllm2", H100, **{"config": CONFIG, **more})


def test_each_turn_arrives_when_the_one_before_it_is_answered_and_its_tool_is_done() -> None:
    specs = ls_alone()
    found = run(specs)
    number = {e.name: e.request_id for e in found.trace if isinstance(e, Arrived)}
    assert number.keys() == {spec.name for spec in specs}
    ends = {e.request_id: e for e in found.trace if isinstance(e, Finished)}
    assert {e.reason for e in ends.values()} == {FinishReason.LENGTH}
    come = {e.name: e for e in found.trace if isinstance(e, Arrived)}
    for spec in specs:
        assert come[spec.name].num_prompt_tokens == spec.num_prompt_tokens
        if spec.follows is not None:
            due = ends[number[spec.follows.after]].at_ns + spec.follows.wait_s * NS_PER_S
            assert come[spec.name].at_ns == pytest.approx(due, abs=1e3)


def test_what_a_turn_has_in_common_with_the_last_one_is_found() -> None:
    specs = {spec.name: spec for spec in ls_alone()}
    found = run([*specs.values()])
    names = {e.request_id: e.name for e in found.trace if isinstance(e, Arrived)}
    page = CONFIG.page_size
    checked = 0
    for r in request_metrics(found.events):
        spec = specs[names[r.request_id]]
        if spec.follows is not None and spec.follows.extends:
            last = specs[spec.follows.extends]
            common = last.num_prompt_tokens + last.max_tokens
            assert common - 2 * page < r.num_cached_tokens <= common
            checked += 1
    assert checked > 30
    cold = run([*specs.values()], config=EngineConfig(max_kv_tokens=40_000, prefix_cache=False))
    assert {r.num_cached_tokens for r in request_metrics(cold.events)} == {0}
    assert cold.end_ns > found.end_ns


def test_prompts_of_a_batch_beside_sessions_have_no_prefix_in_common() -> None:
    found = run(requests(), seconds=4.0)
    be = [r for r in request_metrics(found.events) if r.priority == Priority.BE]
    names = {e.request_id: e.name for e in found.trace if isinstance(e, Arrived)}
    batch = [r for r in be if names[r.request_id].startswith("be-")]
    assert len(batch) > 4
    assert {r.num_cached_tokens for r in batch} == {0}


def test_sessions_are_refused_where_arrivals_have_to_be_known_before() -> None:
    with pytest.raises(ConfigError, match="simulate sessions with one engine"):
        simulate_fleet(ls_alone(), "qllm2", H100, engines=2, config=CONFIG)
    with pytest.raises(ConfigError, match="simulate sessions without one"):
        run(ls_alone(), seconds=1.0, flood=Flood(iter(()), 1))
    question = Question(slo=Slo(500.0, 50.0), ls_rate=1.0, workload="S15")
    with pytest.raises(ConfigError, match="use `qllm sim`, or a workload without sessions"):
        harvest(question, H100, [], CONFIG)


def test_the_command_line_says_the_factor_of_its_agents() -> None:
    done = qllm("sim", "--workload", "S15", "--preset", "h100", "--model", "qwen3-moe",
                "--seconds", "2", "--load", "0.001")  # fmt: skip
    assert done.exit_code == 0, done.output
    longest = min(H100.shape.max_position, H100.max_kv_tokens)
    assert f"1 agents, their published lengths times {longest / 200_000:.3g}" in done.output
