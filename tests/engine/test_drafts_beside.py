"""Drafts beside grammars, reasoning, stop strings, the prefix cache, long ropes and checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.drafters.exit import Exit
from qllm.frontend.handle import Result
from qllm.plan import Plan
from qllm.policy import NO_STOP, View, next_row
from qllm.record import trace
from qllm.runner.protocol import Stop
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, Program
from qllm.types import Cap, FinishReason, Grain, StructuredOutputs
from tests.support.drafters import Told, always_draft, counts, maker, next_of, poison_rejected
from tests.support.families import VOCAB, make_model
from tests.support.inside import loop_of
from tests.support.rope import KINDS, ORIGINAL, model_of
from tests.support.serving import tiny_engine
from tests.support.storms import fine, prompt_of


@pytest.fixture(autouse=True)
def _rejected_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_rejected(monkeypatch)


def told(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.logprobs, result.finish_reason


def engine_of(model: Any, **settings: Any) -> QLLMEngine:
    how = {"threads": 1, "conformance": False, "max_kv_tokens": 2048, **settings}
    return QLLMEngine.from_model(model, **how)


# -- answers of a model with a tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"type": "string"},
        "age_of_the_person": {"type": "integer"},
    },
    "required": ["first_name_of_the_person", "age_of_the_person"],
    "additionalProperties": False,
}
TEXT = "def area(width, height):\n    return width * height\n"
FORM = StructuredOutputs(regex="[a-c]{20}<think>the end of it")
ASKED: dict[str, tuple[str, SamplingParams]] = {
    "json": (
        "A person:",
        SamplingParams(seed=1, structured_outputs=StructuredOutputs(json=PERSON)),
    ),
    "reasoning": (
        "What?<think>",
        SamplingParams(seed=2, structured_outputs=FORM, thinking_token_budget=9),
    ),
    "budget": ("What?<think>", SamplingParams(seed=3, thinking_token_budget=7)),
    "stop string": (TEXT, SamplingParams(temperature=0, seed=6, ignore_eos=True)),
    "long stop string": (TEXT, SamplingParams(seed=4, logprobs=1, ignore_eos=True)),
    "bad words": (TEXT, SamplingParams(seed=5, bad_words=("a", "return", "("), ignore_eos=True)),
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[QLLMEngine]:
    with tiny_engine(conformance=False, run_in="thread") as engine:
        yield engine


def asked(engine: QLLMEngine, stops: Mapping[str, tuple[str, ...]]) -> dict[str, Result]:
    handles = {
        kind: engine.submit(prompt, "LS", 60, sampling=replace(sampling, stop=stops.get(kind, ())))
        for kind, (prompt, sampling) in ASKED.items()
    }
    return {kind: handle.result(300) for kind, handle in handles.items()}


@pytest.fixture(scope="module")
def stops(tiny: QLLMEngine) -> dict[str, tuple[str, ...]]:
    """Stop strings out of the middle of the answers, which depend on the kernels."""
    loop_of(tiny).drafts = None
    whole = {kind: result.text for kind, result in asked(tiny, {}).items()}
    short, long = whole["stop string"], whole["long stop string"]
    middle, late = len(short) // 2, len(long) // 2
    return {
        "stop string": (short[middle : middle + 4],),
        "long stop string": ("xyzxyz", long[late : late + 12]),
    }


@pytest.mark.parametrize("exit_layer", [0, 1])
@pytest.mark.parametrize("most", [3, 16])
def test_what_ends_and_bounds_an_answer_does_so_inside_a_run_of_drafts(
    tiny: QLLMEngine, stops: dict[str, tuple[str, ...]], most: int, exit_layer: int
) -> None:
    loop_of(tiny).drafts = None
    expected = asked(tiny, stops)
    known = {ASKED[kind][1].seed: result.token_ids for kind, result in expected.items()}
    always_draft(tiny, Exit(1) if exit_layer else partial(Told, answers=known), most)
    found = asked(tiny, stops)
    assert {kind: told(r) for kind, r in found.items()} == {
        kind: told(r) for kind, r in expected.items()
    }
    for kind, result in found.items():
        assert result.finish_reason is FinishReason.STOP or "stop" not in kind, kind
        assert counts([result])[bool(exit_layer)] > 0, kind
        assert result.metrics.preempt_recomputed_tokens == 0
    drafts = loop_of(tiny).drafts
    assert drafts is not None
    assert not drafts._drafting, "what ended is forgotten"


def test_a_grammar_drafts_what_it_forces_also_behind_reasoning(
    tiny: QLLMEngine, stops: dict[str, tuple[str, ...]]
) -> None:
    from qllm.drafters.grammar import Forced

    loop_of(tiny).drafts = None
    expected = asked(tiny, stops)
    always_draft(tiny, Forced, 8)
    found = asked(tiny, stops)
    assert {kind: told(r) for kind, r in found.items()} == {
        kind: told(r) for kind, r in expected.items()
    }
    for kind, result in found.items():
        assert (counts([result])[0] > 5) is (kind in ("json", "reasoning")), kind
        assert sum(counts([result])) == 0 or kind in ("json", "reasoning"), kind
    (drafted,) = (r for kind, r in found.items() if kind == "reasoning")
    assert drafted.text.endswith("<think>the end of it")


# -- lengths at which a model changes its rope


@pytest.mark.parametrize("drafter", ["oracle", "half", "exit:1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_does_not_cross_the_length_at_which_kv_is_computed_again(
    kind: str, drafter: str
) -> None:
    model, prompt = model_of(kind, "bf16"), prompt_of(ORIGINAL - 12, 3)
    sampling = SamplingParams(temperature=1.0, seed=3, ignore_eos=True, logprobs=1)
    with engine_of(model) as engine:
        expected = engine.submit(prompt, "LS", 24, sampling=sampling).result(300)
        engine.reset_prefix_cache()
        right = next_of({tuple(prompt): expected.token_ids})
        always_draft(engine, maker(drafter, right, VOCAB), 7)
        found = engine.submit(prompt, "LS", 24, sampling=sampling).result(300)
    assert told(found) == told(expected)
    assert counts([found])[drafter == "exit:1"] > 5
    assert found.metrics.evictions == expected.metrics.evictions


# -- rows of drafts that fail, and tokens that end an answer


def test_a_row_that_fails_only_with_drafts_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's next row has no drafts, so a fault that drafts cause ends nothing."""
    run, num_failed = TorchRunner.run, 0

    def fails(self: TorchRunner, program: Program, start: Index, stop: Stop) -> Index:
        nonlocal num_failed
        if max(program.samples) > 1:
            num_failed += 1
            raise RuntimeError("a row with drafts")
        return run(self, program, start, stop)

    specs: list[dict[str, Any]] = [
        {"prompt": prompt_of(9 + n, n), "max_tokens": 8} for n in range(2)
    ]
    with engine_of(make_model("mixtral", torch.bfloat16)) as engine:
        expected = [engine.submit(**spec, temperature=0).result(300) for spec in specs]
        pairs = zip(specs, expected, strict=True)
        right = next_of({tuple(spec["prompt"]): result.token_ids for spec, result in pairs})
        monkeypatch.setattr(TorchRunner, "run", fails)
        always_draft(engine, maker("oracle", right, VOCAB))
        handles = engine.call(lambda: [engine.submit(**spec, temperature=0) for spec in specs])
        found = [handle.result(300) for handle in handles]
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert num_failed > 2
    assert [counts([r]) for r in found] == [(0, 0), (0, 0)]


