"""Requests that arrive at the engine loop once something of theirs is ready: the base of such."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from qllm.ingress import Cancel, Ingress, Item, Revision, Submission, Update
from qllm.ingress.protocol import ArrivalWord
from qllm.types import RequestId

W = TypeVar("W")


class Inbox(Ingress, Protocol):
    """A transport that takes items of this process too."""

    def put(self, item: Item) -> None:
        """Hand over an item. Callable from any thread."""
        ...


class Held(NamedTuple):
    """A request that the loop does not know yet."""

    submission: Submission
    updates: tuple[Update | Revision, ...]
    """What was asked of it since, in order."""


class HoldingIngress(ABC, Generic[W]):
    """A transport that holds requests back while something of theirs is made; others go by.

    Updates of a request that is held follow it when it is let go; a cancel lets it go at once. What
    makes a prompt whole may be held too (`_hold_revision`): its request is there meanwhile.

    Args:
        inner: The transport; it may hold requests back too.
    """

    def __init__(self, inner: Inbox) -> None:
        self._inner = inner
        self._held: dict[RequestId, tuple[Submission | Revision, W]] = {}
        """With what each waits for."""
        self._updates: dict[RequestId, list[Update | Revision]] = {}

    @abstractmethod
    def _begin(self) -> None:
        """Called in every `drain`, before a request is held or let go."""

    @abstractmethod
    def _hold(self, item: Submission) -> W | None:
        """Begin to make what a request waits for; None if it waits for nothing."""

    def _hold_revision(self, item: Revision) -> W | None:
        """The same for what makes a prompt whole."""
        return None

    @abstractmethod
    def _is_ready(self, item: Submission, wanted: W) -> bool:
        """Whether a request waits no longer."""

    @abstractmethod
    def _let_go(self, item: Submission, wanted: W) -> Submission:
        """What arrives of a request that waits no longer, or was cancelled."""

    @property
    def stop(self) -> ArrivalWord:
        """The word that arrivals lower."""
        return self._inner.stop

    @property
    def held(self) -> tuple[Held, ...]:
        """Requests that are held here or by the transport below."""
        below = self._inner.held if isinstance(self._inner, HoldingIngress) else ()
        here = (
            Held(item, tuple(self._updates.get(number, ())))
            for number, (item, _) in self._held.items()
            if isinstance(item, Submission)
        )
        return (*below, *here)

    def put(self, item: Item) -> None:
        """Hand over an item of this process. Callable from any thread."""
        self._inner.put(item)

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        self._inner.wait(timeout_ns)

    def drain(self) -> list[Item]:
        """Take what has waited and what has arrived, but for what begins to wait."""
        arrived = self._inner.drain()  # what is ready later wakes the loop once more
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
        """What is held no more of a request, and what was asked of it meanwhile."""
        item, wanted = self._held.pop(number)
        told = self._let_go(_request(item), wanted)
        first = told if isinstance(item, Submission) else replace(item, rest=told)
        return [first, *self._updates.pop(number, ())]


def _request(item: Submission | Revision) -> Submission:
    return item if isinstance(item, Submission) else item.rest
