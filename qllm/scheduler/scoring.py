"""Prompts whose log-probabilities are asked for end in a program of their own.

To score a prompt is a row of the vocabulary per token, and a program gives its tokens at its end:
whoever shared it would wait for all of them. So the row that completes such a prompt runs alone,
a slice at a time where the grain allows it, in turns with the other rows of its plan.

    planned     decodes A B, prompt S       S (parked), A B         S, A B          A B
    runs        A B                         S, one slice            A B             ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qllm.plan import Plan, Row
from qllm.policy import CostTable, RequestView
from qllm.types import NS_PER_MS, RequestId

TURN_NS = 10 * NS_PER_MS
"""Shortest turn of a row that scores; switching to one and back takes about a millisecond."""


def scores(row: Row, request: RequestView, num_layers: int) -> bool:
    """Whether a row completes a prompt whose log-probabilities are asked for."""
    return request.owes_prompt and row.hi == request.num_tokens and row.end_layer == num_layers


def whose_turn(
    plan: Plan,
    rows: Sequence[Row],
    requests: Mapping[RequestId, RequestView],
    costs: CostTable,
    num_layers: int,
) -> tuple[Plan, list[Row]]:
    """Choose the rows that run now: those that score nothing, or one that does, with a slice.

    The others go on after every turn of a row that scores; of those, whoever made progress longest
    ago is next. A turn is as long as a step of as many decodes as there are other rows, and at
    least `TURN_NS`.

    Args:
        plan: What the policy wants.
        rows: Its rows that have their KV.
        requests: Whose rows they are.
        costs: Predicts the step of the others.
        num_layers: Of the model.
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
