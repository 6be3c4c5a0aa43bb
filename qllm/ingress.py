"""How requests get in: the `Ingress` protocol, the stop word, and the in-process transport.

Many threads put, the engine loop takes. A put costs the loop nothing until it looks: a running
program only compares the stop word with its threshold at each boundary.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from qllm.plan import ANY_ARRIVAL
from qllm.types import RequestId, SamplingParams, Slo

CONTROL = -(2**30)
"""The stop word of a cancellation or a call: smaller than every priority."""


class StopWord:
    """The word that an arrival lowers and a running program polls (`qllm.plan.Stop`)."""

    __slots__ = ("_lock", "lowered_ns", "now_ns", "stop_at_ns", "word")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.word = ANY_ARRIVAL
        self.stop_at_ns: int | None = None
        self.now_ns = now_ns
        self.lowered_ns = 0
        """When the word last went down."""
        self._lock = threading.Lock()

    def lower(self, priority: int) -> None:
        """An arrival of this class: running programs of a worse class stop."""
        with self._lock:
            if priority < self.word:
                self.lowered_ns = self.now_ns()
                self.word = priority

    def reset(self) -> None:
        """Called by the loop just before it drains, so that no arrival is missed."""
        with self._lock:
            self.word = ANY_ARRIVAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that passed every check at the door."""

    request_id: RequestId
    name: str
    priority: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    """With a seed: `submit` draws one where the caller gave none."""
    stop_ids: frozenset[int]
    """Ids that end it: EOS (unless ignored) and `stop_token_ids`."""
    max_tokens: int
    slo: Slo
    arrival_ns: int
    deadline_ns: int | None
    """`timeout_s` as engine time."""


class Cancel(NamedTuple):
    """The caller no longer wants this request."""

    request_id: RequestId


class Call(NamedTuple):
    """Run a function on the loop's thread, between two programs."""

    function: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None]


Item = Submission | Cancel | Call


class Ingress(Protocol):
    """What the engine loop takes requests from."""

    stop: StopWord

    def drain(self) -> list[Item]:
        """Take everything that has arrived, in order of arrival within a class."""
        ...

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        ...


class InprocIngress:
    """A queue between threads of one process."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.stop = StopWord(now_ns)
        self._items: deque[Item] = deque()
        self._arrived = threading.Event()

    def put(self, item: Item) -> None:
        """Hand over one item; returns at once."""
        self._items.append(item)
        if isinstance(item, Submission):
            self.stop.lower(item.priority)
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
