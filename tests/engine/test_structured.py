"""Answers that must have a form: held from the first token, whatever happens to the request."""

import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.errors import InvalidRequestError
from qllm.grammar import MOST_GRAMMAR_CHARS, Vocabulary
from qllm.models.tokenizer import load_tokenizer
from qllm.types import FinishReason, StructuredOutputs
from tests.support.inside import runner_of

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def form(**what: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=7, structured_outputs=StructuredOutputs(**what))


@pytest.fixture(scope="module")
def in_thread() -> Any:
    with QLLMEngine.from_pretrained("tiny", threads=1, run_in="thread") as engine:
        yield engine


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer("tiny"), 3072, frozenset({2, 0}))


def test_every_seed_gives_json_of_the_schema(in_thread: QLLMEngine) -> None:
    asked = StructuredOutputs(json=PERSON)
    handles = [
        in_thread.submit(
            "A person:",
            max_tokens=120,
            sampling=SamplingParams(temperature=1.0, seed=seed, structured_outputs=asked),
        )
        for seed in range(8)
    ]
    results = [handle.result(300) for handle in handles]
    done = [r for r in results if r.finish_reason is FinishReason.STOP]
    assert len(done) >= 4
    for result in done:
        jsonschema_rs.validate(PERSON, json.loads(result.text))
        assert result.token_ids[-1] in (0, 2)
    assert len({r.text for r in done}) > 1


