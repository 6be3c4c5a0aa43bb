"""Calls from other threads onto an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar
from weakref import WeakKeyDictionary, ref


class Waker:
    """A queue of calls for one event loop. Several calls at one moment wake the loop once."""

    _all: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "Waker"]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due: deque[Callable[[], object]] = deque()
        self._will_wake = False

    @classmethod
    def here(cls) -> "Waker":
        """Return the waker of the running event loop."""
        loop = asyncio.get_running_loop()
        if (found := cls._all.get(loop)) is None:
            found = cls._all[loop] = cls(loop)
        return found

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop, in order.

        A closed loop calls nothing. From any thread.
        """
        # must be before the check, because `_call_all` clears the mark first
        self._due.append(function)
        if self._will_wake or (loop := self._loop()) is None:
            return
        self._will_wake = True
        with suppress(RuntimeError):  # the event loop was closed, so no task waits
            loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._will_wake = False
        for _ in range(len(self._due)):  # later calls wake the loop again
            self._due.popleft()()
