"""Translation of argument values to JSON, from the notations of models and from raw text."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import regex

from qllm.server.tools.deltas import UnreadableError
from qllm.server.tools.format import LENIENT, Notation

MARKS = "\ud800-\udbff"
"""Range of characters that stand for tokens (`qllm.frontend.detokenizer`), for a regex class."""
KINDS = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
"""Types of JSON schemas."""
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WRITTEN = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?[0-9]{1,64}",
    "number": r"-?[0-9]{1,64}(?:\.[0-9]{1,64})?(?:[eE][+-]?[0-9]{1,4})?",
}
"""Pattern of each type whose values have no parts."""
_SPACE = regex.compile(r"\s*")
_HEX = "[0-9a-fA-F]"
_BROKEN = rf"(?:u{_HEX}{{0,3}}|x{_HEX}?)(?=[^0-9a-fA-F])"
_ESCAPE = rf"\\(?:[^ux]|u{_HEX}{{4}}|x{_HEX}{{2}}|{_BROKEN})"
_ATOM = regex.compile(rf"[^\s,:={{}}\[\]()\"'{MARKS}]{{1,512}}(?=[\s,}}\])])")
_WORDS = regex.compile(rf"[^,:={{}}\[\]()\"'{MARKS}]{{1,512}}?(?=\s{{0,16}}[,}}\])])")
_DEPTH = 500
"""Maximum nesting of objects and lists, because the parsers of clients also have a limit."""


def escaped(text: str) -> str:
    """Return a text escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Value:
    """A translator of one value to JSON, piece by piece.

    Args:
        notation: Notation of the value.
        forms: Pattern of each quote, by quote.
        shown: Texts of marks, for `str.translate`.
    """

    def __init__(
        self,
        notation: Notation = LENIENT,
        forms: Mapping[str, str] | None = None,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._notation, self._shown = notation, shown or {}
        quotes = forms or {quote: regex.escape(quote) for quote in notation.quotes}
        self._begin = regex.compile("|".join(quotes.values()))
        escape = f"|(?P<escape>{_ESCAPE})" if notation.escapes else ""
        self._ends = [regex.compile(f"(?P<end>{form}){escape}") for form in quotes.values()]
        self._ending: Any = None
        """Pattern of the end of the string that has begun."""
        self._stack: list[tuple[str, str]] = []
        """Closing bracket of each open object or list, and the sign after its keys."""
        self._expects = "value"
        """Next part: "value", "key", "assign" or "next". "next" is a comma or a bracket."""
        self._comma = ""
        """A comma with white space that is not returned yet. No closing bracket may follow it."""
        self._may_close = False
        self.has_ended = False

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, int]:
        """Translate the start of a text as far as it is certain.

        Returns:
            The JSON, and the number of characters of the text that were read.

        Raises:
            UnreadableError: The text cannot continue the value. A valid part before is returned
                first.
        """
        out: list[str] = []
        at = 0
        while at < len(text) and not self.has_ended:
            read = self._string if self._ending is not None else self._part
            try:
                num = read(text, at, is_last, out)
            except UnreadableError:
                if at == 0:
                    raise
                break
            if num == 0:
                break
            at += num
        return "".join(out), at

    def _string(self, text: str, at: int, is_last: bool, out: list[str]) -> int:
        """Read a part of a string, and return the number of characters read."""
        stop = self._ending.search(text, at, partial=not is_last)
        until = len(text) if stop is None else stop.start()
        out.append(escaped(text[at:until].translate(self._shown)))
        if stop is None or stop.partial:
            return until - at
        if stop.lastgroup == "end":
            self._ending = None
            out.append('"')
            self._done()
        else:
            out.append(_as_json(stop[0]))
        return int(stop.end()) - at

    def _done(self) -> None:
        """Continue after a key or a value."""
        if self._expects == "key":
            self._expects = "assign"
        else:
            self._expects, self.has_ended = "next", not self._stack

    def _part(self, text: str, at: int, is_last: bool, out: list[str]) -> int:
        """Read one part outside strings.

        Return the number of characters read, 0 for an incomplete part.
        """
        if text[at].isspace():
            space = _SPACE.match(text, at)[0]
            self._write(space, out, is_space=True)
            return len(space)
        character = text[at]
        if self._expects == "assign" or (self._expects == "next" and character == ","):
            return self._sign(character, out)
        if self._stack and character == self._stack[-1][0] and self._may_close:
            return self._close(out)
        if self._expects == "next":
            raise UnreadableError(f"{character!r} behind a value")
        quote = self._begin.match(text, at, partial=not is_last)
        if quote is not None:
            return self._quote(quote, out)
        if self._expects == "key":
            return self._bare_key(text, at, is_last, out)
        if character in "{[(":
            return self._open(character, out)
        return self._atom(text, at, is_last, out)

    def _write(self, text: str, out: list[str], *, is_space: bool = False) -> None:
        if is_space and self._comma:
            self._comma += text
            return
        out.append(self._comma + text)
        self._comma = ""

    def _sign(self, character: str, out: list[str]) -> int:
        if self._expects == "next":
            self._comma = ","
            self._expects = "key" if self._stack[-1][1] else "value"
            self._may_close = True
            return 1
        if character != self._stack[-1][1]:
            raise UnreadableError(f"{character!r} behind a key")
        self._write(":", out)
        self._expects, self._may_close = "value", False
        return 1

    def _quote(self, quote: Any, out: list[str]) -> int:
        if quote.partial:
            return 0
        forms = (n for n, end in enumerate(self._ends) if end.match(quote[0]) is not None)
        self._ending = self._ends[next(forms)]
        self._may_close = True
        self._write('"', out)
        return int(quote.end()) - int(quote.start())

    def _open(self, character: str, out: list[str]) -> int:
        begin, assign, end = tuple(self._notation.outer)
        if len(self._stack) >= _DEPTH:
            raise UnreadableError(f"more than {_DEPTH} objects and lists inside each other")
        if not self._stack and character == begin:
            frame, is_object = (end, assign), True
        elif character == "(" and not (self._notation.bare and self._stack):
            raise UnreadableError("a bracket that JSON has not")
        else:
            frame, is_object = {"{": ("}", ":"), "[": ("]", ""), "(": (")", "")}[character], False
        is_object = is_object or character == "{"
        self._write("{" if is_object else "[", out)
        self._stack.append(frame)
        self._expects, self._may_close = "key" if is_object else "value", True
        return 1

    def _close(self, out: list[str]) -> int:
        if self._expects == "value" and self._stack[-1][1]:
            raise UnreadableError("a key without a value")
        _, assign = self._stack.pop()
        self._comma = ""
        out.append("}" if assign else "]")
        self._expects, self.has_ended, self._may_close = "next", not self._stack, True
        return 1

    def _bare_key(self, text: str, at: int, is_last: bool, out: list[str]) -> int:
        assign = self._stack[-1][1]
        if not (self._notation.bare or assign == "="):
            raise UnreadableError("a key without quotes")
        pattern = rf"[^\n,:={{}}\[\]()\"'{MARKS}]{{1,256}}?(?=\s{{0,16}}{assign})"
        key = regex.match(pattern, text, pos=at, partial=not is_last)
        if key is None:
            raise UnreadableError("no key")
        if key.partial:
            return 0
        self._write(json.dumps(key[0].strip(), ensure_ascii=False), out)
        self._done()
        return len(key[0])

    def _atom(self, text: str, at: int, is_last: bool, out: list[str]) -> int:
        pattern = _WORDS if self._notation.bare else _ATOM
        found = pattern.match(text, at, partial=not is_last)
        if found is None:
            raise UnreadableError("no value")
        if found.partial:
            return 0
        written = scalar(found[0])
        if written is None and not self._notation.bare:
            raise UnreadableError(f"{found[0]!r:.80} is no value")
        self._write(escaped(found[0]).join('""') if written is None else written, out)
        self._may_close = True
        self._done()
        return len(found[0])


