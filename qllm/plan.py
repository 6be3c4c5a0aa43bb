"""Plan and program: what a policy asks for, and the flat list of ops a runner executes.

A policy returns a `Plan`: rows (token and layer ranges of requests), a grain, and when to
stop. `qllm.compile` turns it into a `Program`: ops in order, each on a fixed row set. A
runner executes `run(program, start, stop) -> Index`, the first op it has not done. Nothing
here touches a tensor, so the same program drives every runner.

    rows    A [0, 6) layers [0, 3)      B [4, 5) layers [0, 3)      C [0, 9) layers [1, 3)
    ops     EMBED AB | layer 0: ATTN AB, ROUTE AB, EXPERTS AB, COMBINE AB
                     | layer 1: ATTN ABC, ROUTE ABC, EXPERTS ABC, COMBINE ABC | ... | HEAD ABC
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, overload

from qllm.types import FrameId, Grain, RequestId, Sampled, SamplingParams

NO_STOP = -(2**31)
"""A stop threshold that no arrival reaches."""
ANY_ARRIVAL = 2**31 - 1
"""A stop threshold that every arrival reaches; the stop word rests on it."""


class Row(NamedTuple):
    """Tokens [lo, hi) of one request, through layers [start_layer, end_layer)."""

    request_id: RequestId
    lo: int
    hi: int
    start_layer: int
    end_layer: int

    @property
    def num_tokens(self) -> int:
        """Tokens of this row."""
        return self.hi - self.lo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a policy wants next. The order of `rows` is the order of rank, best first.

    If the rows are exactly the rows of one parked frame, that frame is resumed unchanged
    (L0). If they contain some rows of a parked frame, they must contain all of its live rows:
    the frame is replaced, first finishing the layer it is parked in.
    """

    rows: tuple[Row, ...] = ()
    grain: Grain = Grain.STEP
    """Which boundaries may stop it."""
    stop_below: int = NO_STOP
    """Stop for a newly arrived request whose priority is smaller than this."""
    slice_ns: int | None = None
    """Stop after this long; None is no limit. Binds at the boundaries that `grain` allows."""
    wait_until_ns: int | None = None
    """With no rows: idle on purpose until then, or until something arrives."""
    drop: tuple[RequestId, ...] = ()
    """Requests to evict (recompute) before the rows run."""


class OpKind(enum.IntEnum):
    """What an op does to its rows. The residual stream x_TD is the state between layers."""

    EMBED = 0
    """Token ids -> x. First op of rows that start at layer 0."""
    ATTN = 1
    """x += attention(norm(x)); writes KV at the rows' positions."""
    ROUTE = 2
    """norm(x) -> top-k expert ids and weights, sorted work units; shared experts."""
    EXPERTS = 3
    """Work units of the layer, one (expert, row block) each, into output slots."""
    COMBINE = 4
    """x += weighted sum of the slots (a dense layer: x += mlp(norm(x)))."""
    HEAD = 5
    """Last norm, logits and sampling for the rows that complete their known tokens."""


class Op(NamedTuple):
    """One op. `lo` and `hi` are tokens [lo, hi) in the packed order of its group."""

    kind: OpKind
    layer: int
    """Layer index; 0 for EMBED, the number of layers for HEAD."""
    group: int
    """Index into `Program.groups`."""
    lo: int
    hi: int


class Stretch(NamedTuple):
    """The same ops in each of the layers [start, end)."""

    start: int
    end: int
    group: int
    parts: tuple[tuple[OpKind, Sequence[tuple[int, int]]], ...]
    """The kinds of ops of one layer in order, each with the token ranges it is cut into."""

    @property
    def num_ops(self) -> int:
        """Ops of one layer."""
        return sum([len(spans) for _, spans in self.parts])

    def in_layer(self, layer: int) -> tuple[Op, ...]:
        """Spell out one of its layers."""
        group = self.group
        return tuple(
            [Op(kind, layer, group, lo, hi) for kind, spans in self.parts for lo, hi in spans]
        )


