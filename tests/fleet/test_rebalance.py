"""BE requests that stand still go on where there is room: the rule, and what it does in a fleet."""

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.fleet.rebalance import MoveCosts, Standing, choose_move
from qllm.fleet.routes import Backlog, EngineView, RouteCosts, by_class
from qllm.frontend.handle import Handle
from qllm.types import FinishReason
from tests.support.fake_fleet import FakeClient, FakeFleet, answer
from tests.support.waiting import wait_for

AFTER_S = 5.0
SECOND_NS = 10**9


def engine(name: str, ls: int = 0, **more: Any) -> EngineView:
    return EngineView(name, **{"ls": Backlog(num=ls), "seats": 4, "hands_over": True, **more})


def standing(name: str = "own", still_s: float = 6.0, **more: Any) -> Standing:
    how = {"key": name, "num_tokens": 100, "is_begun": True, "num_moves": 0, **more}
    return Standing(engine=name, still_s=still_s, **how)


def chosen(request: Standing, *engines: EngineView, costs: MoveCosts | None = None) -> str | None:
    found = choose_move([request], engines, AFTER_S, costs or MoveCosts())
    return None if found is None else found[1].name


OWN = engine("own", 2)


def test_a_request_that_stands_long_enough_beside_ls_goes_where_there_is_room() -> None:
    there = engine("there")
    assert chosen(standing(), OWN, there) == "there"
    assert chosen(standing(still_s=AFTER_S), OWN, there) == "there"
    assert chosen(standing(still_s=AFTER_S - 0.01), OWN, there) is None
    assert chosen(standing(), engine("own"), there) is None, "no LS is in its way"
    assert chosen(standing(), OWN) is None


@pytest.mark.parametrize(
    "there",
    [
        engine("there", 2),
        engine("there", be=Backlog(num=4)),
        engine("there", be=Backlog(num=1, num_waiting=1)),
        EngineView("there", ls=Backlog(num=1, num_waiting=1), hands_over=True),
        engine("there", role="prefill"),
        engine("there", hands_over=False),
    ],
)
def test_an_engine_without_room_for_it_is_none(there: EngineView) -> None:
    assert chosen(standing(), OWN, there) is None
    assert chosen(standing(), OWN, there, engine("other", 1)) == "other"


def test_a_request_without_a_first_token_goes_to_a_prefill_engine() -> None:
    request = standing(is_begun=False)
    assert chosen(request, OWN, engine("d", role="decode")) is None
    assert chosen(request, OWN, engine("d", role="decode"), engine("p", role="prefill")) == "p"


def test_an_engine_that_gives_no_kv_keeps_its_requests() -> None:
    assert chosen(standing(), replace(OWN, hands_over=False), engine("there")) is None


def test_the_least_busy_is_taken_and_the_first_among_equals() -> None:
    a, b, c = engine("a", be=Backlog(1, 0, 0, 99)), engine("b"), engine("c")
    assert chosen(standing(), OWN, a, b, c) == "b"
    b.ls = Backlog(num=1)
    assert chosen(standing(), OWN, a, b, c) == "c"


def test_who_has_stood_longest_goes_first_and_each_move_doubles_the_wait() -> None:
    there = engine("there")
    requests = [
        standing(key=i, still_s=s, num_moves=n)
        for i, (s, n) in enumerate([(6, 0), (9, 0), (19.9, 2), (9.9, 1)])
    ]
    found = choose_move(requests, [OWN, there], AFTER_S, MoveCosts())
    assert found is not None
    assert found[0].key == 1
    assert chosen(standing(still_s=20, num_moves=2), OWN, there) == "there"
    assert chosen(standing(still_s=10, num_moves=1), OWN, there) == "there"


