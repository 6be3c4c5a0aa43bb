"""Whatever a schema leaves open has an end: a model that never wants to end comes to it."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from qllm.grammar import Vocabulary
from qllm.grammar_bounds import Bounds
from qllm.models.tokenizer import load_tokenizer
from qllm.server.tools.forced import grammar
from qllm.server.tools.formats import HERMES
from qllm.server.tools.tool_choice import Choice
from qllm.types import StructuredOutputs

SIZE = 3072
SMALL = Bounds(text=12, items=4, others=2, depth=3, digits=(5, 4, 2))
LONGEST = 3000
"""Tokens: more than any answer of `SMALL` has here."""
ITEM = {"$ref": "#/$defs/item"}

OPEN: dict[str, Any] = {
    "anything": {},
    "string": {"type": "string"},
    "pattern": {"type": "string", "pattern": "^(ab|c)*$"},
    "format": {"type": "string", "format": "uri"},
    "minLength": {"type": "string", "minLength": 15},
    "number": {"type": "number"},
    "minimum": {"type": "number", "minimum": 0.5},
    "maximum": {"type": "number", "exclusiveMaximum": -3},
    "multipleOf": {"type": "number", "multipleOf": 0.25},
    "sevens": {"type": "number", "multipleOf": 7}, "halves": {"multipleOf": 0.5},
    "multiples": {"type": "integer", "multipleOf": 3},
    "integer": {"type": ["integer", "null"]},
    "list": {"type": "array"},
    "items": {"type": "array", "items": {"type": "number"}, "minItems": 6},
    "prefixItems": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}]},
    "object": {"type": "object"},
    "properties": {"properties": {"a": {"type": "null"}, "b": {}}, "required": ["a"]},
    "additional": {"type": "object", "additionalProperties": {"type": "string"}},
    "patterns": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    "minProperties": {"type": "object", "minProperties": 5},
    "anyOf": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"enum": ["a", 10]}}]},
    "allOf": {"allOf": [{"minLength": 1}, {"type": ["string", "object"]}]},
    "itself": {"type": "object", "properties": {"next": ITEM, "v": {"type": "integer"}},
               "additionalProperties": False},
    "items of itself": {"type": "object", "properties": {"all": {"type": "array", "items": ITEM}},
                        "required": ["all"]},
    "or itself": {"anyOf": [{"type": "array", "items": ITEM, "minItems": 1}, {"type": "null"}]},
}  # fmt: skip
"""Schemas that leave an end open, by what of them does."""


OVER = {"pattern": 1, "format": 18}
"""Characters that a string has more where its schema lets it not end before."""


def places(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema as it is, as a member, as an item, and referred to."""
    defs = {"$defs": {"item": schema}}
    yield {**schema, **defs}
    yield {"type": "object", "properties": {"m": ITEM, "n": ITEM}, "required": ["m"], **defs}
    yield {"type": "array", "items": ITEM, **defs}
    yield {"anyOf": [ITEM, {"type": "boolean"}], **defs}


def prefers(characters: str) -> Callable[[str], bool]:
    return lambda text: bool(text) and all(character in characters for character in text)


WISHES = {
    "digits": prefers("0123456789"), "a point or a power": prefers(".eE+-123"),
    "commas": prefers(', "1'), "lists": prefers("[ "), "objects": prefers('{ "a:'),
    "members": prefers('{ "next:'),
    "text": prefers("abcxyz :/"), "white space": prefers("\n "), "escapes": prefers("\\nuf0"),
    "long tokens": lambda text: len(text) > 3, "anything": lambda text: True,
}  # fmt: skip
"""What a model likes that never wants to end."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    made = Vocabulary(load_tokenizer("tiny"), SIZE, frozenset({2, 0}))
    made.bounds = SMALL
    return made


@pytest.fixture(autouse=True)
def _short_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qllm.grammar_schema.MOST_OF_FORMAT", 30)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    tokenizer = load_tokenizer("tiny")
    return [tokenizer.decode([i]) for i in range(len(tokenizer))]


def answer(
    vocabulary: Vocabulary,
    texts: list[str],
    form: StructuredOutputs,
    wish: str,
    most: int = LONGEST,
) -> str | None:
    """The whole answer of a model that goes on as it likes; None if it has no end in sight."""
    matcher, rng, said = vocabulary.matcher(form), random.Random(wish), list[int]()
    liked = np.zeros(SIZE, np.bool_)
    liked[: len(texts)] = [WISHES[wish](text) for text in texts]
    while len(said) < most:
        assert matcher.allow(said) is None
        may_come = np.unpackbits(matcher.words.view(np.uint8), count=SIZE, bitorder="little")
        may_come[list(vocabulary.eos_token_ids)] = 0
        wanted = np.flatnonzero(may_come & liked)
        going_on = wanted if wanted.size else np.flatnonzero(may_come)
        if not going_on.size:
            return vocabulary.decode(said)
        said.append(int(rng.choice(going_on)))
    return None


def is_in_schema(text: str, schema: Any) -> bool:
    """Whether an answer is of a schema; a grammar does not see that a key is said twice."""
    is_twice = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_twice
        is_twice = is_twice or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=members)
    return is_twice or jsonschema_rs.is_valid(schema, value)


def parts(value: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value, its keys and all values inside it, each with its depth."""
    yield value, depth
    inner = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    for part in inner:
        yield from parts(part, depth + 1)


