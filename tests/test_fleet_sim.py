"""A simulated fleet: one engine is what it was, several hear of all that happened and no more."""

from typing import Any

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.config import EngineConfig
from qllm.errors import ConfigError, PolicyError
from qllm.frontend.router import Entry, replayed
from qllm.frontend.routes import ROUTES, EngineView, load_route
from qllm.plan import Plan
from qllm.policy import View
from qllm.record.summary import request_metrics
from qllm.record.trace import Arrived, Token
from qllm.sim.fleet import costs_of, simulate_fleet
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import NS_PER_S, Cap, Priority
from qllm.workloads.generators import named_workload
from qllm.workloads.spec import PieceSpec, RequestSpec

COSTS = preset("cpu", "300m", "auto")
CONFIG = EngineConfig(max_kv_tokens=65536)
SECONDS = 6.0


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
