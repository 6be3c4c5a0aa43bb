"""Every request gets exactly its own tokens: against `generate`, alone, and against a replay.

`generate` runs in a process that does not import qllm, once for all families.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DTYPES, FAMILIES, VOCAB, make_model
from replay_schedule import replay

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Handle, Result
from qllm.plan import CutRule, Plan
from qllm.policy import NO_STOP, View, next_row
from qllm.record import trace
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, Program
from qllm.types import Cap, FinishReason, Grain

LENGTHS = (40, 7, 23)
NEW = 12
CUTS = CutRule(
    max_cost=16.0,
    attn_cost_per_kv=0.01,
    min_block=4,
    max_block=8,
    glue_block=8,
    dense_block=8,
    expert_block=4,
)
REFERENCE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from families import DTYPES, FAMILIES, make_model
torch.set_num_threads(1)
prompts, new = json.loads(sys.argv[2])
out = {}
for family in FAMILIES:
    for name, dtype in DTYPES.items():
        model = make_model(family, dtype)
        rows = []
        for ids in prompts:
            found = model.generate(
                torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )
            tokens = found.sequences[0, len(ids):].tolist()
            logits = torch.cat(found.logits).float()
            logprobs = torch.log_softmax(logits, -1)
            rows.append([tokens, [logprobs[i, t].item() for i, t in enumerate(tokens)]])
        out[f"{family}/{name}"] = rows
assert "qllm" not in sys.modules
print(json.dumps(out))
"""


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


PROMPTS = [prompt_of(n, 0) for n in LENGTHS]


@pytest.fixture(scope="session")
def reference() -> dict[str, list[tuple[list[int], list[float]]]]:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFERENCE, here, json.dumps([PROMPTS, NEW])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def engine_of(family: str, dtype: str, **settings: Any) -> QLLMEngine:
    defaults = {
        "conformance": False,
        "threads": 1,
        "max_kv_tokens": 2048,
        "kernels": "reference",  # the bits of `generate`; the storms try both
    }
    return QLLMEngine.from_model(make_model(family, DTYPES[dtype]), **{**defaults, **settings})


def chosen(result: Result) -> list[float]:
    assert result.logprobs is not None
    return [x.chosen for x in result.logprobs]


GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(
    family: str, dtype: str, reference: dict[str, Any]
) -> None:
    expected = reference[f"{family}/{dtype}"]
    with engine_of(family, dtype) as engine:
        alone = [engine.submit(p, "LS", NEW, sampling=GREEDY).result(120) for p in PROMPTS]
        together = [engine.submit(p, "BE", NEW, sampling=GREEDY) for p in PROMPTS]
        mixed = [handle.result(120) for handle in together]
    distinct = [len(set(tokens)) for tokens, _ in expected]
    show(f"{family} {dtype}: distinct tokens per stream {distinct}")
    assert min(distinct) > 1, "streams of one token prove nothing"
    for result, (tokens, logprobs) in zip(alone, expected, strict=True):
        assert list(result.token_ids) == tokens
        assert chosen(result) == logprobs  # bit for bit
        assert chosen(result)[1:] != logprobs[:-1], "the law does not notice a shift by one"
        assert list(result.token_ids)[1:] != tokens[:-1]
    if dtype == "fp32":  # in bf16 the order mode leaves near ties to the batch
        for result, (tokens, _) in zip(mixed, expected, strict=True):
            assert list(result.token_ids) == tokens


# -- level L2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_the_row_rule_holds_for_thousands_of_rows(family: str, dtype: str) -> None:
    """A wrong rule shows in one row of several hundred: few rows prove nothing."""
    runner = cpu_runner(make_model(family, DTYPES[dtype]), batch_invariant=True)
    rule, generator = runner.backend.compute.rule, torch.Generator().manual_seed(1)
    seen, wrong = set(), {}
    with torch.inference_mode():
        for name, module in runner.model.named_modules():
            if not isinstance(module, torch.nn.Linear) or module.weight.shape in seen:
                continue
            weight, bias = module.weight, module.bias
            seen.add(weight.shape)
            x = torch.randn((2000, weight.shape[1]), generator=generator).to(weight.dtype)
            alone = torch.cat([rule.linear(row, weight, bias) for row in x.split(1)])
            for rows in (2, 3, 5, 16, 40):
                together = torch.cat([rule.linear(part, weight, bias) for part in x.split(rows)])
                differ = int((together != alone).any(1).sum())
                if differ:
                    wrong[name, rows] = differ
    assert not wrong, f"{rule}: rows of 2000 that differ from the row alone"


