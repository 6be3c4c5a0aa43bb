"""What a front end keeps of open requests, so that they outlive their engine.

    engine dies -> `take` -> waits -> `go_on` -> `QLLMEngine.replay` of the new engine
                               |
                               `-> timeout, cancelled, or `error` without a further engine

A replayed request is its prompt and the output that the front end has, as after an eviction: what
was delivered is computed again and not sampled again, so no token comes twice. Times are on
CLOCK_MONOTONIC while a request is here, since every engine has a clock of its own.
"""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qllm.errors import EngineClosedError, QllmError, QueueFullError
from qllm.handle import Handle
from qllm.ingress import Submission
from qllm.ingress.codec import EngineMetrics
from qllm.types import FinishReason, RequestId, RequestStatus

if TYPE_CHECKING:
    from qllm.llm import QLLMEngine

End = tuple[FinishReason, str | None]


class Open:
    """An open request: its handle, and what it takes to submit it again.

    Args:
        handle: Who waits; it has the output so far.
        arrival_ns: Of the request.
        priority: Its class.
        submission: As it was sent first; None if it came out of a checkpoint.
    """

    def __init__(
        self, handle: Handle, arrival_ns: int, priority: int, submission: Submission | None = None
    ) -> None:
        self.handle = handle
        self.submission = submission
        self.unknown = EngineMetrics.unknown(arrival_ns, priority, len(handle.prompt_token_ids))
        self.token_ns: list[int] = []
        self.ended: End | None = None
        """Set once its text ended it, before the engine knew."""
        self.num_replays = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Smallest first."""
        return self.unknown.priority, self.unknown.arrival_ns

    def shift(self, by_ns: int) -> None:
        """Move its times to another clock."""
        self.unknown = replace(self.unknown, arrival_ns=self.unknown.arrival_ns + by_ns)
        self.token_ns[:] = [at_ns + by_ns for at_ns in self.token_ns]
        if (item := self.submission) is not None:
            deadline_ns = None if item.deadline_ns is None else item.deadline_ns + by_ns
            arrival_ns = item.arrival_ns + by_ns
            self.submission = replace(item, arrival_ns=arrival_ns, deadline_ns=deadline_ns)

    def rest(self, number: RequestId) -> Submission:
        """What is left to do, as a request of its own."""
        assert self.submission is not None
        done = self.handle.token_ids
        token_ids = (*self.submission.token_ids, *done)
        return replace(
            self.submission, request_id=number, token_ids=token_ids, num_output_tokens=len(done)
        )

    def is_late(self, now_ns: int) -> bool:
        """Whether its deadline has passed."""
        deadline_ns = None if self.submission is None else self.submission.deadline_ns
        return deadline_ns is not None and deadline_ns <= now_ns

    def end(self) -> End | None:
        """How it ended, if it did before its engine could say so."""
        item, done = self.submission, self.handle.token_ids
        if self.ended is not None or item is None:
            return self.ended
        if self.handle.finish_reason is not None:
            return self.handle.finish_reason, None
        if done and done[-1] in item.stop_ids:
            return FinishReason.STOP, None
        return (FinishReason.LENGTH, None) if len(done) >= item.max_tokens else None

    def finish(self, number: RequestId, end: End, known: EngineMetrics | None = None) -> None:
        """Tell who waits, with what the engine said of it if it could."""
        known = known or self.unknown
        if self.num_replays:  # the engine that planned it first took that along
            known = replace(known, queue_ms=None)
        metrics = known.complete(number, self.handle.request_id, end[0], self.token_ns)
        self.handle.on_finish(*end, metrics)


class RequestLog:
    """Requests whose engine has died. They wait here for the next one. Callable from any thread.

    They are replayed by class and arrival, each when the one before has got a token or ended: when
    an engine dies again, the request that was to show itself ends in `error`, and no other.

    Args:
        max_replays: Most times that one request is carried over; 0 keeps none.
        on_replay: Called for each that was replayed.
    """

    def __init__(self, max_replays: int, on_replay: Callable[[], None]) -> None:
        self.max_replays = max_replays
        self._on_replay = on_replay
        self._lock = threading.RLock()
        self._waiting: dict[RequestId, Open] = {}
        """In the order in which they go on."""
        self._numbers = itertools.count()
        self._engine: QLLMEngine | None = None
        """Takes them; None while there is none."""
        self._trial: Open | None = None
        """Replayed, and not heard of since."""
        self._over: str | None = None

    def keep(self, handle: Handle) -> None:
        """Carry its request over if its engine dies from now on."""
        if self.max_replays:
            handle.log = self

    def holds(self, handle: Handle) -> bool:
        """Whether its request waits here."""
        with self._lock:
            entry = self._waiting.get(handle.number)
            return entry is not None and entry.handle is handle

    # -- an engine has died

    def take(self, entry: Open, engine_ns: int, why: str) -> None:
        """Keep a request of an engine that is gone, or end it.

        Args:
            entry: The request.
            engine_ns: What that engine's clock would say now.
            why: It is gone.
        """
        entry.shift(time.monotonic_ns() - engine_ns)
        with self._lock:
            self._engine = None
            was_trial = self._trial is entry
            if was_trial:
                self._trial = None
            end = entry.end() or self._hopeless(entry, was_trial, why)
            number = next(self._numbers)
            if end is None:
                self._waiting[number] = entry
                entry.handle.move(number, self.cancel, lambda _: RequestStatus.WAITING)
        if end is not None:
            entry.finish(number, end)
        elif entry.handle.finish_reason is not None:  # cancelled before it was moved
            self.cancel(number)

    def _hopeless(self, entry: Open, was_trial: bool, why: str) -> End | None:
        if self._over is not None or entry.submission is None:
            return FinishReason.ERROR, self._over or why
        if was_trial or entry.num_replays >= self.max_replays:
            text = f"{why}; {entry.num_replays + 1} engines died while they had this request"
            return FinishReason.ERROR, text
        return None

    # -- a new one

    def go_on(self, engine: "QLLMEngine") -> None:
        """Replay what waits on this engine."""
        with self._lock:
            self._engine = engine
            ranked = sorted(self._waiting.items(), key=lambda item: item[1].rank)
            self._waiting = dict(ranked)
        self._next()

    def heard_of(self, entry: Open) -> None:
        """A request that was replayed has a token, or has ended."""
        if self._trial is entry:
            with self._lock:
                self._trial = None
            self._next()

    def _next(self) -> None:
        while True:
            with self._lock:
                engine = self._engine
                if engine is None or self._trial is not None or not self._waiting:
                    return
                number = next(iter(self._waiting))
                self._trial = entry = self._waiting.pop(number)
                entry.num_replays += 1
            try:
                engine.replay(entry)
            except (EngineClosedError, QueueFullError):  # the next engine, or the next look
                self._put_back(number, entry)
                return
            except QllmError as error:
                self._trial = None
                entry.finish(number, (FinishReason.ERROR, str(error)))
            else:
                self._on_replay()

    def _put_back(self, number: RequestId, entry: Open) -> None:
        with self._lock:
            self._trial = None
            entry.num_replays -= 1
            self._waiting = {number: entry, **self._waiting}
        if entry.handle.finish_reason is not None:
            self.cancel(number)

    # -- while they wait

    def look(self) -> None:
        """End what is past its deadline, and try again what found no room. Call it regularly."""
        now = time.monotonic_ns()
        with self._lock:
            late = [n for n, entry in self._waiting.items() if entry.is_late(now)]
        for number in late:
            self._end(number, FinishReason.TIMEOUT, None)
        self._next()

    def cancel(self, number: RequestId) -> None:
        """Nobody wants this request any more."""
        self._end(number, FinishReason.CANCELLED, None)

    def end_all(self, why: str) -> None:
        """There is no further engine: what waits ends in `error`, and what is taken from now on."""
        with self._lock:
            self._over = why
            waiting = list(self._waiting)
        for number in waiting:
            self._end(number, FinishReason.ERROR, why)

    def _end(self, number: RequestId, reason: FinishReason, error: str | None) -> None:
        with self._lock:
            entry = self._waiting.pop(number, None)
        if entry is not None:
            entry.finish(number, (reason, error))
