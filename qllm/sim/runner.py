"""A runner without tensors, which runs the same programs on a virtual clock and a cost model.

The runner implements the whole `Runner` protocol. So the engine loop, the scheduler, the policies
and the block accounting are the real ones. Tokens are computed from the request id and the
position. The work of a request is counted per layer and compared at the end (I1).

The clock skips boundaries at which nothing can happen. A run advances to the next arrival or to the
end of its slice. From there it advances to the first boundary where it may stop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qllm.errors import InvariantError
from qllm.plan import NO_CUTS, CutRule, ModelShape
from qllm.runner.protocol import Longest, Segments, Stop
from qllm.scheduler.program import START, Index, Program
from qllm.sim.timeline import NO_GATHERS, Prices, SimCosts, Timeline
from qllm.types import Grain, RequestId, Sampled, SamplingParams

__all__ = ["Arrivals", "SimCosts", "SimRunner", "VirtualClock"]


class VirtualClock:
    """A clock that moves only when it is set."""

    def __init__(self) -> None:
        self.at_ns = 0

    def __call__(self) -> int:
        """Return the time."""
        return self.at_ns


class Arrivals(Protocol):
    """Events of the simulated world at known times, except those of the runner."""

    def next_ns(self) -> int | None:
        """Return the time of the next event; None if there is none."""
        ...

    def arrive(self) -> None:
        """Let all due events happen."""
        ...


@dataclass(slots=True)
class _SimRequest:
    given: Sequence[int]
    """Prompt, or prompt and output of a request that was restored."""
    num_tokens: int
    num_computed: int = 0
    layer_work: int = 0
    """Token-layers that were computed and not lost."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks that the request's programs received."""
    drafts: tuple[int, ...] = ()
    """Drafted tokens after the known tokens."""
    drafted: int = 0
    """End of the tokens of the finished draft rows; 0 without such rows."""
    there_ns: int = 0
    """Time when the request's KV is where its last move brought it."""


@dataclass(slots=True)
class _SimFrame:
    program: Program
    timeline: Timeline
    dead: set[RequestId] = field(default_factory=set)
    reached: dict[RequestId, int] = field(default_factory=dict)
    """Finished layers per row."""


