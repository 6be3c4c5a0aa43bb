"""KV that moves out of its blocks and back: nothing is computed again, and no token changes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make_model
from hypothesis import given
from hypothesis import strategies as st
from replay_schedule import Always, replay
from serving import until
from test_equality import CUTS, DTYPES, Chaos, Storm, engine_of, fine, prompt_of, same
from test_scheduler import BY_CLASS, Fuzz, events, finished_well, work_is_exact

from qllm import QLLMEngine, SamplingParams
from qllm.config import EngineConfig
from qllm.engine.costs import Costs
from qllm.errors import ConfigError, InvariantError
from qllm.plan import Plan, Row
from qllm.plugins import load_policy
from qllm.policy import NO_COSTS, Tier, View, next_row
from qllm.record import trace
from qllm.record.metrics import RequestMetrics
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.blocks import SwapSpace
from qllm.scheduler.compile import compile_program
from qllm.scheduler.making_way import make_way
from qllm.scheduler.program import START, Index, Program
from qllm.scheduler.rules import broken_rule
from qllm.sim.check import LIMITS, SHAPE, World, overload, watch
from qllm.types import CAPABILITIES, NS_PER_MS, Cap, FinishReason, Grain, Priority, Sampled
from qllm_policies.mlfq import Mlfq
from qllm_policies.rota import Rota

LS, BE = Priority.LS, Priority.BE
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def short_of_kv(num_blocks: int, num_swap_blocks: int = 10_000) -> Any:
    return replace(
        LIMITS,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        capabilities=CAPABILITIES | Cap.KV_SWAP,
    )


def metrics_of(world: World) -> list[RequestMetrics]:
    found = [world.metrics[i] for i in sorted(world.finished)]
    return [m for m in found if m is not None]


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


class SwapFuzz(Fuzz):
    """Like `Fuzz`, and moves KV of random requests out."""

    def ending(self, view: View, rows: list[Any]) -> Plan:
        plan = super().ending(view, rows)
        gone = {row.request_id for row in rows} | set(plan.drop)
        room, out = view.num_free_swap_blocks, []
        for q in view.requests:
            size = -(-q.num_written_tokens // view.block_size)
            ran = q.is_admitted and q.last_progress_ns > q.admitted_ns
            if ran and q.request_id not in gone and size <= room and self.r.random() < 0.6:
                room -= size
                out.append(q.request_id)
        return replace(plan, swap_out=tuple(out))


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
    costs = Costs()
    assert costs.table().move_token_ns == (0,)
    assert costs.moved(Tier.FILE, 10, 1000).move_token_ns == (0, 100)
    assert costs.moved(Tier.FILE, 10, 5000).move_token_ns == (0, 200)
    assert costs.moved(Tier.MEMORY, 10, 50).move_token_ns == (5, 200)
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


def test_nobody_makes_way_where_too_few_can() -> None:
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
    world.loop._take()
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


@pytest.mark.parametrize("policy", [Rota(min_stay_ms=0), Mlfq(min_stay_ms=0, quantum_ms=2)])
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


def test_nobody_leaves_before_its_time() -> None:
    world = World(Rota(min_stay_ms=10**6), short_of_kv(24))
    for i in range(4):
        world.submit(BE, 150, 30, at_ns=i * NS_PER_MS)
    world.run()
    finished_well(world)
    assert not events(world, trace.SwappedOut)


# -- tokens, on models


STORMS = [
    ("mixtral", "fp32", "qllm2", 1),
    ("gpt_oss", "bf16", "chaos", 2),
    ("deepseek_v3", "bf16", "qllm2", 3),
    ("qwen2_moe", "bf16", "rota", 4),
    ("granitemoe", "fp32", "chaos", 5),
    ("olmoe", "bf16", "mlfq", 6),
]


class SwapChaos(Chaos):
    """Like `Chaos`, and moves KV of random requests out."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        gone = {row.request_id for row in plan.rows} | set(plan.drop)
        able = [
            r.request_id
            for r in view.requests
            if r.is_admitted and r.last_progress_ns > r.admitted_ns and r.request_id not in gone
        ]
        if plan.wait_until_ns is None and able and self.rng.random() < 0.2:
            return replace(plan, swap_out=(self.rng.choice(able),))
        return plan


