"""How long programs take: costs of ops, and when each boundary of a program is reached.

Only arithmetic: `qllm.sim` moves a clock by it, and `qllm.simulation` fits its constants.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from operator import mul
from typing import NamedTuple

from qllm.errors import InvariantError
from qllm.plan import START, Index, ModelShape, Op, OpKind, Program
from qllm.types import Grain


@lru_cache(maxsize=64)
def _hit_rates(num_experts: int, top_k: int, skew: float) -> tuple[float, ...]:
    """Per expert the probability that one token takes it; their sum is `top_k`.

    Proportional to 1 / (place + 1) ** skew, but nobody is taken more than once.
    """
    weights = [(place + 1) ** -skew for place in range(num_experts)]
    sure = 0
    while sure < top_k and weights[sure] * (top_k - sure) > sum(weights[sure:]):
        sure += 1
    scale = (top_k - sure) / sum(weights[sure:]) if sure < num_experts else 0.0
    return tuple(1.0 if i < sure else scale * w for i, w in enumerate(weights))


@lru_cache(maxsize=65536)
def expert_coverage(num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0) -> float:
    """How many distinct experts `num_tokens` tokens are expected to take.

    An expert is loaded once per EXPERTS op, however many rows take it, so this is what weights
    are read for. Tokens choose independently of each other.

    Args:
        num_tokens: Tokens of the op.
        num_experts: E.
        top_k: K, distinct experts per token.
        skew: Exponent of the popularity of experts; 0 is uniform routing, where the curve is
            E * (1 - (1 - K / E) ** num_tokens).
    """
    rates = _hit_rates(num_experts, top_k, skew)
    return sum(1.0 - (1.0 - rate) ** num_tokens for rate in rates)


class Work(NamedTuple):
    """What an op does, in the units that its time depends on."""

    tokens: int
    rows: int
    """Rows of the op, whole or in part."""
    kv_tokens: int
    """Cached tokens that rows of one token read."""
    pairs: int
    """Pairs of a query and a token at or before it, in the longer rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    """Time of ops, in nanoseconds. The fields of one kind add up.

    `*_ns` alone is paid once per op and stands for reading its weights; `*_token_ns` and
    `*_row_ns` are computing with them. Fitted by `qllm calibrate`, or from a preset.
    """

    overlap: bool = False
    """Reading and computing go on at the same time and the longer one counts, as on a GPU;
    otherwise they add up."""
    op_ns: float = 20_000
    """Of every op."""
    embed_ns: float = 0
    embed_token_ns: float = 1_250
    attn_ns: float = 0
    attn_token_ns: float = 5_000
    attn_row_ns: float = 0
    kv_token_ns: float = 2
    """One cached token read for a row of one token."""
    pair_ns: float = 2
    """One query against one token, in longer rows."""
    route_ns: float = 0
    """Shared experts included."""
    route_token_ns: float = 1_250
    experts_ns: float = 0
    expert_ns: float = 100_000
    """Reading one expert."""
    expert_token_ns: float = 1_000
    """One token through one of its experts."""
    combine_ns: float = 0
    combine_token_ns: float = 1_250
    dense_ns: float = 0
    """The COMBINE op of a layer without experts, which runs its MLP."""
    dense_token_ns: float = 1_250
    head_ns: float = 1_000_000
    head_row_ns: float = 0
    step_ns: float = 0
    """Between two runs: deciding, making the frame, telling what came out."""
    step_row_ns: float = 0
    skew: float = 0.0
    """Of the experts' popularity; see `expert_coverage`."""

    def distinct_experts(self, num_tokens: int, shape: ModelShape) -> int:
        """Experts that an EXPERTS op loads: the boundaries inside it."""
        covered = expert_coverage(num_tokens, shape.num_experts, shape.experts_per_token, self.skew)
        return max(1, round(covered))

    def of(self, kind: OpKind, work: Work, shape: ModelShape, *, is_moe: bool) -> float:
        """Time of one op."""
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


class _Key(NamedTuple):
    """What ops have in common that take the same time."""

    kind: OpKind
    group: int
    lo: int
    hi: int
    is_moe: bool


class _Layout(NamedTuple):
    """The ops of a program without their rows: decode steps of one batch share it."""

    keys: tuple[_Key, ...]
    counts: tuple[int, ...]
    """Ops per key."""
    which: tuple[int, ...]
    """Per op, its key."""
    layer_starts: tuple[int, ...]
    """Ops at boundaries between layers."""
    spans: tuple[tuple[int, int, int], ...]
    """Group, first layer and number of layers of every stretch of layers."""


@lru_cache(maxsize=2048)
def _layout(ops: tuple[Op, ...], is_moe: tuple[bool, ...]) -> _Layout:
    places: dict[tuple[OpKind, int, int, int, bool], int] = {}
    which = []
    for op in ops:
        kind, layer, group, lo, hi = op
        key = kind, group, lo, hi, layer < len(is_moe) and is_moe[layer]
        which.append(places.setdefault(key, len(places)))
    between = (OpKind.EMBED, OpKind.HEAD)
    starts = (
        i
        for i, op in enumerate(ops)
        if op.kind in between or (op.kind is OpKind.ATTN and op.lo == 0)
    )
    return _Layout(
        keys=tuple(_Key(*key) for key in places),
        counts=tuple(which.count(place) for place in range(len(places))),
        which=tuple(which),
        layer_starts=tuple(starts),
        spans=finished_layers(ops, 0, len(ops)),
    )


