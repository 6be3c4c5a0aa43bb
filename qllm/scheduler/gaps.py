"""Turns of prompts and streams of one tier: how long the prompts may hold up the next tokens.

    decode step | prompts, a slice | decode step | prompts, a slice | ...
                 <------------------------------> the gap of a stream

A step takes prompts and decodes together if it is expected to end before the first of the streams
is due. Otherwise the prompts run alone until then, and the decodes after them; where a step is not
cut, it takes as many tokens of prompts as fit. A stream is due after its TPOT target; without one
after `max_prompt_gap_ms`, or after four decode steps if that is longer, so that prompts keep most
of the time. Whatever the targets are, prompts have a fifth: a turn of theirs lasts at least a
quarter of a decode step.
"""

from collections.abc import Sequence

from qllm.plan import Row
from qllm.policy import RequestView, View, next_row
from qllm.scheduler.batch import Batch
from qllm.types import NS_PER_MS

GAP_STEPS = 4
"""Decode steps that a gap without a target may last at least."""
LEAST_PART = 4
"""A turn of prompts lasts at least a decode step through this."""
LEAST_TURN_NS = 5 * NS_PER_MS
"""And at least so long, or until the next boundary if that is sooner."""
MARGIN_PART = 8
"""The gap through this is left free: a slice ends at a boundary, a step may be slow."""
WORTH_NS = NS_PER_MS
"""A shorter turn is not worth a switch."""


def fitting(view: View, decoding: Sequence[RequestView]) -> list[Row]:
    """Return the rows of decodes for which there are seats and free KV, in their order."""
    batch = Batch(view, 0)
    for request in decoding:
        row = next_row(request, view)
        if batch.seats and batch.need(request, row) <= batch.free_blocks:
            batch.take(request, row)
    return batch.rows


class Turns:
    """The times of the streams of one tier, and what they leave to its prompts.

    Args:
        view: The state.
        streams: Its requests that decode.
        gap_ms: `max_prompt_gap_ms` of the policy.
    """

    def __init__(self, view: View, streams: Sequence[RequestView], gap_ms: int) -> None:
        self.view = view
        self.step_ns = view.costs.decode(len(streams))
        gap_ns = max(gap_ms * NS_PER_MS, GAP_STEPS * self.step_ns)
        self.left_ns = min(_due_ns(r, gap_ns) for r in streams) - view.now_ns
        self.oldest_ns = min(r.last_progress_ns for r in streams)

    def share(self, batch: Batch) -> bool:
        """Say whether a step of decodes and prompts ends in time.

        A token of a prompt costs at least what a row of a decode step does, as every expert that
        is needed is loaded: so a few tokens are not predicted from what many take.
        """
        costs, num_rows = self.view.costs, len(batch.rows) - batch.num_prefills
        tokens = sum(row.num_tokens for row in batch.rows) - num_rows
        step_ns = max(costs.step(num_rows, tokens), costs.decode(num_rows + tokens))
        return step_ns <= self.left_ns

    def slice_ns(self, newest_ns: int) -> int | None:
        """Return how long prompts may run now; None if it is the turn of the decodes.

        Args:
            newest_ns: When a request of the tier last made progress: after the streams, if prompts
                had a turn since.
        """
        left_ns = self.left_ns - self.step_ns
        if newest_ns > self.oldest_ns:
            return left_ns if left_ns >= WORTH_NS else None
        least_ns = min(self.view.max_segment_ns, LEAST_TURN_NS)
        return max(left_ns, self.step_ns // LEAST_PART, least_ns)


def _due_ns(stream: RequestView, gap_ns: int) -> int:
    """Return when a stream is due, less the margin; a gap without a target is as long as given."""
    last_ns = stream.last_token_ns or 0
    if stream.deadline_ns is not None:
        gap_ns = stream.deadline_ns - last_ns
    return last_ns + gap_ns - gap_ns // MARGIN_PART
