"""The caller's object for a request. A caller iterates it, awaits it, or calls `result`.

Tokens arrive on the engine's thread. The caller's thread turns tokens into text. If the request has
stop strings, the engine's thread makes the text, because the text decides when the answer ends.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from qllm.errors import InvalidRequestError, RequestFailedError, failed, shown
from qllm.frontend.checks import priority_class
from qllm.frontend.detokenizer import Detokenizer
from qllm.frontend.waker import Waker
from qllm.ingress import Revision, Update
from qllm.record.metrics import RequestMetrics
from qllm.types import (
    FinishReason,
    Logprobs,
    Priority,
    PromptLogprobs,
    RequestId,
    RequestStatus,
    Sampled,
)


class Piece(NamedTuple):
    """The text and data that one or more new tokens add to the answer."""

    text: str
    """Text. It may be empty, because a token can be part of a character or of a stop string."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """One entry per token if requested, else empty."""
    prompt: PromptLogprobs | None = None
    """Requested log-probabilities of all prompt tokens but the first. Only in the first piece."""
    ends: tuple[int, ...] = ()
    """Characters of the text that were certain after each token; empty without a tokenizer."""
    added: tuple[str, ...] = ()
    """Text that each token adds, including text that may change; empty without a tokenizer."""
    confidences: tuple[float, ...] = ()
    """Confidence of each token if requested (`SamplingParams.confidence`), else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Output ids, including the id that ended the answer."""
    text: str
    finish_reason: FinishReason
    logprobs: tuple[Logprobs, ...] | None
    prompt_logprobs: tuple[Logprobs | None, ...] | None
    """One entry per prompt token, None for the first, if requested with `prompt_logprobs`."""
    metrics: RequestMetrics
    confidences: tuple[float, ...] | None = None
    """Confidence of each token if requested (`SamplingParams.confidence`)."""

    def __str__(self) -> str:
        """Return the answer and its metrics as readable text. `repr` has every field."""
        return f"{self.text}\n\n{self.metrics}"


class RequestedState(NamedTuple):
    """The class and the pause that calls of `Handle.update` requested.

    It is sent to every engine that has the request. Each call makes a new object, so `is` shows if
    a later call has changed the state.
    """

    priority: int | None = None
    """Requested class; None leaves the class of the submission."""
    paused: bool | None = None


class RequestKeeper(Protocol):
    """A store of requests that continue at another engine: `qllm.frontend.request_log.RequestLog`.

    Its entries are `qllm.frontend.saved_request.SavedRequest` objects, each with its handle.
    """

    def take(self, entry: Any, engine_ns: int, why: str) -> None:
        """Store a request whose engine has ended, or end the request."""
        ...

    def had_token(self, entry: Any) -> None:
        """Record that a request has a token. The thread that delivers tokens calls this."""
        ...

    def heard_of(self, entry: Any) -> None:
        """Record that a request has ended, or gets no token for now."""
        ...

    def move_on(self, entry: Any, engine_ns: int, back: Callable[[Any], None]) -> None:
        """Continue a request that its engine gave away. `back` submits it to that engine again."""
        ...


class Handle:
    """One submitted request. Safe to use from any thread.

    Iteration yields a `Piece` whenever one arrives. `async for` does the same on an event loop, and
    `await handle` gives the `Result`.
    """

    def __init__(
        self,
        *,
        number: RequestId,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        detokenizer: Detokenizer | None,
        cancel: Callable[[RequestId], None],
        status: Callable[[RequestId], RequestStatus],
        update: Callable[[Update], None],
        revise: Callable[[RequestId, Revision], None] | None = None,
    ) -> None:
        self.number = number
        self.request_id = request_id
        """The caller's id, or a generated id."""
        self.prompt_token_ids = prompt_token_ids
        self._detokenizer = detokenizer
        self._stop_on_text = detokenizer is not None and detokenizer.can_stop
        self._cancel, self._status = cancel, status
        self._update, self._revise = update, revise
        self.prompt_lock = threading.RLock()
        """Lock for changes of the prompt and for migration. It is taken before any other lock."""
        self.asked = RequestedState()
        """The state that all calls of `update` together have requested."""
        self.log: RequestKeeper | None = None
        """The store that gets the request when its engine dies. None ends the request in `error`
        then."""
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._sampled: list[Sampled] = []
        self._prompt: PromptLogprobs | None = None
        self._pieces: list[Piece] = []
        self._num_read = 0
        """Number of tokens whose text is in `_pieces`."""
        self._reason: FinishReason | None = None
        self._error: str | None = None
        self._metrics: RequestMetrics | None = None
        self._ended = False
        """True once the engine has finished the request. After `cancel` that takes a moment."""

    def __repr__(self) -> str:
        return f"Handle({self.request_id!r}, {self.status.value}, tokens={len(self._sampled)})"

    # -- called by the engine

    def on_token(self, sampled: Sampled) -> bool:
        """Take one token; return True if a stop string has ended the answer."""
        with self._changed:
            if self._reason is not None:
                return False
            self._prompt = sampled.prompt or self._prompt
            self._sampled.append(sampled)
            stopped = self._stop_on_text and self._read()
            self._tell()
        return stopped

    def on_prompt(self, first: int, part: PromptLogprobs) -> None:
        """Take log-probabilities of the prompt, in order, before the first token.

        After an engine has died, the next engine starts again at the first token.
        """
        with self._changed:
            if first == 0 or self._prompt is None:
                self._prompt = part
            else:
                self._prompt.extend(part)

    def on_finish(
        self, reason: FinishReason, error: str | None, metrics: RequestMetrics | None
    ) -> None:
        """Record that the request has ended."""
        with self._changed:
            self._metrics, self._ended = metrics, True
            if self._reason is None:
                self._reason, self._error = reason, error
            self._tell()

    def move(
        self,
        number: RequestId,
        cancel: Callable[[RequestId], None],
        status: Callable[[RequestId], RequestStatus],
        update: Callable[[Update], None],
        revise: Callable[[RequestId, Revision], None] | None = None,
    ) -> None:
        """Connect the request to another engine.

        An earlier `cancel` or `update` may not have reached the new engine. `tell` sends the update
        again.
        """
        with self._changed:
            self.number, self._cancel, self._status = number, cancel, status
            self._update, self._revise = update, revise

    def revise(self, item: Revision) -> None:
        """Replace the prompt of the request (`qllm.frontend.incremental_tokens`).

        The caller holds `prompt_lock`.

        Raises:
            RequestFailedError: The request has ended.
            QueueFullError: The ring has no room now. The prompt has not changed.
        """
        self.raise_if_ended()
        assert self._revise is not None
        self._revise(self.number, item)

    def raise_if_ended(self) -> None:
        """Raise if the request has ended.

        Raises:
            RequestFailedError: The request has ended.
        """
        with self._changed:
            if self._reason is not None:
                why = f": {self._error}" if self._error else ""
                raise RequestFailedError(
                    f"request {self.request_id} has ended ({self._reason.value}){why}"
                )

    def sent(self, prompt_token_ids: tuple[int, ...], detokenizer: Detokenizer | None) -> None:
        """Store the whole prompt of a streaming prompt, before the first token of the answer."""
        with self._changed:
            self.prompt_token_ids = prompt_token_ids
            self._detokenizer = detokenizer
            self._stop_on_text = detokenizer is not None and detokenizer.can_stop

    def tell(self, told: RequestedState) -> None:
        """Send the requested state to the request's engine, unless the engine has it already.

        Calls may overlap with each other, with `update` and with `move`. The last state that an
        engine receives is the last state that was requested.

        Args:
            told: State that the caller last sent to an engine. After `move`, the caller sends the
                state to the next engine.

        Raises:
            QueueFullError: The engine has not taken many earlier updates.
        """
        while True:
            with self._changed:
                if told is self.asked or self._reason is not None:
                    return
                told, number, update = self.asked, self.number, self._update
            update(Update(number, told.priority, told.paused))

    def disown(self, error: str) -> None:
        """End the request in a child of `os.fork`. Pieces that have arrived stay readable."""
        # another thread of the parent may have held the old locks
        self._changed = threading.Condition()
        self.prompt_lock = threading.RLock()
        if not self._ended:
            self._reason, self._error, self._ended = FinishReason.ERROR, error, True

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _read(self) -> bool:
        """Turn new tokens into a piece; return True if a stop string has ended the answer."""
        new = self._sampled[self._num_read :]
        if not new:
            return False
        prompt = None if self._num_read else self._prompt
        self._num_read = len(self._sampled)
        text, ends, added, stopped = "", [], [], False
        ids = tuple(s.token_id for s in new)
        if (detokenizer := self._detokenizer) is not None:
            for token_id in ids:
                part, stopped = detokenizer.push((token_id,))
                text += part
                ends.append(len(text))
                added.append(detokenizer.added)
        logprobs = tuple(s.logprobs for s in new if s.logprobs is not None)
        sure = tuple(s.confidence for s in new if s.confidence is not None)
        self._pieces.append(Piece(text, ids, logprobs, prompt, tuple(ends), tuple(added), sure))
        return stopped

    # -- called by the caller

    @property
    def status(self) -> RequestStatus:
        """The state of the request at its engine."""
        if self._reason is not None:
            return RequestStatus.FINISHED
        return self._status(self.number)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output ids so far."""
        with self._changed:
            return tuple(s.token_id for s in self._sampled)

    def confidences(self, begin: int = 0) -> tuple[float, ...]:
        """Return the confidences of the tokens so far, from token `begin` on.

        They are empty without `SamplingParams.confidence`.
        """
        with self._changed:
            new = self._sampled[begin:]
            return tuple(s.confidence for s in new if s.confidence is not None)

    @property
    def has_ended(self) -> bool:
        """True once the engine has finished the request, so that `result` returns at once."""
        return self._ended

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ended; None while it runs."""
        return self._reason

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, whenever the request has changed."""
        with self._changed:
            self._listeners.append(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        """Stop calling `wake`."""
        with self._changed:
            self._listeners.remove(wake)

    def cancel(self) -> None:
        """End the request at once. Tokens that have arrived stay readable. Idempotent."""
        with self._changed:
            if self._reason is not None:
                return
            self._reason = FinishReason.CANCELLED
            self._tell()
            cancel, number = self._cancel, self.number
        cancel(number)

    def update(
        self, *, priority: str | int | Priority | None = None, paused: bool | None = None
    ) -> None:
        """Change the class of the request, pause it, or resume it. Returns at once.

        The answer does not change. A paused request does no work, and holds its KV until other
        requests need the memory. Its `timeout_s` and its targets do not change. A finished request
        stays finished.

        Args:
            priority: "LS", "BE" or an integer class; None does not change it.
            paused: True to pause, False to resume; None does not change it.

        Raises:
            InvalidRequestError: The class is unknown, or both arguments are None.
            ConfigError: The engine's loop runs on a device.
            QueueFullError: The engine has not taken many earlier updates.
        """
        if priority is None and paused is None:
            raise InvalidRequestError("an update needs a priority, or paused=True or False")
        if not isinstance(paused, bool | None):
            raise InvalidRequestError(f"paused={shown(paused)} must be True or False")
        level = None if priority is None else priority_class(priority)
        with self._changed:
            if self._reason is not None:
                return
            before = self.asked
            self.asked = asked = RequestedState(
                before.priority if level is None else level,
                before.paused if paused is None else paused,
            )
            update, number = self._update, self.number
        try:
            update(Update(number, level, paused))
        except BaseException:
            with self._changed:
                if self.asked is asked:
                    self.asked = before
            raise
        self.tell(asked)

    def pause(self) -> None:
        """Pause the request until `resume`; see `update`."""
        self.update(paused=True)

    def resume(self) -> None:
        """Resume a paused request; see `update`."""
        self.update(paused=False)

    def _next(self, position: int) -> Piece | None:
        """Return the piece at `position` if it has arrived. The caller holds the lock."""
        if position >= len(self._pieces):
            self._read()
        if position < len(self._pieces):
            return self._pieces[position]
        if self._reason is not None and self._detokenizer is not None:
            rest = self._detokenizer.finish()
            if rest:
                self._pieces.append(Piece(rest, (), ()))
                return self._pieces[position]
        return None

    def at(self, position: int) -> Piece | FinishReason | None:
        """Return the piece at `position`, or None if it has not arrived yet.

        After the last piece, return the reason why the request ended.

        Raises:
            RequestFailedError: The request ended in `error`.
        """
        with self._changed:
            piece = self._next(position)
            if piece is None and self._reason is FinishReason.ERROR:
                raise failed(self.request_id, self._error)
            return self._reason if piece is None else piece

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces until the request ends.

        Raises:
            RequestFailedError: The request ended in `error`.
        """
        position = 0
        while True:
            with self._changed:
                while (item := self.at(position)) is None:
                    self._changed.wait()
            if not isinstance(item, Piece):
                return
            position += 1
            yield item

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield pieces on the running event loop."""
        position = 0
        with Listener([self]) as changed:
            while True:
                changed.clear()
                while isinstance(item := self.at(position), Piece):
                    position += 1
                    yield item
                if item is not None:
                    return
                await changed.wait()

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait for the result on the running event loop."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> Result:
        await all_ended([self])
        return self.result(timeout=0)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the request.

        Args:
            timeout: Seconds to wait; None waits without a limit. After a time-out the request
                continues.

        Raises:
            TimeoutError: The request did not end in time.
            RequestFailedError: The request ended in `error`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                status = self.status.value
                raise TimeoutError(f"request {self.request_id} is {status} after {timeout} s")
            while isinstance(self.at(len(self._pieces)), Piece):
                pass
            assert self._metrics is not None
            assert self._reason is not None
            logprobs = tuple(x for piece in self._pieces for x in piece.logprobs)
            confidences = tuple(x for piece in self._pieces for x in piece.confidences)
            prompt = None if self._prompt is None else (None, *self._prompt.tokens())
            return Result(
                request_id=self.request_id,
                prompt_token_ids=self.prompt_token_ids,
                token_ids=tuple(s.token_id for s in self._sampled),
                text="".join(piece.text for piece in self._pieces),
                finish_reason=self._reason,
                logprobs=logprobs or None,
                prompt_logprobs=prompt,
                metrics=self._metrics,
                confidences=confidences or None,
            )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None if no stop string did."""
        return None if self._detokenizer is None else self._detokenizer.stop_string

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens from the prefix cache; 0 until the request has ended."""
        return 0 if self._metrics is None else self._metrics.num_cached_tokens

    @property
    def num_drafts(self) -> tuple[int, int]:
        """Numbers of accepted and of rejected drafted tokens; 0 until the request has ended."""
        found = self._metrics
        return (0, 0) if found is None else (found.num_accepted_drafts, found.num_rejected_drafts)


class Listener:
    """An event of the running event loop that is set whenever one of some handles changes.

    Clear the event before a look at the handles, so that no change between look and wait is missed.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._waker = Waker.here()
        self._event = asyncio.Event()

    def _wake(self) -> None:
        self._waker.call(self._event.set)

    def __enter__(self) -> asyncio.Event:
        for handle in self._handles:
            handle.listen(self._wake)
        return self._event

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.unlisten(self._wake)


async def all_ended(handles: Sequence[Handle]) -> None:
    """Wait on the running event loop until engines have finished all requests."""
    with Listener(handles) as changed:
        while not all(handle.has_ended for handle in handles):
            await changed.wait()
            changed.clear()
