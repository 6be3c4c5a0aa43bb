"""A policy that breaks on one request ends that one: the others go on with the same tokens."""

import copy
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from qllm.errors import ConfigError, PolicyError
from qllm.plan import Plan
from qllm.policy import StepReport, View, next_row
from qllm.scheduler.blame import Blame, newest_needed
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_S, Evict, RequestId, Slo
from qllm_policies.fcfs import Fcfs
from tests.support.blame import (
    BE,
    ERROR,
    LENGTH,
    LS,
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


def twice(view: View, plan: Plan) -> Plan:
    return replace(plan, rows=plan.rows * 2)


BREAKS: dict[str, Callable[[View, Plan], Any]] = {
    "raises": raises,
    "is empty": lambda view, plan: Plan(),
    "is nonsense": lambda view, plan: None,
    "breaks a rule": twice,
    "waits for ever": lambda view, plan: Plan(wait_until_ns=view.now_ns + 100 * NS_PER_S),
}


# -- rank


@pytest.mark.parametrize("poison", [(0,), (3,), (6,), (1, 2), (0, 3, 6), tuple(range(N))])
def test_a_rank_that_raises_ends_the_request_it_was_asked_about(poison: tuple[int, ...]) -> None:
    slo = {n: Slo(ttft_ms=2e6) if n in poison else Slo(ttft_ms=50.0) for n in range(N)}
    world = served(Overflows(), slo=slo)
    assert_ended(world, *poison)
    assert "policy Overflows raised OverflowError: too late" in (world.errors[poison[0]] or "")


def test_a_rank_that_raises_once_a_request_decodes_ends_it_alone() -> None:
    world = served(Overflows(), slo={4: Slo(tpot_ms=2e6)})
    assert_ended(world, 4)
    assert world.tokens[4] == 1


def test_a_target_that_the_view_chokes_on_ends_its_request_alone() -> None:
    """As it was before times were bounded: `deadline_ns` itself raised."""
    world = served(Overflows(), slo={4: Slo(ttft_ms=1e300)})
    assert world.finished[4] is ERROR
    assert [world.finished[n] for n in range(N) if n != 4] == [LENGTH] * (N - 1)


# -- plan


@pytest.mark.parametrize("base", [Eager, Remembers])
@pytest.mark.parametrize("poison", [0, 3, 6])
@pytest.mark.parametrize("how", BREAKS)
def test_a_plan_that_breaks_on_one_request_ends_it_alone(
    how: str, poison: int, base: type[Eager]
) -> None:
    world = served(on(poison, base=base, do=BREAKS[how]))
    assert_ended(world, poison)
    assert "policy Allergic" in (world.errors[poison] or "")


@pytest.mark.parametrize("pair", [(0, 1), (0, 6), (2, 5)])
def test_of_two_requests_that_only_break_together_the_newer_ends(pair: tuple[int, int]) -> None:
    assert_ended(served(on(*pair, do=raises)), pair[1])


def test_several_requests_that_break_it_alone_all_end_and_no_others() -> None:
    class Picky(Eager):
        def plan(self, view: View) -> Plan:
            if ids(view) & {0, 1, 5}:
                raise ValueError("not those")
            return super().plan(view)

    world = served(Picky())
    assert {n for n, reason in world.finished.items() if reason is ERROR} == {0, 1, 5}
    assert sum(world.tokens.values()) == 6 * (N - 3)


def test_a_policy_that_is_simply_broken_ends_everybody() -> None:
    class Broken(Eager):
        def plan(self, view: View) -> Plan:
            raise ValueError("no idea")

    world = served(Broken())
    assert set(world.finished.values()) == {ERROR}
    assert all("no idea" in (text or "") for text in world.errors.values())


def test_a_policy_that_cannot_be_copied_is_asked_itself() -> None:
    policy = on(3, do=raises)
    policy.lock = threading.Lock()
    with pytest.raises(TypeError):
        copy.deepcopy(policy)
    assert_ended(served(policy), 3)


def test_trials_leave_the_policy_and_the_state_as_they_were() -> None:
    class Counts(Remembers):
        def __init__(self) -> None:
            super().__init__()
            self.ended: list[RequestId] = []

        def plan(self, view: View) -> Plan:
            if 3 in ids(view):
                raise ValueError("not that one")
            return super().plan(view)

        def on_finish(self, view: View, request: Any) -> None:
            super().on_finish(view, request)
            self.ended.append(request.request_id)

    policy = Counts()
    assert_ended(served(policy), 3)
    assert sorted(policy.ended) == list(range(N))


# -- victims and hooks


def test_victims_that_raise_for_one_request_end_it_alone() -> None:
    class Squeamish(Eager):
        def victims(self, view: View, need: int, keep: Collection[RequestId]) -> Any:
            if 6 in keep:
                raise ValueError("I cannot")
            order = sorted(view.requests, key=lambda r: (r.priority, r.arrival_ns, r.request_id))
            return [
                (r.request_id, Evict.RECOMPUTE) for r in order[::-1] if r.request_id not in keep
            ]

        def plan(self, view: View) -> Plan:
            order = sorted(view.requests, key=lambda r: (-(r.request_id == 6), r.priority))
            return Plan(rows=(next_row(order[0], view),))

    world = World(Squeamish(), replace(LIMITS, num_blocks=6))
    for _ in range(6):
        world.submit(BE, 30, 4)
    world.step()
    world.submit(LS, 90, 4, at_ns=world.clock.at_ns)
    world.run(2000)
    assert "I cannot" in (world.errors[6] or "")
    assert [world.finished[n] for n in range(6)] == [LENGTH] * 6


@pytest.mark.parametrize("method", ["on_arrival", "on_finish"])
@pytest.mark.parametrize("poison", [0, 3, 6])
def test_a_hook_that_raises_on_one_request_costs_the_others_nothing(
    method: str, poison: int
) -> None:
    def hook(self: Any, view: View, request: Any) -> None:
        if request.request_id == poison:
            raise ValueError("not that one")

    world = served(type("Hooked", (Eager,), {method: hook})())
    world.step()  # what a hook raised on is told by the next decision
    assert [f"raised in {method}: ValueError" in text for text in world.loop.policy_errors] == [
        True
    ]
    others = {n: reason for n, reason in world.finished.items() if n != poison}
    assert set(others.values()) == {LENGTH}
    assert world.finished[poison] is (ERROR if method == "on_arrival" else LENGTH)


@pytest.mark.parametrize("poison", [0, 3, 6])
def test_a_hook_that_raises_on_a_row_ends_the_request_of_the_row(poison: int) -> None:
    class Hooked(Eager):
        def on_step_done(self, view: View, report: StepReport) -> None:
            if any(row.request_id == poison for row in report.rows):
                raise ValueError("not that row")

    world = served(Hooked())
    assert_ended(world, poison)
    assert "raised in on_step_done: ValueError: not that row" in (world.errors[poison] or "")


def test_errors_of_several_hooks_at_once_each_end_their_own() -> None:
    class Hooked(Eager):
        def on_arrival(self, view: View, request: Any) -> None:
            if request.request_id in (0, 1, 4):
                raise ValueError(f"not {request.request_id}")

    world = served(Hooked())
    assert_ended(world, 0, 1, 4)
    assert all(f"not {n}" in (world.errors[n] or "") for n in (0, 1, 4))


# -- the search


class Asked(Remembers):
    """One request at a time; counts what it and its copies are asked and told of."""

    def __init__(self, poison: Collection[RequestId] | None) -> None:
        super().__init__()
        self.poison, self.counts = poison, {"plans": 0, "ends": 0}

    def __deepcopy__(self, memo: Any) -> "Asked":
        mine = Asked(self.poison)
        mine.known, mine.counts = list(self.known), self.counts
        return mine

    def plan(self, view: View) -> Plan:
        self.counts["plans"] += 1
        assert sorted(self.known) == sorted(ids(view))
        if self.poison is None or ids(view) & set(self.poison):
            raise ValueError("not those")
        return Plan(rows=(next_row(view.requests[0], view),))

    def on_finish(self, view: View, request: Any) -> None:
        super().on_finish(view, request)
        self.counts["ends"] += 1


def blamed(policy: Asked, size: int) -> Blame:
    """Whom `size` requests that wait blame; counted from there."""
    world = World(policy)
    for _ in range(size):
        world.loop.admit(world.submitted[world.submit(BE, 10, 1)])
    with pytest.raises(PolicyError) as raised:
        world.scheduler.decide(0)
    policy.counts.update(plans=0, ends=0)
    return world.scheduler.blame(raised.value, 0)


@pytest.mark.parametrize("poison", [(0, 255), (1, 128), (100, 101), (3, 77, 200, 254)])
def test_few_trials_find_several_requests_among_many(poison: tuple[int, ...]) -> None:
    size, log = 256, 8
    policy = Asked(poison)
    found = blamed(policy, size)
    assert set(found.request_ids) == set(poison)
    assert found.others_go_on
    assert policy.counts["plans"] <= 2 * (len(poison) + 1) * log
    assert policy.counts["ends"] <= 2 * size * (log + len(poison))


def test_a_policy_that_is_broken_is_told_of_few_ends() -> None:
    size, log = 256, 8
    policy = Asked(None)
    found = blamed(policy, size)
    assert sorted(found.request_ids) == list(range(size))
    assert not found.others_go_on
    assert policy.counts["plans"] <= 2 * size + log + 2
    assert policy.counts["ends"] <= 4 * size * log


def test_a_trial_asks_the_policy_also_where_a_suspect_could_run() -> None:
    """The end of the newest request would leave KV to a suspect, which runs without a policy."""
    world = World(on(0, do=raises), replace(LIMITS, num_blocks=2))
    for _ in range(3):
        world.loop.admit(world.submitted[world.submit(BE, 10, 3)])
    scheduler = world.scheduler
    scheduler.requests[2].block_table = scheduler.pool.take(2, 2)
    scheduler.suspects = [1]
    with pytest.raises(PolicyError) as raised:
        scheduler.decide(0)
    assert scheduler.blame(raised.value, 0) == ((0,), True)


@pytest.mark.parametrize("size", range(1, 20))
def test_the_search_finds_the_one_and_asks_few_times(size: int) -> None:
    order = list(range(100, 100 + size))
    for poison in order:
        asked: list[int] = []

        def works(gone: Collection[int], poison: int = poison, asked: list[int] = asked) -> bool:
            asked.append(len(gone))
            return poison in gone

        assert newest_needed(order, works) == poison
        assert len(asked) <= size.bit_length()


# -- settings


@pytest.mark.parametrize(
    "value", [99, 10**9 + 1, 10**400, 1e300, float("nan"), "x"], ids=lambda value: repr(value)[:12]
)
def test_a_stall_bound_is_a_time_that_fits(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_be_stall_ms=.* integer in \[100, 1000000000\]"):
        Fcfs(max_be_stall_ms=value)
