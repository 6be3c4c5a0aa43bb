"""`POST /v1/chat/completions`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from qllm.frontend.handle import Piece
from qllm.types import FinishReason

from .answers import Shown, Writer, respond
from .errors import RESPONSES
from .front import Ask, Front
from .protocol import ChatRequest

ENDPOINT = "/v1/chat/completions"


class ChatWriter(Writer):
    """The JSON of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, front: Front) -> None:
        super().__init__(front, "chatcmpl")

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        pairs = zip(piece.token_ids, piece.logprobs, strict=True) if piece.logprobs else ()
        content = [_entry(*self.alternatives(*pair)) for pair in pairs]
        logprobs = {"content": content, "refusal": None} if content else None
        delta = {"content": piece.text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason.value}

    def whole(self, index: int, pieces: list[dict[str, Any]], reason: FinishReason) -> Any:
        parts = [x for p in pieces if p["logprobs"] for x in p["logprobs"]["content"]]
        text = "".join(p["delta"]["content"] for p in pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": parts, "refusal": None} if parts else None,
            "finish_reason": reason.value,
        }


def _entry(chosen: Shown, top: list[Shown]) -> dict[str, Any]:
    def one(x: Shown) -> dict[str, Any]:
        return {"token": x.token, "logprob": x.logprob, "bytes": list(x.token.encode())}

    return {**one(chosen), "top_logprobs": [one(x) for x in top]}


def ask_of(body: ChatRequest, answer_id: str, timeout_s: float | None) -> Ask:
    """What the engine is asked for."""
    return Ask(
        answer_id=answer_id,
        messages=body.messages,
        template=body.template_options(),
        n=body.n,
        sampling={**body.sampling(), "logprobs": body.num_logprobs()},
        max_tokens=body.most_tokens(),
        slo=None if body.slo is None else body.slo.slo(),
        timeout_s=timeout_s,
        cache_salt=body.cache_salt or "",
    )


def routes(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["chat"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        front.check_model(body.model)
        writer = ChatWriter(front)
        ask = ask_of(body, writer.answer_id, front.config.request_timeout_s)
        return await respond(request, front, writer, body, ask)

    return router
