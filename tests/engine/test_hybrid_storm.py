"""Hybrids, decoding beside a prompt of 2,048 tokens: whatever stops them, tokens are those alone.

Nothing here follows a clock. A seeded policy says at each of its turns who runs and whether one
boundary or the whole pass; the pool has room for the long prompt and one more, so requests move out
and back; at a chosen turn, in the middle of the long prompt, nothing runs until a checkpoint is
written, and another engine goes on from there.
"""

import copy
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Handle
from qllm.models.discover import discover
from qllm.plan import NO_STOP, Plan, Row
from qllm.policy import RequestView, View, next_row
from qllm.record import trace
from qllm.runner.cpu import cpu_runner
from qllm.scheduler import decision
from qllm.types import Cap, Grain
from tests.long import families as all_families
from tests.support import tiny_configs
from tests.support.all_families import MOE
from tests.support.drafters import MakeDrafter, always_draft, maker, next_of, poison_rejected
from tests.support.hybrids import NATIVE, make_hybrid
from tests.support.inside import loop_of, runner_of
from tests.support.storms import CUTS, show

HYBRIDS = [
    "bailing_hybrid",
    "granitemoehybrid",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "zaya",
]
"""Every family of `MOE` with a layer whose state does not grow with the tokens."""
KEYS_ALONE = {"axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4"}
"""Called as their models call them: their states are keys, compressed keys and keys of indexers."""
MIXES = ["gemma4_text", "llama4_text", "mimo_v2_flash"]
"""Windows or chunks beside attention to all positions: no states."""
LONG, CHUNKS = 2048, (150, 257, 512)
SHORT = (37, 90, 61)
NEW = (6, 30, 24, 18)
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
MOST = 5
"""Drafted tokens of a row."""
SLACK = 80
"""Tokens of blocks beside what the long prompt and a short one fill."""
ROWS = CUTS._replace(
    max_cost=100.0, attn_cost_per_kv=0.0, min_block=16, max_block=64, expert_block=64
)


class Turns:
    """Plans by a seed and by what is there, never by time.

    Args:
        seed: Of its choices.
        num_requests: It waits until so many have come.
        hold_at: Turn from which it waits, once the long prompt is parked inside; None is never.
    """

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT | Cap.KV_SWAP

    def __init__(self, seed: int, num_requests: int, hold_at: int | None = None) -> None:
        self.rng, self.num_requests = random.Random(seed), num_requests
        self.hold_at, self.num_turns = hold_at, 0
        self.holds = threading.Event()

    def plan(self, view: View) -> Plan:
        requests = sorted(view.requests, key=lambda r: r.request_id)
        if len(requests) < self.num_requests:
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        self.num_requests, self.num_turns = 0, self.num_turns + 1
        if self.hold_at is not None and self.num_turns >= self.hold_at:
            inside = [row for frame in view.frames for row in frame.rows if row.num_tokens > 100]
            if self.holds.is_set() or (inside and any(r.num_swapped_tokens for r in requests)):
                self.holds.set()
                return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return self.turn(view, requests)

    def turn(self, view: View, requests: Sequence[RequestView]) -> Plan:
        """One or two of the parked frames and waiting requests, for a boundary or to their end."""
        rng = self.rng
        frames = sorted(view.frames, key=lambda f: min(row.request_id for row in f.rows))
        waiting = [[self.row(r, view)] for r in requests if r.frame_id is None]
        units = [list(frame.rows) for frame in frames] + waiting
        rng.shuffle(units)
        if waiting and units[0] != waiting[0] and rng.random() < 0.3:
            units.insert(0, units[0] + waiting[0])
        for rows in units:
            gone = self.out(view, requests, rows)
            if gone is not None:
                how = {"stop_below": NO_STOP, "slice_ns": rng.choice((*[1] * 7, None))}
                return Plan(rows=tuple(rows), grain=Grain.EXPERT, swap_out=gone, **how)
        raise AssertionError("nobody can run")

    def row(self, r: RequestView, view: View) -> Row:
        row, top = next_row(r, view, self.rng.choice(CHUNKS)), view.shape.num_layers
        if not r.is_decoding and row.start_layer + 1 < top and self.rng.random() < 0.3:
            row = row._replace(end_layer=self.rng.randrange(row.start_layer + 1, top + 1))
        return row

    def out(
        self, view: View, requests: Sequence[RequestView], rows: Sequence[Row]
    ) -> tuple[int, ...] | None:
        """Whoever has to move, so that the rows have blocks; None if that is not possible."""
        if sum(row.num_tokens for row in rows) > view.max_step_tokens:
            return None
        planned = {row.request_id for row in rows}
        held = [r for r in requests if r.is_admitted and r.request_id not in planned]
        held = [r for r in held if r.last_progress_ns > r.admitted_ns]
        need = sum(view.blocks_needed(row) for row in rows) - view.num_free_blocks
        self.rng.shuffle(held)
        gone = []
        while need > 0 and held:
            gone.append(held[0].request_id)
            need -= len(held.pop(0).block_table)
        return tuple(gone) if need <= 0 else None


