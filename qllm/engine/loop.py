"""The engine loop: rings -> scheduler -> runner -> tokens. API, simulator and tests run this loop.

take what arrived -> decide -> effects -> run a program until its end or a boundary
     ^                                                              |
     +------------- tokens out, requests finished <-----------------+
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from qllm.drafters.exit import Exit
from qllm.drafters.protocol import MakeDrafter
from qllm.engine.costs import StepCosts
from qllm.engine.delivery import Delivery
from qllm.engine.drafts import Drafts
from qllm.engine.effects import Effects
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.prompt_updates import PromptUpdates, why
from qllm.engine.protocol import Deciding, Neighbourly, Newcomers, Sink, Waits
from qllm.errors import PolicyError, contained, without_ticket
from qllm.ingress import CONTROL, Call, Cancel, Ingress, Item, Revision, Submission, Update
from qllm.ingress.admission import refusal
from qllm.record import trace
from qllm.record.metrics import MetricsBuilder, RequestMetrics
from qllm.runner.protocol import Runner
from qllm.scheduler.decision import Decision
from qllm.scheduler.program import Index, Program
from qllm.scheduler.request import Request
from qllm.types import FinishReason, Grain, Priority, RequestId, Sampled

MAX_POLICY_ERRORS = 1000
"""Number of latest policy errors kept for statistics."""
WhyNotDone = Literal["stopped", "slice", "experts"]


class Live(NamedTuple):
    """A request in the engine loop: its submission and the scheduler's counters."""

    submission: Submission
    request: Request


def request_of(item: Submission) -> Request:
    """Return the scheduler's view of a request that arrives."""
    return Request(
        request_id=item.request_id,
        priority=item.priority,
        arrival_ns=item.arrival_ns,
        num_prompt_tokens=item.num_prompt_tokens,
        num_tokens=len(item.token_ids),
        max_tokens=item.max_tokens,
        slo=item.slo,
        is_open=item.is_open,
    )


def _why_not_done(*, waits: bool, by_word: bool) -> WhyNotDone:
    """Return why a run ended before its program, for the record."""
    if waits:
        return "experts"
    return "stopped" if by_word else "slice"


