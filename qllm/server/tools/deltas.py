"""Code that all readers of answers share: additions to the growing fields of a message."""

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

Delta = dict[str, Any]
"""Additions to the fields of an assistant's message."""
CALLS = "tool_calls"
"""Field with a list of calls. Each entry is a part of a whole call."""


class UnreadableError(ValueError):
    """Error: a text is not a value of the notation."""


class Scanner:
    """A scanner that finds the end of a JSON object that arrives in pieces.

    Args:
        has_tags: True if a tag may interrupt the object. In JSON alone, a tag only occurs in
            strings.
    """

    def __init__(self, *, has_tags: bool = False) -> None:
        self._has_tags = has_tags
        self._depth = 0
        self._in_string = self._is_escaped = False

    def length(self, text: str) -> tuple[int, bool]:
        """Return how many characters of `text` are in the object, and True if the object ends.

        Raises:
            UnreadableError: The text begins with a tag.
        """
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif self._has_tags and (character == "<" or "\ud800" <= character <= "\udbff"):
                if at == 0:
                    raise UnreadableError("a tag inside a JSON object")
                return at, False
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0 and not character.isspace():
                    return at + 1, True
        return len(text), False


def call_of(index: int, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call.

    Arguments that are not a text become JSON, with half surrogate pairs escaped.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()
    function = {"name": name, "arguments": text}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}


def is_name(name: Any) -> bool:
    """Return True if the name is a non-empty text without half a surrogate pair."""
    return isinstance(name, str) and bool(name) and not re.search("[\ud800-\udfff]", name)


def joined(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return whole calls, joined from parts: the first part of each call, then additions."""
    calls: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for part in parts:
        if not calls or calls[-1]["index"] != part["index"]:
            calls.append(part)
            texts.append([])
        texts[-1].append(part["function"]["arguments"])
    both = zip(calls, texts, strict=True)
    return [
        {**call, "function": {**call["function"], "arguments": "".join(text)}}
        for call, text in both
    ]


def merged(deltas: Iterable[Delta]) -> Delta:
    """Return the fields of a whole message, joined from its deltas."""
    parts: dict[str, list[Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            parts.setdefault(name, []).extend(value if name == CALLS else [value])
    return {name: joined(some) if name == CALLS else "".join(some) for name, some in parts.items()}
