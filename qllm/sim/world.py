"""A small engine on a virtual clock, with every check of its state after every iteration.

The engine loop, scheduler and block pool are the real ones, around a `SimRunner`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qllm.engine.loop import EngineLoop
from qllm.errors import InvariantError, PolicyError
from qllm.ingress import Cancel, Revision, Submission
from qllm.plan import NO_CUTS, CutRule, ModelShape
from qllm.record.metrics import RequestMetrics
from qllm.record.trace import Trace
from qllm.runner.protocol import Stop
from qllm.scheduler.decision import EvictKv, Limits, SwapOut
from qllm.scheduler.program import Index, Program
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.ingress import VirtualIngress
from qllm.sim.runner import SimCosts, SimRunner, VirtualClock
from qllm.types import (
    NS_PER_MS,
    FinishReason,
    Grain,
    RequestId,
    Sampled,
    SamplingParams,
    Slo,
)

SHAPE = ModelShape(3, 4, 2, (False, True, True), 97, 4096)
LIMITS = Limits(
    max_num_seqs=8,
    max_step_tokens=512,
    block_size=16,
    num_blocks=4096,
    grain=Grain.EXPERT,
    max_segment_ns=5 * NS_PER_MS,
)


class FlakyRunner(SimRunner):
    """A runner that raises for each request of `poisoned`, as often as the number there."""

    poisoned: dict[RequestId, int]

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """See `SimRunner.run`."""
        for row in program.rows:
            left = getattr(self, "poisoned", {}).get(row.request_id, 0)
            if left and row.request_id not in self.frames[program.frame_id].dead:
                self.poisoned[row.request_id] = left - 1
                self.clock.at_ns += NS_PER_MS
                raise RuntimeError(f"request {row.request_id} is poisoned")
        return super().run(program, start, stop)


class World:
    """The engine on a virtual clock.

    Args:
        policy: Policy of the engine.
        limits: Seats, blocks, grain.
        shape: Simulated layers.
        costs: Simulated times.
        cuts: Cut rule of the ops.
        scheduler: Class of the scheduler.
        start_ns: Time at the start.
    """

    def __init__(
        self,
        policy: Any,
        limits: Limits = LIMITS,
        *,
        shape: ModelShape = SHAPE,
        costs: SimCosts | None = None,
        cuts: CutRule = NO_CUTS,
        scheduler: Callable[..., Any] = Scheduler,
        start_ns: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self.clock.at_ns = start_ns
        self.ingress = VirtualIngress(self.clock)
        self.runner = FlakyRunner(shape, self.clock, costs, cuts, self.ingress, limits.block_size)
        self.runner.poisoned = {}
        self.scheduler = scheduler(policy, shape, cuts, limits)
        self.record = Trace()
        self.loop = EngineLoop(
            self.ingress, self.scheduler, self.runner, self, self.clock, self.record
        )
        self.submitted: dict[RequestId, Submission] = {}
        self.finished: dict[RequestId, FinishReason] = {}
        self.errors: dict[RequestId, str | None] = {}
        self.metrics: dict[RequestId, RequestMetrics | None] = {}
        self.tokens: Counter[RequestId] = Counter()

    @property
    def on_boundary(self) -> Callable[[], None] | None:
        """Callback at every boundary. None lets the runner skip those without events."""
        return self.runner.on_boundary

    @on_boundary.setter
    def on_boundary(self, call: Callable[[], None] | None) -> None:
        self.runner.on_boundary = call

    def submit(
        self,
        priority: int,
        prompt_tokens: int,
        max_tokens: int,
        *,
        at_ns: int | None = None,
        timeout_ns: int | None = None,
        slo: Slo | None = None,
        is_open: bool = False,
    ) -> RequestId:
        """Let a request arrive, now or later. Each call gets the next id."""
        at_ns = self.clock.at_ns if at_ns is None else at_ns
        request_id = len(self.submitted)
        self.submitted[request_id] = item = Submission(
            request_id=request_id,
            name=str(request_id),
            priority=priority,
            token_ids=tuple(i % self.runner.shape.vocab_size for i in range(prompt_tokens)),
            sampling=SamplingParams(seed=0),
            stop_ids=frozenset(),
            max_tokens=max_tokens,
            slo=slo or Slo(),
            arrival_ns=at_ns,
            deadline_ns=None if timeout_ns is None else at_ns + timeout_ns,
            is_open=is_open,
        )
        self.ingress.put_at(at_ns, item)
        return request_id

    def revise(
        self, request_id: RequestId, keep: int, num_tokens: int, at_ns: int, *, is_open: bool
    ) -> None:
        """Replace the end of a streaming prompt, now or later."""
        ids = tuple((request_id + i) % self.runner.shape.vocab_size for i in range(num_tokens))
        rest = replace(self.submitted[request_id], token_ids=ids, is_open=is_open, deadline_ns=None)
        self.ingress.put_at(at_ns, Revision(keep, rest).put_at(request_id, at_ns))

    def cancel(self, request_id: RequestId, at_ns: int | None = None) -> None:
        """Cancel a request, now or later."""
        at_ns = self.clock.at_ns if at_ns is None else at_ns
        self.ingress.put_at(at_ns, Cancel(request_id))

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        """See `qllm.engine.protocol.Sink`."""
        assert sampled.request_id not in self.finished, "a token after the end"
        self.tokens[sampled.request_id] += 1
        return False

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        """See `qllm.engine.protocol.Sink`."""
        assert request_id not in self.finished, "finished twice (I13)"
        self.finished[request_id] = reason
        self.errors[request_id] = error
        self.metrics[request_id] = metrics

    @property
    def idle(self) -> bool:
        """Return True if no request is live and none will arrive."""
        return self.ingress.is_empty and not (self.loop.pending or self.loop.live)

    def step(self) -> bool:
        """Do one iteration of the loop, then every check of the state."""
        ran = self.loop.step()
        self.scheduler.check()
        owed = getattr(self.scheduler, "_owed", ())  # a plan broke a rule after an eviction
        evicted = {e.request_id for e in owed if isinstance(e, EvictKv | SwapOut)}
        for request_id, request in self.scheduler.requests.items():
            used, table = self.runner.requests[request_id].blocks, request.block_table
            if table[: len(used)] != used and request_id not in evicted:
                raise InvariantError(f"request {request_id} uses blocks {used}, it has {table}")
        return ran

    def run(self, max_steps: int = 100_000) -> None:
        """Serve until all requests have ended.

        Raises:
            PolicyError: The world does not end.
        """
        for _ in range(max_steps):
            if self.idle:
                return
            self.step()
        name = type(self.scheduler.policy).__name__
        raise PolicyError(
            f"policy {name} stalls: after {max_steps} steps requests {sorted(self.loop.live)} "
            "are not finished"
        )
