"""From a native decision to a stage and its lane: what the host's code chooses and loads."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from qllm.cuda.stages import Stages
from qllm.device import lanes, layout, serving
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.device.stages import check_stages
from qllm.errors import ConfigError, InvariantError
from qllm.plugins import load_policy
from qllm.types import Grain, SamplingParams
from tests.support.counts import in_lane
from tests.support.differential import random_shape
from tests.support.native_lanes import (
    BIG,
    BUCKETS,
    LIMITS,
    LONGEST,
    Mirror,
    dry_loop,
    random_dry_run,
)
from tests.support.on_device import DeviceTurns
from tests.support.stage_loop import StageLoop
from tests.support.stage_worlds import NativeWorld, dry_stages, random_jobs


def test_a_random_frame_gets_the_hosts_stage_and_the_hosts_lane(
    request: pytest.FixtureRequest,
) -> None:
    seen: Counter[str] = Counter()
    parks = failed = 0
    count = in_lane(request, 40, 120)
    for number in range(count):
        world, mirror = random_dry_run(number)
        seen += mirror.seen
        parks += world.parks
        failed += len(world.failed)
    assert seen["whole"] + seen["stage"] > 50 * count
    assert (
        min(seen[what] for what in ("head", "whole", "stage", "groups", "dead", "other head"))
        > count // 6
    ), seen
    assert parks > 0.8 * count
    assert failed > count // 6


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
def test_a_frame_is_parked_before_the_next_layer_that_a_row_still_needs(start: int) -> None:
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


def test_effects_that_are_not_read_do_not_pile_up() -> None:
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
