"""Audits of lossy answers: the rate at which a candidate's tokens differ from the whole model's.

    answer of a candidate -> chosen by its request id? -> the whole model reads prompt and answer
    -> at each position: is the token the whole model's own? -> counts -> Wilson's interval

An audit says if a bound holds. A token's confidence does not. The interval takes positions as
independent of each other. Positions of one answer are not quite that, so the last `WINDOW`
positions count together, and an answer counts whole.
"""

import math
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from qllm.errors import ConfigError, shown
from qllm.types import Logprobs

SHARE = 0.05
"""Default part of the lossy answers that are audited."""
WINDOW = 1000
"""Number of latest positions that an estimate rests on, or more by less than an answer."""
Z = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


class Estimate(NamedTuple):
    """A rate of disagreement, counted in audits."""

    num_answers: int = 0
    """Audited answers since the first, or since audits were cleared. Old ones count here alone."""
    num_positions: int = 0
    num_differing: int = 0

    @property
    def rate(self) -> float:
        """Part of the positions at which the token is not the whole model's; 0 without any."""
        return self.num_differing / max(1, self.num_positions)

    @property
    def bounds(self) -> tuple[float, float]:
        """Wilson's interval of 95 % for the rate."""
        return wilson(self.num_differing, self.num_positions)

    @property
    def upper(self) -> float:
        """Upper end of Wilson's interval. It is 1 without positions: nothing is known."""
        return self.bounds[1]


def wilson(num_hits: int, num: int, z: float = Z) -> tuple[float, float]:
    """Return Wilson's score interval for a rate.

    Args:
        num_hits: Number of hits.
        num: Number of trials. Without any the interval is [0, 1].
        z: Quantile of the normal distribution.
    """
    if not num:
        return 0.0, 1.0
    rate, square = num_hits / num, z * z / num
    middle = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / num + square / num / 4) / (1 + square)
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def is_audited(request_id: str, share: float = SHARE, seed: int = 0) -> bool:
    """Return True if an answer is audited. The same id and seed always give the same result.

    Args:
        request_id: Id of the request.
        share: Part of the answers that are audited, in [0, 1].
        seed: Seed of the sample.

    Raises:
        ConfigError: The share is no number in [0, 1].
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"a share of audits of {shown(share)} must be in [0, 1]")
    digest = blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2.0**64


def num_differing(
    token_ids: Sequence[int], scores: Sequence[Logprobs | None], begin: int
) -> tuple[int, int]:
    """Count the positions of an answer, and those at which the whole model chooses another token.

    The answer must be greedy: a token that was drawn differs from the most likely one by chance.

    Args:
        token_ids: Tokens of the prompt and of the answer. For a candidate that only reads them:
            the token that it chooses at each position.
        scores: The whole model's log-probabilities of these tokens (`Result.prompt_logprobs` of a
            request with `prompt_logprobs` of at least 1), one per token. None only for the first.
        begin: Number of tokens of the prompt.

    Returns:
        The number of positions of the answer, and of those that differ.

    Raises:
        ValueError: The scores do not belong to these tokens, or have no alternatives.
    """
    if len(scores) != len(token_ids) or not 0 < begin <= len(token_ids):
        raise ValueError(
            f"{len(scores)} scores for {len(token_ids)} tokens, {begin} of them the prompt"
        )
    pairs = zip(token_ids[begin:], choices(scores, begin), strict=True)
    return len(token_ids) - begin, sum(token_id != choice for token_id, choice in pairs)


def choices(scores: Sequence[Logprobs | None], begin: int) -> list[int]:
    """Return the tokens that a model that read a text would choose, from position `begin` on.

    Raises:
        ValueError: The scores have no alternatives.
    """
    found = []
    for score in scores[begin:]:
        if score is None or not score.top:
            raise ValueError("an audit needs the most likely token of every position")
        found.append(score.top[0][0])
    return found


class Audits:
    """The counts of one candidate's latest audits.

    Args:
        window: Number of positions that an estimate rests on. Older answers are forgotten once the
            later ones have as many.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._each: deque[tuple[int, int]] = deque()
        self._answers = self._num = self._differing = 0

    def add(self, num_positions: int, num_differing: int) -> Estimate:
        """Add an audited answer, and return the new estimate.

        Raises:
            ValueError: More positions differ than there are.
        """
        if not 0 <= num_differing <= num_positions:
            raise ValueError(f"{num_differing} of {num_positions} positions differ")
        self._each.append((num_positions, num_differing))
        self._answers += 1
        self._num += num_positions
        self._differing += num_differing
        while self._num - self._each[0][0] >= self._window:
            num, differing = self._each.popleft()
            self._num -= num
            self._differing -= differing
        return self.estimate

    def clear(self) -> None:
        """Forget all audits."""
        self._each.clear()
        self._answers = self._num = self._differing = 0

    @property
    def estimate(self) -> Estimate:
        """The rate of the latest audits."""
        return Estimate(self._answers, self._num, self._differing)
