"""BE waits for LS of other engines, keeps its share, and runs at once when the pressure ends."""

import pytest

from qllm.floor import MILLION, NO_FLOOR, Floor
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.scheduler.pressure import LEAST_SHARE, SLICE_NS
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.world import World
from qllm.types import NS_PER_MS
from tests.support.floor_laws import FLOOR, floor_world
from tests.support.scheduling import BE, LS, events, finished_well

NAMES = ["chunked", "edf", "fcfs", "layered", "ls-first", "priority", "qllm", "qllm2"]
END_NS = 4_000 * NS_PER_MS


def world_of(name: str, floor: Floor = NO_FLOOR) -> World:
    return floor_world(load_policy(name), floor, scheduler=Scheduler)


def serve(world: World, end_ns: int) -> int:
    """Step until a time; return the nanoseconds in which programs ran."""
    before = world.clock.at_ns
    while world.clock.at_ns < end_ns:
        world.step()
    assert not world.loop.policy_errors
    return sum(x.at_ns - x.start_ns for x in events(world, trace.Ran) if x.start_ns >= before)


def with_be(world: World) -> World:
    for _ in range(3):
        world.submit(BE, 300, 1_000)
    return world


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("floor", [NO_FLOOR, FLOOR], ids=["no floor", "a floor"])
def test_be_is_held_down_to_its_share(name: str, floor: Floor) -> None:
    world = with_be(world_of(name, floor))
    world.scheduler.pressure.set(True, 0)
    ran_ns = serve(world, END_NS)
    share = max(LEAST_SHARE, floor.rate / MILLION)
    longest_ns = max(x.at_ns - x.start_ns for x in events(world, trace.Ran))
    # at the start it is held for a whole hold; the policy's bound of stalls may end holds sooner
    assert (
        share * END_NS / 2
        < ran_ns
        < share * END_NS
        + 2 * max(longest_ns, SLICE_NS)
        + (END_NS * longest_ns // (5_000 * NS_PER_MS))
    )
    assert world.scheduler.pressure.num_holds > 0


@pytest.mark.parametrize("name", NAMES)
def test_without_pressure_nothing_is_held(name: str) -> None:
    world = with_be(world_of(name))
    assert serve(world, NS_PER_MS * 500) >= NS_PER_MS * 499
    assert world.scheduler.pressure.num_holds == 0


@pytest.mark.parametrize("name", NAMES)
def test_be_runs_at_once_when_the_pressure_ends(name: str) -> None:
    world = with_be(world_of(name))
    world.scheduler.pressure.set(True, 0)
    assert not world.step()
    world.scheduler.pressure.set(False, world.clock.at_ns)
    assert world.step()
    assert serve(world, world.clock.at_ns + 100 * NS_PER_MS) >= 99 * NS_PER_MS


@pytest.mark.parametrize("name", NAMES)
def test_ls_of_the_engine_itself_is_never_held(name: str) -> None:
    """LS tokens come at the same times as without pressure."""

    def ends(is_on: bool) -> list[tuple[int, int]]:
        world = world_of(name)
        for i in range(5):
            world.submit(LS, 50, 20, at_ns=7 * i * NS_PER_MS)
        world.scheduler.pressure.set(is_on, 0)
        while len(world.finished) < 5:
            world.step()
        assert world.scheduler.pressure.num_holds == 0
        return [(x.request_id, x.at_ns) for x in events(world, trace.Finished)]

    assert ends(True) == ends(False)


def test_answers_end_well_whatever_the_pressure_does() -> None:
    world = world_of("qllm2")
    for i in range(6):
        world.submit(BE if i % 2 else LS, 60, 30, at_ns=3 * i * NS_PER_MS)
    is_on = False
    for number in range(200_000):
        if len(world.finished) == 6:
            break
        if number % 3 == 0:
            is_on = not is_on
            world.scheduler.pressure.set(is_on, world.clock.at_ns)
        world.step()
    finished_well(world)


def test_a_hold_is_no_longer_than_half_of_the_bound_of_stalls() -> None:
    """So held BE still makes progress within the bound of its policy (I14)."""
    policy = load_policy("qllm2", {"max_be_stall_ms": 400})
    world = with_be(floor_world(policy, NO_FLOOR, scheduler=Scheduler))
    world.scheduler.pressure.set(True, 0)
    serve(world, END_NS)
    starts = [x.start_ns for x in events(world, trace.Ran)]
    gaps = [b - a for a, b in zip([0, *starts], starts, strict=False)]
    assert 150 * NS_PER_MS < max(gaps) <= 260 * NS_PER_MS
