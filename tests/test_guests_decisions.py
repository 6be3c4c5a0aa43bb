"""Guests in decisions and in the simulator: who is named, what it costs, who may not ask."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
from families import make_model
from test_sim_runner import serve

from qllm import QLLMEngine
from qllm.check import LIMITS, SHAPE, World, check_policy
from qllm.compile import compile_program
from qllm.cuda.runner import CudaRunner
from qllm.device.scheduler import NativeScheduler
from qllm.errors import ConfigError, PolicyError
from qllm.ingress import StopWord
from qllm.perfetto import to_perfetto
from qllm.plan import NO_CUTS, START, Index, ModelShape, OpKind, Plan, Program, Row
from qllm.plugins import load_policy
from qllm.policy import View, next_row
from qllm.runner import TorchRunner
from qllm.scheduler import Scheduler
from qllm.sim import SimCosts, SimRunner, VirtualClock
from qllm.timeline import expert_coverage
from qllm.trace import Parked, Ran, Resumed
from qllm.types import NS_PER_MS, Cap, Grain, Priority, SamplingParams
from qllm_policies.qllm2 import Qllm2

GUESTS = functools.partial(Qllm2, guest_rows=90)
SLOW = SimCosts(expert_ns=NS_PER_MS)


class Seen:
    """What a world's runner was asked to run, and what was parked then, oldest first."""

    def __init__(self, world: World) -> None:
        self.programs: list[tuple[Program, list[int]]] = []
        real = world.runner.run

        def run(program: Program, start: Index, stop: Any) -> Index:
            self.programs.append((program, list(world.scheduler.frames)))
            return real(program, start, stop)

        world.runner.run = run  # type: ignore[method-assign]
        world.run()


def three_classes(policy: Any) -> World:
    """BE is stopped by a middle class, which LS stops."""
    world = World(policy, costs=SLOW)
    world.submit(Priority.BE, 300, 2)
    world.submit(5, 200, 2, at_ns=8 * NS_PER_MS)
    world.submit(Priority.LS, 10, 2, at_ns=14 * NS_PER_MS)
    return world


def test_a_program_names_the_parked_frames_in_the_order_in_which_they_are_resumed() -> None:
    world = three_classes(GUESTS())
    seen = Seen(world)
    parked = [e.frame_id for e in world.record if isinstance(e, Parked)]
    resumed = [e.frame_id for e in world.record if isinstance(e, Resumed)]
    assert len(parked) == 2
    assert parked[::-1] == resumed[:2], "the better class goes on first"
    both = [program for program, frames in seen.programs if len(frames) == 2]
    assert both
    assert {program.guests for program in both} == {tuple(parked[::-1])}
    for program, frames in seen.programs:
        assert program.guest_rows == 90
        assert set(program.guests) == set(frames)
        assert program.frame_id not in program.guests


def test_off_no_program_names_anyone() -> None:
    seen = Seen(three_classes(Qllm2()))
    assert any(frames for _, frames in seen.programs)
    assert {(program.guest_rows, program.guests) for program, _ in seen.programs} == {(0, ())}


class Turns:
    """New work runs first, in a slice; once two frames are parked, to the end."""

    needs = Cap.YIELD_EXPERT | Cap.YIELD_LAYER | Cap.EXPERT_GUESTS

    def __init__(self, guest_rows: Any) -> None:
        self.guest_rows = guest_rows

    def plan(self, view: View) -> Plan:
        free = [r for r in view.requests if r.frame_id is None]
        rows = (next_row(free[0], view, 100),) if free else view.frames[0].rows
        slice_ns = 1_234_567 if len(view.frames) < 2 else None
        return Plan(rows=rows, grain=Grain.EXPERT, slice_ns=slice_ns, guest_rows=self.guest_rows)


def test_a_policy_that_plans_has_its_guests_oldest_first() -> None:
    world = World(Turns(100), costs=SLOW)
    for _ in range(3):
        world.submit(Priority.BE, 90, 2)
    seen = Seen(world)
    assert max(len(frames) for _, frames in seen.programs) > 1
    for program, frames in seen.programs:
        assert (program.guest_rows, list(program.guests)) == (100, frames)
    assert world.runner.guest_rows > 0


# -- who may ask


@pytest.mark.parametrize("guest_rows", [-1, 1.5, None])
def test_a_plan_with_a_wrong_budget_is_refused(guest_rows: Any) -> None:
    with pytest.raises(PolicyError, match=r"planned guest_rows=.*integer >= 0"):
        check_policy(Turns(guest_rows), num_states=10)


