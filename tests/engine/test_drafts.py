"""Drafts change no token: with any drafter, and any settings, answers are those without drafts.

KV and states after the accepted tokens are overwritten with NaN after every step, so nothing may
read them.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.drafters.choose import EXIT
from qllm.drafters.exit import Exit
from qllm.drafters.protocol import DraftRequest
from qllm.engine.drafts import REST_TOKENS
from qllm.errors import ConfigError, InvalidRequestError, QllmError
from qllm.frontend.handle import Result
from qllm.record import trace
from qllm.runner import choosing
from qllm.runner.choosing import Verified
from qllm.runner.frame import Frame
from qllm.types import FinishReason
from tests.support.drafters import (
    SHARES,
    counts,
    maker,
    model_of,
    next_of,
    poison_rejected,
    quieten,
)
from tests.support.families import FAMILIES, VOCAB
from tests.support.hybrids import NATIVE
from tests.support.inside import loop_of, runner_of
from tests.support.storms import prompt_of
from tests.support.tiny_configs import tiny_model

NEW = 24
DRAFTERS = (*SHARES, "random")
EXITS = ("exit:1", "exit:2")
WARNED: list[str] = []
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=0.9, seed=3),
    "cut": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    "penalties": SamplingParams(
        temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "bias": SamplingParams(temperature=0, logit_bias={7: 2.0, 9: -100.0}),
    "logprobs": SamplingParams(temperature=0.7, seed=6, logprobs=5),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2),
    "min tokens": SamplingParams(
        temperature=1, seed=8, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB, 5))
    ),
    "allowed": SamplingParams(temperature=1, seed=9, allowed_token_ids=tuple(range(40))),
    "first of three": SamplingParams(temperature=1, seed=10),
    "second of three": SamplingParams(temperature=1, seed=11),
    "third of three": SamplingParams(temperature=1, seed=12),
}
KINDS = {
    kind: sampling if "min" in kind else replace(sampling, ignore_eos=True)
    for kind, sampling in KINDS.items()
}


@pytest.fixture(autouse=True)
def _rejected_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_rejected(monkeypatch)


def exit_layer(drafter: str) -> int:
    return int(drafter.removeprefix(EXIT)) if drafter.startswith(EXIT) else 0


def engine_of(family: str = "mixtral", quiet_from: int = 0, **settings: Any) -> QLLMEngine:
    """An engine; layers from `quiet_from` on change little, if that is not 0."""
    model = model_of(family)
    if quiet_from:
        quieten(model, quiet_from)
    how: dict[str, Any] = {"threads": 1, "conformance": False, "max_kv_tokens": 4096, **settings}
    return QLLMEngine.from_model(model, **how)


def prompt(kind: str) -> list[int]:
    return prompt_of(17, 99 if "three" in kind else list(KINDS).index(kind))


def answers(engine: QLLMEngine, kinds: dict[str, SamplingParams], new: int = NEW) -> list[Result]:
    """All kinds at once."""
    handles = engine.call(
        lambda: [
            engine.submit(prompt(kind), "LS", new, sampling=sampling)
            for kind, sampling in kinds.items()
        ]
    )
    return [handle.result(300) for handle in handles]


def draft(engine: QLLMEngine, make: Any, most: int = 4, *, is_timed: bool = False) -> None:
    """Draft from now on, always as many tokens as are proposed."""
    engine.call(lambda: loop_of(engine).draft_with(make, most, WARNED.append, weighs=False))
    if not is_timed:  # the drafters of tests are slow
        loop_of(engine).drafts._now_ns = lambda: 0


def told(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.prompt_logprobs, result.finish_reason


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The answers of a family without drafts, and the kinds of requests that it gets."""
    known: dict[str, Any] = {}

    def of(family: str, quiet_from: int = 0) -> Any:
        if (family, quiet_from) not in known:
            with engine_of(family, quiet_from) as engine:
                first = answers(engine, KINDS)
                whole = dict(zip(KINDS, first, strict=True))
                stop = whole["penalties"].token_ids[NEW // 2]  # no token comes twice there
                more = {"penalties": replace(KINDS["penalties"], stop_token_ids=(stop,))}
                (whole["stop"],) = answers(engine, more)
            known[family, quiet_from] = more, whole
        return known[family, quiet_from]

    return of


def test_a_draft_row_knows_the_drafts_before_it() -> None:
    """Penalties count drafted tokens as tokens of the answer."""
    seen: list[int] = []
    with engine_of("mixtral") as engine:
        sampler: Any = loop_of(engine).runner.sampler
        guess = sampler.guess

        def noted(logits: Any, ids: Any, positions: Sequence[int], outputs: Any) -> Any:
            assert [9 + len(ids) for ids in outputs] == list(positions)
            seen.extend(map(len, outputs))
            return guess(logits, ids, positions, outputs)

        sampler.guess = noted
        draft(engine, Exit(1))
        how = SamplingParams(temperature=1, seed=1, presence_penalty=1, ignore_eos=True)
        engine.submit(prompt_of(9, 1), "LS", 8, sampling=how).result(300)
    assert len(seen) > len(set(seen)) > 5


CELLS = [(family, drafter) for family in FAMILIES for drafter in (*DRAFTERS, *EXITS)]
CELLS += [(family, drafter) for family in NATIVE for drafter in DRAFTERS]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("family", "drafter"), CELLS)
def test_answers_are_those_without_drafts(family: str, drafter: str, alone: Any) -> None:
    more, expected = alone(family, exit_layer(drafter))
    with engine_of(family, exit_layer(drafter)) as engine:
        streams = {tuple(prompt(kind)): expected[kind].token_ids for kind in KINDS}
        draft(engine, maker(drafter, next_of(streams), VOCAB))
        found = dict(zip(KINDS, answers(engine, KINDS), strict=True))
        (found["stop"],) = answers(engine, more)
        engine.call(loop_of(engine).scheduler.check)
        assert loop_of(engine).scheduler.pool.num_free == engine.config.num_blocks
    assert {kind: told(r) for kind, r in found.items()} == {
        kind: told(r) for kind, r in expected.items()
    }
    assert found["stop"].finish_reason is FinishReason.STOP
    known = [kind for kind in found if kind not in ("first of three", "second of three")]
    for kind in known if drafter in SHARES else ():
        accepted, rejected = counts([found[kind]])
        assert (accepted > 0) is (SHARES[drafter] > 0), kind
        assert (rejected > 0) is (SHARES[drafter] < 1) or kind == "min tokens", kind
    accepted, rejected = counts(list(found.values()))
    assert accepted + rejected > 50
    if exit_layer(drafter):
        assert min(accepted, rejected) > 20
    usual = {kind: r.metrics for kind, r in found.items()}
    assert all(m.preempt_recomputed_tokens == 0 for m in usual.values())
    assert {k: m.num_output_tokens for k, m in usual.items()} == {
        k: r.metrics.num_output_tokens for k, r in expected.items()
    }


