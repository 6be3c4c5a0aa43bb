"""The shapes around a `RankPolicy`: budgets, slack, cohorts; and ranks that are kept."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.errors import ConfigError, InvariantError
from qllm.plan import NO_CUTS
from qllm.plugins import installed_policies, load_policy
from qllm.policy import Groups, RankPolicy, Reads
from qllm.record import trace
from qllm.scheduler.ranking import Ranking
from qllm.sim.check import overload, watch
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, FinishReason, Slo
from qllm_policies.chunked_priority import ChunkedPriority
from qllm_policies.edf import Edf
from qllm_policies.fcfs import Fcfs
from qllm_policies.layered import Layered
from qllm_policies.priority_layered import PriorityLayered
from tests.support.scheduling import alarm_after, events, work_is_exact
from tests.support.shape_laws import (
    BE,
    DEEP,
    LS,
    Served,
    crowd,
    deep,
    ends_well,
    is_prefill,
    programs,
    test_a_cohort_is_not_evicted_for_its_equals,  # noqa: F401
    test_a_kept_ranking_is_the_ranking,  # noqa: F401
    test_a_layered_prefill_is_one_pass_with_all_decodes_in_every_step,  # noqa: F401
    test_a_parked_cohort_never_stands_still_longer_than_its_bound,  # noqa: F401
    test_a_step_has_no_more_tokens_than_its_budget,  # noqa: F401
    test_rows_that_wait_in_a_frame_keep_their_layers_when_it_dies_inside_one,  # noqa: F401
    test_the_chunk_of_edf_is_what_the_tightest_decode_can_wait_for,  # noqa: F401
)

SLOW = SimCosts(expert_ns=NS_PER_MS, head_ns=2 * NS_PER_MS)


# -- chunks


def test_decodes_of_every_class_are_in_every_step_of_a_chunked_prefill() -> None:
    world = World(ChunkedPriority(step_tokens=16))
    old = [world.submit(LS, 4, 60), world.submit(BE, 4, 60)]
    world.step()
    new = world.submit(LS, 100, 2)
    ends_well(world)
    steps = [rows for rows in programs(world) if new in {row.request_id for row in rows}]
    assert len(steps) > 7
    assert all({row.request_id for row in rows} >= set(old) for rows in steps)


def test_edf_gives_requests_without_targets_its_own() -> None:
    policy = Edf(ttft_ms=100)
    world = World(policy, replace(LIMITS, max_step_tokens=50))
    plain = world.submit(BE, 50, 2)
    late = world.submit(BE, 50, 2, slo=Slo(ttft_ms=400.0))
    soon = world.submit(BE, 50, 2, slo=Slo(ttft_ms=30.0))
    ends_well(world)
    first = {e.request_id: e.at_ns for e in reversed(events(world, trace.Token))}
    assert sorted(first, key=first.__getitem__) == [soon, plain, late]


# -- cohorts


@given(st.integers(1, 9000), st.integers(1, 600), st.integers(1, 32), st.integers(1, 64))
def test_a_cohort_crosses_the_model_in_its_number_of_groups(
    tokens: int, unit: int, most: int, layers: int
) -> None:
    groups, cuts = Groups(unit, most), [0]
    while cuts[-1] < layers:
        cuts.append(groups.next_cut(tokens, cuts[-1], layers))
    assert len(cuts) - 1 == max(1, min(-(-tokens // unit), most, layers))
    sizes = [b - a for a, b in pairwise(cuts)]
    assert max(sizes) - min(sizes) <= 1


def test_an_ls_cohort_overtakes_a_be_cohort_at_its_group_boundary() -> None:
    world = deep(PriorityLayered(group_tokens=25))
    chat = world.submit(LS, 5, 60)
    world.step()
    batch = world.submit(BE, 100, 3)
    world.step()
    world.step()
    assert world.scheduler.requests[batch].frontier == (0, 100, 6)
    new = world.submit(LS, 20, 3)
    world.step()
    rows = {row.request_id: row for row in programs(world)[-1]}
    assert set(rows) == {chat, new}
    assert world.tokens[new] == 1
    world.step()
    rows = {row.request_id: row for row in programs(world)[-1]}
    assert set(rows) == {chat, new, batch}
    assert (rows[batch].start_layer, rows[batch].end_layer) == (6, 9)
    ends_well(world)
    metrics = world.metrics[batch]
    assert metrics is not None
    assert metrics.evictions == 0


def test_a_cohort_goes_on_without_a_member_that_was_cancelled_or_evicted() -> None:
    for end in ("cancel", "evict", "poison"):
        for step in range(1, 6):
            world = deep(Layered(group_tokens=40))
            ids = [world.submit(BE, 80, 3) for _ in range(3)]
            for _ in range(step):
                world.step()
            if end == "cancel":
                world.cancel(ids[1])
            elif end == "poison":
                world.runner.poisoned = {ids[1]: 1}
            else:
                for effect in world.scheduler.evict(ids[1], ids[1]):
                    world.loop.effects.apply(effect)
            while not world.idle:
                world.step()
                work_is_exact(world)
            kept = [i for i in ids if not (end == "cancel" and i == ids[1])]
            assert all(world.finished[i] is FinishReason.LENGTH for i in kept)
            assert not world.loop.policy_errors


def test_a_member_that_was_left_behind_catches_up() -> None:
    world = deep(PriorityLayered(group_tokens=25, max_be_stall_ms=None), max_num_seqs=2)
    batch = [world.submit(BE, 50, 2), world.submit(BE, 50, 2)]
    world.step()
    chat = world.submit(LS, 5, 4)
    world.step()
    layers = []
    while chat not in world.finished:
        layers.append(tuple(world.scheduler.requests[i].frontier.layer for i in batch))  # type: ignore[union-attr]
        world.step()
    assert layers == [(3, 3), (6, 3), (6, 6)]
    ends_well(world)


def test_an_ls_prompt_takes_the_kv_of_a_parked_be_cohort() -> None:
    world = deep(PriorityLayered(group_tokens=20), num_blocks=12)
    batch = world.submit(BE, 150, 2)
    world.step()
    chat = world.submit(LS, 60, 2)
    ends_well(world)
    assert [e.request_id for e in events(world, trace.Evicted)] == [batch]
    assert [e.request_id for e in events(world, trace.Finished)] == [chat, batch]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", [Layered(group_tokens=30), PriorityLayered(group_tokens=30)])
def test_cohorts_with_cuts_at_absolute_positions(policy: Any, seed: int) -> None:
    """In L2 a chunk may grow to its first cut, past the token budget; the cohort keeps it."""
    r = random.Random(seed)
    cuts = NO_CUTS._replace(min_block=16, max_block=64)
    limits = replace(LIMITS, batch_invariant=True, max_step_tokens=70, num_blocks=40)
    world = World(policy, limits, shape=DEEP, cuts=cuts)
    for i in range(6):
        world.submit(r.choice([LS, BE]), r.randint(1, 200), 3, at_ns=i * 5 * NS_PER_MS)
    ends_well(world)
    rows = [row for p in programs(world) for row in p if is_prefill(world, row)]
    assert any(0 < row.start_layer < 12 for row in rows)
    for row in rows:
        assert row.hi % 64 == 0 or row.hi >= len(world.submitted[row.request_id].token_ids)


def test_a_frame_of_another_policy_is_finished_first() -> None:
    world = deep(load_policy("qllm2"))
    batch = [world.submit(BE, 100, 3), world.submit(BE, 40, 3)]
    alarm_after(world, 9)
    world.step()
    assert world.scheduler.frames
    world.scheduler.policy = PriorityLayered(group_tokens=20)
    world.submit(LS, 30, 3)
    ends_well(world)
    assert [e.frame_id for e in events(world, trace.Resumed)] == [1]
    assert batch


# -- the stall bound of cohorts


def test_without_a_bound_a_parked_cohort_starves() -> None:
    world = overload(PriorityLayered(group_tokens=50, max_be_stall_ms=None), 200)
    assert watch(world) > 400 * NS_PER_MS


# -- rows that wait in a frame that dies inside a layer


# -- ranks that are kept


@pytest.mark.parametrize("reads", [Reads.FIXED, Reads.PROGRESS])
def test_a_policy_that_reads_more_than_it_says_is_noticed(reads: Reads) -> None:
    liar = type("Liar", (Served,), {"reads": reads})()
    with pytest.raises(AssertionError):
        crowd(liar, 0).run(4000)


def test_a_rank_of_a_subclass_reads_what_the_subclass_says() -> None:
    class Mine(Fcfs):
        def rank(self, *numbers: int) -> tuple[int, int]:
            return 0, numbers[6]

    class Same(Fcfs):
        pass

    assert (Fcfs.reads, Mine.reads, Same.reads) == (Reads.FIXED, Reads.TIME, Reads.FIXED)


NUMBERS = st.integers(0, 1 << 62)


@settings(max_examples=25, deadline=None)
@given(a=st.tuples(*[NUMBERS] * 7), b=st.tuples(*[NUMBERS] * 7))
@pytest.mark.parametrize("name", sorted(installed_policies()))
def test_a_shipped_rank_reads_what_it_says(
    name: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    policy = load_policy(name)
    if not isinstance(policy, RankPolicy):
        return
    same = (0, 1, 3) if policy.reads is Reads.FIXED else (0, 1, 2, 3, 4, 5)
    if policy.reads is not Reads.TIME:
        mixed = [x if i in same else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
        assert policy.rank(*a) == policy.rank(*mixed)


def test_a_request_in_the_wrong_place_is_found() -> None:
    world = World(Fcfs())
    world.submit(BE, 10, 3)
    world.step()
    ranking = world.scheduler._ranking
    assert isinstance(ranking, Ranking)
    requests = world.scheduler.requests.values()
    ranking.update(0)
    ranking.check(requests)
    ranking.waiting, ranking.admitted = ranking.admitted, []
    with pytest.raises(InvariantError, match="request 0 is ranked in the wrong place"):
        ranking.check(requests)
    ranking.waiting = []
    with pytest.raises(InvariantError, match="ranked are"):
        ranking.check(requests)


def test_a_tier_that_is_no_priority_is_counted() -> None:
    """Where there is one, any arrival stops a pass: the stop word speaks of priorities."""
    world = World(Fcfs())
    world.submit(BE, 10, 3)
    world.step()
    ranking, requests = world.scheduler._ranking, world.scheduler.requests.values()
    assert isinstance(ranking, Ranking)
    ranking.update(0)
    assert ranking.num_own_tiers == 1
    ranking.num_own_tiers = 0
    with pytest.raises(InvariantError, match="1 requests have tiers of their own, not 0"):
        ranking.check(requests)
    ranking.num_own_tiers = 1
    world.run()
    assert ranking.num_own_tiers == 0


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("chunked", {"step_tokens": 0}),
        ("fcfs", {"chunk_tokens": 0}),
        ("layered", {"group_tokens": -1}),
        ("priority-layered", {"max_groups": 1.5}),
        ("priority-layered", {"max_be_stall_ms": 10}),
        ("edf", {"min_chunk_tokens": 0}),
        ("edf", {"tpot_ms": 0}),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, bad: dict[str, Any]) -> None:
    (key,) = bad
    with pytest.raises(ConfigError, match=f"{key}="):
        load_policy(name, bad)
