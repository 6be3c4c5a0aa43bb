"""One request whose body streams: lines of JSON, answered when the body ends.

    POST /v1/completions              Content-Type: application/x-ndjson
    {"model": "...", "max_tokens": 200, "prompt": "Answer from these pages: "}
    {"append": "first page ..."}
    {"replace": "a better first page ...", "from": 8}

The first line is the usual body. The engine computes what came while the next line is made. Who
hangs up cancels.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from qllm.errors import InvalidRequestError

from . import chat, completions
from .answers import CLIENT_GONE, Writer, respond, wanted_class
from .ask import Ask, check_alone, is_ndjson
from .errors import ApiError, from_validation
from .front import Front
from .open_prompts import (
    AppendRequest,
    Opened,
    OpenPrompts,
    ReplaceRequest,
    template_of,
)
from .protocol import ChatRequest, CompletionRequest


class StreamedRoute(Route):
    """A route for bodies of this kind alone."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and is_ndjson(scope):
            found, child = super().matches(scope)
            return (found if found is Match.FULL else Match.NONE), child
        return Match.NONE, {}


async def lines_of(request: Request) -> AsyncIterator[tuple[int, Any]]:
    """The JSON of each line that is not empty, with its number, as it comes.

    Raises:
        ApiError: A line is no JSON, or no UTF-8.
        ClientDisconnect: The client is gone.
    """
    number, rest = 0, b""
    async for part in request.stream():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            number += 1
            if line.strip():
                yield number, _json(number, line)
    if rest.strip():
        yield number + 1, _json(number + 1, rest)


def _json(number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"line {number} of the body is no UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"line {number} of the body is no JSON: {error}") from None


def _change(number: int, line: Any) -> AppendRequest | ReplaceRequest:
    """What a line asks for.

    Raises:
        ApiError: It is neither of the two.
    """
    if not isinstance(line, dict) or not line.keys() & {"append", "replace"}:
        text = f'line {number}: it must be {{"append": ...}} or {{"replace": ..., "from": ...}}'
        raise ApiError(400, text)
    kind = AppendRequest if "append" in line else ReplaceRequest
    try:
        return kind.model_validate(line)
    except ValidationError as error:
        raise _at(number, from_validation(error.errors())) from error


def _at(number: int, error: ApiError) -> ApiError:
    return ApiError(error.status_code, f"line {number}: {error.message}", param=error.param)


async def _grow(
    prompts: OpenPrompts, opened: Opened, lines: AsyncIterator[tuple[int, Any]]
) -> None:
    async for number, line in lines:
        change = _change(number, line)
        try:
            if isinstance(change, AppendRequest):
                await prompts.change(opened, change.append)
            else:
                await prompts.change(opened, change.replace, change.from_)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"line {number}: {error}") from error


class _Streamed:
    """Serves bodies that stream."""

    def __init__(self, front: Front, prompts: OpenPrompts) -> None:
        self._front, self._prompts = front, prompts

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._serve(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._serve(request, ChatRequest)

    async def _serve(
        self, request: Request, model: type[CompletionRequest] | type[ChatRequest]
    ) -> Response:
        lines, prompts = lines_of(request), self._prompts
        try:
            body = await _first(lines, model)
            writer, ask = self._asked(body)
            opened = await self._open(request, body, ask)
            try:
                await _grow(prompts, opened, lines)
            except BaseException:
                prompts.cancel(opened, "was given up")
                raise
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        try:
            with prompts.sending(request.state.caller, opened.name, is_chat=model is ChatRequest):
                whole = replace(ask, opened=opened)
                return await respond(request, self._front, writer, body, whole)
        finally:
            if opened.prompt.is_open:
                prompts.cancel(opened, "was refused")

    def _asked(self, body: CompletionRequest | ChatRequest) -> tuple[Writer, Ask]:
        front = self._front
        front.check_model(body.model)
        check_alone(body)
        timeout_s = front.config.request_timeout_s
        if isinstance(body, ChatRequest):
            chat_writer = chat.ChatWriter(front, body)
            return chat_writer, chat.ask_of(body, chat_writer.answer_id, timeout_s)
        writer = completions.CompletionWriter(front, body)
        return writer, completions.ask_of(body, writer.answer_id, timeout_s)

    async def _open(
        self, request: Request, body: CompletionRequest | ChatRequest, ask: Ask
    ) -> Opened:
        wanted = wanted_class(request, body.asked_class(), self._front.config.objectives)
        template: dict[str, Any] = {}
        first: Any = ask.prompts[0] if len(ask.prompts) == 1 else None
        if isinstance(body, ChatRequest):
            first, template = body.messages, template_of(body)
        elif first is None:
            raise InvalidRequestError("one prompt comes in pieces, not a list of prompts")
        return await self._prompts.open(
            request.state.caller,
            wanted,
            first,
            cache_salt=ask.cache_salt,
            template=template,
            is_streamed=True,
        )


def routes(front: Front, prompts: OpenPrompts) -> list[Route]:
    """The routes. They come before those of whole bodies."""
    streamed = _Streamed(front, prompts)
    return [
        StreamedRoute(completions.ENDPOINT, streamed.completion, methods=["POST"]),
        StreamedRoute(chat.ENDPOINT, streamed.chat, methods=["POST"]),
    ]


async def _first(
    lines: AsyncIterator[tuple[int, Any]], model: type[CompletionRequest] | type[ChatRequest]
) -> CompletionRequest | ChatRequest:
    """The first line, which is the usual body.

    Raises:
        ApiError: It is missing, or wrong.
    """
    async for number, first in lines:
        if isinstance(first, dict) and model is CompletionRequest:
            first = {"prompt": "", **first}
        if isinstance(first, dict) and first.get("prompt_id") is not None:
            text = "prompt_id: the body is the prompt; leave it out"
            raise ApiError(400, text, param="prompt_id")
        try:
            return model.model_validate(first)
        except ValidationError as error:
            raise _at(number, from_validation(error.errors())) from error
    raise ApiError(400, "the body is empty; its first line is the usual JSON")