@pytest.mark.parametrize("drafter", ["half", "exit:1"])
@pytest.mark.parametrize("expert_weights", ["int8", "int4"])
def test_experts_in_few_bits_verify_drafts_too(expert_weights: str, drafter: str) -> None:
    settings = {"quiet_from": 1, "expert_weights": expert_weights}
    with engine_of("qwen3_moe", **settings) as engine:
        expected = answers(engine, KINDS)
    pairs = zip(KINDS, expected, strict=True)
    streams = {tuple(prompt(kind)): result.token_ids for kind, result in pairs}
    with engine_of("qwen3_moe", **settings) as engine:
        draft(engine, maker(drafter, next_of(streams), VOCAB))
        found = answers(engine, KINDS)
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert min(counts(found)) > 20


@pytest.mark.parametrize("most", [1, 2, 16])
@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_no_answer_is_longer_than_its_limit(most: int, new: int, alone: Any) -> None:
    _, expected = alone("mixtral")
    with engine_of() as engine:
        streams = {tuple(prompt(kind)): expected[kind].token_ids for kind in KINDS}
        draft(engine, maker("oracle", next_of(streams), VOCAB), most)
        kinds = {kind: sampling for kind, sampling in KINDS.items() if kind != "min tokens"}
        found = answers(engine, kinds, new)
    for kind, result in zip(kinds, found, strict=True):
        assert result.token_ids == expected[kind].token_ids[:new]
        assert result.finish_reason is FinishReason.LENGTH


