"""The simulated runner: what ops cost, and that a jump is the same as many steps."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.errors import InvariantError
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.policy import View, next_row
from qllm.record.trace import Parked, Ran
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.sim.runner import SimRunner, VirtualClock
from qllm.sim.timeline import Prices, SimCosts, Timeline, Work, expert_coverage, work_of
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Cap, Grain, Priority, SamplingParams
from qllm_policies.qllm2 import Qllm2

SHAPE = ModelShape(4, 8, 2, (False, True, True, True), 97, 4096)
UNEVEN = SimCosts(
    op_ns=7_001, attn_token_ns=913, expert_ns=50_021, expert_token_ns=333, pair_ns=3, skew=0.7
)


def make(rows: list[Row], grain: Grain = Grain.EXPERT, **cuts: Any) -> Program:
    return compile_program(
        Plan(rows=tuple(rows), grain=grain),
        frame_id=1,
        samples=[True] * len(rows),
        shape=SHAPE,
        cuts=NO_CUTS._replace(**cuts),
    )


# -- experts


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (24, 4), (128, 8), (4, 4)])
def test_uniform_coverage_is_the_closed_form(experts: int, top_k: int) -> None:
    for tokens in (1, 2, 7, 64, 2048):
        want = experts * (1 - (1 - top_k / experts) ** tokens)
        assert math.isclose(expert_coverage(tokens, experts, top_k), want, rel_tol=1e-9)


@given(st.integers(1, 300), st.integers(2, 64), st.data())
def test_skew_never_adds_experts(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    curve = [expert_coverage(tokens, experts, top_k, skew) for skew in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(curve))
    assert all(top_k - 1e-6 <= covered <= experts for covered in curve)


def test_coverage_is_what_routed_tokens_hit() -> None:
    rng = random.Random(0)
    for tokens in (1, 4, 16, 64):
        hits = [
            len({e for _ in range(tokens) for e in rng.sample(range(24), 4)}) for _ in range(400)
        ]
        assert expert_coverage(tokens, 24, 4) == pytest.approx(sum(hits) / 400, rel=0.03)


def test_an_expert_is_read_once_however_many_rows_take_it() -> None:
    costs = SimCosts(expert_ns=1000, expert_token_ns=0)

    def experts_ns(tokens: int) -> float:
        return costs.of(OpKind.EXPERTS, Work(tokens, 1, 0, 0), SHAPE, is_moe=True)

    assert experts_ns(1) == pytest.approx(2 * 1000)
    assert experts_ns(2000) == pytest.approx(8 * 1000)


def test_reading_and_computing_add_up_or_overlap() -> None:
    work = Work(100, 1, 0, 0)
    apart, at_once = (
        SimCosts(attn_ns=3000, attn_token_ns=10, pair_ns=0, overlap=overlap)
        for overlap in (False, True)
    )
    assert apart.of(OpKind.ATTN, work, SHAPE, is_moe=True) == 4000
    assert at_once.of(OpKind.ATTN, work, SHAPE, is_moe=True) == 3000


def test_the_work_of_cut_attention_adds_up_to_the_whole() -> None:
    rows = [Row(1, 5, 45, 0, 4), Row(2, 90, 91, 0, 4), Row(3, 0, 70, 0, 4)]
    whole = work_of(make(rows), 0, 0, 111, OpKind.ATTN)
    assert whole == Work(111, 3, 91, sum(p + 1 for p in [*range(5, 45), *range(70)]))
    for at in (1, 40, 41, 80):
        parts = [work_of(make(rows), 0, a, b, OpKind.ATTN) for a, b in ((0, at), (at, 111))]
        assert sum(p.pairs for p in parts) == whole.pairs
        assert sum(p.kv_tokens for p in parts) == whole.kv_tokens
        assert sum(p.tokens for p in parts) == whole.tokens


# -- boundaries


def boundaries(timeline: Timeline, program: Program, grain: Grain) -> list[Index]:
    """Every boundary after the start that a grain allows, one by one."""
    found, index = [], START
    while index < program.end:
        index = timeline.following(index)
        if index < program.end and grain is Grain.LAYER and program.inside_layer(index):
            continue
        found.append(index)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=4),
    st.sampled_from([Grain.LAYER, Grain.EXPERT]),
    st.sampled_from([1 << 30, 16]),
    st.sampled_from([0, 20_000]),
    st.data(),
)
def test_the_first_stop_is_found_without_stepping(
    sizes: list[tuple[int, int]], grain: Grain, glue: int, task_ns: int, data: st.DataObject
) -> None:
    rows = [Row(i, lo, lo + n, 0, 4) for i, (n, lo) in enumerate(sizes)]
    program = make(rows, glue_block=glue, max_block=32, max_cost=64.0)
    timeline = Timeline(program, Prices(replace(UNEVEN, task_ns=task_ns), SHAPE))
    allowed = boundaries(timeline, program, grain)
    assert timeline.at(program.end) == timeline.total_ns
    assert timeline.loads_at(program.end) == timeline.loads
    steps = [timeline.at(b) - timeline.at(a) for a, b in itertools.pairwise([START, *allowed])]
    assert min(steps) > 0
    if grain is Grain.EXPERT:
        if task_ns:
            inside = {OpKind.EMBED, OpKind.EXPERTS}
            ops = [b.op - (b.pos == 0) for b in allowed]
            times = zip(steps, ops, strict=True)
            longest = max(ns for ns, op in times if program.ops[op].kind not in inside)
            assert longest <= 1.5 * task_ns
        for a, b in itertools.pairwise([START, *allowed]):
            reads = timeline.loads_at(b) - timeline.loads_at(a)
            assert reads == (program.ops[a.op].kind is OpKind.EXPERTS)
    after = data.draw(st.sampled_from([START, *allowed[:-1]]))
    at_ns = data.draw(st.integers(-5, timeline.total_ns + 5))
    later = [b for b in allowed if b > after and timeline.at(b) >= at_ns]
    found = timeline.first_stop(at_ns, after, grain)
    assert found == (later[0] if later else program.end)


def serve(policy: Any, grain: Grain, seed: int, *, stepped: bool) -> World:
    rng = random.Random(seed)
    limits = LIMITS.__class__(
        max_num_seqs=4,
        max_step_tokens=256,
        block_size=16,
        num_blocks=60,
        grain=grain,
        max_segment_ns=5 * NS_PER_MS,
    )
    costs = SimCosts(expert_ns=rng.choice([100_000, 900_000]), step_ns=30_000, skew=0.3)
    world = World(policy, limits, costs=costs)
    world.on_boundary = (lambda: None) if stepped else None
    at_ns = 0
    for _ in range(12):
        at_ns += rng.randrange(30 * NS_PER_MS)
        priority = rng.choice([Priority.LS, Priority.BE])
        timeout = rng.choice([None, None, 40 * NS_PER_MS])
        request = world.submit(
            priority, rng.randint(1, 200), rng.randint(1, 6), at_ns=at_ns, timeout_ns=timeout
        )
        if rng.random() < 0.2:
            world.cancel(request, at_ns + rng.randrange(50 * NS_PER_MS))
    world.run()
    return world


class Slices:
    """Time slices of odd lengths, and stops that some arrivals do not reach."""

    needs = Cap.YIELD_EXPERT | Cap.YIELD_LAYER

    def plan(self, view: View) -> Plan:
        rows = view.frames[0].rows if view.frames else ()
        if not rows:
            first = min(view.requests, key=lambda r: (r.priority, r.request_id))
            rows = (next_row(first, view, 100),)
        return Plan(rows=rows, grain=Grain.EXPERT, stop_below=1, slice_ns=1_234_567)


@pytest.mark.parametrize("grain", list(Grain))
@pytest.mark.parametrize("policy", [Qllm2, Slices])
def test_jumped_boundaries_change_no_event(policy: Any, grain: Grain) -> None:
    parked = 0
    for seed in range(12):
        jumped = serve(policy(), grain, seed, stepped=False)
        stepped = serve(policy(), grain, seed, stepped=True)
        assert jumped.record.events == stepped.record.events
        assert jumped.runner.expert_loads == stepped.runner.expert_loads
        assert jumped.runner.segments == stepped.runner.segments
        parked += sum(isinstance(e, Parked) for e in jumped.record)
    assert (parked > 0) == (grain is not Grain.STEP)


def test_a_preemption_is_counted_from_the_arrival_to_the_boundary() -> None:
    world = World(Qllm2(), costs=SimCosts(expert_ns=NS_PER_MS))
    world.submit(Priority.BE, 300, 2)
    world.submit(Priority.LS, 10, 1, at_ns=5_500_000)
    world.run()
    (parked,) = [e for e in world.record if isinstance(e, Parked) and e.preempted]
    assert parked.arrival_ns == 5_500_000
    assert 0 < parked.at_ns - 5_500_000 <= world.runner.segments.longest_ns


def test_a_stopped_program_reads_every_expert_once() -> None:
    loads = set()
    for at_ns in (None, 2_000_000, 3_300_000, 5_500_000):
        world = World(Qllm2(), costs=SimCosts(expert_ns=NS_PER_MS))
        world.submit(Priority.BE, 300, 2)
        if at_ns is not None:
            world.submit(Priority.LS, 10, 1, at_ns=at_ns)
        world.run()
        of_ls = 0 if at_ns is None else 2 * round(expert_coverage(10, 4, 2))
        loads.add(world.runner.expert_loads - of_ls)
    assert loads == {2 * 4 + 2 * 2}  # two layers with experts: a prefill, then one decode


def test_time_between_runs_is_no_part_of_them() -> None:
    world = World(Qllm2(), costs=SimCosts(step_ns=3 * NS_PER_MS, step_row_ns=500_000))
    world.submit(Priority.BE, 30, 3)
    world.run()
    ran = [e for e in world.record if isinstance(e, Ran)]
    gaps = [b.start_ns - a.at_ns for a, b in itertools.pairwise(ran)]
    assert gaps == [3_500_000] * 2


def test_work_done_twice_or_not_at_all_is_an_error() -> None:
    for lost in (1, -1):
        clock = VirtualClock()
        runner = SimRunner(SHAPE, clock)
        runner.add(1, (0,) * 20, SamplingParams(), 20, 30)
        program = make([Row(1, 0, 20, 0, 4)])
        runner.accept(program, [[0, 1]])
        stop: Any = World(Qllm2()).ingress.stop
        runner.run(program, START, stop)
        runner.requests[1].layer_work -= lost
        with pytest.raises(InvariantError, match="owed"):
            runner.finish(program)
