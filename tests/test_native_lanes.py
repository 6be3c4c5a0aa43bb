"""From a native decision to a stage and its lane: what the host's code chooses and loads."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_device import DeviceTurns
from stage_loop import StageLoop
from stage_worlds import NativeWorld, dry_stages, random_jobs

from qllm.cuda.backend import CudaBackend
from qllm.cuda.lanes import Bucket, Lane
from qllm.cuda.pages import PagedKV, Pages
from qllm.cuda.stages import Key, Stages
from qllm.device import lanes, layout, serving
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.device.stages import check_stages
from qllm.errors import ConfigError, InvariantError
from qllm.kernels.select import kernels
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.plugins import load_policy
from qllm.runner.frame import Frame
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import Limits
from qllm.scheduler.program import OpKind, Program
from qllm.types import Grain, SamplingParams
from support.differential import random_shape

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


def test_a_random_frame_gets_the_hosts_stage_and_the_hosts_lane() -> None:
    seen: Counter[str] = Counter()
    parks = failed = 0
    for number in range(120):
        world, mirror = random_dry_run(number)
        seen += mirror.seen
        parks += world.parks
        failed += len(world.failed)
    assert seen["whole"] + seen["stage"] > 6000
    assert (
        min(seen[what] for what in ("head", "whole", "stage", "groups", "dead", "other head")) > 20
    ), seen
    assert parks > 100
    assert failed > 20


class HostKernels:
    """The kernels of the device build, by the host build's functions."""

    def __init__(self, policy: Any) -> None:
        self._rank, self._native = compile_host(policy), load_native()

    def call(self, which: int, address: int, *numbers: int) -> int:
        return int(self._native.call(address, self._rank.address, which, *numbers))

    def turn(self, name: str, threads: int, state: int, *numbers: int) -> int:
        where = state, self._rank.address, *numbers[:2]
        if name == "qllm_after":
            return int(self._native.turn_after(*where, *numbers[2:]))
        branch: int = self._native.turn_before(*where, *numbers[2:])
        if branch >= 0:
            self._native.turn_fill(*where, threads)
        return branch


def test_turns_made_as_kernels_are_launched_are_the_same() -> None:
    for number in range(3):
        kernels: Any = HostKernels(random_shape(random.Random(number)))
        world, _ = random_dry_run(number, 0, calls=lambda _, kernels=kernels: DeviceTurns(kernels))
        assert world.tokens == random_dry_run(number)[0].tokens


def test_a_frame_that_fits_no_stage_is_rerun_row_by_row() -> None:
    """Too small stages in spite of the check: nothing is lost, nobody waits for ever."""
    misfits = 0
    for number in range(40):
        policy, rng = random_shape(random.Random(number)), random.Random(number)
        loop, stages = dry_loop(policy, buckets=BIG if policy.groups else BUCKETS)
        table = loop.lanes.array("stages")
        table["tokens"] = table["tokens"].clip(max=LIMITS.max_step_tokens)

        def replay(branch: int, stages: Stages = stages) -> None:
            for lane in stages.lanes.values():
                lane.peaks_R.zero_()

        world = NativeWorld(loop, replay=replay)
        jobs = random_jobs(rng, 9, 50, 97)
        found = world.run(jobs)
        assert {n: len(tokens) for n, tokens in found.tokens.items()} == {
            n: job.max_tokens for n, job in enumerate(jobs)
        }
        misfits += world.misfits
    assert misfits > 5


def test_a_frame_that_a_host_parked_inside_a_layer_fits_no_stage() -> None:
    for name, value in (("inside", 1), ("layer", 3)):
        loop, _ = dry_loop(load_policy("qllm2"))
        slot = loop.add(
            range(9),
            priority=0,
            arrival_ns=0,
            sampling=SamplingParams(),
            seed=1,
            max_tokens=1,
            request_id=4,
        )
        assert loop.before(0) >= 0
        assert loop.after(1, -9) == lanes.PARKED
        loop.scheduler.block.array("frames")[name] = value
        assert loop.before(2) == lanes.CANNOT
        loop.scheduler.call("failed")
        assert loop.before(3) >= 0
        loop.remove(slot)
        assert loop.before(4) == lanes.NOTHING
        assert loop.scheduler.block.get("kind") == layout.IDLE


def frame_of_rows(
    loop: StageLoop, layers: list[tuple[int, int]], grain: Grain = Grain.LAYER
) -> None:
    """Let a frame run whose rows, three tokens each, cross these layers."""
    for number in range(len(layers)):
        loop.add(
            [number, 7, 9], priority=0, arrival_ns=number, sampling=SamplingParams(),
            seed=number, max_tokens=1, request_id=number,
        )  # fmt: skip
    assert loop.before(0) >= 0
    block = loop.scheduler.block
    slot = block.get("running")
    block.array("frames")["grain"][slot] = grain
    rows = block.array("frame_rows")[slot * LIMITS.max_num_seqs :]
    for row, (start, end) in zip(rows, layers, strict=False):
        row["start"], row["end"] = start, end
    block.set(num_gone=block.get("num_gone") + 1)  # what is known of its group holds no more


