"""A reader of reasoning and tool calls in the format of Hermes, Qwen and related models.

    <think>reasoning</think>content<tool_call>{"name": "f", "arguments": {...}}</tool_call>

It reads the answer as it grows. Every character belongs to one place: reasoning, content, the
arguments of a call, or a tag. White space next to a tag, and the JSON around arguments, count as
the tag. Text that looks like a call but is invalid stays content.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qllm.frontend.detokenizer import added_tokens, decoded
from qllm.server.tools.deltas import Delta, Value, call_of, is_name, with_call
from qllm.server.tools.tool_choice import CLOSE, OPEN
from qllm.types import THINK, THOUGHT

TAGS = (THINK, THOUGHT, OPEN, CLOSE)
MARK_OF = {tag: chr(0xD800 + n) for n, tag in enumerate(TAGS)}
"""Mark, in a text, of each tag that is a single token (see `qllm.frontend.detokenizer`)."""
TAG_OF = {mark: tag for tag, mark in MARK_OF.items()}
_SHOWN = str.maketrans(TAG_OF)
WINDOW = 16
"""Number of tokens that always contain a tag, however a tokenizer has split it."""
_SAID = "said"
"""State inside a call whose name was reported."""
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
"""Start of a call, up to its arguments."""
_TAIL = re.compile(
    r'(?:\s*,\s*"(?:id|type)"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[0-9]+|null))*[\s}]*', re.DOTALL
)
"""Text after the arguments of a call that has no meaning."""
_KEY = r'\s*("(?:[^"\\]|\\.)*")\s*:\s*'
_FIRST, _NEXT = re.compile(r"\s*\{" + _KEY, re.DOTALL), re.compile(r"\s*," + _KEY, re.DOTALL)
"""Key of a field of an object, with the characters before its value."""
_NO_JSON = "<" + MARK_OF[CLOSE]
"""Characters that JSON has only in strings; elsewhere they end it."""
_JSON = json.JSONDecoder()


def marks_of(tokenizer: Any) -> dict[int, str]:
    """Return the marks of the tags that are single tokens, by token id.

    A tokenizer never splits an added token. So if a tag is one, the same characters made of other
    tokens are not a tag.
    """
    added = added_tokens(tokenizer)
    return {i: MARK_OF[x.content] for i, x in added.items() if x.content in MARK_OF}


def ends_with(tokenizer: Any, prompt: Sequence[int], tag: str) -> bool:
    """Return True if a prompt ends with a tag, ignoring white space at its end."""
    return decoded(tokenizer, prompt[-WINDOW:]).rstrip().endswith(tag)


class HermesReader:
    """A reader of tags in a growing answer, and of a call's arguments once its name is known.

    `<think>` counts as a tag only after nothing but white space, since the answer began or since
    another tag. Elsewhere it is content that mentions the tag.

    Args:
        thinks: True if the model reasons, so that `<think>` is a tag.
        is_thinking: True if the prompt already ends inside reasoning.
        calls: True if `<tool_call>` is a tag.
        marks: Marks by token id, from `marks_of`.
        spelled: True if a tag that has a mark may also be spelled, since a grammar made it.
    """

    def __init__(
        self,
        *,
        thinks: bool,
        is_thinking: bool,
        calls: bool,
        marks: Mapping[int, str] | None = None,
        spelled: bool = False,
    ) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self.marks = marks or {}
        have = set(self.marks.values())
        self._forms = {
            tag: [mark] * (mark in have) + [tag] * (spelled or mark not in have)
            for tag, mark in MARK_OF.items()
        }
        self._left = ""
        """Text that was read but may begin a tag, or a call whose arguments have not begun."""
        self._inside = THINK if is_thinking else ""
        self._value: Value | None = None
        """Scanner for the end of a call's JSON, or of its arguments once its name was reported."""
        self._num_valued = 0
        """Characters of `_left` that `_value` has read, in a call whose name was not reported."""
        self._tags = {"": [THINK] * thinks + [OPEN] * calls, THINK: [THOUGHT]}
        self._is_bare = is_thinking
        """True if only white space followed the last tag: it is dropped."""
        self._may_think = True
        """True if only white space followed the start of the answer, or the last tag."""
        self._delta: Delta = {}
        self._undecided = ""
        """Text that `split` has not yet yielded."""

    @property
    def is_in_call(self) -> bool:
        """True if the arguments of a call have begun and not ended."""
        return self._inside == _SAID and self._value is not None

    @property
    def is_thinking(self) -> bool:
        """True if the answer reasons now."""
        return self._inside == THINK

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        """Take an addition to the answer, and return the delta that is certain."""
        self._left += text
        thinks, was = self.is_thinking, len(token_ids)
        while self._step():
            if thinks and not self.is_thinking:  # tokens may arrive together: count up to the tag
                thinks, said = False, len(text) - len(self._left)
                was = sum(end < said for end in ends[: was - 1]) + 1 if ends else was
                self.num_reasoning_tokens += was
        if thinks:
            self.num_reasoning_tokens += was
        return self._taken()

    def finish(self) -> Delta:
        """Return the text that was held back, at the end of the answer."""
        while self._inside == OPEN:
            self._refuse()
            while self._step():
                pass
        left, self._left = self._left, ""
        if self._inside != _SAID:
            self._say(left)
        elif not (self.is_in_call or self._only_ends(left)):
            self._inside = ""
            self._say(left)
        return self._taken()

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        """Split text into reasoning, with its tags, and other text; see `Reading`."""
        for character in text:
            was_thinking = self.is_thinking
            self.push(character, ())
            self._undecided += character
            is_reasoning = was_thinking or self.is_thinking
            if is_reasoning or not self._may_begin(THINK):
                part, self._undecided = self._undecided, ""
                yield part, is_reasoning

    def undecided(self) -> str:
        """Return the text that is held back because it may begin `<think>`."""
        return self._undecided

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, {}
        return delta

    def _may_begin(self, tag: str) -> bool:
        """Return True if the text held back may be the beginning of a tag."""
        is_open = tag in self._tags.get(self._inside, ()) and (tag != THINK or self._may_think)
        return is_open and any(_overlap(self._left, form) for form in self._forms[tag])

    # -- steps: each reads up to the next certain thing; False if it has not arrived

    def _step(self) -> bool:
        if self._inside == OPEN:
            return self._step_call()
        if self._inside == _SAID:
            return self._step_arguments() if self._value is not None else self._step_behind()
        tags = self._tags[self._inside]
        found = [hit for tag in tags if (hit := self._find(tag)) is not None]
        if not found:
            held = [
                _overlap(self._left, f) for t in tags if self._may_begin(t) for f in self._forms[t]
            ]
            self._say(self._cut(len(self._left) - max(held, default=0)))
            return False
        at, form, tag = min(found)
        self._say(self._cut(at))
        self._cut(len(form))
        self._inside = "" if tag == THOUGHT else tag
        self._is_bare = self._may_think = True
        if tag == OPEN:
            self._value, self._num_valued = Value(), 0
        return True

    def _cut(self, num: int) -> str:
        """Remove and return the first characters of `_left`."""
        part, self._left = self._left[:num], self._left[num:]
        return part

    def _find(self, tag: str) -> tuple[int, str, str] | None:
        """Return the place of a tag, its spelling and the tag; None if it is not there."""
        found = [(at, form) for form in self._forms[tag] if (at := self._left.find(form)) >= 0]
        if not found:
            return None
        at, form = min(found)
        is_said = tag == THINK and (not self._may_think or self._left[:at].strip())
        return None if is_said else (at, form, tag)

    def _step_call(self) -> bool:
        """Read a call up to its arguments, or to its end if its fields have another order."""
        if (head := _HEAD.match(self._left)) is not None:
            return self._begin_call(head)
        body = self._left.lstrip()
        if body and body[0] != "{":
            return self._refuse()
        assert self._value is not None
        has_ended = False
        while self._num_valued < len(self._left) and not has_ended:
            character = self._left[self._num_valued]
            if character in _NO_JSON and not self._value.in_string:
                return self._refuse()
            self._num_valued += 1
            has_ended = self._value.length(character)[1]
        if not has_ended:
            return False
        if (call := _parsed(self._left[: self._num_valued])) is None:
            return self._refuse()
        self._cut(self._num_valued)
        self._add(call_of(self.num_calls, *call))
        self.num_calls += 1
        self._inside, self._value = _SAID, None
        return True

    def _refuse(self) -> bool:
        """Treat a tag and the text after it as content, because no call follows."""
        self._inside, self._is_bare = "", False
        self._say(OPEN)
        return True

    def _begin_call(self, head: re.Match[str]) -> bool:
        """Begin a call, whose name is known and whose arguments begin now."""
        try:
            name = json.loads(head[1].translate(_SHOWN))
        except (ValueError, RecursionError):  # an invalid escape
            return self._refuse()
        if not is_name(name):
            return self._refuse()
        self._add(call_of(self.num_calls, name, ""))
        self.num_calls += 1
        self._value, self._inside = Value(), _SAID
        self._cut(head.end())
        return True

    def _step_arguments(self) -> bool:
        assert self._value is not None
        length, has_ended = self._value.length(self._left)
        if length:
            part = {"arguments": self._cut(length).translate(_SHOWN)}
            self._add({"index": self.num_calls - 1, "function": part})
        if has_ended:
            self._value = None
        return has_ended

    def _step_behind(self) -> bool:
        """Read from the end of the arguments to the tag. Other text there is content."""
        tail = _TAIL.match(self._left)
        assert tail is not None
        for form in self._forms[CLOSE]:
            if self._left.startswith(form, tail.end()):
                self._cut(tail.end() + len(form))
                break
        else:
            if self._only_ends(self._left) or self._left.lstrip().startswith(","):
                if (close := self._find(CLOSE)) is None:
                    return False
                self._inside, self._is_bare = "", False
                self._say(self._cut(close[0]))
                self._cut(len(close[1]))
            else:  # the tag is missing
                self._cut(tail.end())
        self._inside, self._is_bare, self._may_think = "", True, True
        return True

    def _only_ends(self, text: str) -> bool:
        """Return True if all the text, up to its end, may belong to the end of a call."""
        behind = text[_TAIL.match(text).end() :]  # type: ignore[union-attr]
        return any(form.startswith(behind) for form in self._forms[CLOSE])

    def _say(self, text: str) -> None:
        """Add reasoning or content."""
        if self._is_bare:
            text = text.lstrip()
        if text:
            self._is_bare = False
            self._may_think = self._may_think and text.isspace()
            name = "reasoning_content" if self.is_thinking else "content"
            self._delta[name] = self._delta.get(name, "") + text.translate(_SHOWN)

    def _add(self, call: dict[str, Any]) -> None:
        """Add a call, or an addition to the last one."""
        self._delta["tool_calls"] = with_call(self._delta.get("tool_calls", []), call)


def _parsed(text: str) -> tuple[str, str] | None:
    """Return the name and arguments of a call; None if a part is not understood."""
    fields = _fields(text)
    if fields is None:
        return None
    name, _ = fields.pop("name", (None, ""))
    given = [fields.pop(key) for key in ("arguments", "parameters") if key in fields]
    if not is_name(name) or len(given) > 1 or not fields.keys() <= {"id", "type"}:
        return None
    value, written = given[0] if given else ({}, "{}")
    if isinstance(value, str):
        written = value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return (name, written.translate(_SHOWN)) if isinstance(value, dict) else None


def _fields(text: str) -> dict[str, tuple[Any, str]] | None:
    """Return the fields of a JSON object, each value with its source text; None if invalid."""
    found: dict[str, tuple[Any, str]] = {}
    at, before = 0, _FIRST
    try:
        while (start := before.match(text, at)) is not None:
            key, value_at = json.loads(start[1]), start.end()
            value, at = _JSON.raw_decode(text, value_at)
            if key in found:
                return None
            found[key], before = (value, text[value_at:at]), _NEXT
    except (ValueError, RecursionError):
        return None
    return found if found and text[at:].strip() == "}" else None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