# -- the code broken by hand: each law must turn red


def accept_a_wrong_draft(patch: pytest.MonkeyPatch) -> None:
    """Take one token behind the first that differs."""
    open_place = Verified.open_place

    def one_more(self: Verified, chosen: Any) -> int | None:
        place = open_place(self, chosen)
        last = self.first + len(self.drafts)
        if place is None and len(chosen) and max(chosen) < last and max(chosen) >= self.first:
            wrong = [p for p in self.places() if p in chosen]
            return wrong[-1] + 1 if len(wrong) == 1 else None
        return place

    patch.setattr(Verified, "open_place", one_more)


def sample_with_the_last_seed(patch: pytest.MonkeyPatch) -> None:
    position = Verified.position
    patch.setattr(
        Verified, "position", lambda self, place: position(self, place) - (place > self.first)
    )


def forget_accepted_outputs(patch: pytest.MonkeyPatch) -> None:
    """Penalties see the answer without the accepted drafts."""
    choose = choosing._choose

    def blind(runner: Any, logits: Any, now: Any, chosen: Any) -> Any:
        empty = {place: token._replace(token_id=0) for place, token in chosen.items()}
        return choose(runner, logits, now, empty)

    patch.setattr(choosing, "_choose", blind)


def keep_a_rejected_page(patch: pytest.MonkeyPatch) -> None:
    commit = Frame.commit

    def all_of_it(self: Frame, requests: Any) -> None:
        commit(self, requests)
        for row in self.program.rows:
            kv = requests[row.request_id].kv
            kv.committed = kv.written = row.hi

    patch.setattr(Frame, "commit", all_of_it)


BROKEN = [
    accept_a_wrong_draft, sample_with_the_last_seed, forget_accepted_outputs, keep_a_rejected_page,
]  # fmt: skip


