"""Choose the next tokens: each row by its own logits, settings and random numbers.

The order of operations is that of vLLM:

    raw logits (fp32)       their log-softmax is what `logprobs` reports
    + logit_bias            fp64 from here on
    repetition_penalty      seen tokens, prompt included: x / r if x > 0 else x * r
    - frequency_penalty     times the occurrences in the output
    - presence_penalty      once for a token in the output
    limits                  -inf for tokens that may not come (`runner/limits.py`)
    argmax                  if greedy; the lowest id wins a tie
    / temperature           weights exp((x - max x) / temperature)
    min_p                   against the most likely token
    top_k                   tokens as likely as the k-th stay
    top_p                   renormalised over what is left; the lowest ids win a tie
    inverse CDF             in token-id order, one uniform number per token

transformers applies `min_p` last: the nuclei differ when both it and `top_p` are set.

The uniform number is a pure function of (seed, position), by Philox-4x32-10. A row never meets
another row and no state moves, so a seeded request gets the same tokens in any batch, in any
order, and again after it was preempted.
"""

import math
import secrets
from collections.abc import Collection, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qllm.errors import NO_TOKEN, InvariantError
from qllm.grammar import Matcher, Vocabulary
from qllm.runner.limits import Limits
from qllm.types import Logprobs, RequestId, Sampled, SamplingParams

Ids = npt.NDArray[np.int64]
Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]

WORD = 0xFFFFFFFF
MAX_BIAS = float(np.finfo(np.float32).max)
"""A larger bias cannot win or lose any more; sums and products stay finite in fp64."""


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the block of four 32-bit words at `counter` of the stream `key`.

    Source: Philox-4x32-10, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that chooses the token at `position`.

    The key is (seed low, seed high), the counter (position low, position high, 0, 0); the first
    word and the upper 21 bits of the second are the 53 bits of the fraction.
    """
    counter = (position & WORD, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & WORD, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the sampler keeps of one request. It never changes."""

    sampling: SamplingParams
    seed: int
    is_plain: bool
    """The token is the argmax of the raw logits, and nothing else is asked for."""
    prompt_ids: Ids
    """Distinct ids of the prompt; empty unless `repetition_penalty` needs them."""
    bias_ids: Ids
    bias: Floats64
    limits: Limits | None
    """What tokens may not come. Its state follows the output, whatever was asked before."""


def _build_request(
    sampling: SamplingParams, prompt_ids: Sequence[int], limits: Limits | None
) -> _Request:
    has_penalty = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    repeats = sampling.repetition_penalty != 1
    bias = np.array(list(sampling.logit_bias.values()), np.float64)
    return _Request(
        sampling=sampling,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        is_plain=sampling.greedy
        and sampling.logprobs is None
        and not (has_penalty or repeats or sampling.logit_bias or limits),
        prompt_ids=np.unique(np.array(prompt_ids if repeats else (), np.int64)),
        bias_ids=np.array(list(sampling.logit_bias), np.int64),
        bias=np.clip(bias, -MAX_BIAS, MAX_BIAS),
        limits=limits,
    )