# -- storms


@dataclass
class Storm:
    """Submits, cancels and checks from inside the engine's thread, at random boundaries."""

    engine: QLLMEngine
    seed: int
    num_be: int = 5
    num_ls: int = 6
    num_cancels: int = 3
    every: int = 60
    """A disturbance about every that many segments."""
    vocab: int = VOCAB
    handles: list[tuple[Handle, str]] = field(default_factory=list)
    specs: dict[int, dict[str, Any]] = field(default_factory=dict)

    def submit(self, priority: str) -> None:
        rng = self.rng
        n = rng.choice((3, 9, 17, 40, 70)) if priority == "BE" else rng.choice((2, 5, 12))
        spec = {
            "prompt": [i % self.vocab for i in prompt_of(n, rng.randrange(100))],
            "max_tokens": rng.randrange(4, 18),
            "sampling": SamplingParams(
                temperature=rng.choice((0.0, 0.8, 1.5)),
                seed=rng.randrange(1000),
                logprobs=rng.randrange(3),
                repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            ),
        }
        handle = self.engine.submit(priority=priority, **spec)
        self.handles.append((handle, priority))
        self.specs[handle.number] = spec

    def run(self) -> list[Result]:
        self.rng = random.Random(self.seed)
        engine, count, due = self.engine, 0, self.rng.randrange(1, self.every)

        def disturb(*_: object) -> None:
            nonlocal count, due
            count += 1
            if count < due:
                return
            due = count + self.rng.randrange(1, 2 * self.every)
            if self.num_ls and self.rng.random() < 0.7:
                self.num_ls -= 1
                self.submit("LS")
            elif self.num_cancels:
                self.num_cancels -= 1
                live = [h for h, _ in self.handles if h.finish_reason is None]
                if live:
                    self.rng.choice(live).cancel()

        engine.call(lambda: [self.submit("BE") for _ in range(self.num_be)])
        engine._client.runner.on_segment = disturb
        results = [h.result(120) for h, _ in self.handles]
        while len(results) < len(self.handles):
            results = [h.result(120) for h, _ in self.handles]
        engine._client.runner.on_segment = None
        engine.call(engine._client.loop.scheduler.check)
        assert engine._client.loop.scheduler.pool.num_free == engine.config.num_blocks
        return results


def show(text: object) -> None:
    """For `pytest -rP`."""
    sys.stdout.write(f"{text}\n")


