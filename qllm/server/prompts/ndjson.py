"""Requests with a streamed body: lines of JSON. The answer begins when the body ends.

    POST /v1/completions              Content-Type: application/x-ndjson
    {"model": "...", "max_tokens": 200, "prompt": "Answer from these pages: "}
    {"append": "first page ..."}
    {"replace": "a better first page ...", "from": 8}

The first line is the usual body. The engine computes each part while the client makes the next
line. Closing the connection cancels the request.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from qllm.errors import InvalidRequestError
from qllm.server.api import chat, completions
from qllm.server.api.answers import CLIENT_GONE, Writer, respond, wanted_class
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.http.errors import ApiError, from_validation
from qllm.server.http.headers import is_ndjson
from qllm.server.prompts.routes import AppendRequest, ReplaceRequest
from qllm.server.prompts.store import Opened, StreamingPrompts
from qllm.server.requests.apart import Apart
from qllm.server.requests.ask import Ask, check_alone
from qllm.server.requests.bodies import loads, packed
from qllm.server.requests.front import Front
from qllm.server.requests.texts import keywords_of

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


class StreamedRoute(Route):
    """A route that matches only requests with a body of JSON lines."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and is_ndjson(scope):
            found, child = super().matches(scope)
            return (found if found is Match.FULL else Match.NONE), child
        return Match.NONE, {}


async def blocks_of(request: Request) -> AsyncIterator[tuple[int, bytes]]:
    """Yield blocks of lines that arrived together, each with the number of the block's first line.

    Raises:
        ClientDisconnect: The client has closed the connection.
    """
    number, rest = 1, bytearray()
    async for part in request.stream():
        end = part.rfind(b"\n") + 1
        rest += part[:end]
        if end:
            yield number, bytes(rest)
            number += rest.count(b"\n")
            rest.clear()
        rest += part[end:]
    if rest:
        yield number, bytes(rest)


def _json(number: int, line: bytes) -> Any:
    try:
        line.decode()
        return loads(line)
    except ApiError as error:
        raise _at(number, error) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"line {number} of the body is no UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"line {number} of the body is no JSON: {error}") from None


def change_of(number: int, raw: bytes) -> AppendRequest | ReplaceRequest:
    """Return the change that a line asks for.

    Raises:
        ApiError: The line is neither an append nor a replacement, or is wrong.
    """
    line = _json(number, raw)
    if not isinstance(line, dict) or not line.keys() & {"append", "replace"}:
        text = f'line {number}: it must be {{"append": ...}} or {{"replace": ..., "from": ...}}'
        raise ApiError(400, text)
    kind = AppendRequest if "append" in line else ReplaceRequest
    try:
        return packed(kind.model_validate(line), len(raw))
    except ValidationError as error:
        raise _at(number, from_validation(error.errors(), line)) from error
    except ApiError as error:
        raise _at(number, error) from error


def _at(number: int, error: ApiError) -> ApiError:
    text = f"line {number}: {error.message}"
    return ApiError(error.status_code, text, param=error.param, code=error.code)


def _add_lines(opened: Opened, apart: Apart, number: int, block: bytes, most_bytes: int) -> None:
    """Apply the changes of a block's lines, up to the first wrong line. Called on a thread.

    Raises:
        ApiError: A line is wrong. The message has the line's number.
        QllmError: The engine refuses a line. The message has the line's number.
    """
    for at, line in enumerate(block.split(b"\n"), number):
        if not line.strip():
            continue
        change = apart.do(len(line), change_of, at, line)
        try:
            piece, keep = change.piece()
            opened.add(piece, keep, most_bytes)
        except InvalidRequestError as error:
            raise type(error)(f"line {at}: {error}") from error
        except ApiError as error:
            raise _at(at, error) from error


