"""Requests whose KV lies in a file arrive at the scheduler once it is loaded, or is late."""

from qllm.engine.prefix import PrefixCache
from qllm.engine.tier import Load
from qllm.ingress import Cancel, Ingress, Item, Submission
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
        self._held: dict[RequestId, tuple[Submission, Load]] = {}
        self._arriving: list[Load] = []
        """Loads of requests that the loop takes in this turn, and that find their pages then."""

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
        if prefix is None or prefix.tier is None:
            if prefix is not None:
                prefix.turn()
            return items
        prefix.turn()
        self.settle()
        found: list[Item] = [item for item in self._over(prefix)]
        for item in items:
            if isinstance(item, Cancel) and item.request_id in self._held:
                found.append(self._take(item.request_id))
            load = prefix.coming(item) if isinstance(item, Submission) else None
            if isinstance(item, Submission) and load is not None:
                self._held[item.request_id] = item, load
            else:
                found.append(item)
        return found

    def _over(self, prefix: PrefixCache) -> list[Submission]:
        """Those who wait no longer, in the order in which they came."""
        assert prefix.tier is not None
        now = prefix.now_ns()
        over = [
            number
            for number, (item, load) in self._held.items()
            if prefix.tier.is_late(load, now)
            or (item.deadline_ns is not None and item.deadline_ns <= now)
        ]
        prefix.tier.counts.late += sum(not self._held[number][1].is_over for number in over)
        return [self._take(number) for number in over]

    def _take(self, number: RequestId) -> Submission:
        item, load = self._held.pop(number)
        self._arriving.append(load)
        return item

    def settle(self) -> None:
        """The loop has taken what `drain` gave: those who arrived have their own pins."""
        assert self._prefix is not None
        assert self._prefix.tier is not None
        while self._arriving:
            self._prefix.tier.end(self._arriving.pop(), self._prefix.store)

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives, pages are to be looked at, or the time has passed."""
        if self._prefix is not None:
            due = self._prefix.next_turn_ns
            if due is not None:
                left = max(0, due - self._prefix.now_ns())
                timeout_ns = left if timeout_ns is None else min(timeout_ns, left)
        self._inner.wait(timeout_ns)
