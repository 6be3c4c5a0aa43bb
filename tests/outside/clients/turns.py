"""Clients in a conversation of several turns with a tool; prints one line per client.

It runs in the environment of the clients, against a server whose model follows a script.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import agents
import anthropic
import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = os.environ["QLLM_TEST_URL"]
ASKED = "What time is it there?"
ZONES = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
FUNCTION = {"type": "function", "function": {"name": "time_of", "parameters": ZONES}}
KEY = {"base_url": f"{URL}/v1", "api_key": "none"}


def of_chats(ask: Callable[[list[Any]], Any]) -> tuple[int, str]:
    """Go through a chat in OpenAI's shape: how many calls were answered, and the last text."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for calls in range(9):
        message = ask(messages).choices[0].message
        if not message.tool_calls:
            return calls, message.content
        (call,) = message.tool_calls
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
    raise AssertionError("it never ends")


def chats() -> tuple[int, str]:
    client = openai.OpenAI(**KEY, max_retries=0)
    how: dict[str, Any] = {"model": "tiny", "tools": [FUNCTION]}
    return of_chats(lambda messages: client.chat.completions.create(messages=messages, **how))


def responses() -> tuple[int, str]:
    client = openai.OpenAI(**KEY, max_retries=0)
    tools: list[Any] = [{"type": "function", "name": "time_of", "parameters": ZONES}]
    asked: Any = ASKED
    before: str | None = None
    for calls in range(9):
        found = client.responses.create(
            model="tiny", input=asked, tools=tools, previous_response_id=before
        )
        made = [item for item in found.output if item.type == "function_call"]
        if not made:
            return calls, found.output_text
        before, asked = found.id, [
            {"type": "function_call_output", "call_id": x.call_id, "output": "12:00"} for x in made
        ]  # fmt: skip
    raise AssertionError("it never ends")


def messages() -> tuple[int, str]:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    tools: Any = [{"name": "time_of", "input_schema": ZONES}]
    chat: list[Any] = [{"role": "user", "content": ASKED}]
    for calls in range(9):
        how: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "tools": tools}
        with client.messages.stream(messages=chat, **how) as stream:
            found = stream.get_final_message()
        uses = [block for block in found.content if block.type == "tool_use"]
        if not uses:
            return calls, "".join(block.text for block in found.content)
        done = [{"type": "tool_result", "tool_use_id": x.id, "content": "12:00"} for x in uses]
        chat += [{"role": "assistant", "content": found.content}, {"role": "user", "content": done}]
    raise AssertionError("it never ends")


def langchain(*, is_responses: bool) -> tuple[int, str]:
    @tool
    def time_of(zone: str) -> str:
        """Return the time there."""
        return f"12:00 {zone}"

    model = ChatOpenAI(model="tiny", **KEY, max_retries=0, use_responses_api=is_responses)
    bound = model.bind_tools([time_of])
    chat: list[Any] = [HumanMessage(ASKED)]
    for calls in range(9):
        chat.append(bound.invoke(chat))
        if not chat[-1].tool_calls:
            return calls, chat[-1].text
        chat += [time_of.invoke(call) for call in chat[-1].tool_calls]
    raise AssertionError("it never ends")


def lite(model: str, base: str) -> tuple[int, str]:
    how: dict[str, Any] = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 500}
    how |= {"tools": [FUNCTION], "max_retries": 0}
    return of_chats(lambda messages: litellm.completion(messages=messages, **how))


def agents_sdk(kind: Any) -> tuple[int, str]:
    calls = 0

    @agents.function_tool
    def time_of(zone: str) -> str:
        """Return the time there."""
        nonlocal calls
        calls += 1
        return f"12:00 {zone}"

    async def run() -> str:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(**KEY, max_retries=0)
        agent = agents.Agent(name="a", model=kind("tiny", client), tools=[time_of])
        result = agents.Runner.run_streamed(agent, ASKED)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    text = asyncio.run(run())
    return calls, text


CLIENTS: dict[str, Callable[[], tuple[int, str]]] = {
    "openai chats": chats,
    "openai responses": responses,
    "anthropic": messages,
    "langchain chats": lambda: langchain(is_responses=False),
    "langchain responses": lambda: langchain(is_responses=True),
    "litellm chats": lambda: lite("openai/tiny", f"{URL}/v1"),
    "litellm messages": lambda: lite("anthropic/tiny", URL),
    "agents on chats": lambda: agents_sdk(agents.OpenAIChatCompletionsModel),
    "agents on responses": lambda: agents_sdk(agents.OpenAIResponsesModel),
}

if __name__ == "__main__":
    for name, run in CLIENTS.items():
        calls, text = run()
        sys.stdout.write(json.dumps({"name": name, "calls": calls, "text": text}) + "\n")
