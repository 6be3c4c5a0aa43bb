"""Times of programs: the costs of ops, and the time at which a program reaches each boundary.

The module only computes times. `qllm.sim.runner` moves a clock by these times, and
`qllm.sim.calibrate` fits the constants.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from qllm.errors import InvariantError
from qllm.plan import ModelShape
from qllm.scheduler.program import START, Index, Op, OpKind, Ops, Program, Stretch
from qllm.types import Grain


@lru_cache(maxsize=64)
def hit_rates(num_experts: int, top_k: int, skew: float) -> tuple[float, ...]:
    """Return the probability of each expert that one token uses it. Their sum is `top_k`.

    The probability is proportional to 1 / (place + 1) ** skew, but a token uses an expert at most
    once.
    """
    weights = [(place + 1) ** -skew for place in range(num_experts)]
    sure = 0
    while sure < top_k and weights[sure] * (top_k - sure) > sum(weights[sure:]):
        sure += 1
    scale = (top_k - sure) / sum(weights[sure:]) if sure < num_experts else 0.0
    return tuple(1.0 if i < sure else scale * w for i, w in enumerate(weights))


@lru_cache(maxsize=65536)
def expert_coverage(num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0) -> float:
    """Return the expected number of distinct experts that `num_tokens` tokens use.

    An expert is loaded once per EXPERTS op, however many rows use it. So this is the number of
    experts whose weights are read. Tokens choose independently of each other.

    Args:
        num_tokens: Tokens of the op.
        num_experts: E.
        top_k: K, distinct experts per token.
        skew: Exponent of the popularity of experts; 0 is uniform routing, where the curve is
            E * (1 - (1 - K / E) ** num_tokens).
    """
    rates = hit_rates(num_experts, top_k, skew)
    return sum(1.0 - (1.0 - rate) ** num_tokens for rate in rates)


class Work(NamedTuple):
    """The work of an op, in the units on which its time depends."""

    tokens: int
    rows: int
    """Rows of the op, whole or in part."""
    kv_tokens: int
    """Cached tokens that rows of one token read."""
    pairs: int
    """Pairs of a query and a token at or before it, in the longer rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    """Times of ops in nanoseconds. The fields of one kind are added.

    A plain `*_ns` counts once per op, for reading the op's weights. `*_token_ns` and `*_row_ns`
    count for computing with these weights. `qllm calibrate` fits the fields, or a preset sets them.
    """

    overlap: bool = False
    """True if reading and computing overlap, as on a GPU, so that the longer time counts. Otherwise
    both times are added."""
    op_ns: float = 20_000
    """Time of every op, in addition to its work."""
    task_ns: float = 0
    """Time between two polls inside an op. With 0 a program stops only between ops and experts."""
    embed_ns: float = 0
    embed_token_ns: float = 1_250
    attn_ns: float = 0
    attn_token_ns: float = 5_000
    attn_row_ns: float = 0
    kv_token_ns: float = 2
    """Time to read one cached token for a row of one token."""
    pair_ns: float = 2
    """Time of one query against one token, in longer rows."""
    route_ns: float = 0
    """Time of routing, shared experts included."""
    route_token_ns: float = 1_250
    experts_ns: float = 0
    expert_ns: float = 100_000
    """Time to read one expert."""
    expert_token_ns: float = 1_000
    """Time of one token in one of its experts."""
    combine_ns: float = 0
    combine_token_ns: float = 1_250
    dense_ns: float = 0
    """Time of the COMBINE op of a layer without experts, which runs its MLP."""
    dense_token_ns: float = 1_250
    head_ns: float = 1_000_000
    head_row_ns: float = 0
    step_ns: float = 0
    """Time between two runs: deciding, making the frame, sending the tokens."""
    step_row_ns: float = 0
    move_token_ns: float = 0
    """Time to move one token's KV out of its blocks, or back. It is 0 if KV stays, as on a CPU."""
    out_token_ns: float = 0
    """Time to copy one token's KV out over a link, beside computation; 0 without a link."""
    in_token_ns: float = 0
    """Time to copy one token's KV back. Copies out and copies back run at the same time."""
    skew: float = 0.0
    """Skew of the experts' popularity; see `expert_coverage`."""

    @property
    def swap_token_ns(self) -> float:
        """Return the time until one token's KV is out, or back; the slower direction counts."""
        return self.move_token_ns + max(self.out_token_ns, self.in_token_ns)

    def distinct_experts(self, num_tokens: int, shape: ModelShape) -> int:
        """Return the number of experts that an EXPERTS op loads, each a boundary inside the op."""
        covered = expert_coverage(num_tokens, shape.num_experts, shape.experts_per_token, self.skew)
        return max(1, round(covered))

    def of(self, kind: OpKind, work: Work, shape: ModelShape, *, is_moe: bool) -> float:
        """Return the time of one op."""
        tokens = work.tokens
        match kind:
            case OpKind.ATTN:
                return (
                    self._both(self.attn_ns, tokens * self.attn_token_ns)
                    + work.rows * self.attn_row_ns
                    + work.kv_tokens * self.kv_token_ns
                    + work.pairs * self.pair_ns
                )
            case OpKind.EXPERTS:
                rows = tokens * shape.experts_per_token
                covered = expert_coverage(
                    tokens, shape.num_experts, shape.experts_per_token, self.skew
                )
                return self.experts_ns + self._both(
                    covered * self.expert_ns, rows * self.expert_token_ns
                )
            case OpKind.ROUTE:
                return self._both(self.route_ns, tokens * self.route_token_ns)
            case OpKind.COMBINE if is_moe:
                return self._both(self.combine_ns, tokens * self.combine_token_ns)
            case OpKind.COMBINE:
                return self._both(self.dense_ns, tokens * self.dense_token_ns)
            case OpKind.HEAD:
                return self._both(self.head_ns, work.rows * self.head_row_ns)
            case _:
                return self._both(self.embed_ns, tokens * self.embed_token_ns)

    def _both(self, read_ns: float, compute_ns: float) -> float:
        return max(read_ns, compute_ns) if self.overlap else read_ns + compute_ns


