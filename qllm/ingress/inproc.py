"""The transport between threads of one process: a queue and a word."""

import threading
from array import array
from collections import deque
from collections.abc import Callable

from qllm.ingress.protocol import CONTROL, Item, Revision, Submission
from qllm.plan import ANY_ARRIVAL
from qllm.runner.protocol import Watch


class StopWord:
    """A word that an arrival lowers and a running program polls (`qllm.runner.protocol.Stop`)."""

    __slots__ = ("_changes", "_lock", "lowered_ns", "now_ns", "stop_at_ns", "word")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.word = ANY_ARRIVAL
        self.stop_at_ns: int | None = None
        self.now_ns = now_ns
        self.lowered_ns = 0
        """Time at which the word was last lowered."""
        self._lock = threading.Lock()
        self._changes = array("q", (0,))
        """Number of times that the word was lowered, increased after each change."""

    def watch(self) -> Watch:
        """Return the number that changes when the word is lowered (`qllm.runner.protocol.Stop`)."""
        return Watch(self._changes.buffer_info()[0], self._changes[0])

    def lower(self, priority: int) -> None:
        """Lower the word for an arrival of this class: programs of worse classes stop."""
        with self._lock:
            if priority < self.word:
                self.lowered_ns = self.now_ns()
                self.word = priority
                self._changes[0] += 1

    def reset(self) -> None:
        """Raise the word again. The engine loop does so before it drains, to miss no arrival."""
        with self._lock:
            self.word = ANY_ARRIVAL


class InprocIngress:
    """A queue between threads of one process."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.stop = StopWord(now_ns)
        self._items: deque[Item] = deque()
        self._arrived = threading.Event()

    def put(self, item: Item) -> None:
        """Add one item, without waiting."""
        self._items.append(item)
        if isinstance(item, Submission):
            self.stop.lower(item.priority)
        elif isinstance(item, Revision):
            self.stop.lower(item.word)
        else:
            self.stop.lower(CONTROL)
        self._arrived.set()

    def drain(self) -> list[Item]:
        """Take everything that has arrived."""
        self._arrived.clear()
        self.stop.reset()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        self._arrived.wait(None if timeout_ns is None else max(0, timeout_ns) / 1e9)
