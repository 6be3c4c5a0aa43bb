"""Anthropic's client, unchanged."""

import asyncio
import json
from typing import Any, get_args, get_type_hints, is_typeddict

import anthropic
import pytest
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam, message_create_params
from pydantic import BaseModel, Field

TEXT = {"type": "text", "text": "a"}
CHAT: list[Any] = [{"role": "user", "content": "What time is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "zone": {"enum": ["CET", "UTC"]},
        "note": {"type": "string", "minLength": 60, "maxLength": 80},
    },
    "required": ["zone", "note"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "time_of", "description": "The time.", "input_schema": SCHEMA}]
ONE: Any = {"type": "tool", "name": "time_of"}
GREEDY = {"temperature": 0}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": CHAT}


class Person(BaseModel):
    name: str = Field(max_length=5)


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def test_a_message(client: anthropic.Anthropic) -> None:
    found = client.messages.create(
        **{**ASKED, "max_tokens": 8}, system="Be brief.", extra_body=GREEDY
    )
    assert found.content[0].type == "text"
    assert found.stop_reason in ("max_tokens", "end_turn")
    assert found.usage.input_tokens > 8
    assert 0 < found.usage.output_tokens <= 8
    assert found._request_id == found.id


def test_a_stream_is_the_same(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 40, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (len(final.content), final.stop_reason) == (1, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    names = [event.type for event in client.messages.create(**asked, stream=True)]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 40, "extra_body": GREEDY}
    text = client.messages.create(**asked).content[0].text
    found = client.messages.create(**asked, stop_sequences=["\u2603", text[3:6]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[3:6])
    assert found.content[0].text == text[: text.index(text[3:6])]


def test_a_tool_is_called_and_answered(client: anthropic.Anthropic) -> None:
    called = client.messages.create(**ASKED, tools=TOOLS, tool_choice=ONE)
    assert called.stop_reason == "tool_use"
    (use,) = called.content
    assert use.name == "time_of"
    assert use.input["zone"] in ("CET", "UTC")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12:00"}
    chat = [
        *CHAT,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    assert client.messages.create(**{**ASKED, "messages": chat}, tools=TOOLS).usage.output_tokens


def test_a_streamed_call_is_whole(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASKED, tools=TOOLS, tool_choice=ONE) as stream:
        parts = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == final.content[0].input
    assert final.content[0].input["zone"] in ("CET", "UTC")
    assert final.stop_reason == "tool_use"


def test_several_calls(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 1500}
    found = client.messages.create(**asked, tools=TOOLS, tool_choice={"type": "any"})
    uses = [block for block in found.content if block.type == "tool_use"]
    assert len({use.id for use in uses}) == len(uses) >= 1
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    assert len(client.messages.create(**asked, tools=TOOLS, tool_choice=choice).content) == 1


def test_a_form(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 1000}
    found = client.messages.parse(**asked, output_format=Person, extra_body=GREEDY)
    assert isinstance(found.parsed_output, Person)


def test_the_answer_goes_on_with_a_prefill(client: anthropic.Anthropic) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "It is"}]
    longer = client.messages.count_tokens(model="tiny", messages=chat).input_tokens
    assert longer > client.messages.count_tokens(model="tiny", messages=CHAT).input_tokens
    found = client.messages.create(**{**ASKED, "messages": chat, "max_tokens": 5})
    assert found.usage.input_tokens == longer


def test_async(url: str) -> None:
    async def run() -> tuple[str, str]:
        client = anthropic.AsyncAnthropic(base_url=url, auth_token="none", max_retries=0)
        asked: dict[str, Any] = {**ASKED, "max_tokens": 20, "extra_body": GREEDY}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            text = "".join([part async for part in stream.text_stream])
        return whole.content[0].text, text

    whole, streamed = asyncio.run(run())
    assert whole == streamed != ""


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"n_predict": 1}}, anthropic.BadRequestError, "unknown field 'n_predict'"),
        ({"model": "x"}, anthropic.NotFoundError, "'x' is not served here"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "needs tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "not 'image'",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 4000}},
            anthropic.BadRequestError,
            "must be less than max_tokens=300",
        ),
    ],
)
def test_refusals(client: anthropic.Anthropic, more: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        client.messages.create(**{**ASKED, **more})
    assert caught.value.body["type"] == "error"
    assert caught.value.request_id


OF_USER: list[dict[str, Any]] = [
    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
    {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]},
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "time_of"}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "time_of"}},
]
OF_ASSISTANT: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "t", "signature": ""},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "compaction", "content": "So far."},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []},
    {"type": "mcp_tool_use", "id": "m", "name": "x", "input": {}, "server_name": "m"},
    {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    *(
        {"type": f"{name}_tool_result", "tool_use_id": "s", "content": []}
        for name in (
            "web_search", "web_fetch", "code_execution", "bash_code_execution",
            "text_editor_code_execution", "tool_search", "advisor",
        )
    ),
    {"type": "tool_use", "id": "t", "name": "time_of", "input": {"zone": "UTC"}},
]  # fmt: skip
ANSWERED = [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT], "is_error": False}]
REFUSED = {"image", "container_upload"}
"""Blocks that only a model with eyes, or a machine for the model, can read."""


