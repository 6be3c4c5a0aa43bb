"""The plug-in surface: the state that a policy gets, and the plan that it returns.

There are two ways to write a policy. A `RankPolicy` is one pure function of integers, and
parameters that choose the shape of plans. The scheduler, or a device, turns ranks into plans. A
`Policy` makes its own plans. Both are found through the entry-point group `qllm.policies`.

    @dataclass(frozen=True, kw_only=True)
    class ShortestFirst(RankPolicy):
        \"\"\"Shortest prompt first inside each class.\"\"\"

        def rank(self, arrival_ns, priority, deadline_ns, prompt_tokens, done_tokens,
                 served_ns, now_ns):
            return priority, prompt_tokens
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from qllm.errors import ConfigError, shown
from qllm.plan import NO_STOP, CutRule, ModelShape, Plan, Row, chunk_end
from qllm.types import (
    MAX_TIME_MS,
    Cap,
    Evict,
    FrameId,
    Frontier,
    Grain,
    Priority,
    RequestId,
    Slo,
)

__all__ = [
    "NO_DEADLINE",
    "NO_STOP",
    "Cap",
    "CostTable",
    "Evict",
    "FrameView",
    "Groups",
    "Plan",
    "Policy",
    "Priority",
    "RankPolicy",
    "Reads",
    "RequestView",
    "Ride",
    "Row",
    "Slack",
    "StepReport",
    "Tier",
    "View",
    "decode_tokens",
    "make_policy",
    "next_row",
]


class RequestView(Protocol):
    """The fields of a request that a policy may read (see `qllm.scheduler.request.Request`)."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def deadline_ns(self) -> int | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def draft_row(self) -> Frontier | None: ...
    @property
    def exit_layer(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_written_tokens(self) -> int: ...
    @property
    def num_uncomputed_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def revised_ns(self) -> int: ...
    @property
    def block_table(self) -> Sequence[int]: ...
    @property
    def num_swapped_tokens(self) -> int: ...
    @property
    def admitted_ns(self) -> int: ...
    @property
    def frontier(self) -> Frontier | None: ...
    @property
    def frame_id(self) -> FrameId | None: ...
    @property
    def lacks_experts(self) -> bool: ...
    @property
    def is_decoding(self) -> bool: ...
    @property
    def is_admitted(self) -> bool: ...
    @property
    def owes_prompt(self) -> bool: ...
    @property
    def served_ns(self) -> int: ...
    @property
    def last_progress_ns(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def first_token_ns(self) -> int | None: ...
    @property
    def last_token_ns(self) -> int | None: ...


class FrameView(NamedTuple):
    """A parked frame: the rows of a plan that would resume it, in the order of the frame."""

    frame_id: FrameId
    rows: tuple[Row, ...]
    """Live rows, from the first uncomputed layer to the last planned layer."""
    parked_ns: int
    """Time when the frame was parked."""
    alarm_ns: int | None = None
    """Time when an arrival stopped the frame and still has to wait for it (`max_preemptions`)."""


class Tier(enum.IntEnum):
    """Place of KV outside the blocks of its request. The value is an index of cost tables."""

    MEMORY = 0
    """Main memory. On a CPU, KV is always in main memory and does not move."""
    FILE = 1


class CostTable(NamedTuple):
    """Predicted times in nanoseconds, fitted by the engine. Every change is a trace event.

    All values are integers, so that a device computes the same predictions.
    """

    decode_ns: tuple[int, ...]
    """Time of a decode step of 1, 2, 4, 8, ... tokens through all layers."""
    prefill_token_ns: int
    """Time of one prefill token through all layers."""
    move_token_ns: tuple[int, ...] = (0,)
    """Time to store the KV of one token in a tier, or to load it, per measured `Tier`."""

    def decode(self, num_tokens: int) -> int:
        """Return the predicted time of a decode step, interpolated between powers of two.

        Args:
            num_tokens: Tokens of the step: one for each row, and drafted tokens (`decode_tokens`).
        """
        if num_tokens <= 0:
            return 0
        exponent = num_tokens.bit_length() - 1
        last = len(self.decode_ns) - 1
        if exponent >= last:
            return self.decode_ns[last] * num_tokens >> last
        low, high = self.decode_ns[exponent], self.decode_ns[exponent + 1]
        return low + (high - low) * (num_tokens - (1 << exponent)) // (1 << exponent)

    def extra(self, num_tokens: int, num_more: int) -> int:
        """Return the time that `num_more` tokens add to a decode step."""
        return max(0, self.decode(num_tokens + num_more) - self.decode(num_tokens))

    def pays_to_keep(self, tier: Tier, num_moved: int, num_lost: int) -> bool:
        """Return True if storing and loading KV in a tier is quicker than computing the KV again.

        Args:
            tier: Tier that stores the KV. The result is False for a tier that was not measured.
            num_moved: Number of tokens to store, without tokens whose KV is in the tier already.
            num_lost: Number of tokens to compute if nothing is stored.
        """
        there_ns = self.move(tier, num_moved)
        return there_ns is not None and 2 * there_ns < num_lost * self.prefill_token_ns

    def move(self, tier: Tier, num_tokens: int) -> int | None:
        """Return the predicted time to store KV in a tier or to load it; None if not measured."""
        if tier >= len(self.move_token_ns):
            return None
        return num_tokens * self.move_token_ns[tier]

    def step(self, num_decode_tokens: int, num_prefill_tokens: int) -> int:
        """Return the predicted time of a step through all layers."""
        return self.decode(num_decode_tokens) + num_prefill_tokens * self.prefill_token_ns


NO_DEADLINE = 1 << 62
"""Deadline that `rank` gets for a request without a target."""
NO_COSTS = CostTable((1_000_000,), 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine as a policy sees it. Read-only by contract (`check_policy` tests this)."""

    now_ns: int
    requests: Sequence[RequestView]
    """Every unfinished request with work to do, in order of submission."""
    by_id: Mapping[RequestId, RequestView]
    """All unfinished requests, by id."""
    frames: Sequence[FrameView]
    """Parked frames, oldest first."""
    shape: ModelShape
    max_num_seqs: int
    """Most rows of a plan."""
    max_step_tokens: int
    """Most prefill tokens of a plan."""
    block_size: int
    """Tokens per KV block."""
    num_free_blocks: int
    """KV blocks that no request holds."""
    num_blocks: int
    """All KV blocks of the engine."""
    costs: CostTable
    finest_grain: Grain
    """Value of the setting `preempt_at`. A finer grain in a plan becomes this grain."""
    max_segment_ns: int
    """The setting `max_segment_ms` in nanoseconds: the longest work between two boundaries."""
    ride_credit_ns: int
    """Time that worse tiers may take from decoding requests of the best tier right now."""
    ride_margin_ns: int
    """Time in a gap under a TPOT target that is reserved for errors of predictions."""
    ride_used_ns: int
    """Time since the best tier last ran, if worse tiers ran since; else 0."""
    capabilities: Cap
    """Capabilities of the engine, for policies that can use more than `needs`."""
    cuts: CutRule | None
    """Rule of the places where chunks end at level L2. The scheduler shortens other rows. None is
    no rule."""
    whole_steps: bool = False
    """True if steps that nothing would stop run whole, because each boundary costs a launch."""
    num_free_swap_blocks: int = 0
    """Free space for swapped-out KV, in blocks (`Cap.KV_SWAP`)."""
    shared_blocks: Mapping[int, int] = field(default_factory=dict)
    """Number of holders of each block that several requests hold (see `Freed`)."""
    found_blocks: Mapping[RequestId, Sequence[int]] = field(default_factory=dict)
    """Blocks that each request without KV would share with other requests."""
    idle: Sequence[RequestView] = ()
    """Streaming prompts that wait for input and hold KV. Other requests may take that KV."""

    def blocks_needed(self, row: Row) -> int:
        """Return the number of blocks that `row` needs in addition to the blocks of its request."""
        request, hi = self.by_id[row.request_id], row.hi
        if self.cuts is not None and request.frontier is None and hi < request.num_tokens:
            hi = chunk_end(row, request.num_tokens, self.cuts, request.num_prompt_tokens)
        need = self.shape.blocks_for(hi, self.block_size) - len(request.block_table)
        if self.found_blocks:
            need -= len(self.found_blocks.get(row.request_id, ()))
        return need if need > 0 else 0

    def blocks_freed(self, requests: Iterable[RequestView]) -> int:
        """Return the number of blocks that become free if these requests lose them (`Freed`)."""
        return sum(map(Freed.of(self).add, requests))


class Freed:
    """Counter of blocks that become free when requests lose their blocks, one after the other.

    A shared block becomes free when its last holder loses it. A block that a waiting request has
    found does not count, because that request may be planned in the same step and hold the block.

    Args:
        shared: Number of holders of each block that has several holders.
        found: Blocks that waiting requests would share.
    """

    def __init__(self, shared: Mapping[int, int], found: Iterable[Sequence[int]] = ()) -> None:
        self._left = dict(shared)
        for block in chain.from_iterable(found):
            self._left[block] = self._left.get(block, 1) + 1

    @classmethod
    def of(cls, view: View) -> "Freed":
        """Make the counter of a view in which no request has lost blocks."""
        return cls(view.shared_blocks, view.found_blocks.values())

    def copy(self) -> "Freed":
        """Return a copy that counts independently."""
        return Freed(self._left)

    def add(self, request: RequestView) -> int:
        """Count a request that loses its blocks; return how many blocks become free."""
        table, left = request.block_table, self._left
        if not left:
            return len(table)
        for block in table:
            if block in left:
                left[block] -= 1
        return sum(left.get(block, 0) == 0 for block in table)


def decode_tokens(decoding: Iterable[RequestView]) -> int:
    """Return the tokens of a decode step of these requests: one each, and their drafted tokens.

    A draft row has one token.
    """
    return sum([1 if r.exit_layer and r.draft_row else 1 + r.num_drafts for r in decoding])


def next_row(
    request: RequestView, view: View, max_tokens: int | None = None, end_layer: int | None = None
) -> Row:
    """Return the next row of a request, from its first uncomputed layer.

    The row of a decoding request also verifies the request's drafted tokens. A draft row ends at
    the request's `exit_layer`.

    Args:
        request: Request with tokens left to compute.
        view: State with the number of layers.
        max_tokens: Most tokens of a new row. A row part-way through the layers keeps its tokens.
        end_layer: Layer at which the row ends; the last by default.
    """
    if (draft := request.draft_row) is not None:
        return Row(request.request_id, *draft, request.exit_layer)
    end = view.shape.num_layers if end_layer is None else end_layer
    front = request.frontier
    if front is not None:
        return Row(request.request_id, front.lo, front.hi, front.layer, end)
    lo, hi = request.num_computed_tokens, request.num_tokens + request.num_drafts
    if max_tokens is not None and hi > lo + max_tokens:
        hi = lo + max_tokens
    return Row(request.request_id, lo, hi, 0, end)


class StepReport(NamedTuple):
    """Result of one run of a plan."""

    start_ns: int
    end_ns: int
    rows: tuple[Row, ...]
    done: bool
    """True if the program reached its end. Otherwise its frame is parked."""
    sampled: tuple[RequestId, ...]
    """Requests that got a token."""


@runtime_checkable
class Policy(Protocol):
    """A policy that makes its own plans. Only `needs` and `plan` are mandatory.

    An engine that lacks a capability of `needs` refuses the policy at start.
    """

    needs: Cap

    def plan(self, view: View) -> Plan:
        """Return rows in rank order, or a time until which to wait.

        `plan` must not change anything.
        """
        ...


class Ride(NamedTuple):
    """Shape in which worse tiers use time of the best tier while the best tier only decodes."""

    unbounded: bool = False
    """True shares every step with every tier, as vLLM does."""
    frac: float = 0.0
    """Largest fraction by which worse tiers may lengthen a decode step without a TPOT target."""


class Slack(NamedTuple):
    """Shape in which prefill takes the time until the first decode of the same step is due."""

    min_tokens: int
    """Least prefill tokens of a step, however late the step's decodes are."""
    tpot_ms: int
    """TPOT target of requests that have none."""


class Groups(NamedTuple):
    """Shape in which a cohort of prompts advances together, one group of layers per step."""

    tokens: int
    """Prompt tokens of the cohort per group."""
    most: int
    """Most groups, however long the prompts are."""

    def next_cut(self, num_tokens: int, layer: int, num_layers: int) -> int:
        """Return the layer at which a cohort of `num_tokens` tokens stops next, after `layer`."""
        num = max(1, min(-(-num_tokens // self.tokens), self.most, num_layers))
        cuts = (num_layers * (i + 1) // num for i in range(num))
        return next((cut for cut in cuts if cut > layer), num_layers)


class Reads(enum.IntEnum):
    """The values that a rank depends on. When they change, the policy is called again."""

    FIXED = 0
    """Only values that never change: arrival, class, prompt length."""
    PROGRESS = 1
    """Also values that change when the request runs: deadline, tokens done, time served."""
    TIME = 2
    """Also the time of the decision."""


@dataclass(frozen=True, kw_only=True)
class RankPolicy:
    """A policy of one pure function of integers, and of the shape of the plans made from it.

    Raises:
        ConfigError: A parameter is out of its range.
    """

    compilable = True
    """True if a scheduler on a device can run the policy."""
    since: ClassVar[str] = "arrival_ns"
    """Field that `rank` gets as the arrival: "arrival_ns", or "revised_ns", the time of a prompt's
    last piece."""
    reads = Reads.TIME
    """Arguments that `rank` reads. A policy that reads fewer arguments is called less often."""

    grain: Grain = field(default=Grain.STEP, metadata={"fixed": True})
    """Finest boundary at which a pass may stop."""
    chunk_tokens: int | None = None
    """Most prefill tokens of one request per step; None takes whole prompts."""
    step_tokens: int | None = field(default=None, metadata={"fixed": True})
    """Most tokens of a step: its decodes, then prefill in the rest; None is no limit."""
    slack: Slack | None = field(default=None, metadata={"fixed": True})
    """Limit of a step's prefill by the deadlines of its decodes; None ignores deadlines."""
    groups: Groups | None = field(default=None, metadata={"fixed": True})
    """Layered prefill; None takes all layers in one step."""
    ride: Ride = field(default=Ride(), metadata={"fixed": True})
    """Time that requests of larger tiers get while the best tier only decodes."""
    max_prompt_gap_ms: int | None = None
    """Longest gap between two tokens of a decoding request that prompts of its own tier may cause;
    a TPOT target replaces it. None: a step takes prompts whatever the targets are."""
    max_be_stall_ms: int | None = None
    """Longest time of an admitted request without progress; None declares no bound."""
    max_preemptions: int | None = None
    """Most passes of one request, not LS, that arrivals may stop; None is no bound. After that its
    pass continues, and an arrival waits for its end, at most `max_preemption_wait_ms`."""
    max_preemption_wait_ms: int = 50
    """Longest wait of an arrival for a pass that it may not stop; then it stops the pass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "rank" in vars(cls) and "reads" not in vars(cls):
            cls.reads = Reads.TIME  # the parent's value is for the parent's `rank`

    def __post_init__(self) -> None:
        least = [("chunk_tokens", self.chunk_tokens), ("step_tokens", self.step_tokens)]
        if self.slack is not None:
            least += [("min_chunk_tokens", self.slack.min_tokens), ("tpot_ms", self.slack.tpot_ms)]
        if self.groups is not None:
            least += [("group_tokens", self.groups.tokens), ("max_groups", self.groups.most)]
        least += [("max_prompt_gap_ms", self.max_prompt_gap_ms)]
        least += [("max_preemption_wait_ms", self.max_preemption_wait_ms)]
        most = self.max_preemptions
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            raise ConfigError(f"max_preemptions={shown(most)} must be an integer >= 0, or None")
        for name, value in least:
            if value is not None and not (isinstance(value, int) and 1 <= value <= MAX_TIME_MS):
                raise ConfigError(f"{name}={shown(value)} must be an integer in [1, {MAX_TIME_MS}]")
        shared = self.ride.unbounded or self.groups is not None
        if self.max_prompt_gap_ms is not None and shared:
            raise ConfigError(
                f"max_prompt_gap_ms={self.max_prompt_gap_ms} needs tiers that run one by one: no "
                "Ride(unbounded=True), no Groups; use None"
            )
        bound_ms = self.max_be_stall_ms
        if bound_ms is not None and not (
            isinstance(bound_ms, int) and 100 <= bound_ms <= MAX_TIME_MS
        ):
            raise ConfigError(
                f"max_be_stall_ms={shown(bound_ms)} must be an integer in [100, {MAX_TIME_MS}], or "
                "None for no bound"
            )

    @property
    def needs(self) -> Cap:
        """Capabilities that the policy's grain and shape need."""
        caps = {
            Grain.STEP: Cap.NONE,
            Grain.LAYER: Cap.YIELD_LAYER,
            Grain.EXPERT: Cap.YIELD_LAYER | Cap.YIELD_EXPERT,
        }[self.grain]
        if self.groups is not None:
            caps |= Cap.LAYER_RANGE
        return caps

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        """Return (tier, key), smaller first. Only a strictly smaller tier preempts.

        Args:
            arrival_ns: Time of the request's arrival, or the time in the field that `since` names.
            priority: Class of the request; smaller is sooner.
            deadline_ns: Time when the request's next token is due; 2**62 without a target.
            prompt_tokens: Length of the prompt in tokens.
            done_tokens: Number of tokens whose KV exists.
            served_ns: Total time of the request's runs so far.
            now_ns: The engine's clock.
        """
        raise NotImplementedError


def make_policy(name: str, factory: Any, settings: Mapping[str, Any]) -> Any:
    """Make a policy with validated settings.

    Args:
        name: Name of the policy, for messages.
        factory: Class of the policy.
        settings: Keyword parameters of the policy.

    Raises:
        ConfigError: A parameter is unknown, or a value is refused.
    """
    known = [f.name for f in fields(factory)] if is_dataclass(factory) else None
    for key in settings:
        if known is not None and key not in known:
            raise ConfigError(f"policy {name} has no parameter {key!r}; it has: {', '.join(known)}")
    return factory(**settings)
