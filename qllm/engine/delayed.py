"""The base class of ingresses that delay a request until something it needs is ready."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from qllm.ingress import Cancel, Ingress, Item, Revision, Submission, Update
from qllm.ingress.protocol import ArrivalWord
from qllm.types import RequestId

W = TypeVar("W")


class Inbox(Ingress, Protocol):
    """A transport that also accepts items of this process."""

    def put(self, item: Item) -> None:
        """Add an item. Callable from any thread."""
        ...


class Held(NamedTuple):
    """A request that the loop has not received yet."""

    submission: Submission
    updates: tuple[Update | Revision, ...]
    """Updates of the request that arrived during the delay, in order."""


class HoldingIngress(ABC, Generic[W]):
    """A transport that delays requests until a thing that they need is ready.

    Other requests pass at once.

    Updates of a delayed request are released after the request. A cancel releases the request at
    once. The revision that completes a prompt may be delayed too (`_hold_revision`); the loop
    already has the request of such a revision.

    Args:
        inner: The transport below, which may delay requests too.
    """

    def __init__(self, inner: Inbox) -> None:
        self._inner = inner
        self._held: dict[RequestId, tuple[Submission | Revision, W]] = {}
        """Delayed items, each with the thing that the item waits for."""
        self._updates: dict[RequestId, list[Update | Revision]] = {}

    @abstractmethod
    def _begin(self) -> None:
        """Prepare a `drain`. Called before any request is delayed or released."""

    @abstractmethod
    def _hold(self, item: Submission) -> W | None:
        """Start to make the thing that a request needs; return None if there is none."""

    def _hold_revision(self, item: Revision) -> W | None:
        """Start to make the thing that a completing revision needs; None if there is none."""
        return None

    @abstractmethod
    def _is_ready(self, item: Submission, wanted: W) -> bool:
        """Return True if a request waits no longer."""

    @abstractmethod
    def _let_go(self, item: Submission, wanted: W) -> Submission:
        """Return the submission of a request that waits no longer, or was cancelled."""

    @property
    def stop(self) -> ArrivalWord:
        """The stop word of the running program. Arrivals lower the word."""
        return self._inner.stop

    @property
    def held(self) -> tuple[Held, ...]:
        """Requests that are delayed here or by the inner transport."""
        below = self._inner.held if isinstance(self._inner, HoldingIngress) else ()
        here = (
            Held(item, tuple(self._updates.get(number, ())))
            for number, (item, _) in self._held.items()
            if isinstance(item, Submission)
        )
        return (*below, *here)

    def put(self, item: Item) -> None:
        """Add an item of this process. Callable from any thread."""
        self._inner.put(item)

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        self._inner.wait(timeout_ns)

    def drain(self) -> list[Item]:
        """Return released and new items, except requests that begin to wait."""
        arrived = self._inner.drain()  # the loop wakes again when an item is ready later
        self._begin()
        found: list[Item] = []
        ready = [n for n, (x, wanted) in self._held.items() if self._is_ready(_request(x), wanted)]
        for number in ready:
            found += self._take(number)
        for item in arrived:
            if isinstance(item, Update | Revision) and item.request_id in self._held:
                self._updates.setdefault(item.request_id, []).append(item)
                continue
            if isinstance(item, Cancel) and item.request_id in self._held:
                found += self._take(item.request_id)
            if (wanted := self._wanted(item)) is None:
                found.append(item)
            elif isinstance(item, Submission | Revision):
                self._held[item.request_id] = item, wanted
        return found

    def _wanted(self, item: Item) -> W | None:
        if isinstance(item, Submission):
            return self._hold(item)
        return self._hold_revision(item) if isinstance(item, Revision) else None

    def _take(self, number: RequestId) -> list[Item]:
        """Release a request; return the request and the updates that arrived meanwhile."""
        item, wanted = self._held.pop(number)
        told = self._let_go(_request(item), wanted)
        first = told if isinstance(item, Submission) else replace(item, rest=told)
        return [first, *self._updates.pop(number, ())]


def _request(item: Submission | Revision) -> Submission:
    return item if isinstance(item, Submission) else item.rest
