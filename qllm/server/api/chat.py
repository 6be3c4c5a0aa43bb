"""The route `POST /v1/chat/completions`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from qllm.frontend.handle import Piece
from qllm.server.api import answers
from qllm.server.api.answers import Shown, Writer, front_of, respond_to_prompt
from qllm.server.api.calls import Reader, reader_of
from qllm.server.api.protocol import ChatRequest
from qllm.server.http.errors import RESPONSES
from qllm.server.requests.ask import Ask, Sends
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer
from qllm.server.tools.deltas import merged
from qllm.types import FinishReason

ENDPOINT = "/v1/chat/completions"


class ChatWriter(Writer):
    """The writer of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    has_prompts_in_choices = False

    def __init__(self, front: Front, asked: ChatRequest) -> None:
        super().__init__(front, "chatcmpl", asked)
        self._asked = asked
        self._readers: dict[int, Reader] = {}

    def _reader(self, index: int) -> Reader:
        """Return the reader of a choice, which is made at first use."""
        if index not in self._readers:
            tokenizer, prompt = self._front.engine.tokenizer, self.prompts[index]
            make = reader_of(self._asked, self._front.config.tool_calls)
            self._readers[index] = make(tokenizer, prompt)
        return self._readers[index]

    def usage(self, answer: Answer) -> dict[str, Any]:
        thought = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        found = answer.usage()
        drafts = found.get("completion_tokens_details", {})
        return {**found, "completion_tokens_details": {"reasoning_tokens": thought, **drafts}}

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        tokens = zip(piece.token_ids, piece.logprobs, piece.added, strict=True)
        content = [_entry(*self.alternatives(*x)) for x in tokens] if piece.logprobs else []
        logprobs = {"content": content, "refusal": None} if content else None
        delta = self._reader(index).push(piece.text, piece.token_ids, piece.ends)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        reader = self._reader(index)
        delta, why = reader.finish(), reason.value
        if reader.num_calls and reason is FinishReason.STOP and not reader.is_in_call:
            why = "tool_calls"
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": why}

    def whole(self, index: int, pieces: list[dict[str, Any]], reason: FinishReason) -> Any:
        parts = [x for p in pieces if p["logprobs"] for x in p["logprobs"]["content"]]
        end = self.end(index, reason)
        found = merged([*(p["delta"] for p in pieces), end["delta"]])
        message = {"role": "assistant", "content": found.get("content", ""), "refusal": None}
        if "reasoning_content" in found:
            message["reasoning_content"] = found["reasoning_content"]
        if calls := found.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in x.items() if k != "index"} for x in calls]
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": parts, "refusal": None} if parts else None,
            "finish_reason": end["finish_reason"],
        }


def _entry(chosen: Shown, top: list[Shown]) -> dict[str, Any]:
    def one(x: Shown) -> dict[str, Any]:
        return {"token": x.token, "logprob": x.logprob, "bytes": list(x.data)}

    return {**one(chosen), "top_logprobs": [one(x) for x in top]}


def ask_of(front: Front, body: ChatRequest, answer_id: str, timeout_s: float | None) -> Ask:
    """Return the engine request for a body."""
    return answers.ask_of(
        body,
        answer_id,
        timeout_s,
        messages=body.messages,
        template=body.template_options(),
        reading=reader_of(body, front.config.tool_calls),
        special=body.add_special_tokens,
        sampling={**body.sampling(), "logprobs": body.num_logprobs()},
        form=body.calls_form(front.config.tool_calls),
    )


def routes(front: Front, prompts: Sends) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["chat"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        own = front_of(request, front, body)
        writer = ChatWriter(own, body)
        ask = ask_of(own, body, writer.answer_id, own.config.request_timeout_s)
        return await respond_to_prompt(request, own, prompts, writer, body, ask, is_chat=True)

    return router