def test_a_plan_that_asks_where_nobody_can_is_refused() -> None:
    class Unsaid(Turns):
        needs = Cap.YIELD_EXPERT | Cap.YIELD_LAYER

    limits = replace(LIMITS, capabilities=CudaRunner.capabilities)
    world = World(Unsaid(3), limits)
    request = world.submit(Priority.BE, 10, 1)
    world.run()
    error = world.errors[request]
    assert error is not None
    assert "planned guest_rows=3, and this engine lacks Cap.EXPERT_GUESTS" in error
    assert World(Unsaid(0), limits).scheduler.view(0).capabilities is CudaRunner.capabilities


def test_settings_that_cannot_be_are_refused() -> None:
    for guest_rows in (-1, 0.5, True):
        with pytest.raises(ConfigError, match=f"guest_rows={guest_rows}.* integer >= 0"):
            Qllm2(guest_rows=guest_rows)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stops at grain LAYER; leave it 0"):
        Qllm2(guest_rows=3, grain=Grain.LAYER)
    assert Qllm2().guest_rows == 0
    assert Cap.EXPERT_GUESTS not in Qllm2().needs
    assert Cap.EXPERT_GUESTS in GUESTS().needs
    with pytest.raises(ConfigError, match="stops at grain STEP; leave it 0"):
        load_policy("fcfs", {"guest_rows": 3})


def test_an_engine_that_has_no_guests_refuses_the_policy_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = pytest.raises(ConfigError, match=r"Qllm2 needs .*EXPERT_GUESTS, which this engine")
    with refused:
        NativeScheduler(GUESTS(), SHAPE, NO_CUTS, LIMITS)
    with refused:
        Scheduler(GUESTS(), SHAPE, NO_CUTS, replace(LIMITS, capabilities=CudaRunner.capabilities))
    NativeScheduler(Qllm2(), SHAPE, NO_CUTS, LIMITS)
    model = make_model("mixtral")
    asks: dict[str, Any] = {"conformance": False, "policy_settings": {"guest_rows": 4}}
    with refused:
        QLLMEngine.from_model(model, scheduler="native", **asks)
    monkeypatch.setattr(TorchRunner, "capabilities", CudaRunner.capabilities)
    with refused:
        QLLMEngine.from_model(model, **asks)


@pytest.mark.parametrize("guest_rows", [1, 16, 10_000])
def test_check_policy_finds_nothing_wrong(guest_rows: int) -> None:
    assert check_policy(Qllm2(guest_rows=guest_rows), num_states=1000).preemptions > 0


# -- the simulator


COSTS = SimCosts(op_ns=0, expert_ns=100_000, expert_token_ns=1_000)
WIDE = ModelShape(2, 64, 8, (True, True), 97, 4096)


class Sim:
    """A guest of 32 tokens, parked at a position in EXPERTS of layer 1, and 2 rows that decode."""

    def __init__(self, pos: int, costs: SimCosts = COSTS) -> None:
        self.clock = VirtualClock()
        self.stop = StopWord(self.clock)
        self.runner = SimRunner(WIDE, self.clock, costs)
        self.guest = self.program(1, [Row(i, 0, 1, 0, 2) for i in range(32)])
        experts = next(i for i, op in enumerate(self.guest.ops) if op[:2] == (OpKind.EXPERTS, 1))
        timeline = self.runner.frames[1].timeline
        self.units, self.at = timeline.units(experts), Index(experts, pos)
        self.stop.stop_at_ns = self.clock.at_ns + timeline.at(self.at)
        assert self.run(self.guest)[0] == self.at
        self.stop.stop_at_ns = None

    def program(self, frame_id: int, rows: list[Row]) -> Program:
        for row in rows:
            self.runner.add(row.request_id, (0,), SamplingParams(), 1, 9)
        plan = Plan(rows=tuple(rows), grain=Grain.EXPERT)
        program = compile_program(
            plan, frame_id=frame_id, samples=[True] * len(rows), shape=WIDE, cuts=NO_CUTS
        )
        self.runner.accept(program)
        return program

    def run(self, program: Program, start: Index = START) -> tuple[Index, int, int]:
        """Where it stopped, how long that took, and the experts it read."""
        before, loads = self.clock.at_ns, self.runner.expert_loads
        index = self.runner.run(program, start, self.stop)
        return index, self.clock.at_ns - before, self.runner.expert_loads - loads

    def decode(self, guest_rows: int, frame_id: int = 2) -> tuple[int, int]:
        """Time and experts of a decode step of two rows."""
        rows = [Row(100 * frame_id + i, 0, 1, 0, 2) for i in range(2)]
        program = replace(self.program(frame_id, rows), guest_rows=guest_rows, guests=(1,))
        index, ns, loads = self.run(program)
        assert index == program.end
        self.runner.finish(program)
        return ns, loads

    def resume(self) -> tuple[int, int]:
        index, ns, loads = self.run(self.guest, self.at)
        assert index == self.guest.end
        self.runner.finish(self.guest)
        return ns, loads


