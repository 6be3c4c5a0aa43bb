"""Routes: functions that choose the engine of a request, from views of request and engines.

A route is `route(request, engines) -> engine`. It gets a `RequestView`, and one `EngineView` of
each engine that takes this request now, and returns one of these engines. There is at least one
engine, and the order is always the same. Engines that are down, drain or have another role are left
out. A route reads no clock and has no state. So equal views give equal choices in every caller: in
a live fleet (`qllm.fleet.client`), in the simulator (`qllm sim --engines`), and in routers of other
systems.

Time is in the views, which `qllm.fleet.router.Router` updates from events (sent, first token,
tokens, end). A router of another system may fill views of its own and only call `load_route(name)`.
A choice costs one look at each view.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Literal

from qllm.errors import ConfigError, contained, told
from qllm.types import Priority

Role = Literal["both", "prefill", "decode"]

PAGE_TOKENS = 128
"""Tokens of a page. Routes compare the beginnings of prompts page by page."""
MAX_PAGES = 32
"""Number of compared pages of a prompt. Later pages do not affect the choice."""
SAMPLE = 4
"""Every n-th token is hashed for a page's name. To hash all tokens would dominate the cost."""


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """Speeds of an engine. If all engines are alike, only the ratios of speeds matter."""

    token_s: float = 1 / 8000
    """Seconds to compute a token of a prompt."""
    step_s: float = 1 / 1000
    """Seconds of a decode step of one row."""
    output_s: float = 1 / 16000
    """Seconds for a token of a decode step in which all seats are taken."""

    @property
    def boundary(self) -> float:
        """Largest prompt length at which reading weights takes longer than computing tokens."""
        return self.step_s / self.token_s


@dataclass(frozen=True, slots=True)
class RequestView:
    """The view of a request that a route gets."""

    priority: int
    """Class of the request, as in `qllm.types.Priority`. A smaller class is served sooner."""
    num_prompt_tokens: int
    max_tokens: int
    """Largest number of tokens of the answer."""
    is_short: bool = True
    """True if the prompt is at most as long as the fleet's boundary for short prompts."""
    pages: tuple[int, ...] = ()
    """Names of the first whole pages of the prompt (`page_names`). Empty if the route uses no
    pages."""
    is_begun: bool = False
    """True if another engine produced the first tokens of the answer."""

    @property
    def is_ls(self) -> bool:
        """True if the request is latency-sensitive."""
        return self.priority <= Priority.LS


@dataclass(slots=True)
class Backlog:
    """Work that an engine has left for one class, LS or BE."""

    num: int = 0
    """Number of open requests."""
    num_waiting: int = 0
    """Number of open requests without a first token."""
    prompt_tokens: int = 0
    """Number of prompt tokens of open requests that are not computed yet, as far as known."""
    output_tokens: int = 0
    """Largest number of tokens that open requests may still get."""


@dataclass(slots=True, eq=False)
class EngineView:
    """The view of an engine that a route gets. A route must not change the view."""

    name: str
    """Address or another unique name of the engine."""
    role: Role = "both"
    is_short: bool = True
    """True if the engine is in the pool for short prompts."""
    costs: RouteCosts = RouteCosts()
    seats: int = 64
    """Largest number of requests in one step."""
    ls: Backlog = field(default_factory=Backlog)
    be: Backlog = field(default_factory=Backlog)
    kept: Container[int] = frozenset()
    """Names of pages whose KV the engine probably caches: pages of its latest prompts."""
    num_sent: int = 0
    """Number of requests that the engine ever got."""
    hands_over: bool = False
    """True if requests can migrate from and to the engine with their KV."""
    ls_start_s: float = 0.0
    """Estimated seconds until the engine would compute an LS request that arrives now. See
    `refresh`."""
    busy_s: float = 0.0
    """Estimated seconds of work of all classes; see `refresh`. An engine with less work has more
    room for BE."""

    def __post_init__(self) -> None:
        """Make the first estimates."""
        self.refresh()

    def refresh(self) -> None:
        """Estimate `ls_start_s` and `busy_s` again, after a change of the engine's work.

        BE work yields to LS. So an LS request waits only for prompts of LS, and for a seat if LS
        has all seats.
        """
        ls, be, costs = self.ls, self.be, self.costs
        start_s = ls.prompt_tokens * costs.token_s
        if ls.num >= self.seats:
            start_s += ls.output_tokens / ls.num * costs.step_s
        self.ls_start_s = start_s
        tokens, outputs = ls.prompt_tokens + be.prompt_tokens, ls.output_tokens + be.output_tokens
        self.busy_s = tokens * costs.token_s + outputs * costs.output_s

    @property
    def num_open(self) -> int:
        """Number of open requests of all classes."""
        return self.ls.num + self.be.num

    def num_kept(self, request: RequestView) -> int:
        """Return the number of first tokens of a prompt whose KV the engine probably caches.

        A page stays cached longer than the pages after it, so the first missing page ends the
        count.
        """
        kept = self.kept
        return PAGE_TOKENS * bisect_left(request.pages, True, key=lambda page: page not in kept)


