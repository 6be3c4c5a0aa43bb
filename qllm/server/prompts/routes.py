"""`/v1/prompts`: a prompt that comes in several requests.

POST /v1/prompts            -> id          what is there already, class, salt
POST /v1/prompts/ID/append                 {"append": "..."}
PUT  /v1/prompts/ID                        {"replace": "...", "from": tokens that stay}
POST /v1/chat/completions                  {"prompt_id": ID, ...}: it is whole, answer it
"""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from qllm.frontend.streaming_prompt import Piece
from qllm.server.api.answers import wanted_class
from qllm.server.api.protocol import ServiceTier, Templated, TextOr, class_of_tier
from qllm.server.http.errors import RESPONSES
from qllm.server.http.fields import Body, Items
from qllm.server.http.headers import header
from qllm.server.prompts.store import Opened, OpenPrompts
from qllm.server.requests.bodies import read, schema_of
from qllm.server.requests.front import Front
from qllm.types import Priority

Text = TextOr[int]


class OpenRequest(Templated):
    """`POST /v1/prompts`: a prompt or messages, of which the last one grows."""

    ids = ("prompt",)

    prompt: str | Items[int] | None = None
    service_tier: ServiceTier | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, max_length=256)

    def asked_class(self) -> Priority | None:
        """The class it asks for; None leaves it."""
        if self.priority is not None:
            return Priority.LS if self.priority <= 0 else Priority.BE
        return None if self.service_tier is None else class_of_tier(self.service_tier)


class AppendRequest(Body):
    """A piece that comes at the end."""

    ids = ("append",)

    append: Text

    def piece(self) -> tuple[Piece, int | None]:
        """What comes, and how many tokens stay; None for all."""
        return self.append, None


class ReplaceRequest(Body):
    """A piece that follows the first tokens, in place of all that did."""

    ids = ("replace",)

    replace: Text
    from_: int = Field(alias="from", ge=0)
    """How many tokens stay."""

    def piece(self) -> tuple[Piece, int | None]:
        """What comes, and how many tokens stay; None for all."""
        return self.replace, self.from_


class _Routes:
    """What the routes do."""

    def __init__(self, front: Front, prompts: OpenPrompts) -> None:
        self._front, self._prompts = front, prompts

    async def seen(self, opened: Opened) -> dict[str, Any]:
        """What is said of a prompt."""
        show = partial(opened.shown, self._front.config.prompt_idle_s)
        return await self._prompts.look(opened, show)

    async def open(self, request: Request) -> dict[str, Any]:
        """Open a prompt."""
        raw, front = await request.body(), self._front
        how = (raw, header(request.scope, "content-type"), OpenRequest)
        body: OpenRequest = await front.apart.run(len(raw), read, *how)
        front.check_model(body.model)
        wanted = wanted_class(request, body.asked_class(), front.config.objectives)
        given: Any = body.prompt or "" if body.messages is None else body.messages
        salt, template = body.cache_salt or "", body.template()
        opened = await self._prompts.open(
            request.state.caller, wanted, given, cache_salt=salt, template=template
        )
        return await self.seen(opened)

    async def all_of(self, caller: str) -> list[dict[str, Any]]:
        """What is said of the prompts of a caller."""
        return [await self.seen(opened) for opened in self._prompts.of(caller)]

    async def grow(
        self, name: str, request: Request, model: type[AppendRequest] | type[ReplaceRequest]
    ) -> dict[str, Any]:
        """Give a prompt the piece that is in a body; the body is read on its thread, or apart."""
        prompts, config = self._prompts, self._front.config
        opened = prompts.found(request.state.caller, name)
        raw, apart = await request.body(), self._front.apart
        how = (raw, header(request.scope, "content-type"), model)

        def do() -> dict[str, Any]:
            piece, keep = apart.do(len(raw), read, *how).piece()
            opened.add(piece, keep, config.max_prompt_bytes)
            return opened.shown(config.prompt_idle_s)

        return await prompts.change(opened, do, len(raw))


def routes(front: Front, prompts: OpenPrompts) -> APIRouter:
    """The routes."""
    router, do = APIRouter(tags=["prompts"]), _Routes(front, prompts)

    @router.post("/v1/prompts", responses=RESPONSES, openapi_extra=schema_of(OpenRequest))
    async def open_prompt(request: Request) -> dict[str, Any]:
        """Open a prompt that comes in pieces; it is computed meanwhile."""
        return await do.open(request)

    @router.get("/v1/prompts", responses=RESPONSES)
    async def list_prompts(request: Request) -> dict[str, Any]:
        """The open prompts of this API key."""
        return {"object": "list", "data": await do.all_of(request.state.caller)}

    @router.get("/v1/prompts/{name}", responses=RESPONSES)
    async def one_prompt(name: str, request: Request) -> dict[str, Any]:
        """An open prompt: how many tokens it has so far."""
        return await do.seen(prompts.found(request.state.caller, name))

    @router.post(
        "/v1/prompts/{name}/append", responses=RESPONSES, openapi_extra=schema_of(AppendRequest)
    )
    async def append(name: str, request: Request) -> dict[str, Any]:
        """Add text, or token ids, at the end."""
        return await do.grow(name, request, AppendRequest)

    @router.put("/v1/prompts/{name}", responses=RESPONSES, openapi_extra=schema_of(ReplaceRequest))
    async def replace(name: str, request: Request) -> dict[str, Any]:
        """Let other text, or token ids, follow the first tokens."""
        return await do.grow(name, request, ReplaceRequest)

    @router.delete("/v1/prompts/{name}", responses=RESPONSES)
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Give an open prompt up."""
        prompts.cancel(prompts.found(request.state.caller, name), "was deleted")
        return {"id": name, "object": "prompt", "deleted": True}

    return router
