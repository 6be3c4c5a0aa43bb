"""The writer of a response's JSON and events."""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

from qllm.frontend.handle import Piece
from qllm.server.api.answers import Shown, Tokens
from qllm.server.api.blocks import Block, Blocks, Change, Kind, changes, named_event
from qllm.server.api.calls import reader_of
from qllm.server.api.protocol import ChatRequest
from qllm.server.api.responses_protocol import ResponsesRequest
from qllm.server.http.errors import ApiError
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer, Comment
from qllm.server.tools.response_tools import CustomTool, plain_input
from qllm.types import FinishReason, Priority

Keep = Callable[[dict[str, Any]], Awaitable[None]]
OPENING = ("created", "queued", "in_progress")
"""First events of a background stream, before any output."""
PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class ResponseWriter:
    """A converter of an answer to a response.

    Args:
        front: Front with the model's name and tokenizer.
        asked: Body of the request.
        chat: The same body as a chat.
        keep: Function that stores the whole response before the response is sent; None stores
            nothing.
        begun: Response so far, if a part was already sent.
        num_events: Number of events that were already sent.
    """

    def __init__(
        self,
        front: Front,
        asked: ResponsesRequest,
        chat: ChatRequest,
        keep: Keep | None,
        begun: dict[str, Any] | None = None,
        num_events: int = 0,
    ) -> None:
        self._front, self._asked, self._chat, self._keep = front, asked, chat, keep
        self._shown = Tokens(front).shown
        if begun is None:
            response_id = f"resp_{secrets.token_hex(24)}"
            begun = asked.response(response_id, int(time.time()), front.model_name)
            begun["store"] = keep is not None
        self.response = begun
        self.answer_id: str = begun["id"]
        self._ids: dict[int, str] = {}
        """Ids of the output items, by number."""
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._num_before = num_events
        self._numbers = count(num_events)

    def serve(self, answer: Answer, asked: str | None) -> None:
        """Record the class that the request is served with."""
        is_ls = answer.served.priority is Priority.LS
        tier = "priority" if is_ls and asked == "priority" else answer.served.tier
        self.response["service_tier"] = tier

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for the answer and return the response."""
        blocks = self._blocks(answer)
        async for item in changes(answer, blocks, None):
            if isinstance(item, Change):
                self._note(item)
            elif isinstance(item, FinishReason):
                await self._end(answer, blocks, item)
        return self.response

    def queued(self) -> tuple[str, str]:
        """Return the first events of a response that is queued in the background."""
        created, queued = (
            self._event(f"response.{name}", response=self.response) for name in OPENING[:2]
        )
        return created, queued

    async def events(
        self, answer: Answer, body: Any, silence_s: float | None
    ) -> AsyncIterator[str]:
        """Yield the events of a growing response."""
        blocks = self._blocks(answer)
        opening = OPENING[self._num_before :] if self._num_before else ("created", "in_progress")
        for name in opening:
            yield self._event(f"response.{name}", response=self.response)
        async for item in changes(answer, blocks, silence_s):
            if isinstance(item, Change):
                for text in self._events(item):
                    yield text
            elif isinstance(item, Comment):
                yield f": {item.text}\n\n"
            else:
                await self._end(answer, blocks, item)
                name = f"response.{self.response['status']}"
                yield self._event(name, response=self.response)

    def error_event(self, error: ApiError) -> str:
        """Return the event that ends a failed stream."""
        return self._event("response.failed", response=failed(self.response, error))

    def _blocks(self, answer: Answer) -> Blocks:
        tokenizer, prompt = self._front.engine.tokenizer, answer.handles[0].prompt_token_ids
        return Blocks(reader_of(self._chat, self._front.config.tool_calls)(tokenizer, prompt))

    async def _end(self, answer: Answer, blocks: Blocks, reason: FinishReason) -> None:
        """Complete the response, and store it."""
        is_whole = reason is not FinishReason.LENGTH
        output = [self._item(block) for block in blocks.all]
        usage = answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = blocks.reader.num_reasoning_tokens
        self.response |= {
            "status": "completed" if is_whole else "incomplete",
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._keep is not None:
            await self._keep(self.response)

    # -- output items

    def _note(self, change: Change) -> list[dict[str, Any]]:
        """Record a change of an item, and return its new log-probabilities."""
        block = change.block
        if change.what == "open":
            self._ids[block.index] = f"{PREFIXES[block.kind]}_{secrets.token_hex(24)}"
            self._logprobs[block.index] = []
        shows = self._asked.shows_logprobs and block.kind is Kind.TEXT
        new = [entry for piece in change.pieces for entry in self._entries(piece)] if shows else []
        self._logprobs[block.index] += new
        return new

    def _entries(self, piece: Piece) -> Iterator[dict[str, Any]]:
        def entry(x: Shown) -> dict[str, Any]:
            return {"token": x.token, "bytes": list(x.data), "logprob": x.logprob}

        tokens = zip(piece.token_ids, piece.logprobs, piece.added, strict=True)
        for token_id, logprobs, added in tokens if piece.logprobs else ():
            top = [entry(self._shown(*alternative)) for alternative in logprobs.top]
            yield {**entry(self._shown(token_id, logprobs.chosen, added)), "top_logprobs": top}

    def _item(self, block: Block, *, is_done: bool = True) -> dict[str, Any]:
        """Return an output item. An item in progress has an empty text."""
        status = "completed" if block.is_whole else "incomplete"
        item: dict[str, Any] = {
            "id": self._ids[block.index],
            "status": status if is_done else "in_progress",
        }
        if block.kind is Kind.CALL:
            if (callee := self._asked.callees.get(block.name)) is not None:
                return item | callee.call(block.call_id, block.text, is_done=is_done)
            item |= {"type": "function_call", "call_id": block.call_id, "name": block.name}
            return {**item, "arguments": block.text if is_done else ""}
        content = [self._part(block, block.text)] if is_done else []
        if block.kind is Kind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs[block.index] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # -- events

    def _event(self, name: str, /, **data: Any) -> str:
        return named_event(name, {"sequence_number": next(self._numbers), **data})

    def _events(self, change: Change) -> Iterator[str]:
        block, new = change.block, self._note(change)
        item_id = self._ids[block.index]
        where: dict[str, Any] = {"output_index": block.index}
        place = {**where, "item_id": item_id}
        if block.kind is not Kind.CALL:
            place["content_index"] = 0
        kind = {
            Kind.TEXT: "response.output_text",
            Kind.REASONING: "response.reasoning_text",
            Kind.CALL: "response.function_call_arguments",
        }[block.kind]
        logprobs = {"logprobs": new} if block.kind is Kind.TEXT else {}
        if change.what == "open":
            item = self._item(block, is_done=False)
            yield self._event("response.output_item.added", **where, item=item)
            if block.kind is not Kind.CALL:
                part = self._part(block, "")
                yield self._event("response.content_part.added", **place, part=part)
        elif change.what == "grow" and not self._is_custom(block):
            yield self._event(f"{kind}.delta", **place, delta=change.added, **logprobs)
        elif change.what == "close":
            yield from self._closed(block, kind, where, place)

    def _is_custom(self, block: Block) -> bool:
        """Return True if a block is a call of a custom tool. Its input is sent when complete."""
        callee = self._asked.callees.get(block.name) if block.kind is Kind.CALL else None
        return callee is not None and isinstance(callee.tool, CustomTool)

    def _closed(
        self, block: Block, kind: str, where: dict[str, Any], place: dict[str, Any]
    ) -> Iterator[str]:
        if self._is_custom(block):
            kind, text = "response.custom_tool_call_input", plain_input(block.text)
            yield self._event(f"{kind}.delta", **place, delta=text)
            said = {"input": text}
        elif block.kind is Kind.CALL:
            said = {"arguments": block.text, "name": block.name}
        else:
            said = {"text": block.text}
        if block.kind is Kind.TEXT:
            said["logprobs"] = self._logprobs[block.index]  # type: ignore[assignment]
        yield self._event(f"{kind}.done", **place, **said)
        if block.kind is not Kind.CALL:
            part = self._part(block, block.text)
            yield self._event("response.content_part.done", **place, part=part)
        item = self._item(block)
        yield self._event("response.output_item.done", **where, item=item)


def failed(response: dict[str, Any], error: ApiError) -> dict[str, Any]:
    """Return the response, ended by an error."""
    detail = {"code": error.code or error.type, "message": error.message}
    return {**response, "status": "failed", "error": detail}
