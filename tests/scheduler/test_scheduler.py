# Over 500 lines: one law of the scheduler per test, next to the policies that attack it.
"""The scheduler, the block pool and the engine loop against the invariants I1 to I14.

Everything runs in a `World`: the real loop around a `SimRunner`, which counts the layers that
every token went through and raises when a row starts elsewhere than at its frontier.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from qllm.errors import ConfigError
from qllm.ingress import StopWord
from qllm.plan import Plan
from qllm.policy import CostTable, RankPolicy, View, next_row
from qllm.record import trace
from qllm.scheduler.batch import MIN_CHUNK
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import Index
from qllm.scheduler.rank_plan import GOOD_SLICE_NS, shape_plan
from qllm.scheduler.ranking import Ranking
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding, ahead_ns, ride_allowance_ns, settle, tpot_target_ns
from qllm.sim.check import Watched, watch
from qllm.sim.check import overload as overloaded_world
from qllm.sim.runner import VirtualClock
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Cap, Evict, FinishReason, Grain, Slo
from qllm_policies.fcfs import Fcfs
from qllm_policies.priority import PriorityPolicy
from qllm_policies.qllm import Qllm
from qllm_policies.qllm2 import Qllm2
from tests.support.scheduling import (
    BE,
    BY_CLASS,
    LS,
    SLOW,
    Eager,
    Fuzz,
    Machine,
    alarm_after,
    events,
    finished_well,
    refused,
    shipped,
    test_a_cancelled_request_ends_at_once_and_gives_back_its_blocks,  # noqa: F401
    test_a_parked_program_does_every_unit_once,  # noqa: F401
    test_a_paused_request_keeps_no_other_from_drafting,  # noqa: F401
    test_a_policy_may_end_drafts_early,  # noqa: F401
    test_a_request_that_drafts_may_be_swapped_out,  # noqa: F401
    test_a_row_with_drafts_is_no_longer_than_a_step,  # noqa: F401
    test_a_stop_at_every_boundary_loses_no_draft,  # noqa: F401
    test_all_blocks_come_back,  # noqa: F401
    test_an_admitted_be_request_never_stalls_longer_than_its_bound,  # noqa: F401
    test_an_ls_arrival_stops_be_inside_the_layer,  # noqa: F401
    test_any_plan_within_the_rules_gives_every_request_its_tokens,  # noqa: F401
    test_bad_plans_are_refused_with_the_rule,  # noqa: F401
    test_be_drafts_nothing_while_ls_decodes,  # noqa: F401
    test_be_rides_along_no_longer_than_its_share,  # noqa: F401
    test_chunks_end_on_cuts_in_the_batch_invariant_mode,  # noqa: F401
    test_draft_rows_have_their_kv_before_they_begin,  # noqa: F401
    test_draft_rows_lose_no_layer_when_ls_comes,  # noqa: F401
    test_draft_rows_that_do_not_pay_become_few,  # noqa: F401
    test_drafts_count_in_the_tokens_of_a_step,  # noqa: F401
    test_drafts_give_every_request_its_tokens,  # noqa: F401
    test_drafts_take_no_kv_from_others,  # noqa: F401
    test_equal_ranks_never_evict_each_other,  # noqa: F401
    test_half_a_frame_is_refused,  # noqa: F401
    test_kv_counts_only_when_the_last_layer_is_reached,  # noqa: F401
    test_more_rows_than_seats_are_refused,  # noqa: F401
    test_no_request_is_evicted_for_one_that_cannot_start,  # noqa: F401
    test_rows_draft_only_for_a_request_that_decodes_alone,  # noqa: F401
    test_the_stop_word_survives_the_race_with_drain,  # noqa: F401
    test_who_fails_twice_fails_alone,  # noqa: F401
    test_wrong_drafts_become_few_also_for_the_next_request,  # noqa: F401
    test_wrong_drafts_cause_no_eviction,  # noqa: F401
    test_wrong_drafts_take_no_kv_that_a_new_prompt_needs,  # noqa: F401
)
from tests.support.watching import has_changed

# -- all of it at once


TestMachine = Machine.TestCase


# -- who gets the KV and the seats


@pytest.mark.parametrize("policy", BY_CLASS)
def test_ls_gets_the_kv_of_a_be_request(policy: Any) -> None:
    world = World(policy, replace(LIMITS, num_blocks=16))
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    chat = world.submit(LS, 100, 3)
    world.run()
    finished_well(world)
    assert [e.request_id for e in events(world, trace.Evicted)] == [batch]
    ends = [e.request_id for e in events(world, trace.Finished)]
    assert ends == [chat, batch]


@pytest.mark.parametrize("policy", BY_CLASS)
def test_ls_gets_the_seat_of_a_be_request(policy: Any) -> None:
    world = World(policy, replace(LIMITS, max_num_seqs=2))
    batch = [world.submit(BE, 20, 60), world.submit(BE, 20, 60)]
    for _ in range(4):
        world.step()
    chat = world.submit(LS, 20, 3)
    world.run()
    finished_well(world)
    assert [e.request_id for e in events(world, trace.Finished)] == [chat, *batch]
    assert not events(world, trace.Evicted)


def test_a_newcomer_without_kv_waits_for_its_equals_whatever_its_key() -> None:
    @dataclass(frozen=True, kw_only=True)
    class ShortestFirst(RankPolicy):
        chunk_tokens: int | None = 64

        def rank(self, *numbers: int) -> tuple[int, int]:
            return 0, numbers[3]

    world = World(ShortestFirst(), replace(LIMITS, num_blocks=16))
    long = world.submit(BE, 200, 3)
    for _ in range(4):
        world.step()
    short = world.submit(BE, 100, 3)
    world.run(200)
    finished_well(world)
    assert [e.request_id for e in events(world, trace.Finished)] == [long, short]


# -- stall bound and riding along


def test_a_part_of_the_bound_is_left_for_pauses_of_the_machine() -> None:
    policy = Qllm2(max_be_stall_ms=1600, ride_frac=0.0)
    worst_ns = watch(overloaded_world(policy, 3000))
    assert 1300 * NS_PER_MS < worst_ns < 1450 * NS_PER_MS, "an eighth of it: 200 ms"


def test_without_a_bound_be_starves_under_the_same_load() -> None:
    policy = Qllm2(max_be_stall_ms=None, ride_frac=0.0)
    assert watch(overloaded_world(policy, 200)) > 400 * NS_PER_MS


def test_the_ride_credit_is_the_slack_of_the_decoding_requests() -> None:
    world = World(Qllm2(ride_frac=0.5))
    world.submit(LS, 10, 9, slo=Slo(tpot_ms=12.0))
    world.submit(LS, 10, 9)
    for _ in range(3):
        world.step()
    requests = list(world.scheduler.requests.values())
    costs = CostTable((2 * NS_PER_MS, 4 * NS_PER_MS), 1)
    target_ns = tpot_target_ns(requests)
    assert tpot_target_ns(requests[1:]) is None
    assert ride_allowance_ns(Qllm2(), costs, 2, target_ns) == 8 * NS_PER_MS
    assert ride_allowance_ns(Qllm2(ride_frac=0.5), costs, 1, None) == NS_PER_MS
    assert ride_allowance_ns(Qllm2(), CostTable((20 * NS_PER_MS,), 1), 2, target_ns) == 0


def test_no_request_rides_without_credit() -> None:
    world = World(Qllm2(max_be_stall_ms=None), costs=SLOW)
    chat = world.submit(LS, 10, 40)
    for _ in range(3):
        world.step()
    batch = world.submit(BE, 200, 4)
    world.step()
    scheduler = world.scheduler
    for credit_ms, rides in ((-20, False), (0, False), (200, True)):
        scheduler.riding = Riding(credit_ms * NS_PER_MS)
        plan = shape_plan(scheduler.view(world.clock()), scheduler.policy)
        assert [row.request_id for row in plan.rows] == [batch if rides else chat]
        assert plan.slice_ns is None or plan.slice_ns <= max(1, credit_ms) * NS_PER_MS
    world.run()


def test_no_request_rides_while_the_best_tier_waits_for_a_seat() -> None:
    """What BE takes then, LS waits for."""
    world = World(Qllm2(max_be_stall_ms=None), limits=replace(LIMITS, max_num_seqs=2), costs=SLOW)
    scheduler = world.scheduler

    def planned() -> list[int]:
        scheduler.riding = Riding(200 * NS_PER_MS)
        plan = shape_plan(scheduler.view(world.clock()), scheduler.policy)
        return [row.request_id for row in plan.rows]

    chats = [world.submit(LS, 10, 40)]
    for _ in range(3):
        world.step()
    batch = world.submit(BE, 500, 4)
    scheduler.riding = Riding(10 * NS_PER_MS)
    world.step()
    assert scheduler.requests[batch].frame_id is not None
    chats.append(world.submit(LS, 10, 40))
    world.step()
    while not scheduler.requests[chats[1]].is_decoding:
        world.step()
    assert planned() == [batch]
    world.submit(LS, 10, 1)
    scheduler.riding = Riding()
    world.step()
    assert scheduler.requests[batch].frame_id is not None
    assert planned() == chats
    world.run()


def test_credit_is_saved_up_to_a_slice_that_is_worth_the_switch() -> None:
    world = World(Qllm2(max_be_stall_ms=None), costs=SLOW)
    chat = world.submit(LS, 10, 40)
    for _ in range(3):
        world.step()
    batch = world.submit(BE, 500, 4)
    world.step()
    scheduler = world.scheduler
    assert 8 * ride_allowance_ns(Qllm2(), scheduler.costs, 1, None) > GOOD_SLICE_NS
    for credit_ns, rides in ((GOOD_SLICE_NS - 1, False), (GOOD_SLICE_NS, True)):
        scheduler.riding = Riding(credit_ns)
        plan = shape_plan(scheduler.view(world.clock()), scheduler.policy)
        assert [row.request_id for row in plan.rows] == [batch if rides else chat]
    world.run()


@pytest.mark.parametrize("grain", [Grain.STEP, Grain.EXPERT])
def test_a_slice_beside_decodes_with_a_target_fits_the_target(grain: Grain) -> None:
    world = World(PriorityPolicy() if grain is Grain.STEP else Qllm2(), costs=SLOW)
    chat = world.submit(LS, 10, 40)
    for _ in range(3):
        world.step()
    scheduler = world.scheduler
    batch = world.submit(BE, 500, 4)
    world.step()
    spare_ns = 30 * NS_PER_MS
    target_ms = (scheduler.costs.decode(1) + spare_ns) / NS_PER_MS
    scheduler.riding = Riding(8 * spare_ns)
    for slo, most_ns in ((Slo(), 8 * spare_ns), (Slo(tpot_ms=target_ms), spare_ns)):
        scheduler.requests[chat].slo = slo
        plan = shape_plan(scheduler.view(world.clock()), scheduler.policy)
        (row,) = plan.rows
        assert row.request_id == batch
        assert plan.slice_ns is not None
        assert 0.9 * most_ns <= plan.slice_ns <= most_ns
        if grain is Grain.STEP:
            price_ns = scheduler.costs.prefill_token_ns
            assert row.num_tokens <= max(MIN_CHUNK, plan.slice_ns // price_ns)
    world.run()


def test_what_a_gap_has_used_is_not_used_again() -> None:
    world = World(Qllm2(), costs=SLOW)
    chat = world.submit(LS, 10, 40)
    for _ in range(3):
        world.step()
    scheduler = world.scheduler
    world.submit(BE, 500, 4)
    world.step()
    spare_ns = 50 * NS_PER_MS
    target_ns = scheduler.costs.decode(1) + spare_ns
    scheduler.requests[chat].slo = Slo(tpot_ms=target_ns / NS_PER_MS)
    now_ns = world.clock()
    for spent_ms, margin_ms, left_ms in ((0, 0, 50), (20, 0, 30), (0, 10, 40), (20, 10, 20)):
        spent_ns, margin_ns = spent_ms * NS_PER_MS, margin_ms * NS_PER_MS
        scheduler.riding = Riding(8 * spare_ns, margin_ns, spent_ns, now_ns - spent_ns)
        plan = shape_plan(scheduler.view(now_ns), scheduler.policy)
        assert plan.slice_ns is not None
        assert left_ms - 5 <= plan.slice_ns / NS_PER_MS <= left_ms
    scheduler.riding = Riding(8 * spare_ns, 0, spare_ns, now_ns - spare_ns)
    plan = shape_plan(scheduler.view(now_ns), scheduler.policy)
    assert [row.request_id for row in plan.rows] == [chat], "the gap is full"
    world.run()


def test_no_more_decodes_join_than_the_target_allows() -> None:
    world = World(Qllm2(), costs=SLOW)
    chat = world.submit(LS, 10, 400)
    batch = [world.submit(BE, 10, 400) for _ in range(6)]
    scheduler = world.scheduler
    while not (
        len(scheduler.requests) == 7
        and all(r.is_decoding and r.frame_id is None for r in scheduler.requests.values())
    ):
        world.step()
    costs = scheduler.costs
    for joining in (1, 3, 6):
        assert costs.decode(joining + 1) < costs.decode(joining + 2)
        target_ns = costs.decode(joining + 1) + 1000
        scheduler.requests[chat].slo = Slo(tpot_ms=target_ns / NS_PER_MS)
        scheduler.riding = Riding(8 * target_ns)
        plan = shape_plan(scheduler.view(world.clock()), scheduler.policy)
        assert [row.request_id for row in plan.rows] == [chat, *batch[:joining]]
    world.run()


def test_what_joins_a_step_adds_no_more_than_two_allowances() -> None:
    world = World(Qllm2(ride_frac=0.25), costs=SLOW)
    best = [world.submit(LS, 10, 400) for _ in range(2)]
    batch = [world.submit(BE, 10, 400) for _ in range(6)]
    scheduler, count = world.scheduler, len(best) + len(batch)
    while not (
        len(scheduler.requests) == count
        and all(r.is_decoding and r.frame_id is None for r in scheduler.requests.values())
    ):
        world.step()
    costs = scheduler.costs
    allowance_ns = costs.decode(2) // 4
    scheduler.riding = Riding(8 * allowance_ns)
    rows = [row.request_id for row in shape_plan(scheduler.view(0), scheduler.policy).rows]
    joined = len(rows) - len(best)
    assert rows == [*best, *batch[:joined]]
    assert 1 <= joined < len(batch)
    added_ns = [costs.decode(2 + n) - costs.decode(2) for n in (joined, joined + 1)]
    assert added_ns[0] <= 2 * allowance_ns < added_ns[1]
    world.run()


def a_step_that_two_joined() -> tuple[World, list[int], list[int]]:
    """A world about to run one step of two LS decodes and BE decodes beside them."""
    world = World(Qllm2(ride_frac=1.0), costs=SLOW)
    best = [world.submit(LS, 10, 400) for _ in range(2)]
    batch = [world.submit(BE, 10, 400) for _ in range(2)]
    scheduler = world.scheduler
    while not (
        len(scheduler.requests) == 4
        and all(r.is_decoding and r.frame_id is None for r in scheduler.requests.values())
    ):
        world.step()
    scheduler.riding = Riding(8 * scheduler.costs.decode(2))
    return world, best, batch


def rows_run(world: World, since: int) -> list[tuple[str, list[int]]]:
    """What ran since an event: how each run ended, and whose rows it had."""
    events = list(world.record)
    planned = {e.frame_id: e for e in events if isinstance(e, trace.Planned)}
    return [
        (e.why, [row.request_id for row in planned[e.frame_id].rows])
        for e in events[since:]
        if isinstance(e, trace.Ran)
    ]


def test_an_ls_arrival_parks_a_step_that_be_joined_once() -> None:
    world, best, batch = a_step_that_two_joined()
    step_ns, since = world.scheduler.costs.decode(2), len(world.record)
    early = world.submit(LS, 30, 2, at_ns=world.clock() + step_ns // 2)
    world.step()
    late = world.submit(LS, 30, 2, at_ns=world.clock() + 1000)
    world.step()
    world.step()
    both = [*best, *batch]
    assert rows_run(world, since) == [("stopped", both), ("done", [early]), ("done", both)]
    assert late in world.scheduler.requests
    world.run()
    finished_well(world)


def test_arrivals_in_a_row_park_a_joined_step_no_second_time() -> None:
    world, best, batch = a_step_that_two_joined()
    step_ns, since = world.scheduler.costs.decode(2), len(world.record)
    for n in range(1, 60):
        world.submit(LS, 30, 1, at_ns=world.clock() + n * step_ns // 6)
    for _ in range(12):
        world.step()
    runs = rows_run(world, since)
    both = [*best, *batch]
    assert runs[0] == ("stopped", both)
    assert ("done", both) in runs[1:4]
    assert runs.count(("stopped", both)) == 1
    world.run()
    finished_well(world)


def test_an_ls_arrival_parks_no_step_of_its_class_alone() -> None:
    world = World(Qllm2(), costs=SLOW)
    chat = world.submit(LS, 10, 400)
    for _ in range(3):
        world.step()
    since = len(world.record)
    world.submit(LS, 30, 2, at_ns=world.clock() + world.scheduler.costs.decode(1) // 2)
    world.step()
    assert rows_run(world, since) == [("done", [chat])]
    world.run()
    finished_well(world)


@pytest.mark.parametrize("prompts", [(900,) * 20, (40,) * 40])
def test_few_gaps_under_a_target_are_longer_than_it(prompts: tuple[int, ...]) -> None:
    world = World(Qllm2(max_be_stall_ms=None), costs=SLOW)
    chat = world.submit(LS, 10, 400)
    for _ in range(3):
        world.step()
    scheduler = world.scheduler
    request = scheduler.requests[chat]
    target_ns = 4 * scheduler.costs.decode(1)
    request.slo = Slo(tpot_ms=target_ns / NS_PER_MS)
    batch = [world.submit(BE, length, 30) for length in prompts]
    gaps, last_ns = [], request.last_token_ns
    while chat not in world.finished:
        world.step()
        if request.last_token_ns != last_ns:
            gaps.append((request.last_token_ns or 0) - (last_ns or 0))
            last_ns = request.last_token_ns
    assert sum(gap > target_ns for gap in gaps) <= 0.03 * len(gaps)
    assert sum(gaps) > 1.2 * len(gaps) * min(gaps), "nobody rode"
    assert any(number in world.finished or scheduler.requests[number].served_ns for number in batch)
    world.run()
    finished_well(world)


def test_a_run_that_ends_where_it_began_counts_for_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runner that stops inside the first units of an op has no other place to name."""
    world = World(Fcfs(), costs=SLOW)
    number, run = world.submit(BE, 50, 2), world.runner.run

    def first_tasks(program: Any, start: Index, stop: Any) -> Index:
        monkeypatch.setattr(world.runner, "run", run)
        world.clock.at_ns += 1000
        return start

    monkeypatch.setattr(world.runner, "run", first_tasks)
    while world.runner.run is first_tasks and number not in world.finished:
        world.step()
    request = world.scheduler.requests[number]
    assert request.served_ns == 1000
    assert request.last_progress_ns == world.clock()
    world.run()
    finished_well(world)


