"""A reader that finds reasoning and tool calls in a growing answer, from a format's description.

Every character belongs to one place: reasoning, content, the arguments of a call, or a tag. White
space next to a tag, and the text around arguments, count as the tag. Text that looks like a call
but is invalid stays content.

The reader is a generator. The generator stops while the next part is not certain, and continues
when more text arrives. So the result does not depend on the pieces in which an answer arrives.
"""

import html
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import regex

from qllm.server.tools.deltas import (
    CALLS,
    Delta,
    Scanner,
    UnreadableError,
    call_of,
    is_name,
    merged,
)
from qllm.server.tools.format import JSON, LENIENT, Format, Notation
from qllm.server.tools.patterns import SPACE, patterns_of
from qllm.server.tools.values import (
    KINDS,
    MARKS,
    Argument,
    Value,
    argument_of,
    kinds_in,
)

Steps = Generator[None, None, Any]
"""A part of the reading, as a generator that stops while more text is needed."""
NAMES, ARGUMENTS, OTHERS = ("name",), ("arguments", "parameters"), ("id", "type")
"""Keys of a call that is written as a JSON object."""
_KEY = regex.compile(
    rf'{SPACE}(?:(?P<end>\}})|(?P<comma>,)?{SPACE}"(?P<key>\w{{1,32}})"{SPACE}:{SPACE}(?=\S))'
)
_TEXT = regex.compile(r'"(?:[^"\\]|\\[\s\S]){0,1024}"')
_MARK = regex.compile(f"[{MARKS}]")
_FIRST = regex.compile(r"\s*\S")
_BLOCK = 4096
"""Most characters of a value that are read at once."""


class NoCall(Exception):  # noqa: N818 - no error: the text is content
    """Signal: a text looks like a call but is not a call."""


