"""What a router keeps: views that equal what is open, and choices that can be repeated."""

import itertools
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.fleet import routes
from qllm.fleet.router import PERIOD_S, CachedPrefixes, Entry, Router, replayed
from qllm.fleet.routes import (
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
    page_names,
    round_robin,
)
from qllm.types import Priority

CLASSES = st.sampled_from([Priority.LS, Priority.BE])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), CLASSES, st.integers(0, 5), st.integers(1, 90)),
        st.tuples(st.just("heard"), st.integers(0, 20), CLASSES, st.just(0)),
        st.tuples(st.just("left"), st.integers(0, 20), st.just(0), st.just(0)),
        st.tuples(st.just("up"), st.integers(0, 2), st.just(0), st.just(0)),
        st.tuples(st.just("down"), st.integers(0, 2), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Model:
    """A router beside a plain account of what is open."""

    def __init__(self, route: Any) -> None:
        self.entries: list[Entry] = []
        self.router = Router(route, self.entries.append)
        self.open: dict[int, dict[str, Any]] = {}
        self.now_s = 0.0

    def step(self, what: str, a: int, b: int, c: int) -> None:
        self.now_s += 0.3
        names = [engine.name for engine in self.router.engines]
        if what == "up" and f"e{a}" not in names:
            self.router.up(
                f"e{a}", costs=RouteCosts(0.001, 0.1), seats=4, kept_tokens=3 * PAGE_TOKENS
            )
        elif what == "down" and f"e{a}" in names:
            self.router.down(f"e{a}")
            for key in [key for key, item in self.open.items() if item["engine"] == f"e{a}"]:
                self.router.left(key)
                del self.open[key]
        elif what == "sent":
            self.send(a, b, c)
        elif what == "heard" and a in self.open:
            item = self.open[a]
            item["done"] += 1
            item["is_ls"] = b == Priority.LS
            self.router.heard(a, item["done"], b)
        elif what == "left" and a in self.open:
            self.router.left(a)
            del self.open[a]

    def send(self, priority: int, first: int, tokens: int) -> None:
        key = next(i for i in range(99) if i not in self.open)
        request = self.router.view(priority, [first] * (tokens * 4), tokens)
        found = self.router.choose(request, self.now_s)
        assert (found is None) == (not self.router.engines)
        if found is not None:
            done = tokens % 3
            prompt = max(1, 4 * tokens - found.num_kept(request))
            self.router.sent(key, request, found, num_done=done)
            self.open[key] = {
                "engine": found.name, "is_ls": priority == Priority.LS, "prompt": prompt,
                "max": tokens, "first": done, "done": done,
            }  # fmt: skip

    def backlog(self, engine: EngineView, is_ls: bool) -> Backlog:
        """What an engine has to do, counted anew."""
        found = Backlog()
        for item in self.open.values():
            if item["engine"] == engine.name and item["is_ls"] == is_ls:
                waits = item["done"] == item["first"]
                found.num += 1
                found.num_waiting += waits
                found.prompt_tokens += item["prompt"] * waits
                found.output_tokens += max(0, item["max"] - (item["done"] - item["first"]))
        return found


@settings(max_examples=150, deadline=None)
@given(route=st.sampled_from(sorted(ROUTES)), steps=STEPS)
def test_views_are_what_is_open_and_choices_can_be_repeated(
    route: str, steps: list[tuple[str, int, int, int]]
) -> None:
    model = Model(ROUTES[route])
    model.step("up", 0, 0, 0)
    for step in steps:
        model.step(*step)
        for engine in model.router.engines:
            assert engine.ls == model.backlog(engine, is_ls=True)
            assert engine.be == model.backlog(engine, is_ls=False)
            before = (engine.ls_start_s, engine.busy_s)
            engine.refresh()
            assert (engine.ls_start_s, engine.busy_s) == before
    assert model.router.num_open == len(model.open)
    choices = replayed(model.entries, ROUTES[route])
    assert [now for _, now in choices] == [then for then, _ in choices]


def test_choices_under_another_route_are_told_apart() -> None:
    model = Model(round_robin)
    for number in (0, 1):
        model.step("up", number, 0, 0)
    for tokens in (90, 1, 90, 1):
        model.step("sent", Priority.BE, 0, tokens)
    assert [then for then, _ in replayed(model.entries, by_class)] == ["e0", "e1", "e0", "e1"]
    assert [now for _, now in replayed(model.entries, by_class)] == ["e0", "e1", "e1", "e1"]


def broken(request: RequestView, engines: Any) -> EngineView:
    raise ValueError("I do not know")


def foreign(request: RequestView, engines: Any) -> Any:
    return EngineView("elsewhere")


@pytest.mark.parametrize("route", [broken, foreign, lambda request, engines: None])
def test_a_route_that_makes_no_choice_is_replaced_and_counted(
    route: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router(route)
    router.up("a")
    router.up("b")
    with caplog.at_level(logging.ERROR, "qllm.router"):
        names = []
        for key in range(4):
            request = router.view(Priority.LS, [1, 2], 5)
            found = router.choose(request, 0.0)
            assert found is not None
            router.sent(key, request, found)
            names.append(found.name)
    assert names == ["a", "b", "a", "b"], "the least loaded"
    assert router.num_errors == 4
    assert len(caplog.records) == 1, "one line, not one for each request"


def test_engines_that_only_decode_or_take_nothing_are_left_out() -> None:
    router = Router(least)
    assert router.choose(router.view(0, [1], 1), 0.0) is None
    router.up("decodes", role="decode")
    alone = router.choose(router.view(0, [1], 1), 0.0)
    assert alone is not None
    assert alone.name == "decodes", "nobody else is there"
    router.up("a")
    router.up("prefills", role="prefill")
    found = router.choose(router.view(0, [1], 1), 0.0, without=["a"])
    assert found is not None
    assert found.name == "prefills"


def test_a_newcomer_is_not_flooded_by_round_robin() -> None:
    model = Model(round_robin)
    model.step("up", 0, 0, 0)
    for _ in range(10):
        model.step("sent", Priority.BE, 0, 1)
    model.step("up", 1, 0, 0)
    for _ in range(4):
        model.step("sent", Priority.BE, 0, 1)
    assert [model.open[i]["engine"] for i in range(10, 14)] == ["e0", "e1", "e0", "e1"]


def test_pages_of_the_last_prompts_are_taken_for_kept_and_the_oldest_go() -> None:
    router = Router(by_prefix)
    engine = router.up("a", kept_tokens=4 * PAGE_TOKENS)
    first, second = [1] * (3 * PAGE_TOKENS), [2] * (2 * PAGE_TOKENS)
    for key, prompt in enumerate((first, second)):
        request = router.view(Priority.LS, prompt, 1)
        router.sent(key, request, engine)
        assert engine.num_kept(request) == len(prompt)
    again = router.view(Priority.LS, [*second, 3], 1)
    router.sent("again", again, engine)
    assert engine.ls.prompt_tokens == len(first) + len(second) + 1, "what is kept is not computed"
    assert engine.num_kept(router.view(Priority.LS, first, 1)) == 2 * PAGE_TOKENS, (
        "its tail is gone"
    )
    router.forget_kept()
    assert engine.num_kept(router.view(Priority.LS, second, 1)) == 0
    assert router.view(Priority.LS, first, 1, b"salt").pages != page_names(first)


def test_only_routes_that_look_at_pages_have_them_named() -> None:
    prompt = range(2 * PAGE_TOKENS)
    assert Router(by_class).view(0, prompt, 1).pages == ()
    assert len(Router(by_prefix).view(0, prompt, 1).pages) == 2
    assert len(Router(broken).view(0, prompt, 1).pages) == 2


@given(adds=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=9), most=st.integers(0, 4))
def test_kept_holds_the_last_pages_first_ones_longest(adds: list[list[int]], most: int) -> None:
    kept = CachedPrefixes(most)
    order: list[int] = []
    for pages in adds:
        kept.add(pages)
        for page in reversed(pages):
            order = [p for p in order if p != page] + [page]
        order = order[max(0, len(order) - most) :]
        assert len(kept) == len(order)
        assert all(page in kept for page in order)
    kept.clear()
    assert len(kept) == 0


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=9),
    most=st.integers(0, 9),
)
def test_what_is_kept_of_a_prompt_is_counted_up_to_the_first_page_that_is_not(
    prompts: list[list[int]], most: int
) -> None:
    router = Router(by_prefix)
    engine = router.up("a", kept_tokens=most * PAGE_TOKENS)
    views = [
        router.view(Priority.LS, [token for kind in kinds for token in [kind] * PAGE_TOKENS], 1)
        for kinds in prompts
    ]
    for key, request in enumerate(views):
        router.sent(key, request, engine)
        for other in views:
            kept = itertools.takewhile(lambda page: page in engine.kept, other.pages)
            assert engine.num_kept(other) == PAGE_TOKENS * len(list(kept))


