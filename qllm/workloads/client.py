"""A client that sends a workload to OpenAI-compatible servers: open loop, streamed, fixed lengths.

The client sends each request at its due time, even if many requests are open. A client that waits
would hide the queue. Latencies count from the due time, so they include delays of the client
(`late_ms` of the report). A turn of a session is due after the answer that the turn follows.
"""

import asyncio
import json
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qllm.errors import ConfigError, pip_install
from qllm.types import Priority
from qllm.workloads.measure import Served
from qllm.workloads.sessions import Conversations
from qllm.workloads.spec import Arrival

if TYPE_CHECKING:
    import aiohttp

LEAST_RETRY_S = 0.1
TIERS = {Priority.LS: "priority", Priority.BE: "flex"}
"""`service_tier` of the classes."""
BY = ("priority", "service_tier", "none")
FIXED: Mapping[str, Callable[[int], Any]] = {
    "ignore_eos": lambda max_tokens: True,
    "min_tokens": lambda max_tokens: max_tokens,
}
"""Fields that prevent an early end of an answer, with their values as functions of `max_tokens`."""


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
    """A server, and the format of requests to this server."""

    url: str
    """Base URL without `/v1`."""
    model: str
    bodies: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Fields that replace or add fields in the requests of a class. None removes a field."""
    fixed: tuple[str, ...] = ("ignore_eos",)
    """Names of `FIXED` fields that make this server produce all `max_tokens`."""
    text_of: Callable[[Sequence[int]], str] | None = None
    """Function from token ids to a text prompt; None sends token ids."""
    api_key: str | None = None
    force_close: bool = False
    """True for a new connection per request, for servers that close idle connections."""

    def __post_init__(self) -> None:
        if unknown := set(self.fixed) - set(FIXED):
            raise ConfigError(f"fixed lengths by {sorted(unknown)}; known: {', '.join(FIXED)}")

    def body(self, arrival: Arrival, with_ids: bool = False) -> dict[str, Any]:
        """Return the JSON of one request: greedy, streamed, exactly `max_tokens` output tokens.

        Args:
            arrival: The request.
            with_ids: True to ask for the ids of the answer, because a later prompt contains the
                answer.
        """
        ids = list(arrival.token_ids)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids if self.text_of is None else self.text_of(ids),
            "max_tokens": arrival.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if with_ids else {}),
            **{name: FIXED[name](arrival.max_tokens) for name in self.fixed},
            **self.bodies.get(arrival.priority, {}),
        }
        return {key: value for key, value in body.items() if value is not None}


def send_http(
    server: Server, arrivals: Sequence[Arrival], seconds: float, *, until_answered: bool = False
) -> list[Served]:
    """Send every arrival at its time. Close unanswered requests at the end.

    Args:
        server: Server to send to.
        arrivals: Arrivals in order of time. A request that follows another comes after it.
        seconds: Length of the run.
        until_answered: True to end as soon as all is answered, turns of sessions included.

    Raises:
        ConfigError: aiohttp is not installed, or nothing answers at the address.
    """

    def send(session: "aiohttp.ClientSession") -> Awaitable[list[Served]]:
        return _send_all(session, server, arrivals, seconds, until_answered)

    return _run(server, send)


def saturate_http(
    server: Server, arrivals: Iterable[Arrival], concurrency: int, seconds: float
) -> list[Served]:
    """Keep a constant number of requests open. Due times are ignored.

    When a request ends, the next one is sent. This measures the most that a server can do. Measure
    latencies under load with `send_http`, because here a slow server receives fewer requests.

    Args:
        server: Server to send to.
        arrivals: Arrivals, enough for the run. Latencies count from the time of sending.
        concurrency: Number of open requests.
        seconds: Length of the run. Unanswered requests are closed at the end.

    Raises:
        ConfigError: aiohttp is not installed, or nothing answers at the address.
    """
    return _run(server, lambda session: _saturate(session, server, arrivals, concurrency, seconds))


def talk_http(
    server: Server,
    arrivals: Sequence[Arrival],
    seconds: float,
    *,
    batch: Iterable[Arrival] = (),
    depth: int = 0,
) -> list[Served]:
    """Send arrivals, and keep requests of a batch open meanwhile.

    Return all results with token ids.

    The run ends as soon as all arrivals are answered, turns of sessions included. A request that
    gets a 503 with Retry-After is sent again after that time, like requests of agents' clients.

    Args:
        server: Server to send to. It must support `return_token_ids`.
        arrivals: Arrivals in order of time. A request that follows another comes after it.
        seconds: Most seconds of the run. Then unanswered requests are closed.
        batch: Requests, enough for the run. Latencies count from the time of sending.
        depth: Number of open requests of the batch.

    Raises:
        ConfigError: aiohttp is not installed, or nothing answers at the address.
    """
    return _run(server, lambda session: _talk_all(session, server, arrivals, seconds, batch, depth))


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
    session: "aiohttp.ClientSession",
    server: Server,
    arrivals: Sequence[Arrival],
    seconds: float,
    until_answered: bool = False,
) -> list[Served]:
    client = _Client(session, server, arrivals)
    await client.send_first(seconds)
    if until_answered:
        await client.wait(seconds)
    else:
        await asyncio.sleep(max(0.0, seconds - client.now_s))
    await client.close()
    return client.served


async def _saturate(
    session: "aiohttp.ClientSession",
    server: Server,
    arrivals: Iterable[Arrival],
    concurrency: int,
    seconds: float,
) -> list[Served]:
    client, left = _Client(session, server), iter(arrivals)
    tasks = [asyncio.create_task(client.flood(left)) for _ in range(concurrency)]
    await asyncio.wait(tasks, timeout=seconds)
    await client.close(*tasks)
    return client.served


async def _talk_all(
    session: "aiohttp.ClientSession",
    server: Server,
    arrivals: Sequence[Arrival],
    seconds: float,
    batch: Iterable[Arrival],
    depth: int,
) -> list[Served]:
    client, left = _Client(session, server, arrivals, is_agent=True), iter(batch)
    floods = [asyncio.create_task(client.flood(left)) for _ in range(depth)]
    await client.send_first(seconds)
    await client.wait(seconds)
    await client.close(*floods)
    return client.served


class _Client:
    """The requests of one run, and the answers.

    Args:
        session: Session with the server.
        server: Server to send to.
        arrivals: Requests that may follow each other.
        is_agent: True to ask for the ids of every answer, and to retry a 503 with Retry-After.
    """

    def __init__(
        self,
        session: "aiohttp.ClientSession",
        server: Server,
        arrivals: Iterable[Arrival] = (),
        is_agent: bool = False,
    ) -> None:
        self._session, self._server, self._is_agent = session, server, is_agent
        self._talks = Conversations(arrivals)
        self._tasks: list[asyncio.Task[None]] = []
        self._start = time.monotonic()
        self.served: list[Served] = []

    @property
    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    async def send_first(self, seconds: float) -> None:
        """Start each request that follows no other at its time, until the run is over."""
        for arrival in self._talks.first:
            await asyncio.sleep(max(0.0, arrival.at_s - self.now_s))
            self._begin(arrival)
            if self.now_s >= seconds:
                return

    async def wait(self, seconds: float) -> None:
        """Wait until all requests are answered, following turns included, or the run is over."""
        while (left := [t for t in self._tasks if not t.done()]) and self.now_s < seconds:
            await asyncio.wait(left, timeout=seconds - self.now_s)

    async def flood(self, arrivals: Iterator[Arrival]) -> None:
        """Send requests one after the other, until the server refuses one."""
        for arrival in arrivals:
            served = await self._send(replace(arrival, at_s=self.now_s))
            if served.error is not None:
                return

    async def close(self, *more: "asyncio.Task[None]") -> None:
        """Cancel the given tasks, and all unanswered requests."""
        tasks = (*self._tasks, *more)
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):  # the client's own error; a cancellation is none
                raise found

    def _begin(self, arrival: Arrival) -> None:
        self._tasks.append(asyncio.create_task(self._talk(arrival)))

    async def _talk(self, arrival: Arrival) -> None:
        """Send a request when it is due. After the answer, start the requests that follow."""
        await asyncio.sleep(max(0.0, arrival.at_s - self.now_s))
        served = await self._send(arrival)
        if served.done:
            for after in self._talks.ended(arrival, served.token_ids, self.now_s):
                self._begin(after)

    async def _send(self, arrival: Arrival) -> Served:
        """Send one request, and return the tokens and errors."""
        import aiohttp

        served = Served(spec=arrival.spec, sent_s=self.now_s)
        self.served.append(served)
        with_ids = self._is_agent or self._talks.extends(arrival.name)
        try:
            while (wait_s := await self._ask(self._server.body(arrival, with_ids), served)) > 0:
                await asyncio.sleep(wait_s)
        except (aiohttp.ClientError, ValueError) as error:
            served.error = f"{type(error).__name__}: {error}"
            return served
        if served.error is None:
            served.error = _missing(served, arrival.max_tokens, with_ids)
            served.done = served.error is None
        return served

    async def _ask(self, body: dict[str, Any], served: Served) -> float:
        """Send a body and read the answer.

        Return the seconds after which to send the body again.
        """
        url = f"{self._server.url.rstrip('/')}/v1/completions"
        async with self._session.post(url, json=body) as answer:
            if answer.status == 503 and self._is_agent and "Retry-After" in answer.headers:
                return max(LEAST_RETRY_S, float(answer.headers["Retry-After"]))
            if answer.status != 200:
                served.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return 0.0
            async for event in _events(answer.content):
                _take(event, served, self.now_s)
        return 0.0


def _missing(served: Served, max_tokens: int, with_ids: bool) -> str | None:
    """Return the reason why an answer is incomplete; None for a whole answer."""
    if served.num_output_tokens < max_tokens:
        return f"{served.num_output_tokens} of {max_tokens} tokens came"
    if with_ids and len(served.token_ids) != served.num_output_tokens:
        return (
            f"{len(served.token_ids)} ids of {served.num_output_tokens} tokens came: the next "
            "prompt of a session needs all of them (return_token_ids)"
        )
    return None


async def _events(stream: "aiohttp.StreamReader") -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event when it arrives."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.strip().startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _take(event: dict[str, Any], served: Served, at_s: float) -> None:
    """Record one event of a stream. A token may have no text. The last event has only a reason."""
    if event.get("error"):
        served.error = str(event["error"])[:300]
    usage = event.get("usage")
    if usage and usage.get("completion_tokens") is not None:
        served.num_tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        served.num_cached = int(details.get("cached_tokens") or 0)
    for choice in event.get("choices") or ():
        served.token_ids += choice.get("token_ids") or ()
        if choice.get("text") or choice.get("finish_reason") is None:
            served.token_s.append(at_s)