class Chaos:
    """Plans any legal step: random rows, chunks, layer ranges, slices, merges and drops."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def plan(self, view: View) -> Plan:
        rng, rows = self.rng, []
        room, tokens = view.num_free_blocks, view.max_step_tokens
        units = [[r] for r in view.requests if r.frame_id is None]
        units += [[view.by_id[row.request_id] for row in f.rows] for f in view.frames]
        units = units or [[]]
        rng.shuffle(units)
        for unit in units[: rng.randrange(1, len(units) + 1)]:
            new = []
            for r in unit:
                end = view.shape.num_layers
                row = next_row(r, view, rng.choice((5, 16, 64)))
                if not r.is_decoding and row.start_layer + 1 < end and rng.random() < 0.5:
                    row = row._replace(end_layer=rng.randrange(row.start_layer + 1, end + 1))
                new.append(row)
            need = sum(view.blocks_needed(row) for row in new)
            owed = sum(row.num_tokens for row in new)
            if need <= room and owed <= tokens and len(rows) + len(new) <= view.max_num_seqs:
                rows += new
                room, tokens = room - need, tokens - owed
        held = [r.request_id for r in view.requests if r.is_admitted]
        free = [i for i in held if all(row.request_id != i for row in rows)]
        drop = (rng.choice(free),) if free and (not rows or rng.random() < 0.03) else ()
        stop = rng.choice((NO_STOP, 5))
        slice_ns = rng.choice((None, 300_000, 2_000_000))
        if not rows:
            drop = drop or ((rng.choice(held),) if held else ())
        if not rows and not drop:
            return Plan(wait_until_ns=view.now_ns)
        return Plan(
            rows=tuple(rows), grain=Grain.EXPERT, stop_below=stop, slice_ns=slice_ns, drop=drop
        )


def cuts_of(runner: TorchRunner) -> CutRule:
    """The finest cuts: of layers that are called as their model calls them, blocks of queries."""
    around, never = runner.parts.around, 1 << 30
    if around is None:
        return CUTS
    cuts = CUTS._replace(glue_block=never, dense_block=never)
    if around.goes_on:
        return cuts
    return cuts._replace(max_cost=float("inf"), min_block=never, max_block=never)


def fine(engine: QLLMEngine) -> None:
    """One expert unit per range, small row cuts: as many boundaries as there can be."""
    cuts = cuts_of(engine._client.runner)
    engine._client.runner.backend.cuts = engine._client.loop.scheduler.cuts = cuts
    object.__setattr__(engine._client.runner.backend.costs, "range_ns", 0.5)


def same(result: Result, solo: Result) -> bool:
    """Bit-equal; a cancelled stream is a prefix."""
    n = len(result.token_ids)
    if result.finish_reason is FinishReason.CANCELLED:
        pair = (solo.token_ids[:n], (solo.logprobs or ())[:n] or None)
        return (result.token_ids, result.logprobs) == pair
    return (result.token_ids, result.logprobs, result.finish_reason) == (
        solo.token_ids,
        solo.logprobs,
        solo.finish_reason,
    )


def assert_replayed(
    storm: Storm, results: list[Result], events: list[trace.Event], runner: TorchRunner
) -> None:
    """A runner that does nothing but what the events say gives the results, bit for bit."""
    runner.backend.cuts = cuts_of(runner)
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    torch.set_num_threads(1)
    found = replay(events, runner)
    show(found._replace(sampled={}))
    for (handle, _), result in zip(storm.handles, results, strict=True):
        sampled = found.sampled[handle.number][: len(result.token_ids)]
        assert tuple(s.token_id for s in sampled) == result.token_ids
        assert (tuple(s.logprobs for s in sampled) or None) == result.logprobs
    assert found.num_stops > 0


STORMS = [
    ("mixtral", "bf16", "qllm2", 1),
    ("mixtral", "fp32", "qllm2", 2),
    ("gpt_oss", "bf16", "qllm2", 3),
    ("deepseek_v3", "bf16", "qllm2", 4),
    ("qwen2_moe", "bf16", "qllm", 5),
    ("granitemoe", "fp32", "ls-first", 6),
    ("olmoe", "bf16", "qllm", 7),
    ("mixtral", "bf16", "chaos", 8),
    ("deepseek_v3", "fp32", "chaos", 9),
    ("gpt_oss", "bf16", "chaos", 10),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "dtype", "policy", "seed"), STORMS)
def test_a_storm_leaves_every_stream_equal_to_its_solo_run(
    family: str, dtype: str, policy: str, seed: int
) -> None:
    settings = {
        "exactness": "batch-invariant",
        "max_kv_tokens": 160,
        "max_step_tokens": 96,
        "kernels": ("reference", "fast")[seed % 2],
    }
    made = Chaos(seed) if policy == "chaos" else policy
    with engine_of(family, dtype, policy=made, record=True, **settings) as engine:
        fine(engine)
        storm = Storm(engine, seed)
        results = storm.run()
        solo = {
            h.number: engine.submit(priority="BE", **storm.specs[h.number]).result(120)
            for h, _ in storm.handles
        }
        events = [type(e).__name__ for e in engine.trace.events]
    numbers = [h.number for h, _ in storm.handles]
    wrong = [n for n, r in zip(numbers, results, strict=True) if not same(r, solo[n])]
    show(
        f"{family} {dtype} {policy}: {len(results)} streams, "
        f"{sum(r.metrics.preemptions for r in results)} preemptions, "
        f"{sum(r.metrics.evictions for r in results)} evictions, "
        f"{events.count('Split')} splits, {events.count('Killed')} kills, "
        f"distinct {[len(set(r.token_ids)) for r in results]}"
    )
    assert not wrong
    assert len(results) > 8
    assert sum(r.metrics.preempt_recomputed_tokens for r in results) == 0


@pytest.mark.parametrize(
    ("family", "dtype", "policy", "seed"),
    [
        ("qwen3_moe", "bf16", "qllm2", 11),
        ("gpt_oss", "bf16", "qllm", 12),
        ("phimoe", "fp32", "qllm2", 13),
        ("deepseek_v3", "bf16", "qllm2", 14),
        ("mixtral", "bf16", "chaos", 15),
        ("granitemoe", "bf16", "chaos", 16),
    ],
)
def test_a_storm_in_order_mode_equals_the_replay_of_its_schedule(
    family: str, dtype: str, policy: str, seed: int
) -> None:
    kernels = ("reference", "fast")[seed % 2]
    settings: dict[str, Any] = {"max_kv_tokens": 160, "max_step_tokens": 96, "kernels": kernels}
    settings["prefix_cache"] = False  # the replay computes every token
    made = Chaos(seed) if policy == "chaos" else policy
    with engine_of(family, dtype, policy=made, record=True, **settings) as engine:
        fine(engine)
        storm = Storm(engine, seed)
        results = storm.run()
        events = list(engine.trace.events)
    runner = cpu_runner(make_model(family, DTYPES[dtype]), kernels=kernels)
    assert_replayed(storm, results, events, runner)


class Cohort:
    """The second request leaves the sweep above layer 0; whoever is parked goes on first."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

    def plan(self, view: View) -> Plan:
        if view.frames:
            return Plan(rows=view.frames[0].rows, grain=Grain.EXPERT)
        rows = [next_row(r, view) for r in view.requests]
        if len(rows) == 2 and rows[1].start_layer == 0 and not view.requests[1].is_decoding:
            rows[1] = rows[1]._replace(end_layer=1)
        return Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=5)


