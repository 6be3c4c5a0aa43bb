"""Fields and tools that are not served: ignored and told, or refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Required, get_args, get_origin, get_type_hints

import openai.types.responses as openai_types
import pytest
from pydantic import BaseModel

from qllm import QLLMEngine
from qllm.models.tokenizer import load_tokenizer
from qllm.server.api.messages_protocol import CountRequest, MessagesRequest
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.api.responses_protocol import InputTokensRequest, ResponsesRequest
from qllm.server.http.errors import ApiError, parse
from qllm.server.http.fields import Open
from qllm.server.http.foreign import Effect
from qllm.server.http.unknown import HEADER
from qllm.server.http.unknown import found as unserved
from tests.support.serving import Serving, serving

CODEX = json.loads((Path(__file__).parents[1] / "codex-request.json").read_text())[0]
TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"name": "f", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
MESSAGES: dict[str, Any] = {
    "model": "tiny", "max_tokens": 2, "tools": [TOOL, {"type": "web_search_20250305"}],
    "system": [TEXT], "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled"},
    "output_config": {"effort": "low"},
    "messages": [
        {"role": "user", "content": [
            TEXT, {"type": "document", "source": {"type": "text", "data": "d"}},
            {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]},
        ]},
        {"role": "assistant", "content": [
            {"type": "compaction", "content": "SO FAR"},
            {"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": "xx"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "2", "content": [
                {"type": "web_search_result", "title": "FOUND", "encrypted_content": "SECRET"}]},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
            {"type": "tool_reference", "tool_name": "REFERRED"}]}]},
    ],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "tiny", "max_output_tokens": 16, "store": False, "text": {}, "reasoning": {},
    "stream_options": {}, "tool_choice": "auto",
    "tools": [
        FUNCTION, {"type": "custom", "name": "patch"}, {"type": "web_search"},
        {"type": "namespace", "name": "space", "tools": [{**FUNCTION, "name": "g"}]},
    ],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "1", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "ok"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "PATCHED"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
        {"type": "local_shell_call", "call_id": "3", "action": {"command": ["LISTED"]}},
        {"type": "local_shell_call_output", "id": "3", "output": "SHELLED"},
        {"type": "mcp_list_tools", "tools": []},
    ],
}  # fmt: skip
TURN = {"role": "user", "content": "a"}
PREDICTION = {"type": "content", "content": [{"type": "text", "text": "x"}]}
CHAT = {
    "messages": [TURN], "max_tokens": 2, "stream_options": {}, "slo": {}, "prediction": PREDICTION,
}  # fmt: skip
ROUTES: list[tuple[str, type[Any], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", ChatRequest, CHAT),
    ("/v1/messages", MessagesRequest, MESSAGES),
    ("/v1/responses", ResponsesRequest, RESPONSES),
]
CHOICES = [
    {"tool_choice": {"type": "function", "name": "f"}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "f"}]}},
]  # fmt: skip
"""Fields of the other members of the union that `tool_choice` is."""


@pytest.fixture
def strict(engine: QLLMEngine) -> Iterator[Serving]:
    with serving(engine, strict_fields=True) as made:
        yield made


def reached(value: Any) -> Iterator[tuple[type[BaseModel], tuple[Any, ...]]]:
    """Yield each part of a read body that may have other fields, with the way to it."""

    def walk(x: Any, way: tuple[Any, ...]) -> Iterator[tuple[type[BaseModel], tuple[Any, ...]]]:
        if isinstance(x, list):
            for index, item in enumerate(x):
                yield from walk(item, (*way, index))
        elif isinstance(x, BaseModel):
            if isinstance(x, Open) and x.model_config.get("extra") == "allow":
                yield type(x), way
            for name in type(x).model_fields:
                yield from walk(getattr(x, name), (*way, name))

    return walk(value, ())


def kinds(base: type[Open] = Open) -> Iterator[type[Open]]:
    """Yield the kinds of parts that may have other fields and that a body can hold."""
    for kind in base.__subclasses__():
        yield from kinds(kind)
        is_abstract = kind.__subclasses__() or not kind.__module__.startswith("qllm.")
        if not is_abstract and kind.model_config.get("extra") == "allow":
            yield kind


def with_field(body: dict[str, Any], way: tuple[Any, ...], name: str, value: Any) -> Any:
    """A copy of a body with one field more."""
    made = json.loads(json.dumps(body))
    part = made
    for step in way:
        part = part[step]
    part[name] = value
    return made


def headers(served: Serving, path: str, body: Any) -> list[str]:
    """What an answer says was ignored."""
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    told = answer.headers.get(HEADER, "")
    return told.split(", ") if told else []


def test_the_examples_have_every_part_that_a_body_can_have() -> None:
    seen = {kind for _, model, body in ROUTES for kind, _ in reached(parse(model, body))}
    seen |= {
        kind for more in CHOICES for kind, _ in reached(parse(ResponsesRequest, RESPONSES | more))
    }
    assert {CountRequest, InputTokensRequest} | seen >= set(kinds())


@pytest.mark.parametrize(("path", "model", "body"), ROUTES)
def test_an_unknown_field_of_any_part_is_found(path: str, model: Any, body: Any) -> None:
    """Null and what is empty ask for nothing; another value has its place told."""
    usual = {one.name for one in parse(model, body).all_unserved}
    for kind, way in reached(parse(model, body)):
        for nothing in (None, [], {}, ""):
            asked = with_field(body, way, "zzz_new_hint", nothing)
            assert {one.name for one in parse(model, asked).all_unserved} == usual
        found = parse(model, with_field(body, way, "zzz_new_hint", {"a": 1})).all_unserved
        more = [one for one in found if one.name not in usual]
        if getattr(kind, "shows_all", False):
            assert not more  # the model reads it
            continue
        place = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in (*way, "zzz_new_hint"))
        told = [(one.place, one.effect) for one in more]
        assert told == [(place.removeprefix("."), Effect.CHANGES)]


def test_what_is_ignored_is_told_in_a_header_and_once_in_the_log(
    served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for _ in range(2):
        for path, _, body in ROUTES:
            asked = {**body, "zzz_new_hint": "x", "other_hint": None}
            assert "zzz_new_hint" in headers(served, path, asked), path
            assert "other_hint" not in headers(served, path, asked)
    said = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert sum("zzz_new_hint" in text for text in said) == 1
    strange = {**CHAT, "new\r\nx-evil: 1": 1}
    assert headers(served, "/v1/chat/completions", strange) == ["new%0D%0Ax-evil:%201"]
    many = {**CHAT, **{f"zzz_{n}": 1 for n in range(190)}}
    assert len(headers(served, "/v1/chat/completions", many)) > 100


def test_an_ignored_name_is_logged_once_per_client(
    served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for program in ("one/1.0", "two/1.0", "one/1.1", "two/2.0"):
        answer = served.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 1, "zzz_who": 1},
            headers={"user-agent": program},
        )  # fmt: skip
        assert answer.headers[HEADER] == "zzz_who"
    said = [record.getMessage() for record in caplog.records if "zzz_who" in record.getMessage()]
    told = "ignored from now on in requests of 127.0.0.1 {}: zzz_who"
    assert said == [told.format("one"), told.format("two")]


def test_a_strict_server_refuses_them_by_name(strict: Serving) -> None:
    for path, _, body in ROUTES:
        wrong = strict.post(path, {**body, "tools": None, "zzz_new_hint": 1})
        assert (wrong.status_code, "zzz_new_hint" in wrong.text) == (400, True), wrong.text
    assert "web_search" in strict.post("/v1/responses", {**RESPONSES, "input": "a"}).text
    assert strict.post("/v1/chat/completions", {**CHAT, "zzz_new_hint": None}).status_code == 200


def test_too_many_unknown_fields_are_refused(served: Serving) -> None:
    parts = [{**TEXT, f"zzz_{n}": 1} for n in range(300)]
    body = {**MESSAGES, "messages": [{"role": "user", "content": parts}]}
    answer = served.post("/v1/messages", body)
    assert (answer.status_code, "more than 200 fields" in answer.text) == (400, True)


# -- agents


def rendered(served: Serving, path: str, model: Any, body: Any) -> str:
    """The prompt that a body comes to."""
    asked = parse(model, body)
    asked = asked.chat([]) if path == "/v1/responses" else asked.chat()
    return json.dumps([asked.messages, asked.template_options().get("tools")])


def test_codex_gets_an_answer(served: Serving) -> None:
    body = {**CODEX["body"], "model": "tiny", "max_output_tokens": 16}
    for stream in (True, False):
        told = headers(served, "/v1/responses", {**body, "stream": stream})
        assert "tools.web_search" in told
        assert "client_metadata" not in told
    inside = [tool for tool in body["tools"] if tool["type"] == "namespace"]
    text = rendered(served, "/v1/responses", ResponsesRequest, body)
    assert inside
    assert all(f'"name": "{x["name"]}"' in text for tool in inside for x in tool["tools"])
    assert "web_search" not in text


def test_a_call_says_its_namespace(served: Serving) -> None:
    same = {"type": "namespace", "name": "other", "tools": [{**FUNCTION, "name": "g"}]}
    body = {**RESPONSES, "max_output_tokens": 200, "tools": [*RESPONSES["tools"], same]}
    body["input"] = "call it"
    for name, space in (("g", "space"), ("g", "other"), ("f", None)):
        choice = {"type": "function", "name": name, "namespace": space}
        found = served.post("/v1/responses", {**body, "tool_choice": choice}).json()
        call = found["output"][-1]
        assert (call["type"], call["name"], call.get("namespace")) == ("function_call", name, space)
    unknown = {"type": "function", "name": "web_search"}
    wrong = served.post("/v1/responses", {**body, "tool_choice": unknown})
    assert "not among the tools" in wrong.text


def test_a_custom_tool_is_called_with_text(served: Serving) -> None:
    body = {**RESPONSES, "max_output_tokens": 300, "temperature": 0, "input": "patch"}
    body["tool_choice"] = {"type": "custom", "name": "patch"}
    whole = served.post("/v1/responses", body).json()["output"][-1]
    assert (whole["type"], whole["name"]) == ("custom_tool_call", "patch")
    with served.client() as client:
        events = list(client.responses.create(**body, stream=True))
    done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert [e.input for e in done] == [whole["input"]]
    assert not [e for e in events if "function_call_arguments" in e.type]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "custom", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def test_a_grammar_holds_the_input_of_a_custom_tool_that_is_forced(served: Serving) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r'[a-c]{3}"\n|é\\'}
    tools = [FUNCTION, {"type": "custom", "name": "patch", "format": form}]
    body = {**RESPONSES, "max_output_tokens": 200, "input": "patch", "tools": tools}
    for choice in ({"type": "custom", "name": "patch"}, allowed("required", "patch")):
        answer = served.post("/v1/responses", {**body, "tool_choice": choice})
        assert answer.status_code == 200
        form_of = (
            parse(ResponsesRequest, {**body, "tool_choice": choice}).chat([]).calls_form("auto")
        )
        assert form_of is not None
        held = form_of(load_tokenizer("tiny")).text()
        assert json.dumps({"type": "string", "pattern": f"^(?:{form['definition']})$"}) in held
        assert "tools.format" not in answer.headers.get(HEADER, "")
    wrong = {**form, "definition": "(a"}
    tools[1] = {**tools[1], "format": wrong}
    answer = served.post("/v1/responses", {**body, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    assert "tool_1_patch at /properties/input" in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", [
    {"type": "grammar", "syntax": "ebnf", "definition": "a"},
    {"type": "grammar", "syntax": "regex"}, {"type": "other"},
])  # fmt: skip
def test_a_grammar_that_cannot_hold_an_input_is_refused_where_it_must(form: Any) -> None:
    inside = {"type": "custom", "name": "patch", "format": form}
    for tools in ([FUNCTION, inside], [{"type": "namespace", "name": "n", "tools": [inside]}]):
        body = {"model": "tiny", "input": "a", "tools": tools}
        names = {"type": "custom", "name": "patch"}
        if tools[0] is not FUNCTION:
            names["namespace"] = "n"
        for choice in ("required", names, {**allowed("required"), "tools": [names]}):
            with pytest.raises(ApiError, match="'patch' is held to no grammar of syntax"):
                parse(ResponsesRequest, {**body, "tool_choice": choice})
        for choice in ("auto", "none", None, {**allowed("auto"), "tools": [names]}):
            told = parse(ResponsesRequest, {**body, "tool_choice": choice}).all_unserved
            assert [x.effect for x in told if x.name.endswith("format")] == [Effect.CHANGES]


def test_the_history_of_other_servers_is_read(served: Serving) -> None:
    text = rendered(served, "/v1/responses", ResponsesRequest, RESPONSES)
    assert all(word in text for word in ("PATCHED", "LISTED", "SHELLED", "local_shell"))
    assert "input.mcp_list_tools" in headers(served, "/v1/responses", RESPONSES)
    text = rendered(served, "/v1/messages", MessagesRequest, MESSAGES)
    assert all(word in text for word in ("FOUND", "REFERRED", "web_search"))
    assert "SECRET" not in text
    told = headers(served, "/v1/messages", MESSAGES)
    assert set(told) == {"tools.web_search_20250305", "messages.content.redacted_thinking"}


def minimal(kind: Any) -> dict[str, Any]:
    """An item or tool of one of OpenAI's types, with the fields that it needs."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is Required else hint
        args = get_args(inner)
        literal = [x for arg in args for x in (arg, *get_args(arg)) if isinstance(x, str)]
        if get_origin(hint) is Required or name == "type":
            empty = None if type(None) in args else []
            found[name] = literal[0] if literal else empty if args else "x"
    return found


