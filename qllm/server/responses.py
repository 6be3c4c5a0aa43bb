"""`/v1/responses`, as OpenAI has it. State is kept where there is a state folder."""

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from qllm.types import Priority

from . import chat
from .answers import respond
from .background import Background
from .errors import RESPONSES, ApiError
from .front import Front
from .response_store import ResponseStore
from .response_writer import ResponseWriter
from .responses_protocol import ResponsesRequest

ENDPOINT = "/v1/responses"
NO_STATE = "responses are kept only by a server with --state-dir, and this one has none"


def _needs_state(body: ResponsesRequest) -> None:
    """Refuse what cannot be done without a state folder."""
    asked = {
        "previous_response_id": body.previous_response_id is not None,
        "background": bool(body.background),
        "store": bool(body.store),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ApiError(400, f"{name}: {NO_STATE}; leave it out", param=name)


def routes(front: Front, kept: ResponseStore | None, background: Background | None) -> APIRouter:
    """The routes.

    Args:
        front: Serves the answers.
        kept: Where responses are kept; None without a state folder.
        background: Serves those that nobody waits for.
    """
    router = APIRouter(tags=["responses"])

    def state() -> ResponseStore:
        if kept is None:
            raise ApiError(404, NO_STATE, code="response_not_found")
        return kept

    @router.post(ENDPOINT, responses=RESPONSES)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation; go on with an earlier one."""
        front.check_model(body.model)
        owner, before, keep = str(request.state.caller), [], None
        if kept is None:
            _needs_state(body)
        elif body.previous_response_id is not None:
            before = await asyncio.to_thread(kept.conversation, body.previous_response_id, owner)
        asked = body.chat(before)
        if kept is not None and body.store is not False:
            raw = body.model_dump(by_alias=True, exclude_unset=True)
            add = partial(kept.add, owner, raw, body.items())
            keep = partial(asyncio.to_thread, add)
        writer = ResponseWriter(front, body, asked, keep)
        ask = chat.ask_of(asked, writer.answer_id, front.config.request_timeout_s)
        if body.background:
            assert background is not None
            assert keep is not None
            writer.response |= {"status": "queued", "service_tier": "flex"}
            await front.in_thread(Priority.BE, front.check, ask)
            await keep(writer.response)
            background.begin(writer.answer_id)
            return _json(writer.response)
        return await respond(request, front, writer, body, ask)

    @router.get(f"{ENDPOINT}/{{response_id}}", responses=RESPONSES)
    async def get(
        request: Request, response_id: str, stream: Annotated[Literal["false"], Query()] = "false"
    ) -> dict[str, Any]:
        """One response."""
        return await asyncio.to_thread(state().get, response_id, str(request.state.caller))

    @router.get(f"{ENDPOINT}/{{response_id}}/input_items", responses=RESPONSES)
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The input of a response, without that of the responses before it."""
        owner = str(request.state.caller)
        items = await asyncio.to_thread(state().items, response_id, owner)
        return _page(items if order == "asc" else items[::-1], limit, after)

    @router.delete(f"{ENDPOINT}/{{response_id}}", responses=RESPONSES)
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Forget a response; one that is not done is cancelled."""
        owner = str(request.state.caller)
        await asyncio.to_thread(state().delete, response_id, owner)
        if background is not None:
            background.stop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post(f"{ENDPOINT}/{{response_id}}/cancel", responses=RESPONSES)
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        """End a response in the background."""
        owner = str(request.state.caller)
        found = await asyncio.to_thread(state().get, response_id, owner)
        if not found["background"]:
            raise ApiError(400, "only a response with background=true can be cancelled")
        assert background is not None
        await background.cancel(response_id, found)
        return await asyncio.to_thread(state().get, response_id, owner)

    return router


def _json(body: dict[str, Any]) -> Response:
    return JSONResponse(body, headers={"x-request-id": body["id"]})


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A part of a list as the API shows it."""
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
