"""Base class of the native decisions: Python passes settings in, and gets programs and effects.

The C++ code works with slots, rows and layers in one block of memory. `NativeDecider` owns the
block, and holds the parked programs. It makes programs from rows, and Python values from effects.
Its subclasses decide what they store of a request. `NativeScheduler` of the tests has `Request`
objects, `NativeServer` has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qllm.device import layout
from qllm.device.block import Block
from qllm.device.layout import NONE
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.device.records import Zeros, host_zeros
from qllm.errors import InvariantError, PolicyError
from qllm.plan import CutRule, ModelShape, Plan, Row
from qllm.policy import NO_COSTS, CostTable, RankPolicy
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import (
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
from qllm.scheduler.program import START, Index, Program
from qllm.scheduler.rules import refuse_policy
from qllm.types import NS_PER_S, FrameId, Grain, RequestId

_GRAINS = tuple(Grain)
SLOT, _FLAGS = 5, 6
"""Indexes of the slot and of the flags in a row."""
_NUM_PROMPT = (layout.REQUEST.names or ()).index("num_prompt")


def host_calls(policy: RankPolicy) -> Any:
    """Return the scheduler's functions in this process. They take the policy's rank."""
    return load_native()


class NativeDecider:
    """A `Scheduler` over the memory of C++: the block of the decisions, and their programs.

    Args:
        policy: A `RankPolicy`; its `rank` is compiled here.
        shape: Layers of the model.
        cuts: Rule for the places where ops are cut.
        limits: Settings that decisions depend on.
        capacity: Most live requests.
        calls: Loader of the scheduler's functions for a policy; by default those of this machine.
        zeros: Function that allocates the memory of the block.

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
        capacity: int,
        calls: Callable[[RankPolicy], Any] = host_calls,
        zeros: Zeros = host_zeros,
    ) -> None:
        self._calls = calls
        self.shape = shape
        self.cuts = cuts
        self.limits = limits
        self.frames: dict[FrameId, Parked] = {}
        self.running: Parked | None = None
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
            whole_steps=int(limits.whole_steps),
            **{f"floor_{name}": number for name, number in limits.floor._asdict().items()},
        )
        self.policy = policy
        self.costs = NO_COSTS
        self._do(self.native.start)

    def _do(self, function: Callable[..., Any], *numbers: int) -> Any:
        return function(self.block.address, self._rank.address, *numbers)

    def call(self, name: str, *numbers: int) -> int:
        """Call a function of `layout.CALLS`, for callers without `Request` objects."""
        answer: int | None = self._do(getattr(self.native, name), *numbers)
        return answer or 0

    @property
    def rank_address(self) -> int:
        """Address of the policy's compiled rank."""
        return self._rank.address

    def _turn(self, name: str, *numbers: int) -> Any:
        """Call one of the functions before and after a program: decide, done, stopped, failed."""
        return self._do(getattr(self.native, name), *numbers)

    # -- settings

    @property
    def policy(self) -> RankPolicy:
        """The policy whose `rank` was compiled."""
        return self._policy

    @policy.setter
    def policy(self, policy: RankPolicy) -> None:
        refuse_policy(policy, self.limits.capabilities)
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
            max_prompt_gap_ms=policy.max_prompt_gap_ms or 0,
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

    # -- hooks of subclasses that keep requests

    def _starts(self, rows: Sequence[tuple[int, ...]], now_ns: int) -> None:
        """Note that a program of these rows (`layout.ROW`) starts."""

    def _resumes(self, parked: Parked) -> None:
        """Note that a parked frame runs again."""

    def _evicted(self, request_id: RequestId) -> None:
        """Note that a request has lost its KV."""

    def _moved(self, parked: Parked) -> None:
        """Note that the counters of the requests of a frame have changed."""

    # -- the decision

    def decide(self, now_ns: int) -> Decision:
        """Return the decision: the program to run now, or a time to wait until.

        Raises:
            PolicyError: The policy planned nothing, or stalls.
        """
        answer = self._turn("decide", now_ns)
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
        self._resumes(parked)
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
        self._starts(found, now_ns)
        alone = None
        if self.limits.batch_invariant:
            alone = [self.block.request(numbers[SLOT])[_NUM_PROMPT] for numbers in found]
        program = compile_program(
            replace(plan, rows=tuple([Row(*numbers[:5]) for numbers in found])),
            frame_id=frame_id,
            samples=[bool(numbers[_FLAGS] & layout.SAMPLES) for numbers in found],
            shape=self.shape,
            cuts=self.cuts,
            one_query_from=alone,
        )
        self.running = Parked(program=program, index=START, parked_ns=now_ns)
        tables = [self._table(numbers[SLOT]) for numbers in found]
        return Decision(
            effects=(*effects, Accept(program, (), tuple(tables))),
            program=program,
            slice_ns=plan.slice_ns,
        )

    def _table(self, slot: int) -> list[int]:
        """Return the KV blocks of a request."""
        table: list[int] = []
        self.block.extend_table(slot, table)
        return table

    def _broken(self, answer: int) -> PolicyError:
        waiting = self.block.get("num_live")
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
                f"{self.block.get('num_free')} blocks are free"
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
            self._evicted(request_id)
            return EvictKv(request_id, lost, for_request)
        parked = self.frames.pop(frame_id)
        index = parked.program.layer_start(parked.index)
        self._moved(parked)
        return Split(parked.program, index)

    # -- results of a run

    def done(self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int) -> None:
        """Commit the running program, which has reached its end, and the tokens of `sampled`."""
        parked = self._take_running()
        high = _highest_layer(parked, end)
        count = self._turn("done", high, start_ns, end_ns)
        if count != len(sampled):
            raise InvariantError(f"{count} rows sample a token, the runner has {len(sampled)}")
        self._moved(parked)

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool:
        """Park the frame of the running program, which stopped at a boundary.

        See `Scheduler.stopped`.
        """
        parked = self._take_running()
        program, high = parked.program, _highest_layer(parked, end)
        layer, inside = program.layer_at(end), program.inside_layer(end)
        self._turn("stopped", high, layer, inside, start_ns, end_ns, preempted)
        parked.index = end
        parked.parked_ns = end_ns
        self.frames[program.frame_id] = parked
        self._moved(parked)
        return preempted

    def _fail(self, *numbers: int) -> tuple[Program, list[int]]:
        """Return the running program, which raised, and the slots of requests that failed alone."""
        parked = self._take_running()
        slots = self.block.ints("chosen", self._turn("failed", *numbers))
        self._moved(parked)
        return parked.program, slots

    def _take_running(self) -> Parked:
        if self.running is None:
            raise InvariantError("no program is running")
        parked, self.running = self.running, None
        return parked


def _marks(cuts: CutRule, limits: Limits) -> list[int]:
    """Return the positions where blocks of a cut rule end, from 0 to the largest KV."""
    marks = [0]
    while marks[-1] < limits.num_blocks * limits.block_size:
        marks.append(marks[-1] + cuts.block(marks[-1]))
    return marks


def _highest_layer(parked: Parked, end: Index) -> int:
    """Return the layer of the last op that a run to `end` has begun; -1 if it began none."""
    last = end.op if end.pos else end.op - 1
    return -1 if last < parked.index.op else parked.program.ops[last].layer
