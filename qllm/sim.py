"""A runner without tensors: the same programs on a virtual clock and a cost model.

It implements the `Runner` protocol whole, so the engine loop, the scheduler, the policies and
the block accounting that run here are the real ones. Tokens are made up from the request id and
the position; what a request computed is counted per layer and compared at the end (I1).

Boundaries at which nothing can happen are jumped: a run goes to the next arrival or to the end
of its slice, whichever is first, and from there to the first boundary where it may stop.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

from qllm.errors import InvariantError
from qllm.plan import (
    NO_CUTS,
    START,
    CutRule,
    Index,
    Longest,
    ModelShape,
    Op,
    OpKind,
    Program,
    Segments,
    Stop,
)
from qllm.types import Grain, RequestId, Sampled, SamplingParams


class VirtualClock:
    """Time that only moves when somebody says so."""

    def __init__(self) -> None:
        self.at_ns = 0

    def __call__(self) -> int:
        """Return the time."""
        return self.at_ns


class Arrivals(Protocol):
    """What happens in the simulated world beside the runner, at times known beforehand."""

    def next_ns(self) -> int | None:
        """When the next of it happens; None is never."""
        ...

    def arrive(self) -> None:
        """Let everything happen that is due by now."""
        ...


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
        covered = expert_coverage(
            num_tokens, shape.num_experts, shape.experts_per_token, self.skew
        )
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
                return tokens * self.embed_token_ns

    def _both(self, read_ns: float, compute_ns: float) -> float:
        return max(read_ns, compute_ns) if self.overlap else read_ns + compute_ns


class Timeline:
    """When, after the start of a program, each of its boundaries is reached."""

    __slots__ = ("_layer_starts", "ends_ns", "loads", "program", "unit_ns", "units")

    def __init__(self, program: Program, costs: SimCosts, shape: ModelShape) -> None:
        self.program = program
        known: dict[tuple[OpKind, int, int, int, bool], tuple[int, int]] = {}
        found: list[tuple[int, int]] = []
        is_moe = (*shape.is_moe, False)
        for kind, layer, group, lo, hi in program.ops:
            key = (kind, group, lo, hi, is_moe[layer])
            cost = known.get(key)
            if cost is None:
                work = work_of(program, group, lo, hi, kind)
                total_ns = costs.op_ns + costs.of(kind, work, shape, is_moe=is_moe[layer])
                units = costs.distinct_experts(hi - lo, shape) if kind is OpKind.EXPERTS else 1
                cost = known[key] = units, max(1, round(total_ns / units))
            found.append(cost)
        self.units = [units for units, _ in found]
        """Per op, how many boundaries it takes to its end."""
        self.unit_ns = [unit_ns for _, unit_ns in found]
        self.loads = [
            units if op.kind is OpKind.EXPERTS else 0
            for op, units in zip(program.ops, self.units, strict=True)
        ]
        """Per op, the experts it reads."""
        self.ends_ns = list(accumulate(units * unit_ns for units, unit_ns in found))
        self._layer_starts: list[int] | None = None

    def at(self, index: Index) -> int:
        """When this boundary is reached."""
        before = self.ends_ns[index.op - 1] if index.op else 0
        return before + index.pos * self.unit_ns[index.op] if index.pos else before

    def following(self, index: Index) -> Index:
        """The next boundary of any grain."""
        op, pos = index
        return Index(op, pos + 1) if pos + 1 < self.units[op] else Index(op + 1, 0)

    def first_stop(self, at_ns: int, after: Index, grain: Grain) -> Index:
        """The first boundary after `after`, reached at `at_ns` or later, that `grain` allows.

        It may lie past the end.
        """
        least = self.following(after)
        op = bisect_left(self.ends_ns, at_ns, lo=least.op)
        if op >= len(self.ends_ns):
            return Index(op, 0)
        begun_ns = self.ends_ns[op - 1] if op else 0
        pos = max(0, -((begun_ns - at_ns) // self.unit_ns[op]))
        found = Index(op, pos) if pos < self.units[op] else Index(op + 1, 0)
        found = max(found, least)
        return found if grain is Grain.EXPERT else self._between_layers(found)

    def _between_layers(self, index: Index) -> Index:
        if self._layer_starts is None:
            ops, inside = self.program.ops, self.program.inside_layer
            self._layer_starts = [i for i in range(len(ops)) if not inside(Index(i, 0))]
        starts = self._layer_starts
        place = bisect_left(starts, index.op + (index.pos > 0))
        return Index(starts[place] if place < len(starts) else len(self.program.ops), 0)


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


@dataclass(slots=True)
class _SimRequest:
    num_tokens: int
    num_computed: int = 0
    layer_work: int = 0
    """Token-layers done and not lost."""


@dataclass(slots=True)
class _SimFrame:
    timeline: Timeline
    dead: set[RequestId] = field(default_factory=set)
    reached: dict[RequestId, int] = field(default_factory=dict)
    """Layers done per row."""


class SimRunner:
    """Counts instead of computing.

    Args:
        shape: Layers and experts to pretend.
        clock: Moved by what the ops cost.
        costs: The cost model.
        cuts: The cut rule of the programs.
        arrivals: The simulated world, which may lower the stop word.
    """

    def __init__(
        self,
        shape: ModelShape,
        clock: VirtualClock,
        costs: SimCosts | None = None,
        cuts: CutRule = NO_CUTS,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.shape = shape
        self.cuts = cuts
        self.segments: Segments = Longest()
        self.clock = clock
        self.costs = costs or SimCosts()
        self.arrivals = arrivals
        self.on_boundary: Callable[[], None] | None = None
        """Called at every boundary that a program's grain allows; then none is jumped."""
        self.requests: dict[RequestId, _SimRequest] = {}
        self.frames: dict[int, _SimFrame] = {}
        self.expert_loads = 0
        """Experts read so far: one per distinct expert of an EXPERTS op."""

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request."""
        self.requests[request_id] = _SimRequest(len(token_ids))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        del self.requests[request_id]

    def evict(self, request_id: RequestId) -> None:
        """Lose what it computed."""
        request = self.requests[request_id]
        request.num_computed = request.layer_work = 0

    def accept(self, program: Program) -> None:
        """Make the frame of a program."""
        frame = _SimFrame(Timeline(program, self.costs, self.shape))
        for row in program.rows:
            request = self.requests[row.request_id]
            if row.lo != request.num_computed or row.hi > request.num_tokens:
                raise InvariantError(f"{row} against {request}")
            frame.reached[row.request_id] = row.start_layer
        self.frames[program.frame_id] = frame
        self._between_runs(program)

    def _between_runs(self, program: Program) -> None:
        costs = self.costs
        self.clock.at_ns += round(costs.step_ns + len(program.rows) * costs.step_row_ns)

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Move the clock to where the program stops; see `qllm.plan.Runner.run`."""
        if start != START:  # a resumed frame was not accepted just now
            self._between_runs(program)
        frame = self.frames[program.frame_id]
        timeline = frame.timeline
        end = program.end
        begun_ns = self.clock.at_ns - timeline.at(start)
        index = start
        while index < end:
            index = min(end, self._next_look(program, timeline, index, begun_ns, stop))
            self.clock.at_ns = begun_ns + timeline.at(index)
            if index < end and self._asked(program, stop):
                break
        self._did(program, frame, start, index)
        return index

    def _next_look(
        self, program: Program, timeline: Timeline, index: Index, begun_ns: int, stop: Stop
    ) -> Index:
        """The next boundary at which there may be a reason to stop."""
        if program.grain is Grain.STEP:
            return program.end
        if self.on_boundary is not None or stop.word < program.stop_below:
            return timeline.first_stop(0, index, program.grain)
        known = [stop.stop_at_ns, None if self.arrivals is None else self.arrivals.next_ns()]
        times = [at_ns for at_ns in known if at_ns is not None]
        if not times:
            return program.end
        return timeline.first_stop(min(times) - begun_ns, index, program.grain)

    def _asked(self, program: Program, stop: Stop) -> bool:
        if self.on_boundary is not None:
            self.on_boundary()
        if self.arrivals is not None:
            self.arrivals.arrive()
        if stop.word < program.stop_below:
            return True
        return stop.stop_at_ns is not None and self.clock.at_ns >= stop.stop_at_ns

    def _did(self, program: Program, frame: _SimFrame, start: Index, end: Index) -> None:
        """Count what ran from `start` to `end`."""
        if start == end:
            return
        timeline = frame.timeline
        last_op = end.op + (end.pos > 0)
        longest_ns = max(timeline.unit_ns[start.op : last_op])
        if longest_ns > self.segments.longest_ns:
            self.segments.longest_ns = longest_ns
            at = timeline.unit_ns.index(longest_ns, start.op)
            self.segments.longest_op = program.ops[at].kind
        self.expert_loads += sum(timeline.loads[start.op : end.op]) + end.pos - start.pos
        combines = [op for op in program.ops[start.op : end.op] if op.kind is OpKind.COMBINE]
        for group, done in groupby(combines, key=lambda op: op.group):
            self._did_layers(program, frame, group, list(done))

    def _did_layers(
        self, program: Program, frame: _SimFrame, group: int, done: Sequence[Op]
    ) -> None:
        """The rows of a group went through these COMBINE ops."""
        members = program.groups[group]
        size = sum(program.rows[r].num_tokens for r in members)
        layers = [op.layer for op in done if op.hi == size]
        if not layers:
            return
        first, after = layers[0], layers[-1] + 1
        for r in members:
            row = program.rows[r]
            if row.request_id in frame.dead:
                continue
            if frame.reached[row.request_id] != first or after - first != len(layers):
                raise InvariantError(
                    f"{row} has done {frame.reached[row.request_id]} layers and runs {layers}"
                )
            frame.reached[row.request_id] = after
            self.requests[row.request_id].layer_work += row.num_tokens * len(layers)

    def finish(self, program: Program) -> list[Sampled]:
        """Commit and sample."""
        frame = self.frames.pop(program.frame_id)
        out = []
        for r, row in enumerate(program.rows):
            if row.request_id in frame.dead:
                continue
            request = self.requests[row.request_id]
            if frame.reached[row.request_id] != row.end_layer:
                raise InvariantError(f"{row} ended at layer {frame.reached[row.request_id]}")
            if row.end_layer < self.shape.num_layers:
                continue
            request.num_computed = row.hi
            owed = row.hi * self.shape.num_layers
            if request.layer_work != owed:
                raise InvariantError(f"{row}: {request.layer_work} token-layers done, {owed} owed")
            if program.samples[r]:
                token = (row.request_id * 7919 + row.hi * 104729) % self.shape.vocab_size
                request.num_tokens += 1
                out.append(Sampled(row.request_id, token))
        return out

    def split(self, program: Program, index: Index) -> None:
        """Let go of a frame between layers."""
        if program.inside_layer(index):
            raise InvariantError(f"frame {program.frame_id} is split inside a layer")
        del self.frames[program.frame_id]

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row dead."""
        self.frames[program.frame_id].dead.add(request_id)

    def drop(self, program: Program) -> None:
        """Let go of a frame; what its rows did is lost."""
        frame = self.frames.pop(program.frame_id, None)
        for row in program.rows:
            request = self.requests.get(row.request_id)
            if frame is None or request is None or row.request_id in frame.dead:
                continue
            request.layer_work = request.num_computed * self.shape.num_layers