@pytest.mark.parametrize("pos", [0, 1, 20])
def test_guests_cost_rows_and_no_experts(pos: int) -> None:
    apart, beside = Sim(pos), Sim(pos)
    alone, taken = apart.decode(0), beside.decode(10_000)
    rows = beside.runner.guest_rows
    owed = 32 * 8 * (apart.units - pos) // apart.units
    part = expert_coverage(2, 64, 8) / 64
    assert apart.runner.guest_rows == 0
    assert rows == pytest.approx(owed * part, rel=0.1)
    assert taken == (alone[0] + rows * COSTS.expert_token_ns, alone[1])
    slower, faster = apart.resume(), beside.resume()
    units = slower[1] - faster[1]
    assert units == round((apart.units - pos) * part) > 0
    timeline = Sim(0).runner.frames[1].timeline
    each = timeline.at(Index(apart.at.op, 1)) - timeline.at(Index(apart.at.op, 0))
    assert slower[0] - faster[0] == units * each


def test_skewed_routing_shares_more() -> None:
    found = []
    for skew in (0.0, 1.0):
        sim = Sim(0, replace(COSTS, skew=skew))
        sim.decode(10_000)
        found.append(sim.runner.guest_rows / 256)
    assert 0.2 < found[0] < 0.3 < found[1]


def test_the_budget_binds_in_the_simulator_too() -> None:
    for budget in (0, 1, 5, 30):
        sim = Sim(3)
        sim.decode(budget)
        assert sim.runner.guest_rows <= budget
        assert (sim.runner.guest_rows > 0) == (budget >= 5)


def test_a_program_that_was_stopped_inside_the_op_takes_nobody_along() -> None:
    sim = Sim(3)
    program = sim.program(2, [Row(200 + i, 0, 1, 0, 2) for i in range(2)])
    program = replace(program, guest_rows=10_000, guests=(1,))
    inside = Index(sim.at.op, 1)
    sim.stop.stop_at_ns = sim.clock.at_ns + sim.runner.frames[2].timeline.at(inside)
    assert sim.run(program)[0] == inside
    sim.stop.stop_at_ns = None
    assert sim.run(program, inside)[0] == program.end
    assert sim.runner.guest_rows == 0


def test_a_guest_runs_out_of_units() -> None:
    sim = Sim(3)
    for turn in range(60):
        sim.decode(10_000, 2 + turn)
    left = sim.runner.frames[1].owed()[0]
    assert left <= 2, "only what the routing of few tokens rounds away is left"
    assert sim.resume()[1] == left


@pytest.mark.parametrize("grain", list(Grain))
def test_jumped_boundaries_change_no_event(grain: Grain) -> None:
    rows = 0
    for seed in range(12):
        jumped = serve(GUESTS(), grain, seed, stepped=False)
        stepped = serve(GUESTS(), grain, seed, stepped=True)
        assert jumped.record.events == stepped.record.events
        assert jumped.runner.expert_loads == stepped.runner.expert_loads
        assert jumped.runner.guest_rows == stepped.runner.guest_rows
        told = sum(e.guest_rows for e in jumped.record if isinstance(e, Ran))
        assert told == jumped.runner.guest_rows
        shown = to_perfetto(jumped.record)["traceEvents"]
        assert told == sum(e["args"].get("guest_rows", 0) for e in shown if "args" in e)
        rows += told
    assert (rows > 0) == (grain is Grain.EXPERT)


def test_random_worlds_give_the_same_tokens() -> None:
    """Which request gets which tokens does not depend on guests; when it gets them does."""
    rng = random.Random(0)
    for _ in range(3):
        seed = rng.randrange(1000)
        off, on = (serve(p(), Grain.EXPERT, seed, stepped=False) for p in (Qllm2, GUESTS))
        done = {i for i, reason in off.finished.items() if reason == "length"}
        done &= {i for i, reason in on.finished.items() if reason == "length"}
        assert len(done) > 4
        assert all(off.tokens[i] == on.tokens[i] for i in done)
