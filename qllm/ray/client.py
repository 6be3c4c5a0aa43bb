"""A front end for the engines of a Ray Serve deployment, for the server and batch jobs.

Every open request is one stream of a replica that the router has chosen. When the replica dies, the
request waits in a `RequestLog`, like a request whose engine died under a server. Then the request
continues at another replica, after the tokens that this front end has.
"""

import asyncio
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from qllm.config import EngineConfig
from qllm.errors import EngineClosedError, InvalidRequestError, QllmError
from qllm.fleet.members import card_of
from qllm.fleet.stats import described, merged
from qllm.frontend.client import FarClient, ManyClient
from qllm.frontend.handle import Handle
from qllm.frontend.remote import RemoteHello
from qllm.frontend.request_log import RequestLog
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Cancel, Revision, Submission, Update
from qllm.ingress.codec import End, decode_finish, decode_prompt, decode_token, encode_submission
from qllm.ingress.front_end import FrontEndPort, Heard, TokenAt
from qllm.ingress.layout import PROMPT_KIND, TOKEN_KIND
from qllm.ingress.ring import Record
from qllm.ray.calls import Calls, LoopThread, ask
from qllm.ray.wire import Ask, Local, Lost, Placed, Refused, Seen
from qllm.types import FinishReason, RequestId, RequestStatus

LOOK_S = 0.2
"""Seconds between two checks of deadlines of requests that wait for a replica."""
BEAT_S = 3.0
"""Seconds between two signs of life to the replicas."""
FIRST_S = 600.0
"""Seconds within which the first replica must load its model."""
MAX_TRIALS = 2
"""Number of engines that may die before the request has a token there. The last of these deaths
ends the request, as in a fleet."""


class Stream:
    """One request at one replica, on the loop of `Streams`.

    Args:
        item: The request.
        key: Id of the request at replicas.
        seen: Facts about the replicas.
    """

    def __init__(self, item: Submission, key: str, seen: Seen) -> None:
        self.item, self.key, self.local = item, key, Local(item, seen)
        self.num_tokens, self.priority = 0, item.priority
        self.replica: str | None = None
        """The replica that has the request; None while the router looks for one."""
        self.task: asyncio.Task[None] | None = None
        self.moves = False
        """True if the stream's task was cancelled so that the request continues elsewhere."""
        self.telling = asyncio.Lock()
        """Lock that keeps updates to replicas in the order of the calls."""


