"""Alternation of prompts whose log-probabilities are requested with the other rows of a plan.

Such a prompt is scored: each of its tokens needs logits over the whole vocabulary. A program
returns all tokens at its end, so other requests in the program would wait for this work. Therefore
the row that completes a scored prompt runs alone, in slices if the grain allows slices. The other
rows run after each slice.

    planned     decodes A B, prompt S       S (parked), A B         S, A B          A B
    runs        A B                         S, one slice            A B             ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qllm.plan import Plan, Row
from qllm.policy import CostTable, RequestView
from qllm.types import NS_PER_MS, RequestId

TURN_NS = 10 * NS_PER_MS
"""Shortest slice of a scoring row. A switch to the row and back takes about a millisecond."""


def scores(row: Row, request: RequestView, num_layers: int) -> bool:
    """Return True if a row completes a prompt whose log-probabilities are requested."""
    return request.owes_prompt and row.hi == request.num_tokens and row.end_layer == num_layers


def whose_turn(
    plan: Plan,
    rows: Sequence[Row],
    requests: Mapping[RequestId, RequestView],
    costs: CostTable,
    num_layers: int,
) -> tuple[Plan, list[Row]]:
    """Choose the rows that run now: all rows that do not score, or one scoring row with a slice.

    The other rows run after every slice of a scoring row. The scoring row with the least recent
    progress is next. A slice is as long as a decode step with one decode per other row, and at
    least `TURN_NS`.

    Args:
        plan: Plan of the policy.
        rows: Rows of the plan that have their KV.
        requests: Requests of the rows.
        costs: Cost table that predicts the step of the other rows.
        num_layers: Number of layers of the model.
    """
    owing = [row for row in rows if requests[row.request_id].owes_prompt]
    scoring = [row for row in owing if scores(row, requests[row.request_id], num_layers)]
    if not scoring:
        return plan, list(rows)

    def progress_ns(row: Row) -> int:
        return requests[row.request_id].last_progress_ns

    others = [row for row in rows if row not in scoring]
    if others and min(map(progress_ns, others)) < max(map(progress_ns, scoring)):
        return plan, others
    turn_ns = max(TURN_NS, costs.decode(len(others)))
    slice_ns = turn_ns if plan.slice_ns is None else min(plan.slice_ns, turn_ns)
    return replace(plan, slice_ns=slice_ns), [min(scoring, key=progress_ns)]