def test_the_engine_computes_what_is_allowed_while_the_model_computes(
    in_thread: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts once for each token, with all tokens so far."""
    begun: list[tuple[int, ...]] = []
    sampler = runner_of(in_thread).sampler
    look_ahead = sampler.look_ahead

    def seen(request_id: int, outputs: Any) -> None:
        begun.append(tuple(outputs))
        look_ahead(request_id, outputs)

    monkeypatch.setattr(sampler, "look_ahead", seen)
    result = in_thread.submit("x", max_tokens=6, sampling=form(regex="[a-z]{9}")).result(300)
    assert begun == [result.token_ids[: n + 1] for n in range(len(result.token_ids))]
    assert sampler._builder is not None


def test_greedy_is_held_too(in_thread: QLLMEngine) -> None:
    sampling = SamplingParams(temperature=0, structured_outputs=StructuredOutputs(regex="[0-9]{4}"))
    assert re.fullmatch("[0-9]{4}", in_thread.submit("x", sampling=sampling).result(300).text)


def test_choices_and_grammars(in_thread: QLLMEngine) -> None:
    one = in_thread.submit("x", sampling=form(choice=["red", "green", "blue sky"])).result(300)
    assert one.text in ("red", "green", "blue sky")
    assert one.finish_reason is FinishReason.STOP
    lark = 'start: "<" WORD ">"\nWORD: /[a-c]{2,3}/'
    assert re.fullmatch(
        "<[a-c]{2,3}>", in_thread.submit("x", sampling=form(grammar=lark)).result().text
    )
    gbnf = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'
    assert re.fullmatch(
        "yes|no[0-9]", in_thread.submit("x", sampling=form(grammar=gbnf)).result().text
    )


def test_the_schema_true_is_any_json(in_thread: QLLMEngine) -> None:
    sampling = SamplingParams(
        seed=3, logit_bias={2: 9.0}, structured_outputs=StructuredOutputs(json="true")
    )
    result = in_thread.submit("x", max_tokens=200, sampling=sampling).result(300)
    assert result.finish_reason is FinishReason.STOP
    json.loads(result.text)


def test_too_few_tokens_end_with_length(in_thread: QLLMEngine) -> None:
    result = in_thread.submit("x", max_tokens=2, sampling=form(regex="[0-9]{40}")).result(300)
    assert result.finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[0-9]{1,8}", result.text)


def test_a_matcher_is_a_function_of_the_output(vocabulary: Vocabulary) -> None:
    """Fewer tokens than before begin again: what eviction and a repeated step need."""
    found = vocabulary.matcher(StructuredOutputs(regex="[ab]c"))
    tokenizer = load_tokenizer("tiny")
    a, b, c = (tokenizer.convert_tokens_to_ids(x) for x in "abc")

    def allowed(outputs: list[int]) -> set[str]:
        assert found.allow(outputs) is None
        bits = np.unpackbits(found.words.view(np.uint8), count=3072, bitorder="little")
        return {tokenizer.decode([i]) for i in np.flatnonzero(bits)}

    first = allowed([])
    assert {"a", "b"} <= first
    assert "c" not in first
    assert allowed([a]) == {"c"}
    assert allowed([a, c]) == {"<|im_end|>", "<|endoftext|>"}
    assert allowed([a]) == {"c"}
    assert allowed([]) == first
    assert allowed([a, c]) == {"<|im_end|>", "<|endoftext|>"}
    assert allowed([b, c]) == {"<|im_end|>", "<|endoftext|>"}, "as long, and another"


def test_another_answer_of_the_same_length_begins_again(vocabulary: Vocabulary) -> None:
    found = vocabulary.matcher(StructuredOutputs(regex="ac|bd"))
    tokenizer = load_tokenizer("tiny")
    a, b = (tokenizer.convert_tokens_to_ids(x) for x in "ab")
    for first, second in ((a, "c"), (b, "d"), (a, "c")):
        assert found.allow([first]) is None
        bits = np.unpackbits(found.words.view(np.uint8), count=3072, bitorder="little")
        assert {tokenizer.decode([i]) for i in np.flatnonzero(bits)} == {second}


def test_a_token_that_the_grammar_forbids_breaks_the_matcher(vocabulary: Vocabulary) -> None:
    found = vocabulary.matcher(StructuredOutputs(regex="[ab]c"))
    assert "no further token" in str(found.allow([500]))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"json": {"type": "foo"}}, r"structured_outputs\.json: Invalid type: foo"),
        (
            {"json": {"properties": {"a": {"items": {"type": "foo"}}}, "type": "object"}},
            r"json at /properties/a/items: Invalid type: foo",
        ),
        (
            {
                "json": {
                    "$defs": {"x": {"items": {"pattern": "(?=a)", "type": "string"}}},
                    "properties": {"p/q": {"$ref": "#/$defs/x"}},
                    "type": "object",
                }
            },
            r"json at /\$defs/x/items: regex parse error",
        ),
        ({"json": "false"}, r"structured_outputs\.json"),
        (
            {"json": {"properties": {"a": True, "b": {"type": "foo"}}, "type": "object"}},
            r"json at /properties/b: Invalid type: foo",
        ),
        (
            {"json": {"anyOf": [True, 5], "type": "object"}},
            r"structured_outputs\.json at /anyOf/1: 5 must be a schema",
        ),
        (
            {
                "json": {
                    "properties": {"a": True, "b": {"$ref": "#/properties/a"}, "c": {"type": "x"}}
                }
            },
            r"json at /properties/c: Invalid type: x",
        ),
        ({"json": {"items": [True, {"type": "foo"}]}}, r"json at /items/1: Invalid type: foo"),
        (
            {"json": {"properties": {"a/b~c": {"type": "x"}}}},
            r"json at /properties/a~1b~0c: Invalid type: x",
        ),
        (
            {"json": {"properties": {"a": {"$ref": "#/$defs/none"}}}},
            r"json at /properties/a: Pointer '/\$defs/none' does not exist",
        ),
        (
            {
                "json": {
                    "$defs": {"a b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a%20b"}},
                    "properties": {"p": {"$ref": "#/$defs/c"}},
                }
            },
            r"json at /\$defs/c: \$ref '#/\$defs/a%20b' leads back to itself",
        ),
        ({"json": {"$ref": "#"}}, r"structured_outputs\.json: \$ref '#' leads back to itself"),
        (
            {"grammar": 'start: "a" foo\nfoo: %json {"items": {"type": "foo"}}'},
            r"structured_outputs\.grammar in foo at /items: Invalid type: foo",
        ),
        (
            {"grammar": 'start: "a"\nfoo: %json {"minimum": 1' + "0" * 400 + "}"},
            r"structured_outputs\.grammar in foo: number out of range",
        ),
        ({"grammar": 'start: "q" a\na: a "x"'}, "no answer can begin: nothing is of it"),
        ({"grammar": 'start: "q" a\na: "x" a'}, "no answer can begin: .*Too many items"),
        ({"regex": r"[^\s\S]"}, "regex: no answer can begin: nothing is of it"),
        (
            {"json": {"properties": {f"p{i}": True for i in range(600)}, "type": "object"}},
            "no answer can begin: .*row has",
        ),
        ({"regex": "(abc"}, r"structured_outputs\.regex: .*unclosed group"),
        ({"grammar": "start: foo"}, r"structured_outputs\.grammar: at 1\(8\): unknown name"),
        ({"regex": "a" * (MOST_GRAMMAR_CHARS + 1)}, "at most 32768 are allowed"),
        (
            {
                "json": {
                    "allOf": [{"type": "string", "pattern": f"a{{{i},}}.*b{i}"} for i in range(30)]
                }
            },
            "takes more than 2 s of CPU time",
        ),
    ],
)
def test_what_is_refused_says_where(in_thread: QLLMEngine, what: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.compile(says, re.DOTALL)):
        in_thread.submit("x", sampling=form(**what))


@pytest.mark.parametrize(
    "what",
    [
        {"grammar": 'start: "yes"'},
        {"grammar": 'start: ""'},
        {"grammar": 'start: "a" <|im_end|>'},
        {"grammar": 'start: "a" <[5]>'},
        {"grammar": 'start: "a" %json {"type": "null"}'},
        {"json": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}},
        {"json": {"properties": {"next": {"$ref": "#"}}}},
        {"json": {"properties": {"a": True, "b": {"$ref": "#/properties/a"}}}},
        {"json": {"const": "x" * 30_000}},
        {"choice": ["only"]},
    ],
)
def test_what_an_answer_can_be_of_is_taken(in_thread: QLLMEngine, what: dict[str, Any]) -> None:
    in_thread.vocabulary.check(StructuredOutputs(**what))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({}, "names nothing; give exactly one of"),
        ({"json": {}, "regex": "a"}, "names json, regex; give exactly one"),
        ({"json": "{"}, "is no JSON"),
        ({"json": 5}, "must be a JSON schema"),
        ({"choice": []}, "non-empty strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"regex": ""}, "non-empty string"),
        ({"regex": 5}, "non-empty string"),
        ({"regex": "\ud800"}, "surrogate"),
    ],
)
def test_wrong_values_are_refused(what: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        StructuredOutputs(**what)


@pytest.mark.parametrize(
    "names",
    [
        ("structured_outputs", "allowed_token_ids"),
        ("structured_outputs", "bad_words"),
        ("allowed_token_ids", "bad_words"),
    ],
)
def test_limits_that_may_leave_no_token_are_refused(names: tuple[str, str]) -> None:
    limits: dict[str, Any] = {
        "structured_outputs": StructuredOutputs(regex="a"),
        "allowed_token_ids": [5],
        "bad_words": ["a"],
    }
    with pytest.raises(InvalidRequestError, match=f"{names[0]} and {names[1]} together"):
        SamplingParams(**{name: limits[name] for name in names})


def test_a_refused_grammar_of_one_front_end_harms_no_other(
    in_thread: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end that checks nothing: the in_thread says it, and goes on."""
    monkeypatch.setattr("qllm.frontend.prompts.check_limits", lambda *_: None)
    other = in_thread.submit("y", max_tokens=8, sampling=SamplingParams(temperature=0))
    bad = in_thread.submit("x", sampling=form(regex="(abc"))
    with pytest.raises(Exception, match="unclosed group"):
        bad.result(300)
    assert len(other.result(300).token_ids) == 8


def test_building_a_grammar_does_not_hold_the_loop(
    in_thread: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is built, others run, and the one that waits can be cancelled."""
    monkeypatch.setattr("qllm.frontend.prompts.check_limits", lambda *_: None)
    go_on, build = threading.Event(), Vocabulary.matcher

    def slow(self: Vocabulary, asked: StructuredOutputs) -> Any:
        go_on.wait(60)
        return build(self, asked)

    monkeypatch.setattr(Vocabulary, "matcher", slow)
    try:
        held = in_thread.submit("x", sampling=form(choice=["red"]))
        gone = in_thread.submit("x", sampling=form(choice=["red"]))
        assert len(in_thread.submit("y", max_tokens=3).result(300).token_ids) == 3
        gone.cancel()
        assert gone.result(300).finish_reason is FinishReason.CANCELLED
        assert held.finish_reason is None
    finally:
        go_on.set()
    assert held.result(300).text == "red"


def test_an_engine_that_is_closed_ends_what_waits_for_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qllm.frontend.prompts.check_limits", lambda *_: None)
    go_on = threading.Event()
    monkeypatch.setattr(Vocabulary, "matcher", lambda *_: go_on.wait(60))
    try:
        engine = QLLMEngine.from_pretrained("tiny", threads=1, run_in="thread", conformance=False)
        held = engine.submit("x", sampling=form(choice=["red"]))
        engine.close()
        assert held.result(300).finish_reason is FinishReason.CANCELLED
    finally:
        go_on.set()


WORDS = "([a-z]{1,6} ){30,90}"


@pytest.mark.parametrize("source", ["process", "thread"])
def test_a_checkpoint_keeps_the_state(in_thread: QLLMEngine, tmp_path: Path, source: str) -> None:
    keywords: dict[str, Any] = {"max_tokens": 90, "sampling": form(regex=WORDS)}
    want = in_thread.submit("abc", "BE", **keywords).result(300)
    assert re.match("([a-z]{1,6} ){10,}", want.text)
    with QLLMEngine.from_pretrained("tiny", threads=1, run_in=source, conformance=False) as other:
        handle = other.submit("abc", "BE", **keywords)
        next(iter(handle))
        assert other.checkpoint(tmp_path / "file") == 1
        handle.cancel()
    (restored,) = in_thread.restore(tmp_path / "file")
    assert restored.result(300).token_ids == want.token_ids


@pytest.mark.parametrize("room", [0, 512])
def test_a_request_that_loses_its_kv_keeps_its_state(room: int) -> None:
    """Evicted, or swapped out."""
    settings: dict[str, Any] = {"max_kv_tokens": 256, "conformance": False, "threads": 1}
    settings["swap_kv_tokens"] = room
    settings["exactness"] = "batch-invariant"
    keywords: dict[str, Any] = {"max_tokens": 150, "sampling": form(regex=WORDS)}
    with QLLMEngine.from_pretrained("tiny", run_in="thread", **settings) as engine:
        want = engine.submit("abc", "BE", **keywords).result(300)
        handle = engine.submit("abc", "BE", **keywords)
        next(iter(handle))
        handle.update(paused=True)  # it cannot end before its KV is taken
        forever = SamplingParams(ignore_eos=True)
        engine.submit([5] * 190, "LS", max_tokens=66, sampling=forever).result(300)
        handle.update(paused=False)
        found = handle.result(300)
        assert found.metrics.evictions >= (room == 0)
        assert (engine.stats()["swap"]["out_tokens"] > 0) is (room > 0)
        assert found.token_ids == want.token_ids


def test_a_request_that_is_parked_keeps_its_state() -> None:
    """A long prompt with a form stops for requests that arrive and have a form too."""
    settings: dict[str, Any] = {"max_kv_tokens": 8192, "conformance": False, "threads": 1}
    settings["exactness"] = "batch-invariant"
    prompt, sampling = [7] * 2000, form(regex=WORDS)
    with QLLMEngine.from_pretrained("tiny", run_in="thread", prefix_cache=False, **settings) as e:
        want = e.submit(prompt, "BE", 40, sampling=sampling).result(300).token_ids
        for _ in range(20):
            handle = e.submit(prompt, "BE", 40, sampling=sampling)
            while handle.finish_reason is None:
                e.submit("x", "LS", 4, sampling=form(choice=["red", "green"])).result(300)
            found = handle.result(300)
            assert found.token_ids == want
            if found.metrics.preemptions:
                return
    pytest.fail("nothing was ever parked")


def test_min_tokens_hold_back_the_end(in_thread: QLLMEngine) -> None:
    favoured = {2: 100.0}
    short = SamplingParams(temperature=0, logit_bias=favoured)
    assert in_thread.submit("x", sampling=short).result(300).token_ids == (2,)
    longer = SamplingParams(temperature=0, logit_bias=favoured, min_tokens=5)
    result = in_thread.submit("x", sampling=longer).result(300)
    assert len(result.token_ids) == 6
    assert result.token_ids[-1] == 2
    form = StructuredOutputs(regex="[a-z]{1,40}")
    held = replace(longer, structured_outputs=form)
    assert (
        len(in_thread.submit("x", sampling=replace(held, min_tokens=0)).result(300).token_ids) == 2
    )
    assert len(in_thread.submit("x", sampling=held).result(300).token_ids) == 6
    only = SamplingParams(temperature=0, allowed_token_ids=[2], min_tokens=5)
    assert in_thread.submit("x", sampling=only).result(300).token_ids == (2,)
    with pytest.raises(
        InvalidRequestError, match="min_tokens=5 must be at most max_tokens, here 4"
    ):
        in_thread.submit("x", max_tokens=4, sampling=longer)


def test_allowed_ids_and_bad_words(in_thread: QLLMEngine) -> None:
    three = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=[40, 50, 60])
    assert set(in_thread.submit("x", max_tokens=30, sampling=three).result(300).token_ids) == {
        40,
        50,
        60,
    }
    plain = SamplingParams(temperature=0, ignore_eos=True)
    text = in_thread.submit("def f(", max_tokens=24, sampling=plain).result(300).text
    word = max(re.findall("[a-z]+", text), key=len)
    without = SamplingParams(temperature=0, ignore_eos=True, bad_words=[word])
    found = in_thread.submit("def f(", max_tokens=24, sampling=without).result(300)
    ids = in_thread.tokenizer(word, add_special_tokens=False)["input_ids"]
    spaced = in_thread.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    for bad in (ids, spaced):
        runs = [list(found.token_ids[i : i + len(bad)]) for i in range(len(found.token_ids))]
        assert bad not in runs
    assert found.text != text


def test_without_its_library_a_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine with the GPU has no llguidance: everything else runs there."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="need the package llguidance"):
        Vocabulary(None, 10, frozenset({1})).check(StructuredOutputs(regex="a"))


def test_a_tokenizer_with_more_tokens_than_logits_has_no_forms() -> None:
    """Such a model answers all the same: a GGUF file may hold a tokenizer that adds a token."""
    tokenizer = load_tokenizer("tiny")
    small = Vocabulary(tokenizer, len(tokenizer) - 1, frozenset({1}))
    small.prepare()
    with pytest.raises(InvalidRequestError, match=rf"has {len(tokenizer)} tokens for .* logits"):
        small.check(StructuredOutputs(regex="a"))
    Vocabulary(tokenizer, len(tokenizer), frozenset({1})).check(StructuredOutputs(regex="a"))
