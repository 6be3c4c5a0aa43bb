"""A policy cannot end the engine: not by `SystemExit`, nor by anything else but a user's Ctrl-C."""

import asyncio
import builtins
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from qllm.errors import ConfigError, OutsideError, RequestFailedError, contained, told
from qllm.fleet.router import Router
from qllm.plan import Plan
from qllm.plugins import load_factory, load_policy, pickled_policy, unpickled_policy
from qllm.policy import RankPolicy, View, next_row
from qllm.sim.world import LIMITS, World
from qllm.types import Cap, Evict
from tests.support.blame import BE, ERROR, LENGTH, LS, Eager, N, assert_ended, ids, on, served
from tests.support.serving import tiny_engine


class Mute(BaseException):
    """Raises where it is asked for its text."""

    def __str__(self) -> str:
        raise SystemExit(4)


ENDS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(kind, (Exception, KeyboardInterrupt))
]
"""All errors of Python itself that `except Exception` lets pass, but for Ctrl-C."""
RAISED: dict[str, Callable[[], BaseException]] = {
    kind.__name__: (lambda kind=kind: kind("x", [Mute()])) if "Group" in kind.__name__ else kind
    for kind in (*ENDS, asyncio.CancelledError, Mute)
}


def raising(how: str) -> Callable[..., Any]:
    def raises(*_: object) -> Any:
        raise RAISED[how]()

    return raises