def literals(hint: Any) -> set[str]:
    """Return the texts that a type allows."""
    return {hint} if isinstance(hint, str) else set().union(*map(literals, get_args(hint)))


def kinds(hint: Any) -> set[str]:
    """Return the values of `type` in a part of a request, or in a union of parts."""
    if is_typeddict(hint):
        return literals(get_type_hints(hint).get("type"))
    return set().union(*map(kinds, get_args(hint)))


def test_every_block_is_taken_or_refused_by_name(client: anthropic.Anthropic) -> None:
    examples = {block["type"] for block in (*OF_USER, *OF_ASSISTANT, *ANSWERED)}
    assert kinds(BetaContentBlockParam) <= examples | REFUSED
    chat: list[Any] = [
        {"role": "user", "content": OF_USER},
        {"role": "assistant", "content": OF_ASSISTANT},
        {"role": "user", "content": ANSWERED},
    ]
    assert client.beta.messages.create(**{**ASKED, "max_tokens": 4, "messages": chat}).content
    for kind in REFUSED:
        wrong = [{"role": "user", "content": [{"type": kind, "source": {}, "file_id": "f"}]}]
        with pytest.raises(anthropic.BadRequestError, match=kind):
            client.beta.messages.create(**{**ASKED, "messages": wrong})


def test_every_tool_is_taken_or_left_out(client: anthropic.Anthropic) -> None:
    for kind in kinds(BetaToolUnionParam):
        tool = {**TOOLS[0], "type": kind}
        found = client.beta.messages.with_raw_response.create(
            **{**ASKED, "max_tokens": 1}, tools=[tool]
        )
        told = found.headers.get("x-qllm-ignored")
        assert told == (None if kind == "custom" else f"tools.{kind}")


THINKING: list[dict[str, Any]] = [
    {"type": "enabled", "budget_tokens": 100}, {"type": "enabled"}, {"type": "disabled"},
    {"type": "adaptive"}, {"type": "adaptive", "display": "omitted"},
    {"type": "adaptive", "display": "updates"}, {"type": "between_tools"},
]  # fmt: skip


@pytest.mark.parametrize("thinking", THINKING)
def test_thinking_in_all_its_forms(client: anthropic.Anthropic, thinking: Any) -> None:
    found = client.beta.messages.create(**{**ASKED, "max_tokens": 120}, thinking=thinking)
    assert found.usage.output_tokens


def test_a_budget_of_several_answers_may_be_more_than_one(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 64}}
    beta = "interleaved-thinking-2025-05-14"
    assert client.beta.messages.create(**asked, betas=["other", beta]).usage.output_tokens
    with pytest.raises(anthropic.BadRequestError, match="must be less than max_tokens=8"):
        client.beta.messages.create(**asked)


VALUES: dict[str, Any] = {
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "container": "c", "mcp_servers": [{"type": "url", "name": "m", "url": "http://m"}],
    "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu",
    "output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 9}},
    "fallbacks": [{"model": "b"}], "diagnostics": {"previous_message_id": "x"},
    "cache_control": {"type": "ephemeral", "ttl": "1h"}, "billing_policy": {"type": "x"},
    "compaction": {"type": "x"}, "thread": {"id": "x"}, "fallback_credit_token": "x",
    "system": [{**TEXT, "cache_control": {"type": "ephemeral"}}], "stop_sequences": ["\u2603"],
    "user_profile_id": "u", "workspace_id": "w",
}  # fmt: skip
LEFT_OUT = {"compaction", "container", "context_management", "mcp_servers", "thread"}


def test_every_field_is_taken_or_told(client: anthropic.Anthropic) -> None:
    known = set(message_create_params.MessageCreateParamsBase.__annotations__)
    elsewhere = {*ASKED, "thinking", "tool_choice", "tools", "betas"}
    assert known <= {*VALUES, *elsewhere}
    found = client.beta.messages.with_raw_response.create(
        **{**ASKED, "max_tokens": 4}, extra_body=VALUES
    )
    told = set(found.headers["x-qllm-ignored"].split(", "))
    assert told == {*LEFT_OUT, "output_config.task_budget"}
    assert client.messages.count_tokens(model="tiny", messages=CHAT, extra_body=VALUES).input_tokens


def test_a_stream_has_an_id(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 4}
    with client.messages.with_streaming_response.create(**asked, stream=True) as answer:
        assert answer.headers["request-id"]
        assert answer.request_id == answer.headers["request-id"]
    with client.messages.with_streaming_response.create(
        **asked, extra_headers={"x-request-id": "mine"}
    ) as answer:
        assert answer.headers["x-request-id"] == "mine"
        assert answer.request_id == answer.parse().id
