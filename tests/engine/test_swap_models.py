"""Rows and KV of real models that move out and back: no bit changes, nothing is computed twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.plan import Plan, Row
from qllm.plugins import load_policy
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, Program
from qllm.sim.runner import SimCosts
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Cap, Grain, Priority, Sampled, Slo
from qllm_policies.mlfq import Mlfq
from qllm_policies.rota import Rota
from tests.support.families import FAMILIES, make_model
from tests.support.inside import runner_of
from tests.support.replay_schedule import Always, replay
from tests.support.scheduling import events, finished_well
from tests.support.storms import CUTS, DTYPES, Chaos, Storm, engine_of, fine, prompt_of, same
from tests.support.swap import short_of_kv
from tests.support.swap_models import finished, one_pass
from tests.support.waiting import wait_for

LS, BE = Priority.LS, Priority.BE
GREEDY = SamplingParams(temperature=0, ignore_eos=True)

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "dtype", "policy", "seed"), STORMS)
def test_a_storm_of_swaps_leaves_every_stream_equal_to_its_solo_run(
    family: str, dtype: str, policy: str, seed: int
) -> None:
    make = {
        "chaos": lambda: SwapChaos(seed),
        "rota": lambda: Rota(min_stay_ms=0, tpot_share=0, ttft_share=0.1),
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
                h.number: engine.submit(priority="BE", **storm.specs[h.number]).result(300)
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


PARTS = 3
"""Parts of a sweep over boundaries: a case takes each third of them."""


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_swapping_at_every_boundary_changes_no_token(family: str, part: int) -> None:
    """The victim is taken at every place of its life: in its prefill, parked, while it decodes."""
    ids, new = prompt_of(70, 1), 12
    with engine_of(
        family, "bf16", kernels="fast", max_kv_tokens=96, swap_kv_tokens=4096, record=True,
        policy="qllm2", max_step_tokens=32,
    ) as engine:  # fmt: skip
        fine(engine)
        alone = engine.submit(ids, "BE", new, sampling=GREEDY).result(300)
        outs = 0
        for at in range(1 + 4 * part, 60, 4 * PARTS):
            count, handles = 0, list[Any]()

            def disturb(*_: object, at: int = at, handles: list[Any] = handles) -> None:
                nonlocal count
                count += 1
                if count == at:
                    handles.append(engine.submit(prompt_of(40, 2), "LS", 2, sampling=GREEDY))

            runner_of(engine).on_segment = disturb
            found = engine.submit(ids, "BE", new, sampling=GREEDY).result(300)
            runner_of(engine).on_segment = None
            for handle in handles:
                handle.result(300)
            assert found.token_ids == alone.token_ids
            assert found.metrics.evict_recomputed_tokens == 0
        outs = sum(isinstance(e, trace.SwappedOut) for e in engine.trace.events)
    assert outs >= 1


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_leaves_its_frame_at_any_boundary_keeps_its_bits(family: str, part: int) -> None:
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
        for num_stops in range(1 + victim + 3 * part, 10_000, 3 * PARTS):
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
    assert inside > 6


# -- checkpoints


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
            engine.submit(ids, "BE", 30, sampling=GREEDY).result(300).token_ids for ids in prompts
        ]
    with QLLMEngine.from_model(model, policy=Holds(), **settings) as engine:
        for ids in prompts:
            engine.submit(ids, "BE", 30, sampling=GREEDY)
        wait_for(lambda: engine.stats()["swap"]["blocks_used"] == 8)
        assert engine.checkpoint(tmp_path / "parked") == 2
    with QLLMEngine.from_model(model, record=True, **settings) as engine:
        handles = engine.restore(tmp_path / "parked")
        found = [h.result(300).token_ids for h in handles]
        back = [e for e in engine.trace.events if isinstance(e, trace.SwappedIn)]
        assert [e.num_tokens for e in back[:2]] == [62, 62]
        assert engine.stats()["swap"]["blocks_used"] == 0
    assert found == expected


# -- the simulator's decisions, done by a real runner


class Both:
    """A simulated runner that decides when to stop, and a real one that does the same."""

    def __init__(self, sim: Any, real: TorchRunner) -> None:
        self.sim, self.real = sim, real
        self.sampled: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        """Do it in both; what they are asked for is the simulated one's."""
        found = getattr(self.sim, name)
        if name in ("add", "remove", "evict", "swap_out", "swap_in", "accept", "split", "kill",
                    "leave", "drop"):  # fmt: skip

            def both(*args: Any) -> Any:
                getattr(self.real, name)(*args)
                return found(*args)

            return both
        return found

    def run(self, program: Program, start: Index, stop: Any) -> Index:
        end: Index = self.sim.run(program, start, stop)
        at = start
        while at != end:
            at = self.real.run(program, at, Always())
            assert at <= end
        return end

    def finish(self, program: Program) -> list[Sampled]:
        for token in self.real.finish(program):
            self.sampled.setdefault(token.request_id, []).append(token.token_id)
        found: list[Sampled] = self.sim.finish(program)
        return found


@pytest.mark.parametrize("policy", ["qllm2", "rota", "priority-layered"])
def test_what_the_simulator_decides_a_real_runner_does_with_the_same_tokens(policy: str) -> None:
    real = cpu_runner(make_model("mixtral", DTYPES["bf16"]), kernels="fast")
    real.backend.cuts = CUTS
    limits = replace(short_of_kv(8), grain=Grain.LAYER)
    settings = {"max_be_stall_ms": 100} if policy != "rota" else {"min_stay_ms": 0}
    costs = SimCosts(expert_ns=3_000_000)
    world = World(load_policy(policy, settings), limits, shape=real.shape, costs=costs, cuts=CUTS)
    both = Both(world.runner, real)
    world.runner = world.loop.runner = world.loop.effects._runner = both  # type: ignore[assignment]
    sizes = [(BE, 60, 8), (BE, 50, 8), (LS, 40, 4), (LS, 30, 4), (BE, 40, 5), (LS, 50, 3)]
    for i, (priority, prompt, new) in enumerate(sizes):
        world.submit(priority, prompt, new, at_ns=15 * i * NS_PER_MS, slo=Slo(ttft_ms=30.0))
    world.run()
    finished_well(world)
    assert events(world, trace.SwappedOut)
    assert not events(world, trace.Evicted)
    for i, (_, prompt, new) in enumerate(sizes):
        vocab = real.shape.vocab_size
        real.add(0, [j % vocab for j in range(prompt)], SamplingParams(seed=0), prompt, 100)
        rows, alone = Row(0, 0, prompt, 0, real.shape.num_layers), list[int]()
        for _ in range(new):
            alone += [s.token_id for s in finished(real, one_pass(real, [rows], 10**6))]
            rows = rows._replace(lo=rows.hi, hi=rows.hi + 1)
        real.remove(0)
        assert both.sampled[i] == alone
