"""Rows of one step, and the remaining seats, prefill tokens and blocks for more rows."""

from collections.abc import Mapping, Sequence

from qllm.plan import Row
from qllm.policy import RequestView, View
from qllm.types import Grain, RequestId

MIN_CHUNK = 32
"""Fewest prefill tokens of a step whose size is chosen to fit a slice."""


class Batch:
    """Rows of one step, and the remaining seats, prefill tokens and blocks."""

    def __init__(self, view: View, tokens: int) -> None:
        self.view = view
        self.block_size, self.states = view.block_size, view.shape.state_tokens
        self.rows: list[Row] = []
        self.seats = view.max_num_seqs
        self.tokens = tokens
        self.free_blocks = view.num_free_blocks
        self.num_prefills = 0

    def need(self, request: RequestView, row: Row) -> int:
        """Return the number of blocks that a row needs in addition to the blocks of its request.

        A request without blocks cannot evict requests of its tier, so its chunk is counted up to
        the place where level L2 lets the chunk end. A request with blocks can evict, so its chunk
        is counted as planned.
        """
        if not request.is_admitted:
            return self.view.blocks_needed(row)
        need = self.view.shape.blocks_for(row.hi, self.block_size)
        return max(0, need - len(request.block_table))

    def take(self, request: RequestView, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        self.seats -= 1
        if row.hi + self.states > len(request.block_table) * self.block_size:
            self.free_blocks -= self.need(request, row)

    def take_prefill(self, request: RequestView, row: Row) -> None:
        """Add a row and charge its tokens to the prefill budget."""
        self.take(request, row)
        self.tokens -= row.num_tokens
        self.num_prefills += 1

    def chosen(self, prompts: bool) -> list[Row]:
        """Return the rows of prompts if `prompts` is True, or all rows."""
        get = self.view.by_id
        return [row for row in self.rows if not (prompts and get[row.request_id].is_decoding)]


def may_wait(view: View, rows: Sequence[Row]) -> bool:
    """Return True if a step prefills streaming prompts only.

    Whole prompts of the tier go first then.
    """
    requests = [view.by_id[row.request_id] for row in rows]
    return any([r.is_open for r in requests]) and all(r.is_open or r.is_decoding for r in requests)


def runs_whole(
    view: View,
    rows: Sequence[Row],
    tier_of: Mapping[RequestId, int],
    best: int,
    slice_ns: int | None,
) -> bool:
    """Return True if nothing would stop these rows in a step, because the best class decodes alone.

    Such a step runs whole if each boundary inside a step costs a launch. If rows of worse classes
    joined a step, stopping the step for newcomers of the best class is worth the launches. A slice
    longer than the step stops nothing inside the step. A cancel waits for the end of a whole step.

    Args:
        view: State as policies see it.
        rows: Rows to run.
        tier_of: Tiers of the rows' requests.
        best: Best tier, before which no arrival goes.
        slice_ns: Longest run of the rows in nanoseconds; None sets no limit.
    """
    if not view.whole_steps:
        return False
    if slice_ns is not None and slice_ns < view.costs.decode(sum([row.num_tokens for row in rows])):
        return False
    num_layers = view.shape.num_layers
    return all(
        tier_of[row.request_id] <= best
        and (row.num_tokens, row.start_layer, row.end_layer) == (1, 0, num_layers)
        for row in rows
    )


def fitting_tokens(view: View, grain: Grain, slice_ns: int) -> int:
    """Return the number of prefill tokens that fit a slice, for steps that no slice can stop."""
    most = view.max_step_tokens
    if grain > Grain.STEP:
        return most
    return min(most, max(MIN_CHUNK, slice_ns // view.costs.prefill_token_ns))
