"""An answer in progress: the choices of a request, while tokens arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from qllm.errors import QllmError
from qllm.fleet.lossy import Course
from qllm.frontend.handle import Handle, Listener, Piece
from qllm.server.http import access
from qllm.server.http.errors import ApiError
from qllm.server.requests.ask import Served
from qllm.types import FinishReason, RequestStatus

PARKED, PAUSED = "parked", "paused"
STATUS_S = 2.0
"""Most seconds that a comment waits for the engine's report of a request's state."""


class Comment(NamedTuple):
    """A comment that reports the request's state while no tokens arrive."""

    text: str


class Answer:
    """The choices of one request in progress. The owner must close the answer in every case."""

    def __init__(
        self,
        handles: list[Handle],
        n: int,
        served: Served,
        on_close: Callable[["Answer"], None],
        explain: Callable[[Handle, QllmError], ApiError],
        num_waiting: Callable[[], int],
    ) -> None:
        self.handles = handles
        self.n = n
        """Choices per prompt."""
        self.served = served
        self.num_tokens = [0] * len(handles)
        """Tokens produced so far, per choice."""
        self.shows_tokens = True
        """True if usage counts the engine's tokens; False for max_tokens=0."""
        self.exchange = access.CURRENT.get()
        """HTTP request, or batch line, that is answered."""
        self._on_close, self._explain = on_close, explain
        self._num_waiting = num_waiting
        self._is_closed = False
        self.answer_id = self.caller = ""
        self.names: frozenset[str | None] = frozenset()
        """Ids by which the caller may refer to the request."""
        self.is_paused = False
        self.silence_timeout_s: float | None = None
        """Longest time without a token, in seconds. Then the answer ends with an error."""

    async def pieces(
        self, silence_s: float | None = None
    ) -> AsyncIterator[tuple[int, Piece | FinishReason | Comment]]:
        """Yield (choice, piece) as pieces arrive, and (choice, reason) at the end of each choice.

        Args:
            silence_s: Seconds without a piece after which a comment is yielded; None yields none.

        Raises:
            ApiError: A choice failed, timed out, or the engine was closed.
        """
        reached, stood_still = dict.fromkeys(range(len(self.handles)), 0), False
        is_first = silence_s is not None
        clock = asyncio.get_running_loop().time
        heard_s = clock()
        with Listener(self.handles) as changed:
            while True:
                changed.clear()
                for index, item in self._news(reached):
                    if stood_still:
                        yield 0, Comment("resumed")
                    stood_still = False
                    yield index, item
                    if is_first:
                        is_first = False
                        await asyncio.sleep(0)  # frees its bytes before the next piece is made
                    heard_s = clock()  # a client that reads slowly is not a silence
                if not reached:
                    return
                try:
                    async with asyncio.timeout(self._wait_s(silence_s, clock() - heard_s)):
                        await changed.wait()
                except TimeoutError:
                    self._refuse_silence(clock() - heard_s)
                    if silence_s is None:
                        continue
                    said = await self._state()
                    stood_still = stood_still or said in (PARKED, PAUSED)
                    yield 0, Comment(said)

    def _wait_s(self, silence_s: float | None, silent_s: float) -> float | None:
        """Return the seconds to wait for news, until a comment or the error of a silence is due."""
        most_s = self.silence_timeout_s
        left_s = None if most_s is None else max(0.0, most_s - silent_s)
        return min((x for x in (silence_s, left_s) if x is not None), default=None)

    def _refuse_silence(self, silent_s: float) -> None:
        most_s = self.silence_timeout_s
        if most_s is not None and silent_s >= most_s:
            text = f"no token came for {most_s:g} s, which is all that the server allows "
            raise ApiError(504, text + "(silence_timeout_s)", code="timeout")

    def _news(self, reached: dict[int, int]) -> Iterator[tuple[int, Piece | FinishReason]]:
        """Yield news of the open choices: pieces after those counted in `reached`, and ends."""
        for index in list(reached):
            handle = self.handles[index]
            try:
                while isinstance(item := handle.at(reached[index]), Piece):
                    reached[index] += 1
                    self.num_tokens[index] += len(item.token_ids)
                    yield index, item
            except QllmError as error:
                raise self._explain(handle, error) from error
            if item is not None:
                del reached[index]
                yield index, _refuse_unfinished(item)

    async def _state(self) -> str:
        """Return the state of the choice that has progressed most."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._read_state), STATUS_S)
        except (TimeoutError, QllmError):  # a long pass, or between two engines
            return "alive"

    def _read_state(self) -> str:
        found = {handle.status for handle in self.handles}
        if RequestStatus.RUNNING in found:
            return "running"
        if RequestStatus.PARKED in found:
            return PARKED
        if RequestStatus.WAITING in found or not found:
            return f"waiting {self._num_waiting()}"
        return PAUSED if RequestStatus.PAUSED in found else "running"

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far. A prompt counts once for all its choices."""
        cached = sum(h.num_cached_tokens for h in self.handles[:: self.n])
        prompt = sum(len(h.prompt_token_ids) for h in self.handles[:: self.n])
        completion = sum(self.num_tokens) * self.shows_tokens
        found = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        accepted, rejected = map(sum, zip(*(h.num_drafts for h in self.handles), strict=True))
        if accepted or rejected:
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        if self.course is not None:
            found["early_exit_tokens"] = self.course.num_early
        return found

    @property
    def course(self) -> Course | None:
        """The candidates that computed a lossy answer; None for an exact one."""
        log = self.handles[0].log if self.handles else None
        return log if isinstance(log, Course) else None

    def close(self) -> None:
        """Cancel the choices that still run. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self)


def _refuse_unfinished(reason: FinishReason) -> FinishReason:
    if reason is FinishReason.TIMEOUT:
        raise ApiError(504, "the request took longer than the server allows", code="timeout")
    if reason is FinishReason.CANCELLED:
        raise ApiError(503, "the server is shutting down", code="engine_closed")
    return reason
