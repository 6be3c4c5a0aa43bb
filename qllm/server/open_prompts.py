"""Prompts that are still coming: `/v1/prompts`, and who may have how many of them.

    POST /v1/prompts            -> id          what is there already, class, salt
    POST /v1/prompts/ID/append                 {"append": "..."}
    PUT  /v1/prompts/ID                        {"replace": "...", "from": tokens that stay}
    POST /v1/chat/completions                  {"prompt_id": ID, ...}: it is whole, answer it

A prompt that gets nothing for `prompt_idle_s` is abandoned: its KV and its seat are for others.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from qllm.errors import EngineClosedError, RequestFailedError
from qllm.frontend.growing_prompt import GrowingPrompt, Piece
from qllm.types import Priority

from .answers import owner_of, wanted_class
from .ask import SHORT, Served
from .errors import RESPONSES, ApiError
from .front import Front
from .protocol import FAIL_FAST, Body, ChatRequest, ServiceTier, TextOr, class_of_tier

KEPT_NAMES = 10_000
"""Names of prompts that have ended, for what is said of them."""
Text = TextOr[int]


@dataclass(slots=True)
class Opened:
    """A prompt that is still coming."""

    name: str
    prompt: GrowingPrompt
    served: Served
    caller: str
    is_chat: bool
    num_bytes: int = 0
    """What came of it, as UTF-8, or 4 per token id."""
    is_streamed: bool = False
    """Its pieces are lines of one body, which has its own limit in time."""
    timer: asyncio.TimerHandle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it changes, or is sent."""


