"""Native decisions without a model: the lanes that each stage would load."""

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from qllm.cuda.backend import CudaBackend
from qllm.cuda.lanes import Bucket, Lane
from qllm.cuda.pages import PagedKV, Pages
from qllm.cuda.stages import Key, Stages
from qllm.device import layout
from qllm.kernels.select import kernels
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.runner.frame import Frame
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import Limits
from qllm.scheduler.program import OpKind, Program
from qllm.types import Grain, SamplingParams
from tests.support.differential import random_shape
from tests.support.stage_loop import StageLoop
from tests.support.stage_worlds import NativeWorld, dry_stages, random_jobs

LIMITS = Limits(
    max_num_seqs=5, max_step_tokens=40, block_size=4, num_blocks=60, grain=Grain.LAYER,
    max_segment_ns=5_000_000,
)  # fmt: skip

BUCKETS = [Bucket(2, False), Bucket(5, False), Bucket(12, True), Bucket(45, True)]

BIG = [*BUCKETS, Bucket(400, True)]

SHAPE = ModelShape(3, 4, 2, (False, True, True), 97, 4096)

LONGEST = 60


def dry_loop(
    policy: Any,
    k: int = 1,
    buckets: list[Bucket] = BUCKETS,
    rows: int = 6,
    limits: Limits = LIMITS,
    device: str = "cpu",
    **how: Any,
) -> tuple[StageLoop, Stages]:
    stages, pages = dry_stages(3, k, buckets, rows, (64, 15), block=4, device=device)
    how = {"max_total_tokens": LONGEST, **how}
    return StageLoop(policy, stages, pages, SHAPE, limits, **how), stages


