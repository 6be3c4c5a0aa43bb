"""Laws of the shapes around a `RankPolicy`.

`test_shapes.py` runs them; `test_mutants.py` breaks the code and runs them again.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from qllm.plan import ModelShape, Plan, Row
from qllm.plugins import load_policy
from qllm.policy import Cap, CostTable, Reads, View, next_row
from qllm.record import trace
from qllm.scheduler.rank_plan import shape_plan
from qllm.scheduler.ranking import rank_all
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.check import overload, watch
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Grain, Priority, Slo
from qllm_policies.chunked import Chunked
from qllm_policies.chunked_priority import ChunkedPriority
from qllm_policies.edf import Edf
from qllm_policies.fcfs import Fcfs
from qllm_policies.layered import Layered
from qllm_policies.priority_layered import PriorityLayered
from tests.support.scheduling import alarm_after, events, finished_well, work_is_exact

LS, BE = Priority.LS, Priority.BE

DEEP = ModelShape(12, 4, 2, (False,) + (True,) * 11, 97, 4096)


def deep(policy: Any, **limits: Any) -> World:
    return World(policy, replace(LIMITS, **limits), shape=DEEP)


def programs(world: World) -> list[tuple[Row, ...]]:
    return [event.rows for event in events(world, trace.Planned)]


def is_prefill(world: World, row: Row) -> bool:
    return row.lo < len(world.submitted[row.request_id].token_ids)


def ends_well(world: World) -> None:
    """Serve to the end; work is exact after every step, and nobody is left."""
    for _ in range(3000):
        if world.idle:
            break
        world.step()
        work_is_exact(world)
    finished_well(world)
    assert not world.loop.policy_errors


@pytest.mark.parametrize("policy", [Chunked(step_tokens=24), ChunkedPriority(step_tokens=24)])
def test_a_step_has_no_more_tokens_than_its_budget(policy: Any) -> None:
    world = World(policy)
    for i in range(5):
        world.submit((LS, BE)[i % 2], 60, 20, at_ns=i * 30 * NS_PER_MS)
    ends_well(world)
    sizes = [sum(row.num_tokens for row in rows) for rows in programs(world)]
    assert max(sizes) == 24
    mixed = [rows for rows in programs(world) if len({is_prefill(world, r) for r in rows}) == 2]
    assert any(sum(row.num_tokens for row in rows) == 24 for rows in mixed)


def test_the_chunk_of_edf_is_what_the_tightest_decode_can_wait_for() -> None:
    world = World(Edf(min_chunk_tokens=8, tpot_ms=50), replace(LIMITS, max_step_tokens=400))
    world.submit(LS, 4, 9, slo=Slo(tpot_ms=20.0))
    world.submit(BE, 4, 9)
    world.step()
    world.submit(BE, 1000, 1)
    world.loop.take()
    scheduler, now = world.scheduler, world.clock()
    scheduler.costs = CostTable((2 * NS_PER_MS, 4 * NS_PER_MS), 100_000)

    def chunk(passed_ms: int) -> int:
        plan = shape_plan(scheduler.view(now + passed_ms * NS_PER_MS), scheduler.policy)
        assert len(plan.rows) == 3
        return plan.rows[-1].num_tokens

    assert chunk(0) == (20 - 4) * 10
    assert chunk(9) == (20 - 4 - 9) * 10
    assert chunk(19) == 8
    assert chunk(500) == 8
    world.cancel(0)
    world.loop.take()
    now = scheduler.requests[1].last_token_ns or 0
    plan = shape_plan(scheduler.view(now), scheduler.policy)
    assert plan.rows[-1].num_tokens == 400, "50 ms are enough for the token budget"
    world.run()


def test_a_layered_prefill_is_one_pass_with_all_decodes_in_every_step() -> None:
    world = deep(Layered(group_tokens=32))
    decoding = [world.submit(LS, 8, 40), world.submit(BE, 8, 40)]
    for _ in range(2):
        world.step()
    cohort = [world.submit(BE, 100, 2), world.submit(LS, 60, 2)]
    world.step()
    late = world.submit(LS, 5, 2)
    ends_well(world)
    steps = [rows for rows in programs(world) if cohort[0] in {row.request_id for row in rows}][:5]
    assert [
        {(r.start_layer, r.end_layer) for r in rows if r.request_id in cohort} for rows in steps
    ] == [{(0, 2)}, {(2, 4)}, {(4, 7)}, {(7, 9)}, {(9, 12)}]
    for rows in steps:
        at = {row.request_id: row for row in rows}
        assert set(at) == {*decoding, *cohort}, "the newcomer waits for the next cohort"
        assert all((at[i].start_layer, at[i].end_layer) == (0, 12) for i in decoding)
    assert late in {row.request_id for rows in programs(world) for row in rows}


def test_a_cohort_is_not_evicted_for_its_equals() -> None:
    """A BE decode that has to grow waits for the parked BE cohort, which has the last blocks."""
    world = deep(PriorityLayered(group_tokens=10), num_blocks=14)
    old = world.submit(BE, 10, 30)
    world.step()
    new = world.submit(BE, 150, 1)
    while world.tokens[old] < 4:
        world.step()
    chat = world.submit(LS, 40, 2)
    waits = 0
    while new not in world.finished:
        world.step()
        waits += old not in {row.request_id for row in programs(world)[-1]}
    assert waits
    assert chat in world.finished
    assert not events(world, trace.Evicted)
    ends_well(world)


@pytest.mark.parametrize("seats", [1, 2, 8])
def test_a_parked_cohort_never_stands_still_longer_than_its_bound(seats: int) -> None:
    policy = PriorityLayered(group_tokens=50, max_be_stall_ms=200)
    world = overload(policy, 200)
    world.scheduler.limits = replace(world.scheduler.limits, max_num_seqs=seats)
    assert watch(world) > 50 * NS_PER_MS
    finished_well(world)
    assert any(row.start_layer > 0 for rows in programs(world) for row in rows)


def test_rows_that_wait_in_a_frame_keep_their_layers_when_it_dies_inside_one() -> None:
    class Cohort:
        needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

        def plan(self, view: View) -> Plan:
            rows = [next_row(r, view) for r in view.requests]
            if len(rows) == 2 and rows[1].start_layer == 0:
                rows[1] = rows[1]._replace(end_layer=1)
            return Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=1)

    inside = 0
    for boundaries in range(3, 14):
        world = World(Cohort())
        dies, waits = world.submit(LS, 30, 2), world.submit(BE, 40, 2)
        alarm_after(world, boundaries)
        world.step()
        parked = events(world, trace.Parked)
        inside += parked[0].inside_layer
        world.cancel(dies)
        world.step()
        assert not events(world, trace.Dropped)
        work_is_exact(world)
        ran = [row.start_layer for row in programs(world)[-1] if row.request_id == waits]
        assert ran == [1]
        world.run(50)
        assert world.tokens[waits] == 2
    assert inside > 5


class Compared(Scheduler):
    """Compares the ranking that was kept with one made from nothing, at every decision."""

    def _ask(self, view: View) -> Plan:
        plan = super()._ask(view)
        kept = self._ranked(view.now_ns)
        assert kept is not None
        both = sorted(kept.admitted + kept.waiting)
        assert both == rank_all(view.requests, view.now_ns, self.policy)
        assert all(x.request.is_admitted for x in kept.admitted)
        assert not any(x.request.is_admitted for x in kept.waiting)
        assert plan == shape_plan(view, self.policy)
        return plan


@dataclass(frozen=True, kw_only=True)
class Served(Fcfs):
    """Least served first; older than a second first of all."""

    reads = Reads.TIME

    def rank(self, *numbers: int) -> tuple[int, int]:
        return 0 if numbers[6] - numbers[0] > 20 * NS_PER_MS else numbers[1], numbers[5]


def crowd(policy: Any, seed: int) -> World:
    r = random.Random(seed)
    blocks = r.choice([26, 40, 400])
    limits = replace(LIMITS, num_blocks=blocks, max_num_seqs=r.choice([2, 8]), max_step_tokens=128)
    world = World(policy, limits, scheduler=Compared)
    for _ in range(14):
        slo = r.choice([Slo(), Slo(ttft_ms=40.0, tpot_ms=10.0)])
        at_ns = r.randint(0, 200) * NS_PER_MS
        i = world.submit(r.choice([LS, 3, BE]), r.randint(1, 300), 5, at_ns=at_ns, slo=slo)
        if r.random() < 0.2:
            world.cancel(i, at_ns + r.randint(1, 90) * NS_PER_MS)
        elif r.random() < 0.1:
            world.runner.poisoned[i] = 1
    return world


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["served", "qllm2", "edf", "chunked-priority", "priority-layered"])
def test_a_kept_ranking_is_the_ranking(name: str, seed: int) -> None:
    policy = Served(chunk_tokens=40) if name == "served" else load_policy(name)
    world = crowd(policy, seed)
    world.run(4000)
    assert not world.loop.policy_errors
