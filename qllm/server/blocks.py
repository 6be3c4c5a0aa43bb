"""The parts of an answer in order: reasoning, text, calls.

`/v1/responses` and `/v1/messages` show them, each in its own words:

    tokens -> Reader (calls.py) -> deltas -> Blocks -> opened, grown, closed -> events of an API
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from qllm.frontend.handle import Piece
from qllm.types import FinishReason

from .answers import event
from .calls import Delta, Reader
from .open_answer import Answer, Comment


class Kind(Enum):
    """What a block holds."""

    REASONING = "reasoning_content"
    TEXT = "content"
    CALL = "tool_calls"


@dataclass(slots=True)
class Block:
    """One part of an answer."""

    kind: Kind
    index: int
    """Its place in the answer."""
    call_id: str = ""
    """A call has it, and a name."""
    name: str = ""
    text: str = ""
    """So far; of a call its arguments."""
    pieces: list[Piece] = field(default_factory=list)
    """Those that it was made of."""


class Change(NamedTuple):
    """A block was opened, grew by `added`, or was closed."""

    what: str
    """ "open", "grow" or "close"."""
    block: Block
    added: str = ""
    pieces: tuple[Piece, ...] = ()
    """That it grew by."""


class Blocks:
    """Sorts the deltas of a reader into blocks; at most one is open.

    Args:
        reader: Of the answer.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.all: list[Block] = []
        self._open: Block | None = None
        self._unused: list[Piece] = []
        """Pieces of which nothing was shown yet."""

    def push(self, piece: Piece) -> Iterator[Change]:
        """Take what was added to the answer."""
        self._unused.append(piece)
        yield from self._take(self.reader.push(piece.text, piece.token_ids, piece.ends))

    def finish(self) -> Iterator[Change]:
        """The answer has ended."""
        yield from self._take(self.reader.finish())
        yield from self._close()

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
        pieces, self._unused = tuple(self._unused), []
        self._open.pieces += pieces
        yield Change("grow", self._open, text, pieces)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Change:
        self._open = Block(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        return Change("open", self._open)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change("close", closed)


async def changes(
    answer: Answer, blocks: Blocks, silence_s: float | None
) -> AsyncIterator[Change | Comment | FinishReason]:
    """Yield what happens to the blocks of an answer with one choice, and at its end the reason."""
    async for _, item in answer.pieces(silence_s):
        if isinstance(item, Piece):
            for change in blocks.push(item):
                yield change
        elif isinstance(item, Comment):
            yield item
        else:
            for change in blocks.finish():
                yield change
            yield item


def named_event(name: str, data: dict[str, Any]) -> str:
    """One server-sent event with a name, which its data repeat as `type`."""
    return f"event: {name}\n{event({'type': name, **data})}"
