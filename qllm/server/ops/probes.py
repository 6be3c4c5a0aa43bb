"""The routes for machines that watch: health, readiness, metrics, version."""

import asyncio
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, NamedTuple

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import qllm
from qllm.errors import EngineClosedError
from qllm.frontend.handle import Handle
from qllm.server.http.errors import RESPONSES, ApiError
from qllm.server.ops.fleet_metrics import FleetMetrics
from qllm.server.requests.front import Front
from qllm.types import RequestStatus


class OpenRequest(NamedTuple):
    """A request that somebody waits for, as it is now."""

    handle: Handle
    class_name: str
    status: str
    num_tokens: int
    """Produced so far."""


def open_requests(front: Front, but: Set[int] = frozenset()) -> list[OpenRequest]:
    """All whose number is not in `but`. Asks the engine, so call it off the event loop."""
    rows = [
        (handle, answer.served.priority.name, num_tokens)
        for answer in list(front.answers)
        for handle, num_tokens in zip(answer.handles, answer.num_tokens, strict=True)
        if handle.number not in but
    ]
    told = front.engine.statuses([handle for handle, *_ in rows])
    statuses = [
        RequestStatus.WAITING if front.log.holds(handle) else status
        for (handle, *_), status in zip(rows, told, strict=True)
    ]
    return [
        OpenRequest(handle, name, status.value, num_tokens)
        for (handle, name, num_tokens), status in zip(rows, statuses, strict=True)
        if status is not RequestStatus.FINISHED
    ]


def counts(requests: list[OpenRequest]) -> dict[tuple[str, str], int]:
    """Requests per (class, state)."""
    return dict(Counter((request.class_name, request.status) for request in requests))


def _engines(front: Front) -> dict[str, Any]:
    """What /health says of the engines of a fleet."""
    fleet = front.engine.fleet
    return {} if fleet is None else {"engines": fleet.engines()}


def _fleet_observer(front: Front) -> Callable[[], None]:
    """What a scrape of /metrics calls."""
    fleet = front.engine.fleet
    if fleet is None:
        return lambda: None
    return FleetMetrics(front.metrics, front.model_name, fleet).observe


def routes(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["probes"])
    observe_fleet = _fleet_observer(front)

    @router.get("/health", responses={503: RESPONSES[503]})
    async def health() -> dict[str, Any]:
        """200 while the engine lives, or a new one is being made: no reason to kill the server."""
        error = front.unavailable()
        if error is None:
            return {"status": "ok", **_engines(front)}
        if front.back_in_s is None or front.gave_up is not None:
            raise error
        return {"status": "restarting", "why": error.message, **_engines(front)}

    @router.get("/ready", responses={503: RESPONSES[503]})
    async def ready() -> dict[str, str]:
        """200 while requests are taken: the engine lives and the server does not drain."""
        if front.leaving or front.draining.is_set():
            raise ApiError(503, "the server is shutting down", code="draining")
        if (error := front.unavailable()) is not None:
            raise error
        return {"status": "ok"}

    for path, probe in (("/health", health), ("/ready", ready)):
        router.head(path, include_in_schema=False)(probe)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Answer with the version of this package."""
        return {"version": qllm.__version__}

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus; of an engine that has ended, what was counted before."""
        front.metrics.up.set(front.unavailable() is None)
        observe_fleet()
        with suppress(EngineClosedError):
            stats = await asyncio.to_thread(front.engine.stats)
            requests = await asyncio.to_thread(open_requests, front)
            front.metrics.observe(stats, counts(requests))
        return Response(front.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