def test_no_token_that_ends_an_answer_is_drafted() -> None:
    prompt = prompt_of(21, 5)
    with engine_of(make_model("mixtral", torch.bfloat16), record=True) as engine:
        sampling = SamplingParams(seed=2, ignore_eos=True)
        whole = engine.submit(prompt, "LS", 20, sampling=sampling).result(300)
        stop = whole.token_ids[9]
        always_draft(engine, maker("oracle", next_of({tuple(prompt): whole.token_ids}), VOCAB), 16)
        found = engine.submit(prompt, sampling=replace(sampling, stop_token_ids=(stop,))).result(
            300
        )
        events = engine.trace.events
    num = whole.token_ids.index(stop)
    assert found.token_ids == whole.token_ids[: num + 1]
    drafted = [event.token_ids for event in events if isinstance(event, trace.Drafted)]
    assert drafted == [whole.token_ids[1:num]]


# -- KV that outlives a request


@pytest.mark.parametrize("drafter", ["half", "exit:2"])
def test_cached_pages_have_only_kv_of_tokens_that_were_chosen(drafter: str) -> None:
    """Each page has the bits that it has without drafts. The next turn gets the same answer."""
    prompt, sampling = prompt_of(21, 5), SamplingParams(temperature=0.9, seed=2, ignore_eos=True)

    def pages(engine: QLLMEngine) -> dict[bytes, Any]:
        prefix = loop_of(engine).prefix
        assert prefix is not None
        while engine.call(prefix.keep_rests):
            pass
        return {name: page.data for name, page in prefix.store._pages.items()}

    with (
        engine_of(make_model("mixtral", torch.bfloat16)) as plain,
        engine_of(make_model("mixtral", torch.bfloat16)) as engine,
    ):
        expected = plain.submit(prompt, "LS", 150, sampling=sampling).result(300)
        right = next_of({tuple(prompt): expected.token_ids})
        always_draft(engine, maker(drafter, right, VOCAB), 7)
        found = engine.submit(prompt, "LS", 150, sampling=sampling).result(300)
        assert told(found) == told(expected)
        there, here = pages(plain), pages(engine)
        assert len(here) == (21 + 149) // engine.config.page_size > 1
        assert here.keys() == there.keys()
        for name, page in here.items():
            assert all(torch.equal(x, y) for x, y in zip(page, there[name], strict=True))
        more = [*prompt, *expected.token_ids, 7]
        again = [e.submit(more, "LS", 9, sampling=sampling).result(300) for e in (plain, engine)]
    assert told(again[0]) == told(again[1])
    assert again[1].metrics.num_cached_tokens == again[0].metrics.num_cached_tokens > 100