def test_who_is_behind_its_target_is_let_catch_up() -> None:
    """Prefills of its own tier hold a chat up: nobody rides until its mean is at the target."""
    world = World(Qllm2(max_be_stall_ms=None, max_prompt_gap_ms=None), costs=SLOW)
    chat = world.submit(LS, 10, 60)
    for _ in range(3):
        world.step()
    request = world.scheduler.requests[chat]
    target_ns = 2 * world.scheduler.costs.decode(1)
    request.slo = Slo(tpot_ms=target_ns / NS_PER_MS)
    batch = world.submit(BE, 900, 300)
    world.step()
    rode = waited = 0
    while chat not in world.finished:
        if request.num_output_tokens == 12 and len(world.scheduler.requests) == 2:
            for _ in range(8):
                world.submit(LS, 900, 1)
        late = ahead_ns([request], world.clock()) or 0
        served = world.scheduler.requests[batch].served_ns
        world.step()
        if chat not in world.finished and request.is_decoding:
            gained = world.scheduler.requests[batch].served_ns - served
            rode, waited = rode + (gained > 0), waited + (late < 0)
            assert late >= 0 or not gained
    assert rode > 3
    assert waited > 3
    tokens = request.num_output_tokens - 1
    assert (request.last_token_ns or 0) - (request.first_token_ns or 0) <= tokens * target_ns
    world.run()
    finished_well(world)


