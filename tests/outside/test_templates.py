"""Turns with tools through the chat templates that the families' makers have published.

`make test-outside` fetches them with the source of llama-cpp-python; they are not in this tree.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import given

from qllm.frontend.prompts import render_chat
from tests.support.chat_templates import with_template
from tests.support.tool_turns import (
    CHATS,
    Render,
    Turn,
    check_forms,
    check_order,
    thoughts_shown,
)

FOLDER = Path(sys.prefix) / "templates"
REASONS = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": False,
    "Qwen-Qwen3-0.6B": True,
    "Qwen3-Coder": False,
    "Qwen3.5-4B": True,
    "GLM-4.6": True,
    "GLM-4.7-Flash": True,
    "deepseek-ai-DeepSeek-V3.1": False,
    "moonshotai-Kimi-K2": False,
    "Kimi-K2-Instruct": False,
    "Kimi-K2-Thinking": True,
    "Kimi-K3": True,
    "MiniMax-M2": True,
    "meta-llama-Llama-3.1-8B-Instruct": False,
    "meta-llama-Llama-3.3-70B-Instruct": False,
    "mistralai-Mistral-Nemo-Instruct-2407": False,
    "Mistral-Small-3.2-24B-Instruct-2506": False,
    "mistralai-Ministral-3-14B-Reasoning-2512": True,
    "google-gemma-4-31B-it": True,
    "openai-gpt-oss-120b": True,
}
"""Templates, and whether they show the reasoning of calls of the same question."""

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no {FOLDER}: `make test-outside` makes it"
)


@pytest.fixture(scope="module", params=REASONS)
def family(request: pytest.FixtureRequest) -> tuple[str, Render]:
    tokenizer = with_template((FOLDER / f"{request.param}.jinja").read_text())
    render = lambda messages: str(tokenizer.decode(render_chat(messages, tokenizer)))  # noqa: E731
    return request.param, render


@given(turns=CHATS)
def test_calls_and_results_are_shown_in_order(
    family: tuple[str, Render], turns: list[Turn]
) -> None:
    check_order(family[1], turns)


@given(turns=CHATS)
def test_each_form_of_a_chat_gives_the_same_prompt(
    family: tuple[str, Render], turns: list[Turn]
) -> None:
    check_forms(family[1], turns)


def test_reasoning_is_shown_where_the_template_shows_it(family: tuple[str, Render]) -> None:
    name, render = family
    turns = [Turn([f"call_{n}"], [f"ARG{n};"], [f"RES{n};"], "", f"THOUGHT{n};") for n in range(2)]
    assert thoughts_shown(render, turns) is REASONS[name]
