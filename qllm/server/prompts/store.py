"""The streaming prompts: the limits per caller, and the end of each prompt.

    open -> change, change ... -> sending -> the answer has the seat
      |          |                   `-----> open again, if sending is refused
      `----------'-> deleted, abandoned, cancelled, engine gone: the seat is released once

A prompt that receives no piece for `prompt_idle_s` is abandoned. Its KV and its seat become free.
"""

import asyncio
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from qllm.errors import EngineClosedError, RequestFailedError
from qllm.frontend.streaming_prompt import Piece, StreamingPrompt
from qllm.server.api.answers import owner_of
from qllm.server.http.errors import ApiError
from qllm.server.requests.ask import SHORT, Served
from qllm.server.requests.front import Front
from qllm.types import Priority

KEPT_NAMES = 10_000
"""Most names of ended prompts that the server remembers, to report the reasons of their ends."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Opened:
    """A streaming prompt."""

    name: str
    front: Front
    """Front of the model that the prompt is for."""
    prompt: StreamingPrompt
    served: Served
    caller: str
    is_chat: bool
    num_other_bytes: int
    """Bytes of the fixed part: the other messages of a chat."""
    is_streamed: bool = False
    """True if the pieces are lines of one body, with a time limit of its own. Never listed."""
    has_seat: bool = True
    """True if the prompt holds the seat until it ends; False once the answer holds the seat."""
    is_sending: bool = False
    num_changing: int = 0
    """Number of pieces that have arrived but are not in the prompt yet."""
    timer: asyncio.TimerHandle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that makes changes run one after another."""

    @property
    def num_bytes(self) -> int:
        """Bytes received so far: UTF-8, or 4 per token id."""
        return self.num_other_bytes + self.prompt.num_bytes

    @property
    def fate(self) -> str:
        """The reason of the prompt's end, for messages."""
        if self.prompt.is_sent:
            return "was sent"
        try:
            self.prompt.handle.raise_if_ended()
        except RequestFailedError as error:
            return f"has ended: {error}"
        return "was given up"

    def add(self, piece: Piece, keep: int | None, most_bytes: int) -> None:
        """Append a piece, or put the piece after the first `keep` tokens. May take long.

        Raises:
            ApiError: The prompt would be too large.
            QllmError: The piece is wrong, or the prompt has ended.
        """
        prompt, new = self.prompt, _num_bytes(piece)
        if keep is None:
            check_size(self.num_bytes + new, most_bytes)
            prompt.append(piece)
        else:
            kept = self.num_other_bytes + prompt.num_bytes_before(keep)
            check_size(kept + new, most_bytes)
            prompt.replace(keep, piece)

    def shown(self, idle_s: float) -> dict[str, Any]:
        """Return the prompt in the API's shape.

        May take long, because the last piece is tokenised.
        """
        return {
            "id": self.name,
            "object": "prompt",
            "status": "open",
            "num_tokens": self.prompt.num_tokens,
            "num_bytes": self.num_bytes,
            "priority": self.served.priority.name,
            "service_tier": self.served.tier,
            "idle_timeout_s": idle_s,
        }


