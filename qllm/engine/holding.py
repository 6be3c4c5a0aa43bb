"""Requests that arrive at the engine loop once something of theirs is ready: the base of such."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, Protocol, TypeVar

from qllm.ingress import Cancel, Ingress, Item, Submission, Update
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
    updates: tuple[Update, ...]
    """What was asked of it since, in order."""


class HoldingIngress(ABC, Generic[W]):
    """A transport that holds requests back while something of theirs is made; others go by.

    Updates of a request that is held follow it when it is let go; a cancel lets it go at once.

    Args:
        inner: The transport; it may hold requests back too.
    """

    def __init__(self, inner: Inbox) -> None:
        self._inner = inner
        self._held: dict[RequestId, tuple[Submission, W]] = {}
        """With what each waits for."""
        self._updates: dict[RequestId, list[Update]] = {}

    @abstractmethod
    def _begin(self) -> None:
        """Called in every `drain`, before a request is held or let go."""

    @abstractmethod
    def _hold(self, item: Submission) -> W | None:
        """Begin to make what a request waits for; None if it waits for nothing."""

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
        for number in [n for n, held in self._held.items() if self._is_ready(*held)]:
            found += self._take(number)
        for item in arrived:
            if isinstance(item, Update) and item.request_id in self._held:
                self._updates.setdefault(item.request_id, []).append(item)
                continue
            if isinstance(item, Cancel) and item.request_id in self._held:
                found += self._take(item.request_id)
            wanted = self._hold(item) if isinstance(item, Submission) else None
            if isinstance(item, Submission) and wanted is not None:
                self._held[item.request_id] = item, wanted
            else:
                found.append(item)
        return found

    def _take(self, number: RequestId) -> list[Item]:
        """A request that is held no more, and what was asked of it meanwhile."""
        item = self._let_go(*self._held.pop(number))
        return [item, *self._updates.pop(number, ())]