class Ops(Sequence[Op]):
    """The ops of a program in order: a sequence that knows what repeats layer by layer.

    A sweep over 48 layers is thousands of ops and a few stretches, so it is made and kept as
    stretches, and a layer is spelled out when it is looked at.
    """

    __slots__ = ("_ends", "_seen", "stretches")

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)
        self._ends = list(accumulate(s.num_ops * (s.end - s.start) for s in stretches))
        """Per stretch, the index after its last op."""
        self._seen: tuple[int, int, tuple[Op, ...]] = (0, 0, ())
        """The layer looked at last: the indexes it spans, and its ops."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, index: int | slice) -> Op | tuple[Op, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        first, end, ops = self._seen
        if not first <= index < end:
            first, _, ops = self._seen = self._layer_of(index + len(self) if index < 0 else index)
            index = index + len(self) if index < 0 else index
        return ops[index - first]

    def stretch_of(self, index: int) -> tuple[Stretch, int]:
        """The stretch that an op lies in, and the index of the stretch's first op."""
        if not 0 <= index < len(self):
            raise IndexError(f"op {index} of {len(self)}")
        at = bisect_right(self._ends, index)
        return self.stretches[at], self._ends[at - 1] if at else 0

    def _layer_of(self, index: int) -> tuple[int, int, tuple[Op, ...]]:
        stretch, begin = self.stretch_of(index)
        num = stretch.num_ops
        nth = (index - begin) // num
        first = begin + nth * num
        return first, first + num, stretch.in_layer(stretch.start + nth)

    def __iter__(self) -> Iterator[Op]:
        for stretch in self.stretches:
            for layer in range(stretch.start, stretch.end):
                yield from stretch.in_layer(layer)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ops) and self.stretches == other.stretches:
            return True
        return isinstance(other, Ops | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Ops({self.stretches!r})"


class Index(NamedTuple):
    """A boundary: the first op not done, and how many of its work units are done."""

    op: int = 0
    pos: int = 0


START = Index(0, 0)


class ModelShape(NamedTuple):
    """What a program depends on of a model: never a tensor."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    is_moe: tuple[bool, ...]
    """Per layer: has a router and experts."""
    vocab_size: int
    max_position: int
    """Longest sequence the model was made for."""
    recompute_above: int | None = None
    """Tokens: KV of a sequence up to that long is of no use once it is longer (`models.rope`)."""


class CutRule(NamedTuple):
    """Where ops are cut by rows, as a pure function of absolute positions.

    A row's tokens are divided into blocks at multiples of `block(position)`; consecutive
    blocks are packed into one op while the op stays within `max_cost`. Costs are in
    units of one token through the projections of a layer: the tokens [lo, hi) cost
    `(hi - lo) * (1 + attn_cost_per_kv * hi)`.
    """

    max_cost: float
    """Most cost per op; infinity never cuts."""
    attn_cost_per_kv: float
    """Cost of attending from one token to one cached token."""
    min_block: int = 16
    max_block: int = 512
    glue_block: int = 1024
    """Most tokens of a ROUTE or COMBINE op."""
    dense_block: int = 1024
    """Most tokens of the COMBINE op of a layer without experts, which runs its MLP."""
    expert_block: int = 1024
    """Most rows of one expert work unit."""

    def block(self, position: int) -> int:
        """Tokens of the block at `position`: a power of two that `max_cost` allows."""
        size = self.max_block
        while size > self.min_block:
            start = position // size * size
            if size * (1.0 + self.attn_cost_per_kv * (start + size)) <= self.max_cost:
                break
            size //= 2
        return size

    def priced(self, lo: int, hi: int) -> tuple[int, float]:
        """How many the tokens [lo, hi) are, and what they cost."""
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


@dataclass(frozen=True, kw_only=True)
class Program:
    """Ops in order over fixed row sets; what travels together is a frame.

    `rows` are packed in plan order: row r owns tokens [offsets[r], offsets[r + 1]) of x_TD.
    """

    frame_id: FrameId
    rows: tuple[Row, ...]
    groups: tuple[tuple[int, ...], ...]
    """Row sets; an op runs on the rows of its group, packed in this order."""
    ops: Sequence[Op]
    grain: Grain
    stop_below: int
    samples: tuple[bool, ...]
    """Per row: whether its last token completes what is known, so that a token is sampled."""
    num_layers: int
    row_blocks: tuple[tuple[int, ...], ...] = field(default=())
    """Per row: absolute positions where its queries are cut, `lo` and `hi` included."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each row in the packed order, and the total T at the end."""
        out = [0]
        for row in self.rows:
            out.append(out[-1] + row.num_tokens)
        return tuple(out)

    @property
    def num_tokens(self) -> int:
        """T: tokens of all rows."""
        return self.offsets[-1]

    @cached_property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests of the rows, in row order."""
        return tuple(row.request_id for row in self.rows)

    def tokens_of(self, kind: OpKind) -> int:
        """Tokens of all ops of a kind, layer by layer."""
        if not isinstance(self.ops, Ops):
            return sum(op.hi - op.lo for op in self.ops if op.kind is kind)
        return sum(
            (stretch.end - stretch.start) * (hi - lo)
            for stretch in self.ops.stretches
            for found, spans in stretch.parts
            if found is kind
            for lo, hi in spans
        )

    @property
    def end(self) -> Index:
        """The index at which nothing is left to do."""
        return Index(len(self.ops), 0)

    def until(self, index: Index) -> "Program":
        """The same frame, its ops only up to a boundary between layers."""
        return replace(self, ops=self.ops[: index.op])

    def layer_at(self, index: Index) -> int:
        """First layer not finished at `index` (the number of layers when only HEAD is left)."""
        return self.ops[index.op].layer if index.op < len(self.ops) else self.num_layers

    def inside_layer(self, index: Index) -> bool:
        """Whether a layer is begun and not finished at `index`."""
        if index.op >= len(self.ops):
            return False
        if index.pos:
            return True
        op = self.ops[index.op]
        if op.kind in (OpKind.EMBED, OpKind.HEAD):
            return False
        return op.kind is not OpKind.ATTN or op.lo > 0

    def layer_end(self, index: Index) -> Index:
        """The first boundary between layers at or after `index`."""
        op = index.op
        if not self.inside_layer(index):
            return index
        layer = self.ops[op].layer
        while op < len(self.ops) and self.ops[op].layer == layer:
            op += 1
        return Index(op, 0)

    def layer_start(self, index: Index) -> Index:
        """The last boundary between layers at or before `index`."""
        op = index.op
        if not self.inside_layer(index):
            return index
        layer = self.ops[op].layer
        while op and self.ops[op - 1].layer == layer and self.ops[op - 1].kind is not OpKind.EMBED:
            op -= 1
        return Index(op, 0)

    def rows_between(self, start: Index, stop: Index) -> list[Row]:
        """The rows of the ops from `start` to `stop`, a begun op included."""
        last = stop.op if stop.pos else stop.op - 1
        if last < start.op:
            return []
        low, high = self.ops[start.op].layer, self.ops[last].layer
        return [
            row
            for row, sampled in zip(self.rows, self.samples, strict=True)
            if row.start_layer <= high
            and (row.end_layer > low or (sampled and row.end_layer == low))
        ]

    def frontier_layer(self, row: int, index: Index) -> int:
        """First layer that row number `row` still owes at `index`."""
        r = self.rows[row]
        if index == START:
            return r.start_layer
        return min(max(self.layer_at(index), r.start_layer), r.end_layer)


class Watch(NamedTuple):
    """A 64-bit word that changes when a stop word may have gone down."""

    address: int
    seen: int
    """While the word is this, the stop word is what it was at the next reading of it."""


class Stop(Protocol):
    """What a runner polls at a boundary. Reading `word` is one load.

    A stop on the monotonic clock may have a method `watch() -> Watch`, for code that polls without
    Python: it reads `watch()`, then `word`, and looks again when the watched word has changed.
    """

    stop_at_ns: int | None
    """Engine time at which a slice ends."""

    @property
    def word(self) -> int:
        """Smallest priority among requests that arrived and were not yet seen by the scheduler."""
        ...

    def now_ns(self) -> int:
        """The engine's clock, read only when a slice was given."""
        ...


class Segments(Protocol):
    """Lengths of the work between boundaries, as the runner saw them."""

    longest_ns: int
    longest_op: OpKind | None


@dataclass(slots=True)
class Longest:
    """The longest segment so far: what most runners keep as `Segments`."""

    longest_ns: int = 0
    longest_op: OpKind | None = None


class Runner(Protocol):
    """Executes programs. All tensors live here; the engine keeps (program, index) pairs.

    The runner mirrors, per request, the token ids and how far KV is committed. It is called
    from one thread.
    """

    shape: ModelShape
    cuts: CutRule
    segments: Segments

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request. `token_ids` may hold output already (a restored request)."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is in no frame, and free its KV."""
        ...

    def evict(self, request_id: RequestId) -> None:
        """Free the KV of a request that is in no frame; its tokens stay."""
        ...

    def accept(self, program: Program) -> None:
        """Make the frame of a program.

        Rows that start above layer 0 continue from the hidden states that `split` or `finish`
        kept for their request.
        """
        ...

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Execute ops from `start` until done or stopped; return the first op not done.

        It polls at the boundaries that `program.grain` allows, *after* doing at least one op or
        unit, and stops if `stop.word < program.stop_below` or `stop.stop_at_ns` has passed.
        An exception leaves the frame unusable: `drop` it.
        """
        ...

    def finish(self, program: Program) -> list[Sampled]:
        """Commit a program that ran to its end and let go of its frame.

        Rows that reached the last layer commit their KV up to `hi`, and sampled tokens are
        appended to the request's ids; rows that left earlier keep their hidden states.
        """
        ...

    def split(self, program: Program, index: Index) -> None:
        """Let go of a frame parked between layers; each live row keeps its hidden states."""
        ...

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row of a parked frame dead: it is skipped from now on and samples nothing."""
        ...

    def drop(self, program: Program) -> None:
        """Let go of a frame without committing anything. Unknown frames are ignored."""
        ...
