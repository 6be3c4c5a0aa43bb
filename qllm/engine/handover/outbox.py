"""KV of requests that have left an engine, until another engine fetches it."""

import mmap
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qllm.engine.handover.format import seal
from qllm.scheduler.prefix import Tag

KEEP_S = 60.0
"""Seconds after which KV is dropped. By then the request was computed again, or has ended."""


@dataclass(slots=True)
class _Left:
    """The KV of one request that has left."""

    says: Mapping[str, Any]
    tensors: Mapping[str, Sequence[Tensor]]
    num_bytes: int
    tag: Tag
    since_s: float
    sealed: mmap.mmap | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Outbox:
    """KV by ticket. Callable from any thread; `put` copies nothing.

    Args:
        most_bytes: Limit in bytes of the KV; the oldest KV is dropped first.
        now_s: A clock.
    """

    def __init__(self, most_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._now_s = most_bytes, now_s
        self._lock = threading.Lock()
        self._left: dict[str, _Left] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that wait to be fetched."""
        with self._lock:
            return sum(left.num_bytes for left in self._left.values())

    def put(
        self, says: Mapping[str, Any], tensors: Mapping[str, Sequence[Tensor]], tag: Tag
    ) -> str:
        """Keep KV; return its ticket, which is empty if there is no room.

        The tensors must not change any more.

        Args:
            says: Content of the header, see `seal`.
            tensors: Tensors by name, see `seal`.
            tag: Owner and salt.
        """
        num_bytes = sum(t.nbytes for pieces in tensors.values() for t in pieces)
        if num_bytes > self._most_bytes:
            return ""
        now, ticket = self._now_s(), secrets.token_hex(16)
        with self._lock:
            self._expire(now)
            room = self._most_bytes - num_bytes
            while sum(left.num_bytes for left in self._left.values()) > room:
                del self._left[next(iter(self._left))]
            self._left[ticket] = _Left(says, tensors, num_bytes, tag, now)
        return ticket

    def _expire(self, now_s: float) -> None:
        for ticket in [t for t, left in self._left.items() if now_s - left.since_s > KEEP_S]:
            del self._left[ticket]

    def read(self, ticket: str) -> mmap.mmap | None:
        """Return the parcel of a ticket, made at the first call; None if the parcel is gone."""
        with self._lock:
            self._expire(self._now_s())
            left = self._left.get(ticket)
        if left is None:
            return None
        with left.lock:
            if left.sealed is None:
                left.sealed = seal(left.says, left.tensors)
                left.tensors = {}
            return left.sealed

    def drop(self, ticket: str) -> None:
        """Drop the KV of a ticket that was fetched. Unknown tickets are ignored."""
        with self._lock:
            self._left.pop(ticket, None)

    def delete(self, tag: Tag) -> None:
        """Delete the KV of an owner or a salt."""
        with self._lock:
            for ticket in [t for t, left in self._left.items() if left.tag.startswith(tag)]:
                del self._left[ticket]
