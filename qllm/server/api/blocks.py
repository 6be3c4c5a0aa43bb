"""The parts of an answer in order: reasoning, text, calls.

`/v1/responses` and `/v1/messages` convert these parts to the events of their API:

    tokens -> Reader (calls.py) -> deltas -> Blocks -> opened, grown, closed -> events of an API
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

from qllm.frontend.handle import Piece
from qllm.server.api.answers import event
from qllm.server.api.calls import Reader
from qllm.server.requests.open_answer import Answer, Comment
from qllm.server.tools.deltas import Delta
from qllm.types import FinishReason


class Kind(Enum):
    """Kinds of content in a block."""

    REASONING = "reasoning_content"
    TEXT = "content"
    CALL = "tool_calls"


@dataclass(slots=True)
class Block:
    """One part of an answer."""

    kind: Kind
    index: int
    """Number of the block in the answer, from 0."""
    call_id: str = ""
    """Id of a call; empty for other kinds."""
    name: str = ""
    text: str = ""
    """Text so far; of a call, the arguments so far."""
    is_whole: bool = True
    """False if the answer was cut off inside this block."""


class Change(NamedTuple):
    """A change of a block: opened, grown by `added`, or closed."""

    what: str
    """Kind of the change: "open", "grow" or "close"."""
    block: Block
    added: str = ""
    pieces: tuple[Piece, ...] = ()
    """Pieces by which the block grew."""

    def with_more(self, other: "Change") -> "Change":
        """Return one change that joins this growth and the next growth."""
        return Change(self.what, self.block, self.added + other.added, self.pieces + other.pieces)


class Blocks:
    """A converter of a reader's deltas to blocks. At most one block is open.

    Args:
        reader: Reader of the answer.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.all: list[Block] = []
        self._open: Block | None = None
        self._unused: list[Piece] = []
        """Pieces without any text in a block yet."""

    def push(self, piece: Piece) -> Iterator[Change]:
        """Take an addition to the answer, and yield the changes.

        The reader gets one token at a time, so the result does not depend on the grouping of
        tokens.
        """
        last: Change | None = None
        for change in self._read(piece):
            if last is not None and last.what == change.what == "grow":
                last = last.with_more(change)
                continue
            if last is not None:
                yield last
            last = change
        if last is not None:
            yield last

    def finish(self, *, is_cut: bool) -> Iterator[Change]:
        """Yield the last changes at the end of the answer.

        Args:
            is_cut: True if the answer was cut off.
        """
        yield from self._take(self.reader.finish())
        if self._open is not None:
            self._open.is_whole = not (is_cut or self.reader.is_in_call)
        yield from self._close()

    def _read(self, piece: Piece) -> Iterator[Change]:
        for one in _one_by_one(piece):
            self._unused.append(one)
            yield from self._take(self.reader.push(one.text, one.token_ids, one.ends))

    def _take(self, delta: Delta) -> Iterator[Change]:
        for name, value in delta.items():
            kind = Kind(name)
            if kind is not Kind.CALL:
                yield from self._grow(kind, value)
                continue
            for part in value:
                if "id" in part:
                    yield from self._close()
                    yield self._begin(kind, part["id"], part["function"]["name"])
                yield from self._grow(kind, part["function"]["arguments"])

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._close()
            yield self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield Change("grow", self._open, text, self._made_of(text))

    def _made_of(self, text: str) -> tuple[Piece, ...]:
        """Return the last pieces, which make up `text`.

        Earlier pieces are tags or dropped white space.
        """
        unused, self._unused = self._unused, []
        at, left = len(unused), len(text)
        while at and (left > 0 or not unused[at - 1].text):
            at -= 1
            left -= len(unused[at].text)
        return tuple(unused[at:])

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Change:
        self._open = Block(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        return Change("open", self._open)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change("close", closed)


def _one_by_one(piece: Piece) -> Iterator[Piece]:
    """Yield one piece for each token of a piece."""
    if len(piece.ends) < 2:
        yield piece
        return
    for at, (start, end) in enumerate(pairwise((0, *piece.ends))):
        ids, logprobs = piece.token_ids[at : at + 1], piece.logprobs[at : at + 1]
        text, added = piece.text[start:end], piece.added[at : at + 1]
        yield Piece(text, ids, logprobs, None, (end - start,), added)


async def changes(
    answer: Answer, blocks: Blocks, silence_s: float | None
) -> AsyncIterator[Change | Comment | FinishReason]:
    """Yield the changes of blocks in an answer with one choice, then the finish reason."""
    async for _, item in answer.pieces(silence_s):
        if isinstance(item, Piece):
            for change in blocks.push(item):
                yield change
        elif isinstance(item, Comment):
            yield item
        else:
            for change in blocks.finish(is_cut=item is FinishReason.LENGTH):
                yield change
            yield item


def named_event(name: str, data: dict[str, Any]) -> str:
    """Return a server-sent event with a name. The data repeat the name as `type`."""
    return f"event: {name}\n{event({'type': name, **data})}"
