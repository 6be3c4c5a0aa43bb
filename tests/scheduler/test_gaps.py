"""Streams beside prompts of their own class: their targets hold, and without one a declared gap."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from qllm.errors import ConfigError, PolicyError
from qllm.plan import NO_CUTS
from qllm.plugins import load_policy
from qllm.policy import Groups, RankPolicy, Ride
from qllm.record import trace
from qllm.scheduler.gaps import Turns
from qllm.scheduler.rank_plan import _Shaper
from qllm.sim.check import flood, watch
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Grain, Priority, Slo
from tests.support.scheduling import events

LS, BE = Priority.LS, Priority.BE
COSTS = SimCosts(expert_ns=300_000, expert_token_ns=10_000, head_ns=NS_PER_MS, attn_token_ns=500)
CUTS = NO_CUTS._replace(max_cost=256.0, expert_block=256)
"""So that a boundary comes after some milliseconds."""
OPEN: dict[str, Any] = {"max_be_stall_ms": None}


class Found(NamedTuple):
    """Times in ms of a stream, and of the prompts that ran next to it."""

    gaps: list[float]
    prompts_ms: float
    """When the last prompt ended."""
    world: World

    @property
    def longest(self) -> float:
        """The longest gap of the stream while prompts were there."""
        return max(self.gaps)


def beside_prompts(
    policy: Any, slo: Slo, *, priority: int = LS, num_prompts: int = 20, **limits: Any
) -> Found:
    """Serve a stream and prompts of its class, all at once, until the prompts are done."""
    limits = {"max_step_tokens": 4096, "max_num_seqs": 32, **limits}
    world = World(policy, replace(LIMITS, **limits), costs=COSTS, cuts=CUTS)
    stream = world.submit(priority, 50, 2000, slo=slo)
    begin_ns = 30 * NS_PER_MS
    prompts = [world.submit(priority, 3000, 1, at_ns=begin_ns) for _ in range(num_prompts)]
    while not all(i in world.finished for i in prompts):
        world.step()
    end_ns = world.clock.at_ns
    tokens = [e.at_ns for e in events(world, trace.Token) if e.request_id == stream]
    gaps = [(b - a) / NS_PER_MS for a, b in pairwise(tokens) if b > begin_ns and b <= end_ns]
    assert not world.loop.policy_errors
    return Found(gaps, (end_ns - begin_ns) / NS_PER_MS, world)


@pytest.mark.parametrize("priority", [LS, BE])
@pytest.mark.parametrize("name", ["qllm2", "priority"])
@pytest.mark.parametrize(("slo", "bound_ms"), [(Slo(), 100), (Slo(tpot_ms=20.0), 20)])
def test_the_gap_of_a_stream_beside_prompts_of_its_class_is_bounded(
    name: str, priority: int, slo: Slo, bound_ms: int
) -> None:
    before = beside_prompts(
        load_policy(name, {"max_prompt_gap_ms": None}), slo, priority=priority, num_prompts=24
    )
    found = beside_prompts(load_policy(name), slo, priority=priority, num_prompts=24)
    segment_ms = found.world.runner.segments.longest_ns / NS_PER_MS
    assert found.longest <= bound_ms + segment_ms * (name == "qllm2") < before.longest / 2
    assert found.prompts_ms < before.prompts_ms * (1.1 if bound_ms == 100 else 1.4)


@pytest.mark.parametrize("slo", [Slo(), Slo(tpot_ms=20.0)])
def test_prompts_beside_nobody_who_decodes_are_not_cut(slo: Slo) -> None:
    """The targets of prompts that wait, and of who has only those, cut nothing."""

    def served(gap_ms: int | None) -> list[Any]:
        world = World(
            load_policy("qllm2", {"max_prompt_gap_ms": gap_ms}), replace(LIMITS), costs=COSTS
        )
        for i in range(6):
            world.submit((LS, BE)[i % 2], 3000, 1, at_ns=i * NS_PER_MS, slo=slo)
        world.run()
        return list(world.record)

    assert served(1) == served(None)


@pytest.mark.parametrize("tpot_ms", [0.001, 1.0, 3.0])
def test_a_target_that_cannot_be_met_leaves_prompts_a_fifth_of_the_time(tpot_ms: float) -> None:
    alone = beside_prompts(load_policy("qllm2", {"max_prompt_gap_ms": None}), Slo())
    found = beside_prompts(load_policy("qllm2"), Slo(tpot_ms=tpot_ms))
    assert found.prompts_ms < 5 * alone.prompts_ms


def test_a_few_prompts_that_end_in_time_share_the_step_of_the_decodes() -> None:
    world = World(load_policy("qllm2"), LIMITS, costs=COSTS)
    stream = world.submit(LS, 50, 40)
    while world.tokens[stream] < 10:
        world.step()
    prompt = world.submit(LS, 40, 1)
    world.run()
    planned = [{row.request_id for row in e.rows} for e in events(world, trace.Planned)]
    assert {stream, prompt} in planned
    assert {prompt} not in planned


def test_a_stream_of_a_worse_class_waits_for_prompts_of_a_better_one() -> None:
    """A target holds against the own class and those behind it, not against better ones."""
    world = World(load_policy("qllm2", OPEN), replace(LIMITS, max_step_tokens=4096), costs=COSTS)
    stream = world.submit(BE, 50, 40, slo=Slo(tpot_ms=5.0))
    while world.tokens[stream] < 10:
        world.step()
    prompt = world.submit(LS, 3000, 1)
    while prompt not in world.finished:
        world.step()
    assert world.tokens[stream] <= 11


FLOODS = [OPEN, {}, {**OPEN, "max_prompt_gap_ms": 10}]


def floods(policy: Any, num: int) -> None:
    """Hold a policy to its gap in random floods."""
    for seed in range(num):
        watch(flood(policy, random.Random(seed)))


@pytest.mark.parametrize("settings", FLOODS)
@pytest.mark.parametrize("name", ["qllm2", "priority"])
def test_random_floods_of_prompts_keep_the_declared_gap(name: str, settings: Any) -> None:
    floods(load_policy(name, settings), 6)


def no_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Shaper, "take_turns", lambda *_: None)


def long_turns(patch: pytest.MonkeyPatch) -> None:
    slice_ns = Turns.slice_ns
    patch.setattr(Turns, "slice_ns", lambda *args: 2 * (slice_ns(*args) or 0) or None)


def no_targets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.gaps._due_ns", lambda r, gap_ns: (r.last_token_ns or 0) + gap_ns)


def prompts_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "slice_ns", lambda self, _: max(self.left_ns, 5 * NS_PER_MS))


def share_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "share", lambda *_: True)


@pytest.mark.parametrize("mutant", [no_turns, long_turns, no_targets, prompts_first, share_always])
def test_the_floods_find_a_scheduler_that_lets_prompts_go_on(
    mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(PolicyError, match=r"lets prompts of its class hold up .* \(I17\)"):
        floods(load_policy("qllm2", FLOODS[2]), 30)


@pytest.mark.parametrize("shape", [{"ride": Ride(unbounded=True)}, {"groups": Groups(64, 4)}])
def test_a_gap_is_refused_where_tiers_share_their_steps(shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_gap_ms=100 needs tiers that run one by one"):
        RankPolicy(max_prompt_gap_ms=100, **shape)


@pytest.mark.parametrize("grain", list(Grain))
def test_without_a_gap_a_step_takes_prompts_whatever_the_target(grain: Grain) -> None:
    policy = load_policy("qllm2", {"max_prompt_gap_ms": None})
    assert beside_prompts(policy, Slo(tpot_ms=5.0), grain=grain).longest > 30
