"""Tokens of a streaming prompt, without tokenising the whole text for every piece.

    text      [ ............... looked at .......... | new ]
    tokens    [ ... unchanged ...... | context | held ]
                                  |--- tokenised again, with what is new ----|

The context is tokenised again. If its tokens are unchanged, the tokens before it stay. If they
differ, the whole text is tokenised, and not again before an eighth more of it has arrived. The last
tokens are held back, because more text may change them. The tokens so far are only a guess, which
saves time. `finish` tokenises the whole text, and its result is the prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from qllm.errors import InvalidRequestError, check_text, shown
from qllm.frontend.checks import is_int
from qllm.models.tokenizer import ids_of, num_doubled

LEAST_CHARS = 64
"""Number of characters of new text that are collected before tokenising."""
CONTEXT, AGREE, HELD = 48, 8, 8
"""Numbers of last tokens that are tokenised again, must be unchanged, and are held back."""
MOST_AT_ONCE = 16_384
"""Largest number of characters in one tokeniser call. A call holds the interpreter's lock for a
part of its time."""
SET_ASIDE = 4096
"""Number of characters that are set aside together, after the last time that they are tokenised."""

Finish = Callable[[str], Sequence[int]]
"""Function from the whole text of a prompt to its tokens."""


class IncrementalTokens(Protocol):
    """The tokens of a prompt that is not whole yet."""

    token_ids: list[int]
    """Tokens of the text that was tokenised so far."""
    num_same: int
    """Number of first tokens that have not changed since this number was last set."""

    @property
    def num_bytes(self) -> int:
        """Size of the input so far: UTF-8 bytes of text, or 4 bytes per token id."""
        ...

    @property
    def num_sure(self) -> int:
        """Number of first tokens that later pieces are not expected to change."""
        ...

    def num_bytes_before(self, from_token: Any) -> int:
        """Return the size of the first tokens, in bytes as for `num_bytes`.

        Raises:
            InvalidRequestError: A change may not keep this number of tokens.
        """
        ...

    def append(self, piece: Any) -> None:
        """Append a piece."""
        ...

    def replace(self, from_token: Any, piece: Any) -> None:
        """Replace everything after the first `from_token` tokens with a piece."""
        ...

    def look(self) -> None:
        """Tokenise new input. Does nothing without new input."""
        ...

    def finish(self) -> list[int]:
        """Return the tokens of the whole prompt."""
        ...


def check_from(value: Any, num_tokens: int, least: int = 0) -> int:
    """Return the number of tokens that a change keeps.

    Args:
        value: Number from the caller.
        num_tokens: Length of the prompt so far.
        least: Number of first tokens that may not change.

    Raises:
        InvalidRequestError: The value is not an integer in [least, num_tokens].
    """
    if not is_int(value) or not least <= value <= num_tokens:
        raise InvalidRequestError(
            f"from_token={shown(value)} must be an integer in [{least}, {num_tokens}]: the prompt "
            f"has {num_tokens} tokens so far"
        )
    return int(value)


class IncrementalIds:
    """A prompt of token ids."""

    def __init__(self, vocab_size: int) -> None:
        self.token_ids: list[int] = []
        self.num_same = 0
        self._vocab_size = vocab_size

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.token_ids)

    @property
    def num_sure(self) -> int:
        return max(0, len(self.token_ids) - 1)  # the last token is computed for its logits

    def num_bytes_before(self, from_token: Any) -> int:
        return 4 * check_from(from_token, len(self.token_ids))

    def append(self, piece: Any) -> None:
        self.token_ids += self._checked(piece)

    def replace(self, from_token: Any, piece: Any) -> None:
        keep, ids = check_from(from_token, len(self.token_ids)), self._checked(piece)
        self.token_ids[keep:] = ids
        self.num_same = min(self.num_same, keep)

    def look(self) -> None:
        """Do nothing, because ids are never held back."""

    def finish(self) -> list[int]:
        return self.token_ids

    def _checked(self, piece: Any) -> list[int]:
        if isinstance(piece, str | bytes) or not isinstance(piece, Sequence):
            raise InvalidRequestError(
                f"a piece {shown(piece):.60} must be a list of token ids, as the prompt is so far"
            )
        for item in piece:
            if not is_int(item) or not 0 <= item < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {shown(item):.60} must be an integer in [0, {self._vocab_size}), "
                    "the vocabulary"
                )
        return [int(item) for item in piece]


class _Tokens(NamedTuple):
    ids: list[int]
    starts: list[int] | None
    """Character at which each token begins; None if the tokenizer does not report characters."""


class IncrementalText:
    """A prompt of text, or the content of a chat's last message.

    Args:
        tokenizer: A transformers tokenizer.
        finish: Function that tokenises the whole text.
        head: Text that the chat template puts before the prompt; None without a template.
    """

    def __init__(self, tokenizer: Any, finish: Finish, head: str | None = None) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._is_chat, self._head = head is not None, head or ""
        self._aside: list[str] = []
        """Text before `_tail`, in parts."""
        self._num_aside = 0
        self._tail = self._head
        self._new: list[str] = []
        """Pieces of text after `_tail` that were not tokenised yet."""
        self._num_new, self._num_wanted = 0, LEAST_CHARS
        """Number of characters of the new text, and the number at which it is tokenised."""
        self.token_ids: list[int] = []
        self._starts: list[int] | None = []
        self.num_same = self._num_bytes = 0
        self.num_whole = 0
        """Number of times that the whole text was tokenised because the context differed."""
        self._whole()

    @property
    def num_sure(self) -> int:
        return max(0, len(self.token_ids) - HELD)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join((*self._aside, self._tail, *self._new))[len(self._head) :]

    def append(self, piece: Any) -> None:
        self._num_bytes += _num_bytes(piece)
        self._add(piece)

    def _add(self, piece: str) -> None:
        """Add a piece, and tokenise once there is enough text."""
        for at in range(0, len(piece), MOST_AT_ONCE):
            part = piece[at : at + MOST_AT_ONCE]
            self._new.append(part)
            self._num_new += len(part)
            if self._num_new >= self._num_wanted:
                self._look()

    def num_bytes_before(self, from_token: Any) -> int:
        _, kept = self._kept(from_token)
        return len(kept[len(self._head) :].encode())

    def replace(self, from_token: Any, piece: Any) -> None:
        keep, kept = self._kept(from_token)
        num_bytes = _num_bytes(piece)
        self._aside, self._num_aside, self._tail = [], 0, kept
        self._num_bytes = len(kept[len(self._head) :].encode()) + num_bytes
        del self.token_ids[keep:]
        if self._starts is not None:
            del self._starts[keep:]
        self.num_same = min(self.num_same, keep)
        self._num_wanted = LEAST_CHARS
        self._add(piece)
        self._look()

    def _kept(self, from_token: Any) -> tuple[int, str]:
        """Return the number of tokens that a change keeps, and the text before the change."""
        self.look()
        keep = check_from(from_token, len(self.token_ids))
        if self._starts is None and keep:
            raise InvalidRequestError(
                f"from_token={keep}: the tokenizer does not say where in the text a token begins; "
                "replace from 0, or use token ids"
            )
        starts, whole = self._starts or [], "".join((*self._aside, self._tail))
        at = len(whole) if keep == len(self.token_ids) else starts[keep] if keep else 0
        if at < len(self._head):
            least = sum(start < len(self._head) for start in starts)
            check_from(keep, len(self.token_ids), least) if self._is_chat and keep else None
            at = len(self._head)
        return keep, whole[:at]

    def finish(self) -> list[int]:
        return list(self._finish(self.text))

    def look(self) -> None:
        if self._new:
            self._look()

    def _look(self) -> None:
        self._tail += "".join(self._new)
        self._new, self._num_new = [], 0
        keep = max(0, len(self.token_ids) - HELD)
        base = keep - CONTEXT
        if self._starts is None or base <= 0:
            self._whole()
        elif self._follow(keep, self._starts[base]):
            self._num_wanted = LEAST_CHARS
        else:
            self.num_whole += 1
            self._whole()
        self._set_aside()

    def _whole(self) -> None:
        text, before = "".join((*self._aside, self._tail)), self.token_ids
        self._aside, self._num_aside, self._tail = [], 0, text
        found = self._encode(text, not self._is_chat) if text else _Tokens([], [])
        self.token_ids, self._starts = found
        self.num_same = common_prefix(before, self.token_ids[: self.num_same])
        self._num_wanted = max(LEAST_CHARS, len(text) // 8)

    def _set_aside(self) -> None:
        """Set aside text that is not tokenised again, so that the text is not joined again."""
        base = len(self.token_ids) - HELD - CONTEXT
        if self._starts is not None and base > 0:
            num = self._starts[base] - self._num_aside
            if num >= SET_ASIDE:
                self._aside.append(self._tail[:num])
                self._num_aside, self._tail = self._num_aside + num, self._tail[num:]

    def _follow(self, keep: int, at: int) -> bool:
        """Tokenise the text from a character on.

        Return True if tokens before `keep` are unchanged.
        """
        starts = self._starts
        assert starts is not None
        while at < self._num_aside:  # there are fewer tokens now than when the text was set aside
            self._tail = self._aside[-1] + self._tail
            self._num_aside -= len(self._aside.pop())
        text = self._tail[at - self._num_aside :]
        ids, new_starts = self._encode(text, False)
        if new_starts is None:
            return False
        edge = starts[keep] - at if keep < len(starts) else len(text)
        same = self.token_ids[keep - AGREE : keep]
        for i, start in enumerate(new_starts):
            if start == edge and ids[max(0, i - AGREE) : i] == same:
                self.token_ids[keep:] = ids[i:]
                starts[keep:] = [at + start for start in new_starts[i:]]
                self.num_same = min(self.num_same, keep)
                return True
        return False

    def _encode(self, text: str, special: bool) -> _Tokens:
        if not getattr(self._tokenizer, "is_fast", False):
            return _Tokens(ids_of(self._tokenizer, text, special=special), None)
        found = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, spans = list(found["input_ids"]), found["offset_mapping"]
        while len(ids) > 1 and spans[len(ids) - 1][1] == 0:
            ids.pop()  # the tokenizer adds this token at the end of every text
        first = num_doubled(self._tokenizer, ids) if special else 0
        return _Tokens(ids[first:], [start for start, _ in spans[first : len(ids)]])


def _num_bytes(piece: Any) -> int:
    """Return the size of a text in bytes.

    Raises:
        InvalidRequestError: The value is not a text.
    """
    if not isinstance(piece, str):
        raise InvalidRequestError(
            f"a piece {shown(piece):.60} must be text: the prompt is text so far"
        )
    check_text("a piece", piece)
    return len(piece.encode())


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    least = min(len(a), len(b))
    if a[:least] == b[:least]:
        return least
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
