"""The small routes: models, tokenize, detokenize."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import decoded
from qllm.frontend.prompts import render_chat, to_token_ids
from qllm.types import Priority

from .answers import owner_of
from .errors import RESPONSES, ApiError
from .fields import Body, Items
from .front import Front

MAX_TOKEN_ID = 2**31


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DeleteKvRequest(Body):
    """`POST /delete_kv`."""

    cache_salt: str | None = Field(None, max_length=256)
    """Without it, every salt of the caller's key."""


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Items[int]


def token_ids(front: Front, body: TokenizeRequest) -> list[int]:
    """The ids of a prompt or chat."""
    tokenizer = front.engine.tokenizer
    if body.messages is not None:
        return render_chat(body.messages, tokenizer)
    return list(to_token_ids(body.prompt or "", tokenizer, MAX_TOKEN_ID))


def text_of(front: Front, tokens: list[int]) -> str:
    """The text of ids.

    Raises:
        InvalidRequestError: The model has no tokenizer, or an id is not in its vocabulary.
    """
    tokenizer = front.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("the model came without a tokenizer")
    wrong = next((i for i in tokens if not 0 <= i < len(tokenizer)), None)
    if wrong is not None:
        raise InvalidRequestError(f"token id {wrong} must be in [0, {len(tokenizer)})")
    return decoded(tokenizer, tokens)


def card(front: Front, name: str, started: int) -> dict[str, Any]:
    """What is said of the model under one of its names.

    Args:
        front: Of the server.
        name: What clients call it.
        started: Unix time of the server's start.
    """
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "qllm",
        "root": front.config.model,
        "max_model_len": front.max_model_len,
    }


def routes(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["tools"])
    started = int(time.time())

    @router.get("/v1/models", responses={401: RESPONSES[401]})
    async def models() -> dict[str, Any]:
        """The one model served, once per name."""
        names = front.config.model_names
        return {"object": "list", "data": [card(front, name, started) for name in names]}

    @router.get("/v1/models/{name:path}", responses=RESPONSES)
    async def one_model(name: str) -> dict[str, Any]:
        """The model, if it is called so."""
        front.check_model(name)
        return card(front, name, started)

    @router.post("/tokenize", responses=RESPONSES)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a prompt, or of messages in the chat template."""
        front.check_model(body.model)
        ids = await front.in_thread(Priority.BE, token_ids, front, body)
        return {"tokens": ids, "count": len(ids)}

    @router.post("/detokenize", responses=RESPONSES)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        front.check_model(body.model)
        return {"prompt": await front.in_thread(Priority.BE, text_of, front, body.tokens)}

    @router.post("/reset_prefix_cache", responses={n: RESPONSES[n] for n in (403, 503)})
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        """Forget all kept KV, as vLLM's route of this name does."""
        if not request.state.is_admin:
            text = "this deletes the kept KV of every API key, which only that of the setting "
            text += "admin_api_key may; POST /delete_kv deletes that of yours"
            raise ApiError(403, text, code="not_admin")
        if (error := front.unavailable()) is not None:
            raise error
        await asyncio.to_thread(front.engine.reset_prefix_cache)
        return {"status": "ok"}

    @router.post("/delete_kv", responses=RESPONSES)
    async def delete_kv(request: Request, body: DeleteKvRequest) -> dict[str, Any]:
        """Delete kept KV of the caller's API key: of one `cache_salt`, or all of it."""
        if (error := front.unavailable()) is not None:
            raise error
        owner = owner_of(request.state.caller)
        count = await asyncio.to_thread(front.engine.delete_kv, body.cache_salt, owner)
        return {"status": "ok", "deleted_pages": count}

    return router
