"""KV that moves out of its blocks and back: nothing is computed again, and no token changes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm import SamplingParams
from qllm.config import EngineConfig
from qllm.engine.costs import StepCosts
from qllm.errors import ConfigError, InvariantError
from qllm.plan import Plan, Row
from qllm.plugins import load_policy
from qllm.policy import NO_COSTS, Tier, View, next_row
from qllm.record import trace
from qllm.scheduler.blocks import SwapSpace
from qllm.scheduler.decision import Decision, SwapIn
from qllm.scheduler.rules import broken_rule
from qllm.scheduler.scheduler import Scheduler
from qllm.scheduler.victims import make_way
from qllm.sim.check import overload, watch
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, SHAPE, World
from qllm.types import NS_PER_MS, Cap, FinishReason, Priority, Slo
from qllm_policies.mlfq import Mlfq
from qllm_policies.rota import Rota
from tests.support.scheduling import BY_CLASS, Fuzz, events, finished_well, work_is_exact
from tests.support.swap import SwapFuzz, metrics_of, short_of_kv

LS, BE = Priority.LS, Priority.BE
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


# -- the room


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=40))
def test_room_is_what_was_put_less_what_was_released(size: int, steps: list[Any]) -> None:
    space, held = SwapSpace(size), dict[int, int]()
    for request_id, count in steps:
        if request_id in held:
            space.release(request_id)
            del held[request_id]
        else:
            fits = sum(held.values()) + count <= size
            assert space.put(request_id, count) is fits
            if fits:
                held[request_id] = count
        assert space.num_free == size - sum(held.values())
        space.check(held)
    with pytest.raises(InvariantError):
        space.check({**held, 99: 1})


# -- decisions, on a virtual clock


@pytest.mark.parametrize("room", [4, 10_000])
@pytest.mark.parametrize("seed", range(10))
def test_any_plan_that_swaps_gives_every_request_its_tokens(seed: int, room: int) -> None:
    r = random.Random(seed)
    limits = replace(short_of_kv(r.choice([30, 60, 400]), room), max_num_seqs=r.choice([2, 3, 8]))
    world = World(SwapFuzz(seed), limits)
    for _ in range(6):
        world.submit(r.choice([0, 3, 10]), r.randint(1, 400), r.randint(1, 10))
    while not world.idle:
        world.step()
        work_is_exact(world)
        assert world.clock.at_ns < 10**12
    assert not world.loop.policy_errors
    finished_well(world)
    assert world.scheduler.swap.num_used == 0
    effects = world.loop.effects
    assert effects.tokens_in == effects.tokens_out
    if room > 4:
        assert events(world, trace.SwappedOut)
        if not events(world, trace.Evicted):
            assert sum(m.evict_recomputed_tokens for m in metrics_of(world)) == 0


@pytest.mark.parametrize("policy", BY_CLASS)
def test_be_goes_on_where_it_was_when_ls_has_taken_its_kv(policy: Any) -> None:
    world = World(policy, short_of_kv(16))
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    chat = world.submit(LS, 100, 3)
    world.run()
    finished_well(world)
    (out,), (back,) = events(world, trace.SwappedOut), events(world, trace.SwappedIn)
    assert (out.request_id, out.for_request) == (batch, chat)
    assert out.num_tokens == back.num_tokens >= 202
    assert not events(world, trace.Evicted)
    assert sum(m.evict_recomputed_tokens for m in metrics_of(world)) == 0
    prefilled = [p for p in events(world, trace.Planned) if p.at_ns > back.at_ns]
    assert min(row.lo for p in prefilled for row in p.rows if row.request_id == batch) >= 202


def test_a_parked_prefill_goes_on_inside_its_layer() -> None:
    """Nothing of it is committed yet; its frame waits with its KV."""
    world = World(load_policy("qllm2"), short_of_kv(16), costs=SimCosts(expert_ns=2_000_000))
    batch = world.submit(BE, 200, 4)
    world.submit(LS, 100, 3, at_ns=5 * NS_PER_MS)
    while not (world.scheduler.away or world.idle):
        world.step()
    assert world.scheduler.away
    away = world.scheduler.away[batch]
    assert away.program.inside_layer(away.index)
    assert world.scheduler.requests[batch].num_computed_tokens == 0
    assert world.scheduler.swap.num_used == 13
    world.run()
    finished_well(world)
    (out,), (back,) = events(world, trace.SwappedOut), events(world, trace.SwappedIn)
    assert out.num_tokens == back.num_tokens == 200
    assert not events(world, trace.Left)
    frame_id = away.program.frame_id
    resumed = [e.frame_id for e in events(world, trace.Resumed) if e.at_ns >= back.at_ns]
    assert resumed[:1] == [frame_id]
    assert sum(m.evict_recomputed_tokens for m in metrics_of(world)) == 0


def test_a_request_that_ends_while_its_frame_is_away_leaves_nothing() -> None:
    world = World(load_policy("qllm2"), short_of_kv(16), costs=SimCosts(expert_ns=2_000_000))
    batch = world.submit(BE, 200, 4)
    world.submit(LS, 100, 3, at_ns=5 * NS_PER_MS)
    while not (world.scheduler.away or world.idle):
        world.step()
    assert world.scheduler.away
    world.cancel(batch)
    world.run()
    assert world.finished[batch] is FinishReason.CANCELLED
    assert not world.scheduler.away
    assert not world.runner.frames
    assert world.scheduler.swap.num_used == 0


def test_to_be_swapped_in_is_no_progress() -> None:
    """Its stall goes on until it runs."""
    last: list[tuple[int, int]] = []

    class Looking(Scheduler):
        def decide(self, now_ns: int) -> Decision:
            before = {i: request.last_progress_ns for i, request in self.requests.items()}
            decision = super().decide(now_ns)
            for effect in decision.effects:
                if isinstance(effect, SwapIn):
                    request = self.requests[effect.request_id]
                    last.append((before[effect.request_id], request.last_progress_ns))
                    assert request.admitted_ns == now_ns
            return decision

    world = World(load_policy("qllm2"), short_of_kv(16), scheduler=Looking)
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    world.submit(LS, 100, 3)
    world.run()
    finished_well(world)
    assert last
    assert all(before == after for before, after in last)


def test_a_suspect_that_moved_out_with_its_row_waits_until_it_fits() -> None:
    """Its row goes on where it was, whole; nobody is blamed."""
    world = World(load_policy("qllm2"), short_of_kv(16), costs=SimCosts(expert_ns=2_000_000))
    batch = world.submit(BE, 200, 4)
    world.submit(LS, 100, 3, at_ns=5 * NS_PER_MS)
    while not (world.scheduler.away or world.idle):
        world.step()
    assert world.scheduler.away
    world.scheduler.suspects = [batch]
    world.run()
    assert not world.loop.policy_errors
    finished_well(world)
    assert len(events(world, trace.SwappedIn)) == 1
    assert not events(world, trace.Evicted)


def test_without_room_a_victim_starts_again() -> None:
    world = World(load_policy("qllm2"), short_of_kv(16, num_swap_blocks=5))
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    world.submit(LS, 100, 3)
    world.run()
    finished_well(world)
    assert [e.request_id for e in events(world, trace.Evicted)] == [batch]
    assert not events(world, trace.SwappedOut)


@pytest.mark.parametrize(
    ("move_ns", "swaps"), [(0, True), (499, True), (500, False), (None, False)]
)
def test_kv_moves_out_where_that_is_quicker_than_computing_it(
    move_ns: int | None, swaps: bool
) -> None:
    world = World(load_policy("qllm2"), short_of_kv(16))
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    tiers = () if move_ns is None else (move_ns,)
    table = world.scheduler.costs._replace(prefill_token_ns=1000, move_token_ns=tiers)
    world.scheduler.costs = table
    world.submit(LS, 100, 3)
    while not (events(world, trace.SwappedOut) or events(world, trace.Evicted)):
        world.scheduler.costs = table
        world.step()
    assert bool(events(world, trace.SwappedOut)) is swaps
    world.run()
    finished_well(world)


def test_what_need_not_move_costs_nothing() -> None:
    table = NO_COSTS._replace(prefill_token_ns=100, move_token_ns=(0, 1000))
    assert table.pays_to_keep(Tier.FILE, 49, 1000)
    assert not table.pays_to_keep(Tier.FILE, 50, 1000)
    assert table.pays_to_keep(Tier.MEMORY, 1000, 1)
    assert not table.pays_to_keep(Tier.MEMORY, 0, 0)


def test_the_cost_of_moving_is_fitted_per_tier() -> None:
    memory_ns = 0
    costs = StepCosts(lambda: memory_ns)
    assert costs.table().move_token_ns == (0,)
    for elapsed_ns, want in ((1000, (0, 100)), (5000, (0, 200))):
        costs.moved(Tier.FILE, 10, elapsed_ns)
        assert costs.table().move_token_ns == want
    memory_ns = 5  # a device has KV now
    assert costs.table().move_token_ns == (5, 200)


def test_a_request_that_ends_while_it_is_swapped_out_leaves_no_room_taken() -> None:
    world = World(load_policy("qllm2"), short_of_kv(16))
    batch = world.submit(BE, 200, 40)
    while world.tokens[batch] < 3:
        world.step()
    world.submit(LS, 100, 30)
    while not events(world, trace.SwappedOut):
        world.step()
    assert world.scheduler.swap.num_used == 13
    world.cancel(batch)
    world.run()
    assert world.finished[batch] is FinishReason.CANCELLED
    assert world.scheduler.swap.num_used == 0


@pytest.mark.parametrize("bound_ms", [100, 300])
@pytest.mark.parametrize("name", ["chunked", "edf", "priority", "priority-layered", "qllm2"])
def test_a_swapped_out_request_is_brought_back_before_the_stall_bound(
    name: str, bound_ms: int
) -> None:
    """LS requests without end hold all KV; they make way for a slice of BE, and lose nothing."""
    world = overload(load_policy(name, {"max_be_stall_ms": bound_ms}), bound_ms, swaps=True)
    watch(world)
    finished_well(world)
    out = events(world, trace.SwappedOut)
    assert {world.submitted[e.request_id].priority for e in out} == {LS, BE}
    assert not events(world, trace.Evicted)
    assert max(m.max_stall_ms for m in metrics_of(world) if m.priority == BE) <= bound_ms


def test_no_request_makes_way_where_too_few_can() -> None:
    world = World(load_policy("qllm2"), short_of_kv(100))
    ids = [world.submit(BE, 40, 9) for _ in range(3)]
    world.step()
    view, ranking = world.scheduler.view(world.clock.at_ns), world.scheduler._ranked(0)
    assert ranking is not None
    row = Row(ids[0], 40, 41, 0, SHAPE.num_layers)
    free = replace(view, num_free_blocks=0)
    grows = row._replace(hi=16 * 4)
    assert make_way(view, ranking, grows) == ()
    assert make_way(free, ranking, grows) == (ids[2],)
    assert make_way(replace(free, num_free_swap_blocks=2), ranking, grows) is None
    world.scheduler.requests[ids[2]].admitted_ns = 10**18
    assert make_way(free, ranking, grows) == (ids[1],)
    assert make_way(free, ranking, row._replace(hi=16 * 30)) is None


def wrong_plans() -> dict[str, Callable[[View], tuple[int, ...]]]:
    return {
        "unknown": lambda view: (999,),
        "planned": lambda view: (view.requests[0].request_id,),
        "holds no KV or has not run": lambda view: (view.requests[1].request_id,),
        "twice": lambda view: (view.requests[2].request_id,) * 2,
    }


@pytest.mark.parametrize("says", wrong_plans())
def test_what_cannot_be_swapped_out_is_refused(says: str) -> None:
    class Wrong:
        needs = Cap.NONE

        def plan(self, view: View) -> Plan:
            if len(view.requests) < 3:
                return Plan(rows=tuple(next_row(r, view) for r in view.requests))
            out = wrong_plans()[says](view)
            return Plan(rows=(next_row(view.requests[0], view),), swap_out=out)

    world = World(Wrong(), short_of_kv(100))
    first, third = world.submit(BE, 20, 9), world.submit(BE, 20, 9)
    world.step()
    world.scheduler.requests[third], order = world.scheduler.requests[third], [first, third]
    world.submit(BE, 20, 9)
    requests = world.scheduler.requests
    world.loop.take()
    new = next(i for i in requests if i not in order)
    world.scheduler.requests = {i: requests[i] for i in (first, new, third)}
    world.step()
    assert says in world.loop.policy_errors[0]


def test_more_than_there_is_room_for_is_refused() -> None:
    class Greedy:
        needs = Cap.NONE

        def plan(self, view: View) -> Plan:
            ran = tuple(r.request_id for r in view.requests if r.last_progress_ns > r.admitted_ns)
            if ran:
                return Plan(swap_out=ran)
            return Plan(rows=tuple(next_row(r, view) for r in view.requests))

    world = World(Greedy(), short_of_kv(100, num_swap_blocks=3))
    world.submit(BE, 40, 9)
    world.submit(BE, 40, 9)
    world.step()
    world.step()
    assert "takes 6 blocks; there is room for 3" in world.loop.policy_errors[0]


@pytest.mark.parametrize(
    "policy",
    [
        Rota(min_stay_ms=0, tpot_share=0, ttft_share=0.5),
        Rota(min_stay_ms=0, ttft_ms=70),
        Mlfq(min_stay_ms=0, quantum_ms=2),
    ],
)
def test_equals_take_turns_where_kv_is_short(policy: Any) -> None:
    """Four requests, KV for two: without swap the last two would wait for the first to end."""
    first_tokens = {}
    for room in (0, 10_000):
        limits = short_of_kv(24, room) if room else replace(LIMITS, num_blocks=24)
        world = World(type(policy)(**vars_of(policy)), limits)
        ids = [world.submit(BE, 150, 30, at_ns=i * NS_PER_MS) for i in range(4)]
        world.run()
        finished_well(world)
        times = {}
        for event in events(world, trace.Token):
            times.setdefault(event.request_id, event.at_ns)
        first_tokens[room] = max(times[i] for i in ids)
        if room:
            assert events(world, trace.SwappedOut)
            assert not events(world, trace.Evicted)
            assert sum(m.evict_recomputed_tokens for m in metrics_of(world)) == 0
    assert first_tokens[10_000] < first_tokens[0]


def vars_of(policy: Any) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in type(policy).__dataclass_fields__}


def test_no_request_leaves_before_its_time() -> None:
    world = World(Rota(min_stay_ms=10**6, tpot_share=0), short_of_kv(24))
    for i in range(4):
        world.submit(BE, 150, 30, at_ns=i * NS_PER_MS)
    world.run()
    finished_well(world)
    assert not events(world, trace.SwappedOut)


# -- settings


@pytest.mark.parametrize("value", [-1, 1.5, "many", True, 1 << 40])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"swap_kv_tokens=.* must be an integer in \[0, "):
        EngineConfig(swap_kv_tokens=value)


def test_the_loop_on_a_device_has_none() -> None:
    with pytest.raises(ConfigError, match="swap_kv_tokens=64 needs loop='host'"):
        EngineConfig(swap_kv_tokens=64, loop="conditional")


def test_a_decoding_request_comes_back_at_full_depth() -> None:
    """A policy takes it for a prefill of one token, and may plan a few layers of it (I4)."""

    class Shallow:
        needs = Cap.KV_SWAP | Cap.LAYER_RANGE

        def plan(self, view: View) -> Plan:
            (r,) = view.requests
            if r.num_output_tokens == 3 and r.last_progress_ns > r.admitted_ns and r.is_decoding:
                return Plan(swap_out=(r.request_id,))
            whole = r.is_decoding or r.frontier is not None
            return Plan(rows=(next_row(r, view, end_layer=None if whole else 1),))

    world = World(Shallow(), short_of_kv(100))
    world.submit(BE, 20, 6)
    for _ in range(20):
        if events(world, trace.SwappedIn):
            break
        world.step()
    (row,) = events(world, trace.Planned)[-1].rows
    assert (row.lo, row.hi, row.start_layer, row.end_layer) == (22, 23, 0, SHAPE.num_layers)


def test_who_has_not_run_since_it_was_given_kv_stays() -> None:
    world = World(Fuzz(0), short_of_kv(100))
    request_id = world.submit(BE, 20, 9)
    world.loop.take()
    request = world.scheduler.requests[request_id]
    request.block_table = world.scheduler.pool.take(request_id, 2)
    request.num_computed_tokens = 5
    request.admitted_ns = request.last_progress_ns = 7
    view = world.scheduler.view(9)
    plan = Plan(swap_out=(request_id,))
    rule = broken_rule(plan, world.scheduler.requests, {}, SHAPE.num_layers, view)
    assert rule is not None
    assert "has not run since it was given some" in rule
    request.last_progress_ns = 8
    assert broken_rule(plan, world.scheduler.requests, {}, SHAPE.num_layers, view) is None


# -- rotation that cannot help


def burst(policy: Any, ttft_ms: float) -> tuple[World, list[float]]:
    """Eight requests at once, and KV for two of them; their times to the first token, in ms."""
    costs = SimCosts(expert_ns=NS_PER_MS, head_ns=NS_PER_MS)
    world = World(policy, short_of_kv(16), costs=costs)
    for _ in range(8):
        world.submit(BE, 90, 30, slo=Slo(ttft_ms=ttft_ms, tpot_ms=10_000.0))
    world.run()
    finished_well(world)
    return world, [m.ttft_ms or 0.0 for m in metrics_of(world)]


def test_rota_does_not_rotate_for_a_request_that_misses_its_target_anyway() -> None:
    """Then it is `fcfs`, token for token."""
    plain, first = burst(load_policy("fcfs"), 1.0)
    world, again = burst(Rota(), 1.0)
    assert not events(world, trace.SwappedOut)
    assert again == first
    assert [m.e2e_ms for m in metrics_of(world)] == [m.e2e_ms for m in metrics_of(plain)]


def test_rota_rotates_for_as_many_as_can_be_in_time() -> None:
    _, first = burst(load_policy("fcfs"), 1.0)
    pairs = sorted(first)[::2]
    target_ms = pairs[1] + 4 * pairs[0]
    world, again = burst(Rota(), target_ms)
    assert sum(ms <= target_ms for ms in first) == 4
    assert sum(ms <= target_ms for ms in again) == 6
    assert events(world, trace.SwappedOut)


def test_rota_counts_the_prompts_that_go_before() -> None:
    """The last one would be in time alone, and is not behind the three others that lag."""
    _, first = burst(load_policy("fcfs"), 1.0)
    pairs = sorted(first)[::2]
    _, again = burst(Rota(), pairs[1] + 7 * pairs[0])
    assert [a < f for a, f in zip(again, first, strict=True)] == [False] * 4 + [True] * 3 + [False]
