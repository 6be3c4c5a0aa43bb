"""Engines without processes for the tests of fleets: tokens come, and engines die, when told to."""

import itertools
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from qllm.config import EngineConfig
from qllm.errors import MOVED, EngineClosedError, QueueFullError
from qllm.fleet.client import FleetClient
from qllm.fleet.members import Backoff, Member, meet_all
from qllm.fleet.routes import Route
from qllm.frontend.rings import RingClient
from qllm.ingress import Cancel, Revision, Submission, Update
from qllm.ingress.codec import End
from qllm.ingress.front_end import TokenAt
from qllm.ingress.messages import ModelInfo
from qllm.llm import QLLMEngine
from qllm.plan import ModelShape
from qllm.types import FinishReason, Sampled
from tests.support.sizes import SIZES

VOCAB = 97
SHAPE = ModelShape(2, 4, 2, (True, True), VOCAB, 4096)


def next_token(token_ids: tuple[int, ...]) -> int:
    """The token that follows: of this model, a function of all tokens before it."""
    return hash(token_ids) % VOCAB


def answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the model answers when nothing happens."""
    tokens = prompt
    for _ in range(max_tokens):
        tokens = (*tokens, next_token(tokens))
    return tokens[len(prompt) :]


class FakeRings:
    """The front end's end of rings, and the engine behind them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: dict[int, Submission] = {}
        self.done: dict[int, tuple[int, ...]] = {}
        self.paused: set[int] = set()
        self.updates: list[Update] = []
        self.num_waiting = 0
        self.is_full = False
        self.is_closed = False
        self._out: deque[Any] = deque()

    def submit(self, item: Submission) -> None:
        if self.is_full:
            raise QueueFullError("the ring is full")
        self.live[item.request_id] = item
        self.done[item.request_id] = item.token_ids

    def revise(self, item: Revision) -> None:
        number = item.rest.request_id
        self.done[number] = (*self.done[number][: item.keep], *item.rest.token_ids)
        self.live[number] = replace(item.rest, token_ids=self.done[number])

    def cancel(self, item: Cancel) -> None:
        if self.live.pop(item.request_id, None) is not None:
            self._out.append(End(item.request_id, item.reason, None, None))

    def update(self, item: Update) -> None:
        self.updates.append(item)
        if item.paused is not None:
            (self.paused.add if item.paused else self.paused.discard)(item.request_id)

    def receive(self) -> list[Any]:
        out = list(self._out)
        self._out.clear()
        return out

    def ring_use(self) -> dict[str, float]:
        return {"LS": 0.0, "BE": 0.5}

    def close(self) -> None:
        self.is_closed = True
        self.live.clear()

    def end_all(self) -> None:
        """End all requests as an engine does whose owner is gone, or closes it."""
        for number in self.live:
            self._out.append(End(number, FinishReason.CANCELLED, None, None))
        self.live.clear()

    def give(self, number: int) -> str | None:
        """End a request that goes on elsewhere; its ticket."""
        if (item := self.live.get(number)) is None or item.is_open:
            return None
        del self.live[number]
        self._out.append(End(number, FinishReason.ERROR, f"{MOVED}ticket", None))
        return "ticket"

    def make_token(self, number: int) -> None:
        """Compute one more token of a request, and end it where it is done."""
        item = self.live[number]
        if item.is_open or number in self.paused:
            return
        token_id = next_token(self.done[number])
        self.done[number] += (token_id,)
        self._out.append(TokenAt(Sampled(number, token_id), time.monotonic_ns()))
        prompt = len(item.token_ids) - item.num_output_tokens
        if len(self.done[number]) - prompt >= item.max_tokens:
            del self.live[number]
            self._out.append(End(number, FinishReason.LENGTH, None, None))


