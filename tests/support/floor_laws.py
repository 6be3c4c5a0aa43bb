"""Laws of the floor for BE, told from what ran when, and not from what the scheduler counts."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from qllm.floor import MILLION, Floor
from qllm.plan import CutRule, ModelShape
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.scheduler.decision import Decision, Limits
from qllm.scheduler.program import Index
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, SHAPE, World
from qllm.types import NS_PER_MS, Grain, Priority, RequestId
from tests.support.scheduling import events

SHARE, WINDOW_MS = 0.1, 500
FLOOR = Floor.of(SHARE, WINDOW_MS, LIMITS.max_segment_ns / NS_PER_MS)
SLOW = SimCosts(expert_ns=NS_PER_MS, head_ns=2 * NS_PER_MS)


class Run(NamedTuple):
    """What ran, and what the state was when it was chosen."""

    decided_ns: int
    end_ns: int
    be_ns: float
    """BE's part of it, by tokens."""
    is_turn: bool
    """Whether the floor chose it."""
    is_contended: bool
    """Whether LS had work and BE could have run."""


class Recorder(Scheduler):
    """A scheduler that writes down who ran when."""

    def __init__(self, policy: Any, shape: ModelShape, cuts: CutRule, limits: Limits) -> None:
        super().__init__(policy, shape, cuts, limits)
        self.runs: list[Run] = []
        self._next = (0, False, False)

    def decide(self, now_ns: int) -> Decision:
        """See `Scheduler`. BE can run if a request of it waits for nothing but its turn."""
        active = [r for r in self.requests.values() if not r.is_hidden]
        ls = any(r.priority <= Priority.LS for r in active)
        be = any(r.priority > Priority.LS and self._has_room(r) for r in active)
        decision = super().decide(now_ns)
        self._next = (now_ns, self.be_share.now.pays, ls and be)
        return decision

    def _has_room(self, request: Any) -> bool:
        room = len(request.block_table) + self.pool.num_free
        return room * self.limits.block_size > request.num_written_tokens

    def _book(self, end: Index, start_ns: int, end_ns: int) -> None:
        parked = self._take_running()
        begun = end == parked.index and end != parked.program.end
        rows = [
            (row.num_tokens, self.requests[row.request_id].priority > Priority.LS)
            for row in parked.program.rows_between(parked.index, Index(end.op, 1) if begun else end)
            if row.request_id in self.requests and row.request_id not in parked.dead
        ]
        tokens = sum(num for num, _ in rows) or 1
        be_ns = (end_ns - start_ns) * sum(num for num, is_be in rows if is_be) / tokens
        decided_ns, is_turn, is_contended = self._next
        self.runs.append(Run(decided_ns, end_ns, be_ns, is_turn, is_contended))

    def done(self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int) -> None:
        """See `Scheduler`."""
        self._book(end, start_ns, end_ns)
        super().done(end, sampled, start_ns, end_ns)

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool:
        """See `Scheduler`."""
        self._book(end, start_ns, end_ns)
        return super().stopped(end, start_ns, end_ns, preempted=preempted)


BY_TOKEN = SimCosts(
    op_ns=1_000, attn_token_ns=3_000, expert_ns=10_000, expert_token_ns=1_000, head_ns=100_000
)
"""A pass takes 0.2 ms per token of a deep model, and little else."""
NOTHING = {"ride_frac": 0.0, "max_be_stall_ms": None}
"""Settings with which the default leaves BE nothing while LS has work."""
DEEP = ModelShape(40, 4, 2, (True,) * 40, 97, 4096)
"""A model whose steps take much longer than a slice."""


def floor_world(
    policy: Any,
    floor: Floor = FLOOR,
    *,
    shape: ModelShape = SHAPE,
    costs: SimCosts = SLOW,
    scheduler: type[Scheduler] = Recorder,
    **limits: Any,
) -> World:
    changed = replace(LIMITS, floor=floor, **limits)
    return World(policy, changed, shape=shape, costs=costs, scheduler=scheduler)