Engines = Sequence[EngineView]
Route = Callable[[RequestView, Engines], EngineView]

_ls_order = attrgetter("ls_start_s", "ls.num", "busy_s")
_be_order = attrgetter("busy_s", "num_open")
_ls_turns = attrgetter("ls_start_s", "ls.num", "busy_s", "num_sent")
_be_turns = attrgetter("busy_s", "num_open", "num_sent")


def by_class(request: RequestView, engines: Engines) -> EngineView:
    """Choose the engine where LS starts first. For BE, choose the engine with the least work."""
    return min(engines, key=_ls_order if request.is_ls else _be_order)


def by_length(request: RequestView, engines: Engines) -> EngineView:
    """Choose by class, but send long prompts to the engines of their pool (`pool_change`).

    A long prompt leaves its pool if it saves more time than its own computation takes. It then
    saves more time than short prompts wait for it. Short prompts go to any engine.
    """
    found = by_class(request, engines)
    pool = [engine for engine in engines if not engine.is_short]
    if request.is_short or not found.is_short or not pool:
        return found
    own = by_class(request, pool)
    saved_s = _load_s(request, own) - _load_s(request, found)
    return found if saved_s > request.num_prompt_tokens * found.costs.token_s else own


def _load_s(request: RequestView, engine: EngineView) -> float:
    """Return the seconds of work that delay a request of this class."""
    return engine.ls_start_s if request.is_ls else engine.busy_s


LOAD_RATIO = 1.25
"""Largest ratio of two times until the first token, in `by_prefix`.

The first time is at the engine with cached KV, the second at the engine chosen by class. A larger
ratio finds more cached KV, but collects prompts with the same long beginning at one engine.
"""


def by_prefix(request: RequestView, engines: Engines) -> EngineView:
    """Choose the engine that caches most of the prompt's beginning.

    Among equal engines, the class decides.

    The engine chosen by class wins if the first token would take more than `LOAD_RATIO` times as
    long at the caching engine. Both times include the uncached rest of the prompt. If loads are
    also equal, the engine with the fewest requests wins, because idle engines used in turns cache
    more than a single engine.
    """
    order = _ls_turns if request.is_ls else _be_turns
    fallback = min(engines, key=order)
    if not request.pages:
        return fallback
    kept = [engine.num_kept(request) for engine in engines]
    most = max(kept)
    best = [engine for engine, tokens in zip(engines, kept, strict=True) if tokens == most]
    found = min(best, key=order)
    found_s = _first_token_s(request, found, most)
    fallback_s = _first_token_s(request, fallback, kept[engines.index(fallback)])
    return found if found_s <= LOAD_RATIO * fallback_s else fallback


def _first_token_s(request: RequestView, engine: EngineView, kept: int) -> float:
    """Return the seconds until the request's first token, if no other request arrives."""
    rest = max(1, request.num_prompt_tokens - kept)
    return _load_s(request, engine) + rest * engine.costs.token_s


def least(request: RequestView, engines: Engines) -> EngineView:
    """Choose the engine with the fewest open requests."""
    return min(engines, key=attrgetter("num_open", "num_sent"))


def round_robin(request: RequestView, engines: Engines) -> EngineView:
    """Choose the engine that got the fewest requests so far."""
    return min(engines, key=attrgetter("num_sent"))


