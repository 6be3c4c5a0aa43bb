"""The scheduler: requests, blocks and parked frames in; one decision out.

Pure decisions: time arrives as an argument, effects leave as values. `decide` asks the policy
for a plan, checks it against the invariants, finds the KV it needs, and answers with what the
engine must do to the runner (`effects`) and which program to run from where. After the run the
engine reports back (`done`, `stopped`, `failed`), and the counters move.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from qllm.errors import CheckpointError, InvariantError, PolicyError
from qllm.plan import CutRule, ModelShape, Plan, Row
from qllm.policy import NO_COSTS, CostTable, FrameView, RankPolicy, StepReport, View
from qllm.scheduler.acquire import acquire
from qllm.scheduler.blame import Blame, blame, call_hook, plan_suspect
from qllm.scheduler.blocks import BlockPool, SwapSpace
from qllm.scheduler.compile import align_rows, compile_program
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
    Patience,
    Split,
    SwapOut,
)
from qllm.scheduler.program import START, Index, Program
from qllm.scheduler.rank_plan import shape_plan
from qllm.scheduler.ranking import Ranking
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding, settle
from qllm.scheduler.rules import broken_rule, check_state, malformed, refuse_policy
from qllm.scheduler.turns import whose_turn
from qllm.scheduler.victims import BadVictimError, victims_for
from qllm.types import NS_PER_S, Evict, FrameId, Frontier, RequestId


class Scheduler:
    """State of decisions, owned by the loop; large because requests and blocks change together."""

    def __init__(self, policy: Any, shape: ModelShape, cuts: CutRule, limits: Limits) -> None:
        refuse_policy(policy, limits.capabilities)
        self.policy = policy
        self.shape = shape
        self.cuts = cuts
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.swap = SwapSpace(limits.num_swap_blocks)
        self.requests: dict[RequestId, Request] = {}
        self.frames: dict[FrameId, Parked] = {}
        self.running: Parked | None = None
        self.costs: CostTable = NO_COSTS
        self.riding = Riding()
        self.suspects: list[RequestId] = []
        """Requests of a frame that raised; rerun one by one, before anything else."""
        self._next_frame_id = 0
        self._owed: list[Effect] = []
        """Done to the state and not yet to the runner; leaves with the next effects."""
        self.hook_errors: deque[tuple[Any, PolicyError]] = deque()
        """Errors of hooks, each with its policy; the next decisions raise them one by one."""
        self._ranking: Ranking | None = None
        self._patience = Patience()

    # -- requests come and go

    def add(self, request: Request, now_ns: int) -> None:
        """A request arrived."""
        self.requests[request.request_id] = request
        self.touch(request)
        self._hook("on_arrival", now_ns, request)

    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]:
        """A request ended, for whatever reason: its row dies, its blocks come back."""
        request = self.requests.pop(request_id)
        effects = [*self._take_owed(), *self._start_over(request)]
        request.finished = True
        if self._ranking is not None:
            self._ranking.forget(request_id)
        if request_id in self.suspects:
            self.suspects.remove(request_id)
        self._hook("on_finish", now_ns, request)
        return effects

    def _start_over(self, request: Request) -> list[Effect]:
        """Its row dies, its blocks come back, and nothing of it is computed."""
        effects = self._free_blocks(request)
        self.swap.release(request.request_id)
        request.reset()
        return effects

    def _free_blocks(self, request: Request) -> list[Effect]:
        effects = self._leave_frame(request)
        self.pool.give_back(request.request_id, request.block_table)
        request.block_table = []
        return effects

    def _leave_frame(self, request: Request) -> list[Effect]:
        frame_id = request.frame_id
        if frame_id is None:
            return []
        parked = self.frames[frame_id]
        parked.dead.add(request.request_id)
        if parked.held_rows():
            return [Kill(parked.program, request.request_id)]
        del self.frames[frame_id]
        return [Drop(parked.program)]

    def _take_owed(self) -> tuple[Effect, ...]:
        effects, self._owed = tuple(self._owed), []
        return effects

    def _let_go(self) -> None:
        """Drop parked frames whose remaining rows have all left the sweep."""
        for parked in [p for p in self.frames.values() if p.dead and not p.live_rows()]:
            # the work in this layer was of cancelled rows; live rows left the sweep at its start
            parked.index = parked.program.layer_start(parked.index)
            self._owed.append(self._split(parked))

    def _split(self, parked: Parked) -> Split:
        del self.frames[parked.program.frame_id]
        for row in parked.held_rows():
            self.requests[row.request_id].leave_frame(Frontier(row.lo, row.hi, row.start_layer))
        return Split(parked.program, parked.index)

    def evict(
        self, request_id: RequestId, for_request: RequestId, how: Evict = Evict.RECOMPUTE
    ) -> list[Effect]:
        """Take a request's blocks: its KV moves out, or, for want of room, it starts over."""
        request = self.requests[request_id]
        computed = request.num_computed_tokens
        blocks = self.pool.blocks_for(computed)
        swaps = how is Evict.SWAP and blocks > 0 and self.swap.put(request_id, blocks)
        if swaps:
            effects = self._free_blocks(request)
            request.swap_out()
        else:
            effects = self._start_over(request)
            request.evictions += 1
        self.touch(request)
        done = SwapOut if swaps else EvictKv
        return [*effects, done(request_id, computed, for_request)]

    def found(self, request_id: RequestId, num_tokens: int) -> None:
        """The prefix cache has the first tokens of a request without KV."""
        self.requests[request_id].find(num_tokens)
        self.touch(self.requests[request_id])

    def adopt(self, request: Request) -> None:
        """Take over a request of a checkpoint; for want of blocks its KV counts as swapped out.

        Raises:
            CheckpointError: Its KV does not fit now.
        """
        front = request.frontier
        reached = request.num_computed_tokens if front is None else front.hi
        need = self.pool.blocks_for(reached)
        if need > self.pool.num_free and front is None and self.swap.put(request.request_id, need):
            request.num_swapped_tokens, need = reached, 0
        if need > self.pool.num_free:
            raise CheckpointError(
                f"a request of the checkpoint needs {need} KV blocks, {self.pool.num_free} are "
                "free; raise max_kv_tokens or let other requests finish"
            )
        request.block_table = self.pool.take(request.request_id, need)
        self.requests[request.request_id] = request
        self.touch(request)
        self._hook("on_arrival", request.arrival_ns, request)

    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """Take over a parked frame whose live requests were adopted."""
        parked = Parked(program=program, index=index, parked_ns=now_ns, dead=dead)
        self.frames[program.frame_id] = parked
        for row in parked.held_rows():
            self.requests[row.request_id].frame_id = program.frame_id

    def new_frame_id(self) -> FrameId:
        """An id no frame had before."""
        self._next_frame_id += 1
        return self._next_frame_id

    # -- the decision

    def view(self, now_ns: int) -> View:
        """The state as policies see it."""
        return View(
            now_ns=now_ns,
            requests=tuple(self.requests.values()),
            by_id=self.requests,
            frames=tuple(
                FrameView(frame_id, parked.live_rows(), parked.parked_ns)
                for frame_id, parked in self.frames.items()
            ),
            shape=self.shape,
            max_num_seqs=self.limits.max_num_seqs,
            max_step_tokens=self.limits.max_step_tokens,
            block_size=self.limits.block_size,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.limits.num_blocks,
            num_free_swap_blocks=self.swap.num_free,
            costs=self.costs,
            finest_grain=self.limits.grain,
            max_segment_ns=self.limits.max_segment_ns,
            ride_credit_ns=self.riding.credit_ns,
            ride_margin_ns=self.riding.margin_ns,
            ride_used_ns=self.riding.used_ns(now_ns),
            capabilities=self.limits.capabilities,
            cuts=self.cuts if self.limits.batch_invariant else None,
            whole_steps=self.limits.whole_steps,
        )

    def decide(self, now_ns: int) -> Decision:
        """What to run now.

        Raises:
            PolicyError: The policy raised, or its plan breaks an invariant; nothing changed.
        """
        while self.hook_errors:
            policy, error = self.hook_errors.popleft()
            if policy is self.policy:
                raise error
        if not self.requests:
            self._patience.renew()
            return Decision(effects=self._take_owed())
        self._let_go()
        view = self.view(now_ns)
        plan = plan_suspect([self.requests[i] for i in self.suspects], view) or self._ask(view)
        if plan.grain > self.limits.grain:
            plan = replace(plan, grain=self.limits.grain)
        if not (plan.rows or plan.drop or plan.swap_out):
            if plan.wait_until_ns is None:
                raise self._broken(
                    f"returned an empty plan with {len(self.requests)} requests waiting and no "
                    "wait_until_ns (I8)"
                )
            return self._wait(plan.wait_until_ns, now_ns)
        touched = self._touched(plan.rows)
        frames = {f.frame_id: f.rows for f in view.frames if f.frame_id in touched}
        wrong = broken_rule(plan, self.requests, frames, self.shape.num_layers, view)
        if wrong is not None:
            raise self._broken(wrong)
        rows = self._acquire(view, plan)
        plan, rows = whose_turn(plan, rows, self.requests, self.costs, self.shape.num_layers)
        return self._start(plan, rows, now_ns)

    def _ask(self, view: View) -> Plan:
        try:
            ranking = self._ranked(view.now_ns)
            if ranking is not None:
                return shape_plan(view, ranking.policy, ranking)
            plan: Plan = self.policy.plan(view)
        except Exception as error:
            raise self._raised(error) from error
        wrong = malformed(plan)
        if wrong is not None:
            raise self._broken(wrong)
        return plan

    def _ranked(self, now_ns: int) -> Ranking | None:
        """The order of all requests as of now; None if the policy plans by itself."""
        if not isinstance(self.policy, RankPolicy):
            return None
        if self._ranking is None or self._ranking.policy is not self.policy:
            self._ranking = Ranking(self.policy, self.requests.values())
        self._ranking.update(now_ns)
        return self._ranking

    def touch(self, request: Request) -> None:
        """It arrived, or holds KV now, or no more: its rank and its place are looked at again."""
        if self._ranking is not None:
            self._ranking.touch(request)

    def _wait(self, until_ns: int, now_ns: int) -> Decision:
        wait_until_ns = self._patience.until_ns(until_ns, now_ns)
        if wait_until_ns is None:
            waiting, idle_s = len(self.requests), MAX_IDLE_NS / NS_PER_S
            raise self._broken(f"stalls: {waiting} requests wait and nothing ran for {idle_s:g} s")
        return Decision(effects=self._take_owed(), wait_until_ns=wait_until_ns)

    def _broken(self, what: str) -> PolicyError:
        return PolicyError(f"policy {type(self.policy).__name__} {what}")

    def _raised(self, error: Exception) -> PolicyError:
        broken = self._broken(f"raised {type(error).__name__}: {error}")
        if self._ranking is not None:
            broken.request_id, self._ranking.asking = self._ranking.asking, None
        return broken

    def blame(self, error: PolicyError, now_ns: int) -> Blame:
        """Say whose end lets the policy go on after `decide` has raised an error."""
        found = blame(self, error, now_ns)
        self._patience.renew()
        return found

    def empty(self, policy: Any) -> "Scheduler":
        """A scheduler like this one that knows no request: `blame` fills and asks it."""
        twin = Scheduler(policy, self.shape, self.cuts, self.limits)
        twin.costs, twin.riding, twin._patience = self.costs, self.riding, copy(self._patience)
        return twin

    def _hook(self, name: str, now_ns: int, subject: Request | StepReport) -> None:
        error = call_hook(self, name, subject, now_ns)
        if error is not None:
            self.hook_errors.append((self.policy, error))

    def _touched(self, rows: Sequence[Row]) -> list[FrameId]:
        if not self.frames:
            return []
        requests = (self.requests.get(row.request_id) for row in rows)
        return sorted({r.frame_id for r in requests if r is not None and r.frame_id is not None})

    # -- KV blocks

    def _acquire(self, view: View, plan: Plan) -> list[Row]:
        """Take KV from whom the plan says, and give every row its blocks."""
        rows = align_rows(plan.rows, self.requests, view.cuts)
        victims = partial(self._victims, view)
        kept = acquire(self, plan, rows, victims, view.now_ns, self._owed)
        if rows and not kept:
            self._no_kv(plan, self.requests[rows[0].request_id])
        return kept

    def _no_kv(self, plan: Plan, stuck: Request) -> None:
        if stuck.is_admitted:
            self._owed += self.evict(stuck.request_id, stuck.request_id, Evict.SWAP)
        elif plan.wait_until_ns is None:
            raise self._broken(
                f"planned request {stuck.request_id}, for which there is no KV: "
                f"{self.pool.num_free} blocks are free"
            )

    def _victims(
        self, view: View, request: Request, need: int, keep: frozenset[RequestId]
    ) -> list[tuple[RequestId, Evict]]:
        try:
            ranking = self._ranked(view.now_ns)
            return victims_for(self.policy, ranking, view, self.requests, request, need, keep)
        except BadVictimError as error:
            raise self._broken(str(error)) from error
        except Exception as error:
            raise self._raised(error) from error

    # -- programs

    def _start(self, plan: Plan, rows: Sequence[Row], now_ns: int) -> Decision:
        if not rows:
            until_ns = now_ns if self._owed else plan.wait_until_ns
            return self._wait(now_ns if until_ns is None else until_ns, now_ns)
        touched = self._touched(rows)
        if len(touched) == 1:
            parked = self.frames[touched[0]]
            if set(parked.live_rows()) == set(rows):
                return self._resume(plan, parked)
        for frame_id in touched:
            parked = self.frames[frame_id]
            if parked.program.inside_layer(parked.index):
                limit = parked.program.layer_end(parked.index)
                return replace(self._resume(plan, parked), limit=limit)
        splits = [self._split(self.frames[frame_id]) for frame_id in touched]
        requests = [self.requests[row.request_id] for row in rows]
        alone = [r.num_prompt_tokens for r in requests] if self.limits.batch_invariant else None
        program = compile_program(
            plan if plan.rows == tuple(rows) else replace(plan, rows=tuple(rows)),
            frame_id=self.new_frame_id(),
            samples=[row.hi == r.num_tokens for row, r in zip(rows, requests, strict=True)],
            shape=self.shape,
            cuts=self.cuts,
            one_query_from=alone,
        )
        self.running = Parked(program=program, index=START, parked_ns=now_ns)
        tables = tuple([r.block_table for r in requests])
        return Decision(
            effects=(*self._take_owed(), *splits, Accept(program, tuple(touched), tables)),
            program=program,
            slice_ns=plan.slice_ns,
        )

    def _resume(self, plan: Plan, parked: Parked) -> Decision:
        program = replace(parked.program, grain=plan.grain, stop_below=plan.stop_below)
        parked.program = program
        self.running = self.frames.pop(program.frame_id)
        for row in program.rows:
            request = self.requests.get(row.request_id)
            if request is not None and request.frame_id == program.frame_id:
                request.frame_id = None
        return Decision(
            effects=self._take_owed(),
            program=program,
            start=parked.index,
            slice_ns=plan.slice_ns,
            resumed=True,
        )

    # -- what became of it

    def _progress(self, parked: Parked, end: Index, start_ns: int, end_ns: int) -> None:
        """Count the run for the requests whose rows took part in it."""
        program = parked.program
        for row in program.rows_between(parked.index, end):
            request = self.requests.get(row.request_id)
            if request is None or row.request_id in parked.dead:
                continue
            request.served_ns += end_ns - start_ns
            request.last_progress_ns = end_ns
        self._settle_ride(program, end == program.end, start_ns, end_ns)

    def _settle_ride(self, program: Program, done: bool, start_ns: int, end_ns: int) -> None:
        """Earn or spend the time that worse tiers may take from decoding requests."""
        policy = self.policy
        if not isinstance(policy, RankPolicy) or not policy.ride.frac:
            return
        try:
            ranking = self._ranked(end_ns)
        except Exception as error:  # noqa: BLE001 - reported by the next decision
            self.hook_errors.append((policy, self._raised(error)))
            return
        assert ranking is not None
        self.riding = settle(self.riding, ranking, self.costs, program, done, start_ns, end_ns)

    def done(self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int) -> None:
        """The running program reached its end; `sampled` requests have one more token."""
        parked, self.running = self._take_running(), None
        self._progress(parked, end, start_ns, end_ns)
        program, grown = parked.program, set(sampled)
        for row in program.rows:
            request = self.requests.get(row.request_id)
            if request is None or row.request_id in parked.dead:
                continue
            if row.end_layer < self.shape.num_layers:
                request.leave_frame(Frontier(row.lo, row.hi, row.end_layer))
                continue
            request.commit(row.hi, end_ns, row.request_id in grown)
            if row.request_id in self.suspects:
                self.suspects.remove(row.request_id)
                request.failures = 0
        report = StepReport(start_ns, end_ns, program.rows, True, tuple(sampled))
        self._hook("on_step_done", end_ns, report)

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> None:
        """The running program stopped at a boundary: park its frame."""
        parked, self.running = self._take_running(), None
        self._progress(parked, end, start_ns, end_ns)
        parked.index = end
        parked.parked_ns = end_ns
        program = parked.program
        for r, row in enumerate(program.rows):
            request = self.requests.get(row.request_id)
            if request is None or row.request_id in parked.dead:
                continue
            layer = program.frontier_layer(r, end)
            request.park(program.frame_id, Frontier(row.lo, row.hi, layer))
            request.preemptions += preempted
        self.frames[program.frame_id] = parked
        report = StepReport(start_ns, end_ns, program.rows, False, ())
        self._hook("on_step_done", end_ns, report)

    def failed(self) -> tuple[list[Effect], list[Request]]:
        """The running program raised: drop its frame and rerun its requests one by one.

        Returns:
            Effects, and the requests that failed alone: they must end in `error`.
        """
        parked, self.running = self._take_running(), None
        hopeless = []
        rows = [r for r in parked.program.rows if r.request_id in self.requests]
        for row in rows:
            if row.request_id in parked.dead:
                continue
            request = self.requests[row.request_id]
            request.abort_row()
            request.failures += 1
            if request.failures > 1:
                hopeless.append(request)
            elif row.request_id not in self.suspects:
                self.suspects.append(row.request_id)
        return [Drop(parked.program)], hopeless

    def _take_running(self) -> Parked:
        if self.running is None:
            raise InvariantError("no program is running")
        self._patience.renew()
        return self.running

    def check(self) -> None:
        """Check the invariants of the state; called by tests after every step, and when idle."""
        check_state(self.requests, self.frames, self.pool, self.swap)
        if self._ranking is not None:
            self._ranking.check(self.requests.values())
