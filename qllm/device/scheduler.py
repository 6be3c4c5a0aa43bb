"""The native scheduler: `qllm.scheduler.Scheduler` in C++ on one block of memory.

The same source compiles for a GPU (docs/device-scheduler.md). Here it is the engine's scheduler
on the host: it decides on integers, and this class turns its rows into programs and keeps the
`Request` objects of the engine up to date. Decisions are those of `Scheduler`, one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qllm.compile import compile_program
from qllm.decision import (
    MAX_IDLE_NS,
    Accept,
    Decision,
    Drop,
    Effect,
    EvictKv,
    Kill,
    Limits,
    Parked,
    Split,
)
from qllm.device import layout
from qllm.device.block import Block, NativePool, Zeros, host_zeros
from qllm.device.layout import NONE
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.errors import CheckpointError, InvariantError, PolicyError
from qllm.plan import START, CutRule, Index, ModelShape, Plan, Program, Row
from qllm.policy import NO_COSTS, CostTable, RankPolicy
from qllm.request import Request
from qllm.riding import Riding
from qllm.types import NS_PER_MS, NS_PER_S, FrameId, Frontier, Grain, RequestId
from qllm.validate import check_state

_GRAINS = tuple(Grain)
_SLOT, _FLAGS = 5, 6
"""Of a row."""


def host_calls(policy: RankPolicy) -> Any:
    """The functions of the scheduler in this process; they are given the policy's rank."""
    return load_native()


