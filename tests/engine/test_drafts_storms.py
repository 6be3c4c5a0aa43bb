"""Drafts under storms: rows that verify drafts are parked, split, evicted, swapped, cancelled.

Every stream is that of its solo run without drafts, and a replay of the trace gives the same bits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.drafters.exit import Exit
from qllm.frontend.handle import Result
from qllm.plan import Plan
from qllm.policy import NO_STOP, View, next_row
from qllm.record import trace
from qllm.runner.cpu import cpu_runner
from qllm.types import Cap, Grain
from tests.support.draft_storms import DraftStorm, some_specs
from tests.support.drafters import counts, maker, model_of, next_of, poison_rejected
from tests.support.families import VOCAB
from tests.support.hybrids import NATIVE
from tests.support.inside import loop_of, runner_of
from tests.support.storms import Chaos, assert_replayed, fine, prompt_of, same, show


@pytest.fixture(autouse=True)
def _rejected_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_rejected(monkeypatch)


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
DRAFTERS = ("oracle", "wrong", "half", "random")
EXITS = ("exit:1", "exit:2")
CELLS = [(family, drafter) for family in FAMILIES for drafter in DRAFTERS]
CELLS += [(family, name) for family in FAMILIES if family not in NATIVE for name in EXITS]
ALONE = [(family, drafter) for family, drafter in CELLS if family in ("mixtral", "qwen3_next")]
SPECS = some_specs(16)


def engine_of(family: str, **settings: Any) -> QLLMEngine:
    how = {"threads": 1, "conformance": False, "max_kv_tokens": 2048, "record": True, **settings}
    return QLLMEngine.from_model(model_of(family), **how)


def state_tokens_of(family: str) -> int:
    """Tokens that the states of a request count as in a family's engine."""
    return 72 if family in NATIVE else 0


def solo(engine: QLLMEngine) -> list[Result]:
    """The answer of each spec, alone and without drafts."""
    return [engine.submit(priority="BE", **spec).result(300) for spec in SPECS]


def start(engine: QLLMEngine, drafter: str, expected: Sequence[Result], most: int) -> None:
    pairs = zip(SPECS, expected, strict=True)
    right = next_of({tuple(spec["prompt"]): result.token_ids for spec, result in pairs})
    make = maker(drafter, right, VOCAB)
    engine.call(lambda: loop_of(engine).draft_with(make, most, warn=print, weighs=False))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("swap", [0, 4096])
@pytest.mark.parametrize("policy", ["chaos", "qllm2"])
@pytest.mark.parametrize(("family", "drafter"), CELLS)
def test_a_storm_leaves_every_stream_equal_to_its_solo_run(
    family: str, drafter: str, policy: str, swap: int
) -> None:
    seed = 7 * FAMILIES.index(family) + (*DRAFTERS, *EXITS).index(drafter) + 31 * bool(swap)
    with engine_of(family) as engine:
        expected = solo(engine)
    made = Chaos(seed) if policy == "chaos" else policy
    room = 176 + 2 * (states := state_tokens_of(family))
    settings = {"max_kv_tokens": room, "max_step_tokens": 96, "swap_kv_tokens": swap}
    with engine_of(family, policy=made, **settings) as engine:
        assert runner_of(engine).shape.state_tokens == states
        fine(engine)
        start(engine, drafter, expected, 1 + seed % 8)
        storm = DraftStorm(engine, seed, drawn=SPECS)
        results = storm.run()
        events = list(engine.trace.events)
    of_spec = {id(spec): result for spec, result in zip(SPECS, expected, strict=True)}
    numbers = [h.number for h, _ in storm.handles]
    pairs = zip(numbers, results, strict=True)
    assert [n for n, r in pairs if not same(r, of_spec[id(storm.specs[n])])] == []
    names = [type(event).__name__ for event in events]
    accepted, rejected = counts(results)
    show(f"{accepted} accepted, {rejected} rejected, {names.count('Parked')} parked")
    assert (accepted > 0) or drafter in ("wrong", "random")
    assert (rejected > 0) or drafter == "oracle"
    drafted = {e.frame_id for e in events if isinstance(e, trace.Planned) if verifies(e, events)}
    parked = [e for e in events if isinstance(e, trace.Parked) and e.frame_id in drafted]
    assert parked or policy != "chaos", "no row with drafts was ever parked"
    assert sum(r.metrics.preempt_recomputed_tokens for r in results) == 0
    fresh = cpu_runner(model_of(family))
    assert_replayed(storm, results, events, fresh)


