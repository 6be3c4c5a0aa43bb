"""The number of drafted tokens of a request's next row, from what its drafts have brought so far.

A row that verifies d drafted tokens gives between 1 and 1 + d tokens, and takes longer than a row
of one token. The rule is a pure function of counts and of the cost table. Times are those that the
engine has measured, so no constant here belongs to a machine.
"""

from collections.abc import Callable
from math import ceil

from qllm.policy import CostTable

CHOICES = (16, 8, 4, 2, 1)
"""Numbers of drafted tokens to choose from, in addition to 0."""
LEAST_GAIN = 1.05
"""Least gain in tokens per time of a request that decodes alone. Below it nothing is drafted."""
PROBE_COST = 0.015
"""Part of the time that trials may take while nothing is drafted."""
LEAST_WAIT = 2
"""Fewest tokens without drafts before a trial of one drafted token."""
REST = 4
"""After no number of drafts paid, the sums are made again only at every fourth token. They take 50
us, a twentieth of the step of a small model."""
FRESH, FIRST = 3, 2
"""Number of verified rows before the counts decide, and the drafted tokens of each. There are no
such rows if not even right drafts would pay."""
OLD = 0.96
"""Weight of all earlier rows, relative to the newest."""
HOPE = 0.5
"""Number of rows that are assumed in addition to the counted ones. In them the first draft is
right, and each other draft is right as often as the one before it. So a place in a row that was not
tried for long is tried again."""


class Utility:
    """The drafts of one request: how often they were right, and how many pay."""

    def __init__(self) -> None:
        self._right = [0.0] * CHOICES[0]
        """Per place in a row, the rows in which the draft there was right. Old rows count less."""
        self._tried = [0.0] * CHOICES[0]
        """Per place in a row, the rows in which all drafts before it were right."""
        self._num_rows = 0
        self._num_plain = 0
        """Number of tokens since the last row with drafts."""
        self._rest: tuple[int, int] | None = None
        """The number of tokens until which none is drafted, and the number of other rows then."""

    @classmethod
    def like(cls, usual: "Utility") -> "Utility":
        """Return the counts of a new request, which begins with the usual rates.

        Its own rows soon count more.
        """
        made = cls()
        made._num_rows = min(usual._num_rows, FRESH)
        for k, tried in enumerate(usual._tried):
            made._tried[k] = min(tried, FRESH)
            made._right[k] = usual._right[k] * made._tried[k] / tried if tried else 0.0
        return made

    def saw(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verified row."""
        self._num_rows += 1
        self._num_plain = 0
        self._rest = None
        for k in range(len(self._tried)):
            is_tried = k < num_drafts and k <= num_accepted
            self._right[k] = OLD * self._right[k] + (is_tried and k < num_accepted)
            self._tried[k] = OLD * self._tried[k] + is_tried

    def most(
        self,
        costs: CostTable,
        num_others: int,
        limit: int,
        extra_ns: Callable[[int], int] | None = None,
    ) -> int:
        """Return the number of tokens that a drafter should propose for the next row.

        Args:
            costs: Predicted times.
            num_others: Number of other rows of the step, each of which gives a token.
            limit: Most drafted tokens of a row.
            extra_ns: Function from the number of drafts to the time that making them takes; None if
                it takes no time.
        """
        self._num_plain += 1
        rest = self._rest
        if rest is not None and rest[1] == num_others and self._num_plain < rest[0]:
            return 0
        num = num_others + 1
        plain_ns = max(1, costs.decode(num))
        best, rate = 0, (num + LEAST_GAIN - 1) / plain_ns
        least_rate, can_pay = rate, False
        for drafts in CHOICES if limit else ():
            step_ns = max(1, costs.decode(num + drafts) + (extra_ns(drafts) if extra_ns else 0))
            can_pay |= drafts <= limit and (num + drafts) / step_ns > least_rate
            found = (num_others + self._tokens(drafts)) / step_ns
            if drafts <= limit and found > rate:
                best, rate = drafts, found
        if can_pay and self._num_rows < FRESH:
            return min(limit, FIRST)
        if not best and limit:
            one_ns = costs.decode(num + 1) + (extra_ns(1) if extra_ns else 0)
            dear = one_ns / plain_ns - 1
            wait = max(LEAST_WAIT, dear / PROBE_COST)
            if self._num_plain >= wait:
                return 1
            self._rest = min(self._num_plain + REST, ceil(wait)), num_others
        return best

    def _tokens(self, num_drafts: int) -> float:
        """Return the expected number of tokens of a row with so many drafts."""
        total = likely = rate = 1.0
        for right, tried in zip(self._right[:num_drafts], self._tried, strict=False):
            rate = (right + HOPE * rate) / (tried + HOPE)
            likely *= rate
            total += likely
        return total
