"""A debug mode of a server: what one turn of its event loop costs, and the size of one call.

A callback of the loop keeps every stream waiting for its own CPU time. A call that parses JSON or
decodes tokens keeps the interpreter's lock, on whatever thread, for a time that grows with its
size.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from qllm.cores import no_collections
from qllm.frontend import prompts
from qllm.server.requests.apart import LONG

MOST_S = 0.02
"""CPU time of one callback."""


class Worst(NamedTuple):
    """What was most of its kind."""

    amount: float
    what: str


class Watch:
    """The worst of what was seen."""

    def __init__(self) -> None:
        self.callback_s = Worst(0, "nothing ran")
        self.call_size = Worst(0, "nothing was called")

    def wrong(self) -> list[str]:
        """What took too long, or looked at too much."""
        found = []
        if self.callback_s.amount > MOST_S:
            found.append(f"{self.callback_s.amount:.3f} s of CPU time in {self.callback_s.what}")
        if self.call_size.amount >= LONG:
            found.append(f"{self.call_size.amount:.0f} bytes in {self.call_size.what}")
        return found

    def ran(self, seconds: float, what: object) -> None:
        if seconds > self.callback_s.amount:
            self.callback_s = Worst(seconds, repr(what))

    def called(self, size: int, what: str) -> None:
        if size > self.call_size.amount:
            self.call_size = Worst(size, what)


class Watched:
    """Watches this process; what it sees goes to the watch of the moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._watch = Watch()
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.events.Handle) -> None:
            start = time.thread_time()
            run(handle)
            self._watch.ran(time.thread_time() - start, handle)

        patch.setattr(asyncio.events.Handle, "_run", timed)
        patch.setattr(json, "loads", self._sized(json.loads, "json.loads", 0))
        patch.setattr(prompts, "decoded", self._sized(prompts.decoded, "decoded", 1))

    def _sized(self, function: Callable[..., Any], name: str, index: int) -> Callable[..., Any]:
        def sized(*args: Any, **how: Any) -> Any:
            self._watch.called(len(args[index]), name)
            return function(*args, **how)

        return sized

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Watch for a while; without collections, which here go through the heap of all tests.

        A server has frozen what it was started with (`qllm.cores`).
        """
        self._watch = Watch()
        with no_collections():
            yield self._watch
