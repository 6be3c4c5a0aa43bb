"""The fallback takes over a policy that works for no request, and no other policy."""

import threading
from collections.abc import Collection
from typing import Any

import pytest

from qllm.plan import Plan
from qllm.policy import StepReport, View
from qllm.sim.world import World
from qllm.types import Priority, RequestId, Slo
from qllm_policies.fcfs import Fcfs
from tests.support.blame import (
    ERROR,
    LENGTH,
    Eager,
    N,
    Overflows,
    Remembers,
    assert_ended,
    ids,
    on,
    raises,
    served,
)

LS, BE = Priority.LS, Priority.BE


def test_a_fallback_is_for_policies_that_are_broken_not_for_one_request() -> None:
    world = served(on(3, do=raises), fallback=Fcfs())
    assert_ended(world, 3)
    assert type(world.scheduler.policy).__name__ == "Allergic"


@pytest.mark.parametrize("policy", [on(do=raises), Overflows()])
def test_a_fallback_serves_everybody_where_the_policy_works_for_none(policy: Any) -> None:
    world = served(policy, fallback=Fcfs(), slo=dict.fromkeys(range(N), Slo(ttft_ms=2e6)))
    assert set(world.finished.values()) == {LENGTH}
    assert type(world.scheduler.policy) is Fcfs


def test_a_fallback_serves_a_request_that_is_alone() -> None:
    """Nothing says then whether the policy works for others."""
    world = World(on(0, do=raises))
    world.loop.fallback = Fcfs()
    world.submit(BE, 10, 3)
    world.run(100)
    assert world.finished == {0: LENGTH}


def raising(hook: str, on_any_of: Collection[RequestId] | None) -> Any:
    """A policy of which a hook raises on some requests; None raises whatever it is told."""

    def broken(self: Any, view: View, subject: Any) -> None:
        rows = getattr(subject, "rows", [subject])
        if on_any_of is None or any(row.request_id in on_any_of for row in rows):
            raise ValueError("not that")

    return type("Hooked", (Eager,), {hook: broken})()


@pytest.mark.parametrize("hook", ["on_arrival", "on_step_done"])
@pytest.mark.parametrize("among", [None, range(N)], ids=["whatever", "on every request"])
def test_a_fallback_takes_over_a_hook_that_raises_on_all(hook: str, among: Any) -> None:
    world = served(raising(hook, among), fallback=Fcfs())
    assert set(world.finished.values()) == {LENGTH}, world.loop.policy_errors
    assert type(world.scheduler.policy) is Fcfs
    assert len(world.loop.policy_errors) == 1


@pytest.mark.parametrize("hook", ["on_arrival", "on_step_done"])
def test_a_hook_that_raises_on_all_ends_all_without_a_fallback(hook: str) -> None:
    world = served(raising(hook, None))
    assert set(world.finished.values()) == {ERROR}


@pytest.mark.parametrize("hook", ["on_arrival", "on_step_done"])
@pytest.mark.parametrize("poison", [(3,), (0, 1), (1, 5, 6)])
def test_a_fallback_is_not_for_a_hook_that_raises_on_some(hook: str, poison: Any) -> None:
    policy = raising(hook, poison)
    world = World(policy)
    world.loop.fallback = Fcfs()
    for n in range(N):
        world.submit([LS, BE][n % 2], 10 + n, 6)
    world.run(3000)
    assert world.finished == {n: ERROR if n in poison else LENGTH for n in range(N)}
    assert world.scheduler.policy is policy


class Few(Eager):
    """At most so many requests in a step; its hook raises on some, or whatever it is told."""

    def __init__(self, most: int, poison: Collection[RequestId] | None) -> None:
        self.most, self.poison = most, poison

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return plan if view.frames else Plan(rows=plan.rows[: self.most])

    def on_step_done(self, view: View, report: StepReport) -> None:
        if self.poison is None or any(row.request_id in self.poison for row in report.rows):
            raise ValueError("not that")


def with_fallback(policy: Any, max_tokens: int = 3) -> World:
    """A world that has served five requests, which arrive together."""
    world = World(policy)
    world.loop.fallback = Fcfs()
    for _ in range(5):
        world.submit(BE, 10, max_tokens)
    world.run(300)
    return world


@pytest.mark.parametrize("max_tokens", [1, 3], ids=["of ended rows", "of live rows"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_fallback_replaces_a_hook_that_raises_on_a_few_requests(
    most: int, max_tokens: int
) -> None:
    world = with_fallback(Few(most, None), max_tokens)
    assert set(world.finished.values()) == {LENGTH}
    assert len(world.loop.policy_errors) == 1
    assert type(world.scheduler.policy) is Fcfs


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("poison", [0, 2])
def test_a_fallback_is_not_for_a_hook_that_raises_on_a_row_while_others_wait(
    most: int, poison: int
) -> None:
    world = with_fallback(Few(most, [poison]))
    assert world.finished == {n: ERROR if n == poison else LENGTH for n in range(5)}
    assert type(world.scheduler.policy) is Few


def test_a_fallback_takes_over_a_policy_that_a_hook_has_left_broken() -> None:
    class Ruined(Few):
        is_ruined = False

        def plan(self, view: View) -> Plan:
            assert not self.is_ruined
            return super().plan(view)

        def on_step_done(self, view: View, report: StepReport) -> None:
            self.is_ruined = any(row.request_id == 3 for row in report.rows)
            super().on_step_done(view, report)

    world = with_fallback(Ruined(5, [3]))
    assert set(world.finished.values()) == {LENGTH}
    assert type(world.scheduler.policy) is Fcfs


def test_a_fallback_is_not_for_two_requests_that_each_break_a_plan() -> None:
    class Picky(Eager):
        def plan(self, view: View) -> Plan:
            if ids(view) & {1, 5}:
                raise ValueError("not those")
            return super().plan(view)

    world = served(Picky(), fallback=Fcfs())
    assert {n for n, reason in world.finished.items() if reason is ERROR} == {1, 5}
    assert type(world.scheduler.policy) is Picky


def test_an_arrival_that_is_tried_again_is_not_a_second_one() -> None:
    """A policy may count on a request to arrive once, and on its end to come before the next."""

    class Strict(Remembers):
        def on_arrival(self, view: View, request: Any) -> None:
            assert request.request_id not in self.known
            if request.request_id == 3:
                raise ValueError("not that one")
            super().on_arrival(view, request)

    world = served(Strict(), fallback=Fcfs())
    assert_ended(world, 3)
    assert type(world.scheduler.policy) is Strict


def test_a_policy_that_cannot_be_copied_is_told_of_no_end_that_was_not() -> None:
    told: list[RequestId] = []

    class Locked(Remembers):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def on_arrival(self, view: View, request: Any) -> None:
            if request.request_id == 3:
                raise ValueError("not that one")
            super().on_arrival(view, request)

        def on_finish(self, view: View, request: Any) -> None:
            super().on_finish(view, request)
            told.append(request.request_id)

    assert_ended(served(Locked(), fallback=Fcfs()), 3)
    assert sorted(told) == list(range(N))
