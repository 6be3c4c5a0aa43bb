"""The base class of clients that reach an engine through rings, on this host or another host."""

import itertools
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from qllm.errors import CRASHED, MOVED, ConfigError, EngineClosedError, QueueFullError
from qllm.frontend.client import Client
from qllm.frontend.handle import Handle, RequestedState
from qllm.frontend.request_log import RequestLog
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Cancel, Revision, Submission, Update
from qllm.ingress.codec import End, PromptPart
from qllm.ingress.front_end import MAX_OPEN, FrontEndPort
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.messages import Source
from qllm.types import NS_PER_S, FinishReason, Priority, RequestId, RequestStatus, Sampled

CLOSE_S = 30.0
"""Seconds after which a closing engine is killed, or left alone."""


class RingClient(Client):
    """The front end of an engine in another process: handles here, rings between the processes.

    A subclass makes `_front_end`, calls `_take` on its receiver thread and `_end_all` when the
    engine has ended, and implements `_ask`.
    """

    meets_at = ""
    """Address at which other engines reach the engine; empty without an address."""
    hello: Any
    """The engine's description: `info`, `config`, `trace_meta`, `model`."""

    def __init__(self, front_end: FrontEndPort) -> None:
        super().__init__()
        self._front_end = front_end
        self._closing = False
        self._over: str | None = None
        """The reason why no more records arrive from the engine."""
        self.number_from(itertools.count())
        self._open: dict[RequestId, SavedRequest] = {}

    def number_from(self, counts: Iterator[int]) -> None:
        """Number requests by a count that several clients share, so that all numbers differ."""
        first = self._front_end.number << NUMBER_BITS
        self._numbers = (first + count for count in counts)

    # -- the receiver's thread

    def _take(self) -> None:
        for item in self._front_end.receive():
            if isinstance(item, End):
                self._on_finish(item)
            elif isinstance(item, PromptPart):
                entry = self._entry(item.request_id)
                if entry is not None:
                    entry.handle.on_prompt(item.first, item.logprobs)
            else:
                self._on_token(item.sampled, item.at_ns)

    def _entry(self, request_id: RequestId) -> SavedRequest | None:
        entry = self._open.get(request_id)
        if entry is None:
            with self.admission_lock:  # the request may be one that `restore` is about to register
                entry = self._open.get(request_id)
        return entry

    def _on_token(self, sampled: Sampled, at_ns: int) -> None:
        entry = self._entry(sampled.request_id)
        if entry is None or entry.ended is not None:
            return
        entry.token_ns.append(at_ns)
        try:
            if entry.handle.on_token(sampled):
                entry.ended = FinishReason.STOP, None
        except Exception as error:  # noqa: BLE001 - its text fails (a tokenizer), not the client
            entry.ended = FinishReason.ERROR, f"{type(error).__name__}: {error}"
        if entry.ended is not None:
            self._front_end.cancel(Cancel(sampled.request_id, entry.ended[0]))
        if entry.handle.log is not None:
            entry.handle.log.had_token(entry)

    def _on_finish(self, end: End) -> None:
        entry = self._entry(end.request_id)
        if entry is None:
            return
        log = entry.handle.log
        if log is not None and self._is_of_the_engine(end, entry):
            self._left(end.request_id)
            return
        self._forget(end.request_id)
        if end.error is not None and end.error.startswith(MOVED):
            if end.metrics is not None and not entry.num_had:
                entry.num_cached = end.metrics.num_cached_tokens
            self._moved(entry, end.error.removeprefix(MOVED))
            return
        entry.finish(end.request_id, entry.ended or (end.reason, end.error), end.metrics)
        if log is not None:
            log.heard_of(entry)

    def _left(self, number: RequestId) -> None:
        """Ignore a request that a closing engine ended, because `_end_all` follows."""

    def _is_of_the_engine(self, end: End, entry: SavedRequest) -> bool:
        """Return True if a request ended because its engine ended, and not by a caller's cancel."""
        if end.error is not None:
            return end.error.startswith(CRASHED)
        is_cancelled = end.reason is FinishReason.CANCELLED
        ended_here = entry.ended is not None or entry.handle.finish_reason is not None
        return is_cancelled and not ended_here and not self._closing

    def _moved(self, entry: SavedRequest, ticket: str) -> None:
        """Continue a migrated request at the next engine, or at this engine without its KV."""
        log = entry.handle.log or RequestLog(0, lambda: None)
        entry.source = Source(self.meets_at, ticket) if self.meets_at and ticket else None
        log.move_on(entry, self.now_ns(), self.replay)

    def _forget(self, request_id: RequestId) -> None:
        del self._open[request_id]
        del self.handles[request_id]

    def disown(self) -> None:
        super().disown()
        self._open.clear()
        self._closing, self._over = True, self._whose()

    def _end_all(self, why: str) -> None:
        """Store or end the remaining requests of an engine that has ended."""
        with self.admission_lock:
            self._over = why
        end = (FinishReason.CANCELLED, None) if self._closing else (FinishReason.ERROR, why)
        for request_id, entry in list(self._open.items()):
            self._forget(request_id)
            if entry.handle.log is not None:
                entry.handle.log.take(entry, self.now_ns(), why)
            else:
                entry.finish(request_id, entry.ended or end)

    # -- as a client

    @abstractmethod
    def costs_ns(self) -> Sequence[float] | None:
        """Return the costs of a prompt token, of a decode step of one row, and of a batched token.

        The costs are in nanoseconds. A batched token is one of a full step. None if unknown.

        Raises:
            EngineClosedError: The engine has ended.
        """

    @property
    @abstractmethod
    def draining(self) -> bool:
        """True if the engine refuses new requests."""

    @abstractmethod
    def _ask(self, op: str, *args: Any) -> Any:
        """Send a question to the engine's process; return the answer.

        Raises:
            EngineClosedError: The engine has ended.
        """

    def _raise_if_closed(self) -> None:
        if self._closing:
            raise EngineClosedError("the engine was closed; make a new one")
        if self.failure is not None:
            raise EngineClosedError(f"{self.failure}; make a new one")

    def submit(self, submission: Submission, handle: Handle) -> None:
        if self.draining:
            raise EngineClosedError("the engine drains: it takes no new requests")
        self._put(
            SavedRequest(handle, submission.arrival_ns, submission.priority, submission), submission
        )

    def replay(self, entry: SavedRequest) -> None:
        with self.admission_lock:
            number = self.new_number()
        self._announce(number, entry.source)
        # no piece of the prompt arrives meanwhile
        with entry.handle.prompt_lock, self.admission_lock:
            self.raise_if_closed()
            by_ns = self.now_ns() - time.monotonic_ns()
            entry.shift(by_ns)
            asked = entry.handle.asked
            try:
                self._put(entry, entry.rest(number))
                self._hand_over(entry, number, asked)
            except BaseException:
                entry.shift(-by_ns)
                raise
            entry.source = None
        if entry.handle.finish_reason is not None:  # cancelled before it was migrated
            self.cancel(number)

    def _announce(self, number: RequestId, source: Source | None) -> None:
        """Tell the engine the place of a migrating request's KV. Otherwise KV is computed again."""
        if source is not None and source.address != self.meets_at:
            with suppress(ConfigError):  # the engine fetches no KV
                self._ask("expect", number, *source)

    @property
    def hands_over(self) -> bool:
        """True if requests can migrate from the engine and to the engine with their KV."""
        return bool(self.config.handover_gib and self.meets_at)

    def standing(self) -> Iterator[tuple[SavedRequest, float]]:
        """Yield open BE requests that are not paused, and the seconds since their last progress."""
        now_ns = self.now_ns()
        for entry in list(self._open.values()):
            waits_for_us = entry.is_paused or entry.is_open or entry.ended is not None
            if entry.priority > Priority.LS and not waits_for_us:
                last_ns = max(entry.put_ns, entry.token_ns[-1] if entry.token_ns else 0)
                yield entry, (now_ns - last_ns) / NS_PER_S

    def give_away(self, request_id: RequestId) -> bool:
        """Ask the engine to release a request for another engine; return True if it does.

        The engine returns False for an unknown request, and for a prompt that is still streaming.

        Raises:
            ConfigError: The engine cannot migrate requests.
            EngineClosedError: The engine has ended.
        """
        return self._ask("give", request_id) is not None

    def _hand_over(self, entry: SavedRequest, number: RequestId, asked: RequestedState) -> None:
        """Connect the handle to a request that was submitted just now, or withdraw the request.

        Args:
            entry: The request.
            number: Id of the request at this engine.
            asked: State with which the request was submitted.
        """
        handle = entry.handle
        try:
            if asked.paused:
                self._front_end.update(Update(number, paused=True))
            handle.move(number, self.cancel, self.status, self.update, self.revise)
            handle.tell(asked)
        except BaseException:
            self._forget(number)
            self._front_end.cancel(Cancel(number))
            raise
        if asked.paused and handle.log is not None:
            handle.log.heard_of(entry)  # the request may have been paused after its trial began

    def _put(self, entry: SavedRequest, submission: Submission) -> None:
        if len(self._open) >= MAX_OPEN:
            raise QueueFullError(f"{MAX_OPEN} requests are open; try again later")
        request_id = submission.request_id
        entry.sent_priority, entry.put_ns = submission.priority, self.now_ns()
        entry.number = request_id
        entry.num_had = submission.num_output_tokens
        self._open[request_id], self.handles[request_id] = entry, entry.handle
        try:
            self._front_end.submit(submission)
        except BaseException:
            self._forget(request_id)
            raise

    def let_go(self, entry: SavedRequest) -> bool:
        """Drop a request without an end, because it goes on at another engine.

        Only the thread that delivers tokens may call this, between two tokens: later tokens of this
        engine are ignored. Returns False if another engine has the request.
        """
        number = entry.number
        if number is None or self._open.get(number) is not entry:
            return False
        self._forget(number)
        self.cancel(number)
        return True

    def cancel(self, request_id: RequestId) -> None:
        if self._over is None:
            self._front_end.cancel(Cancel(request_id))

    def update(self, item: Update) -> None:
        if self.config.on_device:
            raise ConfigError(
                "an engine with loop='conditional' keeps a request as it came: its class cannot "
                "change, and it cannot be paused; use loop='host'"
            )
        entry = self._open.get(item.request_id)
        if entry is not None and self._over is None:
            self._front_end.update(item)
            if entry.is_paused and entry.handle.log is not None:
                entry.handle.log.heard_of(entry)  # a paused request gets no token for now

    def revise(self, number: RequestId, item: Revision) -> None:
        entry = self._open.get(number)
        if entry is None:
            return
        item = item.put_at(number, self.now_ns())
        if self._over is None:  # otherwise the next engine gets the new prompt
            rest = replace(item.rest, priority=entry.sent_priority)
            self._front_end.revise(Revision(item.keep, rest))
        entry.revise(item)

    @property
    def num_waiting(self) -> int:
        return self._front_end.num_waiting

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        try:
            told: list[str | None] = self._ask("statuses", list(request_ids))
        except EngineClosedError:
            return [RequestStatus.FINISHED] * len(request_ids)
        pairs = zip(request_ids, told, strict=True)
        return [self._unseen(i) if status is None else RequestStatus(status) for i, status in pairs]

    def _unseen(self, request_id: RequestId) -> RequestStatus:
        """Return the state of a request that the engine does not have: new, or about to end."""
        entry = self._open.get(request_id)
        is_new = entry is not None and not entry.token_ns
        return RequestStatus.WAITING if is_new else RequestStatus.FINISHED

    def stats(self) -> dict[str, Any]:
        ours = {"num_waiting": self.num_waiting, "ring_use": self._front_end.ring_use()}
        return {**self._ask("stats"), **ours}

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        return {**self._ask("watch", since, whole), "ring_use": self._front_end.ring_use()}

    def _leave(self) -> None:
        for handle in list(self.handles.values()):
            handle.cancel()
        deadline = time.monotonic() + CLOSE_S
        while self.handles and time.monotonic() < deadline and self._over is None:
            time.sleep(0.001)
