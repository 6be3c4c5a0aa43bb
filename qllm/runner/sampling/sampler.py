"""Sampling of the next tokens: each row by its own logits, settings and random numbers.

`runner/sampling/definition.py` defines the order of steps. Rows never affect each other and no
random state advances. So a seeded request gets the same tokens in any batch, in any order, and
again after it was preempted.
"""

import math
import secrets
from collections.abc import Collection, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from qllm.errors import NO_TOKEN, InvariantError
from qllm.grammar import Matcher, Vocabulary
from qllm.runner.sampling.definition import (
    MAX_BIAS,
    Choice,
    Floats64,
    SampledRow,
    choose_all,
    confidence_of,
    log_total,
    readable,
    share_of,
)
from qllm.runner.sampling.limits import NO_IDS, Ids, Limits
from qllm.types import RequestId, Sampled, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The sampler's data of one request. The data never changes."""

    sampling: SamplingParams
    seed: int
    is_plain: bool
    """True if the token is the argmax of the raw logits, and nothing else is requested."""
    prompt_ids: Ids
    """Distinct ids of the prompt; empty unless `repetition_penalty` needs them."""
    bias_ids: Ids
    bias: Floats64
    limits: Limits | None
    """Limits of the next token. They depend on the output alone, not on earlier calls."""


def _build_request(
    sampling: SamplingParams, prompt_ids: Sequence[int], limits: Limits | None
) -> _Request:
    repeats = sampling.repetition_penalty != 1
    bias = np.array(list(sampling.logit_bias.values()), np.float64)
    return _Request(
        sampling=sampling,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        is_plain=sampling.greedy
        and sampling.logprobs is None
        and not (sampling.has_penalties or sampling.logit_bias or limits),
        prompt_ids=np.unique(np.array(prompt_ids if repeats else (), np.int64)),
        bias_ids=np.array(list(sampling.logit_bias), np.int64),
        bias=np.clip(bias, -MAX_BIAS, MAX_BIAS),
        limits=limits,
    )


def _row(
    request: _Request, logits_V: torch.Tensor, position: int, outputs: Sequence[int]
) -> SampledRow | str:
    """Return a row to choose from, or the reason why no token is allowed."""
    sampling, limits = request.sampling, request.limits
    rules = None if limits is None else limits.rules(outputs, len(logits_V))
    if isinstance(rules, str):
        return rules
    return SampledRow(
        logits_V=readable(logits_V),
        sampling=sampling,
        share=0 if sampling.greedy else share_of(request.seed, position),
        bias_ids=request.bias_ids,
        bias=request.bias,
        prompt_ids=request.prompt_ids,
        outputs=np.array(outputs, np.int64) if sampling.has_penalties else NO_IDS,
        rules=rules,
    )