ROUTES: dict[str, Route] = {
    "class": by_class,
    "length": by_length,
    "prefix": by_prefix,
    "least": least,
    "round-robin": round_robin,
}
FALLBACK: Route = least
"""Route that is used if a plug-in's route raised, or returned no engine."""
WITHOUT_PAGES = frozenset({by_class, by_length, least, round_robin})
"""Routes that do not read the pages of a prompt. For these routes, pages get no names."""
WITHOUT_POOLS = frozenset({by_class, by_prefix, least, round_robin})
"""Routes that do not read pools or `is_short`."""


def load_route(name: str) -> Route:
    """Return a route by its name, or a user's function as `module:function`.

    Raises:
        ConfigError: There is no such route; the message lists the known routes.
    """
    if name in ROUTES:
        return ROUTES[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(
            f"route={name!r} is unknown; use one of {', '.join(ROUTES)}, or module:function, a "
            "function route(request, engines) -> engine that can be imported"
        )
    try:
        with contained():
            found = getattr(import_module(module), function)
    except Exception as error:
        raise ConfigError(f"route={name!r} cannot be imported: {told(error)}") from error
    if not callable(found):
        raise ConfigError(f"route={name!r} is {found!r:.80}, and no function")
    return found  # type: ignore[no-any-return]


def page_names(token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, ...]:
    """Return names of the first whole pages of a prompt.

    Every fourth token up to a page's end is hashed.

    Names are the same in every process. Two prompts may have the same name by chance, or because
    they differ only in tokens that are not hashed. The choice is then not the best, but nothing
    else goes wrong.

    Args:
        token_ids: The prompt.
        salt: Salt of the prompt. KV is shared only between prompts with the same salt.
    """
    name, names = int.from_bytes(salt[:32], "little"), []
    num, step = min(len(token_ids) // PAGE_TOKENS, MAX_PAGES), PAGE_TOKENS // SAMPLE
    sampled = tuple(token_ids[: num * PAGE_TOKENS : SAMPLE])
    for lo in range(0, len(sampled), step):
        name = hash((name, sampled[lo : lo + step]))
        names.append(name)
    return tuple(names)


# -- pools of `by_length`

WAITING_WEIGHT, WORK_WEIGHT, SPARE_WEIGHT = 0.1, 10.0, 1.0
"""Weights of `pressure`, per waiting prompt, second of prompt work, and fraction of free seats."""
HYSTERESIS = 1.0
"""An engine changes its pool if the pressures of the two pools differ by more than this."""


def pressure(engine: EngineView) -> float:
    """Return the pressure on an engine: `a q + b e - g u` of PLA-Serve.

    q is the number of waiting prompts, e the seconds to compute these prompts, and u the fraction
    of free seats.
    """
    waiting = engine.ls.num_waiting + engine.be.num_waiting
    work_s = (engine.ls.prompt_tokens + engine.be.prompt_tokens) * engine.costs.token_s
    free = max(0.0, 1 - engine.num_open / engine.seats)
    return WAITING_WEIGHT * waiting + WORK_WEIGHT * work_s - SPARE_WEIGHT * free


def pool_change(engines: Engines) -> EngineView | None:
    """Return the engine that should change its pool now; None if no engine should.

    The 90th percentiles of the pools' pressures are compared. The engine with the least pressure
    leaves the pool with less pressure, if it is not the last engine of the pool.
    """
    short = sorted((e for e in engines if e.is_short), key=pressure)
    long = sorted((e for e in engines if not e.is_short), key=pressure)
    if not short or not long:
        donor = short or long
        return donor[0] if len(donor) > 1 else None
    gap = _p90(short) - _p90(long)
    donor = long if gap > 0 else short
    return donor[0] if abs(gap) > HYSTERESIS and len(donor) > 1 else None


def _p90(ordered: Engines) -> float:
    return pressure(ordered[math.ceil(0.9 * len(ordered)) - 1])


def is_short(num_prompt_tokens: int, engines: Engines) -> bool:
    """Return True if a prompt is at most as long as the median of the engines' boundaries."""
    boundaries = sorted(engine.costs.boundary for engine in engines)
    return num_prompt_tokens <= boundaries[len(boundaries) // 2]
