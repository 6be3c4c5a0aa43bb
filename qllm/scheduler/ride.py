"""What BE may take while LS decodes: a credit of time, and room in every gap between tokens.

A decode step of the best tier earns credit: what the TPOT targets of its requests leave, or
without targets a fraction of the step. Whatever the other tiers run meanwhile spends it. Under a
target no single gap may be longer than it either, and a request that is behind its target so far,
because prefills of its own tier held it up, leaves nothing until it has caught up. Predictions do
not hold that by themselves (a slice ends at the next boundary, a decode step is sometimes slow), so
the room that a gap leaves is cut by a margin, which grows with every gap that was too long and
shrinks with the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

from qllm.plan import Plan, Row
from qllm.policy import CostTable, RankPolicy, RequestView, View, next_row
from qllm.scheduler.batch import Batch
from qllm.scheduler.program import Program
from qllm.scheduler.ranking import Ranking
from qllm.types import NS_PER_MS

RIDE_CAP = 8
"""Cap on saved allowances; one decode step of the best tier earns one."""
JOIN_CAP = 2
"""Most that joining rows add to a step, in allowances: saved credit is not spent on one token."""
MARGIN_GROWTH = 8
"""A gap that was too long adds this part of the target to the margin."""
MARGIN_DECAY = 512
"""A gap that was not takes this part of the margin away: one in a few hundred may be too long."""


def first_due_ns(decoding: Sequence[RequestView], tpot_ms: int) -> int:
    """When the first of some decodes is due, by its own target or else by this one."""
    return min(
        (r.last_token_ns or 0) + tpot_ms * NS_PER_MS if r.deadline_ns is None else r.deadline_ns
        for r in decoding
    )


def wait_longer(view: View, rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether some rows made progress longer ago than others; work that never ran goes first."""
    last = [
        min(view.by_id[row.request_id].last_progress_ns for row in some) for some in (rows, others)
    ]
    return last[0] < last[1]


def joining_rows(
    view: View, best: Plan, waiting: Sequence[RequestView], room_ns: int, cap_ns: int
) -> list[Row]:
    """Choose the decodes of a worse tier for which the best tier leaves seats, KV and time.

    Every token of the best tier waits for what joining rows add to its step, and so does an
    arrival where steps are not cut, so that is also capped. The cap never removes the last of
    them (none would ever join a single request); the room that a target leaves can. Whoever
    made progress longest ago joins first, so that all of the tier go on though few fit a step.
    """
    rows: list[Row] = []
    batch = Batch(view, 0)
    for row in best.rows:
        batch.take(view.by_id[row.request_id], row)
    for request in sorted(waiting, key=lambda r: (r.last_progress_ns, r.request_id)):
        row = next_row(request, view)
        batch.take(request, row)
        if batch.free_blocks < 0 or len(batch.rows) > view.max_num_seqs:
            break
        rows.append(row)
    while len(rows) > 1 and view.costs.extra(len(best.rows), len(rows)) > cap_ns:
        rows.pop()
    while rows and view.costs.extra(len(best.rows), len(rows)) > room_ns:
        rows.pop()
    return rows


class Riding(NamedTuple):
    """What other tiers may take from decoding requests of the best tier."""

    credit_ns: int = 0
    """Time they may take now."""
    margin_ns: int = 0
    """Room in a gap under a target that is left for what prediction misses."""
    spent_ns: int = 0
    """What they took since the best tier ran."""
    best_ns: int = 0
    """When the best tier last ran; decisions and switches since then are part of the gap too."""

    def used_ns(self, now_ns: int) -> int:
        """What of the present gap is used; 0 until another tier ran."""
        return now_ns - self.best_ns if self.spent_ns else 0


def tpot_target_ns(decoding: Sequence[RequestView]) -> int | None:
    """The strictest target of these requests."""
    targets = [int(r.slo.tpot_ms * NS_PER_MS) for r in decoding if r.slo.tpot_ms is not None]
    return min(targets, default=None)


def ahead_ns(decoding: Sequence[RequestView], now_ns: int) -> int | None:
    """Time until the first of these requests is behind its target; negative if one is already.

    A request is behind when its tokens so far took longer than the target allows for so many, and
    one more is due. None without targets, or before a first token.
    """
    ahead = [
        r.first_token_ns + r.num_output_tokens * int(r.slo.tpot_ms * NS_PER_MS) - now_ns
        for r in decoding
        if r.slo.tpot_ms is not None and r.first_token_ns is not None
    ]
    return min(ahead, default=None)


def ride_allowance_ns(
    policy: RankPolicy, costs: CostTable, num_decodes: int, target_ns: int | None
) -> int:
    """Time that worse tiers may take per step of decoding requests with this target, if any."""
    predicted = costs.decode(num_decodes)
    return int(predicted * policy.ride.frac) if target_ns is None else max(0, target_ns - predicted)


def settle(
    riding: Riding,
    ranking: Ranking,
    costs: CostTable,
    program: Program,
    done: bool,
    start_ns: int,
    end_ns: int,
) -> Riding:
    """What it is after a run: earned by decodes of the best tier, spent by the others.

    Args:
        riding: Before the run.
        ranking: The order after it.
        costs: Predicts what the decodes would have taken alone.
        program: What ran.
        done: Whether it reached its end.
        start_ns: From when,
        end_ns: and until when it ran.
    """
    credit, margin, spent, best_ns = riding
    elapsed_ns = end_ns - start_ns
    tiers = ranking.tiers
    if len(tiers) < 2:
        return Riding(margin_ns=margin, best_ns=end_ns)
    best = {x.request_id: x.request for x in ranking.admitted if x.tier == tiers[0]}
    decoding = [best[i] for i in program.request_ids if i in best]
    if not decoding:
        return Riding(credit - elapsed_ns, margin, spent + elapsed_ns, best_ns)
    if not done or not all(r.is_decoding for r in decoding):
        return Riding(credit, margin, 0, end_ns)
    target = tpot_target_ns(decoding)
    allowance = ride_allowance_ns(ranking.policy, costs, len(decoding), target)
    credit += allowance
    if joined := len(decoding) < len(program.rows):
        credit -= max(0, elapsed_ns - costs.decode(len(decoding)))
    if target is not None and (joined or spent):
        if end_ns - best_ns > target:
            margin = min(target, margin + target // MARGIN_GROWTH)
        else:
            margin -= margin // MARGIN_DECAY
    return Riding(min(credit, RIDE_CAP * allowance), margin, 0, end_ns)
