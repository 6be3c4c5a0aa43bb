"""Tokens of a prompt that grows, without tokenising all of its text with every piece.

    text      [ ............... looked at .......... | new ]
    tokens    [ ... as they were ... | context | held ]
                                  |--- tokenised again, with what is new ----|

What comes out again as it was, the context, says that the tokens before it stay. If it does not
come out so, the whole text is tokenised. The last tokens are held: more text may change them. All
this is a guess that saves time. `finish` tokenises the whole text, and what it says counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from qllm.errors import InvalidRequestError, shown
from qllm.frontend.checks import is_int
from qllm.types import check_text

LEAST_CHARS = 64
"""New text is collected up to this before it is tokenised."""
CONTEXT, AGREE, HELD = 48, 8, 8
"""Tokens that are tokenised again, of which so many, the last, have to come out the same; and
tokens at the end that more text may change."""

Finish = Callable[[str], Sequence[int]]
"""Tokens of a prompt from all of its text."""


class Growing(Protocol):
    """A prompt that is not whole yet."""

    token_ids: list[int]
    """Those of all that came so far, as far as it was looked at."""

    @property
    def num_sure(self) -> int:
        """Tokens, of the first, that more is not expected to change."""
        ...

    def append(self, piece: Any) -> None:
        """Add a piece at the end."""
        ...

    def replace(self, from_token: Any, piece: Any) -> None:
        """Let a piece follow the first tokens, in place of all that did."""
        ...

    def look(self) -> None:
        """Look at all that came."""
        ...

    def finish(self) -> list[int]:
        """The tokens of the whole prompt."""
        ...


def check_from(value: Any, num_tokens: int, least: int = 0) -> int:
    """The number of tokens that a change keeps.

    Args:
        value: What the caller says.
        num_tokens: Of the prompt so far.
        least: Tokens at the beginning that nobody may change.

    Raises:
        InvalidRequestError: It is no integer in [least, num_tokens].
    """
    if not is_int(value) or not least <= value <= num_tokens:
        raise InvalidRequestError(
            f"from_token={shown(value)} must be an integer in [{least}, {num_tokens}]: the prompt "
            f"has {num_tokens} tokens so far"
        )
    return int(value)


class GrowingIds:
    """A prompt of token ids."""

    def __init__(self, vocab_size: int) -> None:
        self.token_ids: list[int] = []
        self._vocab_size = vocab_size

    @property
    def num_sure(self) -> int:
        return max(0, len(self.token_ids) - 1)  # the last one is computed for its logits

    def append(self, piece: Any) -> None:
        self.token_ids += self._checked(piece)

    def replace(self, from_token: Any, piece: Any) -> None:
        keep, ids = check_from(from_token, len(self.token_ids)), self._checked(piece)
        self.token_ids[keep:] = ids

    def look(self) -> None:
        """Nothing was held."""

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
    """The character at which each begins; None if the tokenizer does not say."""


class GrowingText:
    """A prompt of text, or the content of a chat's last message.

    Args:
        tokenizer: A transformers tokenizer.
        finish: Tokenises the whole text.
        head: What the chat template puts before the text; None if there is no template.
    """

    def __init__(self, tokenizer: Any, finish: Finish, head: str | None = None) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._is_chat, self._head = head is not None, head or ""
        self._text = self._head
        self._new: list[str] = []
        self._num_new = self._num_looked = 0
        self.token_ids: list[int] = []
        self._starts: list[int] | None = []
        self.num_whole = 0
        """How often the whole text was tokenised, because the context came out differently."""
        self.look()

    @property
    def num_sure(self) -> int:
        return max(0, len(self.token_ids) - HELD)

    @property
    def text(self) -> str:
        """All that came."""
        return "".join((self._text, *self._new))[len(self._head) :]

    def append(self, piece: Any) -> None:
        self._add(piece)
        if self._num_new >= LEAST_CHARS:
            self.look()

    def _add(self, piece: Any) -> None:
        if not isinstance(piece, str):
            raise InvalidRequestError(
                f"a piece {shown(piece):.60} must be text: the prompt is text so far"
            )
        check_text("a piece", piece)
        self._new.append(piece)
        self._num_new += len(piece)

    def replace(self, from_token: Any, piece: Any) -> None:
        self.look(all_of_it=True)
        keep = check_from(from_token, len(self.token_ids))
        if self._starts is None and keep:
            raise InvalidRequestError(
                f"from_token={keep}: the tokenizer does not say where in the text a token begins; "
                "replace from 0, or use token ids"
            )
        starts = self._starts or []
        at = len(self._text) if keep == len(self.token_ids) else starts[keep] if keep else 0
        if at < len(self._head):
            least = sum(start < len(self._head) for start in starts)
            check_from(keep, len(self.token_ids), least) if self._is_chat and keep else None
            at = len(self._head)
        before = self._text, self.token_ids, self._starts
        self._text, self.token_ids = self._text[:at], self.token_ids[:keep]
        self._starts = starts[:keep]
        try:
            self._add(piece)
        except InvalidRequestError:
            self._text, self.token_ids, self._starts = before
            raise
        self.look(all_of_it=True)

    def finish(self) -> list[int]:
        return list(self._finish(self.text))

    def look(self, all_of_it: bool = False) -> None:
        """Tokenise what is new.

        Args:
            all_of_it: Also where a tokenizer without offsets makes that dear.
        """
        self._text += "".join(self._new)
        self._new, self._num_new = [], 0
        if not self._text:
            self.token_ids, self._starts = [], []
            return
        if self._starts is None:
            if all_of_it or len(self._text) * 8 > self._num_looked * 9:
                self._whole()
            return
        keep = max(0, len(self.token_ids) - HELD)
        base = keep - CONTEXT
        at = self._starts[base] if base > 0 else 0
        if base <= 0 or not self._follow(keep, at):
            self.num_whole += base > 0
            self._whole()

    def _whole(self) -> None:
        self.token_ids, self._starts = self._encode(self._text, not self._is_chat)
        self._num_looked = len(self._text)

    def _follow(self, keep: int, at: int) -> bool:
        """Tokenise from a character on; whether the tokens before `keep` came out as they were."""
        starts = self._starts
        assert starts is not None
        ids, new_starts = self._encode(self._text[at:], False)
        if new_starts is None:
            return False
        edge = starts[keep] - at if keep < len(starts) else len(self._text) - at
        same = self.token_ids[keep - AGREE : keep]
        for i, start in enumerate(new_starts):
            if start == edge and ids[max(0, i - AGREE) : i] == same:
                self.token_ids[keep:] = ids[i:]
                starts[keep:] = [at + start for start in new_starts[i:]]
                return True
        return False

    def _encode(self, text: str, special: bool) -> _Tokens:
        if not getattr(self._tokenizer, "is_fast", False):
            return _Tokens(
                list(self._tokenizer(text, add_special_tokens=special)["input_ids"]), None
            )
        found = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, spans = list(found["input_ids"]), found["offset_mapping"]
        while len(ids) > 1 and spans[len(ids) - 1][1] == 0:
            ids.pop()  # a token that ends every text
        return _Tokens(ids, [start for start, _ in spans[: len(ids)]])
