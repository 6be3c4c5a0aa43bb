"""The floor for BE: its share of any window, and the bound on what LS pays, under any plan."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from qllm.config import EngineConfig
from qllm.engine.limits import limits_of
from qllm.errors import ConfigError
from qllm.floor import Floor
from qllm.plan import Plan
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Grain, Slo
from qllm_policies.qllm2 import Qllm2
from tests.support.floor_laws import (
    DEEP,
    FLOOR,
    NOTHING,
    SHARE,
    WINDOW_MS,
    Recorder,
    a_cohort_under_way,
    be_has_its_share,
    floor_world,
    large_and_small_wait_for_memory,
    least_share,
    ls_pays_no_more,
    more_decodes_than_seats,
    prompts_beside_decodes,
    runs_of,
)
from tests.support.scheduling import BE, LS, Fuzz, events, finished_well

NAMES = ["chunked", "chunked-priority", "edf", "fcfs", "flow", "laps", "layered", "lcas"]
NAMES += ["ls-first", "mcps", "mlfq", "priority", "priority-layered", "qllm", "qllm2", "rota"]
END_NS = 2 * WINDOW_MS * NS_PER_MS


def decodes_fill_every_step(world: World) -> None:
    for _ in range(world.scheduler.limits.max_num_seqs):
        world.submit(LS, 20, 2_000)
    for _ in range(3):
        world.submit(BE, 300, 1_000, at_ns=20 * NS_PER_MS)


def prompts_never_end(world: World) -> None:
    for i in range(200):
        world.submit(LS, 200, 3, at_ns=15 * i * NS_PER_MS)
    for _ in range(3):
        world.submit(BE, 400, 1_000)


def targets_leave_nothing(world: World) -> None:
    for i in range(4):
        world.submit(LS, 100, 1_000, slo=Slo(50.0, 1.0), at_ns=10 * i * NS_PER_MS)
    world.submit(BE, 200, 1_000)
    world.submit(4, 900, 1_000)


def serve(world: World, load: Callable[[World], None], end_ns: int = END_NS) -> World:
    load(world)
    while world.clock.at_ns < end_ns:
        world.step()
    assert not world.loop.policy_errors
    return world


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "load", [decodes_fill_every_step, prompts_never_end, targets_leave_nothing]
)
def test_be_has_its_share_of_every_window_under_every_policy(
    name: str, load: Callable[[World], None]
) -> None:
    world = serve(floor_world(load_policy(name, NOTHING if name == "qllm2" else {})), load)
    be_has_its_share(world)
    ls_pays_no_more(world)


@pytest.mark.parametrize("name", ["qllm", "qllm2", "lcas", "mcps"])
def test_long_steps_of_ls_stop_for_be_and_those_of_be_for_ls(name: str) -> None:
    """Steps take 30 slices: LS gives BE a slice inside of its own, and BE no more than that."""
    settings = NOTHING if name == "qllm2" else {}
    world = floor_world(load_policy(name, settings), shape=DEEP)
    serve(world, decodes_fill_every_step, 2 * END_NS)
    be_has_its_share(world)
    ls_pays_no_more(world)
    turns = [run.end_ns - run.decided_ns for run in runs_of(world) if run.is_turn]
    assert max(turns) <= 2 * FLOOR.slice_ns


@pytest.mark.parametrize("seed", range(10))
def test_any_plan_leaves_be_its_share_and_ls_the_rest(seed: int) -> None:
    r = random.Random(seed)
    grain = r.choice(list(Grain))
    world = floor_world(Fuzz(seed), grain=grain, max_num_seqs=r.choice([2, 8]))
    world = serve(world, r.choice([decodes_fill_every_step, prompts_never_end]))
    be_has_its_share(world, whole_turns=True)
    ls_pays_no_more(world)


@pytest.mark.parametrize("seed", range(6))
def test_ls_that_comes_and_goes_owes_be_no_less_while_it_is_there(seed: int) -> None:
    """Time that BE has while LS is away pays nothing of what it is owed while LS is there."""
    r, world = random.Random(seed), floor_world(Qllm2(**NOTHING))
    for _ in range(4):
        world.submit(BE, r.randint(50, 900), 200)
    at_ns = 0
    while at_ns < END_NS:
        world.submit(LS, 30, r.randint(2, 12), at_ns=at_ns)
        at_ns += r.randint(20, 300) * NS_PER_MS
    serve(world, lambda _: None)
    there = [run for run in runs_of(world) if run.is_contended]
    length_ns = sum(run.end_ns - run.decided_ns for run in there)
    assert 0.1 * END_NS < length_ns < 0.9 * END_NS
    assert sum(run.be_ns for run in there) >= SHARE * length_ns - FLOOR.slice_ns
    ls_pays_no_more(world)


def test_without_a_floor_ls_decode_starves_be() -> None:
    world = serve(floor_world(Qllm2(**NOTHING), Floor()), decodes_fill_every_step)
    assert least_share(world, WINDOW_MS * NS_PER_MS) == 0
    assert not any(run.is_turn for run in runs_of(world))


def test_a_floor_that_is_met_by_the_policy_costs_nothing() -> None:
    world = floor_world(Qllm2(ride_frac=0.5))
    for priority in (LS, LS, LS, BE, BE, BE):  # seats are left to ride on
        world.submit(priority, 20, 1_000)
    serve(world, lambda _: None)
    be_has_its_share(world)
    assert ls_pays_no_more(world) < 0.01 * END_NS


@pytest.mark.parametrize("name", ["fcfs", "ls-first", "chunked", "layered", "priority-layered"])
def test_where_steps_are_not_cut_a_turn_is_small_by_its_tokens_and_layers(name: str) -> None:
    world = prompts_beside_decodes(name, Recorder)
    serve(world, lambda _: None)
    turns = [run.end_ns - run.decided_ns for run in runs_of(world) if run.is_turn]
    assert len(turns) > 3
    assert max(turns) <= 5 * FLOOR.slice_ns
    be_has_its_share(world)
    ls_pays_no_more(world)


def test_a_turn_of_a_cohort_under_way_is_a_few_layers_where_steps_are_not_cut() -> None:
    world = a_cohort_under_way(Recorder)
    serve(world, lambda _: None, END_NS // 2)
    turns = [run.end_ns - run.decided_ns for run in runs_of(world) if run.is_turn]
    assert len(turns) > 3
    assert max(turns) <= 3 * FLOOR.slice_ns
    ls_pays_no_more(world)


def test_decodes_of_be_take_turns_where_seats_are_few() -> None:
    world = more_decodes_than_seats(Recorder)
    before = dict(world.tokens)
    serve(world, lambda _: None)
    grown = [world.tokens[i] - before[i] for i in range(4)]
    assert min(grown) > 2
    assert max(grown) - min(grown) <= 1


def test_nobody_passes_be_that_waits_for_memory() -> None:
    world = large_and_small_wait_for_memory(Recorder)
    world.run()
    finished_well(world)
    firsts = [e.request_id for e in events(world, trace.Token) if e.request_id != 0]
    assert firsts[0] == 1
    assert 2 in firsts


def test_no_more_than_a_window_of_debt_is_remembered() -> None:
    """A machine that slept for an hour does not give BE the next minutes."""
    world = floor_world(Qllm2(**NOTHING))
    serve(world, decodes_fill_every_step, 100 * NS_PER_MS)
    for _ in range(3):
        world.clock.at_ns += 3_600_000 * NS_PER_MS
        world.step()
    assert 0 < owed_ns(world) <= FLOOR.window_ns * FLOOR.rate // 1_000_000


def owed_ns(world: World) -> int:
    found: int = world.scheduler.be_share.now.owed_ns
    return found


def test_be_that_is_paused_or_waits_for_its_prompt_is_owed_nothing() -> None:
    world = floor_world(Qllm2(**NOTHING))
    paused = world.submit(BE, 100, 50)
    world.submit(BE, 0, 50, is_open=True)
    world.step()
    world.scheduler.update(paused, None, True, world.clock.at_ns)
    world.submit(LS, 20, 1_000)
    before_ns = owed_ns(world)
    serve(world, lambda _: None)
    assert owed_ns(world) <= max(0, before_ns)
    assert not any(run.is_turn for run in runs_of(world))


def test_be_without_memory_is_owed_nothing_and_takes_none_of_ls() -> None:
    world = floor_world(Qllm2(**NOTHING), num_blocks=8)
    world.submit(LS, 60, 60)
    for _ in range(4):
        world.step()
    batch = world.submit(BE, 100, 5)  # 7 blocks, of which LS leaves 3
    while world.scheduler.requests.get(0) is not None:
        world.step()
        assert owed_ns(world) == 0
    assert world.tokens[batch] == 0
    world.run()
    finished_well(world)
    assert not [run for run in runs_of(world) if run.is_turn]


def test_a_debt_ends_with_those_it_was_owed() -> None:
    world = floor_world(Qllm2(**NOTHING))
    world.submit(LS, 20, 1_000)
    batch = world.submit(BE, 400, 50)
    while owed_ns(world) < FLOOR.slice_ns // 2:
        world.step()
    world.cancel(batch)
    world.step()
    world.step()
    assert owed_ns(world) == 0


def test_a_run_of_be_that_raises_has_taken_its_time() -> None:
    """Else requests that fail, one after the other, would have all of the time of LS."""
    world = floor_world(Qllm2(**NOTHING))
    world.submit(LS, 20, 1_000)
    world.runner.poisoned[world.submit(BE, 100, 5)] = 1
    while not (errors := [e for e in world.record if getattr(e, "why", "") == "error"]):
        world.step()
    before_ns = owed_ns(world)
    world.scheduler.decide(world.clock.at_ns)
    took_ns = errors[0].at_ns - errors[0].start_ns
    assert before_ns >= FLOOR.slice_ns
    assert owed_ns(world) < before_ns - 0.8 * took_ns
    assert world.scheduler.be_share.now.paid_ns == took_ns


def test_a_pause_that_a_policy_makes_ends_when_be_is_owed_a_slice() -> None:
    class Waits:
        """Plans nothing while both classes have work."""

        needs = Qllm2().needs

        def plan(self, view: Any) -> Any:
            return Plan(wait_until_ns=view.now_ns + 9_000 * NS_PER_MS)

    world = floor_world(Waits())
    world.submit(LS, 20, 1_000)
    world.submit(BE, 400, 1_000)
    serve(world, lambda _: None)
    be_ns = sum(run.be_ns for run in runs_of(world))
    assert be_ns >= SHARE * END_NS - FLOOR.slice_ns


def test_settings_of_an_engine_make_its_floor() -> None:
    config = EngineConfig(
        max_kv_tokens=1024, min_be_share=0.05, be_share_window_ms=500, max_segment_ms=2
    )
    assert limits_of(config).floor == Floor.of(0.05, 500, 2)
    assert not limits_of(EngineConfig(max_kv_tokens=1024)).floor.rate
    with pytest.raises(ConfigError, match="min_be_share=1 must be"):
        EngineConfig(min_be_share=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((1.0, 2000, 5), r"min_be_share=1.0 must be a number in \[0, 0.9\]"),
        ((-0.1, 2000, 5), r"min_be_share=-0.1 must be"),
        ((float("nan"), 2000, 5), r"min_be_share=nan must be"),
        ((True, 2000, 5), r"min_be_share=True must be"),
        (("0.1", 2000, 5), r"min_be_share='0.1' must be"),
        ((0.1, 99, 5), r"be_share_window_ms=99 must be a number in \[100, 3600000\]"),
        ((0.1, float("inf"), 5), r"be_share_window_ms=inf must be"),
        ((0.0, None, 5), r"be_share_window_ms=None must be"),
        ((0.9, 100, 5), r"leaves LS too little.*give a window of at least 301 ms"),
    ],
)
def test_a_floor_that_cannot_be_held_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Floor.of(*settings)


def test_the_window_that_a_refusal_asks_for_is_taken() -> None:
    for share in (0.05, 0.5, 0.9):
        for segment_ms in (0.5, 5.0, float("inf")):
            try:
                Floor.of(share, 100, segment_ms)
            except ConfigError as error:
                window_ms = int(str(error).split("at least ")[1].split(" ms")[0])
                assert Floor.of(share, window_ms, segment_ms).rate <= 950_000
