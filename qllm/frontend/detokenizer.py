"""Turn token ids into text while they arrive, and stop at the request's stop strings.

What was handed out is never taken back. So two things wait: characters whose bytes are not all
there (a decoder shows U+FFFD for them), and text that may turn out to begin a stop string.

A special token has no text here. Where one matters, because it is a tag of the answer or part of a
stop string, a *mark* stands for it: half of a surrogate pair, which no decoded text contains.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from qllm.errors import InvariantError
from qllm.types import SamplingParams

INCOMPLETE = "\ufffd"
MAX_WINDOW = 64
"""Tokens decoded together at most; only broken text ever needs more than a handful."""
CONTEXT = 16
"""Tokens kept when a full window is cut."""
MAX_PENDING_CHARS = 3
"""U+FFFDs that the next token may still turn into one character (byte fallback: 3 bytes of 4)."""


NO_TOKEN = -1
STOP_MARKS = 0xDC00
"""First mark of the special tokens of stop strings; a `Reading` has those from 0xD800 on."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str | list[str]:
        """Return the text of `token_ids`."""


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of ids that are all there: special tokens are in it, spaces stay as they are."""
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def _byte_characters() -> dict[str, int]:
    """The bytes by the characters that byte-level tokens write for them, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(x): x for x in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_characters()


