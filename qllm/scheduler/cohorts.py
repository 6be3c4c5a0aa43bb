"""Layered prefill: a cohort of prompts advances by groups of layers, one group per step."""

from collections.abc import Sequence

from qllm.plan import Row
from qllm.policy import Groups, RequestView, View, next_row
from qllm.scheduler.batch import Batch


def is_under_way(request: RequestView) -> bool:
    """Return True if a request is in a cohort that left the sweep at a cut between layers."""
    return request.frontier is not None and request.frame_id is None and not request.is_decoding


def next_cut(view: View, groups: Groups, rows: Sequence[Row]) -> int:
    """Return the layer at which the cohort stops next: the end of its last row's next group."""
    return groups.next_cut(
        sum(row.num_tokens for row in rows),
        min((row.start_layer for row in rows), default=0),
        view.shape.num_layers,
    )


def advance(batch: Batch, groups: Groups, members: Sequence[RequestView]) -> None:
    """Add the next group of layers of a started cohort to a batch.

    The cohort holds all the KV it needs and keeps the size it started with. If a step had too few
    seats for all members, those that were left behind catch up first.
    """
    rows = [next_row(r, batch.view) for r in members]
    cut = next_cut(batch.view, groups, rows)
    least = min((row.start_layer for row in rows), default=0)
    for r, row in zip(members, rows, strict=True):
        if batch.seats and (row.start_layer < cut or row.start_layer == least):
            batch.take_prefill(r, row._replace(end_layer=cut))