def test_the_margin_follows_the_gaps() -> None:
    world = World(Qllm2(), costs=SLOW)
    chat = world.submit(LS, 10, 400, slo=Slo(tpot_ms=80.0))
    world.submit(BE, 10, 400)
    world.step()
    scheduler = world.scheduler
    while not all(r.is_decoding for r in scheduler.requests.values()):
        world.step()
    ranking = Ranking(scheduler.policy, scheduler.requests.values())
    ranking.update(world.clock())
    plan = Plan(rows=(next_row(scheduler.requests[chat], scheduler.view(0)),))
    decode = compile_program(
        plan, frame_id=1, samples=[True], shape=scheduler.shape, cuts=scheduler.cuts
    )

    def after(riding: Riding, gap_ms: int) -> Riding:
        start_ns, end_ns = world.clock(), riding.best_ns + gap_ms * NS_PER_MS
        return settle(riding, ranking, scheduler.costs, decode, True, start_ns, end_ns)

    now_ns = world.clock()
    assert after(Riding(0, 7, 0, now_ns), 90).margin_ns == 7, "nobody rode"
    late = after(Riding(0, 512, 1, now_ns), 81)
    assert late[1:] == (512 + 10 * NS_PER_MS, 0, now_ns + 81 * NS_PER_MS)
    assert after(Riding(0, 512, 1, now_ns), 80).margin_ns == 511
    most_ns = 80 * NS_PER_MS
    assert after(Riding(0, most_ns - 1, 1, now_ns), 81).margin_ns == most_ns
    world.run()