class Case(NamedTuple):
    """A model, how it is served, and how equal its results have to be."""

    model: Any
    settings: dict[str, Any]
    is_exact: bool


def case_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    family, _, dtype = name.partition(" ")
    common: dict[str, Any] = {"threads": 1, "conformance": False, "prefix_cache": False}
    if dtype == "bf16":
        model = make_hybrid(family)
        model.config.max_position_embeddings = 2 * LONG
        return Case(model, {**common, "exactness": "batch-invariant"}, is_exact=True)
    monkeypatch.setitem(tiny_configs.SIZES, "max_position_embeddings", 2 * LONG)
    model = tiny_configs.tiny_model(family)
    return Case(model, {**common, "kernels": "reference"}, is_exact=False)


def prompts_of(vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in (LONG, *SHORT)]


def engine_of(case: Case, **more: Any) -> QLLMEngine:
    """Its passes have many boundaries, at the same places in every run."""
    engine = QLLMEngine.from_model(copy.deepcopy(case.model), **case.settings, **more)
    runner, cuts = runner_of(engine), ROWS
    around = runner.parts.around
    if around is not None:
        never = 1 << 30
        cuts = cuts._replace(glue_block=never, dense_block=never)
        if not around.goes_on:
            cuts = cuts._replace(max_cost=float("inf"), min_block=never, max_block=never)
    runner.backend.cuts = loop_of(engine).scheduler.cuts = cuts
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    return engine


def state_tokens_of(case: Case) -> int:
    runner = cpu_runner(copy.deepcopy(case.model), kernels=case.settings.get("kernels", "fast"))
    runner.close()
    return runner.shape.state_tokens


class Peaks(dict[int, list[float]]):
    """Largest log-probability of every token that an engine samples, by number of its request."""

    def watch(self, engine: QLLMEngine) -> None:
        runner = runner_of(engine)
        engine.call(lambda: setattr(runner, "on_logits", self._take))

    def _take(self, number: int, _: int, logits_V: torch.Tensor) -> None:
        peak = torch.log_softmax(logits_V.float(), -1).max()
        self.setdefault(number, []).append(float(peak))

    def of(self, handles: Sequence[Handle]) -> list[list[float]]:
        return [self.get(handle.number, []) for handle in handles]


class Found(NamedTuple):
    """The answers to all prompts."""

    tokens: list[tuple[int, ...]]
    peaks: list[list[float]]
    """Largest log-probability at each token."""


class Seen(NamedTuple):
    """What an engine of the storm gave, and how often what happened there."""

    found: Found
    kinds: Counter[str]


def kinds_of(engine: QLLMEngine) -> Counter[str]:
    """Return the number of events by kind, and of drafts that were accepted and rejected."""
    found, rows = Counter[str](), dict[int, set[int]]()
    for event in engine.trace.events:
        found[type(event).__name__] += 1
        if isinstance(event, trace.Planned):
            rows[event.frame_id] = {row.num_tokens for row in event.rows}
        elif isinstance(event, trace.Parked):
            found["parked with drafts"] += not rows[event.frame_id].isdisjoint(range(2, MOST + 2))
        elif isinstance(event, trace.Verified):
            found["accepted"] += event.num_accepted
            found["rejected"] += event.num_drafts - event.num_accepted
    return found


def alone(case: Case, prompts: Sequence[list[int]], pool: int) -> Found:
    """One after the other."""
    with engine_of(case, max_kv_tokens=pool) as engine:
        (peaks := Peaks()).watch(engine)
        handles, tokens = [], []
        for ids, new in zip(prompts, NEW, strict=True):
            handles.append(engine.submit(ids, "LS", new, sampling=GREEDY))
            tokens.append(handles[-1].result(600).token_ids)
    return Found(tokens, peaks.of(handles))


def to_checkpoint(
    case: Case,
    prompts: Sequence[list[int]],
    path: Path,
    drafter: MakeDrafter | None = None,
    **room: Any,
) -> Seen:
    """The storm, up to a checkpoint in the middle of the long prompt."""
    turns = Turns(1, len(prompts), hold_at=60)
    with engine_of(case, policy=turns, record=True, **room) as engine:
        if drafter is not None:
            always_draft(engine, drafter, MOST)
        (peaks := Peaks()).watch(engine)
        handles = engine.call(
            lambda: [
                engine.submit(ids, ("BE", "LS")[i % 2], new, sampling=GREEDY, request_id=str(i))
                for i, (ids, new) in enumerate(zip(prompts, NEW, strict=True))
            ]
        )
        assert turns.holds.wait(120), f"not held in {turns.num_turns} turns"
        assert engine.checkpoint(path) == len(prompts)
        return Seen(Found([], peaks.of(handles)), kinds_of(engine))


