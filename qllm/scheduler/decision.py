"""Values that the scheduler returns and keeps: effects on the runner, decisions, parked frames."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from qllm.floor import NO_FLOOR, Floor
from qllm.plan import Row
from qllm.scheduler.program import START, Index, Program
from qllm.types import CAPABILITIES, NS_PER_MS, NS_PER_S, Cap, FrameId, Grain, RequestId

Of = TypeVar("Of")
MAX_IDLE_NS = 10 * NS_PER_S
"""Longest time that requests may wait while nothing runs. After that time the policy has
stalled."""


class Kill(NamedTuple):
    """Effect that marks the row of a request in a parked frame as dead."""

    program: Program
    request_id: RequestId


class Drop(NamedTuple):
    """Effect that frees a frame and commits nothing."""

    program: Program


class Leave(NamedTuple):
    """Effect that takes a row out of a parked frame. The row's request keeps the hidden states."""

    program: Program
    request_id: RequestId
    at: Index
    """Start of the frame's current layer. The row's work in this layer is recomputed."""


class EvictKv(NamedTuple):
    """Effect that drops the KV of a request.

    Its blocks are already free. KV is computed again later.
    """

    request_id: RequestId
    num_tokens_lost: int
    for_request: RequestId


class SwapOut(NamedTuple):
    """Effect that stores the KV of a request in the swap space.

    The request's blocks are already free.
    """

    request_id: RequestId
    num_tokens: int
    for_request: RequestId


class SwapIn(NamedTuple):
    """Effect that loads the KV of a request from the swap space into the request's new blocks."""

    request_id: RequestId
    num_tokens: int
    table: Sequence[int]


class Split(NamedTuple):
    """Effect that frees a frame between two layers. Its rows keep their hidden states."""

    program: Program
    at: Index


class Accept(NamedTuple):
    """Effect that makes the frame of a new program."""

    program: Program
    from_frames: tuple[FrameId, ...]
    tables: tuple[Sequence[int], ...]
    """Per row, all KV blocks of its request. Read the lists at once, because the scheduler changes
    them."""


Effect = Kill | Drop | Leave | EvictKv | SwapOut | SwapIn | Split | Accept


@dataclass(slots=True, kw_only=True)
class Parked:
    """A program between two runs."""

    program: Program
    index: Index
    parked_ns: int
    alarm_ns: int | None = None
    """Time when an arrival stopped the program but has to wait (`RankPolicy.max_preemptions`)."""
    dead: set[RequestId] = field(default_factory=set)
    """Rows whose requests were cancelled or evicted, or left the frame."""
    waits_for: int | None = None
    """Number of experts that are read first; None if the frame can run. A waiting frame is not
    offered to policies."""

    def alive(self, rows: Iterable[Row], requests: Mapping[RequestId, Of]) -> list[tuple[Of, Row]]:
        """Return those of the given rows that are not dead, each as a pair (request, row)."""
        left = [r for r in rows if r.request_id in requests and r.request_id not in self.dead]
        return [(requests[row.request_id], row) for row in left]

    def held_rows(self) -> tuple[Row, ...]:
        """Return the rows that are alive, from their first uncomputed layer, in program order."""
        return tuple(
            row._replace(start_layer=self.program.frontier_layer(r, self.index))
            for r, row in enumerate(self.program.rows)
            if row.request_id not in self.dead
        )

    def live_rows(self) -> tuple[Row, ...]:
        """Return held rows that have layers or HEAD left.

        Rows that ended between layers are left out.
        """
        last, exits = self.program.num_layers, self.program.choosing_drafts
        return tuple(
            row
            for row in self.held_rows()
            if row.start_layer < row.end_layer or row.end_layer == last or row.request_id in exits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next work of the engine: effects, then a program to run, or a wait."""

    effects: tuple[Effect, ...] = ()
    """Effects that the engine applies to the runner, in this order, before anything runs."""
    program: Program | None = None
    start: Index = START
    limit: Index | None = None
    """Boundary at which the run ends; None runs to the end of the program."""
    slice_ns: int | None = None
    resumed: bool = False
    wait_until_ns: int | None = None
    """Time of the engine's next call, if there is no program; None waits for an arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings that decisions depend on."""

    max_num_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    grain: Grain
    max_segment_ns: int
    batch_invariant: bool = False
    capabilities: Cap = CAPABILITIES
    """Capabilities of the runner."""
    num_swap_blocks: int = 0
    """Space for swapped-out KV, in blocks."""
    whole_steps: bool = False
    """True if a step without a reason to stop has no boundaries: each boundary costs a launch."""
    floor: Floor = NO_FLOOR
    """Smallest share of the time that BE gets while LS has work."""

    @property
    def max_kv_tokens(self) -> int:
        """Largest number of tokens of KV at once, including the states of requests."""
        return self.num_blocks * self.block_size


class Patience:
    """The time that a policy has let requests wait while nothing ran."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    def renew(self) -> None:
        """Reset the time, because a program runs or no request waits."""
        self._since_ns = None

    def until_ns(self, wanted_ns: int, now_ns: int) -> int | None:
        """Return the time to call a waiting policy again.

        The result is None if the policy has waited too long.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
        end_ns = self._since_ns + MAX_IDLE_NS
        if now_ns >= end_ns:
            return None
        return max(min(wanted_ns, end_ns), now_ns + NS_PER_MS // 10)