@pytest.mark.parametrize(
    "layers",
    [[(0, 3)], [(0, 1), (1, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 2), (2, 3)], [(0, 3), (1, 2)]],
)
def test_where_rows_join_and_leave_the_lane_is_filled_anew(layers: list[tuple[int, int]]) -> None:
    loop, stages = dry_loop(load_policy("fcfs"))
    frame_of_rows(loop, layers)
    mirror, begins, fills = Mirror(loop, stages, 3), [], []
    for lane in stages.lanes.values():
        lane.peaks_R.zero_()
    became = lanes.GOES_ON
    while became == lanes.GOES_ON:
        branch = loop.before(1)
        mirror.compare(branch)
        begins.append(loop._keys[branch].start)
        fills.append(loop.lanes.get("fill") == 1)
        became = loop.after(2)
    assert became == lanes.OVER
    assert begins == sorted({layer for start, end in layers for layer in range(start, end)})
    changes = {0} | {layer for row in layers for layer in row}
    assert fills == [layer in changes for layer in begins]
    ended = [number for number, (_, end) in enumerate(layers) if end == 3]
    assert len(loop.sampled) == len(ended)
    requests = loop.scheduler.block.array("requests")
    assert [int(requests[slot]["id"]) for slot, _ in loop.sampled] == ended


@pytest.mark.parametrize("start", [1, 2])
def test_a_frame_is_parked_before_the_next_layer_that_somebody_owes(start: int) -> None:
    loop, _ = dry_loop(load_policy("qllm2"))
    frame_of_rows(loop, [(0, 1), (start, 3)])
    loop.before(1)
    assert loop.after(2, -9) == lanes.PARKED
    block = loop.scheduler.block
    assert block.frame(int(block.ints("parked", 1)[0]))[4] == start
    served = {int(r["id"]): int(r["served_ns"]) for r in block.array("requests") if r["live"]}
    assert served == {0: 2, 1: 0}
    assert sum(block.array("requests")["preemptions"]) == 2
    assert loop._keys[loop.before(3)].start == start


def test_effects_that_nobody_takes_do_not_pile_up() -> None:
    loop, _ = dry_loop(load_policy("qllm2"), capacity=2)
    for number in range(9):
        slot = loop.add(
            [1, 2, 3], priority=0, arrival_ns=0, sampling=SamplingParams(), seed=0, max_tokens=1,
            request_id=number,
        )  # fmt: skip
        assert loop.before(number) >= 0
        assert loop.after(number, -9) == lanes.PARKED
        loop.remove(slot)
        assert loop.scheduler.block.get("num_effects") == 1


@pytest.mark.parametrize("grain", [Grain.STEP, Grain.LAYER])
def test_a_slice_ends_between_stages_but_not_in_a_step(grain: Grain) -> None:
    loop, _ = dry_loop(load_policy("qllm2"))
    frame_of_rows(loop, [(0, 1), (0, 3)], grain)
    loop.scheduler.block.set(slice_ns=5)
    assert not loop._keys[loop.before(1)].whole
    assert loop.after(4) == lanes.GOES_ON
    loop.before(4)
    assert loop.after(5) == (lanes.GOES_ON if grain is Grain.STEP else lanes.PARKED)
    assert not any(loop.scheduler.block.array("requests")["preemptions"])


def test_no_stage_crosses_a_layer_where_rows_leave() -> None:
    loop, _ = dry_loop(load_policy("fcfs"))
    frame_of_rows(loop, [(0, 1), (0, 3)])
    table = loop.lanes.array("stages")
    table["end"][table["start"] == 0] = 2
    assert loop.before(1) == lanes.CANNOT


# -- set-up


def refused(name: str = "fcfs", **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        dry_loop(load_policy(name), **how)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"rows": 4}, "rows of a stage (max_num_seqs of the runner): 4 were captured for"),
        ({"max_total_tokens": 61}, "tokens of a sequence: 60 were captured for, up to 61 can come"),
        ({"buckets": BUCKETS[::2]}, "tokens of a decode stage: 2 were captured for, up to 5"),
        ({"buckets": BUCKETS[:3]}, "tokens of a prefill stage: 12 were captured for, up to 45"),
        ({"limits": replace(LIMITS, num_blocks=65)}, "65 KV blocks do not fit 64 pages"),
        ({"limits": replace(LIMITS, block_size=8)}, "a block has 8 tokens, a page 4"),
        ({"limits": replace(LIMITS, batch_invariant=True)}, "batch-invariant"),
        (
            {"name": "layered", "k": 2},
            "cohorts of 2 groups stop at layers [1], stages begin at layers [0, 2]; set "
            "layers_per_stage to 1 or max_groups to less than 2",
        ),
    ],
)
def test_settings_for_which_a_stage_is_missing_are_refused(how: dict[str, Any], words: str) -> None:
    assert words in refused(**how)


def test_a_gap_between_stages_is_refused() -> None:
    stages, pages = dry_stages(3, 1, BUCKETS, 6, (64, 15), block=4)
    stages.captured = {key: graph for key, graph in stages.captured.items() if key.start != 1}
    with pytest.raises(ConfigError, match=r"stages of \d+ tokens begin at layers \[0, 2\] only"):
        check_stages(stages, pages, load_policy("fcfs"), LIMITS, LONGEST)


def test_there_are_as_many_slots_as_asked_for() -> None:
    loop, _ = dry_loop(load_policy("fcfs"))
    how: dict[str, Any] = {"priority": 0, "arrival_ns": 0, "sampling": SamplingParams(), "seed": 0}
    for number in range(64):
        loop.add([1], max_tokens=59, request_id=number, **how)
    with pytest.raises(InvariantError, match="there is no slot for request 64"):
        loop.add([1], max_tokens=59, request_id=64, **how)
    with pytest.raises(InvariantError, match="request 65 has up to 61 tokens, 60 fit"):
        loop.add([1], max_tokens=60, request_id=65, **how)


def test_the_headers_are_made_from_the_layouts() -> None:
    for module in (serving, lanes):
        assert module.HEADER.read_text() == module.emit_header()


def test_what_is_called_wrongly_is_refused() -> None:
    native = load_native()
    for function, num in ((native.turn_before, 5), (native.turn_fill, 5), (native.turn_after, 6)):
        with pytest.raises(TypeError, match=f"{num} arguments, not 2"):
            function(1, 2)