class FakeClient(RingClient):
    """A front end of a fake engine. What the engine says arrives when `deliver` is called."""

    def __init__(self, number: int, **told: Any) -> None:
        info = ModelInfo("fake", SHAPE, frozenset(), {}, (), {}, None, "w", "s")
        config = EngineConfig(**(SIZES | told.pop("config", {})))
        self.hello = SimpleNamespace(
            info=info._replace(**told.pop("info", {})),
            config=config,
            trace_meta={"policy": told.pop("policy", "Qllm2()")},
            model="fake",
        )
        self.info = self.hello.info
        self.rings: Any = FakeRings(number)
        self.drains = False
        self.asked: list[str] = []
        super().__init__(self.rings)

    def deliver(self) -> None:
        """Take what the engine has said."""
        self._take()

    def die(self) -> None:
        """What the engine has said and nobody took is lost."""
        self._end_all("the engine is gone")

    @property
    def config(self) -> EngineConfig:
        return self.hello.config  # type: ignore[no-any-return]

    @property
    def draining(self) -> bool:
        return self.drains

    @property
    def failure(self) -> str | None:
        return None if self._closing else self._over

    def costs_ns(self) -> tuple[float, float, float]:
        return 1000.0, 50_000.0, 2000.0

    def now_ns(self) -> int:
        return time.monotonic_ns() - 5_000_000_000  # its clock is another one

    def _ask(self, op: str, *args: Any) -> Any:
        self.raise_if_closed()
        self.asked.append(op)
        if op == "statuses":
            return ["running" if i in self.rings.live else None for i in args[0]]
        return {"num_preemptions": 3, "preempt_latencies_ms": [1.0, 2.0, 3.0], "kv_blocks": 10}

    def _close(self) -> None:
        self._closing = True
        self.rings.close()

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache")

    def delete_kv(self, tag: bytes) -> int:
        self._ask("delete_kv")
        return 2

    def drain(self) -> None:
        self.drains = True

    @property
    def trace(self) -> Any:
        raise NotImplementedError

    def call(self, function: Any) -> Any:
        raise NotImplementedError

    def checkpoint(self, path: Any) -> int:
        raise NotImplementedError

    def restore(self, path: Any, make: Any) -> Any:
        raise NotImplementedError


class FakeFleet:
    """A fleet whose engines live and die as told; nothing happens by itself."""

    all_told: ClassVar[dict[str, Any]] = {}
    """What every engine says of itself."""

    def __init__(self, num: int, route: Route, **settings: Any) -> None:
        self.is_there = dict.fromkeys(map(str, range(num)), True)
        self.told: dict[str, dict[str, Any]] = {}
        """What an engine says of itself beside what all say."""
        self._numbers = itertools.count(1)
        backoff = settings.pop("backoff", Backoff(first_s=0))
        members = [
            Member(name, lambda name=name: self._meet(name), backoff) for name in self.is_there
        ]
        card, met = meet_all(members)
        self.client = FleetClient(members, card, met, route, **settings)
        self.engine = QLLMEngine(self.client, None, None)

    def _meet(self, name: str) -> RingClient:
        if not self.is_there[name]:
            raise EngineClosedError(f"nobody answers at {name}")
        told = {**self.all_told, **self.told.get(name, {})}
        return FakeClient(next(self._numbers), **told)

    def __getitem__(self, name: int | str) -> FakeClient:
        """Return the client of an engine that is up."""
        found: Any = self.client.members[str(name)].client
        return found  # type: ignore[no-any-return]

    def up(self) -> list[FakeClient]:
        """Clients of the engines that live, whether the fleet has seen one die or not."""
        clients: list[Any] = [m.client for m in self.client.members.values() if m.client]
        return [client for client in clients if client.failure is None]

    def kill(self, name: int | str) -> None:
        """End an engine; the fleet sees it with its next look."""
        client = self[name]
        if client is not None and client.failure is None:
            client.die()

    def close(self, name: int | str) -> None:
        """Close an engine: it ends what it has, and is gone."""
        client = self[name]
        if client is not None and client.failure is None:
            client.rings.end_all()
            client.deliver()
            client.die()

    def look(self) -> None:
        """Let the fleet look at all its engines, and at what waits."""
        for member in self.client.members.values():
            self.client.look_at(member)
        self.client.log.look()

    def step(self) -> None:
        """Let every engine make one token of each of its requests."""
        for client in self.up():
            for number in list(client.rings.live):
                client.rings.make_token(number)
            client.deliver()
