"""A schema of which no answer can end is refused, with the place; all like it are taken."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from qllm.grammar_check import JSON_OPTIONS, find

A: dict[str, Any] = {"$ref": "#/$defs/a"}
B: dict[str, Any] = {"$ref": "#/$defs/b"}
NULL: dict[str, Any] = {"type": "null"}
WHY = "every value of it holds another value of it, without end"


def item(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def items(*first: Any, **more: Any) -> dict[str, Any]:
    prefix = {"prefixItems": list(first)} if first else {}
    return {"type": "array", **prefix, **more}


def wrong_with(schema: dict[str, Any]) -> str | None:
    text = json.dumps(schema)
    return find(LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS), text)


ENDLESS = [
    item(next=A),
    item(b=B),
    items(items=A, minItems=1),
    items(NULL, A, minItems=2),
    items(NULL, items=A, minItems=2),
    item(next={"anyOf": [A, item(more=A)]}),
    {"allOf": [item(next=A)]},
    {**item(next=A), "type": ["object"]},
]
ENDING = [
    {**item(next=A), "required": []},
    item(next={"anyOf": [A, NULL]}),
    items(items=A),
    items(NULL, A, minItems=1),
    items(items=A, minItems=0),
    item(next={**items(items=A, minItems=1), "type": ["array", "null"]}),
    {"properties": {"next": A}, "required": ["next"]},
    item(other=True),
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_no_answer_of_it_would_end(schema: dict[str, Any]) -> None:
    whole = {**item(a=A), "$defs": {"a": schema, "b": item(a=A)}}
    assert wrong_with(whole) == f" at /$defs/a: {WHY}"
    inside = f'start: "x" foo\nfoo: %json {json.dumps(whole)}'
    assert find(inside, None) == f" in foo at /$defs/a: {WHY}"


@pytest.mark.parametrize("schema", ENDING)
def test_some_answer_of_it_ends(schema: dict[str, Any]) -> None:
    assert wrong_with({**item(a=A), "$defs": {"a": schema, "b": NULL}}) is None


def test_a_schema_that_leads_back_to_its_start() -> None:
    back = {"$ref": "#"}
    assert wrong_with(item(again=back)) == f": {WHY}"
    assert wrong_with({**item(again=back), "required": []}) is None


def test_what_is_refused_for_another_reason_is_not_looked_into() -> None:
    whole = {**item(a=A), "not": {}, "$defs": {"a": item(a=A)}}
    assert "Unimplemented" in str(wrong_with(whole))
