"""The live page `/ui`, with its files and its stream of messages."""

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Query, Response

from qllm.server.api.answers import EventStream
from qllm.server.http.errors import ApiError
from qllm.server.page.feed import Feed
from qllm.server.requests.front import Front

MAX_READERS = 16
"""Most pages open at once."""
TYPES = {
    "icon.svg": "image/svg+xml",
    "ui.css": "text/css",
    "ui.js": "text/javascript",
    "timeline.js": "text/javascript",
    "charts.js": "text/javascript",
    "page.js": "text/javascript",
    "talk.js": "text/javascript",
    "first.js": "text/javascript",
    "markdown.js": "text/javascript",
    "marked.esm.js": "text/javascript",
    "uPlot.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def routes(front: Front) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(tags=["ui"])
    static = files("qllm.server.page") / "static"
    pages = {name: (static / name).read_bytes() for name in ("ui.html", *TYPES)}
    feeds = {one: Feed(one) for one in front.all}

    @router.get("/ui", include_in_schema=False)
    async def page() -> Response:
        """Serve the page. It shows no data until the user enters an API key."""
        return Response(pages["ui.html"], media_type="text/html", headers=HEADERS)

    @router.get("/ui/static/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        """Serve a script or style of the page."""
        if name not in TYPES:
            raise ApiError(404, f"there is no {name!r:.80}")
        return Response(pages[name], media_type=TYPES[name], headers=HEADERS)

    readers: set[object] = set()

    @router.get("/ui/events", include_in_schema=False)
    async def live(since: Annotated[int, Query(ge=0)] = 0, model: str | None = None) -> Response:
        """Stream news four times a second as server-sent events (`qllm.server.page.feed`).

        The news is of the engine of one model, by default the first.
        """
        feed = feeds[front.of(model)]
        if len(readers) >= MAX_READERS:
            raise ApiError(429, f"{MAX_READERS} pages are open already", retry_after_s=5)
        reader = object()
        readers.add(reader)
        return EventStream(
            feed.messages(since), lambda: readers.discard(reader), {}, front.config.stalled_client_s
        )

    return router