def test_the_ride_credit_is_gone_when_one_tier_is_left() -> None:
    world = World(Qllm2(ride_frac=1.0), costs=SLOW)
    world.submit(LS, 10, 6)
    batch = world.submit(BE, 10, 40)
    while len(world.finished) < 1:
        world.step()
    world.step()
    assert world.scheduler.riding.credit_ns == 0
    world.cancel(batch)
    world.run()


# -- stops, parks, resumes


def test_a_false_alarm_resumes_the_same_program() -> None:
    for boundaries in range(1, 14):
        world = World(Qllm2())
        world.submit(BE, 50, 1)
        alarm_after(world, boundaries)
        world.run(50)
        finished_well(world)
        assert len(events(world, trace.Planned)) == 1
        parked, resumed = events(world, trace.Parked), events(world, trace.Resumed)
        assert [e.frame_id for e in parked] == [e.frame_id for e in resumed] == [1]


def test_a_grain_finer_than_the_engine_allows_is_coarsened() -> None:
    world = World(Qllm(), replace(LIMITS, grain=Grain.STEP))
    world.submit(BE, 300, 1)
    alarm_after(world, 1)
    world.run(10)
    assert not events(world, trace.Parked)


def test_rows_that_left_the_sweep_wait_in_their_frame() -> None:
    """Cohort rows leave at layer 1; the frame is stopped above; their mate is cancelled."""

    class Cohort:
        needs = Cap.LAYER_RANGE | Cap.YIELD_LAYER

        def plan(self, view: View) -> Plan:
            if view.frames:
                return Plan(rows=view.frames[0].rows, grain=Grain.LAYER)
            rows = [next_row(r, view) for r in view.requests]
            if len(rows) == 2 and rows[1].start_layer == 0:
                rows[1] = rows[1]._replace(end_layer=1)
            return Plan(rows=tuple(rows), grain=Grain.LAYER, stop_below=1)

    for cancelled in (None, 0, 1):
        world = World(Cohort())
        world.submit(LS, 30, 2)
        world.submit(BE, 40, 2)
        alarm_after(world, 2)
        world.step()
        assert {r.frame_id for r in world.scheduler.requests.values()} == {1}
        assert [row.request_id for row in world.scheduler.view(0).frames[0].rows] == [0]
        if cancelled is not None:
            world.cancel(cancelled)
        world.run(50)
        assert not world.loop.policy_errors
        assert all(world.tokens[i] == 2 for i in (0, 1) if i != cancelled)


