"""The route `POST /v1/completions`."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from qllm.frontend.detokenizer import certain_text, decoded, token_texts
from qllm.frontend.handle import Piece
from qllm.server.api import answers
from qllm.server.api.answers import Writer, front_of, respond_to_prompt
from qllm.server.api.protocol import CompletionRequest
from qllm.server.http.errors import RESPONSES
from qllm.server.requests.ask import TO_FIT, Ask, Sends
from qllm.server.requests.front import Front
from qllm.types import FinishReason, Logprobs, PromptLogprobs

ENDPOINT = "/v1/completions"


class Position(NamedTuple):
    """A token in the lists of `logprobs`."""

    token: str
    logprob: float | None
    top: dict[str, float] | None
    """Log-probability by text, of the alternatives and the token itself.

    Of several tokens with the same text, the likeliest counts.
    """


class CompletionWriter(Writer):
    """The writer of text completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, front: Front, asked: CompletionRequest) -> None:
        super().__init__(front, "cmpl", asked)
        self._asked = asked
        self._offsets: dict[int, int] = {}

    def _given(self, index: int) -> str | None:
        """Return the prompt of a choice if it was sent as text and is not truncated; else None."""
        prompt, ids = self._asked.prompts()[index // self._asked.n], self.prompts[index]
        is_cut = self._asked.truncate_prompt_tokens in (TO_FIT, len(ids))
        return prompt if isinstance(prompt, str) and not is_cut else None

    def _echo(self, index: int) -> str:
        """Return the prompt's text that a choice begins with; empty without `echo`."""
        if not self._asked.echo:
            return ""
        tokenizer, ids = self._front.engine.tokenizer, self.prompts[index]
        if (given := self._given(index)) is not None or tokenizer is None:
            return given or ""
        if self._asked.max_tokens == 0:
            return decoded(tokenizer, ids)
        return certain_text(tokenizer, ids, special=True)[0]

    def _texts_of_prompt(self, index: int) -> list[str]:
        """Split the echo into the text of each prompt token, for the list of log-probabilities."""
        tokenizer, ids = self._front.engine.tokenizer, self.prompts[index]
        if tokenizer is None:
            return [self.shown(token_id, 0.0).token for token_id in ids]
        find = partial(token_texts, tokenizer, ids, is_whole=self._asked.max_tokens == 0)
        if (given := self._given(index)) is None:
            return find(special=True)
        found = find(special=False)
        text = "".join(found)
        if given.endswith(text):  # the text before belongs to the leading special tokens
            return [given[: len(given) - len(text)] + found[0], *found[1:]]
        whole = find(special=True)
        return whole if "".join(whole) == given else found

    def opening(self, index: int) -> dict[str, Any] | None:
        text = "" if self._waits_for_prompt else self._echo(index)
        return self._choice(index, text) if text else None

    @property
    def _waits_for_prompt(self) -> bool:
        """True if the echo has log-probabilities. These arrive with the first token."""
        return bool(self._asked.echo) and self._asked.logprobs is not None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        text, shown = piece.text, self._shown(piece)
        if self._asked.max_tokens == 0:
            text, shown = "", []
        if piece.prompt is not None and self._waits_for_prompt:
            texts, has_text = self._texts_of_prompt(index), self._front.engine.tokenizer is not None
            text = ("".join(texts) if has_text else "") + text
            shown = [*self._shown_prompt(index, texts, piece.prompt), *shown]
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
        """Return the answer's tokens with their log-probabilities, if requested."""
        if not piece.logprobs:
            return []
        texts = piece.added or [self.shown(i, 0.0).token for i in piece.token_ids]
        both = zip(texts, piece.token_ids, piece.logprobs, strict=True)
        return [self._position(*of_token) for of_token in both]

    def _shown_prompt(
        self, index: int, texts: Sequence[str], prompt: PromptLogprobs
    ) -> list[Position]:
        """Return the prompt's tokens with log-probabilities. The first token has none."""
        both = zip(texts[1:], self.prompts[index][1:], prompt.tokens(), strict=True)
        return [Position(texts[0], None, None), *(self._position(*of_token) for of_token in both)]

    def _position(self, text: str, token_id: int, logprobs: Logprobs) -> Position:
        """Return a token that adds a text, and the token's alternatives."""
        chosen, top = self.alternatives(token_id, logprobs)
        by_text = {text: chosen.logprob}
        for (i, _), other in zip(logprobs.top, top, strict=True):
            if i != token_id:
                by_text[other.token] = max(other.logprob, by_text.get(other.token, other.logprob))
        return Position(text, chosen.logprob, by_text)

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
    """Return the engine request for a body."""
    return answers.ask_of(
        body,
        answer_id,
        timeout_s,
        prompts=body.prompts(),
        special=body.add_special_tokens,
        sampling=body.sampling(),
    )


def routes(front: Front, prompts: Sends) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["completions"])

    @router.post(ENDPOINT, responses=RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        own = front_of(request, front, body)
        writer = CompletionWriter(own, body)
        ask = ask_of(body, writer.answer_id, own.config.request_timeout_s)
        return await respond_to_prompt(request, own, prompts, writer, body, ask, is_chat=False)

    return router
