"""Submitting on the event loop what takes less time than a hand-over to a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from qllm.llm import QLLMEngine
from qllm.server.requests.ask import Ask

MOST_CHARS = 256
"""Characters, or ids, of a prompt that is made into tokens on the event loop: about 0.1 ms."""
MOST_HELD = 32
"""Requests after which the engine is told, whatever else comes in this turn of the loop."""

_T = TypeVar("_T")


class AtOnce:
    """Submits small prompts in the turn of the event loop that they came in.

    The engine is told at the end of the turn, so that many of one moment wake it once and share
    its step. Lives on one event loop.
    """

    def __init__(self) -> None:
        self._held: QLLMEngine | None = None
        self._num_held = 0

    @staticmethod
    def takes(engine: QLLMEngine, ask: Ask) -> bool:
        """Whether a request is so small, and submitting it waits for nobody."""
        return engine.client.can_hold and ask.opened is None and ask.size <= MOST_CHARS

    def run(self, engine: QLLMEngine, submit: Callable[[], _T]) -> _T:
        """Submit to an engine, and tell it soon."""
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
        """Tell the engine what was submitted."""
        if self._held is not None:
            held, self._held, self._num_held = self._held, None, 0
            held.client.release()
