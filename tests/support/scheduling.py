"""Laws of the scheduler, and the worlds and state machines that attack them.

`test_scheduler.py` runs the laws; `test_mutants.py` breaks the code and runs them again.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qllm.drafters.exit import Exit
from qllm.drafters.protocol import DraftRequest
from qllm.ingress import InprocIngress, StopWord, Update
from qllm.plan import ANY_ARRIVAL, NO_CUTS, NO_STOP, CutRule, Plan, Row
from qllm.policy import RequestView, View, next_row
from qllm.record import trace
from qllm.sim.check import overload as overloaded_world
from qllm.sim.check import watch
from qllm.sim.runner import SimCosts, VirtualClock
from qllm.sim.world import LIMITS, SHAPE, World
from qllm.types import NS_PER_MS, Cap, Evict, FinishReason, Grain, Priority
from qllm_policies.chunked import Chunked
from qllm_policies.chunked_priority import ChunkedPriority
from qllm_policies.edf import Edf
from qllm_policies.fcfs import Fcfs
from qllm_policies.layered import Layered
from qllm_policies.ls_first import LsFirst
from qllm_policies.priority import PriorityPolicy
from qllm_policies.priority_layered import PriorityLayered
from qllm_policies.qllm import Qllm
from qllm_policies.qllm2 import Qllm2
from tests.support.drafters import Guess

LS, BE = Priority.LS, Priority.BE

LAYERS = SHAPE.num_layers

SHARES = [None, 0.0, 0.6, 1.0]
"""Probabilities that a draft is right; None drafts nothing."""

SLOW = SimCosts(expert_ns=NS_PER_MS, head_ns=2 * NS_PER_MS)


class Eager:
    """Plans everything it sees, better classes first and newest first inside them."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        order = sorted(view.requests, key=lambda r: (r.priority, -r.request_id))
        rows = [next_row(r, view, view.max_step_tokens) for r in order]
        return Plan(rows=tuple(rows), wait_until_ns=view.now_ns + NS_PER_MS)


