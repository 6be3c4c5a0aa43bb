"""Anthropic's client, unchanged."""

import asyncio
import json
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel, Field

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