class Sampler:
    """The settings of all requests, and the choice of their tokens."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, _Request] = {}
        self.vocabulary: Vocabulary | None = None
        """Vocabulary of the model. Without a vocabulary, requests cannot have limits
        (`SamplingParams.limits_tokens`)."""
        self.built: dict[RequestId, Matcher] = {}
        """Grammars, built on another thread, of requests that will be added."""
        self._builder: ThreadPoolExecutor | None = None
        """Thread that computes allowed tokens of grammars during the model's next pass. Made at
        first use."""

    def add(
        self, request_id: RequestId, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        """Admit a request. A request without a seed gets a random seed here.

        Raises:
            InvariantError: The request was added before.
            InvalidRequestError: The request's grammar is refused.
        """
        if request_id in self._requests:
            raise InvariantError(f"request {request_id} is in the sampler already")
        limits, matcher = None, self.built.pop(request_id, None)
        if sampling.limits_tokens:
            if self.vocabulary is None:
                raise InvariantError(f"request {request_id} has limits, and no vocabulary is known")
            limits = Limits(sampling, self.vocabulary, matcher, prompt_ids)
        self._requests[request_id] = _build_request(sampling, prompt_ids, limits)

    def remove(self, request_id: RequestId) -> None:
        """Remove a request.

        Raises:
            InvariantError: The request is unknown.
        """
        if self._requests.pop(request_id, None) is None:
            raise InvariantError(f"request {request_id} is not in the sampler")

    def simple(self, request_id: RequestId) -> tuple[SamplingParams, int] | None:
        """Return settings and seed of a request that a kernel can sample; None for other requests.

        A kernel supports temperature, top_k, top_p and min_p, and reports no log-probabilities.
        """
        request = self._requests[request_id]
        p = request.sampling
        asks_more = p.logprobs is not None or p.confidence or p.logit_bias or p.limits_tokens
        if asks_more or p.has_penalties:
            return None
        return p, request.seed

    def sample(
        self,
        logits_BV: torch.Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        outputs: Sequence[Sequence[int]],
    ) -> list[Sampled]:
        """Choose one token per row.

        Args:
            logits_BV: Raw logits, of any float dtype and on any device. They are read in fp32.
            request_ids: Request of each row.
            positions: Index of the token to choose in the whole sequence, prompt included.
            outputs: Ids that each request has produced so far.

        Raises:
            ValueError: A row's logits hold NaN or have no finite maximum, or a token id of the
                request is outside the vocabulary. The message names the request.
            InvariantError: The arguments differ in length, or a request is unknown.
        """
        if not len(request_ids) == len(logits_BV) == len(positions) == len(outputs):
            raise InvariantError(
                f"{len(request_ids)} request ids, {len(logits_BV)} rows of logits, "
                f"{len(positions)} positions and {len(outputs)} outputs must be equally many"
            )
        unknown = [i for i in request_ids if i not in self._requests]
        if unknown:
            raise InvariantError(f"requests {unknown} are not in the sampler")
        if not request_ids:
            return []
        requests = [self._requests[i] for i in request_ids]
        logits_BV = logits_BV.detach()
        only_best = all(r.is_plain and not r.sampling.confidence for r in requests)
        if logits_BV.device.type != "cpu" and only_best:
            best = logits_BV.argmax(dim=1)  # only the argmax leaves the device
            peak = logits_BV.gather(1, best[:, None])[:, 0]
            both = zip(request_ids, best.tolist(), peak.float().tolist(), positions, strict=True)
            return [self.greedy(*row) for row in both]
        sampled, rows = dict[int, Sampled](), dict[int, SampledRow]()
        for b, request in enumerate(requests):
            _check_ids(request_ids[b], request, logits_BV.shape[1])
            row = _row(request, logits_BV[b], positions[b], outputs[b])
            if isinstance(row, str):
                sampled[b] = Sampled(request_ids[b], 0, error=f"{NO_TOKEN}{row}")
            else:
                rows[b] = row
        for b, found in zip(rows, choose_all(list(rows.values())), strict=True):
            sampled[b] = self._sampled(request_ids[b], found, positions[b])
            if requests[b].sampling.confidence and found.token_id is not None:
                own = confidence_of(
                    found.peak, log_total(rows[b].logits_V.float().numpy()[None])[0]
                )
                sampled[b] = sampled[b]._replace(confidence=own)
        return [sampled[b] for b in range(len(requests))]

    def guess(
        self,
        logits_BV: torch.Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        outputs: Sequence[Sequence[int]],
    ) -> list[int | None]:
        """Choose one drafted token per row; None where the logits allow none.

        The settings and the random numbers are those of `sample`. But a grammar does not count, nor
        does a budget of reasoning: both follow the answer, and a draft may not become part of it.

        Args:
            logits_BV: Raw logits at an early layer.
            request_ids: Request of each row.
            positions: Index of the token to choose in the whole sequence, prompt included.
            outputs: Ids that each request has produced so far, and its drafts.
        """
        rows = []
        for b, request_id in enumerate(request_ids):
            request = self._requests[request_id]
            if request.limits is not None and request.limits.follows_outputs:
                request = replace(request, limits=None)
            _check_ids(request_id, request, logits_BV.shape[1])
            row = _row(request, logits_BV[b], positions[b], outputs[b])
            assert isinstance(row, SampledRow), "without a grammar there are always rules"
            rows.append(row)
        return [found.token_id for found in choose_all(rows)]

    def _sampled(self, request_id: RequestId, found: Choice, position: int) -> Sampled:
        """Return the token of a choice, or the reason why there is no token."""
        token_id = 0 if found.token_id is None else found.token_id
        token = self.greedy(request_id, token_id, found.peak, position)
        if found.token_id is None:
            return token._replace(error=f"{NO_TOKEN}its bad_words allow no further token")
        return token._replace(logprobs=found.logprobs)

    def forced(self, request_id: RequestId, outputs: Sequence[int], most: int) -> Sequence[int]:
        """Return the next tokens that a request's grammar forces; none without a grammar.

        Args:
            request_id: Id of the request.
            outputs: Ids that the request has produced so far.
            most: Most tokens to return.
        """
        limits = self._requests[request_id].limits
        return () if limits is None else limits.forced(outputs, most)

    def is_limited(self, request_id: RequestId) -> bool:
        """Return True if a request limits its tokens (`SamplingParams.limits_tokens`)."""
        return self._requests[request_id].limits is not None

    def look_ahead(self, request_id: RequestId, outputs: Sequence[int]) -> None:
        """Start to compute the tokens that may come next, during the model's next pass.

        Args:
            request_id: Id of a request that limits its tokens.
            outputs: Ids that the request has produced so far, with the one just chosen.
        """
        limits = self._requests[request_id].limits
        assert limits is not None
        limits.go_ahead(self._ahead(), outputs)

    def _ahead(self) -> ThreadPoolExecutor:
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, "qllm-masks")
        return self._builder

    def plain(self, ids: Sequence[RequestId], dead: Container[RequestId]) -> list[int]:
        """Return indices of dead requests, and of requests whose token is the raw argmax."""
        return [i for i, one in enumerate(ids) if one in dead or self._requests[one].is_plain]

    def confident(self, ids: Sequence[RequestId], plain: Sequence[int]) -> list[int]:
        """Return those of some plain indices whose requests ask for confidence."""
        known = self._requests
        return [i for i in plain if ids[i] in known and known[ids[i]].sampling.confidence]

    def greedy(self, request_id: RequestId, token_id: int, peak: float, position: int) -> Sampled:
        """Return the token of a plain request: the lowest id of the largest logit, `peak`.

        NaN counts as larger than all numbers, so a finite peak shows that the row has no NaN.

        Raises:
            ValueError: The peak is not finite; the message names the request.
        """
        if not math.isfinite(peak):
            raise ValueError(
                f"request {request_id}: the largest logit is {peak} and must be finite; "
                f"the model's output at position {position} is broken"
            )
        return Sampled(request_id, token_id)


class Unread(NamedTuple):
    """Tokens that were sampled on a device and are not read yet."""

    request_ids: list[RequestId]
    positions: list[int]
    tokens_R: torch.Tensor
    peaks_R: torch.Tensor
    """Largest logit of each row."""

    def read(self, sampler: Sampler, dead: Collection[RequestId]) -> list[Sampled]:
        """Wait for the device and return the tokens. Rows that died meanwhile have no token.

        Raises:
            ValueError: A peak is not finite: see `Sampler.greedy`.
        """
        tokens, peaks = torch.stack((self.tokens_R.double(), self.peaks_R.double())).cpu().tolist()
        rows = zip(self.request_ids, tokens, peaks, self.positions, strict=True)
        return [sampler.greedy(i, int(t), peak, at) for i, t, peak, at in rows if i not in dead]


def _check_ids(request_id: RequestId, request: _Request, vocabulary: int) -> None:
    """Raise if an id is outside the vocabulary. Ids of outputs are always inside."""
    for name, ids in (("logit_bias", request.bias_ids), ("prompt", request.prompt_ids)):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise ValueError(
                f"request {request_id}: {name} token id {ids.max()} must be in [0, {vocabulary}); "
                "change the request"
            )