def bytes_of(tokenizer: Any, token_id: int, text: str) -> bytes:
    """The UTF-8 of a token, also of one that is only a part of a character.

    Args:
        tokenizer: Byte-level, or with byte fallback (`<0xE2>`); of others `text` is all there is.
        token_id: The token.
        text: What it is decoded to alone.
    """
    if INCOMPLETE in text:
        token = tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, bytes):
            return token
        if (single := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes([int(single[1], 16)])
        if all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
    return text.encode()


class Reading(Protocol):
    """Knows the tags of an answer, and so where it reasons: nothing ends it there."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Tokens that are tags, and the mark that the text has for each."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether the answer reasons now."""
        ...

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        """Cut what a token added into parts.

        Returns:
            Parts of the text, and whether each is reasoning. What only the next tokens decide comes
            with them.
        """
        ...

    def undecided(self) -> str:
        """The text that is in no part yet; it is no reasoning if the answer ends here."""
        ...


MakeReading = Callable[[Any, Sequence[int]], Reading]
"""Makes that of an answer, from the tokenizer and the ids of its prompt."""


class Detokenizer:
    """The text of one request, token by token. Special tokens are left out.

    Every piece is decoded behind the piece before it, because a decoder may treat the start of a
    text in another way (sentencepiece strips a space there):

        ids    [ context | pending ]      text   [ sent | new ]

    The pieces join to `tokenizer.decode(all ids)`, with two exceptions. Spaces are not cleaned up,
    which would change what was already handed out. And a byte-fallback decoder that meets bytes
    which are no UTF-8 breaks the good characters around them too; those handed out stay good.

    Args:
        tokenizer: Of the model.
        stop: Stop strings. The text of a special token in them stands for that token too.
        keep_stop: Whether the stop string is part of the text.
        min_tokens: Tokens in which nothing ends the answer.
        stop_ids: Tokens that end the answer where it does not reason.
        reading: Makes what knows the tags of the answer, with the first token; None knows none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        reading: Callable[[], Reading] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keep_stop = keep_stop
        self._num_free = min_tokens
        """Tokens to come in which nothing ends the answer."""
        self._stop_ids = stop_ids
        self._make_reading = reading
        self._reading: Reading | None = None
        special = _special_in(tokenizer, stop)
        self._marks = {id_: chr(STOP_MARKS + n) for n, id_ in enumerate(special)}
        """The marks of tokens that have one."""
        self._hidden = dict.fromkeys(map(ord, self._marks.values()))
        """Marks that are not part of the text."""
        self._stop = {s: s for s in stop}
        """What is looked for, and the stop string that it stands for."""
        self._texts = special
        self._ids: list[int] = []
        self._num_context = 0
        """Leading ids of the window whose text was read."""
        self._num_sent = 0
        """Leading characters of the window's text that were read."""
        self._held = ""
        """Read, but may begin a stop string."""
        self._has_begun = self._stopped = False
        self.stop_string: str | None = None
        """The one that ended the answer."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        reading: MakeReading | None = None,
    ) -> "Detokenizer | None":
        """Make that of a request; None without a tokenizer."""
        if tokenizer is None:
            return None
        return cls(
            tokenizer,
            params.stop,
            keep_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            stop_ids=frozenset(params.stop_token_ids if reading is not None else ()),
            reading=None if reading is None else partial(reading, tokenizer, prompt_ids),
        )

    @property
    def can_stop(self) -> bool:
        """Whether the answer may end here, before the engine knows."""
        return bool(self._stop or self._stop_ids)

    def _begin(self) -> None:
        """Make what the first token needs."""
        self._has_begun = True
        if self._make_reading is not None:
            self._reading = self._make_reading()
            added = added_tokens(self._tokenizer) if self._reading.marks else {}
            for token_id, mark in self._reading.marks.items():
                self._hidden.pop(ord(self._marks.get(token_id, mark)), None)
                self._marks[token_id] = mark
                self._texts[token_id] = added[token_id].content
        for stop in list(self._stop):
            marked = stop
            for token_id, text in self._texts.items():
                marked = marked.replace(text, self._marks[token_id])
            self._stop[marked] = stop

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take further ids.

        Returns:
            The text that is now certain, and whether the answer has ended: a stop string is there,
            or a stop id. The text before the stop string is complete then; further ids are ignored.
        """
        if not self._has_begun:
            self._begin()
        text = ""
        for token_id in token_ids:
            if self._stopped:
                break
            text += self._take(token_id)
        return text.translate(self._hidden), self._stopped

    def _take(self, token_id: int) -> str:
        """Return what is certain with one more token, and look for what ends the answer."""
        is_free = self._num_free > 0
        self._num_free -= is_free
        is_end = token_id in self._stop_ids and not is_free
        if (reading := self._reading) is None:
            parts: Iterable[tuple[str, bool]] = [(self._read(token_id), False)]
        else:
            is_end = is_end and not reading.is_thinking
            parts = reading.split(self._read(token_id), token_id)
        text = "".join(self._passed(part, is_free or thinks) for part, thinks in parts)
        return text + self._end() if is_end else text

    def _passed(self, part: str, is_free: bool) -> str:
        """Return the text that is certain after a part of it; a free part does not end the answer.

        A stop string does not begin before such a part and end behind it.
        """
        if self._stopped:
            return ""
        if not is_free:
            return self._release(part)
        held, self._held = self._held, ""
        return held + part

    def _end(self) -> str:
        """End the answer here; return what was held back."""
        held, self._held, self._stopped = self._held, "", True
        return held

    def finish(self) -> str:
        """Return the text that was held back, incomplete characters as U+FFFD."""
        if self._stopped:
            return ""
        parts: list[tuple[str, bool]] = [(self._unread(), False)]
        if self._reading is not None:
            parts = [
                *self._reading.split(parts[0][0], NO_TOKEN),
                (self._reading.undecided(), False),
            ]
        text = "".join(self._passed(part, thinks) for part, thinks in parts)
        if not self._stopped:
            text += self._end()
        self._ids.clear()
        return text.translate(self._hidden)

    def _unread(self) -> str:
        """The text that waits for more bytes of a character."""
        if self._num_context == len(self._ids):  # nothing came since
            return ""
        return self._decode(self._ids)[self._num_sent :]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if not isinstance(text, str):
            raise InvariantError(f"the tokenizer decoded {ids} to {text!r}, which must be a str")
        return text

    def _read(self, token_id: int) -> str:
        """Append one id to the window and return the text that can no longer change."""
        if (mark := self._marks.get(token_id)) is not None:
            before = self._unread()
            del self._ids[self._num_context :]
            self._num_sent = len(self._decode(self._ids))
            return before + mark
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_full = len(self._ids) > MAX_WINDOW
        if text.endswith(INCOMPLETE):
            return self._cut(text) if is_full else ""
        if len(text) <= self._num_sent:  # a special token, or a space stripped at the start
            if text or is_full:
                self._ids.pop()
            return ""
        new = text[self._num_sent :]
        if self._num_context:
            self._ids = self._ids[self._num_context :]
            text = self._decode(self._ids)
        self._num_context = len(self._ids)
        self._num_sent = len(text)
        return new

    def _cut(self, text: str) -> str:
        """Shorten a window full of broken characters: only its end can still change."""
        certain = max(self._num_sent, len(text) - MAX_PENDING_CHARS)
        self._ids = self._ids[-CONTEXT:]
        shorter = self._decode(self._ids)
        if not shorter.endswith(text[certain:]):
            certain = len(text)
        new = text[self._num_sent : certain]
        self._num_context = 0
        self._num_sent = len(shorter) - (len(text) - certain)
        return new

    def _release(self, new: str) -> str:
        """Return what cannot be part of a stop string; cut at the stop string that ends first."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self._held, self._stopped = "", True
            _, at, stop = min(found)
            self.stop_string = self._stop[stop]
            return text[:at] + (self.stop_string if self._keep_stop else "")
        certain = len(text) - max(_overlap(text, s) for s in self._stop)
        self._held = text[certain:]
        return text[:certain]


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """The tokens that a tokenizer never splits (`content`, `special`), by id."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def _special_in(tokenizer: Any, stop: Sequence[str]) -> dict[int, str]:
    """The special tokens whose text is in a stop string, the longest first."""
    added = added_tokens(tokenizer) if stop else {}
    found = {
        i: x.content for i, x in added.items() if x.special and any(x.content in s for s in stop)
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
