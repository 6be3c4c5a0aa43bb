"""How often an arrival stops passes of one request, and how long it waits where it may not."""

from itertools import pairwise
from typing import Any

import pytest

from qllm.errors import ConfigError
from qllm.ingress import Update
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.sim.check import Watched, check_policy
from qllm.sim.runner import SimCosts
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Priority
from tests.support.scheduling import events, finished_well

LS, BE = Priority.LS, Priority.BE
SLOW = SimCosts(expert_ns=3_000_000, expert_token_ns=60_000, head_ns=2 * NS_PER_MS)
"""A prefill of 400 tokens takes 160 ms."""


def world_of(every_ms: int, num_ls: int, **settings: Any) -> World:
    """A BE prompt of many passes, and an LS request every so often."""
    world = World(load_policy("qllm2", settings), costs=SLOW, scheduler=Watched)
    world.submit(BE, 500, 4)
    for i in range(num_ls):
        world.submit(LS, 8, 1, at_ns=(10 + i * every_ms) * NS_PER_MS)
    world.run()
    assert not world.loop.policy_errors, world.loop.policy_errors
    finished_well(world)
    return world


def longest_wait_ms(world: World) -> float:
    found = [world.metrics[i] for i, item in world.submitted.items() if item.priority == LS]
    return max(m.queue_ms or 0.0 for m in found if m is not None)


def preemptions(world: World) -> int:
    found = world.metrics[0]
    assert found is not None
    return found.preemptions


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_request_is_preempted_as_often_as_it_may_be_and_then_finishes_its_pass(most: int) -> None:
    free = world_of(40, 5)
    assert preemptions(free) > 2
    assert free.scheduler.num_spared == 0
    bound = world_of(40, 5, max_preemptions=most, max_preemption_wait_ms=10_000)
    assert preemptions(bound) == most
    assert bound.scheduler.num_spared >= 1
    assert longest_wait_ms(bound) > longest_wait_ms(free)


@pytest.mark.parametrize("wait_ms", [1, 15, 40])
def test_an_arrival_waits_no_longer_than_declared(wait_ms: int) -> None:
    """Then the bound on preemptions gives way."""
    free = world_of(60, 5)
    bound = world_of(60, 5, max_preemptions=1, max_preemption_wait_ms=wait_ms)
    segment_ms = bound.runner.segments.longest_ns / NS_PER_MS
    assert preemptions(bound) > 1
    waited = longest_wait_ms(bound)
    assert wait_ms <= waited <= longest_wait_ms(free) + wait_ms + 2 * segment_ms


def test_one_arrival_stops_at_most_one_pass() -> None:
    for settings in ({}, {"max_preemptions": 1}):
        world = world_of(25, 12, **settings)
        stops = [e for e in events(world, trace.Parked) if e.preempted]
        assert stops
        arrivals = [e.at_ns for e in events(world, trace.Arrived)]
        times = [0, *(e.at_ns for e in stops)]
        for before, after in pairwise(times):
            assert any(before <= at_ns <= after for at_ns in arrivals)
        assert len(stops) <= 12


def test_an_alarm_does_not_stop_the_pass_again() -> None:
    world = world_of(5, 12, max_preemptions=0, max_preemption_wait_ms=10_000)
    assert preemptions(world) == 0
    assert world.scheduler.num_spared == len(events(world, trace.Parked))  # not once per arrival


def test_an_alarm_of_long_ago_lets_no_later_arrival_pass() -> None:
    """A pass was paused while somebody waited for it: the next arrival has to wait for it too."""
    settings = {"max_preemptions": 0, "max_preemption_wait_ms": 40}
    world = World(load_policy("qllm2", settings), costs=SLOW, scheduler=Watched)
    batch = world.submit(BE, 500, 4)
    first = world.submit(LS, 8, 1, at_ns=10 * NS_PER_MS)
    while not world.scheduler.num_spared:
        world.step()
    world.loop.pending.append(Update(batch, paused=True))
    while first not in world.finished:
        world.step()
    world.clock.at_ns += 100 * NS_PER_MS
    world.loop.pending.append(Update(batch, paused=False))
    at_ns = world.clock.at_ns + 10 * NS_PER_MS
    world.submit(LS, 8, 1, at_ns=at_ns)
    world.run()
    assert not world.loop.policy_errors
    finished_well(world)
    assert world.scheduler.num_spared == 2
    stops = [e.at_ns for e in events(world, trace.Parked) if e.preempted]
    assert all(stop_ns >= at_ns + 40 * NS_PER_MS for stop_ns in stops)


@pytest.mark.parametrize("name", ["qllm2", "priority", "edf", "priority-layered"])
@pytest.mark.parametrize(
    "num_states",
    [400, pytest.param(1500, marks=pytest.mark.slow)],  # the 400 before it are of the same kind
)
def test_policies_keep_the_bound_they_declare(name: str, num_states: int) -> None:
    settings = {"max_preemptions": 1, "max_preemption_wait_ms": 3}
    report = check_policy(load_policy(name, settings), num_states=num_states)
    assert report.num_states >= num_states


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_a_wrong_bound_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_preemptions="):
        load_policy("qllm2", {"max_preemptions": value})
    with pytest.raises(ConfigError, match="max_preemption_wait_ms="):
        load_policy("qllm2", {"max_preemption_wait_ms": 0})


def test_native_decisions_refuse_it() -> None:
    from qllm.device.rank import rank_tree

    with pytest.raises(ConfigError, match="max_preemptions=1; native decisions know no such bound"):
        rank_tree(load_policy("qllm2", {"max_preemptions": 1}))
