"""Calls of tools and reasoning, found in an answer's text.

A tokenizer with a `response_template` parses its model's answers itself, when they have ended;
GPT-OSS's form is read from its tokens (`harmony`). All others are read as Hermes, Qwen and their
kin write them, while they come:

    <think>reasoning</think>content<tool_call>{"name": "f", "arguments": {...}}</tool_call>
"""

import json
import re
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from qllm.types import THINK, THOUGHT

from .harmony import Harmony, Part, marks_of
from .tool_choice import CLOSE, OPEN, Choice

_SAID = "said"
"""Inside a call, behind its name."""
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)
"""A call up to its arguments."""

Delta = dict[str, Any]
"""Fields of an assistant's message that grow."""


class Reader(Protocol):
    """Finds reasoning and calls in an answer."""

    @property
    def num_calls(self) -> int:
        """Found so far."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        ...

    @property
    def is_in_call(self) -> bool:
        """Whether the arguments of a call have begun and not ended: a stop string cut them off."""
        ...

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        """Take what was added to the answer; return what is certain.

        Args:
            text: What was added.
            token_ids: Its tokens.
            ends: See `Piece`.
        """
        ...

    def finish(self) -> Delta:
        """Return what was held back: the answer has ended."""
        ...


class PlainReader:
    """Everything is content."""

    num_calls = num_reasoning_tokens = 0
    is_in_call = False

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        return {"content": text}

    def finish(self) -> Delta:
        return {}


class _Value:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def length(self, text: str) -> tuple[int, bool]:
        """How much of `text`, which begins or goes on with the object, is its; whether it ends."""
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


class HermesReader:
    """Reads tags as they come, and a call's arguments too once its name is known.

    Args:
        thinks: Whether the model reasons: `<think>` is looked for.
        is_thinking: Whether the prompt has begun to.
        calls: Whether calls are looked for.
    """

    def __init__(self, *, thinks: bool, is_thinking: bool, calls: bool) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self._left = ""
        """Read, but may begin a tag; or a call whose arguments have not begun."""
        self._inside = THINK if is_thinking else ""
        self._arguments: _Value | None = None
        """Set inside the arguments of a call whose name is said."""
        self._tags = {"": [THINK] * thinks + [OPEN] * calls, THINK: [THOUGHT], OPEN: [CLOSE]}
        self._tags[_SAID] = [CLOSE]
        self._is_bare = is_thinking
        """Nothing but white space since the last tag: it is left out."""
        self._delta: Delta = {}

    @property
    def is_in_call(self) -> bool:
        return self._arguments is not None

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        self._left += text
        thinks, was = self._inside == THINK, len(token_ids)
        while self._step():
            if thinks and self._inside != THINK:  # tokens may come together: those up to the tag
                thinks, said = False, len(text) - len(self._left)
                was = sum(end < said for end in ends[: was - 1]) + 1 if ends else was
                self.num_reasoning_tokens += was
        if thinks:
            self.num_reasoning_tokens += was
        delta, self._delta = self._delta, {}
        return delta

    def finish(self) -> Delta:
        if self._inside == OPEN:
            if not self._whole_call(self._left):
                self._say(OPEN + self._left)
        elif self._inside != _SAID:
            self._say(self._left)
        self._left = ""
        delta, self._delta = self._delta, {}
        return delta

    def _step(self) -> bool:
        """Read up to the next tag; False if it is not there yet."""
        if self._arguments is not None:
            return self._step_arguments(self._arguments)
        if self._inside == OPEN and (head := _HEAD.match(self._left)) is not None:
            return self._begin_call(head)
        tags = self._tags[self._inside]
        found = [(at, tag) for tag in tags if (at := self._left.find(tag)) >= 0]
        if not found:
            if self._inside in ("", THINK):
                certain = len(self._left) - max((_overlap(self._left, t) for t in tags), default=0)
                self._say(self._left[:certain])
                self._left = self._left[certain:]
            return False
        at, tag = min(found)
        before, self._left = self._left[:at], self._left[at + len(tag) :]
        if tag == CLOSE:
            if self._inside == OPEN and not self._whole_call(before):
                self._say(OPEN + before + CLOSE)
            self._inside = ""
        else:
            self._say(before)
            self._inside = "" if tag == THOUGHT else tag
        self._is_bare = True
        return True

    def _begin_call(self, head: re.Match[str]) -> bool:
        """The name is there and the arguments begin: from here on it is a call."""
        try:
            name = json.loads(head[1])
        except ValueError:  # an escape that is none
            self._say(OPEN + self._left[: head.end()])
            self._inside, self._left = "", self._left[head.end() :]
            return True
        self._add(_call(self.num_calls, name, ""))
        self.num_calls += 1
        self._arguments, self._inside = _Value(), _SAID
        self._left = self._left[head.end() :]
        return True

    def _step_arguments(self, value: _Value) -> bool:
        length, has_ended = value.length(self._left)
        if length:
            part = {"arguments": self._left[:length]}
            self._add({"index": self.num_calls - 1, "function": part})
            self._left = self._left[length:]
        if has_ended:
            self._arguments = None
        return has_ended

    def _say(self, text: str) -> None:
        """Add reasoning or content."""
        if self._is_bare:
            text = text.lstrip()
        if text:
            self._is_bare = False
            name = "reasoning_content" if self._inside == THINK else "content"
            self._delta[name] = self._delta.get(name, "") + text

    def _whole_call(self, text: str) -> bool:
        """Add a call in another order of its parts; False if it is none."""
        try:
            made = json.loads(text)
            name, arguments = made["name"], made.get("arguments", {})
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        if not isinstance(name, str):
            return False
        self._add(_call(self.num_calls, name, arguments))
        self.num_calls += 1
        return True

    def _add(self, call: dict[str, Any]) -> None:
        """Add a call, or what was added to the last one."""
        self._delta["tool_calls"] = _with_call(self._delta.get("tool_calls", []), call)


class TemplateReader:
    """Asks the tokenizer, which knows how its model writes; at the end, for it reads whole answers.

    Args:
        tokenizer: With a `response_template`.
        prompt: Token ids of the prompt.
        tools: Those that the model was told of.
    """

    is_in_call = False

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tools: Sequence[Any]) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self._tokenizer, self._prompt, self._tools = tokenizer, list(prompt), list(tools)
        self._ids: list[int] = []
        self._text = ""

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        self._ids += token_ids
        self._text += text
        return {}

    def finish(self) -> Delta:
        try:
            found = self._tokenizer.parse_response(
                self._ids, prefix=self._prompt, tools=self._tools or None
            )
        except Exception:  # noqa: BLE001 - the answer has no such form: it is shown as it is
            return {"content": self._text}
        thought = found.get("reasoning_content") or found.get("thinking")
        calls = [call.get("function", call) for call in found.get("tool_calls") or ()]
        self.num_calls = len(calls)
        if thought:
            self.num_reasoning_tokens = len(self._tokenizer(str(thought))["input_ids"])
        made = [_call(i, c["name"], c.get("arguments", {})) for i, c in enumerate(calls)]
        delta = {"content": found.get("content"), "reasoning_content": thought, "tool_calls": made}
        for name in ("content", "reasoning_content"):
            if delta[name]:  # the last of them that there is
                delta[name] = self._without_rest(str(delta[name]))
                break
        return {name: value for name, value in delta.items() if value}

    def _without_rest(self, text: str) -> str:
        """A part of the answer without what is behind a stop string."""
        whole = self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if not whole.startswith(self._text):
            return text
        rest = whole[len(self._text) :]
        return text.removesuffix(rest if text.endswith(rest) else rest.rstrip())


class HarmonyReader:
    """Reads GPT-OSS's form as it comes.

    Args:
        parts: Cuts the answer into its parts.
    """

    def __init__(self, parts: Harmony) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self._parts = parts
        self._due: deque[Part] = deque()
        """Not shown yet."""
        self._num_shown = 0
        """Characters that may be shown: a stop string has cut the others off, or may."""
        self._arguments: _Value | None = None
        """Those of the last call, until they have ended."""

    @property
    def is_in_call(self) -> bool:
        return self._arguments is not None

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        self._num_shown += len(text)
        for token_id in token_ids:
            self._due += self._parts.push(token_id)
        return self._shown()

    def finish(self) -> Delta:
        self._due += self._parts.finish()
        return self._shown()

    def _shown(self) -> Delta:
        delta: Delta = {}
        while self._due:
            part = self._due.popleft()
            if part.kind == "call":
                calls = delta.get("tool_calls", [])
                delta["tool_calls"] = _with_call(calls, _call(self.num_calls, part.text, ""))
                self.num_calls += 1
                self._arguments = _Value()
                continue
            text = part.text[: self._num_shown]
            self._num_shown -= len(text)
            if part.kind == "reasoning_content":
                self.num_reasoning_tokens += part.num_tokens
            if part.kind == "arguments" and text:
                if self._arguments is not None and self._arguments.length(text)[1]:
                    self._arguments = None
                more = {"index": self.num_calls - 1, "function": {"arguments": text}}
                delta["tool_calls"] = _with_call(delta.get("tool_calls", []), more)
            elif part.kind != "head" and text:
                delta[part.kind] = delta.get(part.kind, "") + text
            if len(text) < len(part.text):
                self._due.appendleft(part._replace(text=part.text[len(text) :], num_tokens=0))
                break
        return delta


class FirstCallReader:
    """Leaves out all calls but the first, where a request allows one at most.

    Args:
        reader: Finds them all.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def num_calls(self) -> int:
        return min(self._reader.num_calls, 1)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def is_in_call(self) -> bool:
        return self._reader.is_in_call and self._reader.num_calls == 1

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        return self._without_others(self._reader.push(text, token_ids, ends))

    def finish(self) -> Delta:
        return self._without_others(self._reader.finish())

    @staticmethod
    def _without_others(delta: Delta) -> Delta:
        if "tool_calls" not in delta:
            return delta
        first = [part for part in delta["tool_calls"] if part["index"] == 0]
        found = {**delta, "tool_calls": first}  # in the same order
        return {name: value for name, value in found.items() if value}


