"""The state of a router: a view of each engine, made from events, and the route.

    up, down                      an engine takes prompts, or ends
    choose -> sent                a request goes to an engine
    heard                         the request's present number of tokens
    left                          the request, or its engine, has ended

Only these calls change a view. Each call is one entry of `record`, so the same entries give the
same choices, live and simulated (`replayed`). The state grows with engines, open requests and
cached pages.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qllm.errors import contained, told
from qllm.fleet.routes import (
    FALLBACK,
    PAGE_TOKENS,
    WITHOUT_PAGES,
    WITHOUT_POOLS,
    Backlog,
    EngineView,
    RequestView,
    Role,
    Route,
    RouteCosts,
    is_short,
    page_names,
    pool_change,
)
from qllm.types import Priority

UNKNOWN = RouteCosts()
"""Costs of an engine that has not reported its costs."""
PERIOD_S = 1.0
"""Seconds between two changes of an engine's pool."""
Entry = tuple[Any, ...]
_log = logging.getLogger("qllm.router")


class CachedPrefixes(OrderedDict[int, None]):
    """Names of the pages that an engine probably caches, oldest first.

    Args:
        capacity: Largest number of pages.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def add(self, pages: Sequence[int]) -> None:
        """Record that a prompt with these pages went to the engine.

        The first pages stay longest.
        """
        for page in reversed(pages):
            self[page] = None
            self.move_to_end(page)
        for _ in range(len(self) - self.capacity):
            self.popitem(last=False)


@dataclass(slots=True)
class _Sent:
    """An open request, with the load that it adds to the views."""

    engine: EngineView
    is_ls: bool
    prompt_tokens: int
    output_tokens: int
    is_waiting: bool = True
    num_done: int = 0

    def add(self, sign: int) -> None:
        """Add the request to its engine's view, or remove it."""
        backlog: Backlog = self.engine.ls if self.is_ls else self.engine.be
        backlog.num += sign
        backlog.num_waiting += sign * self.is_waiting
        backlog.prompt_tokens += sign * self.prompt_tokens
        backlog.output_tokens += sign * self.output_tokens


