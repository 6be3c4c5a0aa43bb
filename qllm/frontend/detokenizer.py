"""Text of token ids while they arrive, up to the request's stop strings.

Delivered text never changes. So two kinds of text wait: incomplete characters, which a decoder
shows as U+FFFD, and text that may begin a stop string.

A special token has no text in an answer. If a special token is a tag of the answer or a part of a
stop string, a *mark* replaces it: half of a surrogate pair, which no decoded text contains.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from qllm.errors import InvariantError
from qllm.types import SamplingParams

INCOMPLETE = "\ufffd"
MAX_WINDOW = 64
"""Largest number of tokens decoded together. Only broken text needs more than a few tokens."""
CONTEXT = 16
"""Number of tokens that remain in the window when a full window is cut."""
MAX_PENDING_CHARS = 3
"""Most U+FFFDs that the next token can turn into one character (byte fallback: 3 bytes of 4)."""


NO_TOKEN = -1
STOP_MARKS = 0xDC00
"""First mark of special tokens in stop strings. A `Reading` uses the marks from 0xD800 on."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this module needs."""

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str | list[str]:
        """Return the text of `token_ids`."""


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int], *, special: bool = True) -> str:
    """Return the text of complete ids, with unchanged spaces.

    Args:
        tokenizer: Tokenizer of the model.
        token_ids: The ids.
        special: True if special tokens are part of the text.
    """
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    if not isinstance(text, str):
        raise InvariantError(f"the tokenizer decoded {token_ids} to {text!r}, which must be a str")
    return text


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's map from the characters of byte-level tokens to bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(x): x for x in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_characters()
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""Pattern of a token that is one byte, in a vocabulary that falls back to bytes."""


def bytes_of(tokenizer: Any, token_id: int, text: str) -> bytes:
    """Return the UTF-8 bytes of a token, even if they are only a part of a character.

    Args:
        tokenizer: Tokenizer. If the tokenizer is neither byte-level nor has byte fallback
            (`<0xE2>`), `text` gives the bytes.
        token_id: The token.
        text: Decoded text of the token alone.
    """
    if INCOMPLETE in text:
        token = tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, bytes):
            return token
        if (single := FALLBACK.fullmatch(token)) is not None:
            return bytes([int(single[1], 16)])
        if all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
    return text.encode()


def token_text(tokenizer: Any, token_id: int) -> str:
    """Return the text of a token inside a text, with the leading space that some decoders strip."""
    alone = decoded(tokenizer, [token_id])
    twice = decoded(tokenizer, [token_id, token_id])
    is_whole = INCOMPLETE not in alone and twice.startswith(alone)
    return twice[len(alone) :] if is_whole else alone


def token_texts(
    tokenizer: Any, token_ids: Sequence[int], *, special: bool, is_whole: bool
) -> list[str]:
    """Return the text that each token adds.

    Args:
        tokenizer: Tokenizer of the model.
        token_ids: All ids.
        special: True if special tokens are part of the text.
        is_whole: True if no token follows, so that the last token also adds its incomplete
            character.
    """
    text_of = Detokenizer(tokenizer, special=special)
    found = [text_of.push([token_id])[0] for token_id in token_ids]
    if is_whole:
        text = decoded(tokenizer, token_ids, special=special)
    else:
        text = certain_text(tokenizer, token_ids, special=special)[0]
    if found:
        found[-1] += text[sum(map(len, found)) :]
    return found


def certain_text(tokenizer: Any, token_ids: Sequence[int], *, special: bool) -> tuple[str, int]:
    """Return the text of ids that later ids cannot change. An incomplete character may change.

    Args:
        tokenizer: Tokenizer of the model.
        token_ids: The ids.
        special: True if special tokens are part of the text.

    Returns:
        The text, and the number of last ids that hold the incomplete character.
    """
    text = decoded(tokenizer, token_ids, special=special)
    num = _num_open(tokenizer, token_ids) if text.endswith(INCOMPLETE) else 0
    if num and FALLBACK.fullmatch(str(tokenizer.convert_ids_to_tokens(token_ids[-num]))):
        # all tokens of the run are broken
        return decoded(tokenizer, token_ids[:-num], special=special), num
    return text[: len(text) - bool(num)], num


def _num_open(tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Return the number of last ids that hold first bytes of a character without its last bytes."""
    data = b""
    for num, token_id in enumerate(reversed(token_ids), 1):
        if _is_special(tokenizer, token_id):
            continue
        data = bytes_of(tokenizer, token_id, decoded(tokenizer, [token_id])) + data
        reader = getincrementaldecoder("utf-8")("replace")
        reader.decode(data)
        if reader.getstate()[0]:
            return num
        if len(data) > MAX_PENDING_CHARS:
            break
    return 0


