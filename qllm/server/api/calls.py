"""Readers of tool calls and reasoning in an answer.

The chat template decides the format of a model's answers (`qllm.server.tools.choose`). `harmony`
reads GPT-OSS's format from tokens. `reader` reads every other format from its description. If no
format is found, a tokenizer with a `response_template` parses each answer after the answer's end.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Protocol

from qllm.frontend.detokenizer import NO_TOKEN, Detokenizer, Reading, added_tokens, decoded
from qllm.server.api.protocol import ChatRequest
from qllm.server.tools import harmony
from qllm.server.tools.choose import AUTO, format_of
from qllm.server.tools.deltas import CALLS, Delta, Scanner, call_of, is_name, merged
from qllm.server.tools.format import Format
from qllm.server.tools.formats import HERMES
from qllm.server.tools.harmony import Harmony, HarmonyPart
from qllm.server.tools.patterns import marks_in
from qllm.server.tools.reader import MarkupReader
from qllm.server.tools.tool_choice import Choice

WINDOW = 16
"""Number of tokens that is enough for a whole tag, however a tokenizer has split the tag."""
_LITERALS = {"true", "false", "null", "none"}
"""Literals of JSON and Python: words that a call may contain outside of strings."""


class Reader(Reading, Protocol):
    """A parser of reasoning and calls in an answer."""

    @property
    def num_calls(self) -> int:
        """Number of calls found so far."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        ...

    @property
    def is_in_call(self) -> bool:
        """True if a call's arguments have begun and not ended.

        At the answer's end, such arguments are cut off.
        """
        ...

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        """Take an addition to the answer, and return the delta that is certain.

        Args:
            text: Added text.
            token_ids: Tokens of the text.
            ends: Ends of the tokens' texts, from `Piece`.
        """
        ...

    def finish(self) -> Delta:
        """Return the held-back text, at the end of the answer."""
        ...


class PlainReader:
    """A reader that treats the whole answer as content."""

    num_calls = num_reasoning_tokens = 0
    is_in_call = is_thinking = False
    marks: ClassVar[Mapping[int, str]] = {}

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        return {"content": text}

    def finish(self) -> Delta:
        return {}

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        return [(text, False)]

    def undecided(self) -> str:
        return ""


class TemplateReader:
    """A reader that lets the tokenizer parse the whole answer, after the answer's end.

    Args:
        tokenizer: Tokenizer with a `response_template`.
        prompt: Token ids of the prompt.
        tools: Tools that the model sees.
        passages: Reader that finds the reasoning before the answer's end.
    """

    is_in_call = False

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], tools: Sequence[Any], passages: MarkupReader
    ) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self.marks, self.split = passages.marks, passages.split
        self.undecided, self._passages = passages.undecided, passages
        self._tokenizer, self._prompt, self._tools = tokenizer, list(prompt), list(tools)
        special = {i for i, token in added_tokens(tokenizer).items() if token.special}
        self._shown = {
            ord(mark): "" if i in special else passages.shown[ord(mark)]
            for i, mark in self.marks.items()
        }
        self._ids: list[int] = []
        self._text = ""

    @property
    def is_thinking(self) -> bool:
        return self._passages.is_thinking

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        self._ids += token_ids
        self._text += text.translate(self._shown)
        return {}

    def finish(self) -> Delta:
        try:
            delta = self._parsed()
            is_lost = _is_lost(self._text, delta, str(self._tokenizer.response_template))
        except Exception:  # noqa: BLE001 - an answer in no format is shown unchanged
            is_lost = True
        if is_lost:
            return {"content": self._text}
        self.num_calls = len(delta["tool_calls"])
        if thought := delta["reasoning_content"]:
            self.num_reasoning_tokens = len(self._tokenizer(str(thought))["input_ids"])
        return {name: value for name, value in delta.items() if value}

    def _parsed(self) -> Delta:
        """Return the fields that the tokenizer finds in the answer, up to a stop string."""
        found = self._tokenizer.parse_response(
            self._ids, prefix=self._prompt, tools=self._tools or None
        )
        thought = found.get("reasoning_content") or found.get("thinking")
        calls = [call.get("function", call) for call in found.get("tool_calls") or ()]
        made = [call_of(i, c["name"], c.get("arguments", {})) for i, c in enumerate(calls)]
        delta = {"content": found.get("content"), "reasoning_content": thought, "tool_calls": made}
        for name in ("content", "reasoning_content"):
            if delta[name]:  # the last non-empty field
                delta[name] = self._without_rest(str(delta[name]))
                break
        return delta

    def _without_rest(self, text: str) -> str:
        """Return a part of the answer without the text after a stop string."""
        text_of = Detokenizer(self._tokenizer, prompt=self._prompt)
        whole = text_of.push(self._ids)[0] + text_of.finish()
        if not whole.startswith(self._text):
            return text
        rest = whole[len(self._text) :]
        return text.removesuffix(rest if text.endswith(rest) else rest.rstrip())


