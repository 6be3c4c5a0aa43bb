"""Alternation of prompts and streams of one tier, which limits the delay of next tokens by prompts.

    decode step | prompts, a slice | decode step | prompts, a slice | ...
                 <------------------------------> the gap of a stream

A stream is a request that decodes. A step takes prompts and decodes together if the step should end
before the first stream is due. Otherwise the prompts run alone until that time, and then the
decodes run. If steps are not cut, a step takes as many prompt tokens as fit.

A stream is due after its TPOT target. A stream without a target is due after `max_prompt_gap_ms`,
or after four decode steps if that is longer, so that prompts get most of the time. Prompts get at
least a fifth of the time under any target: a run of prompts lasts at least a quarter of a decode
step.
"""

from collections.abc import Sequence

from qllm.plan import Row
from qllm.policy import RequestView, View, decode_tokens, next_row
from qllm.scheduler.batch import Batch
from qllm.types import NS_PER_MS

GAP_STEPS = 4
"""Shortest gap without a target, in decode steps."""
LEAST_PART = 4
"""Divisor of a decode step. The quotient is the shortest run of prompts."""
LEAST_TURN_NS = 5 * NS_PER_MS
"""Shortest run of prompts, unless the next boundary is sooner."""
MARGIN_PART = 8
"""Divisor of the gap. A stream is due earlier by the quotient, because slices may end late and
steps may be slow."""
WORTH_NS = NS_PER_MS
"""Shortest run of prompts that is worth a switch."""


def fitting(view: View, decoding: Sequence[RequestView]) -> list[Row]:
    """Return the rows of decodes for which there are seats and free KV, in the given order."""
    batch = Batch(view, 0)
    for request in decoding:
        row = next_row(request, view)
        if batch.seats and batch.need(request, row) <= batch.free_blocks:
            batch.take(request, row)
    return batch.rows


class Turns:
    """The times of the streams of one tier, and the time that the streams leave to prompts.

    Args:
        view: State as policies see it.
        streams: Requests of the tier that decode.
        gap_ms: Value of the policy's `max_prompt_gap_ms`.
    """

    def __init__(self, view: View, streams: Sequence[RequestView], gap_ms: int) -> None:
        self.view = view
        self.step_ns = view.costs.decode(decode_tokens(streams))
        gap_ns = max(gap_ms * NS_PER_MS, GAP_STEPS * self.step_ns)
        self.left_ns = min(_due_ns(r, gap_ns) for r in streams) - view.now_ns
        self.oldest_ns = min(r.last_progress_ns for r in streams)

    def share(self, batch: Batch) -> bool:
        """Return True if a step of decodes and prompts should end before the first stream is due.

        A prompt token counts at least as much as a row of a decode step. A few tokens load almost
        as many experts as many tokens load, so the average time per token of a long prompt is too
        short for a few tokens.
        """
        costs, get = self.view.costs, self.view.by_id
        tokens = sum([row.num_tokens for row in batch.rows])
        own = [row.num_tokens for row in batch.rows if get[row.request_id].is_decoding]
        step_ns = max(costs.step(sum(own), tokens - sum(own)), costs.decode(tokens))
        return step_ns <= self.left_ns

    def slice_ns(self, newest_ns: int) -> int | None:
        """Return the time that prompts may run now; None if the decodes run next.

        Args:
            newest_ns: Time of the tier's last progress. It is later than that of the streams if
                prompts have run since then.
        """
        left_ns = self.left_ns - self.step_ns
        if newest_ns > self.oldest_ns:
            return left_ns if left_ns >= WORTH_NS else None
        least_ns = min(self.view.max_segment_ns, LEAST_TURN_NS)
        return max(left_ns, self.step_ns // LEAST_PART, least_ns)


def _due_ns(stream: RequestView, gap_ns: int) -> int:
    """Return the time when a stream is due, less the margin.

    Without a target, `gap_ns` is the gap.
    """
    last_ns = stream.last_token_ns or 0
    if stream.deadline_ns is not None:
        gap_ns = stream.deadline_ns - last_ns
    return last_ns + gap_ns - gap_ns // MARGIN_PART
