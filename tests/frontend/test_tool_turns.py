"""Turns with tools reach each family's chat template as it takes them.

The templates are in `tests/support/chat_templates.py`.
"""

import json
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from qllm.errors import InvalidRequestError
from qllm.frontend.prompts import render_chat
from qllm.frontend.tool_turns import nine_characters
from tests.support.chat_templates import MINIMAX_M2, TEMPLATES, with_template
from tests.support.tool_turns import (
    CHATS,
    Render,
    Turn,
    check_forms,
    check_order,
    messages_of,
    thoughts_shown,
)

FAMILIES = sorted(TEMPLATES)
REASONS = {"gemma 4", "glm 4.5", "glm 4.7", "gpt-oss", "hermes", "minimax m2", "qwen xml"}
ASKED = {"role": "user", "content": "Hi."}


def renders(template: str) -> Render:
    tokenizer = with_template(template)
    return lambda messages: str(tokenizer.decode(render_chat(messages, tokenizer)))


FEW = settings(max_examples=10, deadline=None, phases=set(Phase) - {Phase.explain})
RENDER = {name: renders(template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(turns=CHATS)
def test_calls_and_results_are_shown_in_order(name: str, turns: list[Turn]) -> None:
    check_order(RENDER[name], turns)


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(turns=CHATS)
def test_each_form_of_a_chat_gives_the_same_prompt(name: str, turns: list[Turn]) -> None:
    check_forms(RENDER[name], turns)


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_is_shown_where_the_template_shows_it(name: str) -> None:
    turns = [Turn([f"call_{n}"], [f"ARG{n};"], [f"RES{n};"], "", f"THOUGHT{n};") for n in range(2)]
    assert thoughts_shown(RENDER[name], turns) is (name in REASONS)


@pytest.mark.parametrize("name", ["mistral v3", "mistral v11"])
@FEW
@given(turns=CHATS)
def test_an_id_has_nine_characters_where_the_template_asks_for_them(
    name: str, turns: list[Turn]
) -> None:
    text = RENDER[name](messages_of(turns))
    for turn in turns:
        for call_id in turn.ids:
            assert text.count(nine_characters(call_id)) == 2, "of its call and of its result"


def test_ids_of_nine_characters_differ_and_stay() -> None:
    ids = [f"call_{n:024x}" for n in range(500)]
    made = [nine_characters(x) for x in ids]
    assert len(set(made)) == len(ids)
    assert {len(x) for x in made} == {9}
    assert [nine_characters(x) for x in made] == made


@pytest.mark.parametrize("name", ["hermes", "gpt-oss"])
def test_results_of_unknown_calls_go_by_their_places(name: str) -> None:
    calls = [{"id": x, "type": "function", "function": {"name": "f", "arguments": {"v": f"<{x}>"}}}
             for x in ("one", "two")]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": x, "content": f"[{x}]"} for x in ("b", "a", "c")]
    text = RENDER[name](
        [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    )
    places = [text.index(x) for x in ("[b]", "[a]", "[c]")]
    assert places == sorted(places)
    assert text.index("<two>") < places[1]


def test_calls_that_are_shown_without_content_alone_stand_in_a_message_of_their_own() -> None:
    render = renders(
        "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    check_order(render, [Turn(["a"], ["ARG;"], ["RES;"], "SAID;", "")])


def test_a_template_s_own_message_is_the_error() -> None:
    with pytest.raises(InvalidRequestError, match="refuses the messages: Message has tool role"):
        renders(MINIMAX_M2)([ASKED, {"role": "tool", "tool_call_id": "x", "content": "Sun."}])


def test_a_template_that_loses_some_of_the_calls_is_refused() -> None:
    render = renders(
        "{% for m in messages %}{{ m.content }}{% if loop.index > 2 or messages | length < 5 %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"v": 1})}}
    turn: list[Any] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    assert '{"v": 1}' in render([ASKED, *turn])
    with pytest.raises(InvalidRequestError, match=r"leaves out a call of messages\[1\]"):
        render([ASKED, *turn, *turn])
