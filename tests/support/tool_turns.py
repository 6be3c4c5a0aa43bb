"""Random chats with parallel calls, in the forms in which clients send them."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from qllm.frontend.tool_turns import REASONING


class Turn(NamedTuple):
    """An assistant's message with calls, and their results."""

    ids: list[str]
    arguments: list[str]
    """A text in each call's arguments, which is nowhere else."""
    results: list[str]
    said: str
    thought: str


@st.composite
def _turns(draw: st.DrawFn, number: int) -> Turn:
    count = draw(st.integers(1, 3))
    style = draw(st.sampled_from(["call_0123456789abcdef{}", "toolu_{}", "abcdefg{}", "f:{}"]))
    return Turn(
        [style.format(10 * number + n + 10) for n in range(count)],
        [f"ARG{number}.{n};" for n in range(count)],
        [f"RES{number}.{n};" for n in range(count)],
        draw(st.sampled_from(["", f"SAID{number};"])),
        draw(st.sampled_from(["", f"THOUGHT{number};"])),
    )


CHATS = st.integers(1, 3).flatmap(lambda n: st.tuples(*map(_turns, range(n)))).map(list)
"""Turns of one chat: calls of an agent, one after the other, behind one question."""


def messages_of(
    turns: list[Turn],
    *,
    as_text: bool = False,
    shuffled: bool = False,
    null: bool = False,
    reasoning: str = "reasoning_content",
) -> list[dict[str, Any]]:
    """The messages of a chat.

    Args:
        turns: Its turns.
        as_text: True if a call's arguments are JSON text.
        shuffled: True if results stand in another order than their calls.
        null: True if empty content is null.
        reasoning: Field of the reasoning.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
    for turn in turns:
        calls = []
        for call_id, text in zip(turn.ids, turn.arguments, strict=True):
            given: Any = {"city": text, "days": 3, "deep": {"list": [1, True]}}
            function = {"name": "f", "arguments": json.dumps(given) if as_text else given}
            calls.append({"id": call_id, "type": "function", "function": function})
        content = None if null and not turn.said else turn.said
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        messages.append({**message, reasoning: turn.thought} if turn.thought else message)
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, text in zip(turn.ids, turn.results, strict=True)
        ]
        messages += results[::-1] if shuffled else results
    return messages


Render = Callable[[list[dict[str, Any]]], str]
"""A function that returns the text of messages by one chat template."""


def check_order(render: Render, turns: list[Turn]) -> None:
    """Check that each call is shown before its result, and both in the order of the calls."""
    text, at = render(messages_of(turns)), 0
    for turn in turns:
        calls, results = (
            [text.find(x, at) for x in said] for said in (turn.arguments, turn.results)
        )
        for places in (calls, results):
            assert min(places) >= 0, f"{turn} is left out of {text}"
            assert places == sorted(places), f"{turn} has another order in {text}"
        assert all(call < result for call, result in zip(calls, results, strict=True))
        at = max(results)


def check_forms(render: Render, turns: list[Turn]) -> None:
    """Check that it does not matter in which of the usual forms a client sends a chat."""
    text = render(messages_of(turns))
    assert render(messages_of(turns, as_text=True)) == text
    assert render(messages_of(turns, shuffled=True)) == text
    assert render(messages_of(turns, null=True)) == text
    for name in REASONING:
        assert render(messages_of(turns, reasoning=name)) == text


def thoughts_shown(render: Render, turns: list[Turn]) -> bool:
    """Return True if the reasoning of every turn is shown; check that it is all or nothing."""
    text = render(messages_of(turns))
    shown = [turn.thought in text for turn in turns]
    assert all(shown) or not any(shown)
    return all(shown)