class Mirror:
    """What the host would do with the frame that runs: its program, stage and lane."""

    def __init__(self, loop: StageLoop, stages: Stages, threads: int) -> None:
        self.loop, self.stages, self.threads = loop, stages, threads
        self.requests: dict[int, Any] = {}
        self.lane = {whole: self._like(stages.lanes[whole]) for whole in (True, False)}
        self.seen: Counter[str] = Counter()

    def _like(self, lane: Lane) -> Lane:
        return Lane(lane.max_tokens, lane.max_rows, lane.max_pages, lane.block, lane.hidden_SD)

    # what the native side says, as the host's objects

    def _frame(self) -> tuple[Frame, list[int]]:
        block = self.loop.scheduler.block
        slot = block.get("running")
        frame_id, _, stop_below, num_rows, _, _, grain, *_ = block.frame(slot)
        found = block.rows(slot, num_rows)
        rows = tuple([Row(*numbers[:5]) for numbers in found])
        program = compile_program(
            Plan(rows=rows, grain=Grain(grain), stop_below=stop_below),
            frame_id=frame_id,
            samples=[bool(numbers[6] & layout.SAMPLES) for numbers in found],
            shape=SHAPE,
            cuts=NO_CUTS,
        )
        frame = Frame(program)
        for numbers in found:
            request = block.request(numbers[5])
            live = request[-1] and request[0] == numbers[0] and not numbers[6] & layout.DEAD
            if not live:
                frame.dead.add(numbers[0])
            else:
                self._know(numbers[0], numbers[5])
        return frame, [numbers[5] for numbers in found]

    def _know(self, request_id: int, slot: int) -> None:
        pages: list[int] = []
        self.loop.scheduler.block.extend_table(slot, pages)
        kv = PagedKV(Pages(1, 1 << 16, 4, kernels("torch")), 1 << 20)
        kv.hold(pages, len(pages) * 4)
        record = self.loop.server.array("serving")[slot]
        how = SamplingParams(
            temperature=float(record["temperature"]), top_k=int(record["top_k"]),
            top_p=float(record["top_p"]), min_p=float(record["min_p"]),
        )  # fmt: skip
        ids = self.loop.token_ids(slot)
        self.requests[request_id] = SimpleNamespace(
            ids=ids, kv=kv, simple=(how, int(record["seed"]))
        )

    def _load(self, frame: Frame, group: int, lane: Lane) -> None:
        runner: Any = SimpleNamespace(
            requests=self.requests,
            sampler=SimpleNamespace(simple=lambda i: self.requests[i].simple),
        )
        backend: Any = SimpleNamespace(_sampling_rows=partial(CudaBackend._sampling_rows, None))
        CudaBackend._load(backend, runner, lane, frame, group)

    # comparisons

    def compare(self, branch: int) -> None:
        """The chosen stage is the host's, and what it reads of its lane is what the host loads."""
        key: Key = self.loop._keys[branch]
        frame, _ = self._frame()
        layer = self.loop.lanes.get("layer")
        part = self._part(frame.program, max(layer, key.start))
        alive = [r for r in frame.program.rows if r.request_id not in frame.dead]
        rows = [frame.program.rows[r] for r in frame.program.groups[part.group]]
        if part.key != key:
            self._explain(key, part.key, rows, frame)
        elif part.key.head:
            self.seen["head"] += 1
        self.seen["whole" if key.whole else "stage"] += 1
        self.seen["groups"] += len(rows) != len(frame.program.rows)
        self.seen["dead"] += any(row.request_id in frame.dead for row in rows)
        assert alive
        wanted = self.lane[key.whole]
        self._load(frame, part.group, wanted)
        self._same(key, frame, rows, wanted)

    def _part(self, program: Program, layer: int) -> Any:
        ops = program.ops
        op = next(i for i, op in enumerate(ops) if op.layer == layer and op.kind < OpKind.HEAD)
        capture = self.stages.captured
        if not any(not key.head and key.end == 3 and not key.bucket.prefill for key in capture):
            extra = [key._replace(head=False) for key in capture if key.head]
            self.stages.captured = capture | dict.fromkeys(extra)
        try:
            return self.stages.part(program, op, program.grain, True)
        finally:
            self.stages.captured = capture

    def _explain(self, ours: Key, host: Key, rows: list[Row], frame: Frame) -> None:
        """They may differ in the head alone: a decode stage has one, the dead need none."""
        self.seen["other head"] += 1
        assert ours._replace(head=host.head) == host
        if ours.head:
            assert not ours.bucket.prefill
        else:
            sampling = {
                r for r, s in zip(frame.program.rows, frame.program.samples, strict=True) if s
            }
            assert all(row.request_id in frame.dead for row in rows if row in sampling)

    def _same(self, key: Key, frame: Frame, rows: list[Row], wanted: Lane) -> None:
        lane, num = self.stages.lanes[key.whole], key.bucket.tokens
        heads = min(lane.max_rows, num)
        found, like = lane.on_device, wanted.on_device
        for name in ("ids", "pos", "slots", "seq", "gather"):
            assert found[name][:num].tolist() == like[name][:num].tolist(), name
        for name in ("last", "positions", "seeds", "top_k", "temperature", "top_p", "min_p"):
            assert found[name][:heads].tolist() == like[name][:heads].tolist(), name
        assert found["num_tokens"].tolist() == like["num_tokens"].tolist()
        for ours, theirs in zip(
            lane.step_tensors(key.bucket)[1].parts,
            wanted.step_tensors(key.bucket)[1].parts,
            strict=True,
        ):
            assert ours.block == theirs.block
            for a, b in zip(ours[1:], theirs[1:], strict=True):
                assert a.tolist() == b.tolist()
        tables = [lane.step_tensors(key.bucket)[0], wanted.step_tensors(key.bucket)[0]]
        for r, row in enumerate(rows):
            if row.request_id not in frame.dead:
                ours, theirs = [table[r, : -(-row.hi // 4)].tolist() for table in tables]
                assert ours == theirs

    def refill(self, branch: int) -> None:
        """As so many threads, into tensors in which nothing is right; then all is as it was."""
        lane = self.stages.lanes[self.loop._keys[branch].whole]
        saved = lane._device.clone()
        lane._device.fill_(77777)
        self.loop.scheduler.native.turn_fill(*self.loop._addresses, self.threads)
        self.compare(branch)
        lane._device.copy_(saved)


def random_dry_run(number: int, threads: int = 7, **where: Any) -> tuple[NativeWorld, Mirror]:
    rng = random.Random(number)
    policy = random_shape(rng)
    loop, stages = dry_loop(policy, buckets=BIG if policy.groups else BUCKETS, **where)
    mirror = Mirror(loop, stages, threads)
    vocab = random.Random(-number)

    def filled(branch: int) -> None:
        mirror.compare(branch)
        if threads:
            mirror.refill(branch)

    def replay(branch: int) -> None:
        loop.trace.append(branch)
        lane = stages.lanes[loop._keys[branch].whole]
        lane.tokens_R[:] = torch.tensor([vocab.randrange(97) for _ in range(lane.max_rows)])
        lane.peaks_R[:] = torch.tensor(
            [vocab.choice([1.0] * 30 + [float("nan"), float("inf")]) for _ in range(lane.max_rows)]
        )

    jobs = random_jobs(rng, 9, 50, 97)
    cancels = [(rng.randrange(60) * 1_000_000, rng.randrange(9)) for _ in range(3)]
    world = NativeWorld(loop, filled, replay, cancels)
    world.run(jobs)
    return world, mirror
