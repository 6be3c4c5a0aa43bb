"""A cost table for the policy's view, fitted to measured runs."""

from collections.abc import Callable

from qllm.policy import CostTable, Tier
from qllm.scheduler.program import Program

SAMPLES_PER_COST = 4
"""Samples in the average of a cost: new = (3 * old + seen) / 4."""
COST_LEVELS = 9
"""Number of decode costs: for 1, 2, 4, ... 256 rows."""


class StepCosts:
    """A fit of the view's cost table to measured runs.

    Args:
        move_token_ns: Function that returns the time to swap a token out to main memory; 0 on a
            CPU, where KV stays in place, and on a device that has no KV yet.
    """

    def __init__(self, move_token_ns: Callable[[], int] = lambda: 0) -> None:
        self._decode_ns: dict[int, int] = {}
        self._prefill_token_ns = 0
        self._memory_ns = move_token_ns
        self._tiers_ns: list[int] = []
        """Nanoseconds to move a token to each tier beyond main memory."""

    def observe(self, program: Program, elapsed_ns: int) -> CostTable | None:
        """Learn from a program that ran from start to end without a stop."""
        rows = zip(program.rows, program.samples, strict=True)
        decodes = sum([n for (_, lo, hi, _, _), num in rows if (n := hi - lo) in (1, num)])
        tokens = program.num_tokens - decodes
        layers = program.num_layers
        if any(row.start_layer or row.end_layer != layers for row in program.rows):
            return None
        if not tokens:
            level = max(0, min(COST_LEVELS - 1, (decodes * 3 // 2).bit_length() - 1))
            self._decode_ns[level] = blend(
                self._decode_ns.get(level, 0),
                elapsed_ns * (1 << level) // decodes if decodes < (1 << level) else elapsed_ns,
            )
        else:
            rest = elapsed_ns - (self.table().decode(decodes) if decodes else 0)
            if rest <= 0:
                return None
            self._prefill_token_ns = blend(self._prefill_token_ns, rest // tokens)
        return self.table()

    def moved(self, tier: Tier, num_tokens: int, elapsed_ns: int) -> None:
        """Learn the time of moving KV to a tier beyond main memory, or back.

        The tiers nearer than this one were learnt before. The next table contains the result.
        """
        seen, at = elapsed_ns // num_tokens, tier - Tier.MEMORY - 1
        if at == len(self._tiers_ns):
            self._tiers_ns.append(seen)
        else:
            self._tiers_ns[at] = blend(self._tiers_ns[at], seen)

    def prefill_ns(self, num_tokens: int) -> int:
        """Return the predicted time to compute prompt tokens; 0 before any prompt was computed."""
        return num_tokens * self._prefill_token_ns

    def table(self) -> CostTable:
        """Return the current table.

        Costs of sizes that were not measured follow from their neighbours.
        """
        known = self._decode_ns or {0: 1_000_000}
        values: list[int] = []
        for level in range(COST_LEVELS):
            if level in known:
                value = known[level]
            elif values:
                value = values[-1] * 8 // 5
            else:
                first = min(known)
                value = known[first] * 5**first // 8**first
            values.append(max(value, values[-1] if values else 1))
        prefill_ns = self._prefill_token_ns or max(1, values[0] // 8)
        return CostTable(tuple(values), prefill_ns, (self._memory_ns(), *self._tiers_ns))


def blend(old: int, seen: int) -> int:
    """Return an average in which the newest sample counts a quarter, or the first sample."""
    return (old * (SAMPLES_PER_COST - 1) + seen) // SAMPLES_PER_COST if old else seen