def from_checkpoint(
    case: Case, path: Path, drafter: MakeDrafter | None = None, **room: Any
) -> Seen:
    """The rest of it, in another engine."""
    with engine_of(case, policy=Turns(2, len(NEW)), record=True, **room) as engine:
        if drafter is not None:
            always_draft(engine, drafter, MOST)
        (peaks := Peaks()).watch(engine)
        handles = sorted(engine.restore(path), key=lambda h: h.request_id)
        tokens = [handle.result(600).token_ids for handle in handles]
        assert engine.stats()["swap"]["blocks_used"] == 0
        return Seen(Found(tokens, peaks.of(handles)), kinds_of(engine))


CASES = [*(f"{family} bf16" for family in NATIVE), *HYBRIDS, *MIXES]
LONGEST = "kimi_linear"
"""Its modules in transformers take 130 s of processor time for the storm; others take 10."""
CASES.remove(LONGEST)
CASES.append(pytest.param(LONGEST, marks=pytest.mark.slow))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_decodes_beside_a_long_prompt_survive_a_storm_swaps_and_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(decision, "MAX_IDLE_NS", 3600 * 10**9)  # while the checkpoint is written
    case, saved = case_of(name, monkeypatch), tmp_path / "saved"
    prompts, states = prompts_of(tiny_configs.VOCAB), state_tokens_of(case)
    pool = LONG + NEW[0] + SHORT[1] + NEW[2] + 2 * states + SLACK
    expected = alone(case, prompts, pool)
    room = {"max_kv_tokens": pool, "swap_kv_tokens": 4 * (pool + states), "max_step_tokens": 700}
    first = to_checkpoint(case, prompts, saved, **room)
    then = from_checkpoint(case, saved, **room)
    kinds = first.kinds + then.kinds
    show(f"{name}: {states} tokens of states, {kinds}")
    assert then.found.tokens == expected.tokens
    values = [peak for peaks in expected.peaks for peak in peaks]
    assert max(values) - min(values) > 20 * all_families.CLOSE, "a wrong step would not show"
    pairs = zip(first.found.peaks, then.found.peaks, expected.peaks, strict=True)
    for before, after, right in pairs:
        far = max(abs(a - b) for a, b in zip([*before, *after], right, strict=True))
        assert far <= (0 if case.is_exact else all_families.CLOSE)
    assert not first.found.peaks[0], "the long prompt was cut short"
    assert any(first.found.peaks), "nobody was in the middle of an answer"
    assert kinds["Parked"] > 200
    assert min(kinds["SwappedOut"], kinds["SwappedIn"]) > 20
    assert kinds["Evicted"] == 0
    with safe_open(saved, framework="pt") as file:
        has_states = any(".state." in f".{key}" for key in file.keys())  # noqa: SIM118
    assert has_states is (name not in MIXES)


@pytest.mark.parametrize("drafter", ["wrong", "half"])
@pytest.mark.parametrize("family", NATIVE)
def test_drafts_change_nothing_beside_a_long_prompt(
    family: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same storm. A checkpoint leaves out the rows that verify drafts."""
    torch.set_num_threads(1)
    poison_rejected(monkeypatch)
    monkeypatch.setattr(decision, "MAX_IDLE_NS", 3600 * 10**9)
    case, saved = case_of(f"{family} bf16", monkeypatch), tmp_path / "saved"
    prompts, states = prompts_of(tiny_configs.VOCAB), state_tokens_of(case)
    pool = LONG + NEW[0] + SHORT[1] + NEW[2] + 2 * states + SLACK
    expected = alone(case, prompts, pool)
    right = next_of(dict(zip(map(tuple, prompts), expected.tokens, strict=True)))
    room = {"max_kv_tokens": pool, "swap_kv_tokens": 4 * (pool + states), "max_step_tokens": 700}
    make = maker(drafter, right, tiny_configs.VOCAB)
    first = to_checkpoint(case, prompts, saved, make, **room)
    then = from_checkpoint(case, saved, make, **room)
    kinds = first.kinds + then.kinds
    show(f"{family}: {kinds}")
    assert then.found.tokens == expected.tokens
    assert (kinds["accepted"] > 10) is (drafter == "half")
    assert kinds["rejected"] > 10
    assert kinds["parked with drafts"] > 20
    assert min(kinds["SwappedOut"], kinds["SwappedIn"]) > 0
    assert kinds["Evicted"] == 0
    with safe_open(saved, framework="pt") as file:
        names = [key.split(".") for key in file.keys() if ".state." in f".{key}"]  # noqa: SIM118
    assert names


def test_every_family_with_a_state_is_among_them() -> None:
    found = {x for x in MOE if discover(tiny_configs.tiny_model(x)).has_states}
    assert found == {*HYBRIDS, *KEYS_ALONE}
