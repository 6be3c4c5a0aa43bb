"""Program: a plan as ops in order, each on a fixed set of rows.

A runner executes `run(program, start, stop) -> Index` and returns the first op that is not done. A
program has no tensors, so the same program runs on every runner.

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
from typing import NamedTuple, overload

from qllm.plan import Row
from qllm.types import FrameId, Grain, RequestId


class OpKind(enum.IntEnum):
    """Kind of an op. The residual stream x_TD is the state of an op's rows between layers."""

    EMBED = 0
    """Token ids -> x. It is the first op of rows that start at layer 0."""
    ATTN = 1
    """x += attention(norm(x)); writes KV at the rows' positions."""
    ROUTE = 2
    """norm(x) -> top-k expert ids and weights, sorted work units; shared experts."""
    EXPERTS = 3
    """Work units of the layer, one (expert, row block) each, into output slots."""
    COMBINE = 4
    """x += weighted sum of the slots (a dense layer: x += mlp(norm(x)))."""
    HEAD = 5
    """Last norm, logits and sampling for the rows that reach their last known token, and for draft
    rows, which end at an earlier layer."""


class Op(NamedTuple):
    """One op over the tokens [lo, hi) in the packed order of the op's group."""

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
    """The kinds of ops of one layer in order, each with the token ranges into which it is cut."""

    @property
    def num_ops(self) -> int:
        """Number of ops of one layer."""
        return sum([len(spans) for _, spans in self.parts])

    def in_layer(self, layer: int) -> tuple[Op, ...]:
        """Return the ops of one layer of the stretch."""
        group = self.group
        return tuple(
            [Op(kind, layer, group, lo, hi) for kind, spans in self.parts for lo, hi in spans]
        )


class Ops(Sequence[Op]):
    """The ops of a program in order: a sequence that stores repeated layers once.

    A program over 48 layers has thousands of ops and a few stretches. So this class stores
    stretches, and makes the ops of a layer when they are read.
    """

    __slots__ = ("_ends", "_seen", "stretches")

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)
        self._ends = list(accumulate(s.num_ops * (s.end - s.start) for s in stretches))
        """Per stretch, the index after the stretch's last op."""
        self._seen: tuple[int, int, tuple[Op, ...]] = (0, 0, ())
        """The layer that was read last: its first index, the index after its end, and its ops."""

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
        """Return the stretch that contains an op, and the index of the stretch's first op."""
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
    """A boundary: the first op that is not done, and the number of its work units that are done."""

    op: int = 0
    pos: int = 0


START = Index(0, 0)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Ops in order over fixed sets of rows. The rows of a program are a frame.

    `rows` are packed in plan order: row r owns tokens [offsets[r], offsets[r + 1]) of x_TD.
    """

    frame_id: FrameId
    rows: tuple[Row, ...]
    groups: tuple[tuple[int, ...], ...]
    """Sets of rows. An op runs on the rows of its group, packed in this order."""
    ops: Sequence[Op]
    grain: Grain
    stop_below: int
    samples: tuple[int, ...]
    """Per row: number of last positions at which a token is sampled. It is 0 if the row ends before
    the last known token, and 1 + d if the row verifies d drafted tokens. A draft row has 1 if it
    chooses a token, and 0 if no row verifies such a token."""
    num_layers: int
    exits: tuple[int, ...] = ()
    """Numbers of the draft rows. They end before the last layer, and their hidden states are added
    to those of the draft rows before them. HEAD takes those that sample."""
    row_blocks: tuple[tuple[int, ...], ...] = field(default=())
    """Per row: absolute positions where the row's queries are cut, including `lo` and `hi`."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each row in the packed order, and the total T at the end."""
        return (0, *accumulate([hi - lo for _, lo, hi, _, _ in self.rows]))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows, T."""
        return self.offsets[-1]

    @cached_property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests of the rows, in row order."""
        return tuple(row.request_id for row in self.rows)

    @cached_property
    def choosing_drafts(self) -> frozenset[RequestId]:
        """The requests whose draft rows choose a token in HEAD."""
        return frozenset([self.rows[r].request_id for r in self.exits if self.samples[r]])

    def tokens_of(self, kind: OpKind) -> int:
        """Return the number of tokens of all ops of a kind, summed over layers."""
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
        """Return a program of the same frame with the ops up to a boundary between layers."""
        return replace(self, ops=self.ops[: index.op])

    def layer_at(self, index: Index) -> int:
        """Return the first unfinished layer at `index`; `num_layers` if only HEAD is left."""
        return self.ops[index.op].layer if index.op < len(self.ops) else self.num_layers

    def inside_layer(self, index: Index) -> bool:
        """Return True if a layer is begun and not finished at `index`."""
        if index.op >= len(self.ops):
            return False
        if index.pos:
            return True
        op = self.ops[index.op]
        if op.kind in (OpKind.EMBED, OpKind.HEAD):
            return False
        return op.kind is not OpKind.ATTN or op.lo > 0

    def layer_end(self, index: Index) -> Index:
        """Return the first boundary between layers at or after `index`."""
        op = index.op
        if not self.inside_layer(index):
            return index
        layer = self.ops[op].layer
        while op < len(self.ops) and self.ops[op].layer == layer:
            op += 1
        return Index(op, 0)

    def layer_start(self, index: Index) -> Index:
        """Return the last boundary between layers at or before `index`."""
        op = index.op
        if not self.inside_layer(index):
            return index
        layer = self.ops[op].layer
        while op and self.ops[op - 1].layer == layer and self.ops[op - 1].kind is not OpKind.EMBED:
            op -= 1
        return Index(op, 0)

    def rows_between(self, start: Index, stop: Index) -> list[Row]:
        """Return the rows of the ops from `start` to `stop`, including a begun op."""
        if start == START and stop == self.end:
            return list(self.rows)
        last = stop.op if stop.pos else stop.op - 1
        if last < start.op:
            return []
        low, high = self.ops[start.op].layer, self.ops[last].layer
        return [
            row
            for row, sampled in zip(self.rows, self.samples, strict=True)
            if row.start_layer <= high
            and (row.end_layer > low or (sampled and low == self.num_layers))
        ]

    def frontier_layer(self, row: int, index: Index) -> int:
        """Return the first layer that row number `row` still has to run at `index`."""
        r = self.rows[row]
        if index == START:
            return r.start_layer
        return min(max(self.layer_at(index), r.start_layer), r.end_layer)
