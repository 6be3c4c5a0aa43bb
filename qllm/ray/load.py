"""What one replica has to do: counted where its requests come in, without a question to the engine.

Router and autoscaler are told of it. Times are nanoseconds of one clock, tokens are those of
prompts and answers.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

from qllm.types import NS_PER_MS, NS_PER_S, Priority, Slo


@dataclass(slots=True)
class _Open:
    priority: int
    arrival_ns: int
    ttft_ms: float | None
    left: int
    """Tokens not computed yet: of its prompt until the first token, and of its answer."""
    num_prompt: int
    waits: bool = True


class Load:
    """Counts the open requests of a replica, and how late its LS requests were.

    Args:
        ttft_ms: Target of LS requests that have none of their own; None: they count only then.
        window_s: How long a first token counts.
    """

    def __init__(self, ttft_ms: float | None, window_s: float) -> None:
        self._ttft_ms, self._window_ns = ttft_ms, int(window_s * NS_PER_S)
        self._open: dict[str, _Open] = {}
        self._firsts: deque[tuple[int, float]] = deque()
        """When LS requests got their first token, and TTFT over target."""

    def opened(
        self, key: str, priority: int, arrival_ns: int, slo: Slo, num_prompt: int, num_output: int
    ) -> None:
        """A request has come.

        Args:
            key: Its name until `closed`.
            priority: Its class.
            arrival_ns: When.
            slo: Its targets.
            num_prompt: Tokens to prefill, what another engine had produced included.
            num_output: Most tokens that it will still have.
        """
        target = slo.ttft_ms or self._ttft_ms
        left = num_prompt + num_output
        self._open[key] = _Open(priority, arrival_ns, target, left, num_prompt)

    def changed(self, key: str, priority: int) -> None:
        """It has another class."""
        if (item := self._open.get(key)) is not None:
            item.priority = priority

    def token(self, key: str, now_ns: int) -> None:
        """It has one more token."""
        if (item := self._open.get(key)) is None:
            return
        if item.waits:
            item.waits, item.left = False, item.left - item.num_prompt
            if item.priority < Priority.BE and item.ttft_ms is not None:
                late = (now_ns - item.arrival_ns) / NS_PER_MS / item.ttft_ms
                self._firsts.append((now_ns, late))
        item.left -= 1

    def closed(self, key: str) -> None:
        """It has ended. Twice is once."""
        self._open.pop(key, None)

    def lateness(self, now_ns: int) -> float:
        """TTFT over target of LS requests, the 90th percentile of the window; 0 without any.

        One that waits counts with the time it has waited, once that is over its target.
        """
        while self._firsts and self._firsts[0][0] < now_ns - self._window_ns:
            self._firsts.popleft()
        found = [late for _, late in self._firsts]
        for item in list(self._open.values()):
            if item.waits and item.priority < Priority.BE and item.ttft_ms is not None:
                late = (now_ns - item.arrival_ns) / NS_PER_MS / item.ttft_ms
                found += [late] if late > 1 else []
        found.sort()
        return found[ceil(0.9 * len(found)) - 1] if found else 0.0

    def tokens(self) -> tuple[int, int]:
        """Tokens not computed yet of LS and of BE requests."""
        left = [0, 0]
        for item in list(self._open.values()):
            left[item.priority >= Priority.BE] += item.left
        return left[0], left[1]

    def counts(self) -> tuple[int, int]:
        """Open LS and BE requests."""
        count = [0, 0]
        for item in list(self._open.values()):
            count[item.priority >= Priority.BE] += 1
        return count[0], count[1]