class Streams(FrontEndPort):
    """A port that sends requests to the replicas of a deployment and receives their streams.

    Args:
        engines: Handle of the deployment.
    """

    number = 0

    def __init__(self, engines: Any) -> None:
        self._engines = engines
        self._client = os.urandom(6).hex()
        """Random id of this front end. Replicas have other front ends too."""
        self._streams: dict[RequestId, Stream] = {}
        self._heard: deque[Heard] = deque()
        self._unheard: set[RequestId] = set()
        """Requests without a token yet."""
        self.seen = Seen()
        self.owner: RayClient | None = None
        self._thread = LoopThread("qllm-receiver")
        self._loop = self._thread.loop

    def start(self, owner: "RayClient") -> None:
        """Start to receive records for a client."""
        self.owner = owner
        self._loop.call_soon_threadsafe(self._look)
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._beats()))

    async def _beats(self) -> None:
        """Send replicas signs of life as long as requests are open."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self._streams:
                with suppress(Exception):  # a replica that has ended needs no sign of life
                    asked = self._engines.broadcast("beat", self._client)
                    await asked.results_async(timeout_s=BEAT_S, return_exceptions=True)

    def _look(self) -> None:
        assert self.owner is not None
        self.owner.log.look()
        self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop receiving."""
        self._thread.close()

    # -- what goes out

    def submit(self, item: Submission) -> None:
        stream = Stream(item, f"{self._client}-{item.request_id}", self.seen)
        self._unheard.add(item.request_id)
        self._streams[item.request_id] = stream
        self._loop.call_soon_threadsafe(self._begin, stream)

    def _begin(self, stream: Stream) -> None:
        stream.task = self._loop.create_task(self._run(stream))

    def revise(self, item: Revision) -> None:
        raise InvalidRequestError(
            "a prompt in pieces needs an engine on this machine, or one over NIXL: over Ray it "
            "must be whole"
        )

    def cancel(self, item: Cancel) -> None:
        self._tell(item.request_id, "cancel")

    def update(self, item: Update) -> None:
        self._tell(item.request_id, "update", item.priority, item.paused)
        if item.priority is not None and (stream := self._streams.get(item.request_id)):
            stream.priority = item.priority

    def _tell(self, number: RequestId, op: str, *args: Any) -> None:
        if (stream := self._streams.get(number)) is not None:
            work = self._told(stream, op, *args)
            self._loop.call_soon_threadsafe(self._loop.create_task, work)

    async def _told(self, stream: Stream, op: str, *args: Any) -> None:
        """Send an update to a request's replica. Without a replica, a cancel ends the request here.

        When a replica has ended, its requests continue elsewhere with the updates applied.
        """
        async with stream.telling:
            if op == "cancel" and stream.replica is None:
                self._stop(stream)
                return
            while stream.replica is None and self._is_open(stream):
                await asyncio.sleep(0.01)
            if self.reaches(stream):
                try:
                    said = await ask(
                        self._engines, "tell", stream.key, op, *args, at=stream.replica
                    )
                except Exception:  # noqa: BLE001 - its stream reports the outcome
                    return
                if said is not None or self.reaches(stream):
                    return
            if op != "cancel":  # the request ends there, unless another replica can take the update
                while self._is_open(stream) and not self.seen.serving:
                    await asyncio.sleep(LOOK_S)
                stream.moves = True
            if self._is_open(stream):
                self._stop(stream)

    def reaches(self, stream: Stream) -> bool:
        """Return True if the request's replica can receive updates.

        A replica that drains finishes its requests, and Ray sends nothing more to that replica.
        """
        return self.seen.replicas is None or stream.replica in self.seen.replicas

    def _is_open(self, stream: Stream) -> bool:
        return self._streams.get(stream.item.request_id) is stream

    @staticmethod
    def _stop(stream: Stream) -> None:
        assert stream.task is not None
        stream.task.cancel()

    @property
    def num_waiting(self) -> int:
        return len(self._unheard)

    def ring_use(self) -> dict[str, float]:
        return {}

    def replica_of(self, number: RequestId) -> Stream | None:
        """Return the replica of a request."""
        return self._streams.get(number)

    # -- what comes back

    def receive(self) -> Iterator[Heard]:
        while self._heard:
            yield self._heard.popleft()

    async def _run(self, stream: Stream) -> None:
        """Receive the stream of one request, on one replica, to its end."""
        number = stream.item.request_id
        answers, is_over = None, False
        lost: Lost | Refused | None = None
        try:
            answers = self._ask(stream)
            async with asyncio.timeout(self._left_s(stream.item)) as limit:
                async for batch in answers:
                    limit.reschedule(None)  # from here the engine applies the deadline
                    if (lost := self._take(stream, batch)) is not None:
                        break
                else:
                    is_over = number not in self._streams
                    lost = None if is_over else Lost("a replica ended its stream")
        except TimeoutError:
            self._end(number, FinishReason.TIMEOUT)
        except asyncio.CancelledError:
            lost = self._stopped(stream)
        except (QllmError, ValueError) as error:  # the replica raised this: the request is wrong
            self._end(number, FinishReason.ERROR, str(error))
        except Exception as error:  # noqa: BLE001 - Ray's own: the replica has ended
            first = (str(error).splitlines() or [""])[0]
            lost = Lost(f"the replica is gone: {type(error).__name__}: {first:.300}")
        if answers is not None and not is_over:
            answers.cancel()
        if lost is not None and self._streams.pop(number, None) is not None:
            self._unheard.discard(number)
            self._carry_over(stream, lost)

    def _stopped(self, stream: Stream) -> Refused | None:
        """End a request whose task was cancelled, or continue it elsewhere."""
        if stream.moves:
            return Refused("its replica drains", is_final=True)
        self._end(stream.item.request_id, FinishReason.CANCELLED)
        return None

    def _carry_over(self, stream: Stream, lost: Lost | Refused) -> None:
        """Continue a request at another replica, after a pause if that replica is full."""
        assert self.owner is not None
        had_it, is_full = isinstance(lost, Lost), isinstance(lost, Refused) and not lost.is_final
        if stream.replica is not None and had_it:
            self.owner.taken[stream.replica] += 1
        self.owner.lost(stream.item.request_id, lost.why, had_it=had_it)
        if is_full:
            self._loop.call_later(LOOK_S, self.owner.go_on)
        else:
            self.owner.go_on()

    def _left_s(self, item: Submission) -> float | None:
        after_ns = item.deadline_ns
        return None if after_ns is None else max(0.0, (after_ns - time.monotonic_ns()) / 1e9)

    def _ask(self, stream: Stream) -> Any:
        item, now = stream.item, time.monotonic_ns()
        deadline_ns = None if item.deadline_ns is None else item.deadline_ns - now
        # clocks differ between machines: times are sent as elapsed and remaining
        aged = replace(item, arrival_ns=max(0, now - item.arrival_ns), deadline_ns=deadline_ns)
        identity = self.seen.identity or ""
        ask = Ask(stream.key, identity, *encode_submission(aged), local=stream.local)
        return self._engines.options(stream=True).generate.remote(ask)

    def _take(self, stream: Stream, batch: Sequence[Any]) -> Lost | Refused | None:
        """Take a replica's first message; return a reason to continue elsewhere, if any."""
        number, now = stream.item.request_id, time.monotonic_ns()
        for said in batch:
            if isinstance(said, Placed):
                stream.replica = said.replica
                continue
            if isinstance(said, Lost | Refused):
                if isinstance(said, Refused) and said.is_final and stream.replica is not None:
                    self.seen.refused[stream.replica] = said.why
                return said
            record = Record(*said)
            if record.kind == TOKEN_KIND:
                self._unheard.discard(number)
                stream.num_tokens += 1
                self._heard.append(TokenAt(decode_token(record)[0], now))
            elif record.kind == PROMPT_KIND:
                self._heard.append(decode_prompt(record))
            else:
                end = decode_finish(record)
                if end.metrics is not None:  # that replica has another clock
                    known = replace(end.metrics, arrival_ns=stream.item.arrival_ns)
                    end = end._replace(metrics=known)
                self._heard.append(end)
                del self._streams[number]
                self._unheard.discard(number)
        if stream.num_tokens and (heard := stream.local.heard) is not None:
            heard(stream.num_tokens, stream.priority)
        assert self.owner is not None
        self.owner.hear()
        return None

    def _end(self, number: RequestId, reason: FinishReason, error: str | None = None) -> None:
        """End a request for which no replica reports an end."""
        if self._streams.pop(number, None) is not None:
            self._unheard.discard(number)
            self._heard.append(End(number, reason, error, None))
            assert self.owner is not None
            self.owner.hear()


