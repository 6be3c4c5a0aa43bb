"""Layered prefill: a cohort of prompts advances by groups of layers, one group per step."""

from collections.abc import Sequence

from qllm.plan import Row
from qllm.policy import Groups, RequestView, View, next_row
from qllm.scheduler.batch import Batch


def is_under_way(request: RequestView) -> bool:
    """Return True if a request is in a cohort that has started and waits between two layers."""
    return request.frontier is not None and request.frame_id is None and not request.is_decoding


def next_cut(view: View, groups: Groups, rows: Sequence[Row]) -> int:
    """Return the layer at which a cohort stops next.

    It is the end of the next group of layers for the row that is furthest behind.
    """
    return groups.next_cut(
        sum(row.num_tokens for row in rows),
        min((row.start_layer for row in rows), default=0),
        view.shape.num_layers,
    )


def advance(batch: Batch, groups: Groups, members: Sequence[RequestView]) -> None:
    """Add the next group of layers of a started cohort to a batch.

    The cohort holds all the KV that it needs, and no request joins it. If a step had too few seats
    for all members, the members that are behind run first.
    """
    rows = [next_row(r, batch.view) for r in members]
    cut = next_cut(batch.view, groups, rows)
    least = min((row.start_layer for row in rows), default=0)
    for r, row in zip(members, rows, strict=True):
        if batch.seats and (row.start_layer < cut or row.start_layer == least):
            batch.take_prefill(r, row._replace(end_layer=cut))
