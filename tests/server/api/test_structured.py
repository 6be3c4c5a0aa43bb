"""Structured outputs over HTTP, as OpenAI's own client and vLLM's users ask for them."""

import json
import re
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from qllm.errors import DeadEndError
from qllm.types import StructuredOutputs
from tests.support.serving import Serving

CHAT = [{"role": "user", "content": "A person, please."}]
PATTERN = "[0-9]{3}-[a-c]"
DEAD_END = 'start: ("a" | "b") DEAD\nDEAD: /[^\\s\\S]/'
"""Nothing can come behind the first letter."""


class Person(BaseModel):
    name: str = Field(max_length=5)
    kind: Literal["cat", "dog"]


def chat(served: Serving, **more: Any) -> Any:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 150, "seed": 3, **more}
    return served.post("/v1/chat/completions", body)


def test_parse_of_the_openai_client(served: Serving) -> None:
    done = served.client().chat.completions.parse(
        model="tiny", messages=CHAT, response_format=Person, seed=1, max_tokens=150
    )
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(done.choices[0].message.parsed, Person)


def test_a_stream_of_the_openai_client(served: Serving) -> None:
    with served.client().chat.completions.stream(
        model="tiny", messages=CHAT, response_format=Person, seed=2, max_tokens=150
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_a_json_object(served: Serving) -> None:
    form = {"type": "json_object"}
    found = chat(served, response_format=form, max_tokens=600, temperature=0).json()["choices"][0]
    if found["finish_reason"] == "stop":
        assert isinstance(json.loads(found["message"]["content"]), dict)
    assert found["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": PATTERN}},
        {"guided_regex": PATTERN},
        {"guided_grammar": f"start: /{PATTERN}/"},
        {"guided_choice": ["123-a", "456-b"]},
        {"structured_outputs": {"choice": ["123-a", "456-b"]}},
        {"guided_json": {"enum": ["999-c"]}},
        {"structured_outputs": {"json": '{"const": "999-c"}'}},
    ],
)
def test_vllm_names(served: Serving, asked: dict[str, Any]) -> None:
    answer = chat(served, **asked)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(f'"?{PATTERN}"?', text)


def test_completions_have_them_too(served: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 20, "guided_regex": PATTERN}
    text = served.post("/v1/completions", body).json()["choices"][0]["text"]
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize(
    ("asked", "says", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"type": "array", "items": {"type": "foo"}}},
                        },
                    },
                }
            },
            "json at /properties/a/items: Invalid type: foo",
            None,
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "json_schema must be given",
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "'text', 'json_object' or 'json_schema'", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_schema.schema is missing",
            "response_format",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex are both given",
            "guided_regex",
        ),
        ({"guided_regex": "(a"}, "structured_outputs.regex", None),
        ({"guided_regex": "a", "ignore_eos": True}, "exclude each other", None),
        ({"structured_outputs": {}}, "names nothing", None),
        ({"guided_choice": []}, "non-empty", None),
    ],
)
def test_refusals(served: Serving, asked: dict[str, Any], says: str, param: str | None) -> None:
    answer = chat(served, **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_one_call_at_most_where_calls_are_not_parallel(served: Serving) -> None:
    """The form stands for a model that makes two calls though it may make none."""
    call = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    form = {"choice": [f"{call % 1}\n{call % 2}"]}
    tool = {"type": "function", "function": {"name": "f"}}
    for stream in (False, True):
        asked = {"structured_outputs": form, "tools": [tool], "stream": stream}
        both = calls_of(chat(served, **asked))
        assert both == ['{"x": 1}', '{"x": 2}']
        assert calls_of(chat(served, **asked, parallel_tool_calls=False)) == ['{"x": 1}']


def calls_of(answer: httpx.Response) -> list[str]:
    """The arguments of the calls in a body, or in the events of a stream."""
    lines = [x.removeprefix("data: ") for x in answer.text.split("\n\n")]
    bodies = [json.loads(x) for x in lines if x.startswith("{")]
    choices = [x for body in bodies for x in body["choices"]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    found: dict[int, str] = {}
    for choice in choices:
        said = choice.get("message") or choice["delta"]
        for n, part in enumerate(said.get("tool_calls", ())):
            index = part.get("index", n)
            found[index] = found.get(index, "") + part["function"]["arguments"]
    return [found[index] for index in sorted(found)]


def test_a_form_without_a_way_on_is_an_error_of_its_request_alone(served: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 8, "guided_grammar": DEAD_END}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "no_way_on"
    assert "its grammar allows no further token behind 1: it has no way on" in error["message"]
    assert error["message"].endswith("; change it")
    lines = served.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
    assert (last["error"]["type"], last["error"]["code"]) == ("invalid_request_error", "no_way_on")
    handle = served.front.engine.submit(
        "x", "LS", 8, structured_outputs=StructuredOutputs(grammar=DEAD_END)
    )
    with pytest.raises(DeadEndError, match="no further token behind 1"):
        handle.result(300)
    text = served.post("/v1/completions", {**body, "guided_grammar": f"start: /{PATTERN}/"}).json()
    assert re.fullmatch(PATTERN, text["choices"][0]["text"])
