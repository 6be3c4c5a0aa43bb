"""Past FastAPI's layers: the routes that make answers, where nothing but their body is read."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qllm.errors import QllmError

from .ask import is_ndjson, kind_of_body
from .bodies import read
from .errors import ApiError, from_engine, from_request

JSON = "application/json"
LONG = 16_384
"""Bytes from which on a body is read on a thread: 100,000 messages of one take half a second."""


class Shortcut:
    """Middleware: calls an endpoint itself if the body is what it takes.

    Every other request goes the whole way, with the same body: FastAPI says what is wrong with it,
    but for long bodies, which are read on a thread: they would keep the event loop from all others.
    So does every request while FastAPI makes spans of them, which are named by its routes.

    Args:
        app: The whole way.
        routers: Of their routes those are called that take a `body` and the `request` alone and
            return a response.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._ends: dict[str, tuple[Any, type[BaseModel]]] = {}
        for route in (route for router in routers for route in router.routes):
            assert isinstance(route, APIRoute)
            takes = get_type_hints(route.endpoint)
            takes_no_more = takes.keys() == {"body", "request", "return"}
            if takes_no_more and takes["return"] is Response:
                self._ends[route.path] = route.endpoint, takes["body"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._ends.get(scope["path"]) if scope["type"] == "http" else None
        passes = found is None or scope["method"] != "POST" or "fastapi.telemetry" in scope
        if passes or is_ndjson(scope):
            await self._app(scope, receive, send)
            return
        assert found is not None
        endpoint, model = found
        request = Request(scope, receive, send)
        try:
            messages = await _body(receive)
            raw = b"".join(message.get("body", b"") for message in messages)
            is_whole = messages[-1]["type"] == "http.request"
            if is_whole and len(raw) >= LONG:
                body = await asyncio.to_thread(read, request, raw, model)
            else:
                body = _parsed(request, raw, model) if is_whole else None
            if body is None:
                await self._app(scope, _again(messages, receive), send)
                return
            response = await endpoint(body=body, request=request)
        except RequestValidationError as error:
            response = from_request(request, error).response(scope["path"])
        except ApiError as error:
            response = error.response(scope["path"])
        except QllmError as error:
            response = from_engine(error).response(scope["path"])
        await response(scope, receive, send)


async def _body(receive: Receive) -> list[Message]:
    """What comes up to the end of the body, or to the end of the connection."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _parsed(request: Request, raw: bytes, model: type[BaseModel]) -> Any:
    """The body, if it is JSON, called so, and as the model has it; else None."""
    if kind_of_body(request.scope) != JSON:
        return None
    try:
        return model.model_validate(json.loads(raw))
    except (ValueError, RecursionError):  # pydantic's is a ValueError
        return None


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Receive what was received, then what comes."""
    left = iter(messages)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again