def _is_lost(text: str, delta: Delta, markup: str) -> bool:
    """Return True if a call is invalid, or no field contains one of the answer's words.

    Words of the template itself count as tags. Numbers in calls are ignored, because a field may
    contain them in another notation.

    Args:
        text: The answer.
        delta: Fields of the answer.
        markup: The tokenizer's response template.
    """
    shown = Counter(_words(f"{delta['content'] or ''} {delta['reasoning_content'] or ''}"))
    tags = set(_words(markup))
    for call in delta["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        value = json.loads(arguments)
        if not (isinstance(value, dict) and is_name(name)):
            return True
        forms = (arguments, json.dumps(value), _said_in(value))  # the answer has one of these
        shown += Counter(_words(name))
        shown += reduce(or_, (Counter(_words(form)) for form in forms))
        tags |= _LITERALS
    words = Counter(_words(text)) - shown
    has_calls = bool(delta["tool_calls"])
    return any(not (word in tags or (has_calls and word.isdecimal())) for word in words)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _said_in(value: Any) -> str:
    """Return the strings and keys of a JSON value, joined."""
    found, left = list[str](), [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    return " ".join(found)


class HarmonyReader:
    """A reader of GPT-OSS's format in a growing answer.

    Args:
        parts: Parser that splits the answer into parts.
    """

    marks: ClassVar[Mapping[int, str]] = {}

    def __init__(self, parts: Harmony) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        self._parts = parts
        self._due: deque[HarmonyPart] = deque()
        """Parts that are not shown yet."""
        self._num_shown = 0
        """Number of characters that may be shown. A stop string has cut off the others, or may
        still do so.
        """
        self._arguments: Scanner | None = None
        """Scanner of the last call's arguments, until the arguments have ended."""

    @property
    def is_in_call(self) -> bool:
        return self._arguments is not None

    @property
    def is_thinking(self) -> bool:
        return self._parts.kind == "reasoning_content"

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        self._num_shown += len(text)
        for token_id in token_ids:
            self._due += self._parts.push(token_id)
        return self._shown()

    def finish(self) -> Delta:
        self._due += self._parts.finish()
        return self._shown()

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        if token_id != NO_TOKEN:
            self._parts.push(token_id)
        return [(text, self._parts.kind in ("head", "reasoning_content"))]

    def undecided(self) -> str:
        return ""

    def _shown(self) -> Delta:
        deltas: list[Delta] = []
        while self._due:
            part = self._due.popleft()
            if part.kind == "call":
                deltas.append({CALLS: [call_of(self.num_calls, part.text, "")]})
                self.num_calls += 1
                self._arguments = Scanner()
                continue
            text = part.text[: self._num_shown]
            self._num_shown -= len(text)
            if part.kind == "reasoning_content":
                self.num_reasoning_tokens += part.num_tokens
            if part.kind == "arguments" and text:
                if self._arguments is not None and self._arguments.length(text)[1]:
                    self._arguments = None
                more = {"index": self.num_calls - 1, "function": {"arguments": text}}
                deltas.append({CALLS: [more]})
            elif part.kind != "head" and text:
                deltas.append({part.kind: text})
            if len(text) < len(part.text):
                self._due.appendleft(part._replace(text=part.text[len(text) :], num_tokens=0))
                break
        return merged(deltas)


class FirstCallReader:
    """A reader of the first call only, for requests that allow at most one call.

    Args:
        reader: Reader of all calls.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.marks, self.split, self.undecided = reader.marks, reader.split, reader.undecided

    @property
    def is_thinking(self) -> bool:
        return self._reader.is_thinking

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
        found = {**delta, "tool_calls": first}  # keeps the order of fields
        return {name: value for name, value in found.items() if value}


def make_reader(
    tokenizer: Any,
    prompt: Sequence[int],
    choice: Choice,
    has_form: bool,
    tool_calls: str = AUTO,
) -> Reader:
    """Return the reader of one choice of an answer.

    Args:
        tokenizer: The model's tokenizer, or None.
        prompt: Token ids of the prompt.
        choice: Tools that may be called.
        has_form: True if a grammar constrains the answer, from the first token or after reasoning.
        tool_calls: Name of the format of the model's answers, or `auto`.
    """
    reader = _reader_of_all(tokenizer, prompt, choice, has_form, tool_calls)
    return FirstCallReader(reader) if choice.tools and not choice.parallel else reader


def reader_of(asked: ChatRequest, tool_calls: str) -> Callable[[Any, Sequence[int]], Reader]:
    """Return a function that makes the reader of an answer from a tokenizer and a prompt."""
    choice = asked.choice()
    has_form = choice.forced or asked.form() is not None
    return lambda tokenizer, prompt: make_reader(tokenizer, prompt, choice, has_form, tool_calls)


def _reader_of_all(
    tokenizer: Any, prompt: Sequence[int], choice: Choice, has_form: bool, tool_calls: str
) -> Reader:
    """Return a reader of any number of calls. The arguments are the same as for `make_reader`."""
    found = format_of(tokenizer, tool_calls)
    is_plain = has_form and not choice.tools  # a grammar may put tags into a string
    format = HERMES if found is None or is_plain else found
    if format.has_heads:
        names = {tool["function"]["name"] for tool in choice.tools}
        return HarmonyReader(Harmony(tokenizer, harmony.marks_of(tokenizer), prompt, names))
    thinks, is_thinking = _thinks(tokenizer, prompt, format)
    marks = marks_in(format, tokenizer)
    if found is None and not has_form and getattr(tokenizer, "response_template", None):
        passages = MarkupReader(format, thinks=thinks, is_thinking=is_thinking, marks=marks)
        return TemplateReader(tokenizer, prompt, choice.tools, passages)
    thinks = thinks and not has_form  # a grammar may put the tag into a string
    if not (thinks or is_thinking or choice.tools or format.hidden):
        return PlainReader()
    return MarkupReader(
        format,
        thinks=thinks,
        is_thinking=is_thinking,
        tools=choice.tools,
        marks=marks,
    )


def _thinks(tokenizer: Any, prompt: Sequence[int], format: Format) -> tuple[bool, bool]:
    """Return if the model reasons, and if the prompt ends inside reasoning."""
    if format.reasoning is None:
        return False, False
    template = str(getattr(tokenizer, "chat_template", None) or "")
    before = format.reasoning[0].strip()
    tag = re.match(r"<[^<>]*>|\S+", before)
    thinks = tag is not None and tag[0] in template
    ends = thinks and decoded(tokenizer, prompt[-WINDOW:]).rstrip().endswith(before)
    return thinks, ends