class _Streamed:
    """The handlers of streamed bodies."""

    def __init__(self, front: Front, prompts: StreamingPrompts) -> None:
        self._front, self._prompts = front, prompts

    async def completion(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._serve(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._serve(request, ChatRequest)

    async def _serve(self, request: Request, model: type[_Body]) -> Response:
        blocks, prompts, front = blocks_of(request), self._prompts, self._front
        most_bytes = front.config.max_prompt_bytes
        try:
            body, rest = await _first(blocks, front.apart, model)
            own = front.of(body.model)
            writer, ask = _asked(own, body)
            opened = await self._open(own, request, body, ask)
            try:
                async for number, block in _chain(rest, blocks):
                    add = partial(_add_lines, opened, front.apart, number, block, most_bytes)
                    await prompts.change(opened, add, len(block))
            except BaseException:
                prompts.cancel(opened, "was given up")
                raise
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        try:
            with prompts.sent(opened):
                whole = replace(ask, opened=opened)
                return await respond(request, own, writer, body, whole)
        finally:
            if opened.prompt.is_open:
                prompts.cancel(opened, "was refused")

    async def _open(
        self, front: Front, request: Request, body: CompletionRequest | ChatRequest, ask: Ask
    ) -> Opened:
        wanted = wanted_class(request, body.asked_class(), front)
        template: dict[str, Any] = {}
        first: Any = ask.prompts[0] if len(ask.prompts) == 1 else None
        if isinstance(body, ChatRequest):
            first, template = body.messages, keywords_of(body.template_options())
        elif first is None:
            raise InvalidRequestError("one prompt comes in pieces, not a list of prompts")
        return await self._prompts.open(
            front,
            request.state.caller,
            wanted,
            first,
            cache_salt=ask.cache_salt,
            template=template,
            is_streamed=True,
        )


def _asked(front: Front, body: CompletionRequest | ChatRequest) -> tuple[Writer, Ask]:
    check_alone(body)
    timeout_s = front.config.request_timeout_s
    if isinstance(body, ChatRequest):
        chat_writer = chat.ChatWriter(front, body)
        return chat_writer, chat.ask_of(front, body, chat_writer.answer_id, timeout_s)
    writer = completions.CompletionWriter(front, body)
    return writer, completions.ask_of(body, writer.answer_id, timeout_s)


def routes(front: Front, prompts: StreamingPrompts) -> list[Route]:
    """Return the routes of streamed bodies. These must precede the routes of whole bodies."""
    streamed = _Streamed(front, prompts)
    return [
        StreamedRoute(completions.ENDPOINT, streamed.completion, methods=["POST"]),
        StreamedRoute(chat.ENDPOINT, streamed.chat, methods=["POST"]),
    ]


def first_of(number: int, line: bytes, model: type[_Body]) -> _Body:
    """Return the first line as the usual body.

    Raises:
        ApiError: The line is wrong.
    """
    first = _json(number, line)
    if isinstance(first, dict) and model is CompletionRequest:
        first = {"prompt": "", **first}
    if isinstance(first, dict) and first.get("prompt_id") is not None:
        text = "prompt_id: the body is the prompt; leave it out"
        raise ApiError(400, text, param="prompt_id")
    try:
        return packed(model.model_validate(first), len(line), messages=False)
    except ValidationError as error:
        raise _at(number, from_validation(error.errors(), first)) from error
    except ApiError as error:
        raise _at(number, error) from error


async def _first(
    blocks: AsyncIterator[tuple[int, bytes]], apart: Apart, model: type[_Body]
) -> tuple[_Body, tuple[int, bytes]]:
    """Return the usual body from the first line, and the received bytes after this line.

    Raises:
        ApiError: The body is missing or wrong.
    """
    async for number, block in blocks:
        left = block.lstrip()
        if left:
            number += block.count(b"\n", 0, len(block) - len(left))
            line, _, rest = left.partition(b"\n")
            body = await apart.run(len(line), first_of, number, line, model)
            return body, (number + 1, rest)
    raise ApiError(400, "the body is empty; its first line is the usual JSON")


async def _chain(
    first: tuple[int, bytes], rest: AsyncIterator[tuple[int, bytes]]
) -> AsyncIterator[tuple[int, bytes]]:
    yield first
    async for block in rest:
        yield block
