"""Background responses: answered as BE. The next server continues unfinished ones.

queued -> in_progress -> completed, incomplete, failed
   `----------`--------> cancelled

Every event of a streamed response is stored at once. The client reads the stored events, also after
a reconnect, from a given number on. If the engine fails, a streamed response continues on the next
engine, because sent events cannot be taken back. For the same reason, a server marks a stream as
failed if an earlier server had already begun the stream.
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
"""Seconds until a response is retried after a failed write to disk."""

CUT_OFF = (
    "this stream was cut off in the middle (its server, engine or disk failed), and what was said "
    "cannot go on; ask again"
)

DAMAGED = "this response is damaged on the server's disk; ask again"

_log = logging.getLogger("qllm.server.api.background")


class Background:
    """The worker for unfinished responses. Lives on one event loop."""

    def __init__(self, front: Front, kept: ResponseStore, best_effort: BestEffort) -> None:
        self._front, self._kept, self._best_effort = front, kept, best_effort
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopper: asyncio.Task[None] | None = None
        self._news: dict[str, asyncio.Event] = {}
        """Signals, by response id, that wake readers when there is news."""
        self._num_readers: Counter[str] = Counter()
        """Number of readers by API key."""

    async def start(self) -> None:
        """Continue the responses that the previous server left unfinished."""
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
        """Start to work on a stored response."""
        if not self._front.draining.is_set():
            task = asyncio.create_task(self._run(response_id))
            self._tasks[response_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    def stop(self, response_id: str) -> None:
        """Stop work on a response that was cancelled or deleted."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
        self._tell(response_id)

    async def cancel(self, response_id: str, response: dict[str, Any]) -> None:
        """End a response as cancelled, unless it has already ended."""
        done = {**response, "status": "cancelled"}
        if await asyncio.to_thread(self._kept.change, response_id, done):
            self.stop(response_id)

    def _tell(self, response_id: str) -> None:
        """Wake the readers of a response."""
        if (news := self._news.pop(response_id, None)) is not None:
            news.set()

    def enter(self, owner: str) -> Callable[[], None]:
        """Count a reader of events, and return the function to call when the reader leaves.

        Raises:
            ApiError: 429, the API key has too many readers.
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
        """Yield each event after a number at once, until the response's end or the drain."""
        while not self._front.draining.is_set():
            news = self._news.setdefault(response_id, asyncio.Event())  # before the read
            found, is_over = await asyncio.to_thread(self._kept.events, response_id, after)
            for text in found:
                yield text
            after += len(found)
            if is_over:
                self._tell(response_id)  # wakes the other readers, because no more events follow
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
                except (OSError, sqlite3.Error) as error:  # for example a full disk
                    _log.warning("response %s waits for its storage: %s", response_id, error)
                    await asyncio.sleep(STORAGE_RETRY_S)
        except Exception:  # noqa: BLE001 - logged; the others continue
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
        except Exception as error:  # noqa: BLE001 - logged; the client gets an error
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

        front = self._front.of(begun["model"])  # the response has named it since it was queued
        ask = chat.ask_of(front, asked, row["id"], None)
        ask = replace(ask, cache_owner=owner_of(row["owner"]))
        if not body.stream:
            writer = ResponseWriter(front, body, asked, keep, begun)
            await self._best_effort.answer(front, row["id"], ask, writer)
            return
        count = await asyncio.to_thread(self._kept.num_events, row["id"])
        if count > len(OPENING):
            raise ApiError(500, CUT_OFF, code="stream_cut_off")
        recorder = Recorder(front, body, asked, None, begun, count)
        recorder.record = self._record
        await self._best_effort.answer(front, row["id"], ask, recorder, replay=True)

    async def _record(self, response: dict[str, Any], event: str) -> None:
        """Store an event. The last event is stored together with the response."""
        kept, response_id = self._kept, response["id"]
        if response["status"] in UNFINISHED:
            await asyncio.to_thread(kept.add_event, response_id, event)
        else:
            await asyncio.to_thread(kept.change, response_id, response, event)
        self._tell(response_id)


class Recorder(ResponseWriter):
    """A writer that records the events of a response, for readers now or later."""

    record: Callable[[dict[str, Any], str], Awaitable[None]]
    """Function that stores the response and one of its events."""

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for the answer, and record each event at once."""
        async for event in self.events(answer, None, None):
            await self.record(self.response, event)
        return self.response