def test_who_left_the_sweep_loses_nothing_when_the_others_die_inside_a_layer() -> None:
    """What was done of the layer belonged to the dead; the frame is let go at its start."""
    handles: list[Handle] = []
    with engine_of("mixtral", "bf16", policy=Cohort(), record=True) as engine:
        fine(engine)

        def disturb(program: Program, index: Index, *_: int) -> None:
            both = len(handles) == 2 and len(program.rows) == 2
            if both and program.layer_at(index) == 1 and index.pos > 0:
                handles[0].cancel()
                handles.append(engine.submit(PROMPTS[2], "LS", 3, sampling=GREEDY))

        engine._client.runner.on_segment = disturb
        engine.call(
            lambda: handles.extend(
                engine.submit(ids, "BE", 4, sampling=GREEDY) for ids in PROMPTS[:2]
            )
        )
        results = [h.result(60) for h in handles[:2]] + [handles[2].result(60)]
        events = list(engine.trace.events)
    stopped = next(e for e in events if isinstance(e, trace.Ran) and e.why != "done")
    split = next(e for e in events if isinstance(e, trace.Split))
    assert split.frame_id == stopped.frame_id
    assert split.index < stopped.end
    assert results[0].finish_reason is FinishReason.CANCELLED
    runner = cpu_runner(make_model("mixtral", DTYPES["bf16"]), kernels="reference")
    runner.backend.cuts = cuts_of(runner)
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    torch.set_num_threads(1)
    found = replay(events, runner)
    for handle, result in zip(handles[1:], results[1:], strict=True):
        sampled = found.sampled[handle.number]
        assert tuple(s.token_id for s in sampled) == result.token_ids
        assert (tuple(s.logprobs for s in sampled) or None) == result.logprobs
        assert len(result.token_ids) > 2


def _disturbances(make: Callable[[], QLLMEngine], seed: int) -> set[str]:
    with make() as engine:
        fine(engine)
        Storm(engine, seed, num_be=6, num_ls=10, num_cancels=4, every=25).run()
        return {type(e).__name__ for e in engine.trace.events}


def test_storms_do_what_they_are_for() -> None:
    """Arrivals follow the clock, so one storm may miss one kind; several must not."""
    seen: set[str] = set()
    for seed in range(21, 29):
        seen |= _disturbances(
            lambda: engine_of(
                "mixtral", "fp32", record=True, max_kv_tokens=128, max_step_tokens=96
            ),
            seed,
        )
        if {"Parked", "Resumed", "Evicted", "Killed"} <= seen:
            break
    assert {"Parked", "Resumed", "Evicted", "Killed"} <= seen