def _as_json(escape: str) -> str:
    """Return an escape of JSON or Python as an escape of a JSON string."""
    if escape[1] in '"\\/bfnrt' or (escape[1] == "u" and len(escape) == 6):
        return escape
    if escape[1] == "x" and len(escape) == 4:
        return f"\\u00{escape[2:]}"
    return {"\n": "", "'": "'"}.get(escape[1], "\\\\" + escaped(escape[1:]))


def scalar(text: str, *, is_exact: bool = False) -> str | None:
    """Return a number or a literal of JSON or Python as JSON; None for any other text.

    Args:
        text: The number or literal.
        is_exact: True if only numbers of JSON are allowed, not Python's.
    """
    if text in ("true", "false", "null") or _NUMBER.fullmatch(text):
        return text
    if text in _LITERALS or is_exact:
        return _LITERALS.get(text)
    try:  # as Python writes them: 1_000, .5
        number = int(text) if text.lstrip("+-").replace("_", "").isdecimal() else float(text)
    except ValueError:
        return None
    return json.dumps(number) if abs(number) < float("inf") else None


def parsed(text: str, *, is_exact: bool) -> str | None:
    """Return a whole value in JSON's or Python's notation as JSON.

    Return None if the text is not a value.
    """
    text = text.strip()
    if text[:1] not in ("{", "[", '"', "'"):
        return scalar(text, is_exact=is_exact)
    value = Value()
    try:
        found, num = value.push(text, is_last=True)
    except UnreadableError:
        return None
    return found if value.has_ended and num == len(text) else None


