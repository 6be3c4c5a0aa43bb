"""The choice of slots that lose their experts to others.

    each use --> score of the expert, which halves as others are used --> the lowest score leaves

The score of an expert stays while the expert is in the file. Among equal scores the expert that was
used last leaves: prompts touch the experts of all layers in turn, so what they used last is what
they need last. Pure: no threads, no files, no memory of experts.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from qllm.types import NS_PER_S

NONE = -1
"""Owner of an empty slot, and slot of an absent expert."""
LS_WEIGHT = 4.0
"""Uses by BE that count as much as one by LS."""
HALF_LIFE = 16
"""Uses per slot after which a score counts half."""
LEAST_SCORE = 1 / 64
"""Score below which an expert has none."""
LS_SHARE = 0.5
"""Share of the slots whose experts BE does not displace while LS is served."""
LS_STAYS_NS = 10 * NS_PER_S
"""Time after the last use by LS in which LS keeps its share."""
RING_SHARE = 0.125
"""Share of the slots that a long prompt of BE goes through."""

Numbers = "np.ndarray[Any, Any]"


class Use(IntEnum):
    """The kind of a frame that uses experts."""

    LS = 0
    """A frame with a row of LS."""
    BE = 1
    PASSING = 2
    """A long prompt of BE. Its uses do not count, since it uses nearly all experts once."""


@dataclass(slots=True)
class Slots:
    """The state of all slots, one number each."""

    owner: Any
    """Rows of the experts in memory, or NONE."""
    coming: Any
    """Rows of the experts that are read into the slots, or NONE."""
    used: Any
    """Times of the last use of the owners."""
    may_go: Any
    """True for a slot that may get another expert."""


class Displacing:
    """The scores of all experts.

    Args:
        num_experts: Experts of all layers.
        num_slots: Experts that fit in memory.
        top_k: Experts per token.
    """

    def __init__(self, num_experts: int, num_slots: int, top_k: int) -> None:
        self.num_ls = max(0, min(int(num_slots * LS_SHARE), num_slots - 2 * top_k))
        """Most slots whose experts BE does not displace."""
        self.num_passing = max(2 * top_k, int(num_slots * RING_SHARE))
        """Most slots that a long prompt has at once, unless more are empty."""
        self._num_slots = max(1, num_slots)
        self._scores, self._ls_scores = np.zeros((2, num_experts))
        self._num_uses = 0
        self._ls_until_ns = 0

    def count(self, numbers: Any, use: Use, now_ns: int) -> None:
        """Count a use of each of these experts.

        Args:
            numbers: Rows of the experts.
            use: Kind of the frame.
            now_ns: The engine's clock.
        """
        if use is Use.PASSING:
            return
        self._num_uses += len(numbers)
        for _ in range(self._num_uses // (HALF_LIFE * self._num_slots)):
            self._age()
        self._num_uses %= HALF_LIFE * self._num_slots
        self._scores[numbers] += LS_WEIGHT if use is Use.LS else 1.0
        if use is Use.LS:
            self._ls_scores[numbers] += 1.0
            self._ls_until_ns = now_ns + LS_STAYS_NS

    def _age(self) -> None:
        for scores in (self._scores, self._ls_scores):
            scores *= 0.5
            scores[scores < LEAST_SCORE] = 0.0

    def choose(
        self, slots: Slots, most: int, use: Use, now_ns: int, *, by_right: bool = False
    ) -> list[int]:
        """Return the slots that get other experts, at most `most`: empty ones first.

        BE leaves the best experts of LS while LS is served. A long prompt takes slots whose experts
        have no score. It takes others only until `num_passing` slots hold experts without a score.

        Args:
            slots: State of all slots.
            most: Most slots.
            use: Kind of the frame that needs the slots.
            now_ns: The engine's clock.
            by_right: True to displace any expert that may go.
        """
        is_empty = slots.may_go & (slots.owner == NONE)
        free = np.flatnonzero(
            slots.may_go & ~is_empty & (by_right | ~self._kept(slots, use, now_ns))
        )
        scores = self._scores[slots.owner[free]]
        order = free[np.lexsort((free, -slots.used[free], scores))]
        if use is Use.PASSING and not by_right:
            order = order[: self._most_passing(slots, scores)]
        found: list[int] = [*np.flatnonzero(is_empty).tolist(), *order.tolist()][:most]
        return found

    def _kept(self, slots: Slots, use: Use, now_ns: int) -> Any:
        """Return True for each slot that BE leaves to LS."""
        kept = np.zeros(len(slots.owner), dtype=bool)
        if use is not Use.LS and now_ns < self._ls_until_ns:
            own = np.where(slots.owner == NONE, 0.0, self._ls_scores[slots.owner])
            best = np.argsort(-own, kind="stable")[: self.num_ls]
            kept[best] = own[best] > 0
        return kept

    def _most_passing(self, slots: Slots, scores: Any) -> int:
        """Return the most slots with experts that a long prompt gets.

        Args:
            slots: State of all slots.
            scores: Scores of the experts that may go.
        """
        expert = np.where(slots.owner == NONE, slots.coming, slots.owner)
        num_cold = int((expert == NONE).sum() + (self._scores[expert[expert != NONE]] == 0).sum())
        num_scored = max(0, self.num_passing - num_cold)
        return min(self.num_passing, int((scores == 0).sum()) + num_scored)