def _adjust(request: _Request, logits_V: Floats32, outputs: Sequence[int]) -> Floats64:
    """Return a copy of the logits with bias and penalties applied."""
    sampling, x_V = request.sampling, logits_V.astype(np.float64)
    x_V[request.bias_ids] += request.bias
    r = sampling.repetition_penalty
    if r == 1 and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0:
        return x_V
    ids, counts = np.unique(np.array(outputs, np.int64), return_counts=True)
    if r != 1:
        seen = np.union1d(request.prompt_ids, ids)
        with np.errstate(over="ignore"):  # a tiny penalty
            x_V[seen] = np.where(x_V[seen] > 0, x_V[seen] / r, x_V[seen] * r)
        np.clip(x_V, -MAX_BIAS, MAX_BIAS, out=x_V)
    x_V[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return x_V


def weights(x_V: Floats64, sampling: SamplingParams) -> Floats64:
    """Return unnormalised probabilities: the most likely token has 1, a dropped one 0.

    Args:
        x_V: Logits after bias and penalties; their maximum is finite.
        sampling: Settings of the request, not greedy.
    """
    with np.errstate(over="ignore"):  # a tiny temperature: far tokens go to -inf, then to 0
        w_V: Floats64 = np.exp((x_V - x_V.max()) / sampling.temperature)
    if sampling.min_p > 0:
        w_V[w_V < sampling.min_p] = 0
    if sampling.top_k > 0:
        positive = w_V[w_V > 0]  # to partition many equal zeros is slow
        if sampling.top_k < len(positive):
            w_V[w_V < np.partition(positive, -sampling.top_k)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        w_V = _nucleus(w_V, sampling.top_p)
    return w_V


def _nucleus(w_V: Floats64, top_p: float) -> Floats64:
    """Keep the smallest set of most likely tokens that has `top_p` of the weight.

    All tokens lighter than (1 - top_p) / V of the weight have less than 1 - top_p of it
    together. So the nucleus lies among the others, and only they are sorted.
    """
    total = w_V.sum()
    heavy = w_V[w_V >= (1 - top_p) * total / len(w_V)]
    falling = -np.sort(-heavy)
    num = min(int(np.searchsorted(np.cumsum(falling), top_p * total)) + 1, len(falling))
    least = falling[num - 1]
    kept_V: Floats64 = np.where(w_V > least, w_V, 0.0)
    ties = np.flatnonzero(w_V == least)
    kept_V[ties[: num - np.count_nonzero(kept_V)]] = least
    return kept_V


def draw(w_V: Floats64, u: float) -> int:
    """Return the first token whose cumulative weight, in id order, exceeds `u` of the total."""
    cumulative_V = np.cumsum(w_V)  # sequential, so one order of additions
    return int(np.searchsorted(cumulative_V, u * cumulative_V[-1], side="right"))


def logprobs_of(logits_V: Floats32, token_id: int, num_top: int) -> Logprobs:
    """Report the raw distribution; equal logits are listed by rising id."""
    logprobs_V = torch.log_softmax(torch.from_numpy(logits_V), dim=-1).numpy()
    num_top = min(num_top, len(logits_V))
    top: Ids = np.empty(0, np.int64)
    if num_top > 0:
        ids = np.flatnonzero(logits_V >= np.partition(logits_V, -num_top)[-num_top])
        top = ids[np.argsort(-logits_V[ids], kind="stable")][:num_top]
    return Logprobs(float(logprobs_V[token_id]), tuple((int(i), float(logprobs_V[i])) for i in top))


def _choose(request: _Request, x_V: Floats64, position: int) -> int:
    if request.sampling.greedy:
        return int(x_V.argmax())
    return draw(weights(x_V, request.sampling), uniform(request.seed, position))


def _sample_row(
    request: _Request, logits_V: Floats32, position: int, outputs: Sequence[int]
) -> tuple[int, Logprobs | None, None, str | None]:
    """What a row produces: the fields of `Sampled` behind its request."""
    sampling = request.sampling
    x_V = _adjust(request, logits_V, outputs)
    if request.limits is None:
        token_id = _choose(request, x_V, position)
    else:
        if (why := request.limits.forbid(x_V, outputs)) is not None:
            return 0, None, None, f"{NO_TOKEN}{why}"
        ids = np.flatnonzero(x_V > -np.inf)  # others have no weight, and cost time
        token_id = int(ids[_choose(request, x_V[ids], position)])
    if sampling.logprobs is None:
        return token_id, None, None, None
    return token_id, logprobs_of(logits_V, token_id, sampling.logprobs), None, None


class Sampler:
    """Keeps each request's settings and chooses its tokens."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, _Request] = {}
        self.vocabulary: Vocabulary | None = None
        """The model's; without it no request may have limits (`SamplingParams.limits_tokens`)."""
        self.built: dict[RequestId, Matcher] = {}
        """Grammars of requests that are to be added, built on another thread."""
        self._builder: ThreadPoolExecutor | None = None
        """Finds out beside the model's next pass what grammars allow; made for the first."""

    def add(
        self, request_id: RequestId, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        """Admit a request. One without a seed draws its own here.

        Raises:
            InvariantError: The request was added before.
            InvalidRequestError: Its grammar is refused.
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
        """Forget a request.

        Raises:
            InvariantError: The request is unknown.
        """
        if self._requests.pop(request_id, None) is None:
            raise InvariantError(f"request {request_id} is not in the sampler")

    def simple(self, request_id: RequestId) -> tuple[SamplingParams, int] | None:
        """Settings and seed of a request that a kernel can sample for, None for others.

        A kernel follows temperature, top_k, top_p and min_p, and reports no log-probabilities.
        """
        request = self._requests[request_id]
        p = request.sampling
        asks_more = p.logprobs is not None or p.logit_bias or p.repetition_penalty != 1
        asks_more = asks_more or p.limits_tokens
        if asks_more or p.presence_penalty != 0 or p.frequency_penalty != 0:
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
            logits_BV: Raw logits, of any float dtype and on any device; read in fp32.
            request_ids: The request of each row.
            positions: Index in the whole sequence, prompt included, of the token to choose.
            outputs: The ids each request has produced so far.

        Raises:
            ValueError: A row's logits hold NaN or no finite maximum, or a token id of its
                request is outside the vocabulary; the message names the request.
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
        if logits_BV.device.type != "cpu" and all(r.is_plain for r in requests):
            best = logits_BV.argmax(dim=1)  # only the answers leave the device
            peak = logits_BV.gather(1, best[:, None])[:, 0]
            both = zip(request_ids, best.tolist(), peak.float().tolist(), positions, strict=True)
            return [self.greedy(*row) for row in both]
        sampled = []
        for b, request in enumerate(requests):
            x_V: Floats32 = logits_BV[b].float().cpu().numpy()  # one row at a time
            token_id = int(x_V.argmax())  # several times as fast as torch's on a CPU
            plain = self.greedy(request_ids[b], token_id, float(x_V[token_id]), positions[b])
            if request.is_plain:
                sampled.append(plain)
                continue
            _check_ids(request_ids[b], request, len(x_V))
            found = _sample_row(request, x_V, positions[b], outputs[b])
            sampled.append(Sampled(request_ids[b], *found))
        for request, token, before in zip(requests, sampled, outputs, strict=True):
            if request.limits is not None and token.error is None:
                request.limits.go_ahead(self._ahead(), (*before, token.token_id))
        return sampled

    def _ahead(self) -> ThreadPoolExecutor:
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, "qllm-masks")
        return self._builder

    def plain(self, ids: Sequence[RequestId], dead: Container[RequestId]) -> list[int]:
        """Places of those that are dead, or whose token is the argmax of raw logits."""
        return [i for i, one in enumerate(ids) if one in dead or self._requests[one].is_plain]

    def greedy(self, request_id: RequestId, token_id: int, peak: float, position: int) -> Sampled:
        """The token of a plain request: the lowest id of the largest logit, `peak`.

        NaN counts as the largest of all, so a finite peak says that the whole row can be used.

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
    """The largest logit of each row."""

    def read(self, sampler: Sampler, dead: Collection[RequestId]) -> list[Sampled]:
        """Wait for the device; rows that died meanwhile have no token.

        Raises:
            ValueError: See `Sampler.greedy`.
        """
        tokens, peaks = torch.stack((self.tokens_R.double(), self.peaks_R.double())).cpu().tolist()
        rows = zip(self.request_ids, tokens, peaks, self.positions, strict=True)
        return [sampler.greedy(i, int(t), peak, at) for i, t, peak, at in rows if i not in dead]


def _check_ids(request_id: RequestId, request: _Request, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary; those of outputs are our own, and in it."""
    for name, ids in (("logit_bias", request.bias_ids), ("prompt", request.prompt_ids)):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise ValueError(
                f"request {request_id}: {name} token id {ids.max()} must be in [0, {vocabulary}); "
                "change the request"
            )
