"""Which steps run whole where each boundary inside a step costs a launch."""

from collections.abc import Mapping, Sequence

from qllm.plan import Row
from qllm.policy import View
from qllm.types import RequestId


def runs_whole(
    view: View,
    rows: Sequence[Row],
    tier_of: Mapping[RequestId, int],
    best: int,
    slice_ns: int | None,
) -> bool:
    """Whether nothing would stop these rows inside the step: the best class decodes alone.

    Rows of worse classes that joined it make a step worth stopping for newcomers of the best
    class. A slice that outlasts the step stops nothing inside it. Control words, such as that of
    a cancel, wait for the end of a whole step.

    Args:
        view: The state.
        rows: What is to run.
        tier_of: Tiers of their requests.
        best: The tier that no arrival goes before.
        slice_ns: How long they may run; None is without an end.
    """
    if not view.whole_steps:
        return False
    if slice_ns is not None and slice_ns < view.costs.decode(len(rows)):
        return False
    num_layers = view.shape.num_layers
    return all(
        tier_of[row.request_id] <= best
        and (row.num_tokens, row.start_layer, row.end_layer) == (1, 0, num_layers)
        for row in rows
    )