@pytest.mark.parametrize("name", OPEN)
def test_a_model_that_never_wants_to_end_comes_to_an_end(
    vocabulary: Vocabulary, texts: list[str], name: str
) -> None:
    whole, *others = places(OPEN[name])
    for schema in (whole, others[len(name) % len(others)]):
        bounds = SMALL.of([schema])
        for wish in WISHES:
            said = answer(vocabulary, texts, StructuredOutputs(json=schema), wish)
            assert said is not None, f"{wish} without end, {schema}"
            assert is_in_schema(said, schema), said
            for part, depth in parts(json.loads(said)):
                if isinstance(part, str):
                    assert len(part) <= bounds.text + OVER.get(name, 0), said
                elif isinstance(part, list | dict):
                    assert len(part) <= max(bounds.items, bounds.others)
                assert depth <= bounds.depth + 3, said


def test_a_call_that_is_forced_comes_to_an_end(vocabulary: Vocabulary, texts: list[str]) -> None:
    for name in ("anything", "string", "number", "items", "properties", "additional", "itself"):
        parameters = {"type": "object", "properties": {"x": ITEM}, "required": ["x"],
                      "$defs": {"item": OPEN[name]}}  # fmt: skip
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        form = StructuredOutputs(grammar=grammar(Choice([tool], True, False), HERMES, {}))
        for wish in WISHES:
            assert answer(vocabulary, texts, form, wish) is not None, (name, wish)


@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        ({"type": "string", "maxLength": 40}, '"' + "a" * 40 + '"'),
        ({"type": "string", "minLength": 30}, '"' + "a" * 30 + '"'),
        ({"allOf": [{"type": "string"}, {"maxLength": 40}]}, '"' + "a" * 40 + '"'),
        ({"enum": ["a" * 13, "a" * 30]}, '"' + "a" * 30 + '"'),
        ({"type": "string", "pattern": "^(abc){9}$"}, '"' + "abc" * 9 + '"'),
        ({"type": "number", "maximum": 10**9}, "999999999"),
        ({"enum": [1234567, 12345678]}, "12345678"),
        ({"type": "array", "maxItems": 7}, "[1,2,3,4,5,6,7]"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 6}, "[" + "null," * 5 + "null]"),
        ({"type": "object", "maxProperties": 6}, '{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}'),
        ({"properties": {key: {"type": "null"} for key in "abcdefg"}},
         "{" + ",".join(f'"{x}":null' for x in "abcdefg") + "}"),
        ({"type": "number"}, "-12345.1234e+12"),
        ({"type": "string"}, '"' + r"\u000f" * 12 + '"'),
        ({"type": "string"}, r'"\n\"é🎉"'),
    ],
)  # fmt: skip
def test_what_a_schema_names_or_allows_may_be_said(
    vocabulary: Vocabulary, schema: dict[str, Any], inside: str
) -> None:
    matcher = vocabulary.matcher(StructuredOutputs(json=schema))
    ids = vocabulary.encode(inside)
    for num, token_id in enumerate(ids):
        assert matcher.allow(ids[:num]) is None
        assert matcher.words[token_id // 32] >> token_id % 32 & 1, vocabulary.decode(ids[:num])
    assert matcher.allow(ids) is None
    assert any(matcher.words[i // 32] >> i % 32 & 1 for i in vocabulary.eos_token_ids)


def test_an_answer_that_begins_again_has_its_ends_again(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(StructuredOutputs(json={"type": "string"}))
    ids = vocabulary.encode('"' + "ab " * 20)
    assert matcher.allow(ids[:40]) is None
    few = matcher.words.copy()
    assert matcher.allow(ids[:2]) is None
    many = matcher.words.copy()
    assert matcher.allow(ids[:40]) is None
    assert np.array_equal(matcher.words, few)
    assert not np.array_equal(many, few)


def test_a_form_of_the_callers_own_has_no_other_ends(
    vocabulary: Vocabulary, texts: list[str]
) -> None:
    for form in (StructuredOutputs(regex="x[a-z]*"), StructuredOutputs(grammar="start: /x[a-z]*/")):
        assert answer(vocabulary, texts, form, "text", most=200) is None


def test_the_bounds_are_those_of_a_whole_file_and_of_a_number_that_programs_hold() -> None:
    assert Bounds().of([{"type": "string"}]) == Bounds(others=Bounds().items)
    assert Bounds().of([{"maxLength": 10}]).text == Bounds().text, "the grammar holds it to less"
    assert Bounds().of([{"properties": {"a": {}}}]).others == 33
