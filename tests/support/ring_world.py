"""Rings, a virtual clock and an engine: the Python loop, or the native server, on the same world.

Front ends are those of `qllm.ingress`; what they do happens at times known beforehand, also while
a program runs. Times, and so every number of every record, are comparable between the two.
"""

import heapq
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qllm.device.server import NativeServer
from qllm.engine.loop import EngineLoop
from qllm.errors import QueueFullError
from qllm.ingress import Cancel, Submission
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import BACKLOG_NS, BEAT_NS, Doorbell, FrontEndPort, RingSink, ShmIngress
from qllm.ingress.words import address_of
from qllm.plan import NO_CUTS, CutRule, ModelShape
from qllm.plugins import load_policy
from qllm.scheduler.decision import Limits
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.runner import SimCosts, VirtualClock
from qllm.sim.world import LIMITS, SHAPE, FlakyRunner
from qllm.types import NS_PER_MS, FinishReason, RequestId, SamplingParams, Slo
from tests.support.native_loop import NativeLoop

MAX_TOTAL = 512
SHIPPED = ["fcfs", "ls-first", "priority", "qllm2", "chunked", "chunked-priority", "edf"]
SHIPPED += ["layered", "priority-layered"]


class VirtualShm(ShmIngress):
    """Waits by moving the clock."""

    world: "RingWorld"

    def wait(self, timeout_ns: int | None) -> None:
        limit_ns = BACKLOG_NS if self.flush() else BEAT_NS
        if timeout_ns is not None:
            limit_ns = min(limit_ns, max(0, timeout_ns))
        self.world.sleep(limit_ns)


class VirtualNative(NativeLoop):
    """The same."""

    world: "RingWorld"

    def sleep(self, limit_ns: int) -> None:
        self.world.sleep(limit_ns)


