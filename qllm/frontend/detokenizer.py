"""Turn token ids into text while they arrive, and stop at the request's stop strings.

What was handed out is never taken back. So two things wait: characters whose bytes are not all
there (a decoder shows U+FFFD for them), and text that may turn out to begin a stop string.
"""

import re
from collections.abc import Sequence
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


class Detokenizer:
    """The text of one request, token by token. Special tokens are left out.

    Every piece is decoded behind the piece before it, because a decoder may treat the start of a
    text in another way (sentencepiece strips a space there):

        ids    [ context | pending ]      text   [ sent | new ]

    The pieces join to `tokenizer.decode(all ids)`, with two exceptions. Spaces are not cleaned up,
    which would change what was already handed out. And a byte-fallback decoder that meets bytes
    which are no UTF-8 breaks the good characters around them too; those handed out stay good.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._keep_stop = keep_stop
        """Whether the stop string is part of the text."""
        self._num_free = min_tokens
        """Tokens to come in which no stop string is looked for."""
        self._ids: list[int] = []
        self._num_context = 0
        """Leading ids of the window whose text was read."""
        self._num_sent = 0
        """Leading characters of the window's text that were read."""
        self._held = ""
        """Read, but may begin a stop string."""
        self._stopped = False
        self.stop_string: str | None = None
        """The one that ended the answer."""

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, params: SamplingParams) -> "Detokenizer | None":
        """Make that of a request; None without a tokenizer."""
        if tokenizer is None:
            return None
        keep, least = params.include_stop_str_in_output, params.min_tokens
        return cls(tokenizer, params.stop, keep_stop=keep, min_tokens=least)

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take further ids.

        Returns:
            The text that is now certain, and whether a stop string has ended the answer. The
            text before the stop string is complete then; further ids are ignored.
        """
        text = ""
        for token_id in token_ids:
            if self._stopped:
                break
            new = self._read(token_id)
            if self._num_free:
                self._num_free -= 1
                text += new
            else:
                text += self._release(new)
        return text, self._stopped

    def finish(self) -> str:
        """Return the text that was held back, incomplete characters as U+FFFD."""
        if self._stopped:
            return ""
        is_read = self._num_context == len(self._ids)  # nothing came since
        text = self._release("" if is_read else self._decode(self._ids)[self._num_sent :])
        if not self._stopped:
            text, self._held, self._stopped = text + self._held, "", True
        self._ids.clear()
        return text

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if not isinstance(text, str):
            raise InvariantError(f"the tokenizer decoded {ids} to {text!r}, which must be a str")
        return text

    def _read(self, token_id: int) -> str:
        """Append one id to the window and return the text that can no longer change."""
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
            end, at, self.stop_string = min(found)
            return text[: end if self._keep_stop else at]
        certain = len(text) - max(_overlap(text, s) for s in self._stop)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
