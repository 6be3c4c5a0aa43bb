"""An ingress on a virtual clock. Arrivals have known times, and waiting takes no real time."""

import heapq

from qllm.ingress import InprocIngress, Item
from qllm.sim.runner import VirtualClock


class VirtualIngress(InprocIngress):
    """A queue of items that arrive at given virtual times. Waiting moves the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.due: list[tuple[int, int, Item]] = []
        self._count = 0

    def put_at(self, at_ns: int, item: Item) -> None:
        """Let an item arrive at a time."""
        self._count += 1
        heapq.heappush(self.due, (at_ns, self._count, item))

    @property
    def is_empty(self) -> bool:
        """Return True if no item will arrive, and no arrived item waits to be drained."""
        return not (self.due or self._items)

    def next_ns(self) -> int | None:
        """Return the time of the next arrival; None if there is none."""
        return self.due[0][0] if self.due else None

    def arrive(self) -> None:
        """Take the items that are due. Each lowers the stop word at the time when it was due."""
        while self.due and self.due[0][0] <= self.clock.at_ns:
            at_ns, _, item = heapq.heappop(self.due)
            word = self.stop.word
            self.put(item)
            if self.stop.word < word:
                self.stop.lowered_ns = at_ns

    def drain(self) -> list[Item]:
        """Return all items that have arrived."""
        self.arrive()
        return super().drain()

    def wait(self, timeout_ns: int | None) -> None:
        """Move the clock to the next arrival, or by the timeout if that is sooner."""
        next_ns = self.next_ns()
        times = [] if next_ns is None else [next_ns]
        if timeout_ns is not None:
            times.append(self.clock.at_ns + timeout_ns)
        if times:
            self.clock.at_ns = max(self.clock.at_ns, min(times))
