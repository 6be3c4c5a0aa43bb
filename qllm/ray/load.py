"""The load of a replica, counted where requests pass, without a question to the engine.

Routers and the autoscaler receive the load, per front end. Times are nanoseconds of one clock.
"""

import threading
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from math import ceil

from qllm.fleet.routes import Backlog
from qllm.types import NS_PER_MS, NS_PER_S, Priority, Slo

Counts = dict[str, list[Sequence[int]]]
"""Backlogs of LS and of BE as tuples, by front end. JSON keeps this type."""


def front_end_of(key: str) -> str:
    """Return the front end that gave a request this key."""
    return key.rpartition("-")[0]


@dataclass(slots=True)
class _Open:
    priority: int
    arrival_ns: int
    ttft_ms: float | None
    num_prompt: int
    num_output: int
    waits: bool = True

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Contribution of the request to a `Backlog`."""
        return 1, int(self.waits), self.num_prompt * self.waits, self.num_output

    def late(self, now_ns: int) -> float:
        """Return TTFT over target if the first token came now; 0 for BE, or without a target."""
        if self.priority >= Priority.BE or self.ttft_ms is None:
            return 0.0
        return (now_ns - self.arrival_ns) / NS_PER_MS / self.ttft_ms


class ReplicaLoad:
    """The open requests of a replica, and the lateness of its LS requests. It is thread-safe.

    Args:
        ttft_ms: Target in ms for LS requests without a target. With None they do not count as late.
        window_s: Seconds for which a first token counts.
    """

    def __init__(self, ttft_ms: float | None = None, window_s: float = 30.0) -> None:
        self._ttft_ms, self._window_ns = ttft_ms, int(window_s * NS_PER_S)
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._totals: dict[str, tuple[Backlog, Backlog]] = {}
        self._firsts: deque[tuple[int, float]] = deque()
        """Times of first tokens of LS requests, with TTFT over target."""

    def opened(
        self,
        key: str,
        priority: int,
        arrival_ns: int,
        slo: Slo,
        num_prompt: int,
        num_output: int,
        is_moved: bool = False,
    ) -> None:
        """Add a request that has arrived.

        Args:
            key: Id of the request until `closed`.
            priority: Class of the request.
            arrival_ns: Time of its arrival.
            slo: Targets of the request.
            num_prompt: Number of tokens to prefill, including output of another engine.
            num_output: Largest number of tokens still to produce.
            is_moved: True if the request had its first token elsewhere, so that it cannot be late.
        """
        target = None if is_moved else slo.ttft_ms or self._ttft_ms
        with self._lock:
            item = self._open[key] = _Open(priority, arrival_ns, target, num_prompt, num_output)
            self._add(key, item, 1)

    def _add(self, key: str, item: _Open, sign: int) -> None:
        name = front_end_of(key)
        both = self._totals.setdefault(name, (Backlog(), Backlog()))
        total = both[item.priority >= Priority.BE]
        num, waiting, prompt, output = item.counts
        total.num += sign * num
        total.num_waiting += sign * waiting
        total.prompt_tokens += sign * prompt
        total.output_tokens += sign * output
        if not (both[0].num or both[1].num):
            del self._totals[name]

    def changed(self, key: str, priority: int) -> None:
        """Record a request's new class."""
        with self._lock:
            if (item := self._open.get(key)) is not None:
                self._add(key, item, -1)
                item.priority = priority
                self._add(key, item, 1)

    def token(self, key: str, now_ns: int) -> None:
        """Record one more token of a request."""
        with self._lock:
            if (item := self._open.get(key)) is None:
                return
            if item.waits and item.priority < Priority.BE and item.ttft_ms is not None:
                self._firsts.append((now_ns, item.late(now_ns)))
            self._add(key, item, -1)
            item.waits, item.num_output = False, item.num_output - 1
            self._add(key, item, 1)

    def closed(self, key: str) -> None:
        """Remove a request that has ended. Idempotent."""
        with self._lock:
            if (item := self._open.pop(key, None)) is not None:
                self._add(key, item, -1)

    def lateness(self, now_ns: int) -> float:
        """Return the 90th percentile of TTFT over target of LS in the window, else 0.

        A waiting request counts with its waiting time, once that exceeds its target.
        """
        with self._lock:
            while self._firsts and self._firsts[0][0] < now_ns - self._window_ns:
                self._firsts.popleft()
            found = [late for _, late in self._firsts]
            waiting = [item.late(now_ns) for item in self._open.values() if item.waits]
        found = sorted(found + [late for late in waiting if late > 1])
        return found[ceil(0.9 * len(found)) - 1] if found else 0.0

    def counts(self) -> Counts:
        """Return the remaining work, by front end."""
        with self._lock:
            return {name: [astuple(b) for b in both] for name, both in self._totals.items()}


def added(counts: Counts, without: Container[str] = ()) -> tuple[Backlog, Backlog]:
    """Return the summed backlogs of LS and BE of all front ends except the given ones."""
    each = [both for name, both in counts.items() if name not in without]
    ls, be = ([sum(column) for column in zip(*(b[i] for b in each), strict=True)] for i in (0, 1))
    return Backlog(*ls), Backlog(*be)


def be_tokens(counts: Counts) -> int:
    """Return the number of tokens of BE requests that are not computed yet."""
    be = added(counts)[1]
    return be.prompt_tokens + be.output_tokens
