"""One replica of Ray Serve: an engine in its own process, and the relay to front ends."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

from qllm.errors import EngineClosedError, InvalidRequestError, QueueFullError
from qllm.fleet.members import card_of
from qllm.frontend.handle import Handle
from qllm.frontend.remote import RemoteHello
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import End, SavedRequest
from qllm.frontend.waker import Waker
from qllm.ingress.codec import (
    EngineMetrics,
    decode_submission,
    encode_finish,
    encode_prompt,
    encode_token,
)
from qllm.ingress.layout import FINISH_KIND, PROMPT_KIND, REQUEST_KIND, TOKEN_KIND
from qllm.ingress.messages import EngineCard
from qllm.ingress.ring import Record
from qllm.ray.load import ReplicaLoad, be_tokens, front_end_of
from qllm.ray.scaling import BE_TOKENS, LATENESS
from qllm.ray.wire import Ask, Lost, Placed, Refused, Said, Seen
from qllm.server.config import ServerConfig
from qllm.server.serve import make_engine
from qllm.torchless import forgo_torch
from qllm.types import PromptLogprobs, RequestId, RequestStatus, Sampled

SILENT_TICKS = 20
"""Seconds without a sign of life after which a front end counts as ended. The clock stalls with the
process.

A replica that drains gets no signs of life. So there a front end counts as ended only after these
seconds and `drain_s`.
"""


class Relay(Handle):
    """A request whose caller is in another process. Messages of the engine are sent to the caller.

    Args:
        ask: The request as it arrived.
        push: Function that sends a message. It is called on the engine's receiver thread.
        on_token: Function that is called on that thread for each token.
    """

    def __init__(
        self, ask: Ask, push: Callable[[Said], None], on_token: Callable[[], None]
    ) -> None:
        item = decode_submission(Record(REQUEST_KIND, ask.flags, ask.body))
        if item.wrong is not None:
            raise InvalidRequestError(item.wrong)
        super().__init__(
            number=item.request_id,
            request_id=item.name,
            prompt_token_ids=item.token_ids[: item.num_prompt_tokens],
            detokenizer=None,
            cancel=lambda _: None,
            status=lambda _: RequestStatus.WAITING,
            update=lambda _: None,
        )
        self.far_number = item.request_id
        """The front end's id of the request."""
        for token_id in item.token_ids[item.num_prompt_tokens :]:
            super().on_token(Sampled(self.far_number, token_id))  # the caller has these tokens
        now = time.monotonic_ns()
        deadline_ns = None if item.deadline_ns is None else now + item.deadline_ns
        self.asked_for = replace(
            item,
            token_ids=self.prompt_token_ids,
            num_output_tokens=0,
            arrival_ns=now - item.arrival_ns,
            deadline_ns=deadline_ns,
        )
        self._push, self._on_token = push, on_token
        self.log = self

    def on_token(self, sampled: Sampled) -> bool:
        stopped = super().on_token(sampled)
        self._on_token()
        self._push((TOKEN_KIND, *encode_token(sampled._replace(request_id=self.far_number), 0)))
        return stopped

    def on_prompt(self, first: int, part: PromptLogprobs) -> None:
        super().on_prompt(first, part)
        for body in encode_prompt(self.far_number, part):
            self._push((PROMPT_KIND, 0, body))

    def ended(self, end: End, known: EngineMetrics) -> None:
        """Send the end of the request."""
        self._push((FINISH_KIND, *encode_finish(self.far_number, *end, known)))

    # -- as a log: the engine's process is gone, and this one is not

    def take(self, entry: Any, engine_ns: int, why: str, *, had_it: bool = True) -> None:
        """Tell the front end to continue the request at another replica."""
        self._push(Lost(why))

    def had_token(self, entry: Any) -> None:
        """Do nothing, because the token goes to the caller in the other process."""

    def heard_of(self, entry: Any) -> None:
        """Do nothing, because the end goes to the caller in the other process."""

    def move_on(self, entry: Any, engine_ns: int, back: Callable[[Any], None]) -> None:
        """Tell the front end to continue the request elsewhere, because replicas migrate no KV."""
        self._push(Lost("the engine handed it over"))


class Relayed(SavedRequest):
    """An open request whose end is sent to its caller."""

    handle: Relay

    def finish(self, number: RequestId, end: End, known: EngineMetrics | None = None) -> None:
        self.handle.ended(end, known or replace(self.unknown, priority=self.priority))
        super().finish(number, end, known)