def test_at_most_one_engine_changes_its_pool_in_a_period() -> None:
    router = Router(by_length)
    views = [router.up(f"e{i}") for i in range(6)]
    assert [view.is_short for view in views] == [True, False, True, False, True, False]
    long = RequestView(Priority.BE, 10_000, 1)
    for key, view in enumerate(v for v in views if not v.is_short):
        for n in range(9):
            router.sent((key, n), long, view)
    moved = []
    for at_s in (0.0, 0.5, 0.99 * PERIOD_S, PERIOD_S, 1.5 * PERIOD_S, 9 * PERIOD_S):
        router.choose(router.view(Priority.BE, [1], 1), at_s)
        moved.append(sum(not view.is_short for view in views) - 3)
    assert moved == [1, 1, 1, 2, 2, 2], "the last engine of a pool stays"


def plug_in(request: RequestView, engines: Any) -> EngineView:
    return by_length(request, engines)


@pytest.mark.parametrize("route", [by_length, plug_in])
def test_length_and_plug_ins_are_told_what_is_short_by_the_costs(route: Any) -> None:
    entries: list[Entry] = []
    router = Router(route, entries.append)
    router.up("a")
    router.cost("a", RouteCosts(0.001, 0.1))
    for tokens in (100, 101):
        router.choose(router.view(0, [1] * tokens, 1), 0.0)
    chosen = [entry[1].is_short for entry in entries if entry[0] == "choose"]
    assert chosen == [True, False]
    assert routes.is_short(100, router.engines)