TAKEN_TOOLS = {"function", "custom", "namespace"}
NOT_TAKEN = {
    "tool_search_output", "additional_tools", "configuration_update",
    "compaction", "compaction_trigger", "item_reference", "program", "program_output",
}  # fmt: skip
"""Items whose meaning only OpenAI's server knows: refused by name."""


def test_every_tool_and_item_of_openai_is_taken_told_or_refused_by_name() -> None:
    for kind in get_args(openai_types.ToolParam):
        tool = minimal(kind)
        body = parse(ResponsesRequest, {"input": "a", "tools": [tool]})
        told = [one.name for one in body.all_unserved]
        assert told == ([] if tool["type"] in TAKEN_TOOLS else [f"tools.{tool['type']}"])
    for kind in get_args(openai_types.ResponseInputItemParam):
        item = minimal(kind)
        kind = item.get("type", "message")
        if kind in ("message", "reasoning", "mcp_list_tools"):
            continue
        call = {"role": "user", "content": "a", "call_id": "1", "output": "ok", **item}
        asked = {"input": [call if kind.endswith(("_call", "_output")) else item, TURN]}
        if kind in NOT_TAKEN:
            with pytest.raises(ApiError, match=kind):
                parse(ResponsesRequest, asked)
        else:
            parse(ResponsesRequest, asked).chat([])
    image = {"type": "computer_screenshot", "image_url": "x"}
    for output in (image, [image]):
        seen = {"type": "computer_call_output", "call_id": "1", "output": output}
        with pytest.raises(ApiError, match="images are not served"):
            parse(ResponsesRequest, {"input": [seen]})


class Settings(BaseModel, extra="allow"):
    value: int


class Sent(BaseModel, extra="allow"):
    may_hold: ClassVar[bool] = False
    kind: str


class Pieces(BaseModel):
    items: list[Settings | Sent]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_field_that_is_ignored_hides_none_that_is_refused(at: int) -> None:
    items: list[Any] = [{"kind": "a", "stopp": 1}] * 2
    (ignored,) = unserved(Pieces(items=items))
    assert (ignored.effect, ignored.place) == (Effect.CHANGES, "items[0].stopp")
    items.insert(at, {"value": 1, "stopp": 1})
    (refused,) = unserved(Pieces(items=items))
    assert (refused.effect, refused.place) == (Effect.HOLDS, f"items[{at}].stopp")
