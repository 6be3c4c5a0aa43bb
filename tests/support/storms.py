"""Random requests that arrive, leave and are preempted: the tokens of each are compared."""

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Handle, Result
from qllm.plan import CutRule, Plan
from qllm.policy import NO_STOP, View, next_row
from qllm.record import trace
from qllm.runner.runner import TorchRunner
from qllm.types import Cap, FinishReason, Grain
from tests.support.families import DTYPES, VOCAB, make_model
from tests.support.inside import loop_of, runner_of
from tests.support.replay_schedule import replay

CUTS = CutRule(
    max_cost=16.0,
    attn_cost_per_kv=0.01,
    min_block=4,
    max_block=8,
    glue_block=8,
    dense_block=8,
    expert_block=4,
)


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(family: str, dtype: str, **settings: Any) -> QLLMEngine:
    defaults = {
        "conformance": False,
        "threads": 1,
        "max_kv_tokens": 2048,
        "kernels": "reference",  # the bits of `generate`; the storms try both
    }
    return QLLMEngine.from_model(make_model(family, DTYPES[dtype]), **{**defaults, **settings})


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

    def disturb(self) -> None:
        """Disturb the engine in a further way. Kinds of storms override it."""

    def run(self) -> list[Result]:
        self.rng = random.Random(self.seed)
        engine, count, due = self.engine, 0, self.rng.randrange(1, self.every)

        def look(*_: object) -> None:
            nonlocal count, due
            count += 1
            if count < due:
                return
            due = count + self.rng.randrange(1, 2 * self.every)
            self.disturb()
            if self.num_ls and self.rng.random() < 0.7:
                self.num_ls -= 1
                self.submit("LS")
            elif self.num_cancels:
                self.num_cancels -= 1
                live = [h for h, _ in self.handles if h.finish_reason is None]
                if live:
                    self.rng.choice(live).cancel()

        engine.call(lambda: [self.submit("BE") for _ in range(self.num_be)])
        runner_of(engine).on_segment = look
        results = [h.result(300) for h, _ in self.handles]
        while len(results) < len(self.handles):
            results = [h.result(300) for h, _ in self.handles]
        runner_of(engine).on_segment = None
        engine.call(loop_of(engine).scheduler.check)
        assert loop_of(engine).scheduler.pool.num_free == engine.config.num_blocks
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


def fine(engine: QLLMEngine, *, rows: bool = True) -> None:
    """One expert unit per range, small row cuts: as many boundaries as there can be.

    Args:
        engine: Engine.
        rows: False to leave the row cuts. torch's products of few rows have other bits on some
            processors, and `kernels="reference"` uses them.
    """
    if rows:
        cuts = cuts_of(runner_of(engine))
        runner_of(engine).backend.cuts = loop_of(engine).scheduler.cuts = cuts
    object.__setattr__(runner_of(engine).backend.costs, "range_ns", 0.5)


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
