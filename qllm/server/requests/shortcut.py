"""A direct call, without FastAPI's layers, of endpoints that need only the body."""

import json
from collections.abc import Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qllm.errors import QllmError
from qllm.server.http.errors import ApiError, from_engine
from qllm.server.http.fields import Body
from qllm.server.http.headers import header, is_ndjson, kind_of_body
from qllm.server.requests.apart import LONG, Apart
from qllm.server.requests.bodies import JSON, read


class Shortcut:
    """Middleware that calls an endpoint directly if the body is valid.

    FastAPI handles every other request, with the same body, and reports the errors in the body.
    Only long bodies are read in a separate process. With telemetry, FastAPI also handles every
    short request, because spans get their names from FastAPI's routes. FastAPI reads the bodies of
    all other routes on the event loop. So a long body of such a route is refused.

    Args:
        app: App with all of FastAPI's layers.
        apart: Reader of long bodies.
        routers: Routers of the endpoints. The middleware calls an endpoint directly if it takes
            only a `body` and the `request`, and returns a response.
    """

    def __init__(self, app: ASGIApp, apart: Apart, routers: Iterable[APIRouter]) -> None:
        self._app, self._apart = app, apart
        self._ends: dict[str, tuple[Any, type[Body]]] = {}
        self._short: list[APIRoute] = []
        """Routes whose JSON bodies FastAPI reads."""
        for route in (route for router in routers for route in router.routes):
            assert isinstance(route, APIRoute)
            takes = get_type_hints(route.endpoint)
            takes_no_more = takes.keys() == {"body", "request", "return"}
            if takes_no_more and takes["return"] is Response:
                self._ends[route.path] = route.endpoint, takes["body"]
            elif issubclass(takes.get("body", object), BaseModel):
                self._short.append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._ends.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] != "POST" or is_ndjson(scope):
            limited = self._limited(receive) if self._reads_at_once(scope) else receive
            await self._app(scope, limited, send)
            return
        endpoint, model = found
        request = Request(scope, receive, send)
        try:
            messages = await _body(receive)
            raw = b"".join(message.get("body", b"") for message in messages)
            is_whole = messages[-1]["type"] == "http.request"
            body: Any = None
            if is_whole and len(raw) >= LONG:
                kind = header(scope, "content-type")
                body = await self._apart.run(len(raw), read, raw, kind, model)
            elif is_whole and "fastapi.telemetry" not in scope:
                body = _parsed(request, raw, model)
            if body is None:
                await self._app(scope, _again(messages, receive), send)
                return
            response = await endpoint(body=body, request=request)
        except ApiError as error:
            response = error.response(scope["path"])
        except QllmError as error:
            response = from_engine(error).response(scope["path"])
        await response(scope, receive, send)

    def _reads_at_once(self, scope: Scope) -> bool:
        """Return True if FastAPI reads the body of a request."""
        if scope["type"] != "http":
            return False
        return any(route.matches(scope)[0] is Match.FULL for route in self._short)

    @staticmethod
    def _limited(receive: Receive) -> Receive:
        """Return a `receive` that refuses a body of `LONG` bytes or more."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen >= LONG:
                text = f"the body of this route must have less than {LONG} bytes"
                raise ApiError(413, text, code="body_too_large")
            return message

        return limited


async def _body(receive: Receive) -> list[Message]:
    """Receive messages up to the end of the body or of the connection."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _parsed(request: Request, raw: bytes, model: type[BaseModel]) -> Any:
    """Return the body as the model; None if it is invalid or its content type is not JSON."""
    if kind_of_body(request.scope) != JSON:
        return None
    try:
        return model.model_validate(json.loads(raw))
    except (ValueError, RecursionError):  # pydantic's is a ValueError
        return None


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that repeats the received messages, then receives new ones."""
    left = iter(messages)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again
