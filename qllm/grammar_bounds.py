"""Limits for the parts of a JSON answer for which the schema sets no limit.

A grammar often allows endless repetition: text in a string, digits, further items, an object inside
an object. A model may repeat without end. So this module follows the JSON of an answer. When a part
has its maximum length, the tokens that would make the part longer are forbidden, if other tokens
remain. Parts that a schema demands, or allows with its own limits, are never forbidden
(`Bounds.of`).

Some markups of tool calls write strings as raw text between two markers. Raw text has the bound of
a string. At the bound, only tokens that spell the second marker are allowed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""One bit per token: token i has bit i % 32 of word i // 32."""

_QUOTE, _ESCAPE, _HEX, _COMMA, _DOT = b'"\\u,.'
_OPEN, _CLOSE, _DIGITS, _EXPONENT = b"[{", b"]}", b"0123456789", b"eE"
_STRUCTURE = re.compile(rb"[][{},]")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_FIRST = bytes(range(0x80, 0xC0))
"""Bytes of a UTF-8 character other than its first byte."""
_ESCAPED = re.compile(rb"\\(?:u[0-9a-fA-F]{0,4}|.)?", re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]|\\.|\\\Z)*"?', re.DOTALL)
_INTEGER, _FRACTION, _POWER = range(3)
"""Parts of a number."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Maximum lengths of the parts of a JSON answer for which the schema sets no length."""

    text: int = 65_536
    """Most characters of a string. An escape counts as one character."""
    items: int = 1_000
    """Most items of a list. Also: most members of an object whose schema describes unnamed members.
    """
    others: int = 32
    """Number of members by which any other object may exceed the schema's largest object."""
    depth: int = 64
    """Maximum nesting of lists and objects."""
    digits: tuple[int, int, int] = (15, 20, 3)
    """Most digits of a number: before the point, after the point, and in the exponent."""

    def of(self, schemas: Iterable[Any]) -> "Bounds":
        """Return these bounds, raised to the lengths that the schemas of an answer need."""
        text, items, named, digits = self.text, self.items, 0, self.digits[_INTEGER]
        says_others = False
        for key, value in _walk(list(schemas)):
            if isinstance(value, str):
                text = max(text, len(value))
            elif isinstance(value, list):
                items = max(items, len(value))
            elif isinstance(value, Mapping):
                items = max(items, len(value))
                if key == "properties":
                    named = max(named, len(value))
                is_map = value.get("type") in ("object", ["object"]) and "properties" not in value
                says_others = says_others or is_map
            elif isinstance(value, int | float) and not isinstance(value, bool):
                digits = max(digits, len(f"{abs(value):.0f}"))
                if key in ("maxLength", "minLength"):
                    text = max(text, int(value))
                elif key in ("maxItems", "minItems", "maxProperties", "minProperties"):
                    items = max(items, int(value))
            if key in ("additionalProperties", "patternProperties"):
                says_others = says_others or value is not False
        others = named + self.others if named and not says_others else items
        return Bounds(text, items, others, self.depth, (digits, *self.digits[1:]))


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a JSON value and all values inside.

    Each value follows its key in the enclosing object.
    """
    left = [(key, value)]
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += [("", item) for item in value]


class Sorts:
    """The tokens of a vocabulary, sorted by their effect on JSON. All answers share these sets.

    Args:
        bytes_of: Function that returns the bytes of a token.
        vocab_size: Number of tokens.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], vocab_size: int) -> None:
        self._texts = texts = [bytes_of(i) for i in range(vocab_size)]
        leading = np.array([len(text) - len(text.lstrip(_DIGITS)) for text in texts])
        self._digits = [_words(leading > num) for num in range(leading.max())]
        self._num_chars = np.array([_num_chars(_before_end(text)) for text in texts])
        self._num_all_chars = np.array([len(text.translate(None, _NOT_FIRST)) for text in texts])
        self.most_chars = int(self._num_all_chars.max())
        """Number of characters of the longest token."""
        self.closes = _words(text.lstrip()[:1] in (b"]", b"}") for text in texts)
        """Tokens that begin with the end of a list or an object."""
        outside = [_structure(text, in_string=False) for text in texts]
        inside = [_structure(text, in_string=True) for text in texts]
        both = (outside, inside)
        self.opens = tuple(_words(b"[" in x or b"{" in x for x in found) for found in both)
        """Tokens that begin a list or an object, in two sets: outside a string, and inside.
        """
        self.commas = tuple(_words(b"," in x for x in found) for found in both)
        """Tokens with a comma, so that a further item or member follows. Two sets, as in `opens`.
        """
        self.ends_and_commas = tuple(_words(_is_outer(x) for x in found) for found in both)
        """Tokens that end the innermost list or object and add an item to an outer one."""

    @lru_cache(maxsize=512)  # noqa: B019 - one per vocabulary, which lives as long as the process
    def longer(self, most: int, *, is_escaped: bool) -> Words:
        """Return the tokens with more than `most` characters before the end of the current string.

        Args:
            most: Number of characters.
            is_escaped: True if the token continues an escape, so that a quote may not be the end.
        """
        return _words((self._num_all_chars if is_escaped else self._num_chars) > most)

    @lru_cache(maxsize=512)  # noqa: B019 - one per vocabulary, which lives as long as the process
    def longer_raw(self, most: int) -> Words:
        """Return the tokens with more than `most` characters of any kind."""
        return _words(self._num_all_chars > most)

    @lru_cache(maxsize=512)  # noqa: B019 - one per vocabulary, which lives as long as the process
    def spelling(self, text: bytes) -> Words:
        """Return the tokens that are the start of a text, or that start with the text."""
        return _words(x != b"" and (text.startswith(x) or x.startswith(text)) for x in self._texts)

    @lru_cache(maxsize=512)  # noqa: B019 - one per vocabulary, which lives as long as the process
    def beginning(self, text: bytes) -> Words:
        """Return the tokens that start with a text."""
        return _words(x.startswith(text) for x in self._texts)

    def digits(self, most: int) -> Words | None:
        """Return the tokens that begin with more than `most` digits; None if no token does."""
        return self._digits[most] if most < len(self._digits) else None


