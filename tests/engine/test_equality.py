"""Every request gets exactly its own tokens: against `generate`, alone, and against a replay.

`generate` runs in a process that does not import qllm, once for all families.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Handle, Result
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.runner.cpu import cpu_runner
from qllm.scheduler.program import Index, Program
from qllm.types import Cap, FinishReason, Grain
from tests.support.families import DTYPES, FAMILIES, make_model
from tests.support.files import ROOT
from tests.support.inside import runner_of
from tests.support.replay_schedule import replay
from tests.support.storms import (
    Chaos,
    Storm,
    assert_replayed,
    cuts_of,
    engine_of,
    fine,
    prompt_of,
    same,
    show,
)

LENGTHS = (40, 7, 23)
NEW = 12
REFERENCE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.support.families import DTYPES, make_model
torch.set_num_threads(1)
prompts, new, cases = json.loads(sys.argv[2])
out = {}
for case in cases:
    family, name = case.split("/")
    model = make_model(family, DTYPES[name])
    rows = []
    for ids in prompts:
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True,
        )
        tokens = found.sequences[0, len(ids):].tolist()
        logits = torch.cat(found.logits).float()
        logprobs = torch.log_softmax(logits.double(), -1).float()
        rows.append([tokens, [logprobs[i, t].item() for i, t in enumerate(tokens)]])
    out[case] = rows
assert "qllm" not in sys.modules
print(json.dumps(out))
"""


PROMPTS = [prompt_of(n, 0) for n in LENGTHS]


def takes_reference(item: Any) -> bool:
    return item.path.samefile(__file__) and "reference" in item.fixturenames


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Ask `generate` for the answers of all cases that this run takes."""
    calls = [item.callspec.params for item in request.session.items if takes_reference(item)]
    cases = sorted({f"{call['family']}/{call['dtype']}" for call in calls})
    asked = json.dumps([PROMPTS, NEW, cases])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFERENCE, str(ROOT), asked],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def chosen(result: Result) -> list[float]:
    assert result.logprobs is not None
    return [x.chosen for x in result.logprobs]


GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(
    family: str, dtype: str, reference: dict[str, Any]
) -> None:
    expected = reference[f"{family}/{dtype}"]
    with engine_of(family, dtype) as engine:
        alone = [engine.submit(p, "LS", NEW, sampling=GREEDY).result(300) for p in PROMPTS]
        together = [engine.submit(p, "BE", NEW, sampling=GREEDY) for p in PROMPTS]
        mixed = [handle.result(300) for handle in together]
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


@pytest.mark.sampled
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
            h.number: engine.submit(priority="BE", **storm.specs[h.number]).result(300)
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


@pytest.mark.sampled(3)
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

        runner_of(engine).on_segment = disturb
        engine.call(
            lambda: handles.extend(
                engine.submit(ids, "BE", 4, sampling=GREEDY) for ids in PROMPTS[:2]
            )
        )
        results = [h.result(300) for h in handles[:2]] + [handles[2].result(300)]
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