def test_a_move_that_costs_more_than_it_may_save_is_left() -> None:
    there, costs = engine("there", costs=RouteCosts(token_s=0.061)), MoveCosts()
    assert chosen(standing(), OWN, there) is None, "computing 100 tokens takes 6.1 s"
    assert chosen(standing(num_tokens=90), OWN, there) == "there"
    for seconds in (9.0, 1.0, 1.0):
        costs.add(seconds, 100)
    assert costs.of(standing(), there) == pytest.approx(1.0), "the median of what was measured"
    assert chosen(standing(num_tokens=600), OWN, there, costs=costs) == "there"
    assert chosen(standing(num_tokens=601), OWN, there, costs=costs) is None
    for _ in range(3):
        costs.add(0.1, 100)
    assert costs.of(standing(), there) == pytest.approx(0.1), "of the last five"


backlogs = st.builds(Backlog, st.integers(0, 5), st.integers(0, 1), st.integers(0, 99))
engines = st.lists(
    st.builds(
        EngineView,
        name=st.sampled_from("abc"),
        role=st.sampled_from(["both", "prefill", "decode"]),
        seats=st.integers(1, 6),
        ls=backlogs,
        be=backlogs,
        hands_over=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda view: view.name,
)
requests = st.lists(
    st.builds(
        Standing,
        key=st.integers(),
        engine=st.sampled_from("abc"),
        still_s=st.floats(0, 100),
        num_tokens=st.integers(1, 9999),
        is_begun=st.booleans(),
        num_moves=st.integers(0, 4),
    ),
    max_size=5,
)


@given(views=engines, requests=requests)
def test_a_move_always_leaves_ls_behind_and_changes_no_view(
    views: list[EngineView], requests: list[Standing]
) -> None:
    before = [asdict(view) for view in views]
    found = choose_move(requests, views, AFTER_S, MoveCosts())
    assert [asdict(view) for view in views] == before
    if found is not None:
        request, target = found
        (own,) = [view for view in views if view.name == request.engine]
        assert request in requests
        assert target in views
        assert own.ls.num > target.ls.num
        assert target.num_open < target.seats
        assert request.still_s >= AFTER_S
        assert choose_move([request], views, AFTER_S, MoveCosts()) == found


# -- in a fleet of engines without processes


class Handing(FakeClient):
    """An engine that lets a request go when it is told to, and gets KV of others announced."""

    def __init__(self, *args: Any, **told: Any) -> None:
        super().__init__(*args, **told)
        self.meets_at = f"host:{self.rings.number}"
        self.announced: list[Any] = []
        self.clock_s = 0.0

    def now_ns(self) -> int:
        return time.monotonic_ns() + round(self.clock_s * SECOND_NS)

    def _ask(self, op: str, *args: Any) -> Any:
        if op == "expect":
            self.announced.append(args)
            return None
        if op == "give":
            return self.rings.give(args[0])
        return super()._ask(op, *args)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    monkeypatch.setattr("tests.support.fake_fleet.FakeClient", Handing)
    yield from made(monkeypatch, 3)


def made(monkeypatch: pytest.MonkeyPatch, num: int) -> Iterator[FakeFleet]:
    told = {"config": {"handover_gib": 1.0, "max_num_seqs": 4}}
    monkeypatch.setattr(FakeFleet, "all_told", told, raising=False)
    fleet = FakeFleet(num, by_class, rebalance_s=AFTER_S)
    yield fleet
    fleet.client.close()


def at(fleet: FakeFleet, handle: Handle) -> int:
    """Which engine has a request."""
    (found,) = [i for i in range(3) if (c := fleet[i]) and handle.number in c.handles]
    return found


def started(fleet: FakeFleet, priority: str = "BE") -> Handle:
    return fleet.engine.submit([1, 2, 3], priority, 12, ignore_eos=True, temperature=0)


def waited(fleet: FakeFleet, seconds: float) -> None:
    """Let time pass in which no engine makes a token."""
    for client in fleet.up():
        client.clock_s += seconds  # type: ignore[attr-defined]


def busy_with_ls(fleet: FakeFleet, where: int) -> list[Handle]:
    """LS requests, of which an engine gets more than others."""
    handles = []
    while not any(at(fleet, handle) == where for handle in handles):
        handles.append(started(fleet, "LS"))
    for handle in handles:
        if at(fleet, handle) != where:
            handle.cancel()
    fleet.step()
    return [handle for handle in handles if not handle.has_ended]


def rebalancer(fleet: FakeFleet) -> Any:
    return fleet.client._rebalancer


def finished(fleet: FakeFleet, *handles: Handle) -> None:
    while not all(handle.has_ended for handle in handles):
        fleet.look()
        fleet.step()
    for handle in handles:
        assert handle.token_ids == answer((1, 2, 3), 12)
        assert handle.finish_reason is FinishReason.LENGTH


def test_it_moves_once_with_its_kv_and_keeps_its_tokens(fleet: FakeFleet) -> None:
    be = started(fleet)
    fleet.step()
    fleet.step()
    own = at(fleet, be)
    ls = busy_with_ls(fleet, own)
    rebalancer(fleet).look()
    assert at(fleet, be) == own, "it has not stood still"
    waited(fleet, AFTER_S)
    rebalancer(fleet).look()
    fleet[own].deliver()
    wait_for(lambda: any(be.number in fleet[i].handles for i in range(3) if i != own))
    there = at(fleet, be)
    ((number, address, ticket),) = fleet[there].announced  # type: ignore[attr-defined]
    assert (number, address) == (be.number, fleet[own].meets_at)
    assert ticket == "ticket"
    assert rebalancer(fleet).costs._last == rebalancer(fleet).costs._last.__class__(maxlen=5)
    moved = {e["engine"]: e["moved"] for e in fleet.client.engines()}
    assert moved == {str(i): int(i == own) for i in range(3)}
    fleet.step()
    assert len(rebalancer(fleet).costs._last) == 1, "its first token there says what it cost"
    for other in ls:
        other.cancel()
    ls = busy_with_ls(fleet, there)
    waited(fleet, 1.5 * AFTER_S)
    rebalancer(fleet).look()
    fleet[there].deliver()
    assert at(fleet, be) == there, "it was moved once: it waits twice as long"
    waited(fleet, AFTER_S)
    rebalancer(fleet).look()
    fleet[there].deliver()
    wait_for(lambda: be.number not in fleet[there].handles)
    wait_for(lambda: any(be.number in fleet[i].handles for i in range(3)))
    finished(fleet, be, *ls)


def test_it_goes_where_the_move_said_whatever_the_route_would_choose(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    be = started(fleet)
    fleet.step()
    own = at(fleet, be)
    busy_with_ls(fleet, own)
    waited(fleet, AFTER_S)
    rebalancer(fleet).look()
    target = rebalancer(fleet)._move.target
    (third,) = {"0", "1", "2"} - {str(own), target}
    router = fleet.client._routing.router

    def to_the_third(request: Any, engines: Any) -> EngineView:
        return next(e for e in engines if e.name == third)

    monkeypatch.setattr(router, "route", to_the_third)
    fleet[own].deliver()
    wait_for(lambda: any(be.number in fleet[i].handles for i in range(3) if i != own))
    assert at(fleet, be) == int(target)


@pytest.mark.parametrize("whom", ["own", "there", "both"])
def test_nothing_is_lost_when_an_engine_dies_in_the_move(fleet: FakeFleet, whom: str) -> None:
    rng = random.Random(whom)
    for _ in range(4):
        be = started(fleet)
        for _ in range(rng.randrange(1, 5)):
            fleet.step()
        own = at(fleet, be)
        ls = busy_with_ls(fleet, own)
        waited(fleet, 4 * AFTER_S)
        rebalancer(fleet).look()
        if whom != "there":
            if rng.random() < 0.5:  # it may have said that the request has left, or not
                fleet[own].deliver()
            fleet.kill(own)
        else:
            fleet[own].deliver()
        if whom != "own":
            wait_for(
                lambda be=be: (
                    fleet.client.log.holds(be)
                    or any(be.number in fleet[i].handles for i in range(3) if fleet[i] is not None)
                )
            )
            for i in range(3):
                if (
                    fleet[i] is not None
                    and fleet[i].failure is None
                    and be.number in fleet[i].handles
                ):
                    fleet.kill(i)
                    break
        finished(fleet, be, *ls)
        fleet.look()
        wait_for(lambda: not fleet.client.log.handles())


def test_one_moves_at_a_time_and_what_is_paused_or_open_stays(fleet: FakeFleet) -> None:
    four = [started(fleet) for _ in range(4)]
    fleet.step()
    first, second = next(  # with three engines, two of four are at one
        (a, b) for i, a in enumerate(four) for b in four[:i] if at(fleet, a) == at(fleet, b)
    )
    for handle in four:
        if handle not in (first, second):
            handle.cancel()
    fleet.step()
    own = at(fleet, first)
    ls = busy_with_ls(fleet, own)
    first.pause()
    waited(fleet, AFTER_S)
    rebalancer(fleet).look()
    fleet[own].deliver()
    wait_for(lambda: second.number not in fleet[own].handles)
    assert first.number in fleet[own].handles
    wait_for(lambda: any(second.number in fleet[i].handles for i in range(3)))
    first.resume()
    rebalancer(fleet).look()
    fleet[own].deliver()
    assert first.number in fleet[own].handles, "the other one has no token yet"
    fleet.step()
    waited(fleet, AFTER_S)
    rebalancer(fleet).look()
    fleet[own].deliver()
    wait_for(lambda: first.number not in fleet[own].handles)
    wait_for(lambda: any(first.number in fleet[i].handles for i in range(3)))
    finished(fleet, first, second, *ls)


def test_what_its_engine_does_not_give_stays_and_another_may_move(fleet: FakeFleet) -> None:
    be = started(fleet)
    fleet.step()
    own = at(fleet, be)
    ls = busy_with_ls(fleet, own)
    waited(fleet, AFTER_S)
    give, fleet[own].rings.give = fleet[own].rings.give, lambda _: None
    rebalancer(fleet).look()
    assert at(fleet, be) == own

    def refuses(_: int) -> None:
        raise ConfigError("this engine hands nothing over")

    fleet[own].rings.give = refuses
    waited(fleet, 4 * AFTER_S)
    rebalancer(fleet).look()
    assert at(fleet, be) == own
    assert fleet.client.engines()[own]["moved"] == 0
    fleet[own].rings.give = give
    waited(fleet, 8 * AFTER_S)
    rebalancer(fleet).look()
    fleet[own].deliver()
    wait_for(lambda: be.number not in fleet[own].handles)
    wait_for(lambda: any(be.number in fleet[i].handles for i in range(3)))
    finished(fleet, be, *ls)


def test_without_hand_over_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet(3, by_class, rebalance_s=AFTER_S)
    be = started(fleet)
    fleet.step()
    own = at(fleet, be)
    ls = busy_with_ls(fleet, own)
    fleet[own].now_ns = lambda: time.monotonic_ns() + 99 * SECOND_NS  # type: ignore[method-assign]
    rebalancer(fleet).look()
    assert at(fleet, be) == own
    finished(fleet, be, *ls)
    fleet.client.close()
    off = FakeFleet(2, by_class, rebalance_s=0)
    assert off.client._rebalancer is None
    off.client.close()


def test_a_request_stands_since_it_came_or_since_its_last_token_and_not_while_paused(
    fleet: FakeFleet,
) -> None:
    client = fleet[0]
    before_ns = client.now_ns()
    be, *others = [started(fleet) for _ in range(3)]
    client = fleet[at(fleet, be)]
    for other in others:
        other.cancel()

    def still_s() -> list[float]:
        return [still for entry, still in client.standing() if entry.handle is be]

    (new,) = still_s()
    assert 0 <= new <= (client.now_ns() - before_ns) / SECOND_NS
    be.pause()
    assert still_s() == []
    be.resume()
    assert len(still_s()) == 1
    be.update(priority="LS")
    assert still_s() == [], "LS does not move"
