"""The routes `/v1/prompts`, for a prompt that arrives in several requests.

POST /v1/prompts            -> id          the first part, class, salt
POST /v1/prompts/ID/append                 {"append": "..."}
PUT  /v1/prompts/ID                        {"replace": "...", "from": tokens that stay}
POST /v1/chat/completions                  {"prompt_id": ID, ...}: the prompt is whole, answer it
"""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from qllm.frontend.streaming_prompt import Piece
from qllm.server.api.answers import wanted_class
from qllm.server.api.protocol import ServiceTier, Templated, TextOr, class_of
from qllm.server.http.errors import RESPONSES
from qllm.server.http.fields import Body, Items
from qllm.server.http.headers import header
from qllm.server.prompts.store import Opened, StreamingPrompts
from qllm.server.requests.bodies import read, schema_of
from qllm.server.requests.front import Front
from qllm.types import Priority

Text = TextOr[int]


class OpenRequest(Templated):
    """The body of `POST /v1/prompts`: a prompt, or messages of which the last one grows."""

    ids = ("prompt",)

    prompt: str | Items[int] | None = None
    service_tier: ServiceTier | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, max_length=256)

    def asked_class(self) -> Priority | None:
        """Return the requested class; None if the body names none."""
        return class_of(self.service_tier, self.priority)


class AppendRequest(Body):
    """The body that adds a piece at the end."""

    ids = ("append",)

    append: Text

    def piece(self) -> tuple[Piece, int | None]:
        """Return the piece, and the number of tokens that stay; None for all."""
        return self.append, None


class ReplaceRequest(Body):
    """The body that puts a piece after the first tokens, and drops the tokens after them."""

    ids = ("replace",)

    replace: Text
    from_: int = Field(alias="from", ge=0)
    """Number of tokens that stay."""

    def piece(self) -> tuple[Piece, int | None]:
        """Return the piece, and the number of tokens that stay; None for all."""
        return self.replace, self.from_


class _Routes:
    """The work of the routes."""

    def __init__(self, front: Front, prompts: StreamingPrompts) -> None:
        self._front, self._prompts = front, prompts

    async def seen(self, opened: Opened) -> dict[str, Any]:
        """Return a prompt in the API's shape."""
        show = partial(opened.shown, self._front.config.prompt_idle_s)
        return await self._prompts.look(opened, show)

    async def open(self, request: Request) -> dict[str, Any]:
        """Open the prompt of a request's body."""
        raw, front = await request.body(), self._front
        how = (raw, header(request.scope, "content-type"), OpenRequest)
        body: OpenRequest = await front.apart.run(len(raw), read, *how)
        own = front.of(body.model)
        wanted = wanted_class(request, body.asked_class(), own)
        given: Any = body.prompt or "" if body.messages is None else body.messages
        salt, template = body.cache_salt or "", body.template()
        opened = await self._prompts.open(
            own, request.state.caller, wanted, given, cache_salt=salt, template=template
        )
        return await self.seen(opened)

    async def all_of(self, caller: str) -> list[dict[str, Any]]:
        """Return the prompts of a caller in the API's shape."""
        return [await self.seen(opened) for opened in self._prompts.of(caller)]

    async def grow(
        self, name: str, request: Request, model: type[AppendRequest] | type[ReplaceRequest]
    ) -> dict[str, Any]:
        """Add the piece in a request's body to a prompt. The body is read off the event loop."""
        prompts, config = self._prompts, self._front.config
        opened = prompts.found(request.state.caller, name)
        raw, apart = await request.body(), self._front.apart
        how = (raw, header(request.scope, "content-type"), model)

        def do() -> dict[str, Any]:
            piece, keep = apart.do(len(raw), read, *how).piece()
            opened.add(piece, keep, config.max_prompt_bytes)
            return opened.shown(config.prompt_idle_s)

        return await prompts.change(opened, do, len(raw))


def routes(front: Front, prompts: StreamingPrompts) -> APIRouter:
    """Return the routes of streaming prompts."""
    router, do = APIRouter(tags=["prompts"]), _Routes(front, prompts)

    @router.post("/v1/prompts", responses=RESPONSES, openapi_extra=schema_of(OpenRequest))
    async def open_prompt(request: Request) -> dict[str, Any]:
        """Open a prompt that comes in pieces. The engine computes each piece as it arrives."""
        return await do.open(request)

    @router.get("/v1/prompts", responses=RESPONSES)
    async def list_prompts(request: Request) -> dict[str, Any]:
        """List the open prompts of this API key."""
        return {"object": "list", "data": await do.all_of(request.state.caller)}

    @router.get("/v1/prompts/{name}", responses=RESPONSES)
    async def one_prompt(name: str, request: Request) -> dict[str, Any]:
        """Return an open prompt, with its number of tokens so far."""
        return await do.seen(prompts.found(request.state.caller, name))

    @router.post(
        "/v1/prompts/{name}/append", responses=RESPONSES, openapi_extra=schema_of(AppendRequest)
    )
    async def append(name: str, request: Request) -> dict[str, Any]:
        """Add text, or token ids, at the end."""
        return await do.grow(name, request, AppendRequest)

    @router.put("/v1/prompts/{name}", responses=RESPONSES, openapi_extra=schema_of(ReplaceRequest))
    async def replace(name: str, request: Request) -> dict[str, Any]:
        """Replace everything after the first tokens by other text, or token ids."""
        return await do.grow(name, request, ReplaceRequest)

    @router.delete("/v1/prompts/{name}", responses=RESPONSES)
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Cancel an open prompt."""
        prompts.cancel(prompts.found(request.state.caller, name), "was deleted")
        return {"id": name, "object": "prompt", "deleted": True}

    return router
