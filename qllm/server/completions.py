"""`POST /v1/completions`."""

from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response

from qllm.handle import Piece
from qllm.types import FinishReason

from .answers import Writer, respond
from .errors import RESPONSES
from .front import Ask, Front
from .protocol import CompletionRequest

ENDPOINT = "/v1/completions"


class CompletionWriter(Writer):
    """The JSON of text completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, front: Front, asked: CompletionRequest) -> None:
        super().__init__(front, "cmpl")
        self._asked = asked
        self._offsets: dict[int, int] = {}

    def _echo(self, index: int) -> str:
        """What a choice's text begins with."""
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts()[index // self._asked.n]
        tokenizer = self._front.engine.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else str(tokenizer.decode(prompt))

    def opening(self, index: int) -> dict[str, Any] | None:
        text = self._echo(index)
        return self.chunk(index, Piece(text, (), ())) if text else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(index, piece) if piece.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason.value}

    def whole(self, index: int, pieces: list[dict[str, Any]], reason: FinishReason) -> Any:
        parts = [p["logprobs"] for p in pieces if p["logprobs"]]
        logprobs = (
            {key: [x for part in parts for x in part[key]] for key in parts[0]} if parts else None
        )
        text = self._echo(index) + "".join(p["text"] for p in pieces)
        return {**self.end(index, reason), "text": text, "logprobs": logprobs}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        found = [
            self.alternatives(token_id, logprobs)
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        start = self._offsets.get(index, 0)
        ends = list(accumulate((len(chosen.token) for chosen, _ in found), initial=start))
        self._offsets[index] = ends[-1]
        return {
            "tokens": [chosen.token for chosen, _ in found],
            "token_logprobs": [chosen.logprob for chosen, _ in found],
            "top_logprobs": [{x.token: x.logprob for x in (*top, c)} for c, top in found],
            "text_offset": ends[:-1],
        }


def ask_of(body: CompletionRequest, answer_id: str, timeout_s: float | None) -> Ask:
    """What the engine is asked for."""
    return Ask(
        answer_id=answer_id,
        prompts=body.prompts(),
        n=body.n,
        sampling={**body.sampling(), "logprobs": body.num_logprobs()},
        max_tokens=body.most_tokens(),
        slo=None if body.slo is None else body.slo.slo(),
        timeout_s=timeout_s,
    )


def routes(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["completions"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        front.check_model(body.model)
        writer = CompletionWriter(front, body)
        ask = ask_of(body, writer.answer_id, front.config.request_timeout_s)
        return await respond(request, front, writer, body, ask)

    return router