def work_of(program: Program, group: int, lo: int, hi: int, kind: OpKind) -> Work:
    """Return the work of an op on the tokens [lo, hi) of a group's packed rows."""
    members = program.groups[group]
    if kind is not OpKind.ATTN:
        return Work(hi - lo, len(members), 0, 0)
    at = num_rows = kv_tokens = pairs = 0
    for r in members:
        _, begin, end, _, _ = program.rows[r]
        if at >= hi:
            break
        num = end - begin
        if at + num > lo:
            num_rows += 1
            if num == 1:
                kv_tokens += end
            else:
                first, last = begin + max(0, lo - at), begin + min(num, hi - at)
                pairs += (last - first) * (first + last + 1) // 2
        at += num
    return Work(hi - lo, num_rows, kv_tokens, pairs)


class Gathers(NamedTuple):
    """Times at which ranks wait for each other, and the bytes that all of them write before."""

    num: int
    num_bytes: int

    def plus(self, other: "Gathers", times: int = 1) -> "Gathers":
        """Return the sum of these and of some times others."""
        return Gathers(self.num + times * other.num, self.num_bytes + times * other.num_bytes)


NO_GATHERS = Gathers(0, 0)


class Price(NamedTuple):
    """The price of an op."""

    units: int
    """Number of boundaries to the end of the op."""
    unit_ns: int
    """Time between two of them."""
    gathers: Gathers


class Prices:
    """Prices of ops under one cost model, cached for the sizes seen."""

    def __init__(self, costs: SimCosts, shape: ModelShape) -> None:
        self._costs = costs
        self._shape = shape
        self._known: dict[tuple[OpKind, int, int, bool], Price] = {}

    def of(self, program: Program, op: Op) -> Price:
        """Return the price of an op."""
        kind, layer, group, lo, hi = op
        is_moe = kind is not OpKind.HEAD and self._shape.is_moe[layer]
        if kind is OpKind.ATTN:
            return self._price(kind, work_of(program, group, lo, hi, kind), is_moe)
        num_rows = len(program.groups[group])
        key = kind, hi - lo, num_rows, is_moe
        price = self._known.get(key)
        if price is None:
            price = self._known[key] = self._price(kind, Work(hi - lo, num_rows, 0, 0), is_moe)
        return price

    def gathers(self, kind: OpKind, work: Work, is_moe: bool) -> Gathers:
        """Return the gathers of an op: none in one process."""
        return NO_GATHERS

    def _time(self, kind: OpKind, work: Work, is_moe: bool) -> float:
        """Return the nanoseconds of an op's work."""
        return self._costs.of(kind, work, self._shape, is_moe=is_moe)

    def _price(self, kind: OpKind, work: Work, is_moe: bool) -> Price:
        costs, shape = self._costs, self._shape
        total_ns = costs.op_ns + self._time(kind, work, is_moe)
        units = costs.distinct_experts(work.tokens, shape) if kind is OpKind.EXPERTS else 1
        if costs.task_ns and kind not in (OpKind.EMBED, OpKind.EXPERTS):
            units = max(1, round(total_ns / costs.task_ns))
        unit_ns = max(1, round(total_ns / units))
        return Price(units, unit_ns, self.gathers(kind, work, is_moe))


