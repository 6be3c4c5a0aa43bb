"""Responses that nobody waits for: BE, and what one server has not finished the next one does.

queued -> in_progress -> completed, incomplete, failed
   `----------`--------> cancelled
"""

import asyncio
import json
import logging
import sqlite3
from dataclasses import replace
from typing import Any

from qllm.errors import QllmError

from . import access, chat
from .answers import owner_of
from .best_effort import BestEffort, EngineGoneError
from .errors import ApiError, from_engine, parse, unexpected
from .front import Front
from .response_store import ResponseStore
from .response_writer import ResponseWriter, failed
from .responses_protocol import ResponsesRequest
from .store import Row

STORAGE_RETRY_S = 5.0
"""Until a response is tried again that could not be written."""

_log = logging.getLogger("qllm.server.background")


class Background:
    """Answers the unfinished responses. Lives on one event loop."""

    def __init__(self, front: Front, kept: ResponseStore, best_effort: BestEffort) -> None:
        self._front, self._kept, self._best_effort = front, kept, best_effort
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with what the server before this one has not finished."""
        self._stopper = asyncio.create_task(self._stop_at_drain())
        for response_id in await asyncio.to_thread(self._kept.unfinished):
            self.begin(response_id)

    async def _stop_at_drain(self) -> None:
        await self._front.draining.wait()
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stop at once. Unfinished responses stay for the next server."""
        tasks = [*self._tasks.values(), *([self._stopper] if self._stopper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, response_id: str) -> None:
        """Work on a response that is kept."""
        if not self._front.draining.is_set():
            task = asyncio.create_task(self._run(response_id))
            self._tasks[response_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    def stop(self, response_id: str) -> None:
        """Work on it no more."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def cancel(self, response_id: str, response: dict[str, Any]) -> None:
        """End a response as cancelled, unless it has ended."""
        done = {**response, "status": "cancelled"}
        if await asyncio.to_thread(self._kept.change, response_id, done):
            self.stop(response_id)

    async def _run(self, response_id: str) -> None:
        try:
            while True:
                try:
                    async with self._best_effort.permit(response_id):
                        return await self._advance(response_id)
                except EngineGoneError:
                    _log.warning("response %s waits for an engine", response_id)
                    await self._best_effort.engine()
                except (OSError, sqlite3.Error) as error:  # a full disk, for now
                    _log.warning("response %s waits for its storage: %s", response_id, error)
                    await asyncio.sleep(STORAGE_RETRY_S)
        except Exception:  # noqa: BLE001 - logged; the others go on
            _log.exception("response %s stopped; the next server goes on", response_id)

    async def _advance(self, response_id: str) -> None:
        row = await asyncio.to_thread(self._kept.work, response_id)
        if row is None:
            return
        access.begin(row["owner"])
        begun = {**json.loads(row["response"]), "status": "in_progress"}
        if not await asyncio.to_thread(self._kept.change, response_id, begun):
            return
        try:
            await self._answer(row, begun)
        except ApiError as error:
            await asyncio.to_thread(self._kept.change, response_id, failed(begun, error))
        except QllmError as error:
            done = failed(begun, from_engine(error))
            await asyncio.to_thread(self._kept.change, response_id, done)
        except (EngineGoneError, OSError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001 - logged; the client does not ask for ever
            _log.exception("response %s failed", response_id)
            done = failed(begun, unexpected(error))
            await asyncio.to_thread(self._kept.change, response_id, done)
        self._best_effort.forget(response_id)

    async def _answer(self, row: Row, begun: dict[str, Any]) -> None:
        body: ResponsesRequest = parse(ResponsesRequest, json.loads(row["asked"]))
        before: list[Row] = []
        if row["previous"] is not None:
            get = self._kept.conversation
            before = await asyncio.to_thread(get, row["previous"], row["owner"])
        asked = body.chat(before)

        async def keep(response: dict[str, Any]) -> None:
            await asyncio.to_thread(self._kept.change, row["id"], response)

        writer = ResponseWriter(self._front, body, asked, keep, begun)
        ask = chat.ask_of(asked, row["id"], None)
        ask = replace(ask, cache_owner=owner_of(row["owner"]))
        await self._best_effort.answer(row["id"], ask, writer)
