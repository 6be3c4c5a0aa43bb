"""The scheduler: it gets requests, blocks and parked frames, and returns one decision.

Decisions are pure: the caller passes the time, and effects are values. `decide` calls the policy
for a plan, checks the plan against the invariants, and finds the KV for it. It returns the
`effects` that the engine must apply to the runner, the program to run, and the op to start from.
After the run the engine reports the result (`done`, `stopped`, `failed`), and the scheduler updates
its counters.
"""

from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from qllm.errors import CheckpointError, InvariantError, PolicyError, contained, told
from qllm.plan import CutRule, ModelShape, Plan, Row
from qllm.policy import NO_COSTS, CostTable, RankPolicy, StepReport, View
from qllm.scheduler.acquire import acquire, evict, give_back_rest, let_go, split, start_over
from qllm.scheduler.be_share import BeShare, is_be_alone
from qllm.scheduler.blame import Blame, blame, call_hook, plan_suspect
from qllm.scheduler.blocks import BlockPool, SwapSpace
from qllm.scheduler.changes import change, has_rank, ranked, revise, view_of, without_idle
from qllm.scheduler.compile import align_rows, compile_program
from qllm.scheduler.decision import (
    MAX_IDLE_NS,
    Accept,
    Decision,
    Drop,
    Effect,
    Limits,
    Parked,
    Patience,
)
from qllm.scheduler.preemptions import preempts
from qllm.scheduler.pressure import Pressure
from qllm.scheduler.program import START, Index, Program
from qllm.scheduler.rank_plan import shape_plan
from qllm.scheduler.ranking import Ranking
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding, settle
from qllm.scheduler.rules import broken_rule, check_state, malformed, refuse_policy
from qllm.scheduler.scoring import whose_turn
from qllm.scheduler.victims import BadVictimError, victims_for
from qllm.types import NS_PER_S, Evict, FrameId, Frontier, RequestId