def prompts_beside_decodes(name: str, scheduler: type[Scheduler]) -> World:
    """A prompt of BE takes 36 slices; it is begun before LS comes, and others come after."""
    world = floor_world(load_policy(name), shape=DEEP, costs=BY_TOKEN, scheduler=scheduler)
    world.submit(Priority.BE, 900, 20)
    while not world.tokens and world.clock.at_ns < 100 * NS_PER_MS:
        world.step()
    for _ in range(8):
        world.submit(Priority.LS, 20, 2_000)
    world.submit(Priority.BE, 900, 20)
    return world


def a_cohort_under_way(scheduler: type[Scheduler]) -> World:
    """BE has done some layers of a long prompt when prompts of LS begin to come."""
    policy = load_policy("priority-layered", {"group_tokens": 100})
    world = floor_world(policy, shape=DEEP, costs=BY_TOKEN, scheduler=scheduler)
    world.submit(Priority.LS, 200, 3)
    world.run()  # what a token costs is known
    batch = world.submit(Priority.BE, 900, 20)
    world.step()
    assert world.scheduler.requests[batch].frontier is not None
    for i in range(200):
        world.submit(Priority.LS, 200, 1, at_ns=world.clock.at_ns + 5 * i * NS_PER_MS)
    return world


def more_decodes_than_seats(scheduler: type[Scheduler]) -> World:
    """Four requests of BE decode, in two classes, and one of LS; there are two seats."""
    world = floor_world(load_policy("qllm2", NOTHING), max_num_seqs=2, scheduler=scheduler)
    for priority in (Priority.BE, 4):
        for _ in range(2):
            world.submit(priority, 20, 500)
        while len(world.tokens) < len(world.submitted):
            world.step()
    world.submit(Priority.LS, 20, 2_000)
    return world


def large_and_small_wait_for_memory(scheduler: type[Scheduler]) -> World:
    """LS leaves KV for the second request of BE that waits, and not for the first."""
    world = floor_world(load_policy("qllm2", NOTHING), num_blocks=16, scheduler=scheduler)
    world.submit(Priority.LS, 90, 40)
    world.step()
    world.submit(Priority.BE, 200, 5)
    world.submit(Priority.BE, 20, 5)
    return world


def runs_of(world: World) -> list[Run]:
    assert isinstance(world.scheduler, Recorder)
    return world.scheduler.runs


def is_cut(world: World) -> bool:
    """Whether a policy's runs may be stopped inside steps, so that the declared bounds hold."""
    return getattr(world.scheduler.policy, "grain", Grain.STEP) is not Grain.STEP


def contended(runs: Sequence[Run]) -> list[list[Run]]:
    """The stretches of time in which LS has work all the time, and BE could run."""
    found: list[list[Run]] = [[]]
    for run in runs:
        if not run.is_contended:
            found.append([])
        else:
            found[-1].append(run)
    return [stretch for stretch in found if stretch]


class _Sum:
    """Time that something had up to a moment; a run gives it evenly."""

    def __init__(self, runs: Sequence[Run], parts: Sequence[float]) -> None:
        self.at = [runs[0].decided_ns]
        self.had = [0.0]
        for run, part in zip(runs, parts, strict=True):
            self.at.append(run.end_ns)
            self.had.append(self.had[-1] + part)

    def until(self, at_ns: float) -> float:
        i = min(bisect_right(self.at, at_ns), len(self.at) - 1)
        begin, end = self.at[i - 1], self.at[i]
        part = (at_ns - begin) / (end - begin) if end > begin else 1.0
        return self.had[i - 1] + part * (self.had[i] - self.had[i - 1])