@pytest.mark.parametrize("drafter", ["half", "exit:1"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_mutant_turns_the_law_red(
    broken: Any, drafter: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone("mixtral", exit_layer(drafter))
    broken(monkeypatch)
    try:
        test_answers_are_those_without_drafts("mixtral", drafter, alone)
    except (AssertionError, QllmError):
        return
    pytest.fail("the law did not notice")


# -- drafters that do what they should not


class Sleeps:
    def __init__(self, request: DraftRequest) -> None:
        self.num_calls = 0

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        self.num_calls += 1
        time.sleep(0.01)
        return [1]


class Writes:
    """A drafter that tries to change the tokens it got."""

    def __init__(self, request: DraftRequest) -> None:
        pass

    def propose(self, token_ids: Any, most: int) -> Any:
        token_ids[0] = 1
        return token_ids


class Endless:
    def __init__(self, request: DraftRequest) -> None:
        pass

    def propose(self, token_ids: Sequence[int], most: int) -> Iterator[int]:
        while True:
            yield 3


class Fixed:
    """A drafter that proposes always the same."""

    what: Any = None

    def __init__(self, request: DraftRequest) -> None:
        pass

    def propose(self, token_ids: Sequence[int], most: int) -> Any:
        return self.what


class Silent:
    """An object of which no text can be made."""

    def __repr__(self) -> str:
        raise SystemExit


def fixed(value: Any) -> Any:
    return type("Fixed", (Fixed,), {"what": value})


class Refuses:
    def __init__(self, request: DraftRequest) -> None:
        raise SystemExit


BAD = {
    "raises": (Writes, "raised"),
    "refuses": (Refuses, "raised"),
    "none": (fixed(None), "raised"),
    "sleeps": (Sleeps, "slow"),
    "negative": (fixed([-1]), "no token id"),
    "beyond the vocabulary": (fixed([VOCAB]), "no token id"),
    "bools": (fixed([True, False]), "no token id"),
    "texts": (fixed(["a"]), "no token id"),
    "integers of NumPy": (fixed(np.array([1, 2])), "no token id"),
    "a number too long for a text": (fixed([10**5000]), "no token id"),
    "an object without a text": (fixed([Silent()]), "no token id"),
    "floats": (fixed([1.0]), "no token id"),
    "a million": (fixed([5] * 10**6), None),
    "endless": (Endless, None),
    "nothing": (fixed([]), None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_drafter_changes_nothing(name: str, alone: Any) -> None:
    _, expected = alone("mixtral")
    make, cause = BAD[name]
    with engine_of() as engine:
        draft(engine, make, is_timed=name == "sleeps")
        WARNED.clear()
        found = answers(engine, KINDS)
        faults = engine.stats()["drafts"]["faults"]
    assert [told(r) for r in found] == [told(expected[kind]) for kind in KINDS]
    assert set(faults) == ({cause} if cause else set())
    assert len(WARNED) == len(faults)
    if cause == "no token id":
        assert f"a token id is an int in [0, {VOCAB})" in WARNED[0]
    if name == "sleeps":
        # an answer that ends early may have been asked once
        assert len(KINDS) < faults["slow"] <= 2 * len(KINDS), f"it rests for {REST_TOKENS} tokens"


def test_draft_rows_whose_logits_are_nan_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first draft is token 5, behind which the model breaks. The next row drafts nothing."""
    kinds = {
        "greedy": SamplingParams(temperature=0, logit_bias={5: -100.0}, ignore_eos=True),
        "seeded": SamplingParams(temperature=1, seed=1, logit_bias={5: -100.0}, ignore_eos=True),
    }
    with engine_of() as engine:
        weights = runner_of(engine).model.get_input_embeddings().weight
        engine.call(lambda: weights.data[5].fill_(math.nan))
        expected = answers(engine, kinds)
        sampler = runner_of(engine).sampler
        guess, broken = sampler.guess, list[int]()

        def five(*asked: Any) -> list[int | None]:
            found = guess(*asked)
            broken.extend(one is None for one in found)
            return [None if one is None else 5 for one in found]

        monkeypatch.setattr(sampler, "guess", five)
        draft(engine, Exit(1))
        found = answers(engine, kinds)
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert counts(found) == (0, broken.count(False))
    assert broken.count(True) > NEW


def test_no_token_behind_a_stop_is_drafted() -> None:
    """A draft row that chooses a token that ends the answer is the last."""
    stops = tuple(range(0, VOCAB, 3))
    ends = replace(KINDS["seeded"], stop_token_ids=stops, ignore_eos=False)
    with engine_of("mixtral", 2, record=True) as engine:
        expected = answers(engine, {"seeded": ends})
        draft(engine, Exit(2))
        found = answers(engine, {"seeded": ends})
        long = answers(engine, {"cut": replace(KINDS["cut"], stop_token_ids=stops, min_tokens=20)})
        events = engine.trace.events
        drafted = [i for e in events if isinstance(e, trace.Drafted) for i in e.token_ids]
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert len(long[0].token_ids) >= 20
    assert drafted
    assert not set(drafted) & set(stops)


@pytest.mark.parametrize("family", ["mixtral", *NATIVE])
def test_a_draft_whose_logits_are_nan_ends_no_request(family: str) -> None:
    """The model breaks behind token 5, which no answer has."""
    bias = {5: -100.0}
    kinds = {
        "greedy": SamplingParams(temperature=0, logit_bias=bias),
        "seeded": SamplingParams(temperature=1, seed=1, logit_bias=bias),
    }
    with engine_of(family) as engine:
        weights = runner_of(engine).model.get_input_embeddings().weight
        engine.call(lambda: weights.data[5].fill_(math.nan))
        expected = answers(engine, kinds)
        draft(engine, fixed([5, 6]))
        found = answers(engine, kinds)
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert counts(found) == (0, counts(found)[1])
    assert counts(found)[1] > NEW


# -- settings


@pytest.mark.parametrize("value", [-1, 17, True, "4", 1.0])
def test_draft_tokens_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft_tokens=.* must be an integer in \[0, 16\]"):
        engine_of(draft="lookup", draft_tokens=value)
    if value is not True:
        with pytest.raises(InvalidRequestError, match=r"draft_tokens"):
            SamplingParams(draft_tokens=value)


def test_an_unknown_drafter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="draft='x' is unknown; use one of none, auto, lookup"):
        engine_of(draft="x")


def test_a_model_with_states_has_no_draft_rows() -> None:
    said = r"draft='exit:1' .*: its layers carry a state, which draft rows .*; use draft='none'"
    with pytest.raises(ConfigError, match=said):
        engine_of("qwen3_next", draft="exit:1")


@pytest.mark.parametrize("layer", ["0", "-1", "x", "", "1.5"])
def test_an_exit_names_a_number_of_layers(layer: str) -> None:
    said = f"draft='exit:{layer}' must name the number of layers .* at least 1 .*, like exit:4"
    with pytest.raises(ConfigError, match=said):
        engine_of(draft=f"exit:{layer}")


@pytest.mark.parametrize("layer", [3, 99])
def test_an_exit_is_before_the_last_layer(layer: int) -> None:
    said = rf"draft='exit:{layer}' .* after {layer} layers, .* has 3; give a number in \[1, 2\]"
    with pytest.raises(ConfigError, match=said):
        engine_of(draft=f"exit:{layer}")


def test_a_model_whose_bits_depend_on_cuts_is_refused() -> None:
    said = (
        "draft='lookup' .*: not every layer runs on our kernels.*, and a draft could change tokens"
    )
    with pytest.raises(ConfigError, match=said):
        engine_of(draft="lookup", kernels="reference")


def test_a_hybrid_of_which_a_layer_has_no_kernel_is_refused() -> None:
    model = tiny_model("qwen3_next").to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"not every layer runs on our kernels"):
        QLLMEngine.from_model(model, conformance=False, max_kv_tokens=1024, draft="auto")


@pytest.mark.parametrize("settings", [{}, {"draft": "lookup", "draft_tokens": 0}])
def test_an_engine_without_drafts_has_no_drafter(settings: dict[str, Any]) -> None:
    with engine_of(**settings) as engine:
        assert loop_of(engine).drafts is None
        assert engine.stats()["drafts"] == {}


def test_stats_count_drafts_of_both_classes_from_the_start() -> None:
    none = {"accepted": 0, "rejected": 0}
    with engine_of(draft="lookup") as engine:
        assert engine.stats()["drafts"] == {"LS": none, "BE": none, "faults": {}}


def test_a_request_may_lower_its_drafts(alone: Any) -> None:
    _, expected = alone("mixtral")
    streams = {tuple(prompt("greedy")): expected["greedy"].token_ids}
    with engine_of() as engine:
        draft(engine, maker("oracle", next_of(streams), VOCAB), 8)
        none, one, many = (
            engine.submit(prompt("greedy"), "LS", NEW, temperature=0, draft_tokens=n).result(300)
            for n in (0, 1, 16)
        )
    assert counts([none]) == (0, 0)
    assert counts([one])[0] == NEW // 2 - 1, "the first token comes with the prompt"
    assert counts([many])[0] > NEW // 2
    assert none.token_ids == one.token_ids == many.token_ids