def _call(index: int, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that begins `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def make_reader(tokenizer: Any, prompt: Sequence[int], choice: Choice, has_form: bool) -> Reader:
    """The reader of one choice of an answer.

    Args:
        tokenizer: Of the model, or None.
        prompt: Token ids of the prompt.
        choice: What may be called.
        has_form: Whether a grammar holds the answer, from its first token or behind its reasoning.
    """
    reader = _reader_of_all(tokenizer, prompt, choice, has_form)
    return FirstCallReader(reader) if choice.tools and not choice.parallel else reader


def _reader_of_all(tokenizer: Any, prompt: Sequence[int], choice: Choice, has_form: bool) -> Reader:
    """A reader that finds all calls, however many may be; arguments are those of `make_reader`."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if not has_form and (marks := marks_of(tokenizer)):
        return HarmonyReader(Harmony(tokenizer, marks, prompt))
    if tokenizer is not None and not has_form and getattr(tokenizer, "response_template", None):
        return TemplateReader(tokenizer, prompt, choice.tools)
    thinks = THINK in template
    end = str(tokenizer.decode(list(prompt[-16:]))) if thinks else ""
    is_thinking = end.rstrip().endswith(THINK)
    thinks = thinks and not has_form  # a form may hold the tag in a string
    if not thinks and not is_thinking and not choice.tools:
        return PlainReader()
    return HermesReader(thinks=thinks, is_thinking=is_thinking, calls=bool(choice.tools))


def _with_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Calls with another one, or with more of the last one."""
    if not calls or calls[-1]["index"] != part["index"]:
        return [*calls, part]
    last, more = calls[-1], part["function"]["arguments"]
    function = {**last["function"], "arguments": last["function"]["arguments"] + more}
    return [*calls[:-1], {**last, "function": function}]


def merged(deltas: Sequence[Delta]) -> Delta:
    """The fields of a whole message from its deltas."""
    whole: Delta = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for part in value:
                    whole[name] = _with_call(whole.get(name, []), part)
            else:
                whole[name] = whole.get(name, "") + value
    return whole