def kind_of(written: str) -> str:
    """Return the type of a value in JSON."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    kinds["n"] = "null"
    is_integer = written.lstrip("-").isdecimal()
    return kinds.get(written[:1]) or ("integer" if is_integer else "number")


def kinds_in(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """Return the types that a JSON schema allows.

    Args:
        schema: The schema.
        root: Schema that `$ref` points into.
        depth: Number of references and alternatives to follow.
    """
    if not isinstance(schema, Mapping) or depth == 0:
        return KINDS
    found = KINDS
    if isinstance(ref := schema.get("$ref"), str):
        found &= kinds_in(_target(ref, root), root, depth - 1)
    if (kind := schema.get("type")) is not None:
        kinds = {kind} if isinstance(kind, str) else {x for x in kind if isinstance(x, str)}
        found &= kinds | ({"integer"} if "number" in kinds else set())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    if values:
        found &= {kind_of(json.dumps(value)) for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(key), list) and some:
            found &= frozenset().union(*(kinds_in(x, root, depth - 1) for x in some))
    if isinstance(every := schema.get("allOf"), list):
        for one in every:
            found &= kinds_in(one, root, depth - 1)
    if found == KINDS:
        found = found & ({"object"} if "properties" in schema else KINDS)
        found = found & ({"array"} if "items" in schema else KINDS)
    found = found | ({"null"} if schema.get("nullable") is True else set())
    return found or KINDS


def _target(ref: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within the document points to."""
    at: Any = root
    for part in ref.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


class Argument(Protocol):
    """A translator of the raw text of one argument to JSON, piece by piece."""

    left: str
    """Text that was received but not translated yet."""

    def push(self, text: str) -> str:
        """Take a piece, and return the JSON that is certain."""
        ...

    def end(self) -> str:
        """Return the rest of the JSON."""
        ...


def argument_of(kinds: frozenset[str]) -> Argument:
    """Return the translator of an argument whose types are known."""
    if kinds == {"string"}:
        return TextArgument()
    return ValueArgument() if kinds <= {"object", "array"} else OpenArgument(kinds)


class TextArgument:
    """The translator of a text, which becomes a JSON string unchanged."""

    left = ""

    def __init__(self) -> None:
        self._quote = '"'

    def push(self, text: str) -> str:
        quote, self._quote = self._quote if text else "", self._quote if not text else ""
        return quote + escaped(text)

    def end(self) -> str:
        return self._quote + '"'


class ValueArgument:
    """The translator of an object or a list. Text that begins like neither becomes a string."""

    def __init__(self) -> None:
        self._value, self.left = Value(), ""
        self._text: TextArgument | None = None
        self._has_begun = False

    def push(self, text: str) -> str:
        return self._push(text, is_last=False)

    def end(self) -> str:
        found = self._push("", is_last=True)
        if self._text is not None:
            return found + self._text.end()
        if not self._value.has_ended:
            raise UnreadableError("a value that does not end")
        return found

    def _push(self, text: str, *, is_last: bool) -> str:
        self.left += text
        if self._text is None and not self._has_begun and (begun := self.left.lstrip()):
            self._text = None if begun[0] in "{[" else TextArgument()
            self._has_begun = True
            self.left = begun if self._text is None else self.left
        if self._text is not None:
            text, self.left = self.left, ""
            return self._text.push(text)
        out, num = "", 1
        while num and not self._value.has_ended:
            found, num = self._value.push(self.left, is_last=is_last)
            out, self.left = out + found, self.left[num:]
        if self._value.has_ended and self.left.strip():
            raise UnreadableError("text behind a value")
        return out


class OpenArgument:
    """The translator of a number or a literal, or of a text whose type the schema leaves open.

    Args:
        kinds: Types that the value may have.
    """

    left = ""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        others = "|".join(_WRITTEN[kind] for kind in sorted(kinds & _WRITTEN.keys()))
        self._others = regex.compile(rf"\s{{0,16}}(?:{others})\s{{0,16}}")
        self._held: list[str] = []
        self._start = ""
        """First characters, while these may be the start of a number or a literal."""
        self._text: TextArgument | None = None

    def push(self, text: str) -> str:
        if self._text is not None:
            return self._text.push(text)
        self._held.append(text)
        self._start += text[: 256 - len(self._start)]
        if "string" not in self._kinds or self._may_be_other():
            return ""
        self._text = TextArgument()
        return self._text.push("".join(self._held))

    def _may_be_other(self) -> bool:
        """Return True if the received text may still be a value of another type than a string."""
        begun = self._start.lstrip()[:1]
        if begun and begun in "{[":
            return {"{": "object", "[": "array"}[begun] in self._kinds
        return self._others.fullmatch(self._start, partial=True) is not None

    def end(self) -> str:
        if self._text is not None:
            return self._text.end()
        text, is_exact = "".join(self._held), "string" in self._kinds
        written = parsed(text, is_exact=is_exact)
        if not is_exact and text.strip().lower() in ("true", "false"):
            written = text.strip().lower()
        if written is None or (is_exact and kind_of(written) not in self._kinds - {"string"}):
            return json.dumps(text, ensure_ascii=False)
        return written
