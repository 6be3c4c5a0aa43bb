"""A simulated fleet: one engine is what it was, several hear of all that happened and no more."""

from typing import Any

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.config import EngineConfig
from qllm.errors import ConfigError, PolicyError
from qllm.fleet.router import Entry, replayed
from qllm.fleet.routes import ROUTES, EngineView, RequestView, load_route
from qllm.plan import Plan
from qllm.policy import View
from qllm.record.summary import request_metrics
from qllm.record.trace import Arrived, Reused, Token
from qllm.sim.fleet import costs_of, simulate_fleet
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import NS_PER_S, Cap, FinishReason, Priority
from qllm.workloads.generators import named_workload
from qllm.workloads.spec import PieceSpec, RequestSpec

COSTS = preset("cpu", "300m", "auto")
CONFIG = EngineConfig(max_kv_tokens=65536)
SECONDS = 3.0


def specs(seed: int = 0) -> list[RequestSpec]:
    capacity = COSTS.capacity(CONFIG).times(3)
    return named_workload("S2", seed=seed, seconds=SECONDS, capacity=capacity, max_len=1024)


def serve(**how: Any) -> Any:
    how = {"engines": 3, "config": CONFIG, "seconds": SECONDS, "policy": "qllm2", **how}
    return simulate_fleet(how.pop("specs", None) or specs(), how.pop("policy"), COSTS, **how)


@pytest.mark.parametrize("policy", ["qllm2", "fcfs", "chunked-priority"])
@pytest.mark.parametrize("seconds", [SECONDS, None])
def test_a_fleet_of_one_engine_is_that_engine(policy: str, seconds: float | None) -> None:
    few = specs()[:40]
    alone = simulate(few, policy, COSTS, config=CONFIG, seconds=seconds)
    fleet = serve(specs=few, engines=1, policy=policy, seconds=seconds)
    assert list(fleet.trace) == list(alone.trace)
    assert (fleet.end_ns, fleet.decisions) == (alone.end_ns, alone.decisions)
    assert fleet.expert_loads == alone.expert_loads


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_the_same_arguments_give_the_same_events_and_choices(route: str) -> None:
    entries: list[Entry] = []
    run = serve(route=route, record=entries.append)
    again = serve(route=load_route(route))
    assert list(run.trace) == list(again.trace)
    choices = replayed(entries, load_route(route))
    assert [now for _, now in choices] == [then for then, _ in choices]
    arrived = [e for e in run.trace if isinstance(e, Arrived)]
    assert len({e.request_id for e in arrived}) == len(arrived) == len(choices)
    assert sum(run.trace.meta["sent"].values()) == len(arrived)
    assert all(run.trace.meta["sent"].values()), "every engine had something"
    assert len(request_metrics(run.events)) == len(arrived)


@pytest.mark.parametrize("policy", ["qllm2", "fcfs"])
def test_a_router_hears_what_happened_before_an_arrival_and_nothing_later(policy: str) -> None:
    entries: list[Entry] = []
    run = serve(record=entries.append, policy=policy)
    tokens = sorted((e.at_ns, e.request_id) for e in run.trace if isinstance(e, Token))
    heard = 0
    for what, *args in entries:
        if what == "heard":
            heard += 1
        elif what == "choose":
            at_ns = round(args[1] * NS_PER_S)
            before = sum(token_ns < at_ns for token_ns, _ in tokens)
            upto = sum(token_ns <= at_ns for token_ns, _ in tokens)
            assert before <= heard <= upto
    assert heard > 20


def test_a_prompt_in_pieces_is_served_by_one_engine() -> None:
    pieces = (PieceSpec(0.0, 0, 64), PieceSpec(0.1, 64, 64), PieceSpec(0.2, 100, 50))
    asked = [
        RequestSpec(
            at_s=0.01 * i, priority=Priority.LS, num_prompt_tokens=64, max_tokens=3, pieces=pieces
        )
        for i in range(6)
    ]
    run = serve(specs=asked, seconds=None)
    found = request_metrics(run.events)
    assert [(r.num_revisions, r.num_output_tokens) for r in found] == [(3, 3)] * 6
    alone = serve(specs=asked, seconds=None, engines=1)
    assert list(alone.trace) == list(simulate(asked, "qllm2", COSTS, config=CONFIG).trace)