class RingWorld:
    """One engine, its front ends, and what they do when.

    Args:
        policy: Decides.
        native: The native server; else the Python loop and scheduler.
        limits: Seats, blocks, grain.
        num_front_ends: Attached from the start.
        ring_bytes: Of each ring.
        prepare: Called with the shared memory before it is used.
        server: Settings of the native server.
    """

    def __init__(
        self,
        policy: Any,
        native: bool,
        limits: Limits = LIMITS,
        *,
        shape: ModelShape = SHAPE,
        cuts: CutRule = NO_CUTS,
        costs: SimCosts | None = None,
        num_front_ends: int = 1,
        ring_bytes: int = 1 << 18,
        prepare: Callable[[memoryview], None] | None = None,
        **server: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.control = ControlMemory.create(0)
        self.bell = Doorbell.create()
        self.runner = FlakyRunner(shape, self.clock, costs, cuts, self)
        self.runner.poisoned = {}
        self.blocks = [FrontEndMemory.create(n, (ring_bytes,) * 4) for n in range(num_front_ends)]
        if prepare is not None:
            for segment in (self.control.segment, *(block.segment for block in self.blocks)):
                prepare(segment.bytes)
        self.front_ends: list[FrontEnd] = []
        self.records: dict[RequestId, list[Any]] = defaultdict(list)
        self.reads = set(range(num_front_ends))
        self.broken: list[tuple[int, str]] = []
        self.shown: list[tuple[int, int, list[int]]] = []
        """After each step: requests live and waiting, and what each front end knows to wait."""
        self.loop: Any = (
            self._native(policy, limits, server) if native else self._python(policy, limits)
        )
        for block in self.blocks:
            self._attach(block)

    # -- the two engines

    def _python(self, policy: Any, limits: Limits) -> EngineLoop:
        self.ingress = VirtualShm(
            self.control, self.bell, self.clock, lambda: self.loop.close(), self._broken
        )
        self.ingress.world = self
        scheduler = Scheduler(policy, self.runner.shape, self.runner.cuts, limits)
        self.check = scheduler.check
        return EngineLoop(
            self.ingress,
            scheduler,
            self.runner,
            RingSink(self.ingress.ports),
            self.clock,
            decided=self.ingress.decided,
        )

    def _native(self, policy: Any, limits: Limits, settings: dict[str, Any]) -> NativeLoop:
        self.server = NativeServer(
            policy,
            self.runner.shape,
            self.runner.cuts,
            limits,
            control=address_of(self.control.words),
            **{"max_total_tokens": MAX_TOTAL, **settings},
        )
        self.check = self.server.check
        loop = VirtualNative(
            self.server, self.runner, self.control, self.bell, self.clock, self._broken
        )
        loop.world = self
        return loop

    def _attach(self, block: FrontEndMemory) -> None:
        tokens = Doorbell.create()
        mine, engine = Doorbell(os.dup(tokens.fd)), Doorbell(os.dup(self.bell.fd))
        if isinstance(self.loop, NativeLoop):
            self.loop.attach(block, tokens)
        else:
            self.ingress.attach(FrontEndPort(block, tokens))
        self.front_ends.append(FrontEnd(block, self.control, engine, mine))

    def _broken(self, number: int, why: str) -> None:
        self.broken.append((number, why))

    # -- time

    def at(self, at_ns: int, function: Callable[[], None]) -> None:
        """Let something happen then, or as soon as the clock has passed it."""
        self._count += 1
        heapq.heappush(self.due, (at_ns, self._count, function))

    def next_ns(self) -> int | None:
        """See `qllm.sim.runner.Arrivals`."""
        return self.due[0][0] if self.due else None

    def arrive(self) -> None:
        """See `qllm.sim.runner.Arrivals`."""
        while self.due and self.due[0][0] <= self.clock.at_ns:
            heapq.heappop(self.due)[2]()

    def sleep(self, limit_ns: int) -> None:
        """The loop waits."""
        until_ns = self.clock.at_ns + limit_ns
        if self.due:
            until_ns = min(until_ns, self.due[0][0])
        self.clock.at_ns = max(self.clock.at_ns, until_ns)

    # -- what front ends do

    def submit(
        self,
        number: int,
        priority: int,
        num_prompt: int,
        num_output: int,
        *,
        at_ns: int = 0,
        front_end: int = 0,
        **changes: Any,
    ) -> RequestId:
        """Let a request arrive; the ring is tried again until it has room."""
        request_id = front_end << NUMBER_BITS | number
        values: dict[str, Any] = {
            "request_id": request_id,
            "name": str(number),
            "priority": priority,
            "token_ids": tuple(i % self.runner.shape.vocab_size for i in range(num_prompt)),
            "sampling": SamplingParams(seed=number),
            "stop_ids": frozenset(),
            "max_tokens": num_output,
            "slo": Slo(),
            "arrival_ns": at_ns,
            "deadline_ns": None,
        }
        item = Submission(**{**values, **changes})

        def put() -> None:
            try:
                self.front_ends[front_end].submit(item)
            except QueueFullError:
                self.at(self.clock.at_ns + NS_PER_MS, put)

        self.at(at_ns, put)
        return request_id

    def cancel(
        self, request_id: RequestId, at_ns: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        """Let a cancel arrive."""
        front_end = self.front_ends[request_id >> NUMBER_BITS]
        self.at(at_ns, lambda: front_end.cancel(Cancel(request_id, reason)))

    # -- the run

    def step(self) -> bool:
        """One turn of the loop, every check of its state, and what the front ends got."""
        self.arrive()
        ran: bool = self.loop.step()
        self.check()
        self.receive()
        _, num_live, num_waiting = self.control.read_stats()
        self.shown.append((num_live, num_waiting, [f.num_waiting for f in self.front_ends]))
        return ran

    def receive(self) -> None:
        """Take what is in the token rings of those that read."""
        for number in self.reads:
            for record in self.front_ends[number].receive():
                is_token = isinstance(record, TokenAt)
                request_id = record.sampled.request_id if is_token else record.request_id
                self.records[request_id].append(record)

    def run(self, requests: int, max_steps: int = 20_000) -> None:
        """Serve until so many requests have ended."""
        for _ in range(max_steps):
            if len(self.ends()) >= requests:
                return
            self.step()
        raise AssertionError(f"{len(self.ends())} of {requests} ended in {max_steps} steps")

    def ends(self) -> dict[RequestId, Any]:
        """How requests ended, of those that did."""
        return {
            request_id: records[-1]
            for request_id, records in self.records.items()
            if not isinstance(records[-1], TokenAt)
        }

    def reasons(self) -> dict[RequestId, FinishReason]:
        """Why requests ended, of those that did."""
        return {request_id: end.reason for request_id, end in self.ends().items()}

    def tokens(self, request_id: RequestId) -> list[int]:
        """The ids a front end got for a request."""
        records = self.records[request_id]
        return [r.sampled.token_id for r in records if isinstance(r, TokenAt)]

    def close(self) -> None:
        """Give the descriptors back."""
        for front_end in self.front_ends:
            front_end.close()
        self.bell.close()
        for segment in [self.control.segment, *(block.segment for block in self.blocks)]:
            segment.close_fd()


@contextmanager
def world(policy: str = "qllm2", native: bool = True, *args: Any, **more: Any) -> Iterator[Any]:
    """A world with an installed policy, for a while."""
    made = RingWorld(load_policy(policy), native, *args, **more)
    try:
        yield made
    finally:
        made.close()


def tokens_alone(policy: str, *requests: tuple[int, int, int]) -> list[list[int]]:
    """The tokens that the Python engine gives requests of (priority, prompt, max_tokens)."""
    with world(policy, native=False) as w:
        ids = [w.submit(n, *request) for n, request in enumerate(requests)]
        w.run(len(ids))
        return [w.tokens(i) for i in ids]
