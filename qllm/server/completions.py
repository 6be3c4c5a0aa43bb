"""`POST /v1/completions`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from qllm.frontend.detokenizer import decoded
from qllm.frontend.handle import Piece
from qllm.types import FinishReason, PromptLogprobs

from .answers import Shown, Writer, respond
from .ask import TO_FIT, Ask, Sends, check_alone
from .errors import RESPONSES
from .front import Front
from .protocol import CompletionRequest

ENDPOINT = "/v1/completions"


class Position(NamedTuple):
    """One token in the lists of `logprobs`."""

    token: str
    logprob: float | None
    top: dict[str, float] | None
    """Alternatives and the token itself. Of those that read the same, the likelier."""


class CompletionWriter(Writer):
    """The JSON of text completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, front: Front, asked: CompletionRequest) -> None:
        super().__init__(front, "cmpl", asked)
        self._asked = asked
        self._offsets: dict[int, int] = {}

    def _echo(self, index: int) -> str:
        """What a choice's text begins with."""
        if not self._asked.echo:
            return ""
        prompt, ids = self._asked.prompts()[index // self._asked.n], self.prompts[index]
        is_cut = self._asked.truncate_prompt_tokens in (TO_FIT, len(ids))
        if isinstance(prompt, str) and not is_cut:
            return prompt
        if (tokenizer := self._front.engine.tokenizer) is None:
            return ""
        return decoded(tokenizer, ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        text = "" if self._waits_for_prompt else self._echo(index)
        return self._choice(index, text) if text else None

    @property
    def _waits_for_prompt(self) -> bool:
        """Whether the echo has log-probabilities, which come with the first token."""
        return bool(self._asked.echo) and self._asked.logprobs is not None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        text, shown = piece.text, self._shown(piece)
        if self._asked.max_tokens == 0:
            text, shown = "", []
        if piece.prompt is not None and self._waits_for_prompt:
            ids = self.prompts[index]
            text = self._echo(index) + text
            shown = [*self._shown_prompt(ids, piece.prompt), *shown]
        return self._choice(index, text, self._logprobs(index, shown) if shown else None)

    @staticmethod
    def _choice(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        if self._asked.max_tokens == 0:
            reason = FinishReason.LENGTH
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason.value}

    def whole(self, index: int, pieces: list[dict[str, Any]], reason: FinishReason) -> Any:
        parts = [p["logprobs"] for p in pieces if p["logprobs"]]
        logprobs = (
            {key: [x for part in parts for x in part[key]] for key in parts[0]} if parts else None
        )
        text = "".join(p["text"] for p in pieces)
        if not self._waits_for_prompt:
            text = self._echo(index) + text
        return {**self.end(index, reason), "text": text, "logprobs": logprobs}

    def _shown(self, piece: Piece) -> list[Position]:
        """Tokens of the answer with their log-probabilities, if asked for."""
        if not piece.logprobs:
            return []
        both = zip(piece.token_ids, piece.logprobs, strict=True)
        return [self._position(*self.alternatives(i, logprobs)) for i, logprobs in both]

    def _shown_prompt(self, ids: Sequence[int], prompt: PromptLogprobs) -> list[Position]:
        """The same for the tokens of the prompt; the first has no log-probability."""
        first = Position(self.shown(ids[0], 0.0).token, None, None)
        both = zip(ids[1:], prompt.tokens(), strict=True)
        rest = [self._position(*self.alternatives(i, logprobs)) for i, logprobs in both]
        return [first, *rest]

    @staticmethod
    def _position(chosen: Shown, top: list[Shown]) -> Position:
        by_text: dict[str, float] = {}
        for x in (*top, chosen):
            by_text.setdefault(x.token, x.logprob)
        return Position(chosen.token, chosen.logprob, by_text)

    def _logprobs(self, index: int, shown: list[Position]) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        ends = list(accumulate((len(x.token) for x in shown), initial=start))
        self._offsets[index] = ends[-1]
        return {
            "tokens": [x.token for x in shown],
            "token_logprobs": [x.logprob for x in shown],
            "top_logprobs": [x.top for x in shown],
            "text_offset": ends[:-1],
        }


def ask_of(body: CompletionRequest, answer_id: str, timeout_s: float | None) -> Ask:
    """What the engine is asked for."""
    return Ask(
        answer_id=answer_id,
        prompts=body.prompts(),
        n=body.n,
        sampling=body.sampling(),
        max_tokens=body.most_tokens(),
        slo=None if body.slo is None else body.slo.slo(),
        timeout_s=timeout_s,
        truncate=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt or "",
        cache_ttl_s=body.cache_ttl_s,
        num_bytes=body.num_bytes,
    )


def routes(front: Front, prompts: Sends) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["completions"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        front.check_model(body.model)
        writer = CompletionWriter(front, body)
        ask = ask_of(body, writer.answer_id, front.config.request_timeout_s)
        if body.prompt_id is None:
            return await respond(request, front, writer, body, ask)
        check_alone(body)
        caller = request.state.caller
        with prompts.sending(caller, body.prompt_id, is_chat=False) as opened:
            return await respond(request, front, writer, body, replace(ask, opened=opened))

    return router
