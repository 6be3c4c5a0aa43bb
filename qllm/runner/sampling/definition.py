"""The definition of sampling: a row's token, given its logits, settings and random number.

The order of operations is that of vLLM:

    raw logits              their log-softmax is what `logprobs` reports
    + logit_bias            fp64 from here on
    repetition_penalty      seen tokens, prompt included: x / r if x > 0 else x * r
    - frequency_penalty     times the occurrences in the output
    - presence_penalty      once for a token in the output
    rules                   -inf for tokens that are not allowed (`runner/sampling/limits.py`)
    argmax                  if greedy; the lowest id wins a tie
    weights                 exp((x - max x) / temperature), rounded to multiples of 2^-44
    min_p                   tokens below this fraction of the largest weight have no weight
    top_k                   tokens stay whose logit is at least the k-th largest
    top_p                   the smallest set of largest logits with this part of the weight stays;
                            the lowest ids win a tie
    inverse CDF             in token-id order, one uniform number per token

transformers applies `min_p` last. So the sets of tokens differ if `min_p` and `top_p` are both set.

Weights are whole numbers, so their sum does not depend on its order. A kernel may divide rows among
vectors and threads in any way, and finds the same token. `exponentials` and the other steps in fp64
use only operations whose rounding IEEE 754 defines. No two operations are fused. The CPU kernel
(`kernels/cpu/sampling.inc`) computes the same bits. This module is the kernel's reference in tests,
and runs if the kernel was not built.

The uniform number is a pure function of (seed, position), by Philox-4x32-10.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qllm.kernels.cpu import native
from qllm.kernels.cpu import sampling as kernel
from qllm.runner.sampling.limits import NO_IDS, Ids, Rules
from qllm.types import Logprobs, SamplingParams

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]

WORD = 0xFFFFFFFF
MAX_BIAS = float(np.finfo(np.float32).max)
"""Largest bias. A larger bias could not change the token. Sums and products stay finite in fp64."""
FLOOR = -32.0
"""Log of the smallest weight, relative to the likeliest token's weight. Tokens at or below have
none."""
MOST_COLD = float(np.finfo(np.float64).max)
"""Inverse temperature used for temperatures whose inverse is too large for fp64."""
SHARE_BITS = 53
"""Bits of a random number. The number is a whole number."""
NO_BIAS: Floats64 = np.empty(0, np.float64)
LN2_HIGH, LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""Two numbers whose sum is ln 2. A small whole number times the first is exact."""


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


def share_of(seed: int, position: int) -> int:
    """Return the number in [0, 2^53) that chooses the token at `position`.

    The key is (seed low, seed high), the counter (position low, position high, 0, 0). The 53 bits
    are the first word and the upper 21 bits of the second word.
    """
    counter = (position & WORD, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & WORD, seed >> 32))
    return (high << 21) | (low >> 11)


class SampledRow(NamedTuple):
    """A row of logits and all inputs that its token depends on."""

    logits_V: Tensor
    """Raw logits [V], bf16 or fp32, contiguous, on the CPU."""
    sampling: SamplingParams
    share: int
    """Random number of 53 bits, as a whole number."""
    bias_ids: Ids = NO_IDS
    """Distinct tokens that `logit_bias` names."""
    bias: Floats64 = NO_BIAS
    """Biases of `bias_ids`, each finite."""
    prompt_ids: Ids = NO_IDS
    """Distinct tokens of the prompt; empty without a repetition penalty."""
    outputs: Ids = NO_IDS
    """Tokens of the answer so far; empty without penalties."""
    rules: Rules | None = None
    """Tokens that are not allowed; None allows all."""


class Choice(NamedTuple):
    """The token of a row."""

    peak: float
    """Largest raw logit. If it is not finite, there is no token."""
    token_id: int | None
    """Chosen token; None if no token is allowed."""
    logprobs: Logprobs | None


def readable(logits_V: Tensor) -> Tensor:
    """Return logits in the dtype and layout of a `SampledRow`."""
    logits_V = logits_V.cpu()
    return (logits_V if logits_V.dtype is torch.bfloat16 else logits_V.float()).contiguous()