def _is_special(tokenizer: Any, token_id: int) -> bool:
    """Return True if a token has no text where special tokens are left out."""
    token = added_tokens(tokenizer).get(token_id)
    return token is not None and token.special


def _is_inside(tokenizer: Any, token_id: int) -> bool:
    """Return True if a token begins inside a character."""
    alone = decoded(tokenizer, [token_id])
    return alone.startswith(INCOMPLETE) and bytes_of(tokenizer, token_id, alone)[0] & 0xC0 == 0x80


class Reading(Protocol):
    """A detector of an answer's tags, and so of its reasoning.

    Nothing ends the answer in reasoning.
    """

    @property
    def marks(self) -> Mapping[int, str]:
        """Tokens that are tags, with the mark of each in the text."""
        ...

    @property
    def is_thinking(self) -> bool:
        """True while the answer is reasoning."""
        ...

    def split(self, text: str, token_id: int) -> Iterable[tuple[str, bool]]:
        """Split the text of a token into parts.

        Returns:
            Parts of the text, each with True if the part is reasoning. Undecided text is returned
            with later tokens.
        """
        ...

    def undecided(self) -> str:
        """The text that no part contains yet. It is not reasoning if the answer ends here."""
        ...


MakeReading = Callable[[Any, Sequence[int]], Reading]
"""Function that makes the `Reading` of an answer, from tokenizer and prompt ids."""


