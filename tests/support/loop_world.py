"""Front ends, rings and the loop of a device on a virtual clock."""

import os
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from qllm.cuda.stages import Key
from qllm.device import lanes
from qllm.device.graph import KernelCall, LoopGraph, Watch, serve
from qllm.device.launcher import DeviceEngine
from qllm.device.loop import DeviceLoop
from qllm.device.server import attach
from qllm.ingress import Cancel, Submission
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.ingress.words import address_of
from qllm.sim.runner import VirtualClock
from qllm.types import FinishReason
from tests.support.fake_loop import FakeLoopApi
from tests.support.families import VOCAB
from tests.support.native_stages import LIMITS, LONGEST, policy_of, runner_of
from tests.support.stage_worlds import STAGE_NS, Job, random_jobs

THREADS = 5


class World:
    """A front end that does things at given times, and a loop behind its rings.

    Args:
        family: Of the model.
        policy: Name.
        jobs: Requests to come, by number.
        cancels: When which request is cancelled.
        turns: Most turns of a launch.
        max_front_ends: That may attach.
        capacity: Slots of requests.
    """

    def __init__(
        self,
        family: str,
        policy: str,
        jobs: Sequence[Job],
        cancels: Sequence[tuple[int, int]] = (),
        turns: int = 1000,
        max_front_ends: int = 1,
        capacity: int = 64,
    ) -> None:
        runner = runner_of(family)
        assert runner.backend.stages is not None
        self.stages, self.clock = runner.backend.stages, VirtualClock()
        self.control = ControlMemory.create(0)
        self.loop = DeviceLoop(
            policy_of(policy), runner.backend.stages, runner.backend.pages, runner.shape, LIMITS,
            control=address_of(self.control.words), max_total_tokens=LONGEST, now_ns=self.clock,
            turns=turns, capacity=capacity, max_front_ends=max_front_ends, ls_slots=2,
        )  # fmt: skip
        block, bell = FrontEndMemory.create(0, (1 << 18,) * 4), Doorbell.create()
        self.block = block
        attach(self.loop.server, block)
        self.front_end = FrontEnd(block, self.control, Doorbell(os.dup(bell.fd)), bell)
        self.due = deque(
            sorted(
                [(job.at_ns, 0, number) for number, job in enumerate(jobs)]
                + [(at_ns, 1, number) for at_ns, number in cancels]
            )
        )
        self.jobs = jobs
        self.records: dict[int, list[Any]] = defaultdict(list)
        self.trace: list[Key] = []
        self.num_looks = 0

    def passes(self, until_ns: int) -> None:
        """Time passes: what is due by then happens."""
        while self.due and self.due[0][0] <= until_ns:
            at_ns, is_cancel, number = self.due.popleft()
            self.clock.at_ns = max(self.clock.at_ns, at_ns)
            if is_cancel:
                self.front_end.cancel(Cancel(number))
            else:
                self.front_end.submit(self._submission(number))
        self.clock.at_ns = max(self.clock.at_ns, until_ns)

    def _submission(self, number: int) -> Submission:
        job = self.jobs[number]
        return Submission(
            request_id=number, name="", priority=job.priority, token_ids=job.ids,
            sampling=job.sampling, stop_ids=frozenset(), max_tokens=job.max_tokens,
            slo=job.slo, arrival_ns=job.at_ns, deadline_ns=None,
        )  # fmt: skip

    def replay(self, branch: int) -> None:
        """A stage runs, and time with it."""
        self.trace.append(self.loop.keys[branch])
        with torch.inference_mode():
            self.stages.replay(self.loop.keys[branch])
        self.passes(self.clock.at_ns + STAGE_NS)

    def turn(self) -> int:
        """Take a turn; while there is nothing to do, time passes."""
        branch = self.loop.turn(THREADS)
        self.looks(branch, self.loop.is_stopped())
        return branch

    def looks(self, branch: int, is_stopped: bool) -> None:
        """The front end looks at its rings after a turn, and stops the engine at the end."""
        self.num_looks += 1
        assert self.num_looks < 20_000, "it does not come to an end"
        for record in self.front_end.receive():
            is_token = isinstance(record, TokenAt)
            request_id = record.sampled.request_id if is_token else record.request_id
            self.records[request_id].append(record)
        if branch == lanes.NOTHING and not is_stopped:
            if self.due:
                self.passes(self.due[0][0])
            elif len(self.ends()) == len(self.jobs):
                self.front_end.stop()

    def ends(self) -> dict[int, FinishReason]:
        return {
            number: records[-1].reason
            for number, records in self.records.items()
            if not isinstance(records[-1], TokenAt)
        }

    def tokens(self) -> dict[int, list[int]]:
        return {
            number: [r.sampled.token_id for r in self.records[number] if isinstance(r, TokenAt)]
            for number in range(len(self.jobs))
        }

    # -- the two ways to take turns

    def run_on_the_host(self) -> None:
        self.loop.prepare()
        while not self.loop.is_stopped():
            branch = self.turn()
            if branch >= 0:
                self.replay(branch)

    def run_as_a_graph(self) -> FakeLoopApi:
        def kernel(set_conditional: Any, *numbers: int) -> None:
            *addresses, run, stage = numbers
            assert tuple(addresses) == self.loop.addresses
            set_conditional(stage, self.turn())
            set_conditional(run, int(self.loop.takes_more))

        stages = [
            SimpleNamespace(replay=partial(self.replay, branch), types=["Kernel"])
            for branch in range(len(self.loop.keys))
        ]
        api = FakeLoopApi()
        graph = LoopGraph(api, KernelCall(kernel, self.loop.addresses), stages)
        watch = Watch(
            self.loop.prepare,
            self.loop.heartbeat,
            self.loop.is_stopped,
            lambda: self.loop.takes_more,
        )
        assert serve(graph, watch) == api.num_launches
        return api


class TimedApi(FakeLoopApi):
    """Runs a world's stages, and its time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def replay(self, stage: Any) -> None:
        with torch.inference_mode():
            super().replay(stage)
        self.world.passes(self.world.clock.at_ns + STAGE_NS)


def engine_of(world: World, runner: Any, policy: str, **changes: Any) -> DeviceEngine:
    """The engine put together, with the host in the place of a device and of its memory."""

    def turn(server: int, state: int, at: int) -> tuple[int, bool]:
        native, rank = engine.loop.server.native, engine.loop.server.rank_address
        branch = native.loop_turn(server, state, rank, at, world.clock(), THREADS)
        stopped = bool(engine.memory.read("stopped"))
        world.looks(branch, stopped)
        return branch, bool(engine.memory.read("goes_on"))

    def conditional(set_conditional: Any, *numbers: int) -> None:
        *addresses, run, stage = numbers
        branch, more = turn(*addresses)
        set_conditional(stage, branch)
        set_conditional(run, int(more))

    how: dict[str, Any] = {"api": TimedApi(world), "function": conditional, "turns": 9} | changes
    engine = DeviceEngine(
        runner.backend, policy_of(policy), LIMITS, control=world.control, front_ends=[world.block],
        now_ns=world.clock, max_total_tokens=LONGEST, capacity=64, ls_slots=2, **how,
    )  # fmt: skip
    return engine


def jobs_of(seed: int, num: int = 14) -> list[Job]:
    return random_jobs(random.Random(seed), num, LONGEST - 8, VOCAB)