def _num_chars(text: bytes) -> int:
    """Count characters by their first bytes. An escape counts as one character."""
    return len(_ESCAPED.sub(b"e", text).translate(None, _NOT_FIRST))


def _before_end(text: bytes) -> bytes:
    """Return the part of a token that is inside the current string."""
    found = _REST_OF_STRING.match(text)
    assert found is not None  # never None: the pattern also matches an empty text
    return text[: found.end()].removesuffix(b'"')


def _structure(text: bytes, *, in_string: bool) -> bytes:
    """Return the brackets and commas of a token outside of strings.

    Args:
        text: Bytes of the token.
        in_string: True if the token begins inside a string.
    """
    if _STRUCTURE.search(text) is None:
        return b""
    if in_string:
        text = _REST_OF_STRING.sub(b"", text, count=1)
    return b"".join(_STRUCTURE.findall(_STRING.sub(b"", text)))


def _is_outer(structure: bytes) -> bool:
    """Return True if a comma follows the end of a list or object that began before the token."""
    depth = 0
    for byte in structure:
        depth += (byte in _OPEN) - (byte in _CLOSE)
        if byte == _COMMA and depth < 0:
            return True
    return False


def _words(are: Iterable[Any]) -> Words:
    bits = np.fromiter(are, np.bool_)
    bits = np.pad(bits, (0, -len(bits) % 32))
    return np.packbits(bits, bitorder="little").view(np.int32)


class RawText(NamedTuple):
    """The rest of a marker before raw text: what follows the marker."""

    end: bytes
    """Marker after the raw text."""
    may_be_json: bool
    """True if a list or an object may be there instead of raw text: a bracket begins it."""


