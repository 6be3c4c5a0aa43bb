"""The routes `/v1/requests`: a caller's open requests, and changes to such requests."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import model_validator

from qllm.server.api.protocol import ServiceTier, class_of
from qllm.server.http.errors import RESPONSES, ApiError
from qllm.server.http.fields import Body
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer
from qllm.types import Priority, RequestStatus


class Change(Body):
    """The body of `PATCH /v1/requests/{id}`."""

    priority: str | int | None = None
    """Class: "LS" or "BE"; or vLLM's number: 0 or less is LS, more is BE."""
    service_tier: ServiceTier | None = None
    """Class by OpenAI's name: "flex" is BE."""
    paused: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Change":
        given = [self.priority, self.service_tier, self.paused]
        if all(value is None for value in given):
            raise ValueError("give priority, service_tier or paused")
        if None not in given[:2]:
            raise ValueError("priority and service_tier say the same; give one of them")
        is_name = isinstance(self.priority, str)
        if is_name and str(self.priority).upper() not in Priority.__members__:
            raise ValueError(f"priority={self.priority!r:.40} must be 'LS', 'BE' or an integer")
        return self

    def asked_class(self) -> Priority | None:
        """Return the requested class; None leaves it unchanged."""
        if isinstance(self.priority, str):
            return Priority[self.priority.upper()]
        return class_of(self.service_tier, self.priority)


def _found(front: Front, caller: str, name: str) -> tuple[Front, Answer]:
    """Return an open request of this caller, and the front of its model.

    Requests of other callers count as missing.

    Raises:
        ApiError: 404 if no request has the name. 409 if several have the name and none the id.
    """
    mine = [(one, x) for one in front.all for x in one.answers if x.caller == caller]
    called = [(one, x) for one, x in mine if name in x.names]
    found = [(one, x) for one, x in called if x.answer_id == name] or called
    if not found:
        raise ApiError(404, f"no request {name!r:.80} of this API key is open", code="not_found")
    if len(found) > 1:
        ids = ", ".join(sorted(x.answer_id for _, x in found))
        text = f"{len(found)} open requests are called {name!r:.80}; their ids are {ids:.500}"
        raise ApiError(409, text, code="ambiguous_id")
    return found[0]


def _status(answer: Answer) -> str:
    """Return the state of the choice that has progressed most."""
    found = {handle.status for handle in answer.handles} - {RequestStatus.FINISHED}
    order = ("RUNNING", "PARKED", "WAITING", "OPEN", "PAUSED")
    known = (RequestStatus[name] for name in order)
    return str(next((x for x in known if x in found), RequestStatus.FINISHED).value)


async def _shown(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.answer_id,
        "object": "request",
        "status": await asyncio.to_thread(_status, answer),
        "paused": answer.is_paused,
        "priority": answer.served.priority.name,
        "service_tier": answer.served.tier,
        "usage": answer.usage(),
    }


def routes(front: Front) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests", responses=RESPONSES)
    async def list_requests(request: Request) -> dict[str, Any]:
        """List the open requests of this API key."""
        caller = request.state.caller
        mine = [x for one in front.all for x in one.answers if x.caller == caller]
        return {"object": "list", "data": [await _shown(answer) for answer in mine]}

    @router.get("/v1/requests/{name:path}", responses=RESPONSES)
    async def one_request(name: str, request: Request) -> dict[str, Any]:
        """Return an open request."""
        _, answer = _found(front, request.state.caller, name)
        return await _shown(answer)

    @router.patch("/v1/requests/{name:path}", responses=RESPONSES)
    async def change_request(name: str, body: Change, request: Request) -> dict[str, Any]:
        """Change the class of a waiting or running request, or pause or resume it."""
        own, answer = _found(front, request.state.caller, name)
        own.change(answer, body.asked_class(), body.paused)
        return await _shown(answer)

    return router