class RayClient(FarClient, ManyClient, RingClient):
    """A front end of all engines of a deployment.

    Args:
        engines: Handle of the deployment of engines.
        max_replays: Largest number of times that one request continues at another replica.
        waits: True to let new requests wait while no replica serves. False refuses them.
    """

    _front_end: Streams

    def __init__(self, engines: Any, max_replays: int = 3, *, waits: bool = True) -> None:
        self._calls, streams = Calls(engines), Streams(engines)
        super().__init__(streams)
        self._seen, self._waits = streams.seen, waits
        try:
            card = self._calls.one("card", self._seen, timeout_s=FIRST_S)
            self.hello = RemoteHello.from_json(card)
        except BaseException:
            self._calls.close()
            streams.close()
            raise
        self._seen.card = card_of("the front end's start", self.hello)
        self._seen.identity = self._seen.card.digest
        self.info = self.hello.info
        self.log = RequestLog(max_replays, lambda: None, MAX_TRIALS)
        self.log.go_on(self.replay)
        self.taken = Counter[str]()
        """Number of requests that each replica had when it ended."""
        self._drains = False
        streams.start(self)
        self._register()

    # -- called on the loop of the streams

    def hear(self) -> None:
        """Take the records that have arrived."""
        self._take()

    def lost(self, number: RequestId, why: str, *, had_it: bool) -> None:
        """Store a request whose replica has ended, until the next `go_on`."""
        if (entry := self._open.get(number)) is not None:
            self._forget(number)
            self.log.take(entry, self.now_ns(), why, had_it=had_it)

    def go_on(self) -> None:
        """Send waiting requests to the replicas that the router chooses."""
        self.log.go_on(self.replay)

    def _left(self, number: RequestId) -> None:
        """End the request as the base class does, but without closing a connection."""
        self.lost(number, "its replica ended it", had_it=True)
        self.go_on()

    # -- as a client

    @property
    def config(self) -> EngineConfig:
        config: EngineConfig = self.hello.config
        return config

    def costs_ns(self) -> None:
        """Return None, because replicas report costs to Ray Serve's router, which chooses."""

    @property
    def draining(self) -> bool:
        return self._drains

    def _raise_if_closed(self) -> None:
        super()._raise_if_closed()
        if not self._waits and (why := self._why_none()) is not None:
            raise EngineClosedError(why)

    def _why_none(self) -> str | None:
        """Return the reason why no replica serves; None if one serves, or none is known yet."""
        seen = self._seen
        if seen.replicas is None or seen.serving:
            return None
        whys = "; ".join(f"{name}: {seen.refused.get(name, '')}" for name in seen.replicas)
        return f"none of {len(seen.replicas)} replicas serves{whys and f' ({whys})'}"

    @property
    def back_in_s(self) -> int:
        return max(1, math.ceil(self._seen.load_s))

    @property
    def num_route_errors(self) -> int:
        return 0 if (router := self._seen.router) is None else router.num_errors

    def engines(self) -> list[dict[str, Any]]:
        seen = self._seen
        views = {} if seen.router is None else {view.name: view for view in seen.router.engines}
        return [
            described(
                name,
                views.get(name),
                is_up=seen.serves(name),
                why=seen.refused.get(name),
                num_met=1,
                num_taken=self.taken[name],
            )
            for name in seen.replicas or {}
        ]

    def submit(self, submission: Submission, handle: Handle) -> None:
        if submission.is_open:
            self._front_end.revise(Revision(0, submission))  # this call raises with the reason
        self.log.keep(handle)
        super().submit(submission, handle)

    def _put(self, entry: SavedRequest, submission: Submission) -> None:
        if self._over is not None:
            raise EngineClosedError(self._over)
        super()._put(entry, submission)

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        return [self._status(number) for number in request_ids]

    def _status(self, number: RequestId) -> RequestStatus:
        stream = self._front_end.replica_of(number)
        if stream is None:
            return RequestStatus.FINISHED
        if stream.replica is None:
            return RequestStatus.WAITING
        if not self._front_end.reaches(stream):
            is_paused = (entry := self._open.get(number)) is not None and entry.is_paused
            return RequestStatus.PAUSED if is_paused else RequestStatus.RUNNING
        said = self._calls.one("tell", stream.key, "status", at=stream.replica)
        return self._unseen(number) if said is None else RequestStatus(said)

    def _ask(self, op: str, *args: Any) -> Any:
        self.raise_if_closed()
        if op == "stats":
            return merged(self._calls.all("ask", op))
        return self._calls.one("ask", op, *args)

    def reset_prefix_cache(self) -> None:
        self._calls.all("ask", "reset_prefix_cache")

    def delete_kv(self, tag: bytes) -> int:
        return sum(self._calls.all("ask", "delete_kv", tag))

    @property
    def _why_not(self) -> str:
        return "an engine on this machine; these are replicas of Ray"

    def drain(self) -> None:
        """Stop taking requests at this front end only, because the engines have others."""
        self.raise_if_closed()
        self._drains = True

    def _close(self) -> None:
        with self.admission_lock:
            if self._closing:
                return
            self._closing = True
        self._leave()
        for handle in self.log.handles():
            handle.cancel()
        self.log.end_all("the engine was closed")
        self._end_all("the engine was closed")
        self._calls.close()
        self._front_end.close()
        self._unregister()
