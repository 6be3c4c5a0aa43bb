"""The routes of `/v1/responses`. Responses are stored if there is a state folder."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from qllm.server.api import chat
from qllm.server.api.answers import EventStream, front_of, respond
from qllm.server.api.background import Background
from qllm.server.api.protocol import ChatRequest
from qllm.server.api.response_writer import ResponseWriter
from qllm.server.api.responses_protocol import ENDPOINT, InputTokensRequest, ResponsesRequest
from qllm.server.http.errors import RESPONSES, ApiError, logged
from qllm.server.requests.bodies import chat_of, kept_of
from qllm.server.requests.front import Front
from qllm.server.state.response_store import ResponseStore
from qllm.types import Priority

NO_COMPACTION = (
    "compaction is not served: a summary that only its server can read needs a model made for it; "
    "go on with previous_response_id, or send a shorter input"
)
NO_STATE = "responses are kept only by a server with --state-dir, and this one has none"


class State(NamedTuple):
    """The parts of the routes that only a server with a state folder has."""

    kept: ResponseStore
    background: Background


def _refuse_without_state(body: ResponsesRequest) -> None:
    asked = {
        "previous_response_id": body.previous_response_id is not None,
        "background": bool(body.background),
        "store": bool(body.store),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ApiError(400, f"{name}: {NO_STATE}; leave it out", param=name)


async def _chat_of(
    front: Front, state: State | None, body: ResponsesRequest, owner: str
) -> ChatRequest:
    """Return a body as a chat, including the earlier conversation."""
    before: list[str] = []
    if state is None:
        _refuse_without_state(body)
    elif body.previous_response_id is not None:
        get = state.kept.conversation
        before = await asyncio.to_thread(get, body.previous_response_id, owner)
    num_bytes = body.num_bytes + sum(map(len, before))
    found: ChatRequest = await front.apart.run(num_bytes, chat_of, body, before)
    return found


def routes(front: Front, state: State | None) -> APIRouter:
    """Return the routes that make responses or count the tokens of a conversation.

    Args:
        front: Front that serves the answers.
        state: Stored responses and background work; None without a state folder.
    """
    router = APIRouter(tags=["responses"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, also one that continues an earlier response."""
        own, owner, keep = front_of(request, front, body), _caller(request), None
        asked = await _chat_of(own, state, body, owner)
        if state is not None and body.store is not False:
            raw, items = await own.apart.run(body.num_bytes, kept_of, body)
            add = partial(state.kept.add, owner, raw, items)
            keep = partial(_keep_or_tell, add)
        writer = ResponseWriter(own, body, asked, keep)
        ask = chat.ask_of(own, asked, writer.answer_id, own.config.request_timeout_s)
        if not body.background:
            return await respond(request, own, writer, body, ask)
        assert state is not None
        ignored = own.told.headers(body.all_unserved)
        await own.in_thread(Priority.BE, own.check, ask)
        begun = await _in_background(own, state.background, writer, body.stream, owner, add)
        begun.headers.update(ignored)
        return begun

    @router.post(f"{ENDPOINT}/input_tokens", responses=RESPONSES)
    async def input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation in the model's prompt."""
        own = front.of(body.model)
        ignored = own.told.headers(body.all_unserved)
        asked = await _chat_of(own, state, body, _caller(request))
        ask = chat.ask_of(own, asked, "count", None)
        ids = await own.in_thread(Priority.BE, own.render, ask, Priority.BE)
        found = {"object": "response.input_tokens", "input_tokens": len(ids)}
        return JSONResponse(found, headers=ignored)

    @router.post(f"{ENDPOINT}/compact", responses=RESPONSES)
    async def compact() -> None:
        """Refuse: compaction is not served."""
        raise ApiError(400, NO_COMPACTION, code="not_served")

    return router


async def _keep_or_tell(add: Callable[[dict[str, Any]], None], response: dict[str, Any]) -> None:
    """Store a response with `add`. After a failure, the response is still sent, with a note."""
    try:
        await asyncio.to_thread(add, response)
    except Exception as error:  # noqa: BLE001 - logged; the answer itself is complete
        why = logged(error, f"keeping response {response['id']}")
        response |= {"store": False, "not_stored": {"code": why.code, "message": why.message}}


async def _in_background(
    front: Front,
    background: Background,
    writer: ResponseWriter,
    is_stream: bool | None,
    owner: str,
    add: Callable[..., None],
) -> Response:
    """Store a queued response with `add`, and start the response in the background."""
    writer.response |= {"status": "queued", "service_tier": "flex"}
    leave = background.enter(owner) if is_stream else None
    add = partial(add, events=writer.queued() if is_stream else ())
    most = front.config.max_background
    try:
        await asyncio.to_thread(partial(add, writer.response, most_unfinished=most))
    except BaseException:
        if leave is not None:
            leave()
        raise
    background.begin(writer.answer_id)
    if leave is not None:
        return _followed(front, background, writer.answer_id, -1, leave)
    return JSONResponse(writer.response, headers={"x-request-id": writer.answer_id})


def _followed(
    front: Front, background: Background, response_id: str, after: int, leave: Callable[[], None]
) -> EventStream:
    events = background.follow(response_id, after)
    headers = {"x-request-id": response_id}
    return EventStream(events, leave, headers, front.config.stalled_client_s)


def state_routes(front: Front, state: State) -> APIRouter:
    """Return the routes of stored responses."""
    router = APIRouter(tags=["responses"])
    kept, background = state

    @router.get(f"{ENDPOINT}/{{response_id}}", responses=RESPONSES)
    async def get(
        request: Request,
        response_id: str,
        stream: bool | None = None,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a response, or the events of a background stream."""
        found = await asyncio.to_thread(kept.get, response_id, _caller(request))
        if not stream:
            if starting_after is not None and stream is None:  # the client omitted stream=true
                text = "starting_after is the number of an event; give it with stream=true"
                raise ApiError(400, text, param="starting_after")
            return JSONResponse(found)
        after = -1 if starting_after is None else starting_after
        last = await asyncio.to_thread(kept.num_events, response_id) - 1
        if last < 0:
            text = "this response has no events; ask for it with background=true and stream=true"
            raise ApiError(400, text, param="stream")
        if after > last:
            text = f"starting_after={after}: the last event of this response so far is {last}"
            raise ApiError(400, text, param="starting_after")
        leave = background.enter(_caller(request))
        return _followed(front, background, response_id, after, leave)

    @router.get(f"{ENDPOINT}/{{response_id}}/input_items", responses=RESPONSES)
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the input of a response, without that of earlier responses."""
        text = await asyncio.to_thread(kept.items, response_id, _caller(request))
        found: dict[str, Any] = await front.apart.run(len(text), page_of, text, order, limit, after)
        return found

    @router.delete(f"{ENDPOINT}/{{response_id}}", responses=RESPONSES)
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a response; cancel it if it is unfinished."""
        await asyncio.to_thread(kept.delete, response_id, _caller(request))
        background.stop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post(f"{ENDPOINT}/{{response_id}}/cancel", responses=RESPONSES)
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        """Cancel a background response."""
        found = await asyncio.to_thread(kept.get, response_id, _caller(request))
        if not found["background"]:
            raise ApiError(400, "only a response with background=true can be cancelled")
        await background.cancel(response_id, found)
        return await asyncio.to_thread(kept.get, response_id, _caller(request))

    return router


def _caller(request: Request) -> str:
    return str(request.state.caller)


def page_of(text: str, order: str, limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of a list, given as JSON, in the API's shape."""
    items = json.loads(text) if order == "asc" else json.loads(text)[::-1]
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"there is no item {after!r:.80}", param="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }
