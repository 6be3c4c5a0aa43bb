"""Engine requests for work without a waiting client: batch lines and background responses.

The number of these requests in the engine is bounded. Work during which an engine died is retried
alone. If an engine dies again during the same work, the work has failed.
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
"""Engine deaths after which work has failed. A single death may be another request's fault."""
RETRY_S = 0.5
"""Seconds between two tries, while the engine's queue is full or no engine exists."""


class EngineGoneError(Exception):
    """Error: the engine ended during a request. The request must be retried on the next engine."""


class BestEffort:
    """A client of the engine for best-effort work. Lives on one event loop.

    Args:
        front: Front of the server's first model.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._permits = asyncio.Semaphore(front.config.batch_concurrency)
        self._admission = asyncio.Lock()
        """Lock for taking permits, so that work that needs all permits gets all permits."""
        self._deaths = Counter[Hashable]()
        """Number of engines that died, by work."""

    async def take(self, name: Hashable) -> int:
        """Wait for one permit, or for all if an engine died during this work.

        Return the number of permits.
        """
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
        """Release permits."""
        for _ in range(permits):
            self._permits.release()

    @asynccontextmanager
    async def permit(self, name: Hashable) -> AsyncIterator[None]:
        """Hold permits inside the block."""
        permits = await self.take(name)
        try:
            yield
        finally:
            self.give_back(permits)

    async def answer(
        self, front: Front, name: Hashable, ask: Ask, renderer: Renderer, *, replay: bool = False
    ) -> dict[str, Any]:
        """Wait for an answer and return its body.

        Args:
            front: Front of the model that answers.
            name: Name of the work, for the count of engine deaths.
            ask: Request to the engine.
            renderer: Writer of the body.
            replay: True to resubmit the request to the next engine; False if the caller retries.

        Raises:
            ApiError: The request has failed.
            EngineGoneError: The engine ended.
        """
        try:
            return await self._answer(front, name, replace(ask, replay=replay), renderer)
        except ApiError as error:
            if error.status_code != 503:
                raise
            if self._deaths[name] < MOST_DEATHS:
                raise EngineGoneError from error
            text = f"the engine ended {MOST_DEATHS} times while it answered this: {error}"
            raise ApiError(500, text, code="engine_ended") from error

    def forget(self, name: Hashable) -> None:
        """Forget the engine deaths of finished work."""
        self._deaths.pop(name, None)

    async def engine(self) -> None:
        """Wait until every model has an engine again."""
        await asyncio.sleep(RETRY_S)
        while any(front.unavailable() is not None for front in self._front.all):
            await asyncio.sleep(RETRY_S)

    async def _answer(
        self, front: Front, name: Hashable, ask: Ask, renderer: Renderer
    ) -> dict[str, Any]:
        while True:
            try:
                answer = await front.open(ask, Priority.BE)
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
