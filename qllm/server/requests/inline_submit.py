"""Submission on the event loop, for requests that cost less than waking a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from qllm.llm import QLLMEngine
from qllm.server.requests.ask import Ask

MOST_CHARS = 256
"""Most characters, or ids, of a prompt tokenised on the event loop: about 0.1 ms."""
MOST_HELD = 32
"""Most requests in one iteration of the event loop before the engine is notified."""

_T = TypeVar("_T")


class AtOnce:
    """A submitter of small prompts, in the iteration of the event loop in which they arrive.

    The engine is notified at the end of the iteration. So several requests wake the engine once and
    share a step. Lives on one event loop.
    """

    def __init__(self) -> None:
        self._held: QLLMEngine | None = None
        self._num_held = 0

    @staticmethod
    def takes(engine: QLLMEngine, ask: Ask) -> bool:
        """Return True if the request is small and its submission never blocks."""
        return engine.client.can_hold and ask.opened is None and ask.size <= MOST_CHARS

    def run(self, engine: QLLMEngine, submit: Callable[[], _T]) -> _T:
        """Submit to an engine, and notify the engine before the loop's iteration ends."""
        if self._held is not engine:
            self.release()
            self._held = engine
            engine.client.hold()
            asyncio.get_running_loop().call_soon(self.release)
        try:
            return submit()
        finally:
            self._num_held += 1
            if self._num_held >= MOST_HELD:
                self.release()

    def release(self) -> None:
        """Notify the engine of the submitted requests."""
        if self._held is not None:
            held, self._held, self._num_held = self._held, None, 0
            held.client.release()