class StreamingPrompts:
    """The streaming prompts of a server. Lives on the server's event loop.

    Work whose time grows with a piece or a prompt runs on the threads of the prompt's class.
    """

    def __init__(self, front: Front) -> None:
        self._config = front.config
        self._open: dict[str, Opened] = {}
        self._num_open: Counter[str] = Counter()
        """Number of prompts by caller, including those being opened."""
        self._ended: dict[str, tuple[str, str]] = {}
        """Caller and fate of ended prompts, by name."""
        self._order: deque[str] = deque()

    async def open(
        self,
        front: Front,
        caller: str,
        wanted: Priority,
        prompt: Any,
        *,
        cache_salt: str = "",
        template: Mapping[str, Any] | None = None,
        is_streamed: bool = False,
    ) -> Opened:
        """Open a prompt.

        Args:
            front: Front of the prompt's model.
            caller: Caller that owns the prompt.
            wanted: Requested class. The server may demote it.
            prompt: First part of the prompt: text, ids or messages.
            cache_salt: Salt of the cached KV, the same as in `submit`.
            template: Keywords of `render_chat`, for messages.
            is_streamed: True if the pieces are lines of one body.

        Raises:
            ApiError: The server refuses the prompt.
            QllmError: The engine refuses the prompt.
        """
        mine, most = self._num_open[caller], self._config
        if mine >= most.max_open_prompts:
            raise ApiError(
                429,
                f"{mine} prompts of this API key are open (max_open_prompts="
                f"{most.max_open_prompts}); send or delete one",
                code="open_prompts_limit",
                retry_after_s=1,
            )
        num_bytes = _num_bytes(prompt)
        check_size(num_bytes, most.max_prompt_bytes)
        served = front.admit(wanted, caller)
        self._num_open[caller] += 1
        name = f"prompt-{secrets.token_hex(12)}"
        make = partial(
            front.engine.open,
            served.priority,
            prompt,
            request_id=name,
            cache_salt=cache_salt,
            cache_owner=owner_of(caller),
            template=template or {},
        )
        is_short = num_bytes < SHORT and not template
        try:
            made: StreamingPrompt = await front.text_of(served.priority).run(
                make, is_short=is_short, abandon=StreamingPrompt.cancel
            )
        except BaseException as error:
            front.release(served)
            self._left(caller)
            if isinstance(error, EngineClosedError):
                raise front.unavailable() or error from error
            raise
        front.keep(made.handle)
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
        other = num_bytes - made.num_bytes if is_chat else 0
        opened = Opened(name, front, made, served, caller, is_chat, other, is_streamed)
        self._open[name] = opened
        front.metrics.streaming_prompts.inc()
        self._touch(opened)
        return opened

    def found(self, caller: str, name: str) -> Opened:
        """Return an open prompt of this caller. Prompts of other callers count as missing.

        Raises:
            ApiError: 404 if the prompt is missing; 409 if it has ended or is being sent.
        """
        opened = self._open.get(name)
        if opened is not None and opened.caller == caller and not opened.is_streamed:
            self._check_open(opened)
            return opened
        whose, fate = self._ended.get(name, ("", ""))
        if not fate or whose != caller:
            raise ApiError(404, f"no prompt {name!r:.80} of this API key", code="not_found")
        raise _closed(name, fate)

    def _check_open(self, opened: Opened) -> None:
        """Refuse a prompt that can no longer be changed or sent.

        Raises:
            ApiError: 409.
        """
        name = opened.name
        if opened.is_sending:
            raise _busy(name, "sent")
        if not opened.prompt.is_open:
            self.end(opened, opened.fate)
        if self._open.get(name) is not opened:
            raise _closed(name, self._ended.get(name, ("", opened.fate))[1])

    async def change(self, opened: Opened, do: Callable[[], _T], num_bytes: int) -> _T:
        """Run a change of a prompt on a thread. Changes run one after another, in order.

        Args:
            opened: The prompt.
            do: Function that makes the change, or raises an error.
            num_bytes: Approximate size of the change's input, in addition to the prompt.

        Raises:
            ApiError: The prompt has ended, or is being sent.
        """
        self._check_open(opened)
        self._hold(opened)
        opened.num_changing += 1
        try:
            async with opened.lock:
                return await self.look(opened, do, num_bytes)
        except RequestFailedError:
            self._check_open(opened)  # raises the reason if the prompt has ended meanwhile
            raise
        finally:
            opened.num_changing -= 1
            self._touch(opened)

    async def look(self, opened: Opened, do: Callable[[], _T], num_bytes: int = 0) -> _T:
        """Run a function that reads a prompt and `num_bytes` of other input, on a thread."""
        text = opened.front.text_of(opened.served.priority)
        is_short = num_bytes + opened.num_bytes < SHORT
        done: _T = await text.run(do, is_short=is_short, abandon=_forget)
        return done

    @contextmanager
    def sending(self, front: Front, caller: str, name: str, *, is_chat: bool) -> Iterator[Opened]:
        """Take a prompt in order to send it. The prompt stays open if sending is refused.

        Raises:
            ApiError: The prompt is missing, is being changed or sent, or is for the other endpoint
                or another model.
        """
        opened = self.found(caller, name)
        if opened.front is not front:
            text = f"prompt {name} was opened for the model {opened.front.model_name!r}; name it"
            raise ApiError(400, text, param="model")
        if opened.num_changing:
            raise _busy(name, "changed")
        if opened.is_chat != is_chat:
            was, use = ("messages", "chat/") if opened.is_chat else ("a prompt", "")
            text = f"prompt {name} was opened with {was}; send it to /v1/{use}completions"
            raise ApiError(400, text, param="prompt_id")
        with self.sent(opened):
            yield opened

    @contextmanager
    def sent(self, opened: Opened) -> Iterator[None]:
        """Mark the prompt as being sent inside the block. Changes are refused meanwhile."""
        self._hold(opened)
        opened.is_sending = True
        try:
            yield
        finally:
            opened.is_sending = False
            if opened.prompt.is_open:
                self._touch(opened)
            else:
                self.end(opened, opened.fate)

    def _hold(self, opened: Opened) -> None:
        if opened.timer is not None:
            opened.timer.cancel()
            opened.timer = None

    def _touch(self, opened: Opened) -> None:
        """Restart the idle timer: the prompt is abandoned `prompt_idle_s` from now."""
        self._hold(opened)
        after_s = self._config.prompt_idle_s
        if opened.name in self._open and not (opened.is_streamed or opened.num_changing):
            loop = asyncio.get_running_loop()
            opened.timer = loop.call_later(after_s, self._abandon, opened)

    def _abandon(self, opened: Opened) -> None:
        opened.front.metrics.abandoned.inc()
        self.cancel(opened, f"was abandoned: nothing came for {self._config.prompt_idle_s:g} s")

    def cancel(self, opened: Opened, fate: str) -> None:
        """Cancel a prompt that will not be sent."""
        opened.prompt.cancel()
        self.end(opened, fate)

    def end(self, opened: Opened, fate: str) -> None:
        """Remove an ended prompt, and release the seat unless an answer has the seat.

        Idempotent.
        """
        self._hold(opened)
        if self._open.pop(opened.name, None) is None:
            return
        if opened.has_seat:
            opened.front.release(opened.served)
        self._left(opened.caller)
        opened.front.metrics.streaming_prompts.dec()
        self._ended[opened.name] = opened.caller, fate
        self._order.append(opened.name)
        if len(self._order) > KEPT_NAMES:
            del self._ended[self._order.popleft()]

    def _left(self, caller: str) -> None:
        self._num_open[caller] -= 1
        if not self._num_open[caller]:
            del self._num_open[caller]

    def of(self, caller: str) -> list[Opened]:
        """Return the caller's open prompts. Streamed bodies and prompts in sending are left out."""
        mine = (x for x in self._open.values() if x.caller == caller and not x.is_streamed)
        return [x for x in mine if x.prompt.is_open and not x.is_sending]

    def close(self) -> None:
        """Cancel all prompts, because the server ends."""
        for opened in list(self._open.values()):
            self.cancel(opened, "has ended: the server is shutting down")


def _forget(_: object) -> None:
    """Drop the result of an abandoned change."""


def _busy(name: str, what: str) -> ApiError:
    text = f"prompt {name} is being {what}"
    return ApiError(409, text, code="prompt_busy", retry_after_s=1)


def _closed(name: str, fate: str) -> ApiError:
    return ApiError(409, f"prompt {name} {fate}; open another one", code="prompt_closed")


def check_size(num_bytes: int, most: int) -> None:
    """Refuse a prompt that is too large.

    Raises:
        ApiError: 413.
    """
    if num_bytes > most:
        raise ApiError(
            413,
            f"the prompt would be larger than {most} bytes (max_prompt_bytes)",
            code="prompt_too_large",
        )


def _num_bytes(piece: Any) -> int:
    """Return the size of a piece or of messages: bytes of UTF-8, 4 per token id."""
    if isinstance(piece, str):
        return len(piece.encode("utf-8", "surrogatepass"))
    if isinstance(piece, list) and piece and isinstance(piece[0], Mapping):
        parts = (x.get("content", x.get("text")) for x in piece if isinstance(x, Mapping))
        return sum(map(_num_bytes, parts))
    return 4 * len(piece) if isinstance(piece, list | array) else 0
