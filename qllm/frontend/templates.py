"""Behaviour of chat templates, found by rendering sample messages.

A template is a program in the checkpoint. Some templates silently leave out a message with an
unknown role. Some templates add the arguments of a call to a text, which fails if the arguments are
an object. Each template is tried once per shape of a conversation.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from qllm.errors import InvalidRequestError, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. A template may support more roles, whose names it contains."""
_KEY, _VALUE = "q7x", "x7q"
_CALL_ID = "abcdefghi"  # Mistral's templates accept only ids of nine characters
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}

Shape = tuple[str, bool, tuple[str, ...]]
"""A message's role, True if the message has content that must be shown, and its other fields."""


def suited(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the messages as the template accepts them.

    Role `developer` becomes `system` if the template does not support `developer`. Arguments of
    calls become text if the template cannot show objects.

    Raises:
        InvalidRequestError: A role is unknown.
    """
    template = str(tokenizer.chat_template)
    as_text = any(message.get("tool_calls") for message in messages) and _adds_arguments(
        tokenizer, template
    )
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not _names(template, role):
            raise InvalidRequestError(
                f"messages[{index}] has role {shown(role):.80}, which neither OpenAI's API nor the "
                f"chat template knows; use one of {', '.join(ROLES)}"
            )
        made = dict(message)
        if role == "developer" and not _names(template, role):
            made["role"] = "system"
            if len(found) == 1 and found[0]["role"] == "system":
                # templates support one system message
                found[0]["content"] += f"\n\n{made['content']}"
                continue
        if as_text and made.get("tool_calls"):
            made["tool_calls"] = [_with_text(call) for call in made["tool_calls"]]
        found.append(made)
    return found


def check_all_shown(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    has_tools: bool,
    variables: Mapping[str, Any],
    **how: bool,
) -> None:
    """Raise if the template leaves out the content of a message that has no tool calls.

    Raises:
        InvalidRequestError: The template leaves out a message; the error names it.
    """
    shape = tuple(
        (
            message["role"],
            bool(message["content"].strip()) and not message.get("tool_calls"),
            tuple(sorted(message.keys() - {"role", "content"})),
        )
        for message in messages
    )
    try:
        given = json.dumps(variables)
    except (TypeError, ValueError):  # the caller's own objects are not checked
        return
    where = _left_out(tokenizer, str(tokenizer.chat_template), shape, has_tools, given, **how)
    if where is not None:
        raise InvalidRequestError(
            f"the chat template leaves out the content of messages[{where}], of role "
            f"{messages[where]['role']!r}; give it to the model in a message of another role, such "
            "as 'user'"
        )


def _names(template: str, role: str) -> bool:
    """Return True if a template contains this role as a literal."""
    return f"'{role}'" in template or f'"{role}"' in template


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> str | None:
    """Return the text of messages; None if the template refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    except Exception:  # noqa: BLE001 - a template may raise any error
        return None


@lru_cache(maxsize=16)
def _adds_arguments(tokenizer: Any, template: str) -> bool:
    """Return True if a template needs arguments as text: objects fail, or look like Python.

    Args:
        tokenizer: Tokenizer with the template.
        template: Text of the template, because a tokenizer may get another template.
    """

    def shows(arguments: Any) -> str | None:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]},
            {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": "x"},
        ]
        both = (_rendered(tokenizer, messages, tools=tools) for tools in ([_TOOL], None))
        return next((text for text in both if text is not None), None)

    written = json.dumps({_KEY: _VALUE})
    by_object, by_text = shows({_KEY: _VALUE}), shows(written)
    is_wrong = by_object is None or str({_KEY: _VALUE}) in by_object
    return is_wrong and by_text is not None and written in by_text


@lru_cache(maxsize=256)
def _left_out(
    tokenizer: Any,
    template: str,
    shape: tuple[Shape, ...],
    has_tools: bool,
    variables: str,
    **how: bool,
) -> int | None:
    """Return the index of the first message whose content a template leaves out; None if none.

    Samples that the template refuses are skipped, because it then refuses the messages too.
    """
    as_text = _adds_arguments(tokenizer, template)
    arguments: Any = json.dumps({_KEY: _VALUE}) if as_text else {_KEY: _VALUE}
    known = {"tool_calls": [_call(arguments)], "tool_call_id": _CALL_ID}
    messages = []
    for index, (role, _, others) in enumerate(shape):
        made: dict[str, Any] = {"role": role, "content": _mark(index)}
        messages.append({**made, **{name: known.get(name, "x") for name in others}})
    tools = [_TOOL] if has_tools else None
    text = _rendered(tokenizer, messages, tools=tools, **how, **json.loads(variables))
    if text is None:
        return None
    return next(
        (i for i, (_, is_said, _) in enumerate(shape) if is_said and _mark(i)[0] not in text), None
    )


def _mark(index: int) -> str:
    """Return content that no template mentions: private characters."""
    return chr(0xE000 + index % 6000) * 8