def finished_layers(ops: Sequence[Op], start: int, end: int) -> tuple[tuple[int, int, int], ...]:
    """The layers that end in ops [start, end), as `_Layout.spans` has them."""
    combines = [op for op in ops[start:end] if op.kind is OpKind.COMBINE]
    spans = []
    for group, part in groupby(combines, key=lambda op: op.group):
        size = max(op.hi for op in ops if op.kind is OpKind.COMBINE and op.group == group)
        layers = [op.layer for op in part if op.hi == size]
        if layers and layers != list(range(layers[0], layers[0] + len(layers))):
            raise InvariantError(f"group {group} runs the layers {layers}")
        if layers:
            spans.append((group, layers[0], len(layers)))
    return tuple(spans)


class Timeline:
    """When, after the start of a program, each of its boundaries is reached."""

    def __init__(self, program: Program, costs: SimCosts, shape: ModelShape) -> None:
        self.layout = layout = _layout(program.ops, shape.is_moe)
        self.num_ops = len(program.ops)
        self._units: list[int] = []
        self._unit_ns: list[int] = []
        for key in layout.keys:
            work = work_of(program, key.group, key.lo, key.hi, key.kind)
            total_ns = costs.op_ns + costs.of(key.kind, work, shape, is_moe=key.is_moe)
            is_experts = key.kind is OpKind.EXPERTS
            units = costs.distinct_experts(work.tokens, shape) if is_experts else 1
            self._units.append(units)
            self._unit_ns.append(max(1, round(total_ns / units)))

    @cached_property
    def units(self) -> list[int]:
        """Per op, how many boundaries it takes to its end."""
        return [self._units[key] for key in self.layout.which]

    @cached_property
    def unit_ns(self) -> list[int]:
        """Per op, the time of each of its units."""
        return [self._unit_ns[key] for key in self.layout.which]

    @cached_property
    def ends_ns(self) -> list[int]:
        """Per op, when it ends."""
        return list(accumulate(map(mul, self.units, self.unit_ns)))

    @cached_property
    def loads(self) -> list[int]:
        """Experts read before each op, and by all ops at the end."""
        keys = self.layout.keys
        reads = [self._units[k] if keys[k].kind is OpKind.EXPERTS else 0 for k in self.layout.which]
        return [0, *accumulate(reads)]

    @cached_property
    def total_ns(self) -> int:
        """When the program ends."""
        return sum(map(mul, self.layout.counts, map(mul, self._units, self._unit_ns)))

    @cached_property
    def total_loads(self) -> int:
        """Experts read by the whole program."""
        found = zip(self.layout.keys, self.layout.counts, self._units, strict=True)
        return sum(c * u for key, c, u in found if key.kind is OpKind.EXPERTS)

    def longest(self, start: Index, end: Index) -> tuple[int, OpKind]:
        """The longest unit from one boundary to another, and its kind."""
        last = end.op + (end.pos > 0)
        keys = set(self.layout.which[start.op : last]) if last < self.num_ops or start.op else None
        best = max(keys or range(len(self._unit_ns)), key=self._unit_ns.__getitem__)
        return self._unit_ns[best], self.layout.keys[best].kind

    def at(self, index: Index) -> int:
        """When this boundary is reached."""
        if index == START:
            return 0
        if index.op == self.num_ops:
            return self.total_ns
        before = self.ends_ns[index.op - 1] if index.op else 0
        return before + index.pos * self.unit_ns[index.op]

    def loads_at(self, index: Index) -> int:
        """Experts read up to this boundary."""
        if index == START:
            return 0
        if index.op == self.num_ops:
            return self.total_loads
        return self.loads[index.op] + index.pos

    def following(self, index: Index) -> Index:
        """The next boundary of any grain."""
        op, pos = index
        return Index(op, pos + 1) if pos + 1 < self.units[op] else Index(op + 1, 0)

    def first_stop(self, at_ns: int, after: Index, grain: Grain) -> Index:
        """The first boundary after `after`, reached at `at_ns` or later, that `grain` allows.

        It may lie past the end.
        """
        if at_ns > self.total_ns:
            return Index(self.num_ops, 0)
        least = self.following(after)
        op = bisect_left(self.ends_ns, at_ns, lo=least.op)
        if op >= self.num_ops:
            return Index(op, 0)
        begun_ns = self.ends_ns[op - 1] if op else 0
        pos = max(0, -((begun_ns - at_ns) // self.unit_ns[op]))
        found = Index(op, pos) if pos < self.units[op] else Index(op + 1, 0)
        found = max(found, least)
        return found if grain is Grain.EXPERT else self._between_layers(found)

    def _between_layers(self, index: Index) -> Index:
        starts = self.layout.layer_starts
        place = bisect_left(starts, index.op + (index.pos > 0))
        return Index(starts[place] if place < len(starts) else self.num_ops, 0)


def work_of(program: Program, group: int, lo: int, hi: int, kind: OpKind) -> Work:
    """What the tokens [lo, hi) of a group's packed rows ask of an op."""
    members = program.groups[group]
    if kind is not OpKind.ATTN:
        return Work(hi - lo, len(members), 0, 0)
    at = num_rows = kv_tokens = pairs = 0
    for r in members:
        row = program.rows[r]
        first = row.lo + max(0, lo - at)
        last = row.lo + min(row.num_tokens, hi - at)
        at += row.num_tokens
        if first >= last:
            continue
        num_rows += 1
        if row.num_tokens == 1:
            kv_tokens += row.hi
        else:
            pairs += (last - first) * (first + last + 1) // 2
    return Work(hi - lo, num_rows, kv_tokens, pairs)
