"""The live page `/ui` and the stream of events that feeds it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from qllm.errors import EngineClosedError
from qllm.record.summary import percentile
from qllm.types import Priority

from .answers import EventStream, event
from .errors import ApiError
from .front import Front
from .metrics import STATES, new_since
from .probes import OpenRequest, counts, open_requests

PERIOD_S = 0.25
MAX_SHOWN = 200
"""Requests that one event lists."""
MAX_PREEMPTIONS = 50
"""Preemptions that one event lists."""
MAX_READERS = 16
"""Open pages; each looks at the engine four times a second."""
TYPES = {"icon.svg": "image/svg+xml", "ui.css": "text/css", "ui.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class View:
    """What one reader of the page sees: the state now, and what is new since last time."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._num_preemptions: int | None = None

    async def look(self) -> dict[str, Any]:
        """The state now."""
        front = self._front
        stats = await asyncio.to_thread(front.engine.stats)
        requests = await asyncio.to_thread(open_requests, front)
        total = stats["num_preemptions"]
        new = 0 if self._num_preemptions is None else new_since(self._num_preemptions, total)
        self._num_preemptions = total
        latest = stats["preempt_latencies_ms"][-min(new, MAX_PREEMPTIONS) :] if new else []
        return {
            "time_s": time.time(),
            "model": front.model_name,
            "policy": front.config.policy,
            "classes": self._classes(requests),
            "requests": _rows(requests),
            "preemptions": {"total": total, "new_ms": latest},
            "kv_frac": stats["kv_blocks_used"] / stats["kv_blocks"],
            "longest_segment_ms": stats["longest_segment_ms"],
            "frames": stats["frames"][:MAX_SHOWN],
            "ring_use": stats.get("ring_use", {}),
            "expert_bytes": stats["expert_bytes"],
        }

    def _classes(self, requests: list[OpenRequest]) -> dict[str, Any]:
        now = counts(requests)
        found: dict[str, Any] = {}
        for name in Priority.__members__:
            recent = list(self._front.metrics.recent_ttft_ms[name])
            ttft = {f"p{p}": percentile(recent, p) for p in (50, 90, 99)} if recent else None
            states = {state: now.get((name, state), 0) for state in STATES}
            found[name] = {**states, "ttft_ms": ttft, "num_recent": len(recent)}
        return found


def _rows(requests: list[OpenRequest]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "id": request.handle.request_id,
            "class": request.class_name,
            "status": request.status,
            "prompt_tokens": len(request.handle.prompt_token_ids),
            "output_tokens": request.num_tokens,
        }
        for request in requests
    ]
    rows.sort(key=lambda row: (row["class"] != "LS", STATES.index(row["status"]), row["id"]))
    return rows[:MAX_SHOWN]


async def events(front: Front) -> AsyncIterator[str]:
    """The state, again and again, until the server drains or the engine has ended."""
    view = View(front)
    with suppress(EngineClosedError):
        while not front.draining.is_set():
            yield event(await view.look())
            await asyncio.sleep(PERIOD_S)


def routes(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["ui"])
    static = files("qllm.server") / "static"
    pages = {name: (static / name).read_bytes() for name in ("ui.html", *TYPES)}

    @router.get("/ui", include_in_schema=False)
    async def page() -> Response:
        """The page; it shows nothing of anybody before it has a key."""
        return Response(pages["ui.html"], media_type="text/html", headers=HEADERS)

    @router.get("/ui/static/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        """The page's script and style."""
        if name not in TYPES:
            raise ApiError(404, f"there is no {name!r:.80}")
        return Response(pages[name], media_type=TYPES[name], headers=HEADERS)

    readers: set[object] = set()

    @router.get("/ui/events", include_in_schema=False)
    async def live() -> Response:
        """Server-sent events: the state four times a second."""
        if len(readers) >= MAX_READERS:
            raise ApiError(429, f"{MAX_READERS} pages are open already", retry_after_s=5)
        reader = object()
        readers.add(reader)
        return EventStream(
            events(front), lambda: readers.discard(reader), {}, front.config.stalled_client_s
        )

    return router
