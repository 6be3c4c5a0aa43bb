"""Worlds for the native stage loop: with a model's stages, or with lanes and no model at all."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from qllm.cuda.lanes import Bucket, Lane
from qllm.cuda.stages import Key, Stages
from qllm.device import lanes, layout
from qllm.engine.loop import EngineLoop
from qllm.ingress import Submission
from qllm.plan import ANY_ARRIVAL, NO_CUTS
from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Limits
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.ingress import VirtualIngress
from qllm.sim.runner import VirtualClock
from qllm.types import NS_PER_MS, FinishReason, SamplingParams, Slo
from tests.support.stage_loop import StageLoop

STAGE_NS = NS_PER_MS
"""What a stage takes."""
ENOUGH = 20_000
"""Turns after which a world that goes on has stalled."""


class Job(NamedTuple):
    """One request to come."""

    at_ns: int
    priority: int
    ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    slo: Slo = Slo()


def random_jobs(rng: random.Random, num: int, longest: int, vocab: int) -> list[Job]:
    at_ns, jobs = 0, []
    for seed in range(num):
        at_ns += rng.choice([0, 1, 1, 3, 9]) * STAGE_NS - rng.choice([0, 1])
        ids = tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 5, longest // 2, longest])))
        how = SamplingParams(temperature=rng.choice([0, 0.8]), top_p=0.9, top_k=40, seed=seed)
        slo = rng.choice([Slo(), Slo(50.0, 5.0)])
        jobs.append(
            Job(max(0, at_ns), rng.choice([0, 10, 10]), ids, rng.choice([1, 4, 7]), how, slo)
        )
    return jobs


class Outcome(NamedTuple):
    """What became of the jobs."""

    tokens: dict[int, list[int]]
    trace: list[Key]
    parks: int


# -- the host: engine loop, Python scheduler, programs


class ParkCount(Scheduler):
    """Counts how often a frame was parked."""

    parks = 0

    def stopped(self, *args: Any, **how: Any) -> bool:
        self.parks += 1
        return super().stopped(*args, **how)


class HostWorld:
    """The engine as it is, on a clock that moves by `STAGE_NS` per stage."""

    def __init__(self, runner: TorchRunner, policy: Any, limits: Limits) -> None:
        assert runner.backend.stages is not None
        self.clock = VirtualClock()
        self.ingress = VirtualIngress(self.clock)
        self.runner, self.stages = runner, runner.backend.stages
        self.scheduler = ParkCount(policy, runner.shape, NO_CUTS, limits)
        self.loop = EngineLoop(self.ingress, self.scheduler, runner, self, self.clock)
        self.loop.costs = SimpleNamespace(observe=lambda *_: None)  # type: ignore[assignment]
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}

    def on_token(self, sampled: Any, at_ns: int) -> bool:
        self.tokens[sampled.request_id].append(sampled.token_id)
        return False

    def on_finish(self, request_id: int, reason: FinishReason, *_: object) -> None:
        self.ends[request_id] = reason

    def _passed(self, *_: object) -> None:
        self.clock.at_ns += STAGE_NS
        self.ingress.arrive()

    def run(self, jobs: Sequence[Job]) -> Outcome:
        trace: list[Key] = []
        replay = self.stages.replay

        def recorded(key: Key) -> None:
            trace.append(key)
            replay(key)

        for number, job in enumerate(jobs):
            self.tokens[number] = []
            self.ingress.put_at(
                job.at_ns,
                Submission(
                    request_id=number, name="", priority=job.priority, token_ids=job.ids,
                    sampling=job.sampling, stop_ids=frozenset(), max_tokens=job.max_tokens,
                    slo=job.slo, arrival_ns=job.at_ns, deadline_ns=None,
                ),
            )  # fmt: skip
        self.runner.on_segment = self._passed
        self.stages.replay = recorded  # type: ignore[method-assign]
        try:
            for _ in range(ENOUGH):
                if len(self.ends) == len(jobs):
                    break
                self.loop.step()
        finally:
            self.stages.replay = replay  # type: ignore[method-assign]
            self.runner.on_segment = None
        assert set(self.ends.values()) == {FinishReason.LENGTH}
        return Outcome(self.tokens, trace, self.scheduler.parks)


# -- the native side


class NativeWorld:
    """The stage loop on the same clock; cancels come between any two stages.

    Args:
        loop: What is driven.
        on_filled: Called when a stage was chosen and its lane is ready.
        replay: In place of the stage's graph.
        cancels: By time, requests that go away.
        alarm: Whether a better request is said to have come, though none has.
    """

    def __init__(
        self,
        loop: StageLoop,
        on_filled: Callable[[int], None] | None = None,
        replay: Callable[[int], None] | None = None,
        cancels: Sequence[tuple[int, int]] = (),
        alarm: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loop, self.now_ns, self.alarm = loop, 0, alarm
        self.on_filled, self.replay = on_filled, replay or loop.replay
        self.cancels = deque(sorted(cancels))
        self.slots: dict[int, int] = {}
        """Slots of the live requests."""
        self.tokens: dict[int, list[int]] = {}
        self.left: dict[int, int] = {}
        self.failed: list[int] = []
        self.parks = self.misfits = self.evictions = 0

    def run(self, jobs: Sequence[Job]) -> Outcome:
        due = deque(sorted(enumerate(jobs), key=lambda pair: pair[1].at_ns))
        arrived: list[tuple[int, Job]] = []
        for _ in range(ENOUGH):
            self._arrive(due, arrived)
            if self.loop.scheduler.block.get("running") < 0:
                for number, job in arrived:
                    self._add(number, job)
                arrived.clear()
            self._cancel()
            if not (self.slots or due or arrived):
                break
            branch = self.loop.before(self.now_ns)
            self.check()
            if branch < 0:
                self._nothing(branch, due)
                continue
            if self.on_filled is not None:
                self.on_filled(branch)
            self.replay(branch)
            self.now_ns += STAGE_NS
            self._arrive(due, arrived)
            stop = min((job.priority for _, job in arrived), default=ANY_ARRIVAL)
            stop = -1 if self.alarm() else stop
            self._became(self.loop.after(self.now_ns, stop))
            self.check()
        assert not self.slots, "it does not come to an end"
        assert not due
        keys = [self.loop._keys[branch] for branch in self.loop.trace]
        return Outcome(self.tokens, keys, self.parks)

    def check(self) -> None:
        """No KV block leaks or is shared, and the order is one. Counts evictions."""
        block = self.loop.scheduler.block
        tables: dict[int, list[int]] = {number: [] for number in self.slots}
        for number, slot in self.slots.items():
            block.extend_table(slot, tables[number])
        block.check_blocks(tables)
        block.check_order(self.slots)
        self.evictions += sum(
            kind == layout.EVICT for *_, kind, _ in block.effects(block.get("num_effects"))
        )

    def _arrive(self, due: deque[tuple[int, Job]], arrived: list[tuple[int, Job]]) -> None:
        while due and due[0][1].at_ns <= self.now_ns:
            arrived.append(due.popleft())

    def _add(self, number: int, job: Job) -> None:
        assert job.sampling.seed is not None
        self.slots[number] = self.loop.add(
            job.ids, priority=job.priority, arrival_ns=job.at_ns, sampling=job.sampling,
            seed=job.sampling.seed, max_tokens=job.max_tokens, request_id=number, slo=job.slo,
        )  # fmt: skip
        self.tokens[number], self.left[number] = [], job.max_tokens

    def _end(self, number: int) -> None:
        self.loop.remove(self.slots.pop(number))

    def _cancel(self) -> None:
        while self.cancels and self.cancels[0][0] <= self.now_ns:
            _, number = self.cancels.popleft()
            if number in self.slots:
                self._end(number)

    def _nothing(self, branch: int, due: deque[tuple[int, Job]]) -> None:
        scheduler = self.loop.scheduler
        if branch == lanes.CANNOT:
            self.misfits += 1
            scheduler.call("failed")
            return
        assert self.loop.lanes.get("failure") == layout.OK
        times = [due[0][1].at_ns] if due else []
        if scheduler.block.get("kind") == layout.WAIT:
            times.append(scheduler.block.get("wait_until_ns"))
        if times:
            self.now_ns = max(self.now_ns, min(times))

    def _became(self, became: int) -> None:
        self.parks += became == lanes.PARKED
        if became != lanes.OVER:
            return
        numbers = {slot: number for number, slot in self.slots.items()}
        for slot, token in self.loop.sampled:
            number = numbers[slot]
            request = self.loop.scheduler.block.array("requests")[slot]
            had = int(request["num_prompt"]) + len(self.tokens[number])
            assert request["num_tokens"] == had + (token != lanes.BROKEN)
            if token == lanes.BROKEN:
                self.failed.append(number)
                self._end(number)
                continue
            self.tokens[number].append(token)
            assert self.loop.token_ids(slot)[-1] == token
            self.left[number] -= 1
            if not self.left[number]:
                self._end(number)


# -- lanes without a model


def dry_stages(
    num_layers: int,
    k: int,
    buckets: Sequence[Bucket],
    rows: int,
    pages: tuple[int, int],
    block: int,
    device: str = "cpu",
) -> tuple[Stages, Any]:
    """Stages whose graphs do nothing, and their pages: (number of pages, pages of a sequence)."""
    page_size, num_pages, max_pages = 4, *pages
    hidden = torch.zeros((num_pages * page_size + 1, 1), device=device)
    most = max(bucket.tokens for bucket in buckets)
    made = {whole: Lane(most, rows, max_pages, block, hidden) for whole in (True, False)}
    stages = Stages(None, None, made, num_layers, k)  # type: ignore[arg-type]
    stages.captured = {key: SimpleNamespace(replay=lambda: None) for key in stages.keys(buckets)}
    stages._buckets = sorted(buckets)
    return stages, SimpleNamespace(page_size=page_size, num_pages=num_pages)
