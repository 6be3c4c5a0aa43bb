"""What a JSON schema leaves open has an end, and what says nothing is no reason to refuse."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from qllm.grammar_check import JSON_OPTIONS
from qllm.grammar_schema import ANNOTATIONS, bounded, closed
from qllm.models.tokenizer import load_tokenizer
from qllm.server.api.messages_protocol import MessagesRequest
from qllm.server.api.protocol import ChatRequest
from qllm.server.api.responses_protocol import ResponsesRequest
from qllm.server.http.errors import parse
from tests.support.serving import Serving

BIG = 10**15
TURN = {"role": "user", "content": "a"}


def takes(schema: Any, text: str) -> bool:
    """Whether a grammar of a schema takes a text as a whole answer."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS)
    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def places(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield a schema at every place where one can stand."""
    yield schema
    yield {"type": "object", "properties": {"title": schema}, "required": ["title"]}
    yield {"type": "array", "items": schema}
    for name in ("anyOf", "oneOf", "allOf"):
        yield {name: [schema]}
    yield {"$ref": "#/$defs/description", "$defs": {"description": schema}}
    yield {"type": "object", "additionalProperties": schema}


def value_at(schema: Any, text: str) -> str:
    """A value of a schema of `places` that holds `text` where the inner schema stands."""
    if schema.get("type") == "array":
        return f"[{text}]"
    return f'{{"title": {text}}}' if schema.get("type") == "object" else text


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ({}, (BIG - 1, 1 - BIG, 0), (10 * BIG, -10 * BIG)),
        ({"minimum": 5}, (5, BIG), (4, 10**18)),
        ({"maximum": -5}, (-5, -BIG), (-4, -(10**18))),
        ({"minimum": 0, "maximum": 10**17}, (10**17, 10**16), (10**18,)),
        ({"exclusiveMinimum": 0}, (1, BIG - 1), (0, 10**18)),
    ],
)
def test_an_integer_ends_unless_its_schema_says_otherwise(
    limits: Any, inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    for schema in places({"type": "integer", **limits}):
        made = bounded(schema)
        assert all(takes(made, value_at(schema, str(x))) for x in inside), schema
        assert not any(takes(made, value_at(schema, str(x))) for x in outside), schema


def test_what_says_nothing_is_left_out_everywhere_but_where_it_is_a_name() -> None:
    said = {name: "x" * 40_000 for name in ANNOTATIONS} | {"format": "of ours"}
    for schema in places({"type": "string", **said}):
        made = bounded(schema)
        assert len(json.dumps(made)) < 200
        assert takes(made, value_at(schema, '"a"'))
    assert bounded({"enum": [{"title": 1}], "const": {"title": 1}})["const"] == {"title": 1}
    assert not takes(bounded({"type": "string", "format": "date"}), '"a"')


def test_a_strict_schema_has_no_other_properties() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "null"}}}
    for schema in places(inner):
        made = closed(schema)
        more = value_at(schema, '{"b": 1}')
        assert takes(schema, more), "an open schema takes what it does not name"
        assert takes(made, more) is ("allOf" in schema)
    said = {**inner, "additionalProperties": {"type": "integer"}}
    assert closed(said) == said


def test_strict_is_read_on_every_route() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    named = {"name": "f", "schema": schema}
    tool = {"name": "f", "parameters": schema}
    chat, turn = {"messages": [TURN]}, {"model": "tiny", "max_tokens": 9, "messages": [TURN]}
    form = {"type": "json_schema", "json_schema": {**named, "strict": True}}
    force = {"type": "function", "name": "f"}
    asked = [
        parse(ChatRequest, {**chat, "response_format": form}),
        parse(ChatRequest, {**chat, "tool_choice": "required", "tools": [
            {"type": "function", "function": {**tool, "strict": True}}]}),
        parse(ResponsesRequest, {"input": "a", "text": {
            "format": {"type": "json_schema", **named, "strict": True}}}).chat([]),
        parse(ResponsesRequest, {"input": "a", "tool_choice": force, "tools": [
            {"type": "function", **tool, "strict": True}]}).chat([]),
        parse(MessagesRequest, {**turn, "output_config": {
            "format": {"type": "json_schema", "schema": schema}}}).chat(),
        parse(MessagesRequest, {**turn, "tool_choice": {"type": "any"}, "tools": [
            {"name": "f", "input_schema": schema, "strict": True}]}).chat(),
    ]  # fmt: skip
    for one in asked:
        made = one.calls_form("auto")
        form = one.form() if made is None else made(load_tokenizer("tiny"))
        assert '"additionalProperties": false' in form.text()


def test_a_served_form_is_bounded(served: Serving) -> None:
    """Annotations are no reason to refuse, and an answer that does not end is cut as `length`."""
    schema = {"type": "integer", "description": "x" * 40_000, "format": "of ours"}
    body = {"messages": [TURN], "logit_bias": {}, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    whole = served.post("/v1/chat/completions", {**body, "response_format": form}).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert abs(int(whole["choices"][0]["message"]["content"])) < BIG
    schema = {"type": "string", "minLength": 50}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    cut = served.post(
        "/v1/chat/completions", {**body, "response_format": form, "max_tokens": 5}
    ).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"].startswith('"')
