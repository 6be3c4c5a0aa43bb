"""Routes: which engine gets a request. Pure functions of what is seen of it and of the engines.

A route is `route(request, engines) -> engine`. It is given a `RequestView` and one `EngineView` of
each engine that takes this request now, at least one and always in the same order (engines that
are down, are draining or have another role are left out), and returns one of them. It reads no
clock, keeps nothing and changes nothing, so equal views give equal choices wherever it is asked: by
a live fleet (`qllm.fleet.client`), by the simulator (`qllm sim --engines`) and by routers of
other systems.
What goes on in time is in the views, which `qllm.fleet.router.Router` keeps from what happens
(sent, first token, tokens, end); a router of another system may fill views of its own and call
`load_route(name)` alone. A choice costs one look at each view.
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
"""Tokens of a page by which routes know a prompt's beginning."""
MAX_PAGES = 32
"""Pages of a prompt that are looked at: what it shares beyond them decides nothing."""
SAMPLE = 4
"""One token of so many names a page: hashing all of them is most of what a choice costs."""


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """How fast an engine is. Only their ratios count where all engines are alike."""

    token_s: float = 1 / 8000
    """Seconds to compute a token of a prompt."""
    step_s: float = 1 / 1000
    """Seconds of a decode step of one row."""
    output_s: float = 1 / 16000
    """Seconds for a token of a decode step in which all seats are taken."""

    @property
    def boundary(self) -> float:
        """Tokens of a prompt up to which reading the weights takes longer than its tokens do."""
        return self.step_s / self.token_s


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a route sees of a request."""

    priority: int
    """Its class, as `qllm.types.Priority`: smaller is sooner."""
    num_prompt_tokens: int
    max_tokens: int
    """Most tokens of its answer."""
    is_short: bool = True
    """Whether its prompt is at most as long as the fleet's boundary."""
    pages: tuple[int, ...] = ()
    """Names of the first whole pages of its prompt (`page_names`); empty if nobody asked."""
    is_begun: bool = False
    """Another engine has given it its first tokens."""

    @property
    def is_ls(self) -> bool:
        """Whether it is latency-sensitive."""
        return self.priority <= Priority.LS


@dataclass(slots=True)
class Backlog:
    """What an engine has still to do for one class, LS or BE."""

    num: int = 0
    """Open requests."""
    num_waiting: int = 0
    """Open requests without a first token."""
    prompt_tokens: int = 0
    """Tokens of their prompts that are not computed, as far as is known."""
    output_tokens: int = 0
    """Most tokens that open requests may still get."""


@dataclass(slots=True, eq=False)
class EngineView:
    """What a route sees of an engine. A route must not change it."""

    name: str
    """Its address, or what else tells it from the others."""
    role: Role = "both"
    is_short: bool = True
    """Whether it is in the pool for short prompts."""
    costs: RouteCosts = RouteCosts()
    seats: int = 64
    """Most requests in one step."""
    ls: Backlog = field(default_factory=Backlog)
    be: Backlog = field(default_factory=Backlog)
    kept: Container[int] = frozenset()
    """Names of pages whose KV it probably keeps: those of prompts that it had last."""
    num_sent: int = 0
    """Requests that it ever got."""
    hands_over: bool = False
    """Requests can leave it, and come to it, with their KV."""
    ls_start_s: float = 0.0
    """Estimated seconds until an LS request that came now would be computed; see `refresh`."""
    busy_s: float = 0.0
    """Estimated seconds of work of all classes that it has: the less, the more it has to spare for
    BE; see `refresh`."""

    def __post_init__(self) -> None:
        """Estimate at once."""
        self.refresh()

    def refresh(self) -> None:
        """Estimate `ls_start_s` and `busy_s` again, after a change of what it has to do.

        BE work gives way to LS, so LS waits for prompts of LS alone, and for a seat if LS has all.
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
        """Open requests of all classes."""
        return self.ls.num + self.be.num

    def num_kept(self, request: RequestView) -> int:
        """Tokens at the beginning of a prompt whose KV it probably keeps.

        A page is kept longer than those after it, so the first that is not ends what is kept.
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
    """LS to the engine where LS starts first, BE to the one with most to spare."""
    return min(engines, key=_ls_order if request.is_ls else _be_order)