class NativeScheduler:
    """State of the decisions. One owner: the engine loop.

    Args:
        policy: A `RankPolicy`; its `rank` is compiled here.
        shape: Layers of the model.
        cuts: Where ops are cut.
        limits: Settings.
        capacity: Live requests there is room for at first; the block grows.
        calls: Makes the functions of the scheduler for a policy; by default those of this machine.
        zeros: Makes the memory of the block.

    Raises:
        ConfigError: The policy cannot be compiled, or numba or the extension is missing.
    """

    def __init__(
        self,
        policy: Any,
        shape: ModelShape,
        cuts: CutRule,
        limits: Limits,
        *,
        capacity: int = 256,
        calls: Callable[[RankPolicy], Any] = host_calls,
        zeros: Zeros = host_zeros,
    ) -> None:
        self._calls = calls
        self.shape = shape
        self.cuts = cuts
        self.limits = limits
        self.requests: dict[RequestId, Request] = {}
        self.frames: dict[FrameId, Parked] = {}
        self.running: Parked | None = None
        self._slots: dict[RequestId, int] = {}
        marks = _marks(cuts, limits) if limits.batch_invariant else []
        self.block = Block(
            {
                "capacity": capacity,
                "seats": limits.max_num_seqs,
                "num_blocks": limits.num_blocks,
                "num_marks": len(marks),
            },
            zeros,
        )
        self.block.array("marks")[:] = marks
        self.block.set(
            num_layers=shape.num_layers,
            max_step_tokens=limits.max_step_tokens,
            block_size=limits.block_size,
            finest_grain=limits.grain,
            max_segment_ns=limits.max_segment_ns,
        )
        self.policy = policy
        self.costs = NO_COSTS
        self._do(self.native.start)
        self.pool = NativePool(limits.block_size, self.block)

    def _do(self, function: Callable[..., Any], *numbers: int) -> Any:
        return function(self.block.address, self._rank.address, *numbers)

    def call(self, name: str, *numbers: int) -> int:
        """A function of `layout.CALLS`, for who keeps no `Request` of its own."""
        answer: int | None = self._do(getattr(self.native, name), *numbers)
        return answer or 0

    @property
    def rank_address(self) -> int:
        """Where the policy's compiled rank lies."""
        return self._rank.address

    # -- settings

    @property
    def policy(self) -> RankPolicy:
        """Who ranks."""
        return self._policy

    @policy.setter
    def policy(self, policy: RankPolicy) -> None:
        self.native = self._calls(policy)
        self._rank = compile_host(policy)
        self._policy = policy
        slack, groups = policy.slack, policy.groups
        self.block.set(
            grain=policy.grain,
            reads=policy.reads,
            chunk_tokens=policy.chunk_tokens or 0,
            step_tokens=policy.step_tokens or 0,
            slack_min_tokens=slack.min_tokens if slack else 0,
            slack_tpot_ms=slack.tpot_ms if slack else 0,
            group_tokens=groups.tokens if groups else 0,
            max_groups=groups.most if groups else 0,
            ride_unbounded=policy.ride.unbounded,
            max_be_stall_ms=policy.max_be_stall_ms or 0,
        )
        self.block.set_ride_frac(policy.ride.frac)
        self._do(self.native.rank_anew)

    @property
    def costs(self) -> CostTable:
        """Predicted times."""
        return self._costs

    @costs.setter
    def costs(self, table: CostTable) -> None:
        self.block.set_costs(table)
        self._costs = table

    @property
    def riding(self) -> Riding:
        """What other tiers may take from decoding requests of the best tier."""
        return Riding(*(self.block.get(f"ride_{name}") for name in Riding._fields))

    @property
    def suspects(self) -> list[RequestId]:
        """Requests of a frame that raised; rerun one by one, before anything else."""
        slots = self.block.ints("suspects", self.block.get("num_suspects"))
        return [self.block.request(slot)[0] for slot in slots]

    # -- requests come and go

    def add(self, request: Request, now_ns: int) -> None:
        """A request arrived."""
        self._add(request)

    def _add(self, request: Request) -> int:
        ttft_ms, tpot_ms = request.slo
        numbers = (
            request.request_id,
            request.priority,
            request.arrival_ns,
            NONE if ttft_ms is None else int(ttft_ms * NS_PER_MS),
            NONE if tpot_ms is None else int(tpot_ms * NS_PER_MS),
            request.num_prompt_tokens,
        )
        slot: int = self._do(self.native.add, *numbers)
        if slot < 0:
            old = self.block.sizes["capacity"]
            self.block = self.pool.block = self.block.grown(2 * old)
            self._do(self.native.add_slots, old)
            slot = self._do(self.native.add, *numbers)
        self.requests[request.request_id] = request
        self._slots[request.request_id] = slot
        return slot

    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]:
        """A request ended, for whatever reason: its row dies, its blocks come back."""
        request = self.requests.pop(request_id)
        self._do(self.native.remove, self._slots.pop(request_id))
        request.finished = True
        request.block_table = []
        request.reset()
        return self._take_effects()

    def evict(self, request_id: RequestId, for_request: RequestId) -> list[Effect]:
        """Take the KV of a request; it starts again from its first token."""
        owed = self.block.get("num_effects")
        self._do(self.native.evict, self._slots[request_id], for_request)
        return self._take_effects(owed)

    def adopt(self, request: Request) -> None:
        """Take over a request of a checkpoint: its counters stand, its blocks are taken anew.

        Raises:
            CheckpointError: Its KV does not fit now.
        """
        front = request.frontier
        reached = request.num_computed_tokens if front is None else front.hi
        need, free = self.pool.blocks_for(reached), self.pool.num_free
        if need > free:
            raise CheckpointError(
                f"a request of the checkpoint needs {need} KV blocks, {free} are free; raise "
                "max_kv_tokens or let other requests finish"
            )
        slot = self._add(request)
        self.block.restore(slot, request)
        self._do(self.native.adopt, slot)
        self._refresh(request)

    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """Take over a parked frame whose live requests were adopted.

        Raises:
            CheckpointError: It has more rows than there are seats.
        """
        if len(program.rows) > self.limits.max_num_seqs:
            raise CheckpointError(
                f"a frame of the checkpoint has {len(program.rows)} rows; max_num_seqs is "
                f"{self.limits.max_num_seqs}"
            )
        parked = Parked(program=program, index=index, parked_ns=now_ns, dead=set(dead))
        frame = self._do(self.native.new_frame)
        self.block.restore_frame(frame, parked, self._slots)
        self._do(self.native.park, frame)
        self.frames[program.frame_id] = parked
        for row in parked.held_rows():
            self.requests[row.request_id].frame_id = program.frame_id

    def new_frame_id(self) -> FrameId:
        """An id no frame had before."""
        frame_id = self.block.get("next_frame_id") + 1
        self.block.set(next_frame_id=frame_id)
        return frame_id

    # -- the decision

    def decide(self, now_ns: int) -> Decision:
        """What to run now.

        Raises:
            PolicyError: The policy planned nothing, or stalls.
        """
        answer = self._do(self.native.decide, now_ns)
        if answer:
            raise self._broken(answer)
        effects = tuple(self._take_effects())
        kind = self.block.get("kind")
        if kind == layout.IDLE:
            return Decision(effects=effects)
        if kind == layout.WAIT:
            return Decision(effects=effects, wait_until_ns=self.block.get("wait_until_ns"))
        frame = self.block.get("decided_frame")
        frame_id, _, stop_below, num_rows, _, _, grain, *_ = self.block.frame(frame)
        slice_ns = self.block.get("slice_ns")
        plan = Plan(
            grain=_GRAINS[grain],
            stop_below=stop_below,
            slice_ns=None if slice_ns == NONE else slice_ns,
        )
        if kind == layout.RESUME:
            return self._resume(plan, frame_id, effects)
        return self._start(plan, frame_id, self.block.rows(frame, num_rows), effects, now_ns)

    def _resume(self, plan: Plan, frame_id: FrameId, effects: tuple[Effect, ...]) -> Decision:
        self.running = parked = self.frames.pop(frame_id)
        parked.program = replace(parked.program, grain=plan.grain, stop_below=plan.stop_below)
        for row in parked.held_rows():
            self.requests[row.request_id].frame_id = None
        return Decision(
            effects=effects,
            program=parked.program,
            start=parked.index,
            slice_ns=plan.slice_ns,
            resumed=True,
        )

    def _start(
        self,
        plan: Plan,
        frame_id: FrameId,
        found: Sequence[tuple[int, ...]],
        effects: tuple[Effect, ...],
        now_ns: int,
    ) -> Decision:
        rows = tuple([Row(*numbers[:5]) for numbers in found])
        requests = [self.requests[row.request_id] for row in rows]
        for numbers, request in zip(found, requests, strict=True):
            if not request.block_table:
                request.last_progress_ns = now_ns
            self.block.extend_table(numbers[_SLOT], request.block_table)
        alone = [r.num_prompt_tokens for r in requests] if self.limits.batch_invariant else None
        program = compile_program(
            replace(plan, rows=rows),
            frame_id=frame_id,
            samples=[bool(numbers[_FLAGS] & layout.SAMPLES) for numbers in found],
            shape=self.shape,
            cuts=self.cuts,
            one_query_from=alone,
        )
        self.running = Parked(program=program, index=START, parked_ns=now_ns)
        return Decision(
            effects=(*effects, Accept(program, ())), program=program, slice_ns=plan.slice_ns
        )

    def _broken(self, answer: int) -> PolicyError:
        waiting = len(self.requests)
        if answer == layout.EMPTY_PLAN:
            what = (
                f"returned an empty plan with {waiting} requests waiting and no wait_until_ns (I8)"
            )
        elif answer == layout.STALLS:
            idle_s = MAX_IDLE_NS / NS_PER_S
            what = f"stalls: {waiting} requests wait and nothing ran for {idle_s:g} s"
        elif answer == layout.NO_KV:
            what = (
                f"planned request {self.block.get('stuck')}, for which there is no KV: "
                f"{self.pool.num_free} blocks are free"
            )
        else:
            raise InvariantError(f"decide answered {answer}")
        return PolicyError(f"policy {type(self.policy).__name__} {what}")

    # -- effects

    def _take_effects(self, first: int = 0) -> list[Effect]:
        count = self.block.get("num_effects")
        if count == first:
            return []
        self.block.set(num_effects=first)
        return [self._effect(*numbers) for numbers in self.block.effects(count)[first:]]

    def _effect(
        self, frame_id: FrameId, request_id: RequestId, for_request: RequestId, kind: int, lost: int
    ) -> Effect:
        if kind == layout.KILL:
            parked = self.frames[frame_id]
            parked.dead.add(request_id)
            return Kill(parked.program, request_id)
        if kind == layout.DROP:
            return Drop(self.frames.pop(frame_id).program)
        if kind == layout.EVICT:
            request = self.requests[request_id]
            request.block_table = []
            request.reset()
            request.evictions += 1
            return EvictKv(request_id, lost, for_request)
        parked = self.frames.pop(frame_id)
        index = parked.program.layer_start(parked.index)
        for row in parked.held_rows():
            self._refresh(self.requests[row.request_id])
        return Split(parked.program, index)

    # -- what became of it

    def done(self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int) -> None:
        """The running program reached its end; `sampled` requests have one more token."""
        parked = self._take_running()
        high = _highest_layer(parked, end)
        count = self._do(self.native.done, high, start_ns, end_ns)
        if count != len(sampled):
            raise InvariantError(f"{count} rows sample a token, the runner has {len(sampled)}")
        self._refresh_rows(parked)

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> None:
        """The running program stopped at a boundary: park its frame."""
        parked = self._take_running()
        program, high = parked.program, _highest_layer(parked, end)
        layer, inside = program.layer_at(end), program.inside_layer(end)
        self._do(self.native.stopped, high, layer, inside, start_ns, end_ns, preempted)
        parked.index = end
        parked.parked_ns = end_ns
        self.frames[program.frame_id] = parked
        self._refresh_rows(parked)

    def failed(self) -> tuple[list[Effect], list[Request]]:
        """The running program raised: drop its frame and rerun its requests one by one.

        Returns:
            Effects, and the requests that failed alone: they must end in `error`.
        """
        parked = self._take_running()
        slots = self.block.ints("chosen", self._do(self.native.failed))
        hopeless = [self.requests[self.block.request(slot)[0]] for slot in slots]
        self._refresh_rows(parked)
        return [Drop(parked.program)], hopeless

    def _take_running(self) -> Parked:
        if self.running is None:
            raise InvariantError("no program is running")
        parked, self.running = self.running, None
        return parked

    def _refresh_rows(self, parked: Parked) -> None:
        for row in parked.program.rows:
            if row.request_id not in parked.dead:
                self._refresh(self.requests[row.request_id])

    def _refresh(self, request: Request) -> None:
        """Bring the engine's view of a request up to date."""
        slot = self._slots[request.request_id]
        (_, _, _, _, _, request.served_ns, request.last_progress_ns, first_ns, last_ns) = (
            numbers := self.block.request(slot)
        )[:9]
        request.first_token_ns = None if first_ns == NONE else first_ns
        request.last_token_ns = None if last_ns == NONE else last_ns
        _, request.num_tokens, request.num_computed_tokens, *rest = numbers[13:]
        lo, hi, layer, frame, _, request.preemptions, request.failures = rest[3:10]
        request.frontier = None if layer < 0 else Frontier(lo, hi, layer)
        request.frame_id = None if frame < 0 else self.block.frame(frame)[0]
        self.block.extend_table(slot, request.block_table)

    def check(self) -> None:
        """Check the invariants of the state; called by tests after every step, and when idle.

        Raises:
            InvariantError: Requests, frames, blocks and order do not agree.
        """
        check_state(self.requests, self.frames, self.pool)
        self.block.check_order(self._slots)


def _marks(cuts: CutRule, limits: Limits) -> list[int]:
    """Where the blocks of a cut rule end, from position 0 on, as far as KV can reach."""
    marks = [0]
    while marks[-1] < limits.num_blocks * limits.block_size:
        marks.append(marks[-1] + cuts.block(marks[-1]))
    return marks


def _highest_layer(parked: Parked, end: Index) -> int:
    """The layer of the last op that a run to `end` has begun; -1 if it did nothing."""
    last = end.op if end.pos else end.op - 1
    return -1 if last < parked.index.op else parked.program.ops[last].layer