class EngineLoop:
    """A loop that runs requests to their end. Single-threaded: one thread calls `step` or `serve`.

    Large because the state of live requests has one owner. Effects, costs and prefixes have
    modules of their own.

    Args:
        ingress: Source of submissions.
        scheduler: State and decisions.
        runner: Executor of programs.
        sink: Receiver of tokens.
        now_ns: The engine's clock.
        record: Receiver of every event, or None.
        fallback: A policy used after the chosen policy breaks. None fails the requests instead.
        prefix: The prefix cache, or None.
        decided: Callback after each decision: number of live requests, number of waiting ones.
        costs: Fit of run times; None makes a new one.
    """

    def __init__(
        self,
        ingress: Ingress,
        scheduler: Deciding,
        runner: Runner,
        sink: Sink,
        now_ns: Callable[[], int],
        record: trace.Trace | None = None,
        fallback: Any = None,
        decided: Callable[[int, int], None] | None = None,
        prefix: PrefixCache | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.ingress = ingress
        self.scheduler = scheduler
        self.runner = runner
        self.sink = sink
        self.now_ns = now_ns
        self.record = record
        self.listeners: tuple[Callable[[trace.Event], object], ...] = (
            () if record is None else (record.append,)
        )
        """Functions that the loop's thread calls with every event. The tuple is replaced as a
        whole, never changed."""
        self.fallback = fallback
        self.decided = decided
        self.prefix = prefix
        self.metrics = MetricsBuilder()
        self.effects = Effects(runner, prefix, self._emit, now_ns)
        self.prompt_updates = PromptUpdates(
            scheduler, runner, self.effects, prefix, self._emit, now_ns
        )
        self.costs = StepCosts() if costs is None else costs
        self.drafts: Drafts | None = None
        """Drafters of next tokens; None decodes one token at a time."""
        self.newcomers: Newcomers | None = None
        """Receiver of requests that bring KV from another engine."""
        self.waits: Waits | None = None
        """Frames that wait for experts; None if all experts are in memory."""
        self.neighbours: Neighbourly | None = None
        """The other engines on the same cores; None if the engine is in no group."""
        self.live: dict[RequestId, Live] = {}
        self._delivery = Delivery(sink, self.live, self._emit, self.finish)
        self._expiries: list[tuple[int, RequestId]] = []
        """A heap of timeouts, including those of requests that have ended."""
        self.pending: deque[Item] = deque()
        """Items drained from the ingress but not handled yet."""
        self.closing = False
        self.preempt_latencies_ns: deque[int] = deque(maxlen=100_000)
        self.num_preemptions = 0
        """Number of all preemptions, including those whose latencies the deque has dropped."""
        self.policy_errors: deque[str] = deque(maxlen=MAX_POLICY_ERRORS)
        self.longest_plan_ns = 0

    def draft_with(
        self,
        make: MakeDrafter | Exit,
        most: int,
        warn: Callable[[str], object],
        *,
        weighs: bool = True,
    ) -> None:
        """Let drafters propose next tokens. See `qllm.engine.drafts.Drafts`."""
        scheduler, runner, emit = self.scheduler, self.runner, self._emit
        self.drafts = Drafts(scheduler, runner, make, most, emit, self.now_ns, warn, weighs=weighs)

    # -- the loop

    def serve(self) -> None:
        """Serve until `close` is called."""
        while not self.closing:
            self.step()

    def step(self) -> bool:
        """Take new items and run one program; return True if a program ran."""
        self.take()
        now = self.now_ns()
        self._expire(now)
        for parked, error in () if self.waits is None else self.waits.turn(now):
            self._emit(trace.Resumed(at_ns=now, frame_id=parked.program.frame_id))
            self._failed(parked.program, parked.index, now, error)
        if not self.closing:
            now = self._prepare(now)
        if self.closing:
            return False
        try:
            decision = self.scheduler.decide(now)
        except PolicyError as error:
            self._policy_broke(error)
            return False
        start_ns = self.now_ns()
        self.longest_plan_ns = max(self.longest_plan_ns, start_ns - now)
        try:
            for effect in decision.effects:
                self.effects.apply(effect)
        except Exception as error:
            self._raise_fault(error)
            if decision.program is None:
                raise
            self._failed(decision.program, decision.start, start_ns, error)
            return False
        if self.decided is not None:
            self.decided(len(self.live), self.num_waiting)
        if decision.program is None:
            self._idle(decision)
            return False
        self._run(decision)
        return True

    def _prepare(self, now: int) -> int:
        """Look at other engines and for cached KV, and ask the drafters.

        Return the time of the decision after them.
        """
        if self.neighbours is not None:
            self.neighbours.turn(self._has_ls_work, now)
        if self.prefix is not None:
            self.prefix.seek()
        if self.drafts is None:
            return now
        if self.drafts.ask(self.live):
            self.take()  # the arrival that stopped the draft model
        return self.now_ns()

    @property
    def _has_ls_work(self) -> bool:
        """True if a request of LS could run now, or waits for KV or a seat."""
        requests = [live.request for live in self.live.values()]
        return any(r.priority <= Priority.LS and not r.is_hidden for r in requests)

    def close(self) -> None:
        """End every request with `cancelled` and stop serving. Called on the loop's thread."""
        self.closing = True
        for request_id in list(self.live):
            self.finish(request_id, FinishReason.CANCELLED)
        self._emit(trace.EngineClosed(at_ns=self.now_ns()))

    def take(self) -> None:
        """Take all items that have arrived. Called between two programs, also by a `Call`."""
        self.pending.extend(self.ingress.drain())
        while self.pending:
            item = self.pending.popleft()
            if isinstance(item, Submission):
                self._take_in(item)
            elif isinstance(item, Revision):
                self._revise(item)
            elif isinstance(item, Cancel):
                self.finish(item.request_id, item.reason)
            elif isinstance(item, Update):
                self._update(item)
            else:
                self._call(item)

    def _take_in(self, item: Submission) -> None:
        """Admit a request, or end the request. The loop continues whatever the request contains."""
        text = refusal(item, self.runner.shape, self.scheduler.limits.max_kv_tokens)
        try:
            if text is None:
                self.admit(item)
                return
            self.meet(item)
        except Exception as error:  # noqa: BLE001 - fails this request, not the engine
            self._raise_fault(error)
            text = f"{type(error).__name__}: {error}"
        if item.request_id in self.live:
            self.finish(item.request_id, FinishReason.ERROR, text)
        else:
            self.end(item.request_id, FinishReason.ERROR, text)

    def _revise(self, item: Revision) -> None:
        """Replace the prompt of a streaming request, or end it. The loop continues in any case."""
        live = self.live.get(item.request_id)
        if live is None:
            return
        try:
            whole = self.prompt_updates.whole(live.submission, live.request, item)
            self._know(whole, live.request)
            self.prompt_updates.apply(whole, live.request, item, self.record is not None)
        except Exception as error:  # noqa: BLE001 - fails this request, not the engine
            self._raise_fault(error)
            self.finish(item.request_id, FinishReason.ERROR, why(error))

    def _update(self, item: Update) -> None:
        """Change a request's class, pause the request, or end it.

        Does nothing after the request's end.
        """
        live = self.live.get(item.request_id)
        if live is None:
            return
        now, request = self.now_ns(), live.request
        for effect in self.scheduler.update(item.request_id, item.priority, item.paused, now):
            self.effects.apply(effect)
        if self.prefix is not None:
            self.prefix.updated(item.request_id)
        self._emit(
            trace.Updated(
                at_ns=now,
                request_id=item.request_id,
                priority=request.priority,
                is_paused=request.is_paused,
            )
        )

    def _call(self, call: Call) -> None:
        try:
            with contained():
                result = call.function()
        except Exception as error:  # noqa: BLE001 - raised again in the caller
            call.answer(None, error)
        else:
            call.answer(result, None)

    def admit(self, item: Submission) -> Request:
        """Add a request to the runner and the scheduler."""
        self.meet(item)
        request = request_of(item)
        most = self.most_tokens if item.is_open else request.max_total_tokens
        self.runner.add(
            item.request_id, item.token_ids, item.sampling, item.num_prompt_tokens, most
        )
        self._know(item, request)
        now = self.now_ns()
        if self.newcomers is not None and self.newcomers.enter(item, request):
            found = request.num_computed_tokens
            self._emit(trace.Reused(at_ns=now, request_id=item.request_id, num_tokens=found))
        else:
            self.scheduler.add(request, now)
        if self.prefix is not None:
            self.prefix.add(item, request)
        return request

    def restored(self, item: Submission, request: Request, *, swapped: bool = False) -> None:
        """Add a request of a checkpoint. The runner must have the request before the next step."""
        self.meet(item)
        self.scheduler.adopt(request, swapped=swapped)
        self._know(item, request)

    def disown(self, request_id: RequestId) -> None:
        """Undo `restored`, fully or in part, for a damaged checkpoint."""
        text = "its checkpoint is not whole"
        if request_id in self.live:
            self.finish(request_id, FinishReason.ERROR, text)
        else:
            self.runner.remove(request_id)
            self.end(request_id, FinishReason.ERROR, text)

    def restored_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """Add a parked frame of a checkpoint, which the runner has already."""
        self.scheduler.adopt_frame(program, index, dead, now_ns)
        self._emit(trace.planned(program, (), now_ns))
        self._emit(trace.parked(program, index, now_ns, None))

    def end(self, request_id: RequestId, reason: FinishReason, error: str | None) -> None:
        """Finish a request without a call of the runner. Called when the loop is about to exit."""
        self.live.pop(request_id, None)
        now = self.now_ns()
        finished = trace.Finished(at_ns=now, request_id=request_id, reason=reason, error=error)
        self.sink.on_finish(request_id, reason, error, self._emit(finished))

    def meet(self, item: Submission) -> None:
        """Record the arrival of a submission."""
        prompt = item.token_ids[: item.num_prompt_tokens]
        self._emit(
            trace.Arrived(
                at_ns=item.arrival_ns,
                request_id=item.request_id,
                priority=item.priority,
                num_prompt_tokens=item.num_prompt_tokens,
                max_tokens=item.max_tokens,
                name=item.name,
                token_ids=prompt if self.record is not None else None,
                sampling=trace.sampling_to_dict(item.sampling) if self.record is not None else None,
            )
        )

    def _know(self, item: Submission, request: Request) -> None:
        self.live[item.request_id] = Live(item, request)
        asks = item.sampling.prompt_logprobs is not None
        request.owes_prompt = asks and request.num_output_tokens == 0
        if item.deadline_ns is not None:
            heappush(self._expiries, (item.deadline_ns, item.request_id))

    def _expire(self, now: int) -> None:
        while (expiry_ns := self._next_expiry_ns()) is not None and expiry_ns <= now:
            self.finish(self._expiries[0][1], FinishReason.TIMEOUT)

    def _next_expiry_ns(self) -> int | None:
        expiries = self._expiries
        while expiries and expiries[0][1] not in self.live:
            heappop(expiries)
        return expiries[0][0] if expiries else None

    def _idle(self, decision: Decision) -> None:
        if self.drafts is not None:
            self.drafts.paused()
        if self.prefix is not None and self.prefix.keep_rests():
            return  # looks for arrivals before it copies more
        ends = [decision.wait_until_ns, self._next_expiry_ns()]
        if self.waits is not None:
            if not self.waits.sleep():
                return
            ends.append(self.waits.next_turn_ns(self.now_ns()))
        until = [t for t in ends if t is not None]
        self.ingress.wait(min(until) - self.now_ns() if until else None)

    # -- one program

    def _run(self, decision: Decision) -> None:
        program = decision.program
        assert program is not None
        stop = self.ingress.stop
        start_ns = self.now_ns()
        if decision.resumed:
            self._emit(trace.Resumed(at_ns=start_ns, frame_id=program.frame_id))
        ends = [self._next_expiry_ns()] if program.grain > Grain.STEP else []
        if decision.slice_ns is not None:
            ends.append(start_ns + decision.slice_ns)
        stop.stop_at_ns = min((t for t in ends if t is not None), default=None)
        limited = program if decision.limit is None else program.until(decision.limit)
        try:
            end = self.runner.run(limited, decision.start, stop)
            is_done = end == program.end
            sampled = self.runner.finish(program) if is_done else []
        except Exception as error:  # noqa: BLE001 - fails its requests, not the engine
            self._raise_fault(error)
            self._failed(program, decision.start, start_ns, error)
            return
        end_ns = self.now_ns()
        waits = self.waits is not None and self.waits.ran(program, end, start_ns, end_ns)
        by_word = not (is_done or waits) and CONTROL < stop.word < program.stop_below
        self._emit(
            trace.Ran(
                start_ns=start_ns,
                at_ns=end_ns,
                frame_id=program.frame_id,
                start=decision.start,
                end=end,
                why="done" if is_done else _why_not_done(waits=waits, by_word=by_word),
                segments=max(1, end.op - decision.start.op),
            )
        )
        if is_done:
            self._done(program, decision, sampled, start_ns, end_ns)
        elif waits:
            self._held_up(program, end)
        else:
            self._parked(program, end, start_ns, end_ns, by_word)

    def _done(
        self,
        program: Program,
        decision: Decision,
        sampled: Sequence[Sampled],
        start_ns: int,
        end_ns: int,
    ) -> None:
        ids = [s.request_id for s in sampled]
        self.scheduler.done(program.end, ids, start_ns, end_ns)
        if self.drafts is not None:
            ran = (start_ns, end_ns) if decision.start == (0, 0) else None
            self.drafts.verified(program, sampled, ran)
        if self.prefix is not None:
            for token in sampled:
                self.prefix.took(token.request_id, token.token_id)
            self.prefix.keep_rests()
            for request_id in program.request_ids:
                self.prefix.keep(request_id)
        if self.scheduler.limits.num_swap_blocks:
            done = [self.live[i].request for i in program.request_ids if i in self.live]
            self.runner.copy_ahead([r.request_id for r in done if r.priority > Priority.LS])
        self._delivery.deliver(sampled, end_ns)
        self._evict_outgrown(ids)
        if decision.start == (0, 0) and all(s.prompt is None for s in sampled):
            table = self.costs.observe(program, end_ns - start_ns)
            if table is not None and table != self.scheduler.costs:
                self.scheduler.costs = table
                self._emit(trace.CostsUpdated(at_ns=end_ns, table=table._asdict()))

    def _evict_outgrown(self, sampled: Sequence[RequestId]) -> None:
        """Evict requests that have just outgrown their KV (`ModelShape`).

        They are computed again.
        """
        above = self.runner.shape.recompute_above
        if above is None:
            return
        for request_id in dict.fromkeys(sampled):
            live = self.live.get(request_id)
            if live and live.request.num_computed_tokens <= above < live.request.num_tokens:
                for effect in self.scheduler.evict(request_id, request_id):
                    self.effects.apply(effect)

    def _parked(
        self, program: Program, end: Index, start_ns: int, end_ns: int, by_word: bool
    ) -> None:
        lowered_ns = self.ingress.stop.lowered_ns
        preempted = self.scheduler.stopped(end, start_ns, end_ns, preempted=by_word)
        if self.drafts is not None:
            self.drafts.paused()
        at_ns = self.now_ns()
        if preempted:
            self.preempt_latencies_ns.append(at_ns - lowered_ns)
            self.num_preemptions += 1
        self._emit(trace.parked(program, end, at_ns, lowered_ns if preempted else None))

    def _held_up(self, program: Program, end: Index) -> None:
        """Record that the program waits for experts."""
        if self.drafts is not None:
            self.drafts.paused()
        self._emit(trace.parked(program, end, self.now_ns(), None))

    def _raise_fault(self, error: Exception) -> None:
        """Raise if the device is lost. No later program could run, so the engine ends.

        Raises:
            DeviceError: The device is lost.
        """
        fault = self.runner.fault(error)
        if fault is not None:
            raise fault from error

    def _failed(self, program: Program, start: Index, start_ns: int, error: Exception) -> None:
        end_ns = self.now_ns()
        self._emit(
            trace.Ran(
                start_ns=start_ns,
                at_ns=end_ns,
                frame_id=program.frame_id,
                start=start,
                end=start,
                why="error",
                segments=1,
            )
        )
        effects, hopeless = self.scheduler.failed()
        for effect in effects:
            self.effects.apply(effect, reason="error")
        text = f"{type(error).__name__}: {error}"
        for request in hopeless:
            self.finish(request.request_id, FinishReason.ERROR, text)

    def _policy_broke(self, error: PolicyError) -> None:
        """End the requests that broke the policy, or replace the policy by the fallback policy."""
        self.policy_errors.append(str(error))
        found = self.scheduler.blame(error, self.now_ns())
        can_fall_back = self.fallback is not None and self.scheduler.policy is not self.fallback
        if can_fall_back and not found.others_go_on:
            self.scheduler.policy = self.fallback
            return
        for request_id in found.request_ids:
            self.finish(request_id, FinishReason.ERROR, str(error))

    # -- ends

    def finish(self, request_id: RequestId, reason: FinishReason, error: str | None = None) -> None:
        live = self.live.pop(request_id, None)
        if live is None:
            return
        now = self.now_ns()
        if self.drafts is not None:
            self.drafts.forget(request_id)
        if self.prefix is not None:
            self.prefix.remove(request_id)
        for effect in self.scheduler.remove(request_id, now):
            self.effects.apply(effect)
        self.runner.remove(request_id)
        said = without_ticket(error)
        finished = trace.Finished(at_ns=now, request_id=request_id, reason=reason, error=said)
        self.sink.on_finish(request_id, reason, error, self._emit(finished))

    def _emit(self, event: trace.Event) -> RequestMetrics | None:
        for listen in self.listeners:
            listen(event)
        return self.metrics.feed(event)

    # -- for other threads to read

    @property
    def num_waiting(self) -> int:
        """Number of live requests that hold no KV and have tokens to compute."""
        requests = [live.request for live in list(self.live.values())]
        return sum(1 for r in requests if not (r.is_admitted or r.is_idle))

    @property
    def most_tokens(self) -> int:
        """Length in tokens of the longest sequence that the engine serves."""
        return self.runner.shape.longest(self.scheduler.limits.max_kv_tokens)