def test_a_word_that_is_down_before_and_during_a_run_changes_once() -> None:
    stop = StopWord(VirtualClock())
    first = stop.watch()
    stop.lower(10)
    assert has_changed(first)
    second = stop.watch()
    stop.lower(11)
    assert not has_changed(second), "a worse arrival changes nothing"
    stop.lower(3)
    assert has_changed(second)


# -- errors


def test_a_suspect_without_kv_waits() -> None:
    """The rerun of a suspect takes no more KV than there is, and blames nobody."""
    world = World(Fcfs(chunk_tokens=32), replace(LIMITS, num_blocks=16, max_step_tokens=512))
    world.submit(LS, 60, 60)
    world.submit(LS, 200, 2)
    world.step()
    world.runner.poisoned = {1: 1}
    world.run(300)
    assert not world.loop.policy_errors
    finished_well(world)


def test_a_timeout_stops_a_long_program() -> None:
    world = World(Qllm2(), costs=SLOW)
    late = world.submit(BE, 400, 5, timeout_ns=4 * NS_PER_MS)
    world.run(20)
    assert world.finished == {late: FinishReason.TIMEOUT}
    assert world.clock.at_ns < 8 * NS_PER_MS


def test_a_failure_that_passed_is_forgotten() -> None:
    world = World(Fcfs())
    request_id = world.submit(BE, 20, 6)
    for reached in (0, 2, 4):
        while not world.finished and world.tokens[request_id] < reached:
            world.step()
        world.runner.poisoned = {request_id: 1}
        world.step()
        assert world.runner.poisoned == {request_id: 0}
    world.run(100)
    assert world.finished == {request_id: FinishReason.LENGTH}