class HoldsAll:
    """A policy with all requests in one frame, which it holds once one of them has drafts."""

    needs = Cap.LAYER_RANGE | Cap.YIELD_EXPERT

    def __init__(self, after: int) -> None:
        self.after = after
        self.is_holding = False

    def plan(self, view: View) -> Plan:
        rows = next((frame.rows for frame in view.frames), None)
        drafts = [row for row in rows or () if view.by_id[row.request_id].num_drafts]
        self.after -= bool(drafts)
        self.is_holding |= bool(drafts) and self.after < 0
        if self.is_holding:
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        rows = rows or tuple(next_row(request, view) for request in view.requests)
        return Plan(rows=rows, grain=Grain.EXPERT, stop_below=NO_STOP, slice_ns=1)


@pytest.mark.parametrize("exit_layer", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 40, 90, 131])
def test_a_checkpoint_of_a_frame_keeps_the_rows_beside_one_with_drafts(
    after: int, exit_layer: int, tmp_path: Path
) -> None:
    """Two of four requests in a frame draft, or all. Another engine finishes the four requests."""
    sampling = [SamplingParams(temperature=n / 2, seed=n, ignore_eos=True) for n in range(4)]
    specs: list[dict[str, Any]] = [
        {"prompt": prompt_of(9 + n, n), "max_tokens": 14, "sampling": one}
        for n, one in enumerate(sampling)
    ]
    model = make_model("mixtral", torch.bfloat16)
    with engine_of(model) as engine:
        expected = [engine.submit(priority="BE", **spec).result(300) for spec in specs]
    pairs = enumerate(zip(sampling, expected, strict=True))
    known = {one.seed: result.token_ids if n % 2 else () for n, (one, result) in pairs}
    make, holds = partial(Told, answers=known), HoldsAll(after)
    make = Exit(exit_layer) if exit_layer else make
    with engine_of(model, policy=holds) as engine:
        fine(engine)
        always_draft(engine, make)
        engine.call(lambda: [engine.submit(priority="BE", **spec) for spec in specs])
        while not holds.is_holding:
            engine.call(lambda: None)
        assert [len(f.program.rows) for f in loop_of(engine).scheduler.frames.values()] == [4]
        assert engine.checkpoint(tmp_path / "saved") == 4
    with engine_of(model) as engine:
        fine(engine)
        always_draft(engine, make)
        found = [handle.result(300) for handle in engine.restore(tmp_path / "saved")]
        engine.call(loop_of(engine).scheduler.check)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
