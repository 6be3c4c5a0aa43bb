"""A forced call is written in the model's own markup, and the markup's own reader reads it.

No engine: a model that chooses each token at random among those that the grammar allows.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qllm.frontend.prompts import render_chat
from qllm.grammar_schema import LARK
from qllm.server.http.errors import ApiError
from qllm.server.tools.formats import FORMATS
from qllm.server.tools.tool_choice import Choice
from tests.support.chat_templates import TEMPLATES, with_template
from tests.support.forced import BOUNDS, Model
from tests.support.tool_schemas import tools

TEMPLATE_OF = {
    "hermes": "hermes", "qwen-xml": "qwen xml", "glm": "glm 4.5", "glm-compact": "glm 4.7",
    "minimax": "minimax m2", "deepseek-v3": "deepseek v3", "deepseek-v3.1": "deepseek v3.1",
    "kimi-k2": "kimi k2", "gemma": "gemma 4", "llama3": "llama 3",
}  # fmt: skip
"""Chat templates by format. GPT-OSS's shows earlier calls in another form than a new one has."""
MODELS = [(name, yes) for name in FORMATS for yes in (True, False) if yes or name != "harmony"]
"""Formats, and whether their tags are tokens; without tokens Harmony cannot be read."""
FEW = settings(max_examples=5, deadline=None, phases=set(Phase) - {Phase.explain})
STRING = {"type": "string"}
ASKED = {"role": "user", "content": "Hi."}


@pytest.fixture(autouse=True, scope="module")
def _short_formats() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qllm.grammar_schema.MOST_OF_FORMAT", 36)
        yield


@cache
def model(name: str, has_tokens: bool) -> Model:
    return Model(FORMATS[name], has_tokens=has_tokens)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "has_tokens"), MODELS)
@FEW
@given(tools=tools(), seed=st.integers(0, 99), parallel=st.booleans())
def test_the_own_reader_reads_calls_that_fit_their_schemas(
    name: str, has_tokens: bool, tools: list[Any], seed: int, parallel: bool
) -> None:
    made, choice = model(name, has_tokens), Choice(tools, True, parallel)
    said = made.answer(choice, seed)
    found = made.read(choice, said)
    assert found.keys() == {"tool_calls"}, made.vocabulary.decode(said)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert 1 <= len(found["tool_calls"]) <= (8 if parallel else 1)
    for call in found["tool_calls"]:
        value = json.loads(call["function"]["arguments"])
        jsonschema_rs.validate(schemas[call["function"]["name"]], value)
    assert made.read(choice, said, 7) == found


def written_by_template(name: str, calls: list[Any]) -> str:
    """The text that the family's chat template makes of calls."""
    tokenizer, form = with_template(TEMPLATES[TEMPLATE_OF[name]]), FORMATS[name]
    said = [
        {"id": f"functions.{call['function']['name']}:{n}", "type": "function", **call}
        for n, call in enumerate(calls)
    ]
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": said}]
    text = str(tokenizer.decode(render_chat(messages, tokenizer, add_generation_prompt=False)))
    begin, end = form.sections[0] if form.sections else (form.calls[0], form.calls[0])
    first = re.split(r"\$\w+", begin)[0] or '{"name"'
    last = re.split(r"\$\w+", end)[-1] or "}"
    return text[text.index(first, len(ASKED["content"])) : text.rindex(last) + len(last)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", TEMPLATE_OF)
@FEW
@given(tools=tools(), seed=st.integers(0, 99), parallel=st.booleans())
def test_the_chat_template_writes_the_same_call(
    name: str, has_tokens: bool, tools: list[Any], seed: int, parallel: bool
) -> None:
    made = model(name, has_tokens)
    choice = Choice(tools, True, parallel and name != "llama3")
    calls = made.read(choice, made.answer(choice, seed))["tool_calls"]
    text = written_by_template(name, calls)
    again = made.ids(text)
    assert made.takes(choice, again), text
    for one, other in zip(calls, made.read(choice, again)["tool_calls"], strict=True):
        assert one["function"]["name"] == other["function"]["name"]
        assert values(one) == values(other), text


def values(call: Any) -> Any:
    return json.loads(call["function"]["arguments"])


IN_JSON = [name for name, form in FORMATS.items() if not form.argument and form.notation.escapes]
AS_TEXT = [name for name in FORMATS if name not in IN_JSON]


def tool(name: str = "f", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", AS_TEXT)
@pytest.mark.parametrize("wish", ["ab", "\n <", "a\n</"])
def test_raw_text_comes_to_an_end(name: str, has_tokens: bool, wish: str) -> None:
    """The model never wants to end it."""
    made = model(name, has_tokens)
    choice = Choice([tool(a=STRING, b={**STRING, "minLength": 3})], True, False)
    said = made.answer(choice, 1, lambda text: bool(text) and set(text) <= set(wish))
    (call,) = made.read(choice, said)["tool_calls"]
    most = BOUNDS.text + 3 * len("</parameter>")  # a tag that it has begun to spell is text
    assert max(map(len, values(call).values())) <= most


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", ["qwen-xml", "glm", "gemma"])
def test_a_text_that_begins_with_a_bracket_is_no_list(name: str, has_tokens: bool) -> None:
    """Its end does not begin another text, and all texts have a bound."""
    made = model(name, has_tokens)
    choice = Choice([tool(a={"enum": ["[1]"]}, b=STRING)], True, False)
    said = made.answer(choice, 1, lambda text: bool(text) and set(text) <= set("[ab"))
    (call,) = made.read(choice, said)["tool_calls"]
    assert values(call)["a"] == "[1]"
    assert 1 <= len(values(call)["b"]) <= BOUNDS.text + 3 * len("</parameter>")


QWEN_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (STRING, "x < y", ["x <parameter=b>y", "x</function> y"]),
        ({"anyOf": [STRING, {"type": "integer", "maximum": 5}]}, "x", ["12", "[1]", '"x"']),
        ({"anyOf": [STRING, {"type": "boolean", "const": True}]}, "True", ["true", "False"]),
        ({"anyOf": [STRING, {"$ref": "#/properties/none"}]}, "None", ["null", "True"]),
    ],
)
def test_raw_text_has_no_tag_and_looks_like_no_other_value(
    schema: Any, allowed: str, forbidden: list[str], has_tokens: bool
) -> None:
    asked = tool(a=schema)
    asked["function"]["parameters"]["properties"]["none"] = {"type": "null"}
    made, choice = model("qwen-xml", has_tokens), Choice([asked], True, False)
    assert made.takes(choice, made.ids(QWEN_CALL.format(allowed)))
    assert [x for x in forbidden if made.takes(choice, made.ids(QWEN_CALL.format(x)))] == []


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "gemma", "kimi-k2"])
def test_without_parallel_calls_a_second_call_is_not_allowed(name: str) -> None:
    made = model(name, True)
    both = Choice([tool(a={"type": "boolean"})], True, True)
    for seed in range(30):
        said = made.answer(both, seed)
        if len(made.read(both, said)["tool_calls"]) > 1:
            assert made.takes(both, said)
            assert not made.takes(both._replace(parallel=False), said)
            return
    pytest.fail("the model never made two calls")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["llama4", "qwen-xml", "gemma"])
