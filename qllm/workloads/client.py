"""A client of OpenAI-compatible servers that sends a workload: open loop, streamed, fixed lengths.

The client sends a request at its time, however many are open: a client that waits hides the queue
that it makes. Latencies count from the time at which a request was due, so a slow client shows
(`late_ms` of the report).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qllm.errors import ConfigError, pip_install
from qllm.types import Priority
from qllm.workloads.measure import Served
from qllm.workloads.mix import Arrival
from qllm.workloads.spec import RequestSpec

if TYPE_CHECKING:
    import aiohttp

TIERS = {Priority.LS: "priority", Priority.BE: "flex"}
"""`service_tier` of the classes."""
BY = ("priority", "service_tier", "none")
FIXED: Mapping[str, Callable[[int], Any]] = {
    "ignore_eos": lambda max_tokens: True,
    "min_tokens": lambda max_tokens: max_tokens,
}
"""Fields, by `max_tokens`, that prevent an early end of an answer."""


def class_bodies(by: str) -> dict[int, dict[str, Any]]:
    """Return the fields per class: vLLM's integer `priority`, or OpenAI's `service_tier`.

    Raises:
        ConfigError: `by` is unknown.
    """
    if by not in BY:
        raise ConfigError(f"classes by {by!r} are unknown; use one of {', '.join(BY)}")
    if by == "none":
        return {}
    return {
        int(p): {"priority": int(p)} if by == "priority" else {"service_tier": TIERS[p]}
        for p in Priority
    }


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and the way in which requests to it are written."""

    url: str
    """Base URL without `/v1`."""
    model: str
    bodies: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Fields added to the requests of a class, over all other fields; None removes one."""
    fixed: tuple[str, ...] = ("ignore_eos",)
    """Names of `FIXED` that make this server produce all `max_tokens`."""
    text_of: Callable[[Sequence[int]], str] | None = None
    """Function from token ids to a text prompt; None sends token ids."""
    api_key: str | None = None
    force_close: bool = False
    """True for a new connection per request, for servers that close idle connections."""

    def __post_init__(self) -> None:
        if unknown := set(self.fixed) - set(FIXED):
            raise ConfigError(f"fixed lengths by {sorted(unknown)}; known: {', '.join(FIXED)}")

    def body(self, arrival: Arrival) -> dict[str, Any]:
        """Return the JSON of one request: greedy, streamed, exactly `max_tokens` out."""
        ids = list(arrival.token_ids)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids if self.text_of is None else self.text_of(ids),
            "max_tokens": arrival.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: FIXED[name](arrival.max_tokens) for name in self.fixed},
            **self.bodies.get(arrival.priority, {}),
        }
        return {key: value for key, value in body.items() if value is not None}


def spec_of(arrival: Arrival) -> RequestSpec:
    """Return the lengths of an arrival."""
    return RequestSpec(
        at_s=arrival.at_s,
        priority=arrival.priority,
        num_prompt_tokens=len(arrival.token_ids),
        max_tokens=arrival.max_tokens,
        name=arrival.name,
        slo=arrival.slo,
    )


def send_http(server: Server, arrivals: Sequence[Arrival], seconds: float) -> list[Served]:
    """Send every arrival at its time; close unanswered requests at the end.

    Args:
        server: Server to send to.
        arrivals: Arrivals in order of time.
        seconds: Length of the run.

    Raises:
        ConfigError: aiohttp is not installed, or nothing answers at the address.
    """
    return _run(server, lambda session: _send_all(session, server, arrivals, seconds))


def saturate_http(
    server: Server, arrivals: Iterable[Arrival], concurrency: int, seconds: float
) -> list[Served]:
    """Keep a constant number of requests open: as one ends, the next is sent, before it is due too.

    It measures the most that a server can do. Measure latencies under load with `send_http`: here a
    slow server receives fewer requests.

    Args:
        server: Server to send to.
        arrivals: Enough arrivals; each counts from the time at which it was sent.
        concurrency: Number of open requests.
        seconds: Length of the run; unanswered requests are closed at its end.

    Raises:
        ConfigError: aiohttp is not installed, or nothing answers at the address.
    """
    return _run(server, lambda session: _saturate(session, server, arrivals, concurrency, seconds))


def _run(
    server: Server, send: Callable[["aiohttp.ClientSession"], Awaitable[list[Served]]]
) -> list[Served]:
    """Call `send` with a session to a server that answers."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(
            f"sending a workload to a server needs aiohttp: {pip_install('bench')}"
        ) from None

    async def run() -> list[Served]:
        headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
        connector = aiohttp.TCPConnector(limit=0, force_close=server.force_close)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=headers
        ) as session:
            async with session.get(f"{server.url.rstrip('/')}/v1/models") as answer:
                await answer.read()
            return await send(session)

    try:
        return asyncio.run(run())
    except aiohttp.ClientConnectionError as error:
        raise ConfigError(f"no server answers at {server.url}: {error}") from None


async def _send_all(
    session: "aiohttp.ClientSession", server: Server, arrivals: Sequence[Arrival], seconds: float
) -> list[Served]:
    start = time.monotonic()
    tasks, out = [], []
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
        served = Served(spec=spec_of(arrival))
        out.append(served)
        tasks.append(asyncio.create_task(_send(session, server, arrival, served, start)))
        if time.monotonic() - start >= seconds:
            break
    await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
    await _close(tasks)
    return out


async def _saturate(
    session: "aiohttp.ClientSession",
    server: Server,
    arrivals: Iterable[Arrival],
    concurrency: int,
    seconds: float,
) -> list[Served]:
    start, out, left = time.monotonic(), [], iter(arrivals)

    async def one_by_one() -> None:
        for arrival in left:
            now = replace(arrival, at_s=time.monotonic() - start)
            served = Served(spec=spec_of(now))
            out.append(served)
            await _send(session, server, now, served, start)
            if served.error is not None:
                return  # do not ask a server again that refuses

    tasks = [asyncio.create_task(one_by_one()) for _ in range(concurrency)]
    await asyncio.wait(tasks, timeout=seconds)
    await _close(tasks)
    return out


async def _close(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _send(
    session: "aiohttp.ClientSession", server: Server, arrival: Arrival, served: Served, start: float
) -> None:
    """Send one request; put the server's tokens and errors into `served`."""
    import aiohttp

    served.sent_s = time.monotonic() - start
    url = f"{server.url.rstrip('/')}/v1/completions"
    try:
        async with session.post(url, json=server.body(arrival)) as answer:
            if answer.status != 200:
                served.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            async for event in _events(answer.content):
                _take(event, served, time.monotonic() - start)
    except (aiohttp.ClientError, ValueError) as error:
        served.error = f"{type(error).__name__}: {error}"
        return
    if served.error is None:
        served.done = served.num_output_tokens >= arrival.max_tokens
        if not served.done:
            served.error = f"{served.num_output_tokens} of {arrival.max_tokens} tokens came"


async def _events(stream: "aiohttp.StreamReader") -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of server-sent events, as they arrive."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.strip().startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _take(event: dict[str, Any], served: Served, at_s: float) -> None:
    """Record one event of a stream. A token may have no text; the last event has only a reason."""
    if event.get("error"):
        served.error = str(event["error"])[:300]
    usage = event.get("usage")
    if usage and usage.get("completion_tokens") is not None:
        served.num_tokens = int(usage["completion_tokens"])
    for choice in event.get("choices") or ():
        if choice.get("text") or choice.get("finish_reason") is None:
            served.token_s.append(at_s)