@pytest.mark.parametrize(("family", "dtype", "policy", "seed"), STORMS)
def test_a_storm_of_swaps_leaves_every_stream_equal_to_its_solo_run(
    family: str, dtype: str, policy: str, seed: int
) -> None:
    make = {
        "chaos": lambda: SwapChaos(seed),
        "rota": lambda: Rota(min_stay_ms=0),
        "mlfq": lambda: Mlfq(min_stay_ms=0, quantum_ms=1),
    }.get(policy, lambda: load_policy(policy))
    settings = {
        "exactness": "batch-invariant",
        "max_kv_tokens": 112,
        "swap_kv_tokens": 4096,
        "max_step_tokens": 96,
        "kernels": ("reference", "fast")[seed % 2],
    }
    swapped = 0
    for turn in range(8):  # arrivals follow the clock: one storm may take nobody's KV
        with engine_of(family, dtype, policy=make(), record=True, **settings) as engine:
            fine(engine)
            storm = Storm(engine, seed + 100 * turn, num_be=6, num_ls=10, every=25)
            results = storm.run()
            swapped += sum(isinstance(e, trace.SwappedIn) for e in engine.trace.events)
            solo = {
                h.number: engine.submit(priority="BE", **storm.specs[h.number]).result(120)
                for h, _ in storm.handles
            }
            assert engine.stats()["swap"]["blocks_used"] == 0
        pairs = zip((h.number for h, _ in storm.handles), results, strict=True)
        assert not [n for n, r in pairs if not same(r, solo[n])]
        if swapped:
            return
    raise AssertionError("no storm swapped anything")


def test_a_storm_of_swaps_in_order_mode_equals_the_replay_of_its_schedule() -> None:
    """Nothing is computed twice, so not even the bits of a float32 sum differ."""
    settings = {"max_kv_tokens": 160, "max_step_tokens": 96, "swap_kv_tokens": 4096}
    with engine_of("mixtral", "fp32", policy=SwapChaos(7), record=True, **settings) as engine:
        fine(engine)
        storm = Storm(engine, 7)
        results = storm.run()
        seen = list(engine.trace.events)
    runner = cpu_runner(make_model("mixtral", DTYPES["fp32"]), kernels="reference")
    runner.backend.cuts = CUTS
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    torch.set_num_threads(1)
    found = replay(seen, runner)
    assert any(isinstance(e, trace.SwappedOut) for e in seen)
    for (handle, _), result in zip(storm.handles, results, strict=True):
        sampled = found.sampled[handle.number][: len(result.token_ids)]
        assert tuple(s.token_id for s in sampled) == result.token_ids
        assert (tuple(s.logprobs for s in sampled) or None) == result.logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_swapping_at_every_boundary_changes_no_token(family: str) -> None:
    """The victim is taken at every place of its life: in its prefill, parked, while it decodes."""
    ids, new = prompt_of(70, 1), 12
    with engine_of(
        family, "bf16", kernels="fast", max_kv_tokens=96, swap_kv_tokens=4096, record=True,
        policy="qllm2", max_step_tokens=32,
    ) as engine:  # fmt: skip
        fine(engine)
        alone = engine.submit(ids, "BE", new, sampling=GREEDY).result(120)
        outs = 0
        for at in range(1, 60, 4):
            count, handles = 0, list[Any]()

            def disturb(*_: object, at: int = at, handles: list[Any] = handles) -> None:
                nonlocal count
                count += 1
                if count == at:
                    handles.append(engine.submit(prompt_of(40, 2), "LS", 2, sampling=GREEDY))

            engine._client.runner.on_segment = disturb
            found = engine.submit(ids, "BE", new, sampling=GREEDY).result(120)
            engine._client.runner.on_segment = None
            for handle in handles:
                handle.result(120)
            assert found.token_ids == alone.token_ids
            assert found.metrics.evict_recomputed_tokens == 0
        outs = sum(isinstance(e, trace.SwappedOut) for e in engine.trace.events)
    assert outs >= 5


def one_pass(runner: TorchRunner, rows: list[Row], frame_id: int) -> Program:
    """A program of these rows, accepted."""
    known = [len(runner.token_ids(row.request_id)) for row in rows]
    program = compile_program(
        Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=0),
        frame_id=frame_id,
        samples=[row.hi == n for row, n in zip(rows, known, strict=True)],
        shape=runner.shape,
        cuts=runner.cuts,
    )
    runner.accept(program)
    return program


