"""The small routes: models, tokenising, and cached KV."""

import asyncio
import time
from typing import Any, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from qllm.server.api.answers import owner_of
from qllm.server.api.protocol import Templated
from qllm.server.http.errors import RESPONSES, ApiError
from qllm.server.http.fields import Body, Items
from qllm.server.requests import texts
from qllm.server.requests.apart import Given
from qllm.server.requests.bodies import JSON
from qllm.server.requests.front import Front


class TokenizeRequest(Templated):
    """The body of `POST /tokenize`: a prompt or messages."""

    of_chats = (*Templated.of_chats, "add_generation_prompt", "continue_final_message")
    packs = ("messages",)

    prompt: str | None = None
    add_special_tokens: bool | None = None
    """True to add the special tokens around the text; by default only around a prompt."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.prompt is None and self.messages is None:
            raise ValueError("give either prompt or messages")
        return self


class DeleteKvRequest(Body):
    """The body of `POST /delete_kv`."""

    cache_salt: str | None = Field(None, max_length=256)
    """Salt whose KV is deleted; by default every salt of the caller's key."""


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    ids = ("tokens",)

    model: str | None = None
    tokens: Items[int]


def card(front: Front, name: str, started: int) -> dict[str, Any]:
    """Return the description of a model under one of its names.

    Args:
        front: Front of the server.
        name: Name of the model for clients.
        started: Unix time of the server's start, in seconds.

    Raises:
        ApiError: 404, no model has this name.
    """
    front = front.of(name)
    info = front.engine.client.info
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "qllm",
        "root": front.config.model,
        "max_model_len": front.max_model_len,
        "depth": info.shape.num_layers,
        "whole_depth": info.whole_layers,
    }


def routes(front: Front) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["tools"])
    started = int(time.time())

    @router.get("/v1/models", responses={401: RESPONSES[401]})
    async def models() -> dict[str, Any]:
        """List the served models, each once per name."""
        return {"object": "list", "data": [card(front, name, started) for name in front.names]}

    @router.get("/v1/models/{name:path}", responses=RESPONSES)
    async def one_model(name: str) -> dict[str, Any]:
        """Return the model with this name."""
        return card(front, name, started)

    @router.post("/tokenize", responses=RESPONSES)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a prompt, or of messages in the chat template."""
        own = front.of(body.model)
        how = (body.template(), body.add_special_tokens, own.max_model_len)
        what = (body.prompt, body.messages, Given.TOKENIZER, *how)
        found = await own.best_effort(body.num_bytes, texts.tokenized, *what)
        return Response(found, media_type=JSON)

    @router.post("/detokenize", responses=RESPONSES)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        what = (body.tokens, Given.TOKENIZER)
        found = await front.of(body.model).best_effort(body.num_bytes, texts.detokenized, *what)
        return Response(found, media_type=JSON)

    @router.post("/reset_prefix_cache", responses={n: RESPONSES[n] for n in (403, 503)})
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        """Delete all cached KV, the same as vLLM's route of this name."""
        if not request.state.is_admin:
            text = (
                "this deletes the cached KV of every API key, and only the key of the setting "
                "admin_api_key may do so; POST /delete_kv deletes that of yours"
            )
            raise ApiError(403, text, code="not_admin")
        _check_all_serve(front)
        for one in front.all:
            await asyncio.to_thread(one.engine.reset_prefix_cache)
        return {"status": "ok"}

    @router.post("/delete_kv", responses=RESPONSES)
    async def delete_kv(request: Request, body: DeleteKvRequest) -> dict[str, Any]:
        """Delete cached KV of the caller's API key: of one `cache_salt`, or all of it.

        It is deleted at every model of the server.
        """
        _check_all_serve(front)
        owner, count = owner_of(request.state.caller), 0
        for one in front.all:
            count += await asyncio.to_thread(one.engine.delete_kv, body.cache_salt, owner)
        return {"status": "ok", "deleted_pages": count}

    return router


def _check_all_serve(front: Front) -> None:
    """Raise if a model of the server does not serve now.

    Raises:
        ApiError: 503, the engine of a model is down.
    """
    for one in front.all:
        if (error := one.unavailable()) is not None:
            raise error