class SimRunner:
    """A runner that counts instead of computing.

    The class has many methods because it replaces a whole `Runner`.

    Args:
        shape: Simulated layers and experts.
        clock: Clock that the costs of ops move.
        costs: Cost model.
        cuts: Cut rule of the programs.
        arrivals: Simulated world, which may lower the stop word.
        block_size: Tokens of a KV block.
        prices: Prices of ops, those of ranks for example; None takes those of one process.
    """

    def __init__(
        self,
        shape: ModelShape,
        clock: VirtualClock,
        costs: SimCosts | None = None,
        cuts: CutRule = NO_CUTS,
        arrivals: Arrivals | None = None,
        block_size: int = 16,
        prices: Prices | None = None,
    ) -> None:
        self.shape, self._block_size = shape, block_size
        self.cuts = cuts
        self.segments: Segments = Longest()
        self.clock = clock
        self.costs = costs or SimCosts()
        self._prices = prices or Prices(self.costs, shape)
        self.arrivals = arrivals
        self.on_boundary: Callable[[], None] | None = None
        """Callback at every boundary that a program's grain allows. With a callback the clock skips
        no boundary."""
        self.requests: dict[RequestId, _SimRequest] = {}
        self.frames: dict[int, _SimFrame] = {}
        self._holders: dict[int, set[RequestId]] = {}
        """Requests that hold a KV block."""
        self._empty_ns: dict[int, int] = {}
        """Time when the KV of a released block is copied out, per block that was swapped out."""
        self._out_ns = self._in_ns = 0
        """Times when the link's last copy ends, per direction."""
        self.is_right: Callable[[], bool] = lambda: True
        """Function that decides whether a draft row chooses the token that the model chooses."""
        self.rejected_work = 0
        """Token-layers of drafted tokens that the model did not choose."""
        self.expert_loads = 0
        """Number of expert reads so far: one per distinct expert of an EXPERTS op."""
        self.gathers = NO_GATHERS
        """Gathers of the ops that have ended so far."""

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request."""
        self.requests[request_id] = _SimRequest(token_ids, len(token_ids))

    def keepable(self, request_id: RequestId, num_tokens: int, num_prompt_tokens: int) -> int:
        """Return all tokens: only tokens determine KV here."""
        return num_tokens

    def revise(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_kept: int,
        table: Sequence[int],
    ) -> None:
        """Change a prompt after its unchanged tokens."""
        request = self.requests[request_id]
        request.given, request.num_tokens = token_ids, len(token_ids)
        if num_kept <= request.num_computed:  # otherwise the request's running row stays
            request.num_computed = num_kept
            request.layer_work = num_kept * self.shape.num_layers
        self._give_back(request_id, len(table))

    def token_ids(self, request_id: RequestId) -> list[int]:
        """Return the prompt and output tokens of a request."""
        request = self.requests[request_id]
        later = range(len(request.given), request.num_tokens)
        return [*request.given, *(self._token(request_id, at) for at in later)]

    def forced(self, request_id: RequestId, outputs: Sequence[int], most: int) -> Sequence[int]:
        """Return nothing, because there are no grammars here."""
        return ()

    def _token(self, request_id: RequestId, position: int) -> int:
        """Return the token of a request at a position after its prompt."""
        return (request_id * 7919 + position * 104729) % self.shape.vocab_size

    def draft(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Set the drafted tokens after a request's known tokens."""
        self.requests[request_id].drafts = tuple(token_ids)

    def guess(self, request_id: RequestId) -> int | None:
        """Return the token that a request's last draft row chose."""
        request = self.requests[request_id]
        token = self._token(request_id, request.num_tokens + len(request.drafts))
        return token if self.is_right() else (token + 1) % self.shape.vocab_size

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._give_back(request_id, 0)
        del self.requests[request_id]

    def evict(self, request_id: RequestId) -> None:
        """Drop all KV that the request computed."""
        request = self.requests[request_id]
        request.num_computed = request.layer_work = request.drafted = 0
        self._give_back(request_id, 0)

    def swap_out(self, request_id: RequestId) -> None:
        """Keep the computed tokens, and release the blocks."""
        self._move(request_id)
        request = self.requests[request_id]
        begin_ns = max(self.clock.at_ns, self._out_ns, request.there_ns)
        self._out_ns = begin_ns + round(request.num_computed * self.costs.out_token_ns)
        request.there_ns = self._out_ns
        self._empty_ns |= dict.fromkeys(request.blocks, self._out_ns)
        self._give_back(request_id, 0)

    def swap_in(self, request_id: RequestId, table: Sequence[int]) -> None:
        """Restore a request that was swapped out, after its copy out and that of its new blocks."""
        self._move(request_id)
        self._hold(request_id, table)
        request = self.requests[request_id]
        begin_ns = max(self.clock.at_ns, self._in_ns, request.there_ns, self._when_empty(table))
        self._in_ns = begin_ns + round(request.num_computed * self.costs.in_token_ns)
        request.there_ns = self._in_ns

    def _when_empty(self, blocks: Sequence[int]) -> int:
        """Return the time when all blocks may be written."""
        return max((self._empty_ns.get(block, 0) for block in blocks), default=0)

    def _move(self, request_id: RequestId) -> None:
        """Advance the clock by the time of moving KV, as if the move blocked the machine."""
        num_tokens = self.requests[request_id].num_computed
        self.clock.at_ns += round(num_tokens * self.costs.move_token_ns)

    def copy_ahead(self, request_ids: Sequence[RequestId]) -> None:
        """Do nothing: every swap pays for its whole copy."""

    def refer(self, request_id: RequestId, table: Sequence[int], num_tokens: int) -> None:
        """Use KV in the blocks of other requests."""
        request = self.requests[request_id]
        if request.blocks or request.num_computed:
            raise InvariantError(f"request {request_id} has KV and refers to that of others")
        for i, block in enumerate(table):
            holders = self._holders.setdefault(block, set())
            if holders and (
                not num_tokens or any(self.requests[x].blocks[i] != block for x in holders)
            ):
                raise InvariantError(
                    f"block {block} of {sorted(holders)} is not that of {request_id}"
                )
            holders.add(request_id)
        request.blocks = list(table)
        request.num_computed = num_tokens
        request.layer_work = num_tokens * self.shape.num_layers

    def kv_of(self, request_id: RequestId) -> _SimRequest:
        """Return the request, which counts its KV."""
        return self.requests[request_id]

    def copy_out(self, kv: _SimRequest, lo: int, hi: int) -> tuple[int, int]:
        """Return a stand-in for the KV of tokens [lo, hi)."""
        if hi > kv.num_computed:
            raise InvariantError(f"{kv} has no KV up to {hi}")
        return lo, hi

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: tuple[int, int]) -> None:
        """Use KV that was computed before."""
        request = self.requests[request_id]
        if page != (lo, hi) or lo != request.num_computed or hi >= request.num_tokens:
            raise InvariantError(f"KV {page} for tokens [{lo}, {hi}) of {request}")
        request.num_computed = hi
        request.layer_work = hi * self.shape.num_layers

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """Return always the same regime, because here only tokens determine KV."""
        return ""

    def _give_back(self, request_id: RequestId, num_blocks: int) -> None:
        """Release the blocks after the first `num_blocks`."""
        blocks = self.requests[request_id].blocks
        for block in blocks[num_blocks:]:
            self._holders[block].discard(request_id)
        del blocks[num_blocks:]

    def _hold(self, request_id: RequestId, blocks: Sequence[int]) -> None:
        """Hold the new blocks. Written KV does not move."""
        held = self.requests[request_id].blocks
        if len(blocks) < len(held) or (held and blocks[len(held) - 1] != held[-1]):
            raise InvariantError(f"the KV of request {request_id} moved from {held} to {blocks}")
        for block in blocks[len(held) :]:
            holders = self._holders.setdefault(block, set())
            holders.add(request_id)
            if len(holders) > 1:
                raise InvariantError(f"requests {sorted(holders)} share a block that is written")
            held.append(block)

    def accept(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        """Make the frame of a program."""
        frame = _SimFrame(program, Timeline(program, self._prices))
        for row, blocks in zip(program.rows, tables, strict=True):
            self._hold(row.request_id, blocks)
            request = self.requests[row.request_id]
            most = request.num_tokens + len(request.drafts)
            begun = max(request.num_computed, request.drafted)
            if not request.num_computed <= row.lo <= begun or row.hi > most:
                raise InvariantError(f"{row} against {request}")
            frame.reached[row.request_id] = row.start_layer
            copied_ns = max(request.there_ns, self._when_empty(blocks))
            self.clock.at_ns = max(self.clock.at_ns, copied_ns)
        self.frames[program.frame_id] = frame
        self._between_runs(program)

    def _between_runs(self, program: Program) -> None:
        costs = self.costs
        self.clock.at_ns += round(costs.step_ns + len(program.rows) * costs.step_row_ns)

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Move the clock to the program's stop; see `qllm.runner.protocol.Runner.run`."""
        if start != START:  # a resumed frame was accepted earlier
            self._between_runs(program)
        index, _ = self._go(program, start, program.end, stop)
        return index

    def _go(self, program: Program, start: Index, end: Index, stop: Stop) -> tuple[Index, bool]:
        """Move the clock to `end`, or to a stop before; return the index, and True for a stop."""
        frame = self.frames[program.frame_id]
        timeline, index, is_stopped = frame.timeline, start, False
        begun_ns = self.clock.at_ns - timeline.at(start)
        while index < end and not is_stopped:
            look = self._next_look(program, timeline, index, begun_ns, stop)
            index = min(end, look)
            self.clock.at_ns = begun_ns + timeline.at(index)
            is_stopped = look <= end and index < program.end and self._asked(program, stop)
        self._did(program, frame, start, index)
        return index, is_stopped

    def _next_look(
        self, program: Program, timeline: Timeline, index: Index, begun_ns: int, stop: Stop
    ) -> Index:
        """Return the next boundary at which the program may have a reason to stop."""
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
        """Count the work from `start` to `end`."""
        if start == end:
            return
        timeline = frame.timeline
        longest_ns, kind = timeline.longest(start, end)
        if longest_ns > self.segments.longest_ns:
            self.segments.longest_ns, self.segments.longest_op = longest_ns, kind
        self.expert_loads += timeline.loads_at(end) - timeline.loads_at(start)
        if timeline.gathers.num:
            done = self.gathers.plus(timeline.gathers_at(end))
            self.gathers = done.plus(timeline.gathers_at(start), -1)
        rows, dead, reached, requests = program.rows, frame.dead, frame.reached, self.requests
        for group, first, num_layers in timeline.layers(start, end):
            for r in program.groups[group]:
                request_id, lo, hi, _, _ = row = rows[r]
                if request_id in dead:
                    continue
                if reached[request_id] != first:
                    raise InvariantError(f"{row} runs layer {first} out of order")
                reached[request_id] = first + num_layers
                requests[request_id].layer_work += (hi - lo) * num_layers

    def finish(self, program: Program) -> list[Sampled]:
        """Commit and sample."""
        frame = self.frames.pop(program.frame_id)
        num_layers = self.shape.num_layers
        out = []
        self._keep_drafted(program, frame)
        for row, samples in zip(program.rows, program.samples, strict=True):
            request_id, _, hi, _, end = row
            if request_id in frame.dead:
                continue
            request = self.requests[request_id]
            if frame.reached[request_id] != end:
                raise InvariantError(f"{row} ended at layer {frame.reached[request_id]}")
            if end < num_layers:
                continue
            if request.layer_work != hi * num_layers:
                raise InvariantError(
                    f"{row}: {request.layer_work} token-layers done, {hi * num_layers} owed"
                )
            drafts, request.drafts = request.drafts[: max(0, samples - 1)], ()
            request.drafted = 0
            request.num_computed = hi - len(drafts)
            for draft in (*drafts, None) if samples else ():
                at = request.num_tokens
                request.num_tokens += 1
                out.append(Sampled(request_id, self._token(request_id, at)))
                if out[-1].token_id != draft:
                    break
                request.num_computed += 1
            lost = (hi - request.num_computed) * num_layers
            request.layer_work -= lost
            self.rejected_work += lost
            if samples:  # rejected drafts, and drafts that no row chose
                num = self.shape.blocks_for(request.num_tokens, self._block_size)
                self._give_back(request_id, num)
        return out

    def split(self, program: Program, index: Index) -> None:
        """Release a frame between layers."""
        if program.inside_layer(index):
            raise InvariantError(f"frame {program.frame_id} is split inside a layer")
        self._keep_drafted(program, self.frames.pop(program.frame_id))

    def _keep_drafted(self, program: Program, frame: _SimFrame) -> None:
        """Keep the work of finished draft rows."""
        for r in program.exits:
            request_id, _, hi, _, end = program.rows[r]
            if request_id not in frame.dead and frame.reached[request_id] == end:
                self.requests[request_id].drafted = hi

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row dead."""
        self.frames[program.frame_id].dead.add(request_id)

    def leave(self, program: Program, request_id: RequestId, at: Index) -> None:
        """Take a row out of a frame. The row's finished layers stay finished."""
        self._keep_drafted(program, self.frames[program.frame_id])
        self.kill(program, request_id)

    def fault(self, error: Exception) -> None:
        """Do nothing, because there is no device that could fail."""

    def drop(self, program: Program) -> None:
        """Release a frame and lose the work of its rows."""
        frame = self.frames.pop(program.frame_id, None)
        for row in program.rows:
            request = self.requests.get(row.request_id)
            if frame is None or request is None or row.request_id in frame.dead:
                continue
            request.layer_work = request.num_computed * self.shape.num_layers
            request.drafted = 0
