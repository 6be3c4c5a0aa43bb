"""The ride: time for BE while LS decodes. It is a credit, and room in every gap between tokens.

A decode step of the best tier earns credit: the time that the TPOT targets of its requests leave,
or a fraction of the step without targets. Runs of the other tiers spend the credit.

Under a target, no single gap may be longer than the target. A request that is behind its target,
because prefills of its own tier delayed it, leaves no room until it has caught up. Predictions are
not exact: a slice ends at the next boundary, and a decode step is sometimes slow. So a margin is
taken from the room of a gap. The margin grows with every gap that was too long, and shrinks with
every other gap.
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
"""Most credit, in allowances. One decode step of the best tier earns one allowance."""
JOIN_CAP = 2
"""Most time that joining rows add to a step, in allowances. A token waits no longer than that."""
MARGIN_GROWTH = 8
"""Divisor of the target. A gap that was too long adds the quotient to the margin."""
MARGIN_DECAY = 512
"""Divisor of the margin. Each other gap subtracts the quotient. One gap in a few hundred is
late."""


def first_due_ns(decoding: Sequence[RequestView], tpot_ms: int) -> int:
    """Return the time when the first decode is due, by its own target or else by `tpot_ms`."""
    return min(
        (r.last_token_ns or 0) + tpot_ms * NS_PER_MS if r.deadline_ns is None else r.deadline_ns
        for r in decoding
    )


def wait_longer(view: View, rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Return True if `rows` have less recent progress than `others`. New work goes first."""
    last = [
        min(view.by_id[row.request_id].last_progress_ns for row in some) for some in (rows, others)
    ]
    return last[0] < last[1]


def joining_rows(
    view: View, best: Plan, waiting: Sequence[RequestView], room_ns: int, cap_ns: int
) -> list[Row]:
    """Choose the decodes of a worse tier for which the best tier leaves seats, KV and time.

    Every token of the best tier waits for the time that joining rows add to the step. An arrival
    waits too if steps are not cut. So `cap_ns` limits this time. The cap always allows one row, or
    no row could ever join a single request. The room under a target may exclude that row. The row
    with the least recent progress joins first, so that all rows of the tier get time.
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
    num, more = (sum([row.num_tokens for row in some]) for some in (best.rows, rows))
    while len(rows) > 1 and view.costs.extra(num, more) > cap_ns:
        more -= rows.pop().num_tokens
    while rows and view.costs.extra(num, more) > room_ns:
        more -= rows.pop().num_tokens
    return rows


class Riding(NamedTuple):
    """The time that other tiers may take from decoding requests of the best tier."""

    credit_ns: int = 0
    """Time that other tiers may take now."""
    margin_ns: int = 0
    """Time in a gap under a target that is reserved for errors of the prediction."""
    spent_ns: int = 0
    """Time that other tiers took since the best tier ran."""
    best_ns: int = 0
    """End of the best tier's last run. The gap since then includes decisions and switches."""

    def used_ns(self, now_ns: int) -> int:
        """Return the used time of the present gap; 0 until another tier has run."""
        return now_ns - self.best_ns if self.spent_ns else 0


def tpot_target_ns(decoding: Sequence[RequestView]) -> int | None:
    """Return the strictest TPOT target of these requests; None without one."""
    targets = [int(r.slo.tpot_ms * NS_PER_MS) for r in decoding if r.slo.tpot_ms is not None]
    return min(targets, default=None)


def ahead_ns(decoding: Sequence[RequestView], now_ns: int) -> int | None:
    """Return the time until a request is behind its target; negative if one is behind now.

    A request is behind if its tokens so far, together with the token that is due, took longer than
    the target allows for this number. Returns None without targets, or before a first token.
    """
    ahead = [
        r.first_token_ns + r.num_output_tokens * int(r.slo.tpot_ms * NS_PER_MS) - now_ns
        for r in decoding
        if r.slo.tpot_ms is not None and r.first_token_ns is not None
    ]
    return min(ahead, default=None)


def ride_allowance_ns(
    policy: RankPolicy, costs: CostTable, num_tokens: int, target_ns: int | None
) -> int:
    """Return the time that a decode step of so many tokens leaves to worse tiers.

    `target_ns` is the step's TPOT target, or None.
    """
    predicted = costs.decode(num_tokens)
    return int(predicted * policy.ride.frac) if target_ns is None else max(0, target_ns - predicted)


def _verifies_draft_rows(program: Program) -> bool:
    """Return True if a row begins where draft rows left the model. They earned for the rest."""
    pairs = zip(program.rows, program.samples, strict=True)
    return any(row.start_layer > 0 and num > 1 for row, num in pairs)


def settle(
    riding: Riding,
    ranking: Ranking,
    costs: CostTable,
    program: Program,
    done: bool,
    start_ns: int,
    end_ns: int,
) -> Riding:
    """Return the state after a run. Decodes of the best tier earn credit; other runs spend credit.

    A draft row earns the same part of its time as a decode, unless a target bounds the gaps between
    tokens. Then the row that verifies earns what the target leaves.

    Args:
        riding: State before the run.
        ranking: Order of requests after the run.
        costs: Cost table that predicts the time of the decodes alone.
        program: Program that ran.
        done: True if the program reached its end.
        start_ns: Time when the program began to run.
        end_ns: Time when the program stopped.
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
    joined = len(decoding) < len(program.rows)
    part_ns = int(elapsed_ns * ranking.policy.ride.frac)
    if program.exits:  # a draft row is a part of a step, and gives no token
        if joined:
            credit -= elapsed_ns
        elif target is None:
            cap = RIDE_CAP * ride_allowance_ns(ranking.policy, costs, len(decoding), None)
            credit = max(credit, min(cap, credit + part_ns))
        return Riding(credit, margin, 0, end_ns)
    places = zip(program.request_ids, program.samples, strict=True)
    num = sum([max(1, samples) for request_id, samples in places if request_id in best])
    is_rest = target is None and not joined and _verifies_draft_rows(program)
    allowance = part_ns if is_rest else ride_allowance_ns(ranking.policy, costs, num, target)
    credit += allowance
    if joined:
        credit -= max(0, elapsed_ns - costs.decode(num))
    if target is not None and (joined or spent):
        if end_ns - best_ns > target:
            margin = min(target, margin + target // MARGIN_GROWTH)
        else:
            margin -= margin // MARGIN_DECAY
    return Riding(min(credit, RIDE_CAP * allowance), margin, 0, end_ns)