def by_length(request: RequestView, engines: Engines) -> EngineView:
    """By class, but long prompts to the engines of their pool (`pool_change`).

    A long one leaves its pool where it would start sooner by more than its own prompt takes: it
    saves more than it makes short ones wait. Short ones go anywhere.
    """
    found = by_class(request, engines)
    pool = [engine for engine in engines if not engine.is_short]
    if request.is_short or not found.is_short or not pool:
        return found
    own = by_class(request, pool)
    saved_s = _load_s(request, own) - _load_s(request, found)
    return found if saved_s > request.num_prompt_tokens * found.costs.token_s else own


def _load_s(request: RequestView, engine: EngineView) -> float:
    """Seconds of an engine that count for a request's class."""
    return engine.ls_start_s if request.is_ls else engine.busy_s


LOAD_RATIO = 1.25
"""`by_prefix` lets a first token come so many times as late as elsewhere.

More finds more of what is kept, but gathers prompts of one long beginning at one engine.
"""


def by_prefix(request: RequestView, engines: Engines) -> EngineView:
    """To the engine that keeps most of the prompt's beginning, by class among equals.

    Not if its first token would come more than `LOAD_RATIO` times as late there as at the engine
    chosen by class, with the rest of the prompt to be computed in both. Where loads are equal too
    the fewest requests decide: idle engines that are taken in turns keep more than the first alone.
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
    """Seconds until its first token, if nothing else comes."""
    rest = max(1, request.num_prompt_tokens - kept)
    return _load_s(request, engine) + rest * engine.costs.token_s


def least(request: RequestView, engines: Engines) -> EngineView:
    """To the engine with the fewest open requests."""
    return min(engines, key=attrgetter("num_open", "num_sent"))


def round_robin(request: RequestView, engines: Engines) -> EngineView:
    """To the engine that got the fewest requests so far."""
    return min(engines, key=attrgetter("num_sent"))


ROUTES: dict[str, Route] = {
    "class": by_class,
    "length": by_length,
    "prefix": by_prefix,
    "least": least,
    "round-robin": round_robin,
}
FALLBACK: Route = least
"""Chooses where a route of a plug-in raised, or returned what is no engine."""
WITHOUT_PAGES = frozenset({by_class, by_length, least, round_robin})
"""Routes that do not look at the pages of a prompt, which are not named for them."""
WITHOUT_POOLS = frozenset({by_class, by_prefix, least, round_robin})
"""Routes that do not look at pools and at what is short."""


def load_route(name: str) -> Route:
    """Find a route by its name, or a function of yours as `module:function`.

    Raises:
        ConfigError: There is none; the message lists the known ones.
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
    """Name the first whole pages of a prompt, each by every fourth token up to its end.

    Names are the same in every process. Two prompts may have one name by chance, or because they
    differ in other tokens alone, which costs a choice that is not the best and nothing else.

    Args:
        token_ids: The prompt.
        salt: KV is shared only between prompts of one salt.
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
"""Weights of `pressure`: per waiting prompt, per second of prompts, per free share of seats."""
HYSTERESIS = 1.0
"""An engine changes its pool where pressures differ by more."""


def pressure(engine: EngineView) -> float:
    """How hard pressed an engine is: `a q + b e - g u` of PLA-Serve.

    q are prompts that wait, e the seconds that computing them takes, u its share of free seats.
    """
    waiting = engine.ls.num_waiting + engine.be.num_waiting
    work_s = (engine.ls.prompt_tokens + engine.be.prompt_tokens) * engine.costs.token_s
    free = max(0.0, 1 - engine.num_open / engine.seats)
    return WAITING_WEIGHT * waiting + WORK_WEIGHT * work_s - SPARE_WEIGHT * free


def pool_change(engines: Engines) -> EngineView | None:
    """Tell which engine, if any, should go to the other pool now.

    The 90th percentiles of the pools' pressures are compared; the least pressed engine of the pool
    that has less goes, unless it is the last one there.
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
    """Whether a prompt is at most as long as the engines' boundary, the median of theirs."""
    boundaries = sorted(engine.costs.boundary for engine in engines)
    return num_prompt_tokens <= boundaries[len(boundaries) // 2]