def test_a_cancel_that_stops_a_pass_is_no_preemption() -> None:
    world = World(Qllm2(), replace(LIMITS, max_num_seqs=1), costs=SLOW)
    runs, goes = world.submit(BE, 400, 2), world.submit(BE, 40, 2)
    world.cancel(goes, at_ns=5 * NS_PER_MS)
    world.run(100)
    assert world.finished == {goes: FinishReason.CANCELLED, runs: FinishReason.LENGTH}
    assert [e.why for e in events(world, trace.Ran)][:2] == ["slice", "done"]
    assert world.loop.num_preemptions == 0
    assert not world.loop.preempt_latencies_ns


class Sliced:
    """One row after the other, in slices of 50 ms."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

    def plan(self, view: View) -> Plan:
        request = min(view.requests, key=lambda r: r.request_id)
        row = next_row(request, view, view.max_step_tokens)
        return Plan(rows=(row,), grain=Grain.EXPERT, slice_ns=50 * NS_PER_MS)


@pytest.mark.parametrize("policy", [Qllm2(), Sliced()], ids=["qllm2", "sliced"])
@pytest.mark.parametrize("grain", [Grain.EXPERT, Grain.LAYER])
def test_a_timeout_of_a_waiting_request_stops_the_pass_of_another(
    policy: Any, grain: Grain
) -> None:
    world = World(policy, replace(LIMITS, grain=grain, max_num_seqs=1), costs=SLOW)
    runs = world.submit(BE, 400, 3)
    deadline_ns = 7 * NS_PER_MS
    late = world.submit(BE, 40, 5, timeout_ns=deadline_ns)
    world.run(200)
    assert world.finished == {late: FinishReason.TIMEOUT, runs: FinishReason.LENGTH}
    assert world.tokens == {runs: 3}
    (ended_ns,) = [e.at_ns for e in events(world, trace.Finished) if e.request_id == late]
    first, second, *_ = events(world, trace.Ran)
    assert (first.why, second.why, second.start) == ("slice", "done", first.end)
    assert deadline_ns <= first.at_ns == ended_ns
    if grain is Grain.EXPERT:
        assert ended_ns < deadline_ns + world.runner.segments.longest_ns
    else:
        assert first.end.pos == 0, "it stopped inside a layer"
        assert second.at_ns - second.start_ns >= 4 * SLOW.expert_ns, "a whole layer is left"
    assert not events(world, trace.Killed), "a request that waits has no row"


def broken(kind: str, method: str = "plan", error: type[Exception] = ValueError) -> Any:
    """A policy that raises in one of its methods."""

    def raise_it(self: Any, *args: Any) -> Any:
        raise error("no idea")

    return type(kind, (Eager,), {method: raise_it})()


@pytest.mark.parametrize("method", ["plan", "on_arrival", "on_step_done", "on_finish"])
def test_a_policy_that_raises_is_named_and_the_engine_lives(method: str) -> None:
    world = World(broken("Clumsy", method))
    request_id = world.submit(BE, 10, 3)
    world.run(20)
    world.step()
    assert "policy Clumsy raised" in world.loop.policy_errors[0]
    assert "ValueError: no idea" in world.loop.policy_errors[0]
    if method != "on_finish":
        assert world.finished == {request_id: FinishReason.ERROR}
    world.scheduler.policy = Fcfs()
    world.scheduler.hook_errors.clear()
    assert world.submit(BE, 10, 3) == 1
    world.run(20)
    assert world.finished[1] is FinishReason.LENGTH


def test_a_policy_that_raises_in_victims_is_named() -> None:
    world = World(broken("Clumsy", "victims"), replace(LIMITS, num_blocks=8))
    world.submit(BE, 100, 3)
    world.step()
    world.submit(LS, 100, 3)
    world.run(20)
    assert "policy Clumsy raised ValueError: no idea" in world.loop.policy_errors[0]


def test_a_rank_that_raises_after_a_run_is_named() -> None:
    calls = []

    @dataclass(frozen=True, kw_only=True)
    class Late(Qllm2):
        def rank(self, *numbers: int) -> tuple[int, int]:
            calls.append(numbers)
            if len(calls) == 2:
                raise ValueError("too late")
            return numbers[1], numbers[0]

    world = World(Late())
    world.submit(BE, 10, 3)
    world.run(20)
    assert "policy Late raised ValueError: too late" in world.loop.policy_errors[0]


def test_what_a_broken_plan_evicted_is_not_forgotten() -> None:
    """Effects of a decision that came to nothing still reach the runner."""

    class HalfBad(Eager):
        def plan(self, view: View) -> Plan:
            order = sorted(view.requests, key=lambda r: -r.request_id)
            return Plan(rows=tuple(next_row(r, view) for r in order))

        def victims(self, view: View, need: int, keep: frozenset[int]) -> Any:
            if 1 in keep and 2 in keep:
                raise ValueError("tired")
            return [(0, Evict.RECOMPUTE)]

    world = World(HalfBad(), replace(LIMITS, num_blocks=10))
    world.loop.fallback = Fcfs()
    world.submit(BE, 140, 3)
    world.step()
    world.submit(LS, 150, 3)
    world.submit(LS, 40, 3)
    world.run(100)
    assert "tired" in world.loop.policy_errors[0]
    finished_well(world)


def test_dropping_without_rows_is_a_plan() -> None:
    class Dropper(Eager):
        def plan(self, view: View) -> Plan:
            dropped = [r.request_id for r in view.requests if r.num_computed_tokens == 20]
            if dropped and not view.requests[0].served_ns > 50 * NS_PER_MS:
                return Plan(drop=tuple(dropped))
            return super().plan(view)

    world = World(Dropper(), costs=SLOW)
    world.submit(BE, 20, 3)
    world.run(50)
    assert events(world, trace.Evicted)
    finished_well(world)


def test_a_fallback_goes_on_with_what_the_broken_policy_left() -> None:
    for seed in range(8):
        for fallback in shipped():
            world = World(Fuzz(seed))
            world.loop.fallback = fallback
            for priority in (0, 10, 10, 0):
                world.submit(priority, 300, 3)
            for _ in range(3 + seed):
                world.step()
            world.scheduler.policy = broken("Clumsy")
            world.run(500)
            assert len(world.loop.policy_errors) == 1, world.loop.policy_errors
            finished_well(world)


# -- bad plans are refused, with the reason


def test_a_request_planned_twice_is_refused() -> None:
    class Twice(Eager):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            return replace(plan, rows=plan.rows * 2)

    assert "policy Twice planned request 0 twice in one step (I5)" in refused(Twice())


def test_an_empty_plan_with_work_waiting_is_refused() -> None:
    class Idle(Eager):
        def plan(self, view: View) -> Plan:
            return Plan()

    assert "policy Idle returned an empty plan with 1 requests waiting" in refused(Idle())
    assert "(I8)" in refused(Idle())


def test_a_victim_never_outranks_the_request_it_is_evicted_for() -> None:
    class Greedy(Eager):
        def victims(self, view: View, need: int, keep: frozenset[int]) -> Any:
            return [(i, Evict.RECOMPUTE) for i in keep]

    class Swapper(Eager):
        def victims(self, view: View, need: int, keep: frozenset[int]) -> Any:
            return [(r.request_id, "swap") for r in view.requests if r.priority]

    class Upstart(Eager):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            return replace(plan, rows=plan.rows[::-1])

        def victims(self, view: View, need: int, keep: frozenset[int]) -> Any:
            return [(r.request_id, Evict.RECOMPUTE) for r in view.requests if not r.priority]

    assert "which outranks the row (I6)" in refused(Greedy(), blocks=8)
    assert "says 'swap' of request" in refused(Swapper(), blocks=8)
    world = World(Upstart(), replace(LIMITS, num_blocks=10))
    world.submit(LS, 100, 9)
    world.step()
    world.submit(BE, 100, 4)
    world.step()
    assert "its equal or better (I6)" in world.loop.policy_errors[0]


def test_a_missing_capability_is_refused_at_start() -> None:
    bad = type("Inside", (Eager,), {"needs": Cap.YIELD_EXPERT | Cap.YIELD_LAYER})()
    with pytest.raises(ConfigError, match=r"policy Inside needs .*YIELD_EXPERT"):
        World(bad, replace(LIMITS, capabilities=Cap.YIELD_LAYER))
    with pytest.raises(ConfigError, match="neither a RankPolicy nor has a plan"):
        World(type("Empty", (), {"needs": Cap.NONE})())


def test_the_same_view_gives_the_same_plan() -> None:
    world = World(Qllm2(), scheduler=Watched)
    for priority in (0, 10, 10):
        world.submit(priority, 90, 4)
    while not world.idle:
        if world.scheduler.requests:
            view = world.scheduler.view(world.clock.at_ns)
            assert shape_plan(view, Qllm2()) == shape_plan(view, Qllm2())
        world.step()
    finished_well(world)


def test_a_chunk_that_is_moved_to_its_cut_is_charged_for_all_of_it() -> None:
    """At level L2 64 tokens of a prompt of 600 become 600: BE waits for KV, and nothing breaks."""
    limits = replace(LIMITS, num_blocks=64, batch_invariant=True)
    world = World(Qllm2(chunk_tokens=64), limits, costs=SLOW)
    chat = world.submit(LS, 500, 400, slo=Slo(tpot_ms=1000.0))
    for _ in range(20):
        world.step()
    late = world.submit(BE, 600, 8)
    world.run()
    assert not world.loop.policy_errors
    assert world.finished == dict.fromkeys((chat, late), FinishReason.LENGTH)


def test_a_policy_hears_of_requests_of_a_checkpoint() -> None:
    heard: list[int] = []

    class Listens(Fcfs):
        def on_arrival(self, view: View, request: Any) -> None:
            heard.append(request.request_id)

    world = World(Listens())
    request = Request(request_id=7, priority=LS, arrival_ns=5, num_prompt_tokens=9, max_tokens=3)
    world.scheduler.adopt(request)
    assert heard == [7]
