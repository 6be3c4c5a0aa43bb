"""The feed of the live page. All open pages share one poll of the engine."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from qllm.errors import EngineClosedError
from qllm.record.summary import percentiles
from qllm.server.api.answers import event
from qllm.server.http.errors import ApiError
from qllm.server.metrics import STATES
from qllm.server.ops.probes import open_requests
from qllm.server.requests.front import Front
from qllm.types import Priority

_log = logging.getLogger("qllm.server")

PERIOD_S = 0.25
"""Seconds between two polls."""
WHOLE_EVERY = 4
"""Interval, in polls, at which a poll also lists the open requests."""
MAX_KEPT = 240
"""Most messages stored for a new or returning page: the messages of one minute."""
MAX_KEPT_CHARS = 4 << 20
MAX_SHOWN = 200
"""Most requests listed in one message."""


class Feed:
    """The messages for open pages. Lives on one event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._engine: object = None
        self._num_engines = 0
        self._server = secrets.token_hex(4)
        """Id of this server. A page may outlive the server and then sees the engines of the next
        one.
        """
        self._since = 0
        self._num_looks = 0
        self._number = 0
        """Number of messages so far."""
        self._kept: deque[tuple[int, str]] = deque()
        self._num_chars = 0
        self._num_pages = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Event that is set, then replaced, at every message."""

    async def messages(self, since: int) -> AsyncIterator[str]:
        """Yield each new message after number `since`, until the server drains.

        Args:
            since: Number of the last message that the page has; 0 yields all stored messages. A
                number that this server has not used comes from another server, and counts as 0.
        """
        if since > self._number:
            since = 0
        self._num_pages += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while not self._front.draining.is_set():
                news = self._news
                for number, text in list(self._kept):
                    if number > since:
                        since = number
                        yield text
                await news.wait()
            yield event({"down": "the server is shutting down"})
        finally:
            self._num_pages -= 1
            if not self._num_pages:
                self._task.cancel()
                self._task = None
                self._kept.clear()
                self._num_chars = 0

    async def _run(self) -> None:
        while True:
            try:
                message = await self._look()
            except Exception as error:  # noqa: BLE001 - the page shows it; the server keeps running
                _log.exception("the live page gets no news")
                message = {"down": f"the page gets no news: {error}"}
            self._put(message)
            await asyncio.sleep(PERIOD_S)

    def _put(self, message: dict[str, Any]) -> None:
        self._number += 1
        text = f"id: {self._number}\n{event(message)}"
        self._kept.append((self._number, text))
        self._num_chars += len(text)
        while len(self._kept) > MAX_KEPT or self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= len(self._kept.popleft()[1])
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- a poll of the engine

    async def _look(self) -> dict[str, Any]:
        front, engine = self._front, self._front.engine
        if engine is not self._engine:
            self._engine, self._since, self._num_looks = engine, 0, 0
            self._num_engines += 1
        whole = self._num_looks % WHOLE_EVERY == 0
        self._num_looks += 1
        if (error := front.unavailable()) is not None:
            return self._down(error)
        try:
            told = await asyncio.to_thread(engine.watch, self._since, whole)
            rows = await asyncio.to_thread(self._rows, told) if whole else []
        except EngineClosedError as error:
            return self._down(front.unavailable() or ApiError(503, str(error)))
        self._since = told.get("seq", 0)
        name = f"{self._server}-{self._num_engines}"
        found = {"time_s": time.time(), "engine": name, **told}
        if front.lossy is not None:
            found["lossy"] = front.lossy.told()
        return {**found, **self._whole(told, rows)} if whole else found

    def _down(self, error: ApiError) -> dict[str, Any]:
        """Return a message with the reason for the server's outage, and the waiting requests."""
        front = self._front
        self._num_looks = 0  # the first poll of a new engine lists the requests
        back_in_s = None if front.back_in_s is None or front.gave_up else front.back_in_s()
        num_open = sum(len(answer.handles) for answer in front.answers)
        said = {"down": error.message, "back_in_s": back_in_s, "num_open": num_open}
        return {"time_s": time.time(), "model": front.model_name, **said}

    def _rows(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the open requests that the engine does not list, such as ones not received yet."""
        listed = {row["number"] for row in told.get("requests", ())}
        return [
            {
                "name": request.handle.request_id,
                "class": request.class_name,
                "status": request.status,
                "prompt_tokens": len(request.handle.prompt_token_ids),
                "output_tokens": request.num_tokens,
            }
            for request in open_requests(self._front, listed)
        ]

    def _whole(self, told: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
        front = self._front
        requests = [*told.get("requests", ()), *rows]
        requests.sort(key=lambda row: row["class"] != "LS")
        ids = {
            handle.request_id: answer.answer_id
            for answer in list(front.answers)
            for handle in answer.handles
        }
        counts = {name: dict.fromkeys(STATES, 0) for name in Priority.__members__}
        for track, status, count in told.get("counts", ()):
            counts[track][status] += count
        for row in rows:
            counts[row["class"]][row["status"]] += 1
        return {
            "model": front.model_name,
            "policy": front.config.policy,
            "counts": counts,
            "ttft_ms": {name: self._ttft(name) for name in counts},
            "requests": [
                {"id": ids.get(r["name"])} | {k: v for k, v in r.items() if k != "number"}
                for r in requests[:MAX_SHOWN]
            ],
        }

    def _ttft(self, name: str) -> dict[str, float] | None:
        recent = list(self._front.metrics.recent_ttft_ms[name])
        return {**percentiles(recent), "of": len(recent)} if recent else None