class Exits:
    """Pickles as a policy whose plan ends its process."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        raise SystemExit(3)


class Evicts(Eager):
    """One request at a time, the newest first; says itself who gives way."""

    def plan(self, view: View) -> Plan:
        return Plan(rows=(next_row(view.requests[-1], view),))

    def victims(self, view: View, need: int, keep: Collection[int]) -> Any:
        order = sorted(view.requests, key=lambda r: (r.priority, r.arrival_ns, r.request_id))
        return [(r.request_id, Evict.RECOMPUTE) for r in order[::-1] if r.request_id not in keep]

    def on_arrival(self, view: View, request: Any) -> None: ...
    def on_finish(self, view: View, request: Any) -> None: ...
    def on_step_done(self, view: View, report: Any) -> None: ...


@pytest.mark.parametrize("how", RAISED)
def test_a_plan_that_would_end_the_process_ends_the_request_it_breaks_on(how: str) -> None:
    world = served(on(3, do=raising(how)))
    assert_ended(world, 3)
    assert f"policy Allergic raised {how}: " in (world.errors[3] or "")


@pytest.mark.parametrize("how", RAISED)
def test_a_rank_that_would_end_the_process_ends_the_request_it_was_asked_about(how: str) -> None:
    class Leaves(RankPolicy):
        def rank(self, arrival_ns: int, priority: int, *rest: int) -> tuple[int, int]:
            if rest[1] == 13:  # tokens of the prompt: that of request 3
                raise RAISED[how]()
            return priority, arrival_ns

    assert_ended(served(Leaves()), 3)


def crowded(policy: Any) -> World:
    """A world with too little KV for all, which has served what it could."""
    world = World(policy, replace(LIMITS, num_blocks=6))
    for _ in range(5):
        world.submit(BE, 30, 4)
    world.step()
    world.submit(LS, 90, 4, at_ns=world.clock.at_ns)
    world.run(2000)
    return world


def test_every_method_that_the_scheduler_calls_is_among_those_that_exit_here() -> None:
    seen = set()

    class Spied(Evicts):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if callable(found) and not name.startswith("__"):
                seen.add(name)
            return found

    assert set(crowded(Spied()).finished.values()) == {LENGTH}
    assert seen == set(METHODS)


METHODS = ["plan", "victims", "on_arrival", "on_finish", "on_step_done"]


@pytest.mark.parametrize("method", [*METHODS, "__deepcopy__"])
@pytest.mark.parametrize("how", ["SystemExit", "Mute"])
def test_no_method_of_a_policy_ends_the_engine(method: str, how: str) -> None:
    more = {"plan": raising(how)} if method == "__deepcopy__" else {}
    policy = type("Leaves", (Evicts,), {**more, method: raising(how)})()
    world = crowded(policy)
    assert world.loop.policy_errors
    assert all(f"policy Leaves raised {how}" in text or "Leaves raised in" in text
               for text in world.loop.policy_errors)  # fmt: skip
    ends = set(world.finished.values())
    assert ends == {LENGTH} if method == "on_finish" else ERROR in ends


def test_what_trials_tell_a_copy_may_exit_too() -> None:
    class Copied(Evicts):
        def plan(self, view: View) -> Plan:
            if 3 in ids(view):
                raise SystemExit
            return super().plan(view)

        def on_finish(self, view: View, request: Any) -> None:
            raise GeneratorExit

    world = served(Copied())
    assert {n for n, end in world.finished.items() if end is ERROR} == {3}
    assert sum(world.tokens.values()) == 6 * (N - 1)


def test_a_plan_of_another_class_is_none() -> None:
    """Its properties could say one thing when they are checked, and raise later."""

    class Later(Plan):
        @property
        def is_empty(self) -> bool:
            raise SystemExit

    world = served(on(3, do=lambda view, plan: Later(rows=plan.rows)))
    assert_ended(world, 3)
    assert "returned Later instead of a Plan" in (world.errors[3] or "")


@pytest.mark.parametrize(("run_in", "how"), [("thread", "fcfs"), ("process", "fail")])
def test_an_engine_outlives_a_policy_that_exits(run_in: str, how: str) -> None:
    settings = {"policy": Exits(), "run_in": run_in, "on_policy_error": how, "conformance": False}
    with tiny_engine(**settings) as engine:
        for handle in [engine.submit([1, 2, 3], "LS", 2) for _ in range(3)]:
            if how == "fcfs":
                assert handle.result(60).token_ids
            else:
                with pytest.raises(RequestFailedError, match="policy Exits raised SystemExit: 3"):
                    handle.result(60)
        assert engine.failure is None


def test_a_function_that_the_engine_is_asked_to_call_does_not_end_it(engine: Any) -> None:
    with pytest.raises(OutsideError, match="SystemExit: 5"):
        engine.call(exits)
    assert engine.submit([1, 2, 3], "LS", 2).result(60).token_ids


def exits() -> None:
    raise SystemExit(5)


# -- where a policy is made


class Point:
    """An entry point whose package leaves when it is imported."""

    name = value = "leaves"
    load = staticmethod(raising("SystemExit"))


class Unpickled:
    def __reduce__(self) -> Any:
        return exits, ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: load_factory(Point()),  # type: ignore[arg-type]
        lambda: pickled_policy(type("Shy", (), {"__reduce__": raising("Mute")})()),
        lambda: unpickled_policy(pickled_policy(Unpickled())),
        lambda: World(type("Needy", (), {"needs": property(raising("SystemExit"))})()),
    ],
    ids=["imported", "pickled", "unpickled", "asked what it needs"],
)
def test_a_policy_that_exits_when_it_is_made_is_a_wrong_setting(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"SystemExit|Mute"):
        make()


def test_a_policy_that_exits_in_its_constructor_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qllm.plugins.load_factory", lambda point: raising("SystemExit"))
    with pytest.raises(ConfigError, match="policy 'fcfs' cannot be made: SystemExit"):
        load_policy("fcfs")


def test_a_route_that_exits_makes_no_choice() -> None:
    router = Router(raising("SystemExit"))
    engine = router.up("a")
    assert router.choose(router.view(0, [1, 2], 3), 0.0) is engine
    assert router.num_errors == 1


# -- the user


def test_a_user_may_still_interrupt_a_policy() -> None:
    with pytest.raises(KeyboardInterrupt):
        served(on(3, do=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)))


def test_an_error_keeps_its_kind_unless_it_would_end_something() -> None:
    with pytest.raises(ValueError, match=r"^a$"), contained():
        raise ValueError("a")
    assert told(ValueError("a")) == "ValueError: a"
    assert told(Mute()) == "Mute: (its text cannot be made)"
    assert told(OutsideError(told(SystemExit(3)))) == "SystemExit: 3"