def choose(row: SampledRow) -> Choice:
    """Choose the token of a row."""
    raw_V: Floats32 = row.logits_V.float().numpy()
    peak = float(raw_V.max())  # NaN if any logit is NaN
    if not math.isfinite(peak):
        return Choice(peak, None, None)
    sampling, x_V = row.sampling, adjusted(row, raw_V)
    if row.rules is not None:
        row.rules.apply(x_V)
    token_id, top = None, float(x_V.max())
    if sampling.greedy and top > -math.inf:
        token_id = int(x_V.argmax())
    elif top > -math.inf:
        token_id = draw(weights(x_V, sampling), row.share)
    if token_id is None or sampling.logprobs is None:
        return Choice(peak, token_id, None)
    return Choice(peak, token_id, logprobs_of(raw_V, token_id, sampling.logprobs))


def adjusted(row: SampledRow, raw_V: Floats32) -> Floats64:
    """Return a copy of the logits with bias and penalties applied."""
    sampling, x_V = row.sampling, raw_V.astype(np.float64)
    x_V[row.bias_ids] += row.bias
    r = sampling.repetition_penalty
    if r == 1 and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0:
        return x_V
    ids, counts = np.unique(row.outputs, return_counts=True)
    if r != 1:
        seen = np.union1d(row.prompt_ids, ids)
        with np.errstate(over="ignore"):  # a tiny penalty may overflow
            x_V[seen] = np.where(x_V[seen] > 0, x_V[seen] / r, x_V[seen] * r)
        x_V[seen] = np.clip(x_V[seen], -MAX_BIAS, MAX_BIAS)
    x_V[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return x_V


def weight_bits(vocab_size: int) -> int:
    """Return b such that all weights sum to less than 2^62 if the likeliest token has 2^b."""
    return min(44, 62 - vocab_size.bit_length())


def exponentials(z_V: Floats64, bits: int) -> Floats64:
    """Return 2^bits * exp(z), z in [-32, 0], with a relative error of about 1e-14.

    The result is a power of two times Taylor's polynomial of the remaining exponent. The polynomial
    is summed in pairs of terms.
    """
    n = np.rint(z_V * 1.4426950408889634)
    r = (z_V - n * LN2_HIGH) - n * LN2_LOW
    r2 = r * r
    r4 = r2 * r2
    p0, p2, p4 = 1 + r, 1 / 2 + r * (1 / 6), 1 / 24 + r * (1 / 120)
    p6, p8 = 1 / 720 + r * (1 / 5040), 1 / 40320 + r * (1 / 362880)
    p10 = 1 / 3628800 + r * (1 / 39916800)
    p = ((p0 + p2 * r2) + (p4 + p6 * r2) * r4) + (p8 + p10 * r2) * (r4 * r4)
    scaled: Floats64 = np.ldexp(p, n.astype(np.int32) + bits)
    return scaled


def weights(x_V: Floats64, sampling: SamplingParams) -> Ids:
    """Return the weight of each token, a whole number. A token with weight 0 cannot be chosen.

    Args:
        x_V: Logits after bias, penalties and rules, with a finite maximum.
        sampling: Settings of the request, not greedy.
    """
    bits = weight_bits(len(x_V))
    with np.errstate(over="ignore", divide="ignore"):  # a tiny temperature may overflow
        coldness = min(float(np.float64(1) / sampling.temperature), MOST_COLD)
        z_V = np.maximum((x_V - x_V.max()) * coldness, FLOOR)
    w_V = exponentials(z_V, bits)
    w_V[w_V < math.ldexp(sampling.min_p, bits)] = 0
    whole_V: Ids = np.rint(w_V).astype(np.int64)
    if 0 < sampling.top_k < len(x_V):
        whole_V[x_V < np.partition(x_V, -sampling.top_k)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        total = int(whole_V.sum())
        goal = min(max(math.ceil(sampling.top_p * float(total)), 1), total)
        order = np.argsort(-x_V, kind="stable")
        order = order[whole_V[order] > 0]
        num = int(np.searchsorted(np.cumsum(whole_V[order]), goal)) + 1
        whole_V[order[num:]] = 0
    return whole_V


def draw(w_V: Ids, share: int) -> int:
    """Return the first token at which the running sum of weights exceeds share / 2^53 of all."""
    cumulative_V = np.cumsum(w_V)
    target = share * int(cumulative_V[-1]) >> SHARE_BITS
    return int(np.searchsorted(cumulative_V, target, side="right"))


def logprobs_of(logits_V: Floats32, token_id: int, num_top: int) -> Logprobs:
    """Return log-probabilities of the raw distribution. Equal logits are listed by rising id.

    Args:
        logits_V: Raw logits, with a finite maximum.
        token_id: Chosen token.
        num_top: Number of likeliest tokens to report.
    """
    x_V, bits = logits_V.astype(np.float64), weight_bits(len(logits_V))
    peak = float(x_V.max())
    w_V = np.rint(exponentials(np.maximum(x_V - peak, FLOOR), bits)).astype(np.int64)
    log_total = math.log(math.ldexp(float(int(w_V.sum())), -bits))
    num_top = min(num_top, len(x_V))
    top = NO_IDS
    if num_top > 0:
        ids = np.flatnonzero(x_V >= np.partition(x_V, -num_top)[-num_top])
        top = ids[np.argsort(-x_V[ids], kind="stable")][:num_top]
    found = ((x_V - peak) - log_total).astype(np.float32)
    pairs = zip(top.tolist(), found[top].tolist(), strict=True)
    return Logprobs(float(found[token_id]), tuple(pairs))


def log_total(logits_RV: Floats32) -> Floats64:
    """Return for each row the logarithm of the sum of exp(logit), in fp64."""
    x_RV = logits_RV.astype(np.float64)
    peak_R = x_RV.max(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):  # broken rows raise when a token is chosen
        found: Floats64 = peak_R + np.log(np.exp(x_RV - peak_R[:, None]).sum(axis=1))
    return found


def confidence_of(peak: float, total: float) -> float:
    """Return the probability of the largest logit.

    Args:
        peak: Largest logit.
        total: Logarithm of the sum of exp(logit).
    """
    return math.exp(peak - total)


def choose_all(rows: Sequence[SampledRow]) -> list[Choice]:
    """Choose the tokens of rows. If the kernel was built, its threads run in parallel."""
    if native is None:
        return [choose(row) for row in rows]
    tops = [_Top.of(row) for row in rows]
    structs = [_struct(row, top) for row, top in zip(rows, tops, strict=True)]
    return [
        _read(found, row, top)
        for found, row, top in zip(kernel.sample(structs), rows, tops, strict=True)
    ]


class _Top(NamedTuple):
    """The memory for the likeliest tokens of a row."""

    ids: Ids
    logprobs: Floats32

    @classmethod
    def of(cls, row: SampledRow) -> "_Top":
        num = min(row.sampling.logprobs or 0, len(row.logits_V))
        return cls(np.empty(num, np.int64), np.empty(num, np.float32))


def _struct(row: SampledRow, top: _Top) -> kernel.SampleStruct:
    p, rules = row.sampling, row.rules or Rules()
    return kernel.SampleStruct(
        logits=row.logits_V.data_ptr(),
        num=len(row.logits_V),
        is_half=row.logits_V.dtype is torch.bfloat16,
        temperature=p.temperature,
        min_p=p.min_p,
        top_p=p.top_p,
        top_k=p.top_k,
        share=row.share,
        bias_ids=row.bias_ids.ctypes.data,
        bias=row.bias.ctypes.data,
        num_bias=len(row.bias_ids),
        repetition=p.repetition_penalty,
        frequency=p.frequency_penalty,
        presence=p.presence_penalty,
        prompt_ids=row.prompt_ids.ctypes.data,
        num_prompt=len(row.prompt_ids),
        outputs=row.outputs.ctypes.data,
        num_outputs=len(row.outputs),
        forced=-1 if rules.forced is None else rules.forced,
        words=None if rules.words is None else rules.words.ctypes.data,
        allowed=rules.allowed.ctypes.data,
        num_allowed=len(rules.allowed),
        banned=rules.banned.ctypes.data,
        num_banned=len(rules.banned),
        ends=rules.ends.ctypes.data,
        num_ends=len(rules.ends),
        num_top=-1 if p.logprobs is None else len(top.ids),
        top_ids=top.ids.ctypes.data,
        top=top.logprobs.ctypes.data,
    )


def _read(found: kernel.SampleStruct, row: SampledRow, top: _Top) -> Choice:
    if found.token < 0:
        return Choice(found.peak, None, None)
    if row.sampling.logprobs is None:
        return Choice(found.peak, found.token, None)
    pairs = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    return Choice(found.peak, found.token, Logprobs(found.logprob, tuple(pairs)))
