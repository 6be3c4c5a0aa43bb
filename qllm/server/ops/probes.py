"""The routes for monitoring: health, readiness, metrics, version."""

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
    """A snapshot of a request that a client waits for."""

    handle: Handle
    class_name: str
    status: str
    num_tokens: int
    """Tokens produced so far."""


def open_requests(front: Front, but: Set[int] = frozenset()) -> list[OpenRequest]:
    """Return all open requests except the numbers in `but`. Blocks until the engine answers."""
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
    """Return the number of requests per (class, state)."""
    return dict(Counter((request.class_name, request.status) for request in requests))


def _engines(front: Front) -> dict[str, Any]:
    """Return the part of /health about the engines of a fleet."""
    fleet = front.engine.fleet
    return {} if fleet is None else {"engines": fleet.engines()}


def _health(front: Front) -> dict[str, Any]:
    """Return what /health says about one model.

    Raises:
        ApiError: 503, the model's engine ended, and there will be no other one.
    """
    error = front.unavailable()
    if error is None:
        return {"status": "ok", **_engines(front)}
    if front.back_in_s is None or front.gave_up is not None:
        raise error
    return {"status": "restarting", "why": error.message, **_engines(front)}


def _health_of_all(front: Front) -> dict[str, Any]:
    """Return what /health says: of one model, or of each model and the first that restarts."""
    said = {one.model_name: _health(one) for one in front.all}
    if len(said) == 1:
        return said[front.model_name]
    bad = next((one for one in said.values() if one["status"] != "ok"), None)
    whole = {"status": "ok"} if bad is None else {name: bad[name] for name in ("status", "why")}
    return {**whole, "models": said}


def _fleet_observer(front: Front) -> Callable[[], None]:
    """Return the function that updates a fleet's metrics at each scrape."""
    fleet = front.engine.fleet
    if fleet is None:
        return lambda: None
    return FleetMetrics(front.metrics, front.model_name, fleet).observe


async def _unready(front: Front) -> ApiError | None:
    """Return why a model does not serve now: no engine, or experts that cannot be read."""
    if (error := front.unavailable()) is not None:
        return error
    if front.engine.fleet is not None or front.engine.config.max_expert_bytes is None:
        return None
    stats = await asyncio.to_thread(front.engine.stats)
    if failure := stats["experts"].get("failure"):
        return ApiError(503, f"experts cannot be read: {failure}", code="experts_unreadable")
    return None


async def _refuse_unready(front: Front) -> None:
    """Raise if no model of the server serves now.

    Raises:
        ApiError: 503, with the reason of the first model.
    """
    reasons = [await _unready(one) for one in front.all]
    if reasons[0] is not None and None not in reasons:
        raise reasons[0]


async def _observe(front: Front) -> None:
    """Update the metrics of one model with its engine's numbers."""
    front.metrics.up.set(front.unavailable() is None)
    with suppress(EngineClosedError):
        stats = await asyncio.to_thread(front.engine.stats)
        requests = await asyncio.to_thread(open_requests, front)
        front.metrics.observe(stats, counts(requests))


def routes(front: Front) -> APIRouter:
    """Return the routes for monitoring."""
    router = APIRouter(tags=["probes"])
    fleets = [_fleet_observer(one) for one in front.all]

    @router.get("/health", responses={503: RESPONSES[503]})
    async def health() -> dict[str, Any]:
        """Return 200 while the engine runs or restarts: then killing the server does not help.

        A server of several models reports each of them.
        """
        return _health_of_all(front)

    @router.get("/ready", responses={503: RESPONSES[503]})
    async def ready() -> dict[str, str]:
        """Return 200 while requests are accepted: an engine runs and the server does not drain."""
        if front.leaving or front.draining.is_set():
            raise ApiError(503, "the server is shutting down", code="draining")
        await _refuse_unready(front)
        return {"status": "ok"}

    for path, probe in (("/health", health), ("/ready", ready)):
        router.head(path, include_in_schema=False)(probe)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of this package."""
        return {"version": qllm.__version__}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus. After an engine's end its last counts stay."""
        for observe in fleets:
            observe()
        for one in front.all:
            await _observe(one)
        return Response(front.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