def test_a_literal_that_the_schema_leaves_out_is_not_written(name: str, value: bool) -> None:
    choice = Choice([tool(a={"type": "boolean", "enum": [value]})], True, False)
    for seed in range(6):
        (call,) = model(name, True).read(choice, model(name, True).answer(choice, seed))[
            "tool_calls"
        ]
        assert values(call) == {"a": value}


PATCH = """start: "*** Begin" LF line+ "*** End" LF?
line: /[-+]/ /[a-z ]{1,9}/ LF -> change
%import common.LF"""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "has_tokens"), MODELS)
def test_a_grammar_in_lark_holds_an_input_that_is_raw_text(name: str, has_tokens: bool) -> None:
    made = model(name, has_tokens)
    choice = Choice([tool("patch", input={"type": "string", LARK: PATCH})], True, False)
    if name in IN_JSON:
        with pytest.raises(ApiError, match=r"'lark'.*inside JSON.*use syntax 'regex'"):
            made.answer(choice, 1)
        return
    for seed in range(5):
        (call,) = made.read(choice, made.answer(choice, seed))["tool_calls"]
        text = values(call)["input"]
        assert re.fullmatch(r"\*\*\* Begin\n([-+][a-z ]{1,9}\n)+\*\*\* End\n?", text), text


HELD_BY_NO_TEXT: dict[str, tuple[Any, str]] = {
    "one of two strings": (tool(a={"oneOf": [STRING, STRING]}), "oneOf has several"),
    "not": (tool(a={**STRING, "not": {"const": "x"}}), "raw text cannot follow 'not'"),
    "alternatives": (tool(a={**STRING, "pattern": "^a|b$"}), "needs brackets around its alternat"),
    "all of strings and others": (
        tool(a={"allOf": [{"type": ["string", "null"]}]}), "it allows strings and",
    ),
    "a key with a tag": (tool(**{"a>b": STRING}), "'a>b' has characters of the markup"),
    "all of the arguments": (
        {"type": "function", "function": {"name": "f", "parameters": {"allOf": [{}]}}},
        "'allOf' of an object is not known there",
    ),
    "a reference to nothing": (tool(a={"$ref": "#/$defs/x"}), "points to nothing"),
}  # fmt: skip


@pytest.mark.parametrize("why", HELD_BY_NO_TEXT)
@pytest.mark.parametrize("name", ["qwen-xml", "glm", "minimax", "deepseek-v3.2", "gemma"])
def test_what_a_markup_cannot_hold_is_refused(name: str, why: str) -> None:
    wrong, says = HELD_BY_NO_TEXT[why]
    with pytest.raises(ApiError, match=says.replace("(", r"\(")) as found:
        model(name, True).form_of(Choice([wrong], True, True))
    assert (found.value.status_code, found.value.param) == (400, "tools")
    assert f"({name})" in found.value.message


@pytest.mark.parametrize("name", FORMATS)
def test_a_tag_that_is_a_token_is_forced_as_the_token(name: str) -> None:
    made, choice = model(name, True), Choice([tool(a=STRING)], True, True)
    said = made.answer(choice, 3)
    for tag, token_id in made.tokens.items():
        text = made.vocabulary.decode([i for i in said if i != token_id])
        assert tag not in text, "it is spelled by other tokens"
    written = " ".join((made.form.calls[0], *(x for pair in made.form.sections[:1] for x in pair)))
    assert set(said) & set(made.tokens.values()) or not any(tag in written for tag in made.tokens)