class EngineReplica:
    """A replica, which serves one engine to front ends. Ray Serve makes a deployment of this class.

    Args:
        config: Settings of the server, including those of its engine.
        ttft_ms: Target in ms for the first token of LS requests without one.
        window_s: Seconds over which lateness is counted.

    Raises:
        QllmError: The engine cannot be made.
    """

    def __init__(self, config: ServerConfig, ttft_ms: float | None, window_s: float) -> None:
        if config.device == "cpu":
            forgo_torch()
        begin = time.monotonic()
        self._engine = make_engine(config, takes_digest=True)
        self._load_s = time.monotonic() - begin
        self._client = cast(RingClient, self._engine.client)
        self._load = ReplicaLoad(ttft_ms, window_s)
        self._relays: dict[str, Relay] = {}
        self._drain_s = config.drain_s
        self._silent: dict[str, int] = {}
        """Seconds since each front end's last sign of life."""
        self._watch: asyncio.Task[None] | None = None
        hello = self._client.hello
        card = EngineCard(hello.info, hello.config, hello.trace_meta, config.model)
        self._card = card.to_json()
        self._identity = card_of("", RemoteHello.from_json(self._card)).digest

    # -- what Ray Serve asks

    def check_health(self) -> None:
        """Raise once the engine has ended. Ray Serve then makes another replica."""
        if (why := self._engine.failure) is not None:
            raise EngineClosedError(why)
        self._engine.raise_if_closed()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the model and version. The router skips and reports replicas that differ."""
        config = self._engine.config
        return {
            "identity": self._identity,
            "card": self._card,
            "load_s": self._load_s,
            "seats": config.max_num_seqs,
            "kept_tokens": config.kept_tokens,
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the remaining work of all front ends."""
        return {"backlogs": self._load.counts()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics by which `Scaling` decides."""
        late = self._load.lateness(time.monotonic_ns())
        return {LATENESS: late, BE_TOKENS: float(be_tokens(self._load.counts()))}

    def __del__(self) -> None:
        """Close the engine. Ray Serve calls this after draining the replica."""
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()

    # -- what front ends ask

    def card(self, seen: Seen, at: str | None = None) -> dict[str, Any]:
        """Return the facts about the model that a front end needs."""
        return self._card

    async def generate(self, ask: Ask) -> AsyncIterator[list[Said]]:
        """Serve one request: yield its replica, then its tokens as they arrive, then its end.

        Raises:
            InvalidRequestError: The request is wrong.
        """
        yield [Placed(_own_id())]
        if ask.identity != self._identity:  # while another model or version is rolled out
            yield [Refused("this replica serves another model or version", is_final=True)]
            return
        due: deque[Said] = deque()
        waker, event = Waker.here(), asyncio.Event()

        def push(said: Said) -> None:
            due.append(said)
            waker.call(event.set)

        load, key = self._load, ask.key
        relay = Relay(ask, push, lambda: load.token(key, time.monotonic_ns()))
        item = relay.asked_for
        done = len(relay.token_ids)
        load.opened(
            key,
            item.priority,
            item.arrival_ns,
            item.slo,
            len(item.token_ids) + done,
            item.max_tokens - done,
            is_moved=done > 0,
        )
        self._relays[key] = relay
        self.beat(front_end_of(key))
        if self._watch is None:
            self._watch = asyncio.create_task(self._leave_the_dead())
        try:
            entry = Relayed(relay, item.arrival_ns, item.priority, item)
            try:
                self._client.replay(entry)
            except (EngineClosedError, QueueFullError) as error:
                yield [Refused(str(error), is_final=isinstance(error, EngineClosedError))]
                return
            while True:
                await event.wait()
                event.clear()
                batch = [due.popleft() for _ in range(len(due))]
                if batch:
                    yield batch
                if batch and _is_last(batch[-1]):
                    return
        finally:
            del self._relays[key]
            load.closed(key)
            relay.cancel()  # does nothing if the request has ended

    def beat(self, front_end: str) -> None:
        """Record a front end's sign of life."""
        self._silent[front_end] = 0

    async def _leave_the_dead(self) -> None:
        """End the requests of front ends that have ended, whose streams Ray does not end."""
        while True:
            await asyncio.sleep(1)
            self.tick()

    def tick(self) -> None:
        """Note that a second has passed."""
        open_now = {front_end_of(key) for key in self._relays}
        self._silent = {name: self._silent.get(name, 0) + 1 for name in open_now}
        for key, relay in list(self._relays.items()):
            if self._silent[front_end_of(key)] > SILENT_TICKS + self._drain_s:
                relay.cancel()

    async def tell(self, key: str, op: str, *args: Any, at: str | None = None) -> str | None:
        """Change an open request, or return the request's status.

        Args:
            key: Id of the request.
            op: "cancel", "update" with a class and a pause flag, or "status".
            *args: Arguments of the operation.
            at: Name of the replica. The router has used it already.

        Returns:
            The status, or "" after a change; None if this replica has no such request.
        """
        relay = self._relays.get(key)
        if relay is None:
            return None
        if op == "status":
            return (await asyncio.to_thread(lambda: relay.status)).value
        if op == "cancel":
            relay.cancel()
            return ""
        priority, paused = args
        relay.update(priority=priority, paused=paused)
        if priority is not None:
            self._load.changed(key, priority)
        return ""

    async def ask(self, op: str, *args: Any, at: str | None = None) -> Any:
        """Return the engine's answer to "stats", "watch", "reset_prefix_cache" or "delete_kv"."""
        return await asyncio.to_thread(getattr(self._client, op), *args)


def _is_last(said: Said) -> bool:
    return isinstance(said, Lost) or said[0] == FINISH_KIND


def _own_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
