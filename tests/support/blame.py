"""Policies that fail on one request, and engines that serve them beside other requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qllm.plan import Plan
from qllm.policy import RankPolicy, View, next_row
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Cap, FinishReason, Priority, RequestId

LS, BE = Priority.LS, Priority.BE

LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR

N = 7


class Eager:
    """All requests in every step; what is in a frame first."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        rows = [next_row(r, view, view.max_step_tokens // N) for r in view.requests]
        return Plan(rows=tuple(rows))


class Remembers(Eager):
    """Plans what it was told of, and nothing else: it cannot plan for a request it missed."""

    def __init__(self) -> None:
        self.known: list[RequestId] = []

    def plan(self, view: View) -> Plan:
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        rows = [next_row(view.by_id[i], view, view.max_step_tokens // N) for i in self.known]
        return Plan(rows=tuple(rows))

    def on_arrival(self, view: View, request: Any) -> None:
        self.known.append(request.request_id)

    def on_finish(self, view: View, request: Any) -> None:
        if request.request_id in self.known:
            self.known.remove(request.request_id)


def ids(view: View) -> set[RequestId]:
    return {r.request_id for r in view.requests}


def on(*poison: RequestId, base: type[Eager] = Eager, do: Callable[..., Any]) -> Any:
    """A policy that does something else where all of these requests are in view."""

    class Allergic(base):  # type: ignore[misc, valid-type]
        def plan(self, view: View) -> Any:
            plan = super().plan(view)
            return do(view, plan) if ids(view) >= set(poison) else plan

    return Allergic()


def raises(view: View, plan: Plan) -> Plan:
    raise OverflowError("cannot convert float infinity to integer")


def served(policy: Any, **changes: Any) -> World:
    """A world that has served N requests, which arrive together and one by one."""
    world = World(policy, changes.pop("limits", LIMITS))
    world.loop.fallback = changes.pop("fallback", None)
    for n in range(N):
        slo = changes.get("slo", {}).get(n)
        world.submit([LS, BE][n % 2], 10 + n, 6, at_ns=(n // 2) * 3 * NS_PER_MS, slo=slo)
    world.run(3000)
    assert world.scheduler.pool.num_free == world.scheduler.limits.num_blocks
    assert not world.runner.requests
    return world


def assert_ended(world: World, *poison: RequestId) -> None:
    """These ended in error, and all others have all their tokens."""
    wanted = {n: ERROR if n in poison else LENGTH for n in range(N)}
    assert world.finished == wanted, world.loop.policy_errors
    assert all(world.tokens[n] == 6 for n in range(N) if n not in poison)
    assert len(world.loop.policy_errors) == len(poison)


@dataclass(frozen=True, kw_only=True)
class Overflows(RankPolicy):
    """Raises on requests that are due too late."""

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        if 10**12 < deadline_ns < 10**18:
            raise OverflowError("too late")
        return priority, arrival_ns