class Scheduler:
    """State of decisions. The engine loop owns the scheduler, and reports each run to it."""

    def __init__(self, policy: Any, shape: ModelShape, cuts: CutRule, limits: Limits) -> None:
        refuse_policy(policy, limits.capabilities)
        self.policy = policy
        self.shape = shape
        self.cuts = cuts
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size, shape)
        self.swap = SwapSpace(limits.num_swap_blocks)
        self.requests: dict[RequestId, Request] = {}
        self.paused: set[RequestId] = set()
        self.open: set[RequestId] = set()
        self.frames: dict[FrameId, Parked] = {}
        self.away: dict[RequestId, Parked] = {}
        """Frames of swapped-out requests. Each frame has one request."""
        self.running: Parked | None = None
        self.costs: CostTable = NO_COSTS
        self.riding = Riding()
        self.be_share = BeShare(limits.floor)
        self.pressure = Pressure(limits.floor, getattr(policy, "max_be_stall_ms", None))
        self.suspects: list[RequestId] = []
        """Requests of a frame that raised. Each request is rerun alone, before anything else."""
        self.num_spared = 0
        """Passes that continued although an arrival had stopped them (`max_preemptions`)."""
        self._next_frame_id = 0
        self._owed: list[Effect] = []
        """Effects that the runner has not received yet. The next decision returns these effects."""
        self.hook_errors: deque[tuple[Any, PolicyError]] = deque()
        """Errors of hooks, each with its policy. The next decisions raise the errors one by one."""
        self._ranking: Ranking | None = None
        self._patience = Patience()

    # -- arrivals and ends of requests

    def add(self, request: Request, now_ns: int) -> None:
        """Add a request that has arrived."""
        self.requests[request.request_id] = request
        if request.is_open:
            self.open.add(request.request_id)
        self.touch(request)
        self._hook("on_arrival", now_ns, request)

    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]:
        """Remove a request that has ended. Its row is dropped and its blocks are freed."""
        request = self.requests.pop(request_id)
        self.paused.discard(request_id)
        self.open.discard(request_id)
        effects = [*self._take_owed(), *start_over(self, request)]
        request.finished = True
        if self._ranking is not None:
            self._ranking.forget(request_id)
        if request_id in self.suspects:
            self.suspects.remove(request_id)
        self._hook("on_finish", now_ns, request)
        return effects

    def update(
        self, request_id: RequestId, priority: int | None, paused: bool | None, now_ns: int
    ) -> list[Effect]:
        """Change the class of a request, pause it, or resume it; None changes nothing."""
        request = self.requests[request_id]
        if self._ranking is not None:
            self._ranking.forget(request_id)
        effects = [*self._take_owed(), *change(self, request, priority, paused, now_ns)]
        self.touch(request)
        return effects

    def revise(
        self, request_id: RequestId, num_kept: int, num_tokens: int, now_ns: int
    ) -> list[Effect]:
        """Replace the end of a request's prompt (see `qllm.scheduler.changes.revise`)."""
        request = self.requests[request_id]
        if self._ranking is not None:
            self._ranking.forget(request_id)
        effects = [*self._take_owed(), *revise(self, request, num_kept, num_tokens, now_ns)]
        self.touch(request)
        return effects

    def draft(self, request_id: RequestId, num_tokens: int, exit_layer: int = 0) -> int:
        """Let the next row of a request verify drafted tokens; return how many it can verify.

        With `exit_layer`, the next rows draft the tokens themselves.

        A request that does not decode, or is in a frame, verifies none. Any other request verifies
        as many as the limits of the answer and of a step allow. One token more than the drafts must
        fit. The drafts get a new block of KV only if each other row of the step could still get
        one.

        Args:
            request_id: Id of the request.
            num_tokens: Number of drafted tokens after the known tokens. With 0, a request whose
                rows draft verifies what they have drafted.
            exit_layer: Number of layers of the rows that draft; 0 if the tokens are known.
        """
        request = self.requests[request_id]
        if request.frontier is not None:
            if not num_tokens:
                request.end_drafting()
            return 0
        request.num_drafts = request.exit_layer = request.most_drafts = 0
        if not (request.is_decoding and request.is_admitted) or request.is_hidden:
            return 0
        known, above = request.num_tokens, self.shape.recompute_above
        room = [num_tokens, request.max_total_tokens - known - 1, self.limits.max_step_tokens - 1]
        if above is not None and known <= above:
            room.append(above - known)
        num = max(0, min(room))
        blocks_for = self.pool.blocks_for
        spare = self.pool.num_free - min(len(self.requests), self.limits.max_num_seqs)
        free = max(blocks_for(known), len(request.block_table)) + max(0, spare)
        while num and blocks_for(known + num) > free:
            num -= 1
        if not exit_layer:
            request.num_drafts = num
        elif num:
            request.exit_layer, request.most_drafts = exit_layer, num
        return num

    def add_draft(self, request_id: RequestId) -> bool:
        """Count a token that a draft row chose; return False if the request drafts no more."""
        return self.requests[request_id].add_draft()

    def _take_owed(self) -> tuple[Effect, ...]:
        effects, self._owed = tuple(self._owed), []
        return effects

    def evict(
        self, request_id: RequestId, for_request: RequestId, how: Evict = Evict.RECOMPUTE
    ) -> list[Effect]:
        """Take a request's blocks.

        Its KV is swapped out, or dropped if the swap space is too small.
        """
        return evict(self, self.requests[request_id], for_request, how)

    def found(self, request_id: RequestId, num_tokens: int, pages: Sequence[bytes]) -> None:
        """Record that the prefix cache has the first tokens of a request without KV of its own.

        Args:
            request_id: Id of the request.
            num_tokens: Number of tokens that the cache has.
            pages: Names of the pages of these tokens.
        """
        self.swap.release(request_id)
        self.requests[request_id].find(num_tokens, pages)
        self.touch(self.requests[request_id])

    def name_pages(self, request_id: RequestId, names: Sequence[bytes], page_size: int) -> None:
        """Name the committed pages in a request's first blocks, for sharing by other requests."""
        table, each = self.requests[request_id].block_table, page_size // self.pool.block_size
        for i, name in enumerate(names):
            self.pool.name(name, table[i * each : (i + 1) * each])

    def adopt(self, request: Request, *, swapped: bool = False) -> None:
        """Add a request of a checkpoint.

        It is swapped out if it was before, or if blocks are short.

        Raises:
            CheckpointError: The request's KV does not fit now.
        """
        need = self.pool.blocks_for(request.num_written_tokens)
        can_swap = swapped or (request.frontier is None and need > self.pool.num_free)
        if can_swap and need and self.swap.put(request.request_id, need):
            request.swap_out()
            need = 0
        if need > self.pool.num_free:
            raise CheckpointError(
                f"a request of the checkpoint needs {need} KV blocks, {self.pool.num_free} are "
                "free; raise max_kv_tokens or let other requests finish"
            )
        request.block_table = self.pool.take(request.request_id, need)
        self.requests[request.request_id] = request
        if request.is_paused:
            self.paused.add(request.request_id)
        self.touch(request)
        self._hook("on_arrival", request.arrival_ns, request)

    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """Add a parked frame of a checkpoint, after the frame's live requests were added."""
        parked = Parked(program=program, index=index, parked_ns=now_ns, dead=dead)
        held = parked.held_rows()
        first = self.requests[held[0].request_id]
        if first.num_swapped_tokens:
            self.away[first.request_id] = parked
            return
        self.frames[program.frame_id] = parked
        for row in held:
            self.requests[row.request_id].frame_id = program.frame_id

    def new_frame_id(self) -> FrameId:
        """Return an id that no frame has had before."""
        self._next_frame_id += 1
        return self._next_frame_id

    @property
    def has_waits(self) -> bool:
        """True if a parked frame waits for experts."""
        return any([parked.waits_for is not None for parked in self.frames.values()])

    # -- the decision

    def view(self, now_ns: int) -> View:
        """Return the state as policies see it."""
        return view_of(self, now_ns)

    def decide(self, now_ns: int) -> Decision:
        """Return what to run now.

        Raises:
            PolicyError: The policy raised, or its plan breaks an invariant. The state is unchanged.
        """
        while self.hook_errors:
            policy, error = self.hook_errors.popleft()
            if policy is self.policy:
                raise error
        if all(r.is_hidden for r in self.requests.values()):
            self._patience.renew()
            self.be_share.rest(now_ns)
            return Decision(effects=self._take_owed())
        self._owed += let_go(self)
        view = self.view(now_ns)
        turn = self.be_share.turn(view, self.policy)
        suspects = [r for i in self.suspects if not (r := self.requests[i]).is_hidden]
        plan = plan_suspect(suspects, view) or turn or self._ask(view)
        if plan.is_empty and plan.wait_until_ns is None and view.idle:
            plan = self._ask(without_idle(view))
        if plan.grain > self.limits.grain:
            plan = replace(plan, grain=self.limits.grain)
        pays = plan is turn
        plan = plan if pays else self._yielding(plan, view)
        if plan.is_empty:
            if plan.wait_until_ns is None and not self.has_waits:
                raise self._broken(
                    f"returned an empty plan with {len(view.requests)} requests waiting and no "
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
        decision = self._start(plan, rows, now_ns)
        self.be_share.starts(pays=pays and decision.program is not None)
        return decision

    def _yielding(self, plan: Plan, view: View) -> Plan:
        """Shorten a plan for BE's share, and for LS work of other engines on the same cores."""
        if not self.pressure.is_on or not is_be_alone(plan, view):
            return self.be_share.cut(plan, view)
        if not self.pressure.holds(view.now_ns):
            return self.pressure.cut(self.be_share.cut(plan, view))
        self._patience.renew()
        return Plan(wait_until_ns=self.pressure.until_ns)

    def _ask(self, view: View) -> Plan:
        try:
            with contained():
                if (ranking := self._ranked(view.now_ns)) is not None:
                    return shape_plan(view, ranking.policy, ranking)
                plan: Plan = self.policy.plan(view)
                wrong = malformed(plan)
        except Exception as error:
            raise self._raised(error) from error
        if wrong is not None:
            raise self._broken(wrong)
        return plan

    @contained()
    def _ranked(self, now_ns: int) -> Ranking | None:
        """Return the present order of all requests; None if the policy makes its own plans."""
        if not isinstance(self.policy, RankPolicy):
            return None
        if self._ranking is None or self._ranking.policy is not self.policy:
            self._ranking = Ranking(self.policy, ranked(self))
        self._ranking.update(now_ns)
        return self._ranking

    def touch(self, request: Request) -> None:
        """Rank a request again, because it arrived, or got or lost KV."""
        if self._ranking is not None and has_rank(request):
            self._ranking.touch(request)
        elif self._ranking is not None:
            self._ranking.forget(request.request_id)

    def _wait(self, until_ns: int | None, now_ns: int) -> Decision:
        """Return a decision to wait. Without a time, the engine waits until experts are read."""
        if self.has_waits:
            self._patience.renew()
            return Decision(effects=self._take_owed(), wait_until_ns=until_ns)
        until_ns = now_ns if until_ns is None else until_ns
        wait_until_ns = self._patience.until_ns(until_ns, now_ns)
        if wait_until_ns is None:
            waiting, idle_s = len(self.requests), MAX_IDLE_NS / NS_PER_S
            raise self._broken(f"stalls: {waiting} requests wait and nothing ran for {idle_s:g} s")
        return Decision(effects=self._take_owed(), wait_until_ns=wait_until_ns)

    def _broken(self, what: str) -> PolicyError:
        return PolicyError(f"policy {type(self.policy).__name__} {what}")

    def _raised(self, error: Exception) -> PolicyError:
        broken = self._broken(f"raised {told(error)}")
        if self._ranking is not None:
            broken.request_id, self._ranking.asking = self._ranking.asking, None
        return broken

    def blame(self, error: PolicyError, now_ns: int) -> Blame:
        """Find the requests that must end so that the policy works after an error of `decide`."""
        found = blame(self, error, now_ns)
        self._patience.renew()
        return found

    def empty(self, policy: Any) -> "Scheduler":
        """Return a copy of this scheduler without requests, for the trials of `blame`."""
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
        """Evict the requests that the plan names, and give every row its blocks."""
        rows = align_rows(plan.rows, self.requests, view.cuts)
        victims = partial(self._victims, view)
        kept = acquire(self, plan, rows, victims, view.now_ns, self._owed)
        if rows and not kept:
            self._no_kv(plan, self.requests[rows[0].request_id])
        return kept

    def _no_kv(self, plan: Plan, stuck: Request) -> None:
        if stuck.is_admitted:
            self._owed += self.evict(stuck.request_id, stuck.request_id, Evict.SWAP)
        elif plan.wait_until_ns is None and not self.has_waits:
            raise self._broken(
                f"planned request {stuck.request_id}, for which there is no KV: "
                f"{self.pool.num_free} blocks are free"
            )

    def _victims(
        self, view: View, request: Request, need: int, keep: frozenset[RequestId]
    ) -> list[tuple[RequestId, Evict]]:
        try:
            ranking = self._ranked(view.now_ns)
            policy, shared = self.policy, self.pool.shared
            return victims_for(policy, ranking, view, self.requests, request, need, keep, shared)
        except BadVictimError as error:
            raise self._broken(str(error)) from error
        except Exception as error:
            raise self._raised(error) from error

    # -- programs

    def _start(self, plan: Plan, rows: Sequence[Row], now_ns: int) -> Decision:
        if not rows:
            return self._wait(now_ns if self._owed else plan.wait_until_ns, now_ns)
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
        splits = [split(self, self.frames[frame_id]) for frame_id in touched]
        requests = [self.requests[row.request_id] for row in rows]
        alone = [r.num_prompt_tokens for r in requests] if self.limits.batch_invariant else None
        program = compile_program(
            plan if plan.rows == tuple(rows) else replace(plan, rows=tuple(rows)),
            frame_id=self.new_frame_id(),
            samples=[r.samples_of(row) for row, r in zip(rows, requests, strict=True)],
            shape=self.shape,
            cuts=self.cuts,
            one_query_from=alone,
            exits=tuple([n for n, r in enumerate(requests) if r.is_draft(rows[n])]),
        )
        self.running = Parked(program=program, index=START, parked_ns=now_ns)
        tables = tuple([r.block_table for r in requests])
        return Decision(
            effects=(*self._take_owed(), *splits, Accept(program, tuple(touched), tables)),
            program=program,
            slice_ns=plan.slice_ns,
        )

    def _resume(self, plan: Plan, parked: Parked) -> Decision:
        parked.program = replace(parked.program, grain=plan.grain, stop_below=plan.stop_below)
        self._unpark(parked)
        return Decision(
            effects=self._take_owed(),
            program=parked.program,
            start=parked.index,
            slice_ns=plan.slice_ns,
            resumed=True,
        )

    def _unpark(self, parked: Parked) -> None:
        """Make a parked frame the running frame."""
        frame_id = parked.program.frame_id
        self.running = self.frames.pop(frame_id)
        for row in parked.program.rows:
            request = self.requests.get(row.request_id)
            if request is not None and request.frame_id == frame_id:
                request.frame_id = None

    # -- frames that wait for experts

    def held_up(self, end: Index, start_ns: int, end_ns: int, waits_for: int) -> None:
        """Park the frame of the running program, which cannot go on before experts are read.

        Args:
            end: Boundary where the program stopped; where it started if nothing ran.
            start_ns: Time when the program began to run.
            end_ns: Time when the program stopped.
            waits_for: Number of experts.
        """
        parked, self.running = self._take_running(), None
        if end != parked.index:
            self._progress(parked, end, start_ns, end_ns)
        parked.waits_for = waits_for
        self._park(parked, end, start_ns, end_ns)
        for request, _ in parked.alive(parked.program.rows, self.requests):
            request.experts_since_ns = end_ns

    def count_wait(self, parked: Parked, now_ns: int, *, is_own: bool) -> None:
        """Count the wait of a frame until now. See `Request.count_wait`."""
        for request, _ in parked.alive(parked.program.rows, self.requests):
            request.count_wait(now_ns, is_own=is_own)

    def end_wait(self, parked: Parked) -> None:
        """Offer a frame to policies again."""
        parked.waits_for = None
        for request, _ in parked.alive(parked.program.rows, self.requests):
            request.experts_since_ns = None

    def take_up(self, parked: Parked) -> None:
        """Make a frame whose experts cannot be read the running frame, which has failed."""
        self.end_wait(parked)
        self._unpark(parked)

    # -- results of a run

    def _progress(self, parked: Parked, end: Index, start_ns: int, end_ns: int) -> None:
        """Count a run for the requests whose rows took part in it."""
        program = parked.program
        begun = end == parked.index and end != program.end  # some tasks of an op were done
        rows = program.rows_between(parked.index, Index(end.op, 1) if begun else end)
        took_part = parked.alive(rows, self.requests)
        for request, _ in took_part:
            request.served_ns += end_ns - start_ns
            request.last_progress_ns = end_ns
        self.be_share.ran(took_part, end_ns - start_ns)
        self.pressure.ran(start_ns, end_ns)
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
        """Commit the running program, which reached its end.

        Args:
            end: End of the program.
            sampled: Request of each sampled token.
            start_ns: Time when the program began to run.
            end_ns: Time when the program ended.
        """
        parked, self.running = self._take_running(), None
        self._progress(parked, end, start_ns, end_ns)
        program, grown = parked.program, Counter(sampled)
        for request, row in parked.alive(program.rows, self.requests):
            if row.end_layer < self.shape.num_layers:
                request.leave_frame(Frontier(row.lo, row.hi, row.end_layer))
                continue
            may_have_spare = bool(request.num_drafts or request.exit_layer)
            request.commit(row.hi, end_ns, grown[row.request_id])
            if may_have_spare:
                give_back_rest(self, request, request.num_tokens)
            if row.request_id in self.suspects:
                self.suspects.remove(row.request_id)
                request.failures = 0
        report = StepReport(start_ns, end_ns, program.rows, True, tuple(sampled))
        self._hook("on_step_done", end_ns, report)

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool:
        """Park the frame of the running program, which stopped at a boundary.

        Args:
            end: Boundary where the program stopped.
            start_ns: Time when the program began to run.
            end_ns: Time when the program stopped.
            preempted: True if an arrival stopped the program.

        Returns:
            True if the program is preempted, False if the arrival has to wait for it (`preempts`).
        """
        parked, self.running = self._take_running(), None
        preempted = preempts(
            self.policy, self.requests, parked, start_ns, end_ns, by_arrival=preempted
        )
        self.num_spared += parked.alarm_ns == end_ns
        self._progress(parked, end, start_ns, end_ns)
        for request, _ in parked.alive(parked.program.rows, self.requests):
            request.preemptions += preempted
        self._park(parked, end, start_ns, end_ns)
        return preempted

    def _park(self, parked: Parked, end: Index, start_ns: int, end_ns: int) -> None:
        parked.index = end
        parked.parked_ns = end_ns
        program = parked.program
        for r, row in enumerate(program.rows):
            request = self.requests.get(row.request_id)
            if request is None or row.request_id in parked.dead:
                continue
            layer = program.frontier_layer(r, end)
            front = Frontier(row.lo, row.hi, layer)
            request.park(program.frame_id, front, is_draft=r in program.exits)
        self.frames[program.frame_id] = parked
        report = StepReport(start_ns, end_ns, program.rows, False, ())
        self._hook("on_step_done", end_ns, report)

    def failed(self) -> tuple[list[Effect], list[Request]]:
        """Drop the frame of the running program, which raised, and rerun its requests one by one.

        Returns:
            Effects, and the requests that also failed alone, which must end with `error`.
        """
        parked, self.running = self._take_running(), None
        hopeless = []
        for request, row in parked.alive(parked.program.rows, self.requests):
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
        """Check the invariants of the state. Tests call it after every step and when idle."""
        check_state(self.requests, self.frames, self.pool, self.swap, self.away)
        if self._ranking is not None:
            self._ranking.check(ranked(self))