class Fuzz:
    """Any plan that the rules allow: odd chunks, layer ranges, merges of frames, drops."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT | Cap.YIELD_LAYER

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def plan(self, view: View) -> Plan:
        r = self.r
        rows: list[Row] = []
        for frame in r.sample(view.frames, len(view.frames)):
            if not rows and r.random() < 0.4:
                return self.ending(view, list(frame.rows))
            held = [q for q in view.requests if q.frame_id == frame.frame_id]
            merged = [*rows, *(next_row(q, view) for q in held)]
            if r.random() < 0.5 and self.fits(view, merged):
                rows = merged
        free = [q for q in view.requests if q.frame_id is None]
        for q in r.sample(free, len(free)):
            row = next_row(q, view, r.randint(1, 300))
            if not q.is_decoding and row.start_layer < LAYERS and r.random() < 0.6:
                row = row._replace(end_layer=r.randint(row.start_layer + 1, LAYERS))
            if self.fits(view, [*rows, row]) and r.random() < 0.9:
                rows.append(row)
        return self.ending(view, rows)

    def fits(self, view: View, rows: list[Row]) -> bool:
        new = [row for row in rows if not view.by_id[row.request_id].is_decoding]
        tokens = sum(row.num_tokens for row in new)
        return tokens <= view.max_step_tokens and len(rows) <= view.max_num_seqs

    def ending(self, view: View, rows: list[Row]) -> Plan:
        r, on = self.r, {row.request_id for row in rows}
        held = [q.request_id for q in view.requests if q.is_admitted and q.request_id not in on]
        return Plan(
            rows=tuple(rows),
            grain=r.choice(list(Grain)),
            stop_below=r.choice([NO_STOP, 0, 1, 11]),
            slice_ns=r.choice([None, NS_PER_MS, 5 * NS_PER_MS]),
            wait_until_ns=view.now_ns + NS_PER_MS,
            drop=tuple(i for i in held if r.random() < 0.003),
        )


class Early(Fuzz):
    """`Fuzz`, but a request may verify before it has drafted all, or not draft at all."""

    num_early = 0

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return replace(plan, rows=tuple([self.earlier(view.by_id[r[0]], r) for r in plan.rows]))

    def earlier(self, request: RequestView, row: Row) -> Row:
        front = request.frontier
        is_begun = front is not None and front.lo == request.num_computed_tokens
        is_free = request.is_decoding and request.frame_id is None
        if request.draft_row is None or not is_free or self.r.random() < 0.5:
            return row
        if front is None:
            return row._replace(end_layer=LAYERS)
        self.num_early += is_begun and front.layer == request.exit_layer
        return Row(row.request_id, *front, LAYERS) if is_begun else row


def shipped() -> list[Any]:
    policies = [Fcfs(), PriorityPolicy(), LsFirst(), Qllm(), Qllm2()]
    policies += [Chunked(step_tokens=24), ChunkedPriority(step_tokens=24)]
    policies += [Edf(min_chunk_tokens=10), Layered(group_tokens=30)]
    return [*policies, PriorityLayered(group_tokens=30, max_be_stall_ms=100)]


def finished_well(world: World) -> None:
    """Every request ended once, with all of its tokens, and nothing is left over."""
    assert set(world.finished) == set(world.submitted)
    for request_id, reason in world.finished.items():
        assert reason is FinishReason.LENGTH, world.errors[request_id]
        assert world.tokens[request_id] == world.submitted[request_id].max_tokens
    assert world.scheduler.pool.num_free == world.scheduler.limits.num_blocks
    assert not world.scheduler.frames
    assert not world.runner.frames


def events(world: World, kind: type) -> list[Any]:
    return [event for event in world.record if isinstance(event, kind)]


def alarm_after(world: World, boundaries: int, word: int = -1) -> None:
    """Lower the stop word at a boundary to come, though nobody arrives."""
    left = [boundaries]

    def look() -> None:
        left[0] -= 1
        if left[0] == 0:
            world.ingress.stop.lower(word)

    world.on_boundary = look


def work_is_exact(world: World) -> None:
    """What the runner did is what the counters say, token by layer (I1, I3)."""
    for request_id, request in world.scheduler.requests.items():
        mirror = world.runner.requests[request_id]
        assert mirror.num_computed == request.num_computed_tokens
        assert mirror.num_tokens == request.num_tokens
        work = request.num_computed_tokens * world.runner.shape.num_layers
        if request.frontier is not None:
            work += request.frontier.layer * (request.frontier.hi - request.frontier.lo)
            # a draft row that is part-way begins after the tokens of the draft rows before it
            work += request.exit_layer * (request.frontier.lo - request.num_computed_tokens)
        assert mirror.layer_work == work, f"request {request_id}"


def draft(
    world: World, share: float, most: int, *, exit_layer: int = 0, weighs: bool = False
) -> None:
    """Draft up to `most` tokens, each of them right with a probability.

    With `exit_layer`, rows through so many layers draft them.
    """
    runner, rng = world.runner, random.Random(most)

    if exit_layer:
        runner.is_right = lambda: rng.random() < share
        world.loop.draft_with(Exit(exit_layer), most, warn=print, weighs=weighs)
        return

    def make(request: DraftRequest) -> Guess:
        request_id = request.request_id

        def right(token_ids: Sequence[int]) -> int:
            return runner._token(request_id, len(token_ids))

        return Guess(right, runner.shape.vocab_size, share, request_id)

    world.loop.draft_with(make, most, warn=print, weighs=weighs)


class Machine(RuleBasedStateMachine):
    """Arrivals, stops, cancels, evictions and failures in any order, under any policy."""

    @initialize(
        policy=st.sampled_from(shipped()) | st.integers(0, 99).map(Fuzz),
        blocks=st.sampled_from([14, 20, 200]),
        seats=st.integers(1, 4),
        tokens=st.sampled_from([40, 512]),
        grain=st.sampled_from(Grain),
        exact=st.booleans(),
        share=st.sampled_from(SHARES),
        most=st.integers(1, 16),
        exit_layer=st.integers(0, LAYERS - 1),
    )
    def start(
        self,
        policy: Any,
        blocks: int,
        seats: int,
        tokens: int,
        grain: Grain,
        exact: bool,
        share: float | None,
        most: int,
        exit_layer: int,
    ) -> None:
        limits = replace(
            LIMITS,
            num_blocks=blocks,
            max_num_seqs=seats,
            max_step_tokens=tokens,
            grain=grain,
            batch_invariant=exact,
        )
        cuts = NO_CUTS._replace(min_block=16, max_block=32) if exact else NO_CUTS
        self.world = World(policy, limits, cuts=cuts)
        if share is not None:
            draft(self.world, share, most, exit_layer=exit_layer)

    @rule(
        priority=st.sampled_from([-1, LS, 3, BE]),
        prompt=st.integers(1, 200),
        tokens=st.integers(1, 8),
        timeout=st.none() | st.integers(1, 200),
    )
    def arrive(self, priority: int, prompt: int, tokens: int, timeout: int | None) -> None:
        timeout_ns = None if timeout is None else timeout * NS_PER_MS
        self.world.submit(int(priority), prompt, tokens, timeout_ns=timeout_ns)

    @rule(boundaries=st.integers(1, 30), word=st.sampled_from([-2, 0, 5]))
    def step_with_an_alarm(self, boundaries: int, word: int) -> None:
        alarm_after(self.world, boundaries, word)
        self.world.step()
        self.world.on_boundary = None

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.loop.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.loop.live))))

    @precondition(lambda self: any(r.is_admitted for r in self.world.scheduler.requests.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        requests = self.world.scheduler.requests.values()
        victim = data.draw(st.sampled_from([r.request_id for r in requests if r.is_admitted]))
        for effect in self.world.scheduler.evict(victim, victim):
            self.world.loop.effects.apply(effect)

    @precondition(lambda self: self.world.loop.live)
    @rule(data=st.data(), times=st.integers(1, 2))
    def poison(self, data: st.DataObject, times: int) -> None:
        self.world.runner.poisoned[data.draw(st.sampled_from(sorted(self.world.loop.live)))] = times

    @rule(ms=st.integers(1, 300))
    def pass_time(self, ms: int) -> None:
        self.world.clock.at_ns += ms * NS_PER_MS

    @invariant()
    def state_is_sound(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.scheduler.check()
        work_is_exact(self.world)
        assert not self.world.loop.policy_errors
        assert set(self.world.loop.live) == set(self.world.scheduler.requests)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(4000):
            if self.world.idle:
                break
            self.world.step()
            work_is_exact(self.world)
        assert self.world.idle, "stalled"
        assert not self.world.loop.policy_errors
        assert set(self.world.finished) == set(self.world.submitted)
        assert self.world.scheduler.pool.num_free == self.world.scheduler.limits.num_blocks
        assert not self.world.runner.frames
        assert not self.world.runner.requests


Machine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", range(12))
def test_any_plan_within_the_rules_gives_every_request_its_tokens(seed: int) -> None:
    r = random.Random(seed)
    blocks, seats = r.choice([30, 60, 400]), r.choice([2, 3, 8])
    world = World(Fuzz(seed), replace(LIMITS, num_blocks=blocks, max_num_seqs=seats))
    for _ in range(6):
        world.submit(r.choice([0, 3, 10]), r.randint(1, 400), r.randint(1, 10))
    while not world.idle:
        world.step()
        work_is_exact(world)
        assert world.clock.at_ns < 10**12
    assert not world.loop.policy_errors
    finished_well(world)
    if seed < 4:
        assert events(world, trace.Parked)


@pytest.mark.parametrize(("exit_layer", "states"), [(0, 0), (0, 100), (1, 0), (LAYERS - 1, 0)])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_give_every_request_its_tokens(
    seed: int, share: float, exit_layer: int, states: int
) -> None:
    """Scheduler and runner count the same tokens of a row, however many of its drafts are right."""
    limits = replace(LIMITS, num_blocks=40, max_num_seqs=3)
    world = World(Fuzz(seed), limits, shape=SHAPE._replace(state_tokens=states))
    draft(world, share, 1 + 3 * seed, exit_layer=exit_layer)
    for n in range(5):
        world.submit([0, 3, 10][n % 3], 20 * n + 5, 30)
    while not world.idle:
        world.step()
        work_is_exact(world)
        assert world.clock.at_ns < 10**12
    finished_well(world)
    found = events(world, trace.Verified)
    accepted = sum(e.num_accepted for e in found)
    assert (accepted > 0) is (share > 0)
    assert (sum(e.num_drafts for e in found) > accepted) is (share < 1)
    assert (world.runner.rejected_work > 0) is (share < 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_policy_may_end_drafts_early(seed: int) -> None:
    policy = Early(seed)
    world = World(policy, replace(LIMITS, num_blocks=40, max_num_seqs=3))
    draft(world, 0.8, 4, exit_layer=1)
    for n in range(4):
        world.submit([0, 3, 10][n % 3], 20 * n + 5, 30)
    while not world.idle:
        world.step()
        work_is_exact(world)
        assert world.clock.at_ns < 10**12
    finished_well(world)
    assert not world.loop.policy_errors
    assert policy.num_early > 5


@pytest.mark.parametrize("exit_layer", [0, 1])
@pytest.mark.parametrize("num_blocks", range(9, 14))
def test_drafts_take_no_kv_from_others(num_blocks: int, exit_layer: int) -> None:
    """Two requests fill the pool. Their drafts have no room, and no request is evicted for them."""
    world = World(Eager(), replace(LIMITS, num_blocks=num_blocks))
    draft(world, 0.6, 16, exit_layer=exit_layer)
    for _ in range(2):
        world.submit(BE, 40, 30)
    world.run(400)
    finished_well(world)
    assert not events(world, trace.Evicted)


@pytest.mark.parametrize(
    ("policy", "num_blocks", "block_size", "asked"),
    [
        (Fcfs(), 10, 16, [(BE, 9, 10), (LS, 9, 19), (LS, 7, 24), (LS, 53, 33)]),
        (Fcfs(), 11, 16, [(BE, 36, 47), (BE, 10, 25), (LS, 36, 42), (BE, 59, 17)]),
        (
            Chunked(step_tokens=24),
            12,
            16,
            [(LS, 19, 33), (BE, 28, 46), (BE, 43, 14), (LS, 17, 24), (LS, 8, 14)],
        ),
        (Eager(), 40, 4, [(LS, 53, 8), (LS, 49, 33), (LS, 33, 47)]),
    ],
)
def test_wrong_drafts_cause_no_eviction(
    policy: Any, num_blocks: int, block_size: int, asked: list[tuple[int, int, int]]
) -> None:
    """Blocks for drafts are those that no other request asks for in the next step."""

    def num_evicted(most: int) -> int:
        world = World(policy, replace(LIMITS, num_blocks=num_blocks, block_size=block_size))
        draft(world, 0.0, most)
        for one in asked:
            world.submit(*one)
        world.run(400)
        finished_well(world)
        return len(events(world, trace.Evicted))

    assert num_evicted(8) <= num_evicted(0)


def test_wrong_drafts_become_few_also_for_the_next_request() -> None:
    """A request begins with the rates of those before it, so it tries fewer drafts."""
    world = World(Fcfs())
    draft(world, 0.0, 8, weighs=True)
    first = world.submit(LS, 20, 300)
    world.run()
    second = world.submit(LS, 20, 40)
    world.run()
    finished_well(world)
    found = events(world, trace.Verified)
    of_first, of_second = (
        [e.num_drafts for e in found if e.request_id == one] for one in (first, second)
    )
    assert of_first[:4] == [2, 2, 2, 1]
    assert len(of_first) < 60
    assert of_second[:3] == [1, 1, 1]


@pytest.mark.parametrize("make", [Chunked, ChunkedPriority])
def test_drafts_count_in_the_tokens_of_a_step(make: Any) -> None:
    """The policy leaves the room for a prompt that the verify rows of a step leave."""
    world = World(make(step_tokens=24))
    draft(world, 1.0, 8)
    for prompt, tokens in ((20, 60), (20, 60), (300, 5)):
        world.submit(LS, prompt, tokens)
    world.run(400)
    finished_well(world)
    found = [sum(row.num_tokens for row in e.rows) for e in events(world, trace.Planned)]
    assert max(found) <= 24


def test_a_row_with_drafts_is_no_longer_than_a_step() -> None:
    world = World(Fcfs(), replace(LIMITS, max_step_tokens=8))
    draft(world, 1.0, 16)
    world.submit(LS, 5, 60)
    world.run()
    finished_well(world)
    found = [row.num_tokens for e in events(world, trace.Planned) for row in e.rows]
    assert max(found) == 8


@pytest.mark.parametrize("exit_layer", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("prompt", [68, 72, 76, 80])
def test_wrong_drafts_take_no_kv_that_a_new_prompt_needs(prompt: int, exit_layer: int) -> None:
    """Rejected drafts give back their blocks, and drafts get none that others would lose."""
    world = World(Eager(), replace(LIMITS, num_blocks=30, block_size=4))
    draft(world, 0.0, 8, exit_layer=exit_layer)
    world.submit(5, 8, 30)
    world.submit(BE, 8, 30)
    for _ in range(10):
        world.step()
    world.submit(LS, prompt, 1)
    world.run(400)
    finished_well(world)
    assert not events(world, trace.Evicted)


@pytest.mark.parametrize("num_left", [0, 1])
def test_draft_rows_have_their_kv_before_they_begin(num_left: int) -> None:
    """A BE prompt takes the free blocks, at any moment. No draft row takes blocks from it."""
    for num_steps in range(2, 26):
        world = World(Eager(), replace(LIMITS, num_blocks=9))
        draft(world, 0.0, 8, exit_layer=1)
        chat = world.submit(LS, 8, 24)
        for _ in range(num_steps):
            world.step()
        assert world.scheduler.requests[chat].num_tokens < 12, "without drafts, one block is enough"
        free = 16 * (world.scheduler.pool.num_free - num_left)
        world.submit(BE, free - 3, 3)
        while not world.finished:
            world.step()
        assert not events(world, trace.Evicted), num_steps
        world.run()
        finished_well(world)


def test_rows_draft_only_for_a_request_that_decodes_alone() -> None:
    """A second request begins to decode. The first one verifies its drafts, and drafts no more."""
    world = World(Fcfs())
    draft(world, 1.0, 4, exit_layer=1, weighs=True)
    first = world.submit(BE, 20, 60)
    for _ in range(24):
        world.step()
    second = world.submit(BE, 20, 30)
    world.run()
    finished_well(world)
    found = events(world, trace.Verified)
    assert {e.request_id for e in found[:3]} == {first}
    begun = next(e.at_ns for e in events(world, trace.Token) if e.request_id == second)
    ended = next(e.at_ns for e in events(world, trace.Finished))
    late = [e for e in events(world, trace.Drafted) if begun < e.at_ns < ended]
    assert not late
    assert any(e.at_ns > ended for e in found)


def test_draft_rows_that_do_not_pay_become_few() -> None:
    """The first trial shows what they cost. Later trials take little of the time."""
    ends_ns = []
    for is_drafting in (False, True):
        world = World(Fcfs())
        if is_drafting:
            draft(world, 0.0, 8, exit_layer=LAYERS - 1, weighs=True)
        world.submit(LS, 20, 300)
        world.run()
        finished_well(world)
        ends_ns.append(world.clock.at_ns)
    found = [e.num_drafts for e in events(world, trace.Verified)]
    assert found[0] == 2
    assert set(found[1:]) == {1}
    assert ends_ns[1] < 1.02 * ends_ns[0]


def test_draft_rows_lose_no_layer_when_ls_comes() -> None:
    """A BE request that drafts loses no layer when an LS request stops it."""
    world = World(Qllm())
    draft(world, 1.0, 8, exit_layer=2)
    batch = world.submit(BE, 20, 100)
    for _ in range(9):
        world.step()
    assert world.scheduler.requests[batch].exit_layer
    alarm_after(world, 1)
    world.submit(LS, 20, 10)
    world.run()
    finished_well(world)
    assert world.metrics[batch].preempt_recomputed_tokens == 0


@pytest.mark.parametrize("policy", [Fcfs(), Qllm(), Layered(group_tokens=30)], ids=type)
def test_a_request_that_drafts_may_be_swapped_out(policy: Any) -> None:
    """Before, in and after a draft row. It verifies what it has drafted when it comes back."""
    seen = set()
    for num_steps, boundaries in [(n, b) for n in range(2, 6) for b in (1, 3, 5, 7)]:
        limits = replace(LIMITS, num_swap_blocks=99, block_size=4)
        world = World(policy, limits)
        draft(world, 1.0, 4, exit_layer=2)
        one, other = world.submit(BE, 20, 20), world.submit(BE, 9, 40)
        for _ in range(num_steps):
            world.step()
        alarm_after(world, boundaries)
        world.step()
        world.on_boundary = None
        request = world.scheduler.requests[one]
        seen.add((request.exit_layer, request.num_drafts))
        for effect in world.scheduler.evict(one, other, Evict.SWAP):
            world.loop.effects.apply(effect)
        drafted = len(events(world, trace.Drafted))
        if request.frontier is not None:
            assert request.num_drafts == request.frontier.hi - request.num_tokens
        while request.num_swapped_tokens:
            world.step()
            work_is_exact(world)
        assert request.num_drafts == request.most_drafts
        assert drafted
        world.run()
        finished_well(world)
        assert not world.loop.policy_errors
        assert not events(world, trace.Evicted)
        assert world.metrics[one].preempt_recomputed_tokens == 0
    assert len(seen) > 2


def test_a_paused_request_keeps_no_other_from_drafting() -> None:
    world = World(Fcfs())
    draft(world, 1.0, 4, exit_layer=1, weighs=True)
    paused, other = world.submit(BE, 20, 60), world.submit(BE, 20, 60)
    for _ in range(6):
        world.step()
    assert not events(world, trace.Drafted)
    world.ingress.put_at(world.clock.at_ns, Update(paused, None, True))
    for _ in range(40):
        world.step()
    assert {e.request_id for e in events(world, trace.Drafted)} == {other}
    world.ingress.put_at(world.clock.at_ns, Update(paused, None, False))
    world.run()
    finished_well(world)


def test_a_stop_at_every_boundary_loses_no_draft() -> None:
    """A draft row that waits for HEAD still chooses its token."""
    world = World(Qllm())
    draft(world, 1.0, 4, exit_layer=1)
    world.submit(BE, 20, 41)
    while not world.idle:
        alarm_after(world, 1)
        world.step()
    finished_well(world)
    assert [e.num_drafts for e in events(world, trace.Verified)] == 8 * [4]


def test_be_drafts_nothing_while_ls_decodes() -> None:
    world = World(Fcfs())
    draft(world, 1.0, 4)
    batch, chat = world.submit(BE, 20, 200), world.submit(LS, 20, 20)
    world.run()
    finished_well(world)
    end = next(e.at_ns for e in events(world, trace.Finished) if e.request_id == chat)
    found = events(world, trace.Drafted)
    during = {e.request_id for e in found if e.at_ns < end}
    assert during == {chat}
    assert any(e.request_id == batch and e.at_ns > end for e in found)


def test_equal_ranks_never_evict_each_other() -> None:
    world = World(Eager(), replace(LIMITS, num_blocks=12))
    world.submit(BE, 100, 40)
    world.submit(BE, 100, 40, at_ns=5 * NS_PER_MS)
    world.run(400)
    assert not events(world, trace.Evicted)
    finished_well(world)


def test_no_request_is_evicted_for_one_that_cannot_start() -> None:
    world = World(Eager(), replace(LIMITS, num_blocks=20))
    world.submit(BE, 40, 60)
    world.submit(LS, 160, 30)
    for _ in range(3):
        world.step()
    world.submit(LS, 230, 2)  # 15 blocks; 6 are free, and BE holds 3
    for _ in range(20):
        world.step()
    assert not events(world, trace.Evicted)
    world.run(400)
    finished_well(world)


BY_CLASS = [p for p in shipped() if not isinstance(p, Fcfs)]


def test_more_rows_than_seats_are_refused() -> None:
    world = World(Eager(), replace(LIMITS, max_num_seqs=2))
    for _ in range(3):
        world.submit(BE, 5, 1)
    world.step()
    assert "planned 3 rows; max_num_seqs is 2" in str(world.loop.policy_errors)


def test_all_blocks_come_back() -> None:
    world = World(Fcfs(), replace(LIMITS, num_blocks=16))
    for _ in range(4):
        world.submit(BE, 120, 5)
    world.run(400)
    finished_well(world)


def test_an_admitted_be_request_never_stalls_longer_than_its_bound() -> None:
    for policy in (Qllm2(max_be_stall_ms=200, ride_frac=0.0), Qllm2(max_be_stall_ms=400)):
        world = overloaded_world(policy, policy.max_be_stall_ms or 0)
        assert watch(world) > 50 * NS_PER_MS
        finished_well(world)


def test_be_rides_along_no_longer_than_its_share() -> None:
    share = {}
    for frac in (0.0, 0.5):
        world = World(Qllm2(ride_frac=frac, max_be_stall_ms=None), costs=SLOW)
        chat, batch = world.submit(LS, 10, 60), world.submit(BE, 400, 60)
        while chat not in world.finished:
            world.step()
        request = world.scheduler.requests[batch]
        share[frac] = request.served_ns / world.clock.at_ns
        world.run()
        finished_well(world)
    assert share[0.0] == 0
    assert share[0.5] > 0.1


def test_a_parked_program_does_every_unit_once() -> None:
    def served_ns(boundaries: int) -> int:
        world = World(Qllm2())
        world.submit(BE, 50, 2)
        alarm_after(world, boundaries)
        world.run(50)
        finished_well(world)
        return sum(e.at_ns - e.start_ns for e in events(world, trace.Ran))

    undisturbed = served_ns(10**6)
    assert all(served_ns(boundaries) == undisturbed for boundaries in range(1, 20))


def test_kv_counts_only_when_the_last_layer_is_reached() -> None:
    for boundaries in range(1, 14):
        world = World(Qllm2())
        request_id = world.submit(BE, 50, 1)
        alarm_after(world, boundaries)
        world.step()
        request = world.scheduler.requests[request_id]
        assert request.num_computed_tokens == 0
        assert request.frontier is not None
        assert request.frontier.layer <= LAYERS
        work_is_exact(world)
        world.run(50)
        finished_well(world)


def test_an_ls_arrival_stops_be_inside_the_layer() -> None:
    world = World(Qllm2(), costs=SLOW)
    batch = world.submit(BE, 300, 2)
    chat = world.submit(LS, 10, 1, at_ns=3 * NS_PER_MS)
    world.run()
    finished_well(world)
    assert any(e.inside_layer for e in events(world, trace.Parked))
    assert [e.request_id for e in events(world, trace.Finished)] == [chat, batch]
    metrics = world.metrics[batch]
    assert metrics is not None
    assert (metrics.preemptions, metrics.preempt_recomputed_tokens) == (1, 0)


def test_the_stop_word_survives_the_race_with_drain() -> None:
    """An arrival at the very moment of the reset is drained, or its word stands."""
    ingress = InprocIngress(VirtualClock())

    class Racy(StopWord):
        def reset(self) -> None:
            if racing:
                ingress.put(racing.pop())
            super().reset()

    ingress.stop = Racy(VirtualClock())
    donor = World(Fcfs())
    donor.submit(LS, 1, 1)
    racing = [donor.submitted[0]]
    drained = ingress.drain()
    assert drained or ingress.stop.word == LS
    assert len(drained) + len(ingress.drain()) == 1
    assert ingress.stop.word == ANY_ARRIVAL


@pytest.mark.parametrize("policy", [Fcfs(), Qllm2(), Qllm(), Fcfs(chunk_tokens=16)])
@pytest.mark.parametrize("blocks", [13, 400])
def test_who_fails_twice_fails_alone(policy: Any, blocks: int) -> None:
    world = World(policy, replace(LIMITS, num_blocks=blocks))
    for _ in range(5):
        world.submit(BE, 50, 4)
    world.runner.poisoned = {1: 9}
    world.run(300)
    assert {i for i, r in world.finished.items() if r is FinishReason.ERROR} == {1}
    assert "poisoned" in (world.errors[1] or "")
    assert all(world.tokens[i] == 4 for i in (0, 2, 3, 4))


def test_a_cancelled_request_ends_at_once_and_gives_back_its_blocks() -> None:
    world = World(Qllm2())
    stays, goes = world.submit(BE, 60, 4), world.submit(BE, 60, 4)
    alarm_after(world, 5)
    world.step()
    assert world.scheduler.frames
    world.cancel(goes)
    world.step()
    assert world.finished == {goes: FinishReason.CANCELLED}
    world.run(50)
    assert world.finished[stays] is FinishReason.LENGTH
    assert world.tokens == {stays: 4}
    assert not any(event.why == "error" for event in events(world, trace.Ran))
    assert world.scheduler.pool.num_free == LIMITS.num_blocks


def refused(policy: Any, blocks: int = 400) -> str:
    world = World(policy, replace(LIMITS, num_blocks=blocks))
    world.submit(BE, 100, 4)
    for _ in range(3):
        world.step()
    world.submit(LS, 60, 4)
    world.run(50)
    assert world.loop.policy_errors, "nobody noticed"
    assert FinishReason.ERROR in world.finished.values()
    return world.loop.policy_errors[0]


def altered(kind: str, **changes: Any) -> Any:
    """`Eager`, but every row (or every row of some kind) is changed."""

    class Altered(Eager):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            return replace(plan, rows=tuple(changes["row"](r, view) for r in plan.rows))

    Altered.__name__ = kind
    return Altered()


def test_bad_plans_are_refused_with_the_rule() -> None:
    skip = altered("Skip", row=lambda r, v: r._replace(start_layer=1))
    assert "policy Skip planned" in refused(skip)
    assert "(I2)" in refused(skip)
    half = altered("Half", row=lambda r, v: r._replace(end_layer=1) if r.num_tokens == 1 else r)
    assert "a decode row must go full depth (I4)" in refused(half)
    gap = altered("Gap", row=lambda r, v: r._replace(lo=r.lo + 1) if r.num_tokens > 1 else r)
    assert "tokens are computed (I2)" in refused(gap)
    deep = altered("Deep", row=lambda r, v: r._replace(end_layer=LAYERS + 1))
    assert "out of range" in refused(deep)
    ghost = altered("Ghost", row=lambda r, v: r._replace(request_id=99))
    assert "planned request 99, which is not live" in refused(ghost)
    nothing = altered("Nothing", row=lambda r, v: None)
    assert "policy Nothing planned None" in refused(nothing)


def test_half_a_frame_is_refused() -> None:
    class Torn(Eager):
        needs = Cap.YIELD_EXPERT

        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            rows = view.frames[0].rows[:1] if view.frames else plan.rows
            return replace(plan, rows=rows, grain=Grain.EXPERT, stop_below=1)

    world = World(Torn())
    world.submit(BE, 20, 2)
    world.submit(BE, 20, 2)
    alarm_after(world, 3)
    world.run(10)
    assert "a frame is resumed or replaced whole (I10)" in str(world.loop.policy_errors)


def test_chunks_end_on_cuts_in_the_batch_invariant_mode() -> None:
    cuts = CutRule(max_cost=1e9, attn_cost_per_kv=0.0, min_block=16, max_block=32)
    limits = replace(LIMITS, batch_invariant=True, max_step_tokens=100)
    world = World(Fcfs(chunk_tokens=50), limits, cuts=cuts)
    for size in (333, 70, 31):
        world.submit(BE, size, 3)
    world.run(100)
    finished_well(world)
    rows = [row for e in events(world, trace.Planned) for row in e.rows]
    for row in rows:
        known = len(world.submitted[row.request_id].token_ids)
        assert row.hi % 32 == 0 or row.hi >= known, row
