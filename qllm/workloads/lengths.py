"""Lengths of prompts and answers, as quantile tables of public traces.

A uniform random number draws a length from a table, log-interpolated between quantiles. So the
lengths have the shape of a trace (bimodal answers, cut tails) without the rows of the trace.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean

from qllm.errors import ConfigError

PERCENTILES = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 100.0)
"""Percentiles of the traces' tables."""
_TAILS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
_MEAN_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of token counts."""

    values: tuple[float, ...]
    """Tokens at each percentile, in ascending order."""
    percentiles: tuple[float, ...] = PERCENTILES
    """Percentiles that rise from 0 to 100."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.percentiles) or self.percentiles[0] != 0:
            raise ConfigError(f"{len(self.values)} values for {len(self.percentiles)} percentiles")
        if min(self.values) < 1 or list(self.values) != sorted(self.values):
            raise ConfigError(f"lengths must be >= 1 and not fall: {self.values}")

    def at(self, p: float) -> int:
        """Return the tokens at a percentile in [0, 100]."""
        i = min(bisect_right(self.percentiles, p), len(self.values) - 1)
        p0, p1 = self.percentiles[i - 1], self.percentiles[i]
        v0, v1 = self.values[i - 1], self.values[i]
        part = (min(p, p1) - p0) / (p1 - p0)
        return max(1, round(v0 * math.exp(part * math.log(v1 / v0))))

    @property
    def longest(self) -> int:
        """Return the largest number of tokens that can be drawn."""
        return round(self.values[-1])

    @cached_property
    def mean(self) -> float:
        """Return the expected number of tokens."""
        step = 100 / _MEAN_POINTS
        return fmean(self.at((i + 0.5) * step) for i in range(_MEAN_POINTS))

    def scaled(self, factor: float) -> "Lengths":
        """Return all lengths times a factor, but at least one token."""
        return replace(self, values=tuple(max(1.0, v * factor) for v in self.values))


def between(low: int, high: int) -> Lengths:
    """Return a log-uniform distribution in [low, high]."""
    return Lengths(values=(low, high), percentiles=(0.0, 100.0))


def lognormal(mean: float, sigma: float) -> Lengths:
    """Return a log-normal distribution with this mean and tails cut at 0.1 and 99.9 %."""
    table = around(mean, sigma)
    return table.scaled(mean / table.mean)


def around(median: float, sigma: float) -> Lengths:
    """Return a log-normal distribution with this median and tails cut at 0.1 and 99.9 %."""
    values = [math.exp(sigma * NormalDist().inv_cdf(p / 100)) for p in _TAILS]
    return Lengths(
        values=tuple(max(1.0, v * median) for v in values), percentiles=(0.0, *_TAILS[1:-1], 100.0)
    )


def _table(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Lengths:
    return Lengths(values=tuple(values), percentiles=tuple(percentiles))


# Azure LLM inference traces of 2023: 8,819 code and 19,366 conversation requests.
AZURE_CODE_PROMPT = _table((3, 17, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437))
AZURE_CODE_OUTPUT = _table(
    (6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 300, 1899), (*PERCENTILES[:-1], 99.9, 100.0)
)
"""Output tokens of the code trace. The value at 99.9 % is ours.

Without this value, the tail would lift the mean from 28 to 33 tokens.
"""
AZURE_CONV_PROMPT = _table((2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050))
AZURE_CONV_OUTPUT = _table((7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000))
SHAREGPT_PROMPT = lognormal(350.9, 1.0)
SHAREGPT_OUTPUT = lognormal(187.9, 1.0)
"""Output tokens of ShareGPT. The mean is of the set that Laser filtered. The spread is ours."""
