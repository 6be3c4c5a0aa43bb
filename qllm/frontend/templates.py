"""Behaviour of chat templates, found by rendering sample messages.

A template is a program in the checkpoint. Some templates silently leave out a message with an
unknown role. Some templates add the arguments of a call to a text, which fails if the arguments are
an object. Each template is tried once per shape of a conversation.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from qllm.errors import InvalidRequestError, shown
from qllm.frontend.tool_turns import REASONING, Habits, arranged, nine_characters, with_reasoning

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. A template may know more: it names them."""
_KEY, _VALUE, _OTHER = "q7x", "x7q", "x8q"
_CALL_ID = "abcdefghi"  # Mistral's templates take ids of nine characters only
_LONG_ID = "call_0123456789abcdef"
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}

Shape = tuple[str, bool, tuple[str, ...], int]
"""A message's role, True if it has content that must be shown, its other fields, and its number of
calls."""


def suited(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the messages as the template accepts them.

    Role `developer` becomes `system` where the template does not know it. Reasoning gets the names
    that the template reads. For calls and their results see `Habits` and `arranged`.

    Raises:
        InvalidRequestError: A role is unknown.
    """
    template = str(tokenizer.chat_template)
    for index, message in enumerate(messages):
        if (role := message["role"]) not in ROLES and not _names(template, role):
            raise InvalidRequestError(
                f"messages[{index}] has role {shown(role):.80}, which neither OpenAI's API nor the "
                f"chat template knows; use one of {', '.join(ROLES)}"
            )
    has_calls = any(message.get("tool_calls") for message in messages)
    habits = _habits(tokenizer, template) if has_calls else Habits()
    reasoning = _reasoning_names(template)
    found: list[dict[str, Any]] = []
    for message in arranged(messages, habits):
        made = with_reasoning(message, reasoning, habits)
        if message["role"] == "developer" and not _names(template, "developer"):
            made["role"] = "system"
            if len(found) == 1 and found[0]["role"] == "system":
                # templates support one system message
                found[0]["content"] += f"\n\n{made['content']}"
                continue
        if made.get("tool_calls"):
            made["tool_calls"] = [_suited_call(call, habits) for call in made["tool_calls"]]
        if habits.takes_nine and isinstance(made.get("tool_call_id"), str):
            made["tool_call_id"] = nine_characters(made["tool_call_id"])
        found.append(made)
    return found


def check_all_shown(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    has_tools: bool,
    variables: Mapping[str, Any],
    **how: bool,
) -> None:
    """Raise unless the template shows the content and the calls of every message.

    Next to calls it need not show content. A template that shows no calls knows no tools.

    Raises:
        InvalidRequestError: The template leaves out a message; the error names it.
    """
    shape = tuple(
        (
            message["role"],
            bool(message["content"].strip()) and not message.get("tool_calls"),
            tuple(sorted(message.keys() - {"role", "content", "tool_calls"})),
            len(message.get("tool_calls") or ()),
        )
        for message in messages
    )
    try:
        given = json.dumps(variables)
    except (TypeError, ValueError):  # the caller's own objects are not checked
        return
    template = str(tokenizer.chat_template)
    left_out = _left_out(tokenizer, template, shape, has_tools, given, **how)
    if left_out is not None:
        where, part = left_out
        raise InvalidRequestError(
            f"the chat template leaves out {part} of messages[{where}], of role "
            f"{messages[where]['role']!r}; give it to the model in a message of another role, such "
            "as 'user'"
        )


def _names(template: str, role: str) -> bool:
    """Return True if a template contains this role as a literal."""
    return f"'{role}'" in template or f'"{role}"' in template


@lru_cache(maxsize=16)
def _reasoning_names(template: str) -> tuple[str, ...]:
    """Return the names under which a template may read the reasoning of a message."""
    return tuple(name for name in REASONING if re.search(rf"\b{name}\b", template))


def _suited_call(call: Mapping[str, Any], habits: Habits) -> dict[str, Any]:
    """Return a call with its id and arguments as the template takes them."""
    made, function = dict(call), dict(call["function"])
    if habits.takes_text and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    if habits.takes_nine and isinstance(made.get("id"), str):
        made["id"] = nine_characters(made["id"])
    return {**made, "function": function}


def _call(arguments: Any, call_id: str = _CALL_ID) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> str | None:
    """Return the text of messages; None if the template refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    except Exception:  # noqa: BLE001 - a template may raise any error
        return None


def _answered(tokenizer: Any, calls: Sequence[Any], **said: str) -> str:
    """Return the text of a chat with calls and their results; empty if the template refuses it."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": list(calls), **said},
        *({"role": "tool", "tool_call_id": c["id"], "name": "f", "content": "x"} for c in calls),
    ]
    both = (_rendered(tokenizer, messages, tools=tools) for tools in ([_TOOL], None))
    return next((text for text in both if text is not None), "")


@lru_cache(maxsize=16)
def _habits(tokenizer: Any, template: str) -> Habits:
    """Return what a template takes of calls.

    Args:
        tokenizer: Tokenizer with the template.
        template: Text of the template, because a tokenizer may get another template.
    """
    written, other = (json.dumps({_KEY: value}) for value in (_VALUE, _OTHER))
    by_object, by_text = (_answered(tokenizer, [_call(x)]) for x in (json.loads(written), written))
    is_wrong = not by_object or str(json.loads(written)) in by_object
    takes_text = is_wrong and written in by_text
    first, second = (x if takes_text else json.loads(x) for x in (written, other))
    one = [_call(first)]
    if _VALUE not in _answered(tokenizer, one):
        return Habits()  # it knows no calls
    both = _answered(tokenizer, [*one, _call(second, _CALL_ID[::-1])])
    thought = dict.fromkeys(_reasoning_names(template), "x")
    return Habits(
        takes_text=takes_text,
        takes_nine=not _answered(tokenizer, [_call(first, _LONG_ID)]),
        takes_one=not (_VALUE in both and _OTHER in both),
        takes_bare=_VALUE not in _answered(tokenizer, one, content="y"),
        thinks_or_says=not _answered(tokenizer, one, content="y", **thought),
    )


@lru_cache(maxsize=256)
def _left_out(
    tokenizer: Any,
    template: str,
    shape: tuple[Shape, ...],
    has_tools: bool,
    variables: str,
    **how: bool,
) -> tuple[int, str] | None:
    """Return the first message of which a template leaves out a part, with the part; else None.

    Samples that the template refuses are skipped, because it then refuses the messages too.
    """
    has_calls = any(num for *_, num in shape)
    takes_text = has_calls and _habits(tokenizer, template).takes_text
    messages: list[dict[str, Any]] = []
    for index, (role, _, others, num_calls) in enumerate(shape):
        made: dict[str, Any] = {"role": role, "content": _mark(index)}
        made |= {name: _CALL_ID if name == "tool_call_id" else "x" for name in others}
        if num_calls:
            given = ({_KEY: _mark_of_call(index, n)} for n in range(num_calls))
            made["tool_calls"] = [_call(json.dumps(x) if takes_text else x) for x in given]
        messages.append(made)
    tools = [_TOOL] if has_tools else None
    text = _rendered(tokenizer, messages, tools=tools, **how, **json.loads(variables))
    if text is None:
        return None
    knows_calls = f"{_VALUE}-" in text
    for index, (_, is_said, _, num_calls) in enumerate(shape):
        if is_said and _mark(index)[0] not in text:
            return index, "the content"
        if knows_calls and any(_mark_of_call(index, n) not in text for n in range(num_calls)):
            return index, "a call"
    return None


def _mark(index: int) -> str:
    """Return content that no template mentions: private characters."""
    return chr(0xE000 + index % 6000) * 8


def _mark_of_call(index: int, number: int) -> str:
    """Return an argument that no template mentions, of a call of a message."""
    return f"{_VALUE}-{index}-{number}."