class MarkupReader:
    """A reader of the tags in a growing answer.

    Reasoning begins only at the start of the answer or after another tag, white space aside.
    Elsewhere the tag of reasoning is content: the model only mentions the tag.

    Args:
        format: Format of the answer.
        thinks: True if the model reasons. If False, a tag of reasoning is content.
        is_thinking: True if the prompt already ends inside reasoning.
        tools: Tools that may be called. Without tools, the tags of calls are content.
        marks: Tags that are single tokens, by token id.
    """

    def __init__(
        self,
        format: Format,
        *,
        thinks: bool,
        is_thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self.num_calls = self.num_reasoning_tokens = 0
        tags = sorted(set((marks or {}).values()))
        self.marks = {i: chr(0xD800 + tags.index(tag)) for i, tag in (marks or {}).items()}
        self.shown = {0xD800 + n: tag for n, tag in enumerate(tags)}
        """Tag of each mark, by the mark's code point."""
        self._format, self._thinks = format, thinks
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        shown = tuple((chr(mark), tag) for mark, tag in self.shown.items())
        self._patterns = patterns_of(format, shown, tuple(self._schemas), thinks=thinks)
        self._is_thinking = is_thinking
        self._text, self._at = "", 0
        """Text of the answer, and the number of its characters that were read."""
        self._read: list[str] | None = None
        """Text read since a tag. This text is content if no call follows."""
        self._has_ended = False
        self._is_bare = is_thinking
        """True if only white space followed the last tag. Such white space is dropped."""
        self._is_fresh = True
        """True if only white space has followed the start of the answer or the last tag."""
        self._gap, self._has_spoken = "", False
        """White space before a call, and True if content came before the white space.

        The white space is content if more content follows the call.
        """
        self._name: str | None = None
        """Name of a call that has begun but is not reported yet."""
        self._is_in_call = self._is_broken = False
        self._deltas: list[Delta] = []
        """Additions that `push` has not returned yet."""
        self._undecided = ""
        """Text that `split` has not yet yielded."""
        self._may_think = False
        """True if the held-back text may be the start of the tag of reasoning."""
        self._steps = self._answer()
        next(self._steps)

    @property
    def is_in_call(self) -> bool:
        """True if the arguments of a call have begun and not ended, or are invalid."""
        return self._is_in_call or self._is_broken

    @property
    def is_thinking(self) -> bool:
        """True if the answer reasons now."""
        return self._is_thinking

    def push(self, text: str, token_ids: Sequence[int], ends: Sequence[int] = ()) -> Delta:
        """Take an addition to the answer, and return the delta that is certain."""
        self._text = self._text[self._at :] + text
        self._at = 0
        was_thinking, was = self._is_thinking, len(token_ids)
        self._behind: int | None = None
        """Number of unread characters when the reasoning ended."""
        next(self._steps)
        if was_thinking and self._behind is not None:  # tokens may arrive together: stop at the tag
            said = len(text) - self._behind
            was = sum(end < said for end in ends[: was - 1]) + 1 if ends else was
        self.num_reasoning_tokens += was if was_thinking else 0
        return self._taken()

    def finish(self) -> Delta:
        """Return the held-back text, at the end of the answer."""
        self._has_ended = True
        next(self._steps)
        return self._taken()

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        """Split text into reasoning, with the tags of reasoning, and other text.

        `Reading` describes this.
        """
        for character in text:
            was_thinking = self._is_thinking
            self.push(character, ())
            self._undecided += character
            is_reasoning = was_thinking or self._is_thinking
            if is_reasoning or not self._may_think:
                part, self._undecided = self._undecided, ""
                yield part, is_reasoning

    def undecided(self) -> str:
        """Return the held-back text that may be the start of reasoning."""
        return self._undecided

    def _taken(self) -> Delta:
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    # -- the answer and its text

    def _answer(self) -> Steps:
        while True:
            if self._is_thinking:
                yield from self._reason()
            else:
                yield from self._speak()
            while self._at == len(self._text):
                yield

    def _look(self, look: Callable[..., Any]) -> Any:
        """Match or search a pattern in the unread text."""
        return look(self._text, self._at, partial=not self._has_ended)

    def _match(self, pattern: Any) -> Steps:
        """Return the match at the start of the unread text.

        Return None if no match is possible any more.
        """
        while True:
            found = self._look(pattern.match)
            if found is None or not found.partial:
                return found
            yield

    def _cut(self, end: int | None = None) -> str:
        """Return the unread text up to `end`, by default all, and mark this text as read."""
        end = len(self._text) if end is None else end
        part, self._at = self._text[self._at : end], end
        if self._read is not None:
            self._read.append(part)
        return part

    def _cut_before(self, found: Any) -> str:
        """Return the unread text before a match, if there is one, and mark this text as read."""
        return self._cut(None if found is None else found.start())

    def _say(self, text: str) -> None:
        """Add reasoning or content."""
        if self._is_bare:
            text = text.lstrip()
        if text and not self._is_thinking:
            text, self._gap, self._has_spoken = self._gap + text, "", True
        if text:
            self._is_bare = False
            self._is_fresh = self._is_fresh and text.isspace()
            name = "reasoning_content" if self._is_thinking else "content"
            self._deltas.append({name: text.translate(self.shown)})

    def _pass_tag(self, *, is_bare: bool) -> None:
        """Continue after a tag."""
        self._is_bare, self._is_fresh = is_bare, True

    def _reason(self) -> Steps:
        """Read reasoning up to its end."""
        found = self._look(self._patterns.thought.search)
        self._say(self._cut_before(found))
        if found is None or found.partial:
            yield
            return
        self._cut(found.end())
        self._is_thinking, self._behind = False, len(self._text) - self._at
        assert self._format.reasoning is not None
        self._pass_tag(is_bare=self._format.reasoning[1][-1].isspace())

    def _speak(self) -> Steps:
        """Read content up to a tag, then the part that the tag begins."""
        found = (yield from self._first()) if self._is_fresh else None
        if found is None:
            found = self._look(self._patterns.tags.search)
            if found is None and self._has_ended:
                self._drop_cut_tag()
            self._say(self._cut_before(found))
            if found is None or found.partial:
                yield
                return
        yield from self._tag(found)

    def _first(self) -> Steps:
        """Return the match of a part that may only begin an answer or follow a tag.

        Return None without a match.
        """
        self._may_think = self._thinks
        found = yield from self._match(self._patterns.first)
        self._may_think = False
        return found

    def _drop_cut_tag(self) -> None:
        """Remove a tag at the end of the answer if neither a call nor text follows the tag."""
        found = self._patterns.tags.search(self._text, self._at, partial=True)
        tag = found[0]
        is_section = bool(self._format.sections) and _MARK.search(tag) is not None
        if is_section or (tag.strip() and self._patterns.blank.fullmatch(tag)):
            self._text = self._text[: found.start()]

    def _tag(self, found: Any) -> Steps:
        """Read a tag in content, and the text that belongs to the tag."""
        groups = found.groupdict()
        if groups.get("call") is not None:
            self._keep_gap(found)
            if not (yield from self._call(found)):
                self._gap = ""
                self._say(self._cut(self._behind_first()))
        elif groups.get("section") is not None:
            self._keep_gap(found)
            yield from self._section(found)
        else:
            self._cut(found.end())
            self._is_thinking = groups.get("thought") is not None
            before = self._format.reasoning[0] if self._format.reasoning else ""
            self._pass_tag(is_bare=self._is_thinking and before[-1].isspace())

    def _keep_gap(self, found: Any) -> None:
        """Store the white space before calls, until content follows or the answer ends."""
        if self._has_spoken and not self._gap:
            self._gap = found[0][: len(found[0]) - len(found[0].lstrip())]

    def _behind_first(self) -> int:
        """Return the position after the first unread character that is not white space."""
        return int(_FIRST.match(self._text, self._at).end())

    # -- calls

    def _section(self, found: Any) -> Steps:
        """Read all calls of a section. A section without a call is content.

        In a section with calls, all text other than the calls is dropped.
        """
        others, was = [self._cut(found.end())], self.num_calls
        while True:
            found = self._look(self._patterns.inside.search)
            others.append(self._cut_before(found))
            if found is None or found.partial:
                if self._has_ended:
                    break
                yield
            elif found["close"] is not None:
                others.append(self._cut(found.end()))
                break
            elif not (yield from self._call(found)):
                others.append(self._cut(self._behind_first()))
            if self.num_calls > was:
                others.clear()
        text = "".join(others)
        self._pass_tag(is_bare=bool(self._format.lead))
        if self.num_calls == was and not self._patterns.blank.fullmatch(text):
            self._is_bare, self._gap = False, ""
            self._say(text)

    def _call(self, found: Any) -> Steps:
        """Read a call whose start was found.

        Return False, with no text read, if there is no call.
        """
        self._read = []
        self._cut(found.end())
        try:
            yield from self._body(found.groupdict())
        except (NoCall, UnreadableError):
            if self._read is not None:
                self._restore("".join(self._read))
                self._read = self._name = None
                return False
            self._is_broken = self._is_broken or self._is_in_call
            self._is_in_call, self._is_bare = False, False
            yield from self._rest()
        else:
            if (tail := (yield from self._match(self._patterns.tail))) is not None:
                self._cut(tail.end())
        self._pass_tag(is_bare=bool(self._format.lead))
        return True

    def _restore(self, text: str) -> None:
        """Put a text back in front of the unread text."""
        self._text, self._at = text + self._text[self._at :], 0

    def _rest(self) -> Steps:
        """Read the text after an invalid part of a call, as content."""
        while True:
            found = self._look(self._patterns.rest.search)
            self._say(self._cut_before(found))
            if found is not None and not found.partial:
                self._cut(found.end())
                return
            if self._has_ended:
                return
            yield

    def _body(self, groups: Mapping[str, str | None]) -> Steps:
        """Read a call after its start, up to the end of the arguments."""
        name = groups.get("name")
        if name is None:
            yield from self._object()
            return
        name = self._unescaped(name)
        self._begin(name)
        if groups.get("empty") is not None:
            self._write_all("{}")
        elif self._format.argument:
            yield from self._arguments(name)
        elif self._format.notation == JSON:
            yield from self._verbatim(self._write)
        else:
            yield from self._value(self._format.notation, self._write)

    def _unescaped(self, text: str) -> str:
        text = text.strip().translate(self.shown)
        return html.unescape(text) if self._format.is_escaped else text

    def _begin(self, name: Any) -> None:
        """Begin a call. The reader reports the call with the first arguments."""
        if not is_name(name) or (self._format.at_start and name not in self._schemas):
            raise NoCall
        self._name = name

    def _write(self, arguments: str) -> None:
        """Add arguments to the call."""
        if not arguments:
            return
        if self._name is not None:
            call = call_of(self.num_calls, self._name, arguments)
            self._name, self._read, self._is_in_call = None, None, True
            self.num_calls += 1
        else:
            call = {"index": self.num_calls - 1, "function": {"arguments": arguments}}
        self._deltas.append({CALLS: [call]})

    def _write_all(self, arguments: str) -> None:
        """Add all arguments of a call."""
        self._write(arguments)
        self._is_in_call = False

    def _cut_off(self) -> None:
        """Accept a call that the end of the answer cuts off, if the call was reported.

        Raises:
            NoCall: No call was reported.
        """
        if self._read is not None:
            raise NoCall

    def _value(self, notation: Notation, write: Callable[[str], None]) -> Steps:
        """Read one value, and write it as JSON."""
        quotes = self._patterns.quotes if notation is self._format.notation else None
        value = Value(notation, quotes, self.shown)
        while True:
            part = self._text[self._at : self._at + _BLOCK]
            is_last = self._has_ended and self._at + len(part) == len(self._text)
            text, num = value.push(part, is_last=is_last)
            self._cut(self._at + num)
            write(text)
            if value.has_ended:
                self._is_in_call = False
                return
            if num == 0 and self._has_ended:
                self._cut_off()
                write(self._cut().translate(self.shown))
                return
            if num == 0 or self._at == len(self._text):
                yield

    def _verbatim(self, write: Callable[[str], None]) -> Steps:
        """Read a JSON object, and write the object unchanged, even if it is invalid."""
        scanner = Scanner(has_tags=True)
        while True:
            num, has_ended = scanner.length(self._text[self._at : self._at + _BLOCK])
            write(self._cut(self._at + num).translate(self.shown))
            if has_ended:
                self._is_in_call = False
                return
            if self._at < len(self._text):
                continue
            if self._has_ended:
                self._cut_off()
                return
            yield

    # -- a call as a JSON object

    def _object(self) -> Steps:
        """Read a JSON object with the name and the arguments of a call, in any order."""
        held: str | None = None
        self._cut(self._at + 1)
        is_first = True
        while True:
            left = OTHERS + ARGUMENTS * (held is None)
            left += NAMES * (self._name is None and self._read is not None)
            key = yield from self._key(left, is_first=is_first)
            is_first = False
            if key is None:
                break
            if key in ARGUMENTS:
                held = yield from self._given()
            elif key in NAMES:
                text = yield from self._match(_TEXT)
                self._begin(_loaded(text and self._cut(text.end()).translate(self.shown)))
            else:
                yield from self._value(LENIENT, lambda _: None)
            if self._name is not None and held:
                self._write_all(held)
        if self._read is not None:
            if self._name is None:
                raise NoCall
            self._write_all("{}")

    def _key(self, known: tuple[str, ...], *, is_first: bool) -> Steps:
        """Read and return a known key of the object; None at the end of the object."""
        found = yield from self._match(_KEY)
        if found is None and self._has_ended and not self._text[self._at :].strip():
            self._cut_off()
            return None
        if found is None:
            raise NoCall
        is_key = found["key"] in known and (found["comma"] is None) is is_first
        if found["end"] is None and not is_key:
            raise NoCall
        self._cut(found.end())
        return found["key"]

    def _given(self) -> Steps:
        """Read the arguments and return their JSON.

        Return an empty text if the JSON was written already.
        """
        held: list[str] = []
        if self._text[self._at] == "{":
            write = held.append if self._name is None else self._write
            yield from self._verbatim(write)
            return "".join(held)
        if self._text[self._at] != '"':
            raise NoCall
        yield from self._value(LENIENT, held.append)
        text = _loaded("".join(held))
        if not isinstance(_loaded(text), dict):
            raise NoCall
        return text

    # -- a call with each argument by itself

    def _arguments(self, name: str) -> Steps:
        """Read all arguments of a call. Their values are texts or JSON."""
        schema = self._schemas.get(name)
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        left = dict(properties) if isinstance(properties, Mapping) else {}
        before = "{"
        while True:
            found = yield from self._match(self._patterns.argument)
            if found is None:
                if self._has_ended:
                    self._cut_off()
                    return
                raise NoCall
            self._cut(found.end())
            if found["end"] is not None:
                self._write_all("{}" if before == "{" else "}")
                return
            key = self._unescaped(found["key"])
            declared = _declared(found.groupdict())
            kinds = declared or kinds_in(left.pop(key, None), schema)
            before += f"{json.dumps(key, ensure_ascii=False)}: "
            yield from self._argument(before, argument_of(kinds), left)
            before = ", "

    def _argument(self, before: str, argument: Argument, left: Mapping[str, Any]) -> Steps:
        """Read the value of an argument.

        Args:
            before: JSON to write before the value.
            argument: Translator of the value.
            left: Arguments that may still follow.
        """
        has_ended = False
        while not has_ended:
            found, text = self._end_of_value(left)
            try:
                written = argument.push(text.translate(self.shown))
                has_ended = found is not None and not found.partial
                written += argument.end() if has_ended else ""
            except UnreadableError:
                self._restore(argument.left)
                raise
            self._write(before + written if written else "")
            before = "" if written else before
            if has_ended:
                self._cut(found.end())
            elif self._has_ended:
                self._cut_off()
                return
            else:
                yield

    def _end_of_value(self, left: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the match of a value's end, or None, and the text before.

        Mark this text as read.
        """
        ends = self._patterns.last_value if self._has_ended else self._patterns.value
        texts: list[str] = []
        while True:
            found = self._look(ends.search)
            texts.append(self._cut_before(found))
            key = None if found is None or found.partial else found["key"]
            if key is None or self._unescaped(key) in left:
                return found, "".join(texts)
            texts.append(self._cut(self._at + 1))


def _loaded(text: str | None) -> Any:
    """Return a value from its JSON.

    Raises:
        NoCall: There is no JSON, or the JSON is invalid.
    """
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def _declared(groups: Mapping[str, str | None]) -> frozenset[str] | None:
    """Return the types that the argument itself declares for its value.

    Return None without a declaration.
    """
    if (is_text := groups.get("string")) is not None:
        return frozenset({"string"}) if is_text == "true" else KINDS - {"string"}
    kind = groups.get("type")
    return None if kind is None else frozenset({kind}) & KINDS or KINDS
