"""Requests whose KV lies in a file arrive at the scheduler once it is loaded, or is late."""

from qllm.engine.prefix import PrefixCache, Staged
from qllm.ingress import Cancel, Ingress, Item, Submission, Update
from qllm.ingress.protocol import ArrivalWord
from qllm.types import RequestId


class LoadingIngress:
    """A transport that holds requests back while their pages are read; others go by.

    Args:
        inner: The transport.
        prefix: The prefix cache, or None: then nothing is held back.
    """

    def __init__(self, inner: Ingress, prefix: PrefixCache | None) -> None:
        self._inner, self._prefix = inner, prefix
        self._held: dict[RequestId, tuple[Submission, Staged]] = {}
        self._updates: dict[RequestId, list[Update]] = {}
        """What was asked meanwhile of requests that are held."""

    @property
    def stop(self) -> ArrivalWord:
        """The word that arrivals lower."""
        return self._inner.stop

    @property
    def held(self) -> tuple[Submission, ...]:
        """Requests whose pages are being read."""
        return tuple(item for item, _ in self._held.values())

    def drain(self) -> list[Item]:
        """Take what has arrived and waits for no page, and what has waited."""
        items, prefix = self._inner.drain(), self._prefix
        if prefix is None:
            return items
        prefix.turn()
        found: list[Item] = []
        for number in self._over(prefix):
            found += self._take(number, prefix)
        for item in items:
            if isinstance(item, Update) and item.request_id in self._held:
                self._updates.setdefault(item.request_id, []).append(item)
                continue
            if isinstance(item, Cancel) and item.request_id in self._held:
                found += self._take(item.request_id, prefix)
            staged = prefix.coming(item) if isinstance(item, Submission) else None
            if isinstance(item, Submission) and staged is not None:
                self._held[item.request_id] = item, staged
            else:
                found.append(item)
        return found

    def _over(self, prefix: PrefixCache) -> list[RequestId]:
        """Those who wait no longer, in the order in which they came."""
        now = prefix.now_ns()
        return [
            number
            for number, (item, staged) in self._held.items()
            if prefix.is_due(staged.load)
            or (item.deadline_ns is not None and item.deadline_ns <= now)
        ]

    def _take(self, number: RequestId, prefix: PrefixCache) -> list[Item]:
        """A request that waits no longer, and what was asked of it meanwhile."""
        item, staged = self._held.pop(number)
        prefix.came(number, staged)
        return [item, *self._updates.pop(number, ())]

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives, pages are to be looked at, or the time has passed."""
        if self._prefix is not None:
            due = self._prefix.next_turn_ns
            if due is not None:
                left = max(0, due - self._prefix.now_ns())
                timeout_ns = left if timeout_ns is None else min(timeout_ns, left)
        self._inner.wait(timeout_ns)
