"""A store of a front end's open requests, so that requests outlive their engine.

    engine dies -> `take` -> waits -> `go_on` -> `QLLMEngine.replay` of the new engine
                               |
                               `-> timeout, cancelled, or `error` without a further engine

A replayed request has its prompt and the output that the front end has received, as after an
eviction. The engine computes the KV of these tokens again and does not sample them again, so no
token is delivered twice. Times are on CLOCK_MONOTONIC while a request is in this store, because
every engine has its own clock.
"""

import itertools
import threading
import time
from collections.abc import Callable

from qllm.errors import EngineClosedError, QllmError, QueueFullError
from qllm.frontend.handle import Handle
from qllm.frontend.saved_request import End, SavedRequest
from qllm.ingress import Revision
from qllm.types import FinishReason, RequestId, RequestStatus


class RequestLog:
    """Requests that wait for another engine after their engine has died. Callable from any thread.

    Requests are replayed by class and arrival, one on trial at a time. The next request follows
    when the request on trial has a token or has ended. If the engine dies again, only the request
    on trial ends in `error`.

    Args:
        max_replays: Largest number of replays of one request; 0 disables them.
        on_replay: Function called for each replayed request.
        max_trials: Number of engines that may die during a request's trial before the request ends
            in `error`.
    """

    def __init__(
        self, max_replays: int, on_replay: Callable[[], None], max_trials: int = 1
    ) -> None:
        self.max_replays, self.max_trials = max_replays, max_trials
        self.on_replay = on_replay
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        """Lock of the thread that replays requests."""
        self._waiting: dict[RequestId, SavedRequest] = {}
        """Waiting requests, in the order of replay."""
        self._numbers = itertools.count()
        self._replay: Callable[[SavedRequest], None] | None = None
        """Function that submits a request to the present engine; None while there is no engine."""
        self._trial: SavedRequest | None = None
        """Request that was replayed and has no token yet."""
        self._over: str | None = None

    def keep(self, handle: Handle) -> None:
        """Replay the handle's request if its engine ends by a failure from now on."""
        if self.max_replays:
            handle.log = self

    def handles(self) -> list[Handle]:
        """Return handles of the requests that wait here."""
        with self._lock:
            return [entry.handle for entry in self._waiting.values()]

    def disown(self, error: str) -> None:
        """Drop the waiting requests in a child of `os.fork`, because the parent owns them."""
        # other threads of the parent may have held the old locks
        self._lock, self._turn = threading.RLock(), threading.Lock()
        for entry in self._waiting.values():
            entry.handle.disown(error)
        self._waiting.clear()

    def holds(self, handle: Handle) -> bool:
        """Return True if the handle's request waits here."""
        with self._lock:
            entry = self._waiting.get(handle.number)
            return entry is not None and entry.handle is handle

    # -- an engine has died

    def take(self, entry: SavedRequest, engine_ns: int, why: str, *, had_it: bool = True) -> None:
        """Store a request whose engine has ended, or end the request.

        Args:
            entry: The request.
            engine_ns: Present time on the ended engine's clock.
            why: Reason why the engine ended.
            had_it: True if the request may have killed the engine; False if the engine never got
                the request.
        """
        entry.shift(time.monotonic_ns() - engine_ns)
        with entry.handle.prompt_lock, self._lock:
            self._replay = None
            was_trial = self._trial is entry
            if was_trial:
                self._trial = None
                entry.num_trials += had_it
            if not had_it and entry.num_replays:
                entry.num_replays -= 1
            end = entry.end() or self._hopeless(entry, why, had_it)
            number = next(self._numbers)
            if end is None:
                self._waiting[number] = entry
                self._move_here(number, entry)
        if end is not None:
            self._finish(entry, number, end)
        elif entry.handle.finish_reason is not None:  # cancelled before it was migrated
            self.cancel(number)

    def _move_here(self, number: RequestId, entry: SavedRequest) -> None:
        """Connect the handle to this log.

        The handle sends its updates to the next engine itself.
        """
        entry.handle.move(number, self.cancel, _status_of(entry), lambda _: None, self.revise)

    def _hopeless(self, entry: SavedRequest, why: str, had_it: bool) -> End | None:
        if self._over is not None or entry.submission is None:
            return FinishReason.ERROR, self._over or why
        too_often = entry.num_trials >= self.max_trials or entry.num_replays >= self.max_replays
        if had_it and too_often:
            text = f"{why}; {entry.num_replays + 1} engines died while they had this request"
            return FinishReason.ERROR, text
        return None

    # -- an engine has handed a request over

    def move_on(
        self, entry: SavedRequest, engine_ns: int, back: Callable[[SavedRequest], None]
    ) -> None:
        """Continue a healthy request at another engine, at once.

        Args:
            entry: The request.
            engine_ns: Present time on the clock of the engine that the request leaves.
            back: Function that submits the request to that engine again, if there is no other
                engine.
        """
        entry.shift(time.monotonic_ns() - engine_ns)
        entry.has_moved = True
        self.heard_of(entry)
        threading.Thread(target=self._move, args=(entry, back), name="qllm-move").start()

    def _move(self, entry: SavedRequest, back: Callable[[SavedRequest], None]) -> None:
        with self._lock:
            self._replay = replay = self._replay or back
            number = next(self._numbers)
        try:
            if (end := entry.end()) is None:
                replay(entry)
                return
        except QllmError as error:
            if self.max_replays and isinstance(error, EngineClosedError | QueueFullError):
                entry.num_replays += 1
                # the request waits like a request whose engine has died
                self._put_back(number, entry)
                return
            end = FinishReason.ERROR, str(error)
        self._finish(entry, number, end)

    # -- a new engine

    def go_on(self, replay: Callable[[SavedRequest], None]) -> None:
        """Replay waiting requests with `QLLMEngine.replay` of a new engine."""
        with self._lock:
            self._replay = replay
            ranked = sorted(self._waiting.items(), key=lambda item: item[1].rank)
            self._waiting = dict(ranked)
        self._next()

    def had_token(self, entry: SavedRequest) -> None:
        """Record that a request has a token."""
        self.heard_of(entry)

    def heard_of(self, entry: SavedRequest) -> None:
        """Record that a replayed request has a token, or has ended."""
        if self._trial is entry:
            with self._lock:
                self._trial = None
            self._next()

    def _next(self) -> None:
        """Replay waiting requests, unless a thread already does; that thread then takes them all.

        A client that replays a request holds locks, and may call `heard_of`. So no thread waits
        here for its turn.
        """
        while (entry := self._first()) is not None and self._turn.acquire(blocking=False):
            try:
                # the request migrates between two pieces of its prompt
                with entry.handle.prompt_lock:
                    if not self._try(entry):
                        return
            finally:
                self._turn.release()

    def _first(self) -> SavedRequest | None:
        with self._lock:
            if self._replay is None or self._trial is not None:
                return None
            return next(iter(self._waiting.values()), None)

    def _try(self, entry: SavedRequest) -> bool:
        """Replay the first waiting request; return True if the next request may follow."""
        with self._lock:
            if self._first() is not entry:
                return True
            replay, number = self._replay, next(iter(self._waiting))
            del self._waiting[number]
            gets_token = not (entry.is_paused or entry.is_open)
            self._trial = entry if gets_token else None
            entry.num_replays += 1
        assert replay is not None
        try:
            replay(entry)
        # the next engine, or the next `look`, tries again
        except (EngineClosedError, QueueFullError):
            self._put_back(number, entry)
            return False
        except QllmError as error:
            self._trial = None
            self._finish(entry, number, (FinishReason.ERROR, str(error)))
        else:
            self.on_replay()
        return True

    def _put_back(self, number: RequestId, entry: SavedRequest) -> None:
        with self._lock:
            self._trial = None
            entry.num_replays -= 1
            self._waiting = {number: entry, **self._waiting}
            self._move_here(number, entry)
        if entry.handle.finish_reason is not None:
            self.cancel(number)

    # -- requests that wait

    def look(self) -> None:
        """End requests past their deadline, and retry requests that found no room.

        Call it often.
        """
        now = time.monotonic_ns()
        with self._lock:
            late = [n for n, entry in self._waiting.items() if entry.is_late(now)]
        for number in late:
            self._end(number, FinishReason.TIMEOUT, None)
        self._next()

    def revise(self, number: RequestId, item: Revision) -> None:
        """Store a piece of a prompt that arrives while no engine has the request."""
        with self._lock:
            entry = self._waiting.get(number)
            if entry is not None:
                entry.revise(item.put_at(number, time.monotonic_ns()))

    def cancel(self, number: RequestId) -> None:
        """End a request that the caller has cancelled."""
        self._end(number, FinishReason.CANCELLED, None)

    def end_all(self, why: str) -> None:
        """End all waiting and later requests in `error`, because there will be no other engine."""
        with self._lock:
            self._over = why
            waiting = list(self._waiting)
        for number in waiting:
            self._end(number, FinishReason.ERROR, why)

    def _end(self, number: RequestId, reason: FinishReason, error: str | None) -> None:
        with self._lock:
            entry = self._waiting.pop(number, None)
        if entry is not None:
            self._finish(entry, number, (reason, error))

    def _finish(self, entry: SavedRequest, number: RequestId, end: End) -> None:
        """Finish a request that no engine has, and tell the handle's own log if it is another."""
        entry.finish(number, end)
        if (log := entry.handle.log) is not None and log is not self:
            log.heard_of(entry)


def _status_of(entry: SavedRequest) -> Callable[[RequestId], RequestStatus]:
    return lambda _: RequestStatus.PAUSED if entry.is_paused else RequestStatus.WAITING
