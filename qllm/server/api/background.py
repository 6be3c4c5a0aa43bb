"""Responses that nobody waits for: BE, and what one server has not finished the next one does.

queued -> in_progress -> completed, incomplete, failed
   `----------`--------> cancelled

The events of one that is a stream are kept with it as they come, and read from there: by whoever
asked for it, and by who comes back after some number. Such a response goes on with the next engine
where the last one ended, since what was said cannot be taken back; for the same reason a server
that finds one in the middle, begun by the server before it, ends it as failed.
"""

import asyncio
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from qllm.errors import QllmError
from qllm.server.api import chat
from qllm.server.api.answers import owner_of
from qllm.server.api.best_effort import BestEffort, EngineGoneError
from qllm.server.api.blocks import named_event
from qllm.server.api.protocol import ChatRequest
from qllm.server.api.response_writer import OPENING, ResponseWriter, failed
from qllm.server.api.responses_protocol import ResponsesRequest
from qllm.server.http import access
from qllm.server.http.errors import ApiError, from_engine, unexpected
from qllm.server.requests.bodies import JSON, chat_of, read
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer
from qllm.server.state.response_store import UNFINISHED, ResponseStore
from qllm.server.state.store import Row

STORAGE_RETRY_S = 5.0
"""Until a response is tried again that could not be written."""

CUT_OFF = (
    "this stream was cut off in the middle (its server, engine or disk failed), and what was said "
    "cannot go on; ask again"
)

DAMAGED = "this response is damaged on the server's disk; ask again"

_log = logging.getLogger("qllm.server.api.background")


class Background:
    """Answers the unfinished responses. Lives on one event loop."""

    def __init__(self, front: Front, kept: ResponseStore, best_effort: BestEffort) -> None:
        self._front, self._kept, self._best_effort = front, kept, best_effort
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopper: asyncio.Task[None] | None = None
        self._news: dict[str, asyncio.Event] = {}
        """By response, where somebody waits for its next event."""
        self._num_readers: Counter[str] = Counter()
        """By API key."""

    async def start(self) -> None:
        """Go on with what the server before this one has not finished."""
        self._stopper = asyncio.create_task(self._stop_at_drain())
        for response_id in await asyncio.to_thread(self._kept.unfinished):
            self.begin(response_id)

    async def _stop_at_drain(self) -> None:
        await self._front.draining.wait()
        for task in self._tasks.values():
            task.cancel()
        for response_id in list(self._news):
            self._tell(response_id)

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
        """Work on it no more: it was cancelled or deleted."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
        self._tell(response_id)

    async def cancel(self, response_id: str, response: dict[str, Any]) -> None:
        """End a response as cancelled, unless it has ended."""
        done = {**response, "status": "cancelled"}
        if await asyncio.to_thread(self._kept.change, response_id, done):
            self.stop(response_id)

    def _tell(self, response_id: str) -> None:
        """There is something new to read."""
        if (news := self._news.pop(response_id, None)) is not None:
            news.set()

    def enter(self, owner: str) -> Callable[[], None]:
        """Count a reader of events in; call the result once it has left.

        Raises:
            ApiError: 429, this API key has as many as it may.
        """
        num, most = self._num_readers[owner], self._front.config.max_event_streams
        if num >= most:
            text = (
                f"{num} streams of this API key read events of responses in the background "
                f"(max_event_streams={most}); try again when one has ended"
            )
            raise ApiError(429, text, code="event_stream_limit", retry_after_s=1)
        self._num_readers[owner] += 1
        return partial(self._leave, owner)

    def _leave(self, owner: str) -> None:
        self._num_readers[owner] -= 1
        if not self._num_readers[owner]:
            del self._num_readers[owner]

    async def follow(self, response_id: str, after: int) -> AsyncIterator[str]:
        """The events of a response behind a number, as they come, until its end or the drain."""
        while not self._front.draining.is_set():
            news = self._news.setdefault(response_id, asyncio.Event())  # before it looks
            found, is_over = await asyncio.to_thread(self._kept.events, response_id, after)
            for text in found:
                yield text
            after += len(found)
            if is_over:
                self._tell(response_id)  # nobody else would clear what it waited for
                return
            if not found:
                try:
                    async with asyncio.timeout(self._front.config.comment_s):
                        await news.wait()
                except TimeoutError:
                    yield ": alive\n\n"

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
        try:
            begun = {**json.loads(row["response"]), "status": "in_progress"}
        except (ValueError, TypeError, RecursionError):
            damaged = ApiError(500, DAMAGED, code="response_damaged")
            await self._fail({"object": "response", "id": response_id, "output": []}, damaged)
            return
        if not await asyncio.to_thread(self._kept.change, response_id, begun):
            return
        try:
            await self._answer(row, begun)
        except ApiError as error:
            await self._fail(begun, error)
        except QllmError as error:
            await self._fail(begun, from_engine(error))
        except (EngineGoneError, OSError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001 - logged; the client does not ask for ever
            _log.exception("response %s failed", response_id)
            await self._fail(begun, unexpected(error))
        self._best_effort.forget(response_id)

    async def _fail(self, begun: dict[str, Any], error: ApiError) -> None:
        response_id, done = begun["id"], failed(begun, error)
        number = await asyncio.to_thread(self._kept.num_events, response_id)
        said = {"sequence_number": number, "response": done}
        events = [named_event("response.failed", said)] if number else []
        await asyncio.to_thread(self._kept.change, response_id, done, *events)
        self._tell(response_id)

    async def _answer(self, row: Row, begun: dict[str, Any]) -> None:
        do, raw = self._front.best_effort, row["asked"].encode()
        body: ResponsesRequest = await do(len(raw), read, raw, JSON, ResponsesRequest)
        before: list[str] = []
        if row["previous"] is not None:
            get = self._kept.conversation
            before = await asyncio.to_thread(get, row["previous"], row["owner"])
        num_bytes = body.num_bytes + sum(map(len, before))
        asked: ChatRequest = await do(num_bytes, chat_of, body, before)

        async def keep(response: dict[str, Any]) -> None:
            await asyncio.to_thread(self._kept.change, row["id"], response)

        ask = chat.ask_of(asked, row["id"], None)
        ask = replace(ask, cache_owner=owner_of(row["owner"]))
        if not body.stream:
            writer = ResponseWriter(self._front, body, asked, keep, begun)
            await self._best_effort.answer(row["id"], ask, writer)
            return
        count = await asyncio.to_thread(self._kept.num_events, row["id"])
        if count > len(OPENING):
            raise ApiError(500, CUT_OFF, code="stream_cut_off")
        recorder = Recorder(self._front, body, asked, None, begun, count)
        recorder.record = self._record
        await self._best_effort.answer(row["id"], ask, recorder, replay=True)

    async def _record(self, response: dict[str, Any], event: str) -> None:
        """Keep an event, with the response if it is the last."""
        kept, response_id = self._kept, response["id"]
        if response["status"] in UNFINISHED:
            await asyncio.to_thread(kept.add_event, response_id, event)
        else:
            await asyncio.to_thread(kept.change, response_id, response, event)
        self._tell(response_id)


class Recorder(ResponseWriter):
    """Writes the events of a response for whoever reads them, now or later."""

    record: Callable[[dict[str, Any], str], Awaitable[None]]
    """Called with the response and each of its events."""

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for the answer, and record its events as they come."""
        async for event in self.events(answer, None, None):
            await self.record(self.response, event)
        return self.response
