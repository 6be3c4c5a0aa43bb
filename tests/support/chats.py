"""Chats before a fleet, in a model: a router, and engines that compute prompts and keep pages.

An engine computes prompts one after the other, each without what it keeps of it when it comes, and
keeps pages as `PageStore` does. Answers take no time. Turns come at random.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from statistics import mean
from typing import NamedTuple

from qllm.fleet.router import Router
from qllm.fleet.routes import Route, RouteCosts
from qllm.scheduler.prefix import Chain, Name, PageStore
from qllm.types import NS_PER_S, Priority

PAGE = 64
COSTS = RouteCosts(token_s=1 / 8000)
FIRST, ASKED, ANSWERED, TURNS, LIVES = 400, 40, 24, 5, 3


@dataclass
class Chat:
    """What was said so far; a chat that ends is followed by a new one."""

    shared: list[int]
    rng: random.Random
    lives: int = LIVES
    turn: int = 0
    ids: list[int] = field(default_factory=list)

    def say(self, num_tokens: int) -> None:
        self.ids += [self.rng.randrange(8, 250) for _ in range(num_tokens)]

    def ask(self) -> None:
        if not self.turn:
            self.ids = list(self.shared)
            self.say(FIRST)
        self.say(ASKED)

    def is_answered(self) -> bool:
        """Take the answer in; whether there is more to ask."""
        self.say(ANSWERED)
        self.turn += 1
        if self.turn == TURNS:
            self.turn, self.lives = 0, self.lives - 1
        return self.lives > 0


class Found(NamedTuple):
    """What a route has come to."""

    hit_share: float
    """Tokens of prompts that engines had kept."""
    mean_ttft_s: float
    sent: list[int]


class Engine:
    """Computes prompts one after the other and keeps their pages.

    Args:
        kept: Most tokens that it keeps.
    """

    def __init__(self, kept: int) -> None:
        self.store = PageStore[None](kept // PAGE)
        self.free_s = 0.0
        self.hits = self.queried = 0
        self._pins: dict[int, Sequence[Name]] = {}

    def begin(self, key: int, ids: list[int], now_s: float) -> float:
        """Take a prompt; when it is computed."""
        names = Chain(ids, PAGE, ()).usable(len(ids))
        found = names[: self.store.find(names)]
        self.store.touch(found, Priority.LS, int(now_s * NS_PER_S))
        self.store.pin(found)
        self._pins[key] = found
        self.hits += PAGE * len(found)
        self.queried += len(ids)
        rest = len(ids) - PAGE * len(found)
        self.free_s = max(self.free_s, now_s) + rest * COSTS.token_s
        return self.free_s

    def end(self, key: int, ids: list[int], now_s: float) -> None:
        """Keep what a request has computed."""
        store, now_ns = self.store, int(now_s * NS_PER_S)
        names = Chain(ids, PAGE, ()).upto(len(ids) - 1)
        for name in names:
            if name not in store and store.make_room(Priority.LS, now_ns):
                store.add(name, None, Priority.LS, now_ns)
        store.touch([name for name in names if name in store], Priority.LS, now_ns)
        store.unpin(self._pins.pop(key))


def served(
    route: Route, engines: int, load: float, seed: int, *, per_engine: int = 6, shared: int = 0
) -> Found:
    """Serve chats; all engines together keep 1.25 times all of them.

    Args:
        route: Chooses engines.
        engines: How many.
        load: Share of their time that prompts take if all that can be kept is found.
        seed: Of tokens and times.
        per_engine: Chats at once.
        shared: Tokens with which all of them begin.
    """
    rng, numbers = random.Random(seed), count()
    kept = int(1.25 * per_engine * (FIRST + TURNS * (ASKED + ANSWERED))) + shared
    router = Router(route)
    for number in range(engines):
        router.up(str(number), costs=COSTS, kept_tokens=kept)
    there = {str(number): Engine(kept) for number in range(engines)}
    think_s = per_engine * (FIRST / TURNS + ASKED + ANSWERED) * COSTS.token_s / load
    head = [rng.randrange(8, 250) for _ in range(shared)]
    ttft_s = []
    events: list[tuple[float, int, Chat, tuple[float, int, str] | None]] = []
    for _ in range(per_engine * engines):
        heappush(events, (rng.uniform(0, 2 * think_s), next(numbers), Chat(head, rng), None))
    while events:
        now_s, key, chat, asked = heappop(events)
        if asked is None:
            chat.ask()
            request = router.view(Priority.LS, chat.ids, ANSWERED)
            engine = router.choose(request, now_s)
            assert engine is not None
            router.sent(key, request, engine)
            done_s = there[engine.name].begin(key, chat.ids, now_s)
            heappush(events, (done_s, next(numbers), chat, (now_s, key, engine.name)))
            continue
        began_s, key, name = asked
        ttft_s.append(now_s - began_s)
        router.heard(key, 1, Priority.LS)
        router.left(key)
        if chat.is_answered():
            again_s = now_s + rng.expovariate(1 / think_s)
            heappush(events, (again_s, next(numbers), chat, None))
        there[name].end(key, chat.ids, now_s)
    hits = sum(engine.hits for engine in there.values())
    queried = sum(engine.queried for engine in there.values())
    return Found(hits / queried, mean(ttft_s), [engine.num_sent for engine in router.engines])