class Router:
    """The part of a fleet that chooses engines. Only one thread may call it at a time.

    Args:
        route: Function that chooses. If it raises or returns no engine, `routes.FALLBACK` chooses.
        record: Function that is called with every entry: a name, then the arguments.
    """

    def __init__(self, route: Route, record: Callable[[Entry], object] | None = None) -> None:
        self.route = route
        self.engines: list[EngineView] = []
        """Engines that are up, in order of arrival."""
        self.num_errors = 0
        """Number of choices that the route failed to make."""
        self._record = record or (lambda _: None)
        self._uses_pages, self._uses_pools = route not in WITHOUT_PAGES, route not in WITHOUT_POOLS
        self._taking: dict[bool, list[EngineView]] = {False: [], True: []}
        """Engines that take prompts, and engines that take requests with a first token."""
        self._open: dict[Hashable, _Sent] = {}
        self._moved_at_s: float | None = None

    def up(
        self,
        name: str,
        *,
        role: Role = "both",
        costs: RouteCosts = UNKNOWN,
        seats: int = 64,
        kept_tokens: int = 0,
        hands_over: bool = False,
    ) -> EngineView:
        """Add an engine, which has no request yet.

        Args:
            name: Name that no other engine has.
            role: Role of the engine.
            costs: Speed of the engine.
            seats: Largest number of requests in one step.
            kept_tokens: Largest number of tokens whose KV the engine caches.
            hands_over: Flag as in `EngineView`.
        """
        self._record(("up", name, role, costs, seats, kept_tokens, hands_over))
        view = EngineView(
            name,
            role=role,
            is_short=2 * sum(e.is_short for e in self.engines) <= len(self.engines),
            costs=costs,
            seats=seats,
            kept=CachedPrefixes(kept_tokens // PAGE_TOKENS),
            num_sent=min((e.num_sent for e in self.engines), default=0),
            hands_over=hands_over,
        )
        self.engines.append(view)
        self._sort()
        return view

    def _sort(self) -> None:
        """Sort engines by the requests that they take.

        If no engine has the role for some requests, all engines take these requests.
        """
        for is_begun, other in ((False, "decode"), (True, "prefill")):
            able = [engine for engine in self.engines if engine.role != other]
            self._taking[is_begun] = able or self.engines

    def down(self, name: str) -> None:
        """Remove an engine. The caller reports each open request of the engine as `left`."""
        self._record(("down", name))
        self.engines = [engine for engine in self.engines if engine.name != name]
        self._sort()

    def cost(self, name: str, costs: RouteCosts) -> None:
        """Record an engine's speed."""
        self._record(("cost", name, costs))
        for engine in self.engines:
            if engine.name == name:
                engine.costs = costs
                engine.refresh()

    def view(
        self,
        priority: int,
        token_ids: Sequence[int],
        max_tokens: int,
        salt: bytes = b"",
        *,
        is_begun: bool = False,
    ) -> RequestView:
        """Return the route's view of a request.

        The view has names of pages if the route uses them.
        """
        pages = page_names(token_ids, salt) if self._uses_pages else ()
        return RequestView(priority, len(token_ids), max_tokens, pages=pages, is_begun=is_begun)

    def choose(
        self, request: RequestView, now_s: float, without: Sequence[str] = ()
    ) -> EngineView | None:
        """Choose an engine; return None if no engine takes the request.

        Args:
            request: View from `view`.
            now_s: Time in seconds, for pools.
            without: Names of engines that take no requests now.
        """
        engines = self._taking[request.is_begun]
        if without:
            engines = [engine for engine in engines if engine.name not in without]
            engines = engines or [engine for engine in self.engines if engine.name not in without]
        if self._uses_pools and engines:
            self._change_pools(engines, now_s)
            short = is_short(request.num_prompt_tokens, engines)
            request = replace(request, is_short=short)
        found = self._asked(request, engines) if engines else None
        self._record(("choose", request, now_s, tuple(without), found and found.name))
        return found

    def _asked(self, request: RequestView, engines: list[EngineView]) -> EngineView:
        try:
            with contained():
                found = self.route(request, engines)
            if any(found is engine for engine in engines):
                return found
            why = f"it returned {found!r:.80}, which is none of the engines"
        except Exception as error:  # noqa: BLE001 - a plug-in may raise any error
            why = told(error)
        self.num_errors += 1
        if self.num_errors == 1 or self.num_errors % 1000 == 0:
            _log.error("the route made no choice, error %d: %s", self.num_errors, why)
        return FALLBACK(request, engines)

    def _change_pools(self, engines: list[EngineView], now_s: float) -> None:
        if self._moved_at_s is not None and now_s - self._moved_at_s < PERIOD_S:
            return
        self._moved_at_s = now_s
        if (moved := pool_change(engines)) is not None:
            moved.is_short = not moved.is_short

    # -- requests

    def sent(
        self, key: Hashable, request: RequestView, engine: EngineView, num_done: int = 0
    ) -> None:
        """Record that an engine gets a request, before its first token.

        Args:
            key: Key of the request, valid until `left`.
            request: View of the request at the choice.
            engine: One of `engines`.
            num_done: Number of tokens that the request got from another engine.
        """
        self._record(("sent", key, request, engine.name, num_done))
        left = max(1, request.num_prompt_tokens - engine.num_kept(request))
        sent = _Sent(engine, request.is_ls, left, request.max_tokens, num_done=num_done)
        if request.pages:
            assert isinstance(engine.kept, CachedPrefixes)
            engine.kept.add(request.pages)
        self._open[key] = sent
        engine.num_sent += 1
        sent.add(1)
        engine.refresh()

    def heard(self, key: Hashable, num_tokens: int, priority: int) -> None:
        """Record a request's class and its number of tokens from all its engines."""
        sent = self._open.get(key)
        if sent is None:
            return
        self._record(("heard", key, num_tokens, priority))
        sent.add(-1)
        new = max(0, num_tokens - sent.num_done)
        sent.num_done += new
        sent.output_tokens = max(0, sent.output_tokens - new)
        sent.prompt_tokens, sent.is_waiting = 0, False
        sent.is_ls = priority <= Priority.LS
        sent.add(1)
        sent.engine.refresh()

    def left(self, key: Hashable) -> str | None:
        """Record that a request has left its engine; return the engine's name."""
        sent = self._open.pop(key, None)
        if sent is None:
            return None
        self._record(("left", key))
        sent.add(-1)
        sent.engine.refresh()
        return sent.engine.name

    def forget_kept(self) -> None:
        """Record that engines have deleted their cached KV."""
        self._record(("forget_kept",))
        for engine in self.engines:
            assert isinstance(engine.kept, CachedPrefixes)
            engine.kept.clear()

    @property
    def num_open(self) -> int:
        """Number of requests that engines have."""
        return len(self._open)


def replayed(entries: Iterable[Entry], route: Route) -> list[tuple[str | None, str | None]]:
    """Replay recorded entries on a new router; return the recorded and the new choices.

    Args:
        entries: Entries from `record`.
        route: Route of the new router.
    """
    router = Router(route)
    choices: list[tuple[str | None, str | None]] = []
    for what, *args in entries:
        if what == "choose":
            request, now_s, without, then = args
            now = router.choose(request, now_s, without)
            choices.append((then, None if now is None else str(now.name)))
        elif what == "up":
            names = ("role", "costs", "seats", "kept_tokens", "hands_over")
            router.up(args[0], **dict(zip(names, args[1:], strict=True)))
        elif what == "sent":
            key, request, name, num_done = args
            engine = next(e for e in router.engines if e.name == name)
            router.sent(key, request, engine, num_done)
        else:
            getattr(router, what)(*args)
    return choices
