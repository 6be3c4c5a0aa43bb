"""What the scheduler says: effects on the runner, decisions, and the frames it keeps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from qllm.floor import NO_FLOOR, Floor
from qllm.plan import Row
from qllm.scheduler.program import START, Index, Program
from qllm.types import CAPABILITIES, NS_PER_MS, NS_PER_S, Cap, FrameId, Grain, RequestId

Of = TypeVar("Of")
MAX_IDLE_NS = 10 * NS_PER_S
"""A policy that lets requests wait for so long while nothing runs has stalled."""


class Kill(NamedTuple):
    """Mark the row of a request in a parked frame dead."""

    program: Program
    request_id: RequestId


class Drop(NamedTuple):
    """Let go of a frame without committing anything."""

    program: Program


class Leave(NamedTuple):
    """Take a row out of a parked frame; its request keeps its hidden states from `at` on."""

    program: Program
    request_id: RequestId
    at: Index
    """The start of the layer that the frame is in: what the row did of it is done again."""


class EvictKv(NamedTuple):
    """Forget the KV of a request, whose blocks are free; it recomputes later."""

    request_id: RequestId
    num_tokens_lost: int
    for_request: RequestId


class SwapOut(NamedTuple):
    """Move the KV of a request out of its blocks, which are free."""

    request_id: RequestId
    num_tokens: int
    for_request: RequestId


class SwapIn(NamedTuple):
    """Move the KV of a request back, which has its blocks."""

    request_id: RequestId
    num_tokens: int
    table: Sequence[int]


class Split(NamedTuple):
    """Let go of a frame between two layers; its rows keep their hidden states."""

    program: Program
    at: Index


class Accept(NamedTuple):
    """Make the frame of a new program."""

    program: Program
    from_frames: tuple[FrameId, ...]
    tables: tuple[Sequence[int], ...]
    """Per row all KV blocks of its request, to be read at once."""


Effect = Kill | Drop | Leave | EvictKv | SwapOut | SwapIn | Split | Accept


@dataclass(slots=True, kw_only=True)
class Parked:
    """A program between two runs."""

    program: Program
    index: Index
    parked_ns: int
    alarm_ns: int | None = None
    """When an arrival stopped it that has to wait for it (`RankPolicy.max_preemptions`)."""
    dead: set[RequestId] = field(default_factory=set)
    """Rows whose requests were cancelled or evicted, or left it."""

    def alive(self, rows: Iterable[Row], requests: Mapping[RequestId, Of]) -> list[tuple[Of, Row]]:
        """Those of its rows that are not dead, with their requests."""
        left = [r for r in rows if r.request_id in requests and r.request_id not in self.dead]
        return [(requests[row.request_id], row) for row in left]

    def held_rows(self) -> tuple[Row, ...]:
        """Rows whose hidden states it holds, from their frontier, in program order."""
        return tuple(
            row._replace(start_layer=self.program.frontier_layer(r, self.index))
            for r, row in enumerate(self.program.rows)
            if row.request_id not in self.dead
        )

    def live_rows(self) -> tuple[Row, ...]:
        """Those that still owe layers: the rest wait at the layer where they left the sweep."""
        last = self.program.num_layers
        return tuple(
            row
            for row in self.held_rows()
            if row.start_layer < row.end_layer or row.end_layer == last
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the engine does next."""

    effects: tuple[Effect, ...] = ()
    """To be done to the runner, in this order, before anything runs."""
    program: Program | None = None
    start: Index = START
    limit: Index | None = None
    """Run no further than this boundary; None is the end of the program."""
    slice_ns: int | None = None
    resumed: bool = False
    wait_until_ns: int | None = None
    """Without a program: idle until then; None waits for an arrival."""


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
    """What the runner can do."""
    num_swap_blocks: int = 0
    """Room for KV that is swapped out, in blocks."""
    whole_steps: bool = False
    """Steps that nothing would stop are planned whole: each boundary inside one costs a launch."""
    floor: Floor = NO_FLOOR
    """The share of the time that BE gets, whatever LS does."""

    @property
    def max_kv_tokens(self) -> int:
        """Tokens of KV that may exist at once, states of requests included."""
        return self.num_blocks * self.block_size


class Patience:
    """How long a policy has let requests wait while nothing ran."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    def renew(self) -> None:
        """Something runs, or nobody waits."""
        self._since_ns = None

    def until_ns(self, wanted_ns: int, now_ns: int) -> int | None:
        """When to ask the policy again, which wants to wait; None if it has waited too long."""
        if self._since_ns is None:
            self._since_ns = now_ns
        end_ns = self._since_ns + MAX_IDLE_NS
        if now_ns >= end_ns:
            return None
        return max(min(wanted_ns, end_ns), now_ns + NS_PER_MS // 10)
