"""A runner without tensors: the same programs on a virtual clock and a cost model.

It implements the `Runner` protocol whole, so the engine loop, the scheduler, the policies and
the block accounting that run here are the real ones. Tokens are made up from the request id and
the position; what a request computed is counted per layer and compared at the end (I1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qllm.errors import InvariantError
from qllm.plan import (
    NO_CUTS,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    """Time of ops, in nanoseconds: a constant per op, and per token, expert and cached token."""

    op_ns: int = 20_000
    token_ns: int = 5_000
    kv_token_ns: int = 2
    expert_ns: int = 100_000
    expert_token_ns: int = 2_000
    head_ns: int = 1_000_000

    def of(self, program: Program, op: Op, shape: ModelShape) -> int:
        """Time of one op; for EXPERTS the time of one expert."""
        tokens = op.hi - op.lo
        if op.kind is OpKind.ATTN:
            cached = sum(program.rows[r].hi for r in program.groups[op.group])
            return self.op_ns + tokens * self.token_ns + cached * self.kv_token_ns
        if op.kind is OpKind.EXPERTS:
            return self.expert_ns + tokens * self.expert_token_ns // shape.num_experts
        if op.kind is OpKind.HEAD:
            return self.head_ns
        return self.op_ns + tokens * self.token_ns // 4


@dataclass(slots=True)
class _SimRequest:
    token_ids: list[int]
    num_computed: int = 0
    layer_work: int = 0
    """Token-layers done and not lost."""


@dataclass(slots=True)
class _SimFrame:
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
        on_boundary: Called at every boundary, before the stop word is read; tests and arrivals
            of the simulated world happen here.
    """

    def __init__(
        self,
        shape: ModelShape,
        clock: VirtualClock,
        costs: SimCosts | None = None,
        cuts: CutRule = NO_CUTS,
        on_boundary: Callable[[], None] | None = None,
    ) -> None:
        self.shape = shape
        self.cuts = cuts
        self.segments: Segments = Longest()
        self.clock = clock
        self.costs = costs or SimCosts()
        self.on_boundary = on_boundary
        self.requests: dict[RequestId, _SimRequest] = {}
        self.frames: dict[int, _SimFrame] = {}

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request."""
        self.requests[request_id] = _SimRequest(list(token_ids))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        del self.requests[request_id]

    def evict(self, request_id: RequestId) -> None:
        """Lose what it computed."""
        request = self.requests[request_id]
        request.num_computed = request.layer_work = 0

    def accept(self, program: Program) -> None:
        """Make the frame of a program."""
        frame = _SimFrame()
        for row in program.rows:
            request = self.requests[row.request_id]
            if row.lo != request.num_computed or row.hi > len(request.token_ids):
                raise InvariantError(f"{row} against {request}")
            frame.reached[row.request_id] = row.start_layer
        self.frames[program.frame_id] = frame

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Advance the clock op by op; see `qllm.plan.Runner.run`."""
        frame = self.frames[program.frame_id]
        index = start
        end = Index(len(program.ops), 0)
        while index < end:
            op = program.ops[index.op]
            cost = self.costs.of(program, op, self.shape)
            self.clock.at_ns += cost
            if cost > self.segments.longest_ns:
                self.segments.longest_ns, self.segments.longest_op = cost, op.kind
            pos = index.pos + 1
            if op.kind is OpKind.EXPERTS and pos < self.shape.num_experts:
                index = Index(index.op, pos)
            else:
                index = Index(index.op + 1, 0)
                self._finished_op(program, frame, op)
            if index < end and self._may_stop(program, index) and self._asked(program, stop):
                break
        return index

    def _may_stop(self, program: Program, index: Index) -> bool:
        if program.grain is Grain.STEP:
            return False
        return program.grain is Grain.EXPERT or not program.inside_layer(index)

    def _asked(self, program: Program, stop: Stop) -> bool:
        if self.on_boundary is not None:
            self.on_boundary()
        if stop.word < program.stop_below:
            return True
        return stop.stop_at_ns is not None and self.clock.at_ns >= stop.stop_at_ns

    def _finished_op(self, program: Program, frame: _SimFrame, op: Op) -> None:
        group = program.groups[op.group]
        last = sum(program.rows[r].num_tokens for r in group)
        if op.kind is not OpKind.COMBINE or op.hi != last:
            return
        for r in group:
            row = program.rows[r]
            if row.request_id in frame.dead:
                continue
            if frame.reached[row.request_id] != op.layer:
                raise InvariantError(f"{row} runs layer {op.layer} out of order")
            frame.reached[row.request_id] += 1
            self.requests[row.request_id].layer_work += row.num_tokens

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
                request.token_ids.append(token)
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