def verifies(event: trace.Planned, events: Sequence[trace.Event]) -> bool:
    """True if a row of a program has the tokens of a draft."""
    drafted = {e.request_id for e in events if isinstance(e, trace.Drafted)}
    return any(1 < row.num_tokens < 10 and row.request_id in drafted for row in event.rows)


class Everywhere:
    """One request at a time, for one boundary at a time."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

    def plan(self, view: View) -> Plan:
        frame = next(iter(view.frames), None)
        rows = frame.rows if frame else (next_row(view.requests[0], view),)
        return Plan(rows=rows, grain=Grain.EXPERT, stop_below=NO_STOP, slice_ns=1)


@pytest.mark.parametrize(("family", "drafter"), ALONE)
def test_a_stop_at_every_boundary_changes_nothing(family: str, drafter: str) -> None:
    with engine_of(family) as engine:
        expected = solo(engine)
    with engine_of(family, policy=Everywhere()) as engine:
        fine(engine)
        start(engine, drafter, expected, 8)
        found = [engine.submit(priority="BE", **spec).result(300) for spec in SPECS[:6]]
        stops = [e for e in engine.trace.events if isinstance(e, trace.Parked)]
    assert all(same(result, alone) for result, alone in zip(found, expected, strict=False))
    assert len(stops) > 1000
    assert sum(counts(found)) > 20


class Holds(Everywhere):
    """Stops everything in the middle of a row with drafts."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.is_holding = False

    def plan(self, view: View) -> Plan:
        rows = [row for frame in view.frames for row in frame.rows if 1 < row.num_tokens < 10]
        self.after -= bool(rows)
        if self.is_holding or (rows and self.after < 0):
            self.is_holding = True
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return super().plan(view)


@pytest.mark.parametrize("after", [0, 30, 77])
@pytest.mark.parametrize("family", ["mixtral", *NATIVE])
def test_a_checkpoint_leaves_out_drafts(family: str, after: int, tmp_path: Path) -> None:
    """A row with drafts is parked while its request is written; another engine goes on."""
    spec = {**SPECS[0], "prompt": prompt_of(17, 1), "max_tokens": 20}
    with engine_of(family) as engine:
        expected = engine.submit(priority="BE", **spec).result(300)
    right = next_of({tuple(spec["prompt"]): expected.token_ids})
    holds = Holds(after)
    with engine_of(family, policy=holds) as engine:
        fine(engine)
        make = maker("half", right, VOCAB)
        engine.call(lambda: loop_of(engine).draft_with(make, 4, warn=print, weighs=False))
        handle = engine.submit(priority="BE", **spec)
        while not holds.is_holding:
            engine.call(lambda: None)
        assert engine.checkpoint(tmp_path / "saved") == 1
        before = handle.token_ids
    with engine_of(family) as engine:
        fine(engine)
        engine.call(lambda: loop_of(engine).draft_with(make, 4, warn=print, weighs=False))
        (handle,) = engine.restore(tmp_path / "saved")
        found = handle.result(300)
    assert 0 < len(before) < 20
    assert found.token_ids == expected.token_ids
    assert counts([found])[0] > 0


class HoldsAtExit(Holds):
    """Stops everything while a row drafts, or between two rows of which one drafted."""

    def plan(self, view: View) -> Plan:
        self.after -= any(r.exit_layer for r in view.requests)
        if self.is_holding or self.after < 0:
            self.is_holding = True
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return Everywhere.plan(self, view)


@pytest.mark.parametrize("after", range(24))
def test_a_checkpoint_leaves_out_draft_rows(after: int, tmp_path: Path) -> None:
    spec = {**SPECS[0], "prompt": prompt_of(17, 1), "max_tokens": 8}
    with engine_of("mixtral") as engine:
        expected = engine.submit(priority="BE", **spec).result(300)
    holds = HoldsAtExit(after)
    with engine_of("mixtral", policy=holds) as engine:
        fine(engine)
        engine.call(lambda: loop_of(engine).draft_with(Exit(1), 4, warn=print, weighs=False))
        engine.submit(priority="BE", **spec)
        while not holds.is_holding:
            engine.call(lambda: None)
        assert engine.checkpoint(tmp_path / "saved") == 1
    with engine_of("mixtral") as engine:
        fine(engine)
        engine.call(lambda: loop_of(engine).draft_with(Exit(1), 4, warn=print, weighs=False))
        (handle,) = engine.restore(tmp_path / "saved")
        found = handle.result(300)
    assert found.token_ids == expected.token_ids
    assert sum(counts([found])) > 0
