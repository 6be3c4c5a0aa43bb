"""Arrival processes: renewal, rate-modulated, bursty and even.

A Gamma renewal process bunches only neighbours. The count in a minute stays nearly Poisson. In real
traffic minutes differ more. Use `Modulated` for that.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from qllm.errors import ConfigError


class Arrivals(Protocol):
    """A point process of a given mean rate."""

    def times(self, rng: random.Random, rate: float, seconds: float) -> list[float]:
        """Return rising times in [0, seconds), in seconds; an empty list if the rate is zero."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Independent gaps with a coefficient of variation. A coefficient of 1 is Poisson."""

    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cv <= 10:
            raise ConfigError(f"cv={self.cv!r} must be in (0, 10]; 1 is Poisson")

    def times(self, rng: random.Random, rate: float, seconds: float) -> list[float]:
        if rate <= 0:
            return []
        shape = self.cv**-2
        out: list[float] = []
        at_s = 0.0
        while (at_s := at_s + rng.gammavariate(shape, 1 / (shape * rate))) < seconds:
            out.append(at_s)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Modulated:
    """Poisson arrivals with a new random rate for every window.

    The index of dispersion over a window is about 1 + rate * window * cv**2.
    """

    window_s: float = 60.0
    cv: float = 1.0
    """Coefficient of variation of the rate."""
    least_windows: int = 6
    """Least number of windows in a run. A short run has shorter windows."""

    def times(self, rng: random.Random, rate: float, seconds: float) -> list[float]:
        if rate <= 0:
            return []
        window_s = min(self.window_s, seconds / self.least_windows)
        shape = self.cv**-2
        edges = _edges(window_s, seconds)
        return _piecewise(rng, ((edge, rng.gammavariate(shape, rate / shape)) for edge in edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Poisson arrivals at a low rate, and at a multiple of this rate in a part of every period."""

    period_s: float = 60.0
    share: float = 1 / 6
    """Part of the period, at its end, with the high rate."""
    factor: float = 5.0
    least_periods: int = 3
    """Least number of periods in a run. A short run has shorter periods."""

    def times(self, rng: random.Random, rate: float, seconds: float) -> list[float]:
        period_s = min(self.period_s, seconds / self.least_periods)
        low = rate / (1 - self.share + self.share * self.factor)
        pieces: list[tuple[tuple[float, float], float]] = []
        for start, end in _edges(period_s, seconds):
            turn = min(end, start + period_s * (1 - self.share))
            pieces += [((start, turn), low), ((turn, end), low * self.factor)]
        return _piecewise(rng, pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """Equal gaps. The first arrival comes after half a gap."""

    def times(self, rng: random.Random, rate: float, seconds: float) -> list[float]:
        num = round(rate * seconds)
        return [(i + 0.5) / rate for i in range(num)]


def _edges(width: float, seconds: float) -> Iterator[tuple[float, float]]:
    num = max(1, round(seconds / width))
    return pairwise([seconds * i / num for i in range(num + 1)])


def _piecewise(
    rng: random.Random, pieces: Iterable[tuple[tuple[float, float], float]]
) -> list[float]:
    out: list[float] = []
    for (start, end), rate in pieces:
        at_s = start
        while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < end:
            out.append(at_s)
    return out
