"""The routes of `/v1/messages`, Anthropic's interface."""

import json
import math
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qllm.server.api import chat
from qllm.server.api.answers import front_of, respond
from qllm.server.api.blocks import Block, Blocks, Change, Kind, changes, named_event
from qllm.server.api.calls import reader_of
from qllm.server.api.messages_protocol import CountRequest, MessagesRequest, input_of
from qllm.server.api.protocol import ChatRequest
from qllm.server.http.errors import ANTHROPIC_RESPONSES, ApiError
from qllm.server.http.headers import header
from qllm.server.requests.bodies import chat_of
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer, Comment
from qllm.types import FinishReason, Priority

ENDPOINT = "/v1/messages"
INTERLEAVED = "interleaved-thinking"
"""Beginning of the beta in which a budget of reasoning counts for several answers."""


class MessageWriter:
    """The writer of one message.

    Args:
        front: Front with the model's name and tokenizer.
        asked: The body as a chat.
    """

    def __init__(self, front: Front, asked: ChatRequest) -> None:
        self.answer_id = f"msg_{secrets.token_hex(12)}"
        self._front, self._asked = front, asked
        self._tier = "standard"

    def serve(self, answer: Answer, asked: str | None) -> None:
        """Record the class that the request was given."""
        self._tier = "batch" if answer.served.priority is Priority.BE else "standard"

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for the answer, and return its whole body."""
        blocks = self._blocks(answer)
        message = self._message(answer)
        async for item in changes(answer, blocks, None):
            if isinstance(item, FinishReason):
                message |= self._end(answer, blocks, item)
        message["content"] = [_whole(block) for block in blocks.all]
        return {**message, "usage": self._usage(answer)}

    async def events(self, answer: Answer, body: Any, silence_s: float) -> AsyncIterator[str]:
        """Yield the events of the answer as it grows."""
        blocks = self._blocks(answer)
        yield named_event("message_start", {"message": self._message(answer)})
        async for item in changes(answer, blocks, silence_s):
            if isinstance(item, Change):
                for text in _events(item):
                    yield text
            elif isinstance(item, Comment):
                yield f": {item.text}\n\n"
                yield named_event("ping", {})
            else:
                end = {"delta": self._end(answer, blocks, item), "usage": self._usage(answer)}
                yield named_event("message_delta", end)
        yield named_event("message_stop", {})

    def error_event(self, error: ApiError) -> str:
        """Return the event that ends a failed stream."""
        return named_event("error", error.anthropic())

    def _blocks(self, answer: Answer) -> Blocks:
        tokenizer, prompt = self._front.engine.tokenizer, answer.handles[0].prompt_token_ids
        return Blocks(reader_of(self._asked, self._front.config.tool_calls)(tokenizer, prompt))

    def _message(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._front.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer),
        }

    def _end(self, answer: Answer, blocks: Blocks, reason: FinishReason) -> dict[str, Any]:
        """Return the fields that report why the answer ended."""
        stop = answer.handles[0].stop_string
        why = "stop_sequence" if stop is not None else "end_turn"
        if reason is FinishReason.LENGTH:
            is_asked = answer.num_tokens[0] >= (self._asked.most_tokens() or math.inf)
            why = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif stop is None and not blocks.reader.is_in_call and any(map(_is_call, blocks.all)):
            why = "tool_use"
        return {"stop_reason": why, "stop_sequence": stop}

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "service_tier": self._tier,
        }


def _empty(block: Block) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    call_id = block.call_id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


def _is_call(block: Block) -> bool:
    return block.kind is Kind.CALL and input_of(block.text) is not None


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is Kind.CALL:
        if (found := input_of(block.text)) is not None:
            return {**_empty(block), "input": found}
        end = "}" if block.is_whole else ""  # cut off, or not an object: it is shown unchanged
        said = f'{{"name": {json.dumps(block.name)}, "arguments": {block.text}{end}'
        return {"type": "text", "text": said}
    name = "text" if block.kind is Kind.TEXT else "thinking"
    return {**_empty(block), name: block.text}


def _events(change: Change) -> Iterator[str]:
    block = change.block
    if change.what == "open":
        yield named_event(
            "content_block_start", {"index": block.index, "content_block": _empty(block)}
        )
    elif change.what == "grow":
        kind, name = {
            Kind.TEXT: ("text_delta", "text"),
            Kind.REASONING: ("thinking_delta", "thinking"),
            Kind.CALL: ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, name: change.added}
        yield named_event("content_block_delta", {"index": block.index, "delta": delta})
    else:
        yield named_event("content_block_stop", {"index": block.index})


def routes(front: Front) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["messages"])

    @router.post(ENDPOINT, responses=ANTHROPIC_RESPONSES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        own = front_of(request, front, body)
        if INTERLEAVED not in (header(request.scope, "anthropic-beta") or ""):
            body.check_budget()
        asked = await own.apart.run(body.num_bytes, chat_of, body)
        writer = MessageWriter(own, asked)
        ask = chat.ask_of(own, asked, writer.answer_id, own.config.request_timeout_s)
        return await respond(request, own, writer, body, ask)

    @router.post(f"{ENDPOINT}/count_tokens", responses=ANTHROPIC_RESPONSES)
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation in the model's prompt."""
        own = front.of(body.model)
        ignored = own.told.headers(body.all_unserved)
        asked = await own.apart.run(body.num_bytes, chat_of, body)
        ask = chat.ask_of(own, asked, "count", None)
        ids = await own.in_thread(Priority.BE, own.render, ask, Priority.BE)
        return JSONResponse({"input_tokens": len(ids)}, headers=ignored)

    return router