class OpenPrompts:
    """The open prompts of a server. Lives on its event loop."""

    def __init__(self, front: Front) -> None:
        self._front, self._config = front, front.config
        self._open: dict[str, Opened] = {}
        self._ended: dict[str, tuple[str, str]] = {}
        """Caller and fate of those that are open no more."""
        self._order: deque[str] = deque()

    async def open(
        self,
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
            caller: Whose it is.
            wanted: Its class; it may be demoted.
            prompt: What is there: text, ids or messages.
            cache_salt: As for `submit`.
            template: Keywords of `render_chat`, for messages.
            is_streamed: Its pieces are lines of one body.

        Raises:
            ApiError: It is refused.
            QllmError: The engine refuses it.
        """
        mine, most = sum(x.caller == caller for x in self._open.values()), self._config
        if mine >= most.max_open_prompts:
            raise ApiError(
                429,
                f"{mine} prompts of this API key are open (max_open_prompts="
                f"{most.max_open_prompts}); send or delete one",
                code="open_prompts_limit",
                retry_after_s=1,
            )
        num_bytes = _num_bytes(prompt)
        self._check_size(num_bytes)
        front = self._front
        served = front.admit(wanted)
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
        try:
            made: GrowingPrompt = await front.text_of(served.priority).run(
                make, is_short=num_bytes < SHORT, abandon=GrowingPrompt.cancel
            )
        except EngineClosedError as error:
            front.release(served)
            raise front.unavailable() or error from error
        except BaseException:
            front.release(served)
            raise
        front.keep(made.handle)
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
        opened = Opened(name, made, served, caller, is_chat, num_bytes, is_streamed)
        self._open[name] = opened
        front.metrics.open_prompts.inc()
        self._touch(opened)
        return opened

    def _check_size(self, num_bytes: int) -> None:
        most = self._config.max_prompt_bytes
        if num_bytes > most:
            raise ApiError(
                413,
                f"the prompt would be larger than {most} bytes (max_prompt_bytes)",
                code="prompt_too_large",
            )

    def found(self, caller: str, name: str) -> Opened:
        """An open prompt of this caller. That of another is as if it were not there.

        Raises:
            ApiError: 404; or 409 if it is open no more.
        """
        opened = self._open.get(name)
        if opened is not None and opened.caller == caller and opened.prompt.is_open:
            return opened
        whose, fate = self._ended.get(name, ("", ""))
        if opened is not None and opened.caller == caller:
            fate = f"has ended: {_why(opened.prompt)}"
            self.end(opened, fate)
        elif not fate or whose != caller:
            raise ApiError(404, f"no prompt {name!r:.80} of this API key", code="not_found")
        raise ApiError(409, f"prompt {name} {fate}; open another one", code="prompt_closed")

    async def change(self, opened: Opened, piece: Piece, keep: int | None = None) -> None:
        """Append a piece, or let it follow the first `keep` tokens.

        Raises:
            ApiError: The prompt is too large, or was sent meanwhile.
            QllmError: The piece is wrong.
        """
        size = _num_bytes(piece)
        self._check_size(opened.num_bytes * (keep != 0) + size)
        async with opened.lock:
            self.found(opened.caller, opened.name)
            prompt = opened.prompt
            do = partial(prompt.append, piece)
            if keep is not None:
                do = partial(prompt.replace, keep, piece)
            if size < SHORT:
                do()
            else:
                await self._front.in_thread(opened.served.priority, do)
            opened.num_bytes = opened.num_bytes * (keep != 0) + size
        self._touch(opened)

    @contextmanager
    def sending(self, caller: str, name: str, *, is_chat: bool) -> Iterator[Opened]:
        """Take a prompt to send it; it stays open if that is refused.

        Raises:
            ApiError: There is none; it is being changed or sent; it is of the other endpoint.
        """
        opened = self.found(caller, name)
        if opened.lock.locked():
            text = f"prompt {name} is being changed or sent"
            raise ApiError(409, text, code="prompt_busy", retry_after_s=1)
        if opened.is_chat != is_chat:
            was, use = ("messages", "chat/") if opened.is_chat else ("a prompt", "")
            text = f"prompt {name} was opened with {was}; send it to /v1/{use}completions"
            raise ApiError(400, text, param="prompt_id")
        self._hold(opened)
        try:
            yield opened
        finally:
            if opened.prompt.is_open:
                self._touch(opened)
            else:
                self.end(opened, "was sent")

    def _hold(self, opened: Opened) -> None:
        if opened.timer is not None:
            opened.timer.cancel()
            opened.timer = None

    def _touch(self, opened: Opened) -> None:
        """Something came: it is abandoned `prompt_idle_s` from now."""
        self._hold(opened)
        after_s = self._config.prompt_idle_s
        if opened.name in self._open and not opened.is_streamed:
            loop = asyncio.get_running_loop()
            opened.timer = loop.call_later(after_s, self._abandon, opened)

    def _abandon(self, opened: Opened) -> None:
        self._front.metrics.abandoned.inc()
        self.cancel(opened, f"was abandoned: nothing came for {self._config.prompt_idle_s:g} s")

    def cancel(self, opened: Opened, fate: str) -> None:
        """End a prompt that nobody will send."""
        if opened.prompt.is_open:
            opened.prompt.cancel()
        self.end(opened, fate)
        self._front.release(opened.served)

    def end(self, opened: Opened, fate: str) -> None:
        """It is open no more. Twice is once."""
        self._hold(opened)
        if self._open.pop(opened.name, None) is None:
            return
        self._front.metrics.open_prompts.dec()
        self._ended[opened.name] = opened.caller, fate
        self._order.append(opened.name)
        if len(self._order) > KEPT_NAMES:
            del self._ended[self._order.popleft()]

    def of(self, caller: str) -> list[Opened]:
        """Those of a caller."""
        return [x for x in self._open.values() if x.caller == caller]

    def close(self) -> None:
        """Cancel all: the server ends."""
        for opened in list(self._open.values()):
            self.cancel(opened, "has ended: the server is shutting down")


def _why(prompt: GrowingPrompt) -> str:
    try:
        prompt.handle.raise_if_ended()
    except RequestFailedError as error:
        return str(error)
    return "it was sent"


def _num_bytes(piece: Any) -> int:
    if isinstance(piece, str):
        return len(piece.encode("utf-8", "surrogatepass"))
    if isinstance(piece, list) and piece and isinstance(piece[0], Mapping):
        return sum(_num_bytes(message.get("content")) for message in piece)
    return 4 * len(piece) if isinstance(piece, list) else 0


class OpenRequest(Body):
    """`POST /v1/prompts`: a prompt or messages, of which the last one grows."""

    model: str | None = None
    prompt: str | Annotated[list[int], FAIL_FAST] | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    service_tier: ServiceTier | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _one(self) -> "OpenRequest":
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either prompt or messages")
        of_chats = (self.tools, self.chat_template_kwargs, self.reasoning_effort)
        if self.messages is None and any(value is not None for value in of_chats):
            raise ValueError("tools, chat_template_kwargs and reasoning_effort go with messages")
        return self

    def asked_class(self) -> Priority | None:
        """The class it asks for; None leaves it."""
        if self.priority is not None:
            return Priority.LS if self.priority <= 0 else Priority.BE
        return None if self.service_tier is None else class_of_tier(self.service_tier)

    def template(self) -> dict[str, Any]:
        """Keywords of `render_chat`."""
        if self.messages is None:
            return {}
        names = ("tools", "chat_template_kwargs", "reasoning_effort")
        given = {name: getattr(self, name) for name in names}
        return template_of(ChatRequest(messages=self.messages, **given))


def template_of(chat: ChatRequest) -> dict[str, Any]:
    """Keywords of `render_chat` for what a chat asks of its template."""
    variables = chat.template_options()
    names = ("tools", "add_generation_prompt", "continue_final_message")
    how = {name: variables.pop(name) for name in names if name in variables}
    return {**how, "variables": variables}


class AppendRequest(Body):
    """A piece that comes at the end."""

    append: Text


class ReplaceRequest(Body):
    """A piece that follows the first tokens, in place of all that did."""

    replace: Text
    from_: int = Field(alias="from", ge=0)
    """How many tokens stay."""


def shown(opened: Opened, idle_s: float) -> dict[str, Any]:
    """What is said of an open prompt."""
    return {
        "id": opened.name,
        "object": "prompt",
        "status": "open",
        "num_tokens": opened.prompt.num_tokens,
        "num_bytes": opened.num_bytes,
        "priority": opened.served.priority.name,
        "service_tier": opened.served.tier,
        "idle_timeout_s": idle_s,
    }


def routes(front: Front, prompts: OpenPrompts) -> APIRouter:
    """The routes."""
    router, idle_s = APIRouter(tags=["prompts"]), front.config.prompt_idle_s

    async def seen(opened: Opened) -> dict[str, Any]:
        found: dict[str, Any] = await front.in_thread(opened.served.priority, shown, opened, idle_s)
        return found

    @router.post("/v1/prompts", responses=RESPONSES)
    async def open_prompt(body: OpenRequest, request: Request) -> dict[str, Any]:
        """Open a prompt that comes in pieces; it is computed meanwhile."""
        front.check_model(body.model)
        wanted = wanted_class(request, body.asked_class(), front.config.objectives)
        given: Any = body.prompt or "" if body.messages is None else body.messages
        salt, template = body.cache_salt or "", body.template()
        return await seen(
            await prompts.open(
                request.state.caller, wanted, given, cache_salt=salt, template=template
            )
        )

    @router.get("/v1/prompts", responses=RESPONSES)
    async def list_prompts(request: Request) -> dict[str, Any]:
        """The open prompts of this API key."""
        mine = prompts.of(request.state.caller)
        return {"object": "list", "data": [await seen(opened) for opened in mine]}

    @router.get("/v1/prompts/{name}", responses=RESPONSES)
    async def one_prompt(name: str, request: Request) -> dict[str, Any]:
        """An open prompt: how many tokens it has so far."""
        return await seen(prompts.found(request.state.caller, name))

    @router.post("/v1/prompts/{name}/append", responses=RESPONSES)
    async def append(name: str, body: AppendRequest, request: Request) -> dict[str, Any]:
        """Add text, or token ids, at the end."""
        opened = prompts.found(request.state.caller, name)
        await prompts.change(opened, body.append)
        return await seen(opened)

    @router.put("/v1/prompts/{name}", responses=RESPONSES)
    async def replace(name: str, body: ReplaceRequest, request: Request) -> dict[str, Any]:
        """Let other text, or token ids, follow the first tokens."""
        opened = prompts.found(request.state.caller, name)
        await prompts.change(opened, body.replace, body.from_)
        return await seen(opened)

    @router.delete("/v1/prompts/{name}", responses=RESPONSES)
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Give an open prompt up."""
        prompts.cancel(prompts.found(request.state.caller, name), "was deleted")
        return {"id": name, "object": "prompt", "deleted": True}

    return router
