"""The native scheduler decides what the Python one decides, call by call, and serves as it does."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from qllm.device import layout
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.errors import CheckpointError, ConfigError, PolicyError
from qllm.plan import NO_CUTS
from qllm.plugins import load_policy
from qllm.scheduler.decision import Limits
from qllm.scheduler.request import Request
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, SHAPE, World
from qllm.types import NS_PER_MS, FinishReason, Priority, Slo
from qllm_policies.qllm2 import Qllm2
from tests.support.counts import in_lane
from tests.support.differential import DifferenceError, Twin, random_shape, random_world, run_trace
from tests.support.floor_laws import (
    a_cohort_under_way,
    large_and_small_wait_for_memory,
    more_decodes_than_seats,
    prompts_beside_decodes,
)
from tests.support.forked import start_program
from tests.support.native_scheduler import NativeScheduler
from tests.support.on_device import DeviceCalls

SHIPPED = ["fcfs", "ls-first", "priority", "qllm2", "chunked", "chunked-priority", "edf"]
SHIPPED += ["layered", "priority-layered"]
LS, BE = Priority.LS, Priority.BE


# -- decision by decision


@pytest.mark.parametrize("name", SHIPPED)
def test_an_installed_policy_decides_the_same(name: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(12):
        seen += run_trace(load_policy(name), f"{name}-{number}").seen
    assert seen["accept"] > 150


def test_any_shape_decides_the_same(request: pytest.FixtureRequest) -> None:
    seen: Counter[str] = Counter()
    for number in range(in_lane(request, 25, 60)):
        policy = random_shape(random.Random(number))
        seen += run_trace(policy, f"any-{number}").seen
    wanted = ("resume", "slice", "evictkv", "kill", "drop", "turn", "turn resumes")
    assert all(seen[what] for what in wanted), seen


@pytest.mark.parametrize(
    "scene",
    [
        *(partial(prompts_beside_decodes, name) for name in ("fcfs", "layered")),
        a_cohort_under_way,
        more_decodes_than_seats,
        large_and_small_wait_for_memory,
    ],
)
def test_turns_of_be_are_the_same(scene: Callable[[type[Twin]], World]) -> None:
    world = scene(Twin)
    for _ in range(400):
        world.step()
    for _ in range(3):  # more than a window of debt, and no turn yet that pays it
        world.clock.at_ns += 3_600_000 * NS_PER_MS
        world.step()
    assert world.scheduler.seen["turn"] or scene is large_and_small_wait_for_memory


@pytest.mark.parametrize("frac", [0.25, 0.5, 2.0])
def test_a_crowd_that_rides_along_is_capped_the_same(frac: float) -> None:
    slow = SimCosts(expert_ns=NS_PER_MS, head_ns=2 * NS_PER_MS)
    world = World(Qllm2(ride_frac=frac), costs=slow, scheduler=Twin)
    for priority, count in ((LS, 2), (BE, 12)):
        for _ in range(count):
            world.submit(priority, 10, 60)
    world.run()
    assert world.scheduler.seen["accept"] >= 60


def by_number(policy: Any, *args: Any, **settings: Any) -> NativeScheduler:
    """A native scheduler whose functions are called as a kernel launch calls them."""

    def calls(policy: Any) -> DeviceCalls:
        rank, native = compile_host(policy), load_native()
        return DeviceCalls(lambda which, at, *n: int(native.call(at, rank.address, which, *n)))

    return NativeScheduler(policy, *args, calls=calls, **settings)


def test_functions_called_by_number_decide_the_same() -> None:
    seen: Counter[str] = Counter()
    for number in range(20):
        policy = random_shape(random.Random(number))
        seen += run_trace(policy, f"number-{number}", by_number).seen
    assert all(seen[what] for what in ("resume", "slice", "evictkv", "kill", "drop")), seen
    with pytest.raises(AttributeError):
        DeviceCalls(print).decided(1)
    made = by_number(load_policy("fcfs"), SHAPE, NO_CUTS, LIMITS)
    assert load_native().call(made.block.address, 0, len(layout.CALLS)) == -1
    with pytest.raises(TypeError, match="3 to 9 arguments, not 10"):
        load_native().call(*range(10))


@pytest.mark.slow  # fewer shapes: the test above
def test_any_shape_decides_the_same_often() -> None:
    for number in range(1000):
        run_trace(random_shape(random.Random(-number)), f"often-{number}")


@pytest.mark.parametrize(
    ("name", "field", "change"),
    [
        ("qllm2", "ride_credit_ns", 1),
        ("qllm2", "max_step_tokens", -230),
        ("qllm2", "num_odd", 1),
        ("qllm2", "max_be_stall_ms", -900),
        ("edf", "ride_unbounded", -1),
        ("chunked", "step_tokens", -300),
        ("layered", "group_tokens", -400),
        ("priority-layered", "group_tokens", -400),
        ("fcfs", "chunk_tokens", 7),
    ],
)
def test_a_wrong_number_in_the_block_is_a_difference(name: str, field: str, change: int) -> None:
    world = World(load_policy(name), replace(LIMITS, max_num_seqs=3), scheduler=Twin)
    for size in (30, 300, 200, 40):
        world.submit(BE, size, 6)
        world.submit(LS, size // 2, 6, at_ns=30 * NS_PER_MS)
    block = world.scheduler.native.block
    block.set(**{field: block.get(field) + change})
    with pytest.raises(DifferenceError):
        world.run(200)


def test_an_impossible_request_ends_with_the_same_words() -> None:
    world = World(load_policy("priority"), replace(LIMITS, num_blocks=4), scheduler=Twin)
    request = Request(request_id=0, priority=BE, arrival_ns=0, num_prompt_tokens=200, max_tokens=1)
    world.scheduler.add(request, 0)  # the engine's loop refuses it before it gets here
    with pytest.raises(PolicyError, match=r"\(I8\)|no KV"):
        world.scheduler.decide(0)


def test_a_change_of_policy_changes_both() -> None:
    world = World(load_policy("qllm2"), scheduler=Twin)
    for i in range(8):
        world.submit(BE if i % 3 else LS, 200 - i, 4, at_ns=i * NS_PER_MS)
    for name in ("qllm2", "edf", "layered", "chunked"):
        world.scheduler.policy = load_policy(name)
        for _ in range(12):
            world.step()
    world.run()
    assert set(world.finished.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("native", [NativeScheduler, by_number])
def test_a_checkpoint_is_taken_over_alike(native: Any) -> None:
    world = World(load_policy("qllm2"), scheduler=Twin)
    for i in range(4):
        world.submit(BE, 100 + i, 3)
    world.on_boundary = lambda: world.ingress.stop.lower(-5)
    world.step()
    (parked,) = world.scheduler.frames.values()
    victim = parked.program.rows[0].request_id
    for effect in world.scheduler.evict(victim, victim):
        world.loop.effects.apply(effect)
    world.submit(LS, 50, 3)
    world.loop.take()
    old = world.scheduler
    twin = Twin(load_policy("qllm2"), SHAPE, NO_CUTS, LIMITS, native)
    for request in old.requests.values():
        twin.adopt(replace(request, block_table=[], frame_id=None))
    for parked in old.frames.values():
        program = replace(parked.program, frame_id=twin.new_frame_id())
        twin.adopt_frame(program, parked.index, set(parked.dead), 7 * NS_PER_MS)
    twin.check()
    first = twin.decide(8 * NS_PER_MS)
    assert first.program.request_ids == (4,)
    twin.done(first.program.end, [4], 8 * NS_PER_MS, 9 * NS_PER_MS)
    assert twin.remove(4, 9 * NS_PER_MS) == []
    assert twin.decide(9 * NS_PER_MS).resumed


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    scheduler = NativeScheduler(load_policy("fcfs"), SHAPE, NO_CUTS, replace(LIMITS, num_blocks=2))
    request = Request(request_id=0, priority=0, arrival_ns=0, num_prompt_tokens=90, max_tokens=3)
    request.num_computed_tokens = 70
    with pytest.raises(CheckpointError, match="needs 5 KV blocks, 2 are free"):
        scheduler.adopt(request)


# -- alone


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qllm2", "priority-layered", "edf", "chunked"])
def test_a_run_has_the_same_events(name: str) -> None:
    runs = []
    for scheduler in (Scheduler, NativeScheduler):
        world = random_world(load_policy(name), random.Random(5), scheduler)
        for i in range(300):  # more than the block has room for at first
            world.submit(BE if i % 4 else LS, 1 + i % 37, 3, at_ns=i * 1000, slo=Slo(99.0, 9.0))
        world.run()
        runs.append(list(world.record))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 1500


def test_the_header_is_made_from_the_layout() -> None:
    assert layout.HEADER.read_text() == layout.emit_header()


def test_the_block_grows_and_forgets_nothing() -> None:
    scheduler = NativeScheduler(load_policy("fcfs"), SHAPE, NO_CUTS, LIMITS, capacity=1)
    for i in range(100):
        scheduler.add(
            Request(request_id=i, priority=0, arrival_ns=-i, num_prompt_tokens=5, max_tokens=1),
            0,
        )
        scheduler.check()
    assert scheduler.block.get("capacity") == 128
    assert [row.request_id for row in scheduler.decide(0).program.rows] == list(range(99, 91, -1))


# -- refusals


def test_a_policy_that_plans_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy Mlfq plans by itself; only a RankPolicy"):
        NativeScheduler(load_policy("mlfq"), SHAPE, NO_CUTS, LIMITS)


def test_without_the_extension_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qllm.device._scheduler", None)
    with pytest.raises(ConfigError, match=r"was not built .*use loop='host'"):
        NativeScheduler(load_policy("fcfs"), SHAPE, NO_CUTS, LIMITS)


def test_an_old_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = layout.VERSION
    monkeypatch.setattr(layout, "VERSION", 99)
    with pytest.raises(ConfigError, match=f"version {built} of its state, not 99"):
        NativeScheduler(load_policy("fcfs"), SHAPE, NO_CUTS, LIMITS)


def test_limits_reach_the_block() -> None:
    limits = Limits(
        max_num_seqs=5,
        max_step_tokens=77,
        block_size=4,
        num_blocks=9,
        grain=LIMITS.grain,
        max_segment_ns=123,
    )
    block = NativeScheduler(load_policy("fcfs"), SHAPE, NO_CUTS, limits).block
    names = ("seats", "max_step_tokens", "block_size", "num_blocks", "max_segment_ns")
    assert [block.get(name) for name in names] == [5, 77, 4, 9, 123]


def test_numba_is_loaded_for_the_loop_on_the_device_alone() -> None:
    code = (
        "import sys, qllm.engine.build; print(sorted({'numba', 'qllm.device'} & set(sys.modules)))"
    )
    with start_program(code) as program:
        assert program.stdout.read().strip() == "[]"
        assert program.wait(60) == 0
