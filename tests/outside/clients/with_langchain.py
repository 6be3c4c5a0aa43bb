"""LangChain, unchanged."""

from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=5)
    kind: Literal["cat", "dog"]


class Anything(BaseModel):
    """Every JSON object is one."""

    name: Any = None


@tool
def time_of(
    zone: Literal["CET", "UTC"], note: Annotated[str, Field(min_length=60, max_length=80)]
) -> str:
    """The time there."""
    return f"12:00 {zone} {note}"


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=1000,
        use_responses_api=request.param, extra_body={"seed": 3},
    )  # fmt: skip


def test_a_message_and_a_stream(model: ChatOpenAI) -> None:
    found = model.invoke("What does json.dumps do?")
    assert found.text
    assert found.usage_metadata["output_tokens"] > 0
    parts = list(model.stream("What does json.dumps do?"))
    assert "".join(part.text for part in parts) == found.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    assert isinstance(model.with_structured_output(Person, method=method).invoke("x"), Person)


def test_structured_output_in_json_mode(model: ChatOpenAI) -> None:
    """Any object is allowed; this model would go on for ever, so the seeds are of short ones."""
    found = []
    for seed in range(6):
        asked = model.model_copy(update={"extra_body": {"seed": seed}})
        chain = asked.with_structured_output(Anything, method="json_mode", include_raw=True)
        answer = chain.invoke("As JSON, please.")
        assert answer["raw"].text.startswith("{")
        found.append(answer["parsed"])
    assert any(isinstance(x, Anything) for x in found)


def test_bound_tools_are_called_and_answered(model: ChatOpenAI) -> None:
    bound = model.bind_tools([time_of], tool_choice="time_of", strict=True)
    called = bound.invoke("What time is it?")
    (call,) = called.tool_calls
    assert call["name"] == "time_of"
    result = time_of.invoke(call)
    assert isinstance(result, ToolMessage)
    assert "12:00" in str(result.content)
    chat = [HumanMessage("What time is it?"), called, result]
    assert model.bind_tools([time_of]).invoke(chat).text


def test_a_streamed_call_is_whole(model: ChatOpenAI) -> None:
    bound = model.bind_tools([time_of], tool_choice="time_of", strict=True)
    whole: Any = None
    for part in bound.stream("What time is it?"):
        assert isinstance(part, AIMessageChunk)
        whole = part if whole is None else whole + part
    assert whole.tool_calls[0]["args"]["zone"] in ("CET", "UTC")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_that_is_wrong_is_a_clear_error(model: ChatOpenAI, method: Any) -> None:
    schema = {"title": "x", "type": "object", "properties": {"a": {"type": "foo"}}}
    with pytest.raises(Exception, match="Invalid type: foo"):
        model.with_structured_output(schema, method=method).invoke("x")
