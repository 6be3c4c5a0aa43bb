"""LiteLLM, unchanged, through each of the three APIs."""

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel, Field

CHAT: list[Any] = [{"role": "user", "content": "What does json.dumps do?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "time_of",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str = Field(max_length=5)


@pytest.fixture(scope="module")
def asked(url: str) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}


def test_a_chat_and_its_stream(asked: dict[str, Any]) -> None:
    how = {**asked, "messages": CHAT, "max_tokens": 300, "temperature": 0}
    how["extra_body"] = {"ignore_eos": True}
    whole = litellm.completion(**how).choices[0].message.content
    parts = [x.choices[0].delta.content or "" for x in litellm.completion(**how, stream=True)]
    assert "".join(parts) == whole != ""


def test_a_form_and_a_call(asked: dict[str, Any]) -> None:
    how = {**asked, "messages": CHAT, "max_tokens": 300, "seed": 3}
    found = litellm.completion(**how, response_format=Person)
    Person.model_validate_json(found.choices[0].message.content)
    choice = {"type": "function", "function": {"name": "time_of"}}
    called = litellm.completion(**how, tools=[TOOL], tool_choice=choice).choices[0]
    (call,) = called.message.tool_calls
    assert json.loads(call.function.arguments)["zone"] in ("CET", "UTC")


def test_responses(asked: dict[str, Any]) -> None:
    found = litellm.responses(**asked, input="What does json.dumps do?", max_output_tokens=10)
    assert found.status in ("completed", "incomplete")
    assert found.usage.output_tokens > 0


def test_messages(url: str) -> None:
    found = litellm.completion(
        model="anthropic/tiny", api_base=url, api_key="none", messages=CHAT, max_tokens=10
    )
    assert found.choices[0].message.content
    assert found.usage.completion_tokens > 0
