"""Asks the engine for those who do not wait: lines of batches and responses in the background.

Their number in the engine is bounded. What an engine died under is asked again alone, without
others; what an engine dies under again has failed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from qllm.errors import QllmError
from qllm.server.api.answers import Renderer
from qllm.server.http.errors import ApiError, from_engine
from qllm.server.requests.ask import Ask
from qllm.server.requests.front import Front
from qllm.types import Priority

MOST_DEATHS = 2
"""Engines that may die under one: the first may have been another request's fault."""
RETRY_S = 0.5
"""Between two tries when the engine's queue is full or there is no engine."""


class EngineGoneError(Exception):
    """The engine ended under a request, which is to be asked again of the next one."""


class BestEffort:
    """Lives on one event loop.

    Args:
        front: Knows the engine.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._permits = asyncio.Semaphore(front.config.batch_concurrency)
        self._admission = asyncio.Lock()
        """Held by whoever takes permits: one that needs all of them gets them."""
        self._deaths = Counter[Hashable]()
        """Engines that died under each."""

    async def take(self, name: Hashable) -> int:
        """Wait for permits in the engine: one, or all for what an engine died under."""
        permits = self._front.config.batch_concurrency if self._deaths[name] else 1
        taken = 0
        try:
            async with self._admission:
                for _ in range(permits):
                    await self._permits.acquire()
                    taken += 1
        except BaseException:
            self.give_back(taken)
            raise
        return permits

    def give_back(self, permits: int) -> None:
        """Let others have them."""
        for _ in range(permits):
            self._permits.release()

    @asynccontextmanager
    async def permit(self, name: Hashable) -> AsyncIterator[None]:
        """Hold permits in the engine."""
        permits = await self.take(name)
        try:
            yield
        finally:
            self.give_back(permits)

    async def answer(
        self, name: Hashable, ask: Ask, renderer: Renderer, *, replay: bool = False
    ) -> dict[str, Any]:
        """Wait for an answer.

        Args:
            name: Whose it is.
            ask: What is asked.
            renderer: Makes it.
            replay: It goes on with the next engine where this one ended; else it is asked again.

        Raises:
            ApiError: There is none, and will be none.
            EngineGoneError: The engine ended.
        """
        try:
            return await self._answer(name, replace(ask, replay=replay), renderer)
        except ApiError as error:
            if error.status_code != 503:
                raise
            if self._deaths[name] < MOST_DEATHS:
                raise EngineGoneError from error
            text = f"the engine ended {MOST_DEATHS} times while it answered this: {error}"
            raise ApiError(500, text, code="engine_ended") from error

    def forget(self, name: Hashable) -> None:
        """It has its answer."""
        self._deaths.pop(name, None)

    async def engine(self) -> None:
        """Wait until there is an engine again."""
        await asyncio.sleep(RETRY_S)
        while self._front.unavailable() is not None:
            await asyncio.sleep(RETRY_S)

    async def _answer(self, name: Hashable, ask: Ask, renderer: Renderer) -> dict[str, Any]:
        while True:
            try:
                answer = await self._front.open(ask, Priority.BE)
                break
            except QllmError as error:
                wrapped = from_engine(error)
                if wrapped.status_code != 429:
                    raise wrapped from error
                await asyncio.sleep(RETRY_S)
        try:
            renderer.serve(answer, None)
            return await renderer.body(answer)
        except ApiError as error:
            if error.status_code == 503 and not self._front.draining.is_set():
                self._deaths[name] += 1
            raise
        finally:
            answer.close()