class Written:
    """The state of the JSON that an answer has written, as far as the bounds need it.

    Args:
        bounds: Bounds of the answer.
        sorts: Sorted tokens of the vocabulary.
        raw: Raw texts, by the markers before them.
    """

    def __init__(
        self, bounds: Bounds, sorts: Sorts, raw: Mapping[bytes, RawText] | None = None
    ) -> None:
        self._bounds, self._sorts, self._raw = bounds, sorts, raw or {}
        self._openers = tuple(self._raw)
        ends = [text.end for text in self._raw.values()]
        self._most_tail = max(map(len, [b"", *self._raw, *ends]))
        self.restart()

    def restart(self) -> None:
        """Begin again with an empty answer."""
        self._num_items: list[int] = []
        """Number of commas so far in each unfinished list and object, the innermost last."""
        self._most_items: list[int] = []
        """Most items of each unfinished list and object."""
        self._in_string = self._begins_escape = False
        self._num_chars = self._escape = 0
        """Number of characters of the current string, and of missing bytes of its last escape."""
        self._part, self._num_digits = _INTEGER, 0
        """Part of the current number, and the digits so far in this part; 0 digits outside of a
        number.
        """
        self._tail = b""
        """Last bytes of the answer, which are searched for markers of raw text."""
        self._inside: RawText | None = None
        """Current raw text; None outside of raw text."""

    def push(self, text: bytes) -> None:
        """Take the bytes of a token."""
        for byte in text:
            raw = self._inside
            if raw is not None and raw.may_be_json and self._num_chars == 0 and byte in _OPEN:
                self._inside = None
            if self._inside is not None:
                self._num_chars += byte & 0xC0 != 0x80
            elif self._in_string:
                self._push_inside(byte)
            else:
                self._push_outside(byte)
            if self._raw:
                self._push_marker(byte)

    def _push_marker(self, byte: int) -> None:
        """Enter raw text after the first marker, and leave it after the second marker."""
        self._tail = self._tail[1 - self._most_tail :] + bytes([byte])
        if self._inside is not None:
            if self._tail.endswith(self._inside.end):
                self._inside, self._tail = None, b""
        elif self._tail.endswith(self._openers):
            opener = max((x for x in self._openers if self._tail.endswith(x)), key=len)
            self._inside, self._tail = self._raw[opener], b""
            self._in_string, self._num_chars = False, 0

    def _push_inside(self, byte: int) -> None:
        if self._escape:
            self._escape -= 1
            if self._begins_escape:
                self._escape = 4 if byte == _HEX else 0
            self._begins_escape = False
        elif byte == _QUOTE:
            self._in_string = False
        else:
            self._num_chars += byte & 0xC0 != 0x80
            self._begins_escape = byte == _ESCAPE
            self._escape = int(self._begins_escape)

    def _push_outside(self, byte: int) -> None:
        if byte in _DIGITS:
            self._num_digits += 1
            return
        is_number = self._num_digits > 0 or self._part != _INTEGER
        if is_number and byte in b"+-":
            return
        self._part = _INTEGER
        if is_number and byte == _DOT:
            self._part = _FRACTION
        elif is_number and byte in _EXPONENT:
            self._part = _POWER
        self._num_digits = 0
        if byte == _QUOTE:
            self._in_string, self._num_chars = True, 0
        elif byte in _OPEN:
            self._num_items.append(0)
            most = self._bounds.items if byte == _OPEN[0] else self._bounds.others
            self._most_items.append(most)
        elif byte in _CLOSE and self._num_items:
            self._num_items.pop()
            self._most_items.pop()
        elif byte == _COMMA and self._num_items:
            self._num_items[-1] += 1

    def limit(self, words: Words) -> None:
        """Forbid the tokens that would make a part longer than its bound.

        Args:
            words: Tokens that the grammar allows. At least one token stays allowed.
        """
        if self._inside is not None:
            self._limit_raw(words, self._inside.end)
            return
        bounds, sorts = self._bounds, self._sorts
        room = max(0, bounds.text - self._num_chars) + self._escape
        if self._in_string and room < sorts.most_chars:
            _keep(words, words & ~sorts.longer(room, is_escaped=self._escape > 0))
        left = max(0, bounds.digits[self._part] - self._num_digits)
        if not self._in_string and (longer := sorts.digits(left)) is not None:
            _keep(words, words & ~longer)
        if not self._num_items:
            return
        both = zip(self._num_items, self._most_items, strict=True)
        is_full = [num + 1 >= most for num, most in both]
        if is_full[-1]:
            _keep(words, words & ~sorts.commas[self._in_string])
        elif any(is_full):
            _keep(words, words & ~sorts.ends_and_commas[self._in_string])
        if len(self._num_items) >= bounds.depth:
            if len(self._num_items) > bounds.depth and not self._in_string:
                _keep(words, words & sorts.closes)
            _keep(words, words & ~sorts.opens[self._in_string])

    def _limit_raw(self, words: Words, end: bytes) -> None:
        """Forbid the tokens that would make raw text longer than a string may be."""
        room = self._bounds.text - self._num_chars
        if room > 0:
            if room < self._sorts.most_chars:
                _keep(words, words & ~self._sorts.longer_raw(room))
            return
        known = next(n for n in range(len(end), -1, -1) if self._tail.endswith(end[:n]))
        for rest in (end[known:], end):  # first the rest of the marker, then the whole
            whole = words & self._sorts.beginning(rest)
            if whole.any():
                words[:] = whole
                return
        _keep(words, words & self._sorts.spelling(end[known:]))


def _keep(words: Words, fewer: Words) -> None:
    """Replace the allowed tokens by fewer, unless none would remain."""
    if fewer.any():
        words[:] = fewer