class _Part(NamedTuple):
    """A stretch of neighbouring layers with the same ops and times."""

    first_op: int
    begin_ns: int
    loads: int
    """Experts read before the stretch."""
    ops: tuple[Op, ...]
    """Ops of one layer of the stretch."""
    units: tuple[int, ...]
    """Number of boundaries to the end of each op of a layer."""
    unit_ns: tuple[int, ...]
    """Time of one unit of each op of a layer."""
    ends_ns: tuple[int, ...]
    """End of each op, as the time since the start of the op's layer."""
    layer_loads: int
    """Experts read by one layer of the stretch."""
    before: Gathers
    """Gathers before the stretch."""
    gathers: tuple[Gathers, ...]
    """Gathers from the start of a layer to the end of each of its ops."""
    start: int
    """First layer of the stretch."""
    num_layers: int

    @property
    def end_op(self) -> int:
        return self.first_op + self.num_layers * len(self.ops)

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.num_layers * self.ends_ns[-1]


class Layers(NamedTuple):
    """Whole layers that a group of rows finished."""

    group: int
    first: int
    num_layers: int


class Timeline:
    """Times after the start of a program at which it reaches its boundaries.

    Neighbouring layers with the same ops are one stretch of the program. So the time of making a
    timeline depends on rows and cuts, not on layers.
    """

    __slots__ = ("_end_ops", "_ends_ns", "_parts", "gathers", "loads", "num_ops", "total_ns")

    def __init__(self, program: Program, prices: Prices) -> None:
        if not isinstance(program.ops, Ops):
            raise InvariantError("a timeline is made of a whole program")
        parts: list[_Part] = []
        op = at_ns = loads = 0
        gathers = NO_GATHERS
        for stretch in program.ops.stretches:
            part = _part(program, stretch, prices, op, at_ns, loads, gathers)
            op, at_ns = part.end_op, part.end_ns
            loads += part.layer_loads * part.num_layers
            gathers = gathers.plus(part.gathers[-1], part.num_layers)
            parts.append(part)
        self._parts = parts
        self._end_ops = [part.end_op for part in parts]
        self._ends_ns = [part.end_ns for part in parts]
        self.num_ops = op
        self.total_ns = at_ns
        """End of the program."""
        self.loads = loads
        """Experts read by the whole program."""
        self.gathers = gathers
        """Gathers of the whole program."""

    def _find(self, op: int) -> tuple[_Part, int, int]:
        """Return the stretch of an op, its layer in the stretch, and its place in the layer."""
        part = self._parts[bisect_right(self._end_ops, op)]
        layer, place = divmod(op - part.first_op, len(part.ops))
        return part, layer, place

    def at(self, index: Index) -> int:
        """Return the time at which the program reaches a boundary."""
        if index.op >= self.num_ops:
            return self.total_ns
        part, layer, place = self._find(index.op)
        begin_ns = part.begin_ns + layer * part.ends_ns[-1]
        begin_ns += part.ends_ns[place - 1] if place else 0
        return begin_ns + index.pos * part.unit_ns[place]

    def loads_at(self, index: Index) -> int:
        """Return the number of experts read up to this boundary."""
        if index.op >= self.num_ops:
            return self.loads
        part, layer, place = self._find(index.op)
        inside = index.pos if part.ops[place].kind is OpKind.EXPERTS else 0
        return part.loads + layer * part.layer_loads + _loads(part, place) + inside

    def gathers_at(self, index: Index) -> Gathers:
        """Return the gathers of the ops that end up to this boundary."""
        if index.op >= self.num_ops:
            return self.gathers
        part, layer, place = self._find(index.op)
        found = part.before.plus(part.gathers[-1], layer)
        return found.plus(part.gathers[place - 1]) if place else found

    def units_of(self, op: int) -> int:
        """Return the number of boundaries to the end of an op."""
        part, _, place = self._find(op)
        return part.units[place]

    def following(self, index: Index) -> Index:
        """Return the next boundary of any grain."""
        part, _, place = self._find(index.op)
        if index.pos + 1 < part.units[place]:
            return Index(index.op, index.pos + 1)
        return Index(index.op + 1, 0)

    def first_stop(self, at_ns: int, after: Index, grain: Grain) -> Index:
        """Return the first boundary after `after` that `grain` allows, reached at `at_ns` or later.

        Without one, return the end of the program.
        """
        found = max(self._reached(at_ns), self.following(after))
        return found if grain is Grain.EXPERT else self._between_layers(found)

    def _reached(self, at_ns: int) -> Index:
        if at_ns > self.total_ns:
            return Index(self.num_ops, 0)
        if at_ns <= 0:
            return START
        part = self._parts[bisect_left(self._ends_ns, at_ns)]
        layer = (at_ns - part.begin_ns) // part.ends_ns[-1]
        left_ns = at_ns - part.begin_ns - layer * part.ends_ns[-1]
        place = bisect_left(part.ends_ns, left_ns)
        left_ns -= part.ends_ns[place - 1] if place else 0
        pos = -(-left_ns // part.unit_ns[place])
        op = part.first_op + layer * len(part.ops) + place
        return Index(op, pos) if pos < part.units[place] else Index(op + 1, 0)

    def _between_layers(self, index: Index) -> Index:
        if index.op >= self.num_ops:
            return index
        part, layer, place = self._find(index.op)
        if place == 0 and index.pos == 0:
            return index
        return Index(part.first_op + (layer + 1) * len(part.ops), 0)

    def longest(self, start: Index, end: Index) -> tuple[int, OpKind]:
        """Return the longest unit between two boundaries, and the kind of its op."""
        last = end.op if end.pos else end.op - 1
        found = []
        for part in self._parts:
            low, high = max(start.op, part.first_op), min(last, part.end_op - 1)
            num = min(high - low + 1, len(part.ops))
            for op in range(low, low + num):
                place = (op - part.first_op) % len(part.ops)
                found.append((part.unit_ns[place], part.ops[place].kind))
        return max(found)

    def layers(self, start: Index, end: Index) -> list[Layers]:
        """Return the layers that end between two boundaries."""
        found = []
        for part in self._parts:
            num = len(part.ops)
            done = [
                (min(max(op, part.first_op), part.end_op) - part.first_op) // num
                for op in (start.op, end.op)
            ]
            if part.ops[-1].kind is OpKind.COMBINE and done[1] > done[0]:
                found.append(Layers(part.ops[0].group, part.start + done[0], done[1] - done[0]))
        return found


def _loads(part: _Part, place: int) -> int:
    """Return the number of experts read by the ops of a layer before one of its ops."""
    pairs = zip(part.ops[:place], part.units, strict=False)
    return sum(units for op, units in pairs if op.kind is OpKind.EXPERTS)


def _part(
    program: Program,
    stretch: Stretch,
    prices: Prices,
    first_op: int,
    begin_ns: int,
    loads: int,
    before: Gathers,
) -> _Part:
    ops = stretch.in_layer(stretch.start)
    units, unit_ns, gathers = zip(*(prices.of(program, op) for op in ops), strict=True)
    return _Part(
        first_op=first_op,
        begin_ns=begin_ns,
        loads=loads,
        ops=ops,
        units=units,
        unit_ns=unit_ns,
        ends_ns=tuple(accumulate(map(mul, units, unit_ns))),
        layer_loads=sum(
            num for op, num in zip(ops, units, strict=True) if op.kind is OpKind.EXPERTS
        ),
        before=before,
        gathers=tuple(accumulate(gathers, Gathers.plus)),
        start=stretch.start,
        num_layers=stretch.end - stretch.start,
    )