def finished(runner: TorchRunner, program: Program, at: Index = START) -> list[Sampled]:
    while at != program.end:
        at = runner.run(program, at, Always())
    return runner.finish(program)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_leaves_its_frame_at_any_boundary_keeps_its_bits(family: str) -> None:
    """Two decodes and a prefill in one frame; each of them leaves it at every boundary in turn."""
    runner = cpu_runner(make_model(family, DTYPES["bf16"]), kernels="fast")
    runner.backend.cuts = CUTS
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    last, frames = runner.shape.num_layers, iter(range(10**6))
    sampling = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)

    def begin(number: int) -> tuple[list[int], Program]:
        ids = [3 * number + i for i in range(3)]
        for i, request_id in enumerate(ids):
            runner.add(request_id, prompt_of((9, 20, 25)[i], i), sampling, (9, 20, 25)[i], 40)
        first = [Row(ids[i], 0, n, 0, last) for i, n in ((0, 9), (1, 20))]
        finished(runner, one_pass(runner, first, next(frames)))
        rows = [Row(ids[0], 9, 10, 0, last), Row(ids[1], 20, 21, 0, last)]
        return ids, one_pass(runner, [*rows, Row(ids[2], 0, 25, 0, last)], next(frames))

    def bits(ids: list[int], found: list[Sampled]) -> list[Any]:
        by_id = {s.request_id: s for s in found}
        out = []
        for request_id in ids:
            kv = {name: t.clone() for name, t in runner.requests[request_id].kv.export()}
            out.append((by_id[request_id].token_id, by_id[request_id].logprobs, kv))
            runner.remove(request_id)
        return out

    ids, program = begin(0)
    expected = bits(ids, finished(runner, program))
    number, inside = 0, 0
    for victim in range(3):
        for num_stops in range(1 + victim, 10_000, 3):
            number += 1
            ids, program = begin(number)
            at = START
            for _ in range(num_stops):
                at = at if at == program.end else runner.run(program, at, Always())
            if at == program.end:
                bits(ids, runner.finish(program))
                break
            row, start = program.rows[victim], program.layer_start(at)
            inside += start != at
            runner.leave(program, ids[victim], start)
            runner.swap_out(ids[victim])
            found = finished(runner, program, at)
            assert ids[victim] not in [s.request_id for s in found]
            runner.swap_in(ids[victim])
            row = row._replace(start_layer=program.frontier_layer(victim, start))
            found += finished(runner, one_pass(runner, [row], next(frames)))
            for one, other in zip(bits(ids, found), expected, strict=True):
                assert one[:2] == other[:2]
                assert all(torch.equal(one[2][name], other[2][name]) for name in other[2])
    assert inside > 20


# -- settings


@pytest.mark.parametrize("value", [-1, 1.5, "many", True, 1 << 40])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"swap_kv_tokens=.* must be an integer in \[0, "):
        EngineConfig(swap_kv_tokens=value)


def test_the_loop_on_a_device_has_none() -> None:
    with pytest.raises(ConfigError, match="swap_kv_tokens=64 needs loop='host'"):
        EngineConfig(swap_kv_tokens=64, loop="conditional")


class Holds:
    """Swaps two requests out as soon as each has three tokens, and then waits."""

    needs = Cap.KV_SWAP

    def plan(self, view: View) -> Plan:
        if sum(r.num_swapped_tokens > 0 for r in view.requests) == 2:
            return Plan(wait_until_ns=view.now_ns + NS_PER_MS)
        fresh = [r for r in view.requests if not r.num_swapped_tokens]
        if fresh[0].num_output_tokens >= 3:
            return Plan(swap_out=(fresh[0].request_id,))
        return Plan(rows=(next_row(fresh[0], view),))


def test_a_checkpoint_with_swapped_requests_is_restored(tmp_path: Path) -> None:
    """Their KV together is more than the blocks of the engine: they stay swapped out."""
    model = make_model("mixtral", DTYPES["bf16"])
    settings: dict[str, Any] = {
        "conformance": False,
        "threads": 1,
        "max_kv_tokens": 96,
        "swap_kv_tokens": 4096,
        "kernels": "fast",
    }
    prompts = [prompt_of(60, i) for i in range(2)]
    with QLLMEngine.from_model(model, **settings) as engine:
        expected = [
            engine.submit(ids, "BE", 30, sampling=GREEDY).result(120).token_ids for ids in prompts
        ]
    with QLLMEngine.from_model(model, policy=Holds(), **settings) as engine:
        for ids in prompts:
            engine.submit(ids, "BE", 30, sampling=GREEDY)
        until(lambda: engine.stats()["swap"]["blocks_used"] == 8)
        assert engine.checkpoint(tmp_path / "parked") == 2
    with QLLMEngine.from_model(model, record=True, **settings) as engine:
        handles = engine.restore(tmp_path / "parked")
        found = [h.result(120).token_ids for h in handles]
        back = [e for e in engine.trace.events if isinstance(e, trace.SwappedIn)]
        assert [e.num_tokens for e in back] == [62, 62]
        assert engine.stats()["swap"]["blocks_used"] == 0
    assert found == expected


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
    world.loop._take()
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