def least_share(world: World, window_ns: int, *, whole_turns: bool = False) -> float | None:
    """The least share of BE in any window in which LS has work all the time; None without one.

    Args:
        world: What ran.
        window_ns: Length of the windows.
        whole_turns: Count turns of BE whole, though LS may have rows in a parked frame of BE.
    """
    shares = []
    for runs in contended(runs_of(world)):
        turns = [whole_turns and run.is_turn for run in runs]
        parts = [
            run.end_ns - run.decided_ns if whole else run.be_ns
            for run, whole in zip(runs, turns, strict=True)
        ]
        be = _Sum(runs, parts)
        starts = [*be.at, *(at - window_ns for at in be.at)]
        last_ns = be.at[-1] - window_ns
        for at in starts:
            if be.at[0] <= at <= last_ns:
                shares.append((be.until(at + window_ns) - be.until(at)) / window_ns)
    return min(shares, default=None)


def be_has_its_share(world: World, *, whole_turns: bool = False) -> float:
    """Hold a world against its floor; return the least share of any window of it.

    Where steps are not cut, a run that is longer than a slice delays BE by itself, and the run of
    BE before the window may have been too long.
    """
    floor: Floor = world.scheduler.limits.floor
    found = least_share(world, floor.window_ns, whole_turns=whole_turns)
    assert found is not None, "nothing was contended for a window"
    runs = runs_of(world)
    rate = floor.rate / MILLION
    own = max((r.end_ns - r.decided_ns for r in runs if r.is_turn), default=0)
    others = max((r.end_ns - r.decided_ns for r in runs if not r.is_turn), default=0)
    if is_cut(world):
        assert found * WINDOW_MS * NS_PER_MS >= SHARE * WINDOW_MS * NS_PER_MS - 1
    owed = floor.slice_ns + rate * others + max(0, own - floor.slice_ns)
    assert found * floor.window_ns >= rate * floor.window_ns - owed - 1_000
    return found


def ls_pays_no_more(world: World) -> float:
    """Hold what the floor takes of any stretch of time against what it declares.

    Returns:
        All time that the floor took.
    """
    floor: Floor = world.scheduler.limits.floor
    rate, runs = floor.rate / MILLION, runs_of(world)
    own = max((r.end_ns - r.decided_ns for r in runs if r.is_turn), default=0)
    others = max((r.end_ns - r.decided_ns for r in runs if not r.is_turn), default=0)
    allowed = floor.slice_ns + rate * others + max(0, own - floor.slice_ns) + 1_000
    took = low = 0.0
    for run in runs:
        low = min(low, took - rate * run.decided_ns)
        took += (run.end_ns - run.decided_ns) * run.is_turn
        excess = took - rate * run.end_ns - low
        assert excess <= allowed, f"{excess / NS_PER_MS:.1f} ms over its rate"
        if is_cut(world):
            assert excess <= 3 * floor.slice_ns
    stops = {e.at_ns for e in events(world, trace.Ran) if e.why == "stopped"}
    assert not any(run.end_ns in stops for run in runs if run.is_turn), "an arrival stopped BE"
    if is_cut(world):
        _waits_hold(world, _Sum(runs, [(r.end_ns - r.decided_ns) * r.is_turn for r in runs]))
    return took


def _waits_hold(world: World, paid: _Sum) -> None:
    """Hold every TTFT and every gap between two tokens of LS against `Floor.delayed_ms`."""
    floor: Floor = world.scheduler.limits.floor
    tokens: dict[RequestId, list[int]] = {
        i: [s.arrival_ns] for i, s in world.submitted.items() if s.priority <= Priority.LS
    }
    for event in events(world, trace.Token):
        if event.request_id in tokens:
            tokens[event.request_id].append(event.at_ns)
    for times in tokens.values():
        for begin, end in pairwise(times):
            took = paid.until(end) - paid.until(max(begin, paid.at[0]))
            without_ms = (end - begin - took) / NS_PER_MS
            assert (end - begin) / NS_PER_MS <= floor.delayed_ms(without_ms) + 0.001
