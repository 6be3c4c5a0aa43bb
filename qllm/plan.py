"""Plans of policies, and the rule for cutting ops.

A policy returns a `Plan`: rows (token and layer ranges of requests), a grain, and when to stop.
`qllm.scheduler.compile` turns the plan into a `Program` (`qllm.scheduler.program`), which a runner
executes (`qllm.runner.protocol`).

    rows    A [0, 6) layers [0, 3)      B [4, 5) layers [0, 3)      C [0, 9) layers [1, 3)
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from qllm.types import Grain, RequestId

NO_STOP = -(2**31)
"""Stop threshold that no arrival reaches."""
ANY_ARRIVAL = 2**31 - 1
"""Stop threshold that every arrival reaches, and the stop word's value without an arrival."""


class Row(NamedTuple):
    """The tokens [lo, hi) of one request, through the layers [start_layer, end_layer)."""

    request_id: RequestId
    lo: int
    hi: int
    start_layer: int
    end_layer: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this row."""
        return self.hi - self.lo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next work that a policy chooses. `rows` are in order of rank, best first.

    If the rows are exactly the rows of one parked frame, this frame is resumed unchanged (L0). A
    plan with some rows of a parked frame must have all live rows of this frame. Then the frame
    finishes the layer in which it is parked, and the plan's frame replaces it.
    """

    rows: tuple[Row, ...] = ()
    grain: Grain = Grain.STEP
    """Boundaries at which the work may stop."""
    stop_below: int = NO_STOP
    """A new arrival with a priority below this number stops the work."""
    slice_ns: int | None = None
    """Time in ns after which the work stops at the next boundary of `grain`; None is no limit."""
    wait_until_ns: int | None = None
    """Time until which a plan without rows waits. An arrival ends the wait."""
    drop: tuple[RequestId, ...] = ()
    """Requests to evict (recompute) before the rows run."""
    swap_out: tuple[RequestId, ...] = ()
    """Requests to swap out before the rows run, also requests of equal rank.

    Such a request is swapped in when it is planned. A swap needs `Cap.KV_SWAP` and free swap space.
    The request must have run since it took KV.
    """

    @property
    def is_empty(self) -> bool:
        """True if the plan contains no work, and at most a wait."""
        return not (self.rows or self.drop or self.swap_out)


class ModelShape(NamedTuple):
    """The numbers of a model that programs depend on, without tensors."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    is_moe: tuple[bool, ...]
    """Per layer: True if the layer has a router and experts."""
    vocab_size: int
    max_position: int
    """Tokens of the longest sequence that the model was made for."""
    recompute_above: int | None = None
    """Length in tokens. KV of a sequence that grows beyond this length is recomputed
    (`runner.rope`).
    """
    state_tokens: int = 0
    """Number of tokens whose KV takes as much memory as the states of a request (`runner.states`).

    A request that holds KV is charged for these tokens in addition to its own tokens.
    """

    def longest(self, max_kv_tokens: int) -> int:
        """Return the tokens of the longest sequence, with room for KV of `max_kv_tokens` tokens."""
        return max(0, min(max_kv_tokens - self.state_tokens, self.max_position))

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Return the number of KV blocks for a request of `num_tokens` tokens, states included."""
        return -(-(num_tokens + self.state_tokens) // block_size) if num_tokens > 0 else 0


class CutRule(NamedTuple):
    """The rule for cutting ops at rows: a pure function of absolute positions.

    A row's tokens are divided into blocks at multiples of `block(position)`. Consecutive blocks are
    packed into one op while the op stays within `max_cost`. The unit of cost is one token through
    the projections of a layer. The tokens [lo, hi) cost `(hi - lo) * (1 + attn_cost_per_kv * hi)`.
    """

    max_cost: float
    """Highest cost of an op. Infinity means no cuts."""
    attn_cost_per_kv: float
    """Cost of attention from one token to one cached token."""
    min_block: int = 16
    max_block: int = 512
    glue_block: int = 1024
    """Most tokens of a ROUTE or COMBINE op."""
    dense_block: int = 1024
    """Most tokens of the COMBINE op of a layer without experts. This op runs the layer's MLP."""
    expert_block: int = 1024
    """Most rows of one expert work unit."""

    def block(self, position: int) -> int:
        """Return the tokens of the block at `position`: a power of two within `max_cost`."""
        size = self.max_block
        while size > self.min_block:
            start = position // size * size
            if size * (1.0 + self.attn_cost_per_kv * (start + size)) <= self.max_cost:
                break
            size //= 2
        return size

    def priced(self, lo: int, hi: int) -> tuple[int, float]:
        """Return the number and the cost of the tokens [lo, hi)."""
        num = hi - lo
        return num, num * (1.0 + self.attn_cost_per_kv * hi)


NO_CUTS = CutRule(
    max_cost=float("inf"),
    attn_cost_per_kv=0.0,
    max_block=1 << 30,
    glue_block=1 << 30,
    dense_block=1 << 30,
    expert_block=1 << 30,
)


class _Ruler:
    """The block ends of a cut rule, at absolute positions from 0.

    A later block is never longer than an earlier one. The size of a block divides its start. So the
    cuts of a row are the ruler's cuts inside the row.
    """

    def __init__(self, cuts: CutRule) -> None:
        self._cuts = cuts
        self._marks = [0]
        self._priced: list[tuple[int, float]] = []
        """Number of tokens, and cost, of each block."""

    def blocks(self, lo: int, hi: int) -> tuple[list[int], list[tuple[int, float]]]:
        """Return the cuts of [lo, hi), including both ends, and each block's tokens and cost."""
        marks, priced, cuts = self._marks, self._priced, self._cuts
        while marks[-1] < hi:
            marks.append(marks[-1] + cuts.block(marks[-1]))
            priced.append(cuts.priced(marks[-2], marks[-1]))
        first, last = bisect_right(marks, lo), bisect_left(marks, hi)
        if first == last:
            return [lo, hi], [cuts.priced(lo, hi)]
        ends = cuts.priced(lo, marks[first]), cuts.priced(marks[last - 1], hi)
        return [lo, *marks[first:last], hi], [ends[0], *priced[first : last - 1], ends[1]]


_ruler = lru_cache(maxsize=16)(_Ruler)


def row_blocks(
    lo: int, hi: int, cuts: CutRule, one_query_from: int
) -> tuple[list[int], list[tuple[int, float]]]:
    """Return the cuts of a row, including both ends, and each block's tokens and cost.

    Each token from position `one_query_from` on is its own block.
    """
    alone = max(lo, min(hi, one_query_from))
    marks, priced = _ruler(cuts).blocks(lo, alone) if lo < alone else ([lo], [])
    marks += range(alone + 1, hi + 1)
    priced += [cuts.priced(at, at + 1) for at in range(alone, hi)]
    return marks, priced


def chunk_end(row: Row, num_tokens: int, cuts: CutRule, one_query_from: int) -> int:
    """Return the end of a chunk in level L2: the request's last cut at or before `row.hi`.

    Args:
        row: Requested chunk.
        num_tokens: Number of known tokens of the request.
        cuts: Cut rule.
        one_query_from: Position from which every token is its own block.
    """
    marks, _ = row_blocks(row.lo, num_tokens, cuts, one_query_from)
    return marks[max(1, bisect_right(marks, row.hi) - 1)]
