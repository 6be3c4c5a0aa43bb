"""Parts that readers of an answer share: the growing fields of a message."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

Delta = dict[str, Any]
"""Additions to the fields of an assistant's message."""


class Value:
    """A scanner that finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def in_string(self) -> bool:
        """True if the next character is inside a string."""
        return self._in_string

    def length(self, text: str) -> tuple[int, bool]:
        """Return the number of characters of `text` in the object, and True if it ends there."""
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0 and not character.isspace():
                    return at + 1, True
        return len(text), False


def call_of(index: int, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call; arguments that are no text become JSON, with half surrogate pairs escaped."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()
    function = {"name": name, "arguments": text}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}


def is_name(name: Any) -> bool:
    """Return True if the name is a non-empty text without half a surrogate pair."""
    return isinstance(name, str) and bool(name) and not re.search("[\ud800-\udfff]", name)


def with_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls with a new call added, or with the last one extended."""
    if not calls or calls[-1]["index"] != part["index"]:
        return [*calls, part]
    last, more = calls[-1], part["function"]["arguments"]
    function = {**last["function"], "arguments": last["function"]["arguments"] + more}
    return [*calls[:-1], {**last, "function": function}]


def merged(deltas: Sequence[Delta]) -> Delta:
    """Return the fields of a whole message, joined from its deltas."""
    whole: Delta = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for part in value:
                    whole[name] = with_call(whole.get(name, []), part)
            else:
                whole[name] = whole.get(name, "") + value
    return whole
