"""Turns with tools in a chat, arranged as a chat template takes them.

Clients write the turns of all models in OpenAI's form. Templates differ in what they take: some
know one call in a message, ids of nine characters, or another name of the reasoning.
"""

import re
from base64 import b32encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an earlier answer's reasoning: those of clients, and those that templates read."""

Message = Mapping[str, Any]


class Habits(NamedTuple):
    """Rules of a template for calls, which `qllm.frontend.templates` finds by samples."""

    takes_text: bool = False
    """True if arguments must be JSON text, because objects fail or look like Python."""
    takes_nine: bool = False
    """True if ids must have nine characters."""
    takes_one: bool = False
    """True if only the first call of a message is shown, or a second one is refused."""
    takes_bare: bool = False
    """True if calls are shown only in a message without content."""
    thinks_or_says: bool = False
    """True if a message with calls has reasoning or content, and both are refused."""


def nine_characters(call_id: str) -> str:
    """Return an id of nine letters and digits for a call's id: itself if it is one."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return b32encode(sha256(call_id.encode()).digest()).decode()[:9]


def with_reasoning(message: Message, names: Sequence[str], habits: Habits) -> dict[str, Any]:
    """Return a message whose reasoning, if it has any, has all the names.

    Args:
        message: A message, with reasoning under any name.
        names: Names that the template reads.
        habits: What the template takes.
    """
    found = [message[name] for name in REASONING if isinstance(message.get(name), str)]
    made = {name: value for name, value in message.items() if name not in REASONING}
    is_refused = habits.thinks_or_says and message.get("tool_calls") and message["content"]
    if not found or is_refused:
        return made
    return {**made, **dict.fromkeys(names or REASONING[:1], max(found, key=len))}


def arranged(messages: Sequence[Message], habits: Habits) -> Iterator[Message]:
    """Yield the messages, with each call's results where the template looks for them.

    Results stand in the order of their calls, because most templates show no ids.
    """
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls")
        if not calls:
            yield message
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, at = _by_call(calls, messages[at:end]), end
        if habits.takes_bare and message["content"].strip():
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            message = {"role": message["role"], "content": ""}
        if not habits.takes_one:
            yield {**message, "tool_calls": calls}
            yield from (result for some in results for result in some)
            continue
        for call, some in zip(calls, results, strict=True):
            yield {**message, "tool_calls": [call]}
            yield from some
            message = {"role": message["role"], "content": ""}


def _by_call(calls: Sequence[Message], results: Sequence[Message]) -> list[list[Message]]:
    """Return the results of each call: by their ids, or by their places if an id is unknown."""
    places = {call.get("id"): place for place, call in enumerate(calls)}
    are_known = len(places) == len(calls) and all(x.get("tool_call_id") in places for x in results)
    found: list[list[Message]] = [[] for _ in calls]
    for place, result in enumerate(results):
        of = places[result["tool_call_id"]] if are_known else min(place, len(calls) - 1)
        found[of].append(result)
    return found
