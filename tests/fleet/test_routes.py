"""Routes as pure functions: what they promise for any views."""

import copy
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.fleet import routes
from qllm.fleet.routes import (
    HYSTERESIS,
    LOAD_RATIO,
    MAX_PAGES,
    PAGE_TOKENS,
    ROUTES,
    Backlog,
    EngineView,
    RequestView,
    RouteCosts,
    by_class,
    by_length,
    by_prefix,
    least,
    load_route,
    page_names,
    pool_change,
    pressure,
    round_robin,
)
from qllm.types import Priority

counts = st.integers(0, 50)
backlogs = st.builds(
    Backlog,
    num=counts,
    num_waiting=counts,
    prompt_tokens=st.integers(0, 20_000),
    output_tokens=st.integers(0, 20_000),
)
PAGES = tuple(range(100, 104))


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineView]:
    """Engines of one speed in any state."""
    costs = RouteCosts(draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e-4, 1e-1)))
    return [
        EngineView(
            name=f"engine-{i}",
            is_short=draw(st.booleans()),
            costs=costs,
            seats=draw(st.integers(1, 64)),
            ls=draw(backlogs),
            be=draw(backlogs),
            kept=frozenset(PAGES[: draw(st.integers(0, 4))]),
            num_sent=draw(counts),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


requests = st.builds(
    RequestView,
    priority=st.sampled_from([Priority.LS, Priority.BE]),
    num_prompt_tokens=st.integers(1, 5000),
    max_tokens=st.integers(1, 500),
    is_short=st.booleans(),
    pages=st.sampled_from([PAGES[:i] for i in range(5)]),
)


@given(fleet=fleets(), request=requests)
def test_every_route_chooses_one_of_the_engines_and_changes_nothing(
    fleet: list[EngineView], request: RequestView
) -> None:
    for route in ROUTES.values():
        before = [asdict(engine) for engine in fleet]
        found = route(request, fleet)
        assert any(found is engine for engine in fleet)
        assert [asdict(engine) for engine in fleet] == before
        again = route(request, copy.deepcopy(fleet))
        assert again.name == found.name


@given(fleet=fleets(), request=requests)
def test_class_gives_ls_to_the_first_start_and_be_to_the_most_spare(
    fleet: list[EngineView], request: RequestView
) -> None:
    found = by_class(request, fleet)
    if request.is_ls:
        assert found.ls_start_s == min(engine.ls_start_s for engine in fleet)
    else:
        assert found.busy_s == min(engine.busy_s for engine in fleet)


@given(fleet=fleets(), request=requests, be=backlogs)
def test_be_work_never_moves_an_ls_request_to_a_later_start(
    fleet: list[EngineView], request: RequestView, be: Backlog
) -> None:
    request = replace(request, priority=Priority.LS)
    start_s = by_class(request, fleet).ls_start_s
    fleet[0].be = be
    fleet[0].refresh()
    assert by_class(request, fleet).ls_start_s == start_s


@given(fleet=fleets(), request=requests)
def test_long_prompts_leave_their_pool_only_where_that_saves_more_than_they_take(
    fleet: list[EngineView], request: RequestView
) -> None:
    found, plain = by_length(request, fleet), by_class(request, fleet)
    pool = [engine for engine in fleet if not engine.is_short]
    if request.is_short or not pool:
        assert found is plain
        return
    own = by_class(request, pool)
    load = (lambda e: e.ls_start_s) if request.is_ls else (lambda e: e.busy_s)
    takes_s = request.num_prompt_tokens * plain.costs.token_s
    assert found is (plain if load(own) - load(plain) > takes_s else own)


def test_a_long_prompt_waits_in_its_pool_as_long_as_it_takes_itself() -> None:
    costs = RouteCosts(token_s=0.001)
    idle = EngineView("short", costs=costs)
    for waiting, name in ((900, "long"), (1100, "short")):
        busy = EngineView("long", is_short=False, costs=costs, ls=Backlog(1, 1, waiting, 10))
        long = RequestView(Priority.LS, 1000, 10, is_short=False)
        assert by_length(long, [idle, busy]).name == name
        assert by_length(replace(long, is_short=True), [idle, busy]) is idle


def first_token_s(request: RequestView, engine: EngineView) -> float:
    """When a request would have its first token, if nothing else came."""
    rest = max(1, request.num_prompt_tokens - engine.num_kept(request))
    return (engine.ls_start_s if request.is_ls else engine.busy_s) + rest * engine.costs.token_s


@given(fleet=fleets(), request=requests)
def test_prefix_takes_the_longest_unless_its_first_token_comes_much_later(
    fleet: list[EngineView], request: RequestView
) -> None:
    def load_s(engine: EngineView) -> float:
        return engine.ls_start_s if request.is_ls else engine.busy_s

    def first_token_s(engine: EngineView) -> float:
        rest = max(1, request.num_prompt_tokens - engine.num_kept(request))
        return load_s(engine) + rest * engine.costs.token_s

    found = by_prefix(request, fleet)
    plain = by_prefix(replace(request, pages=()), fleet)
    assert load_s(plain) == load_s(by_class(request, fleet))
    most = max(engine.num_kept(request) for engine in fleet)
    best = min((e for e in fleet if e.num_kept(request) == most), key=load_s)
    if first_token_s(best) <= LOAD_RATIO * first_token_s(plain):
        assert found.num_kept(request) == most
        assert load_s(found) == load_s(best)
    else:
        assert found is plain


@pytest.mark.parametrize("priority", [Priority.LS, Priority.BE])
def test_a_kept_prefix_is_worth_a_first_token_that_comes_a_quarter_later(
    priority: Priority,
) -> None:
    """Costs are ratios of two, so that sums are exact and a tie is one."""
    costs, request = RouteCosts(token_s=1 / 8), RequestView(priority, 600, 1, pages=PAGES)
    kept = frozenset(PAGES)
    what = "ls" if priority == Priority.LS else "be"
    for other, most in ((0, 750 - 88), (100, 875 - 88)):
        there = EngineView("other", costs=costs, **{what: Backlog(1, 1, other, 0)})
        for load, name in ((most, "keeps"), (most + 1, "other")):
            keeps = EngineView("keeps", costs=costs, kept=kept, **{what: Backlog(1, 1, load, 0)})
            assert by_prefix(request, [there, keeps]).name == name


def test_new_beginnings_go_to_idle_engines_in_turns() -> None:
    """Else the first of them would get all, and keep no more than one engine can."""
    for priority in (Priority.LS, Priority.BE):
        request = RequestView(priority, 600, 1, pages=PAGES)
        a, b, c = (EngineView(name, num_sent=sent) for name, sent in (("a", 2), ("b", 1), ("c", 1)))
        assert by_prefix(request, [a, b, c]) is b
        assert by_prefix(replace(request, pages=()), [a, b, c]) is b
        a.kept = frozenset(PAGES[:1])
        assert by_prefix(request, [a, b, c]) is a, "it saves a page"
    b.be = Backlog(1)
    assert by_prefix(replace(request, pages=()), [b, c]) is c, "b has one"
    b.be, b.ls = Backlog(), Backlog(1)
    ls = RequestView(Priority.LS, 60, 1)
    assert by_prefix(ls, [b, c]) is c
    c.ls, c.be = Backlog(1), Backlog(1, 0, 0, 9)
    b.refresh(), c.refresh()
    assert by_prefix(ls, [c, b]) is b, "it has less to do"
    fast = EngineView("fast", costs=RouteCosts(token_s=1e-5), num_sent=1)
    assert by_prefix(ls, [fast, EngineView("slow")]).name == "slow", "an idle one is an idle one"


@given(fleet=fleets(), request=requests)
def test_least_and_round_robin_count_requests(
    fleet: list[EngineView], request: RequestView
) -> None:
    assert least(request, fleet).num_open == min(engine.num_open for engine in fleet)
    assert round_robin(request, fleet).num_sent == min(engine.num_sent for engine in fleet)


@given(fleet=fleets())
def test_an_engine_changes_pools_only_against_the_pressure(fleet: list[EngineView]) -> None:
    moved = pool_change(fleet)
    short = [engine for engine in fleet if engine.is_short]
    long = [engine for engine in fleet if not engine.is_short]
    if len(fleet) == 1:
        assert moved is None
    elif not short or not long:
        assert moved is not None
    elif moved is not None:
        giving, taking = (short, long) if moved.is_short else (long, short)
        assert len(giving) > 1
        assert pressure(moved) == min(map(pressure, giving))
        assert max(map(pressure, taking)) > min(map(pressure, giving)) + HYSTERESIS


def test_a_pool_under_pressure_gets_one_engine_and_gives_none_back_at_once() -> None:
    fleet = [EngineView(f"e{i}", is_short=i < 1) for i in range(4)]
    assert pool_change(fleet) is None
    fleet[0].ls = Backlog(num=9, num_waiting=9, prompt_tokens=900)
    moved = pool_change(fleet)
    assert moved in fleet[1:]
    moved.is_short = True
    fleet[0].ls = Backlog(num=2, num_waiting=1, prompt_tokens=100)
    assert pool_change(fleet) is None


def test_a_full_engine_starts_an_ls_request_later() -> None:
    full = EngineView("full", seats=2, ls=Backlog(num=2, output_tokens=20))
    free = EngineView("free", seats=3, ls=Backlog(num=2, output_tokens=20))
    assert free.ls_start_s == 0 < full.ls_start_s == 10 * full.costs.step_s
    assert by_class(RequestView(Priority.LS, 10, 10), [full, free]) is free


def test_among_equals_the_fewest_requests_then_the_least_work_then_the_first_are_taken() -> None:
    ls, be = (RequestView(priority, 10, 10) for priority in (Priority.LS, Priority.BE))
    a, b, c = (EngineView(name) for name in "abc")
    for route in (by_class, least, round_robin):
        assert route(ls, [a, b, c]) is a
        assert route(be, [c, b, a]) is c
    a.ls, b.ls, c.ls = Backlog(2), Backlog(1, 0, 0, 50), Backlog(1, 0, 0, 40)
    for engine in (a, b, c):
        engine.refresh()
    assert {engine.ls_start_s for engine in (a, b, c)} == {0.0}
    assert by_class(ls, [a, b]) is b, "it has fewer LS requests"
    assert by_class(ls, [a, b, c]) is c, "and less to do"
    d, e = EngineView("d", be=Backlog(3)), EngineView("e", be=Backlog(2))
    assert d.busy_s == e.busy_s
    assert by_class(be, [d, e]) is e, "it has fewer requests"
    d.be.num, d.num_sent, e.num_sent = 2, 4, 5
    assert least(be, [e, d]) is d, "it got fewer"


def test_one_engine_under_pressure_of_many_changes_no_pool_and_some_do() -> None:
    fleet = [EngineView(f"s{i}") for i in range(11)]
    fleet += [EngineView(f"l{i}", is_short=False) for i in range(3)]
    for count, changes in ((1, False), (2, True)):
        for engine in fleet[:count]:
            engine.ls = Backlog(num=40, num_waiting=40, prompt_tokens=9000)
        moved = pool_change(fleet)
        assert (moved is not None) is changes
    assert moved is not None
    assert not moved.is_short, "it comes to the short ones, whose 90th percentile is pressed"


def test_an_engine_alone_stays_and_of_two_that_keep_alike_the_freer_is_taken() -> None:
    assert pool_change([EngineView("alone")]) is None
    request, kept = RequestView(Priority.LS, 600, 1, pages=PAGES), frozenset(PAGES)
    busy = EngineView("busy", ls=Backlog(1, 1, 100, 0), kept=kept)
    assert by_prefix(request, [busy, EngineView("free", kept=kept)]).name == "free"


def test_equal_pages_have_names_of_their_place() -> None:
    names = page_names([1] * (5 * PAGE_TOKENS))
    assert len(set(names)) == 5


def test_the_boundary_is_where_tokens_cost_as_much_as_the_weights() -> None:
    fleet = [EngineView(f"e{i}", costs=RouteCosts(0.001, 0.1 * i)) for i in (1, 2, 9)]
    assert fleet[0].costs.boundary == pytest.approx(100)
    assert routes.is_short(200, fleet)
    assert not routes.is_short(201, fleet)


@given(
    ids=st.lists(st.integers(0, 9), max_size=5 * PAGE_TOKENS),
    more=st.lists(st.integers(0, 9), max_size=PAGE_TOKENS),
)
def test_pages_of_a_longer_prompt_begin_with_those_of_the_shorter(
    ids: list[int], more: list[int]
) -> None:
    names = page_names(ids)
    assert len(names) == len(ids) // PAGE_TOKENS
    assert page_names([*ids, *more])[: len(names)] == names
    assert len(set(names)) == len(names)
    if names:
        assert page_names([ids[0] + 1, *ids[1:]])[0] != names[0]
        assert not set(names) & set(page_names(ids, b"another salt"))


def test_pages_are_named_alike_in_every_process_and_only_so_many() -> None:
    names = page_names(range(2 * MAX_PAGES * PAGE_TOKENS), b"salt")
    assert len(names) == MAX_PAGES
    code = (
        "from qllm.fleet.routes import *; "
        f"print(page_names(range({MAX_PAGES * PAGE_TOKENS}), b'salt'))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(names)


def test_a_route_has_a_name_or_can_be_imported() -> None:
    assert load_route("prefix") is by_prefix
    assert load_route("qllm.fleet.routes:least") is least
    assert load_route("math:floor") is math.floor


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "use one of class, length, prefix, least, round-robin, or module:function"),
        ("no_such_module:route", "cannot be imported: ModuleNotFoundError"),
        ("math:route", "cannot be imported: AttributeError"),
        ("math:pi", "is 3.14159"),
    ],
)
def test_a_route_that_is_none_is_refused_with_words(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_route(name)
