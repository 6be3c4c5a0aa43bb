"""The rests of ended requests: KV that is not cached yet, in blocks that are free again.

A step caches a bounded number of pages, so a short answer to a long prompt ends before its KV is
cached. Its blocks are free at once, and keep their KV until another request gets one of them. So
no decision depends on rests, and they need no memory of their own.

    ends --> blocks are free --> pages are cached, a few after each step --> all: forgotten
                             --> a block is needed                       --> forgotten
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qllm.engine.kv.users import User
from qllm.scheduler.prefix import Name, Tag, tag_of
from qllm.types import RequestId


class Blocks(Protocol):
    """The blocks of the scheduler (see `qllm.scheduler.blocks.BlockPool`)."""

    def leave(
        self, request_id: RequestId, blocks: Sequence[int], lost: Callable[[], object]
    ) -> None:
        """Let KV stay in blocks of a request that ends, until they are needed."""
        ...

    def clear(self, request_id: RequestId) -> None:
        """End `leave`."""
        ...


@dataclass(slots=True)
class Rest:
    """KV of an ended request."""

    user: User
    kv: Any
    names: Sequence[Name]
    """Its whole pages. The first `user.num_kept` of them were offered to the store."""
    ended_ns: int


class Rests:
    """The rests by request, oldest first. Lives on the engine's thread.

    Args:
        blocks: Blocks in which the KV lies.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._rests: dict[RequestId, Rest] = {}

    def __iter__(self) -> Iterator[Rest]:
        """Iterate over the rests: those of LS first, the oldest of a class first."""
        return iter(sorted(self._rests.values(), key=lambda rest: rest.user.is_be))

    def add(self, rest: Rest) -> None:
        """Add the rest of a request that is about to return its blocks."""
        request = rest.user.request
        request_id = request.request_id
        self._rests[request_id] = rest
        self._blocks.leave(request_id, request.block_table, lambda: self._rests.pop(request_id))

    def forget(self, rest: Rest) -> None:
        """Forget a rest that is cached, or that shall not be cached."""
        request_id = rest.user.request.request_id
        self._blocks.clear(request_id)
        del self._rests[request_id]

    def forget_tagged(self, tag: Tag) -> None:
        """Forget the rests of an owner, or of one of its salts."""
        for rest in self:
            if tag_of(rest.user.submission.cache_salt).startswith(tag):
                self.forget(rest)

    def forget_before(self, ns: int) -> None:
        """Forget the rests of requests that ended at or before a time."""
        for rest in self:
            if rest.ended_ns <= ns:
                self.forget(rest)