def test_what_no_engine_could_hold_is_refused() -> None:
    long = RequestSpec(at_s=0, priority=Priority.LS, num_prompt_tokens=10**6, max_tokens=3)
    run = serve(specs=[long])
    assert run.refused == 1
    assert not [e for e in run.trace if isinstance(e, Arrived | Token)]


class Stalls:
    """Raises at its first plan."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        raise ValueError("no plan")


def test_an_error_of_a_policy_ends_the_simulation() -> None:
    with pytest.raises(PolicyError, match="no plan"):
        serve(policy=Stalls())


def test_a_route_that_raises_is_replaced() -> None:
    def raises(*_: Any) -> EngineView:
        raise ValueError("broken")

    assert list(serve(route=raises).trace) == list(serve(route="least").trace)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"engines": 0}, "engines=0 must be >= 1"),
        ({"seconds": 0}, "seconds=0 must be > 0"),
        ({"route": "x"}, "route='x' is unknown"),
    ],
)
def test_wrong_arguments_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        serve(**how)


def test_the_command_compares_routes() -> None:
    line = "sim --workload S2 --preset cpu --model 300m --seconds 3 --engines 2 --policy fcfs"
    done = CliRunner().invoke(app, [*line.split(), "--route", "least,class"])
    assert done.exit_code == 0, done.output
    assert all(f"fcfs, {route}" in done.output for route in ("least", "class"))


def test_the_router_knows_how_fast_the_machine_is() -> None:
    costs = costs_of(COSTS, CONFIG)
    capacity = COSTS.capacity(CONFIG)
    assert 1 / costs.token_s == pytest.approx(capacity.prefill_tokens_per_s)
    assert 1 / costs.output_s == pytest.approx(capacity.output_tokens_per_s)


def stuck(request: RequestView, engines: Any) -> EngineView:
    """LS, and BE that comes first, to the first engine; what comes later to the second."""
    return engines[0]  # type: ignore[no-any-return]


def beside_ls(**how: Any) -> Any:
    """A few BE requests at an engine that LS keeps busy, and an engine that is idle."""
    be = [
        RequestSpec(at_s=0.0, priority=Priority.BE, num_prompt_tokens=64, max_tokens=200)
        for _ in range(4)
    ]
    ls = [
        RequestSpec(at_s=1.0 + 0.01 * i, priority=Priority.LS, num_prompt_tokens=256, max_tokens=16)
        for i in range(500)
    ]
    asked = {"specs": [*be, *ls], "engines": 2, "route": stuck, "seconds": None, **how}
    return serve(**{"rebalance_s": 0.5, **asked})


HANDS = EngineConfig(max_kv_tokens=65536, handover_gib=1.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["qllm2", "ls-first"])
def test_be_that_ls_keeps_waiting_moves_to_an_idle_engine_and_ends_sooner(policy: str) -> None:
    stays = beside_ls(policy=policy)
    moves = beside_ls(policy=policy, config=HANDS)
    assert stays.trace.meta["moved"] == 0
    assert moves.trace.meta["moved"] >= 2
    assert list(beside_ls(policy=policy, config=HANDS).trace) == list(moves.trace)
    assert list(beside_ls(policy=policy, config=HANDS, rebalance_s=0).trace) == list(stays.trace)
    found = {}
    for run in (stays, moves):
        requests = request_metrics(run.events)
        assert len(requests) == 504, "each arrives and ends once"
        assert all(r.num_output_tokens == (200 if r.priority else 16) for r in requests)
        assert {r.reason for r in requests} == {FinishReason.LENGTH}
        found[run is moves] = sum(r.e2e_ms for r in requests if r.priority)
    assert found[True] < found[False]


def test_kv_that_moves_in_the_simulator_is_not_computed_again() -> None:
    """With KV that takes no time on its way, less is computed than with KV that does not come."""
    moves = beside_ls(config=HANDS, move_token_s=0.0)
    reused = [event for event in moves.trace if isinstance(event, Reused)]
    assert len(reused) == moves.trace.meta["moved"]
    assert all(event.num_tokens > 0 for event in reused)
    late = beside_ls(config=HANDS, move_token_s=1.0)
    assert late.trace.meta["moved"] == 0, "it costs more than waiting"