class Detokenizer:
    """The text of one request, token by token, without special tokens unless requested.

    Every piece is decoded after the piece before it, because a decoder may treat the start of a
    text differently (sentencepiece strips a space there):

        ids    [ context | pending ]      text   [ sent | new ]

    The window begins with the end of the prompt. The joined pieces are the text that
    `tokenizer.decode` gives for prompt and answer together, without the text of the prompt alone
    (`certain_text`). There are two exceptions. Spaces are not cleaned up, because that would change
    delivered text. And if bytes are not valid UTF-8, a byte-fallback decoder also breaks the valid
    characters around them, but delivered characters do not change.

    Args:
        tokenizer: Tokenizer of the model.
        stop: Stop strings. The text of a special token in a stop string also matches the token
            itself.
        keep_stop: True if the stop string is part of the text.
        min_tokens: Number of first tokens in which nothing ends the answer.
        stop_ids: Tokens that end the answer outside reasoning.
        prompt: Ids before the answer. A character that begins in the prompt and ends in the answer
            is part of the answer.
        special: True if special tokens are part of the text.
        ends: Tokens with which the engine ends the answer. Special tokens among them have no text.
        reading: Function that makes the detector of the answer's tags; None finds no tags.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
        special: bool = False,
        ends: frozenset[int] = frozenset(),
        reading: Callable[[], Reading] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keep_stop = keep_stop
        self._num_free = min_tokens
        """Number of coming tokens in which nothing ends the answer."""
        self._stop_ids = stop_ids
        self._make_reading = reading
        self._reading: Reading | None = None
        self._texts = _special_in(tokenizer, stop)
        """Texts of the special tokens in stop strings, by id."""
        self._marks = {id_: chr(STOP_MARKS + n) for n, id_ in enumerate(self._texts)}
        """Marks of the special tokens in stop strings, by id. A mark replaces its token in the
        text."""
        self._hidden = {
            ord(mark): self._texts[id_] if special else None for id_, mark in self._marks.items()
        }
        """Replacements for marks, which are not part of the delivered text."""
        self._stop = {s: s for s in stop}
        """Stop strings with marks, as they are searched in the text, each with its stop string."""
        self._prompt, self._special = prompt, special
        self._silent = {i for i in ends if special and _is_special(tokenizer, i)}
        self.added = ""
        """Text that the last token adds, including text that is held back."""
        self._ids: list[int] = []
        self._num_context = 0
        """Number of first ids of the window whose text is delivered."""
        self._num_sent = 0
        """Number of first characters of the window's text that are delivered."""
        self._held = ""
        """Text that was read, but may begin a stop string."""
        self._has_begun = self._stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the answer."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Iterable[int] = (),
        reading: MakeReading | None = None,
    ) -> "Detokenizer | None":
        """Return the detokenizer of a request; None without a tokenizer."""
        if tokenizer is None:
            return None
        return cls(
            tokenizer,
            params.stop,
            keep_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            stop_ids=frozenset(params.stop_token_ids if reading is not None else ()),
            prompt=prompt_ids,
            special=not params.skip_special_tokens,
            ends=frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids),
            reading=None if reading is None else partial(reading, tokenizer, prompt_ids),
        )

    @property
    def can_stop(self) -> bool:
        """True if the detokenizer can end the answer, before the engine ends it."""
        return bool(self._stop or self._stop_ids)

    def _begin(self) -> None:
        """Set up the state for the first token."""
        self._has_begun = True
        self._follow()
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

    def _follow(self) -> None:
        """Begin the window with the end of the prompt, or with all of it if the end has no text."""
        for num in (CONTEXT, len(self._prompt)):
            ids = list(self._prompt[-num:])
            while ids and _is_inside(self._tokenizer, ids[0]):
                del ids[0]
            text, num_open = certain_text(self._tokenizer, ids, special=self._special)
            if text or num_open:
                break
        else:
            ids = [i for i in ids if not _is_special(self._tokenizer, i)]
        self._ids, self._num_sent = ids, len(text)
        self._num_context = len(ids) - num_open

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take further ids.

        Returns:
            The text that is certain now, and True if a stop string or a stop id has ended the
            answer. The text is complete then, and further ids are ignored.
        """
        if not self._has_begun:
            self._begin()
        text = self.added = ""
        for token_id in token_ids:
            if self._stopped:
                break
            text += self._take(token_id)
        return text.translate(self._hidden), self._stopped

    def _take(self, token_id: int) -> str:
        """Add one token; return the text that is certain, and look for a stop."""
        is_free = self._num_free > 0
        self._num_free -= is_free
        is_end = token_id in self._stop_ids and not is_free
        new = "" if token_id in self._silent else self._read(token_id)
        self.added = new.translate(self._hidden)
        if (reading := self._reading) is None:
            parts: Iterable[tuple[str, bool]] = [(new, False)]
        else:
            is_end = is_end and not reading.is_thinking
            parts = reading.split(new, token_id)
        text = "".join(self._passed(part, is_free or thinks) for part, thinks in parts)
        return text + self._end() if is_end else text

    def _passed(self, part: str, is_free: bool) -> str:
        """Return the text that is certain after a part of the text.

        A free part does not end the answer.

        A stop string does not begin before a free part and end after it.
        """
        if self._stopped:
            return ""
        if not is_free:
            return self._release(part)
        held, self._held = self._held, ""
        return held + part

    def _end(self) -> str:
        """End the answer here; return the held-back text."""
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
        """Return the text that waits for the next bytes of a character."""
        if self._num_context == len(self._ids):  # no id came since then
            return ""
        return self._decode(self._ids)[self._num_sent :]

    def _decode(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids, special=self._special)

    def break_off(self) -> str:
        """Return the text of an incomplete character, because no more bytes arrive."""
        before = self._unread()
        del self._ids[self._num_context :]
        self._num_sent = len(self._decode(self._ids))
        return before

    def _read(self, token_id: int) -> str:
        """Append one id to the window and return the text that can no longer change."""
        if (mark := self._marks.get(token_id)) is not None:
            return self.break_off() + mark
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_full = len(self._ids) > MAX_WINDOW
        if text.endswith(INCOMPLETE):
            return self._cut(text) if is_full else ""
        # the id is a special token, or a space that is stripped at the start
        if len(text) <= self._num_sent:
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
        """Shorten a window full of broken characters. Only the window's end can still change."""
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
        """Return text that cannot belong to a stop string. The first stop string ends the text."""
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
    """Return the tokens that a tokenizer never splits (`content`, `special`), by id."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def _special_in(tokenizer: Any, stop: Sequence[str]) -> dict[int, str]:
    """Return the special tokens whose text is in a stop string, the longest first."""
    added = added_tokens(tokenizer) if stop else {}
    found = {
        i: x.content for i, x in added.items() if x.special and any(x.content in s for s in stop)
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
