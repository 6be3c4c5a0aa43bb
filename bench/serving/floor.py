"""What HTTP adds where nothing is served: the floor under `bench.serving.ttft`.

A process that burns CPU for `--step-ms` stands for the engine. It is asked over a socket by this
process (`direct`), and over HTTP/1.1 by the client of `ttft`, through a server that only hands the
step over: a bare asyncio protocol that parses nothing, and uvicorn with h11 and with httptools and
an app that reads the body as JSON. The ways take turns; what each adds is the median over rounds of
the difference of percentiles to `direct`. `cold` is one `json.dumps` again and again and after a
pause of a step: what code costs that has not run meanwhile, on this machine. The last line of
stdout is one JSON document.

    python -m bench.serving.floor [--rounds 5] [--requests 100]
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import uvicorn

from bench.common import machine
from bench.serving.servers import free_port
from bench.serving.ttft import by_http, medians, minus, percentiles

ANSWER = b"{}"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)


def be_engine(link: socket.socket, step_ms: float) -> None:
    """Burn CPU for every byte that comes, then send it back."""
    while data := link.recv(1):
        end_ns = time.perf_counter_ns() + int(1e6 * step_ms)
        while time.perf_counter_ns() < end_ns:
            pass
        link.send(data)


class Bare(asyncio.Protocol):
    """Answers a request when the engine has; it comes in one piece, and nothing reads it."""

    def __init__(self, link: socket.socket, waiting: "deque[Bare]") -> None:
        self._link, self._waiting = link, waiting

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._waiting.append(self)
        self._link.send(b"x")


async def serve_bare(listener: socket.socket, link: socket.socket) -> None:
    """The least that asyncio can do."""
    loop, waiting = asyncio.get_running_loop(), deque[Bare]()

    def answered() -> None:
        for _ in link.recv(64):
            waiting.popleft().transport.write(HEAD + ANSWER)

    loop.add_reader(link, answered)
    await loop.create_server(lambda: Bare(link, waiting), sock=listener)
    await asyncio.Event().wait()


def be_bare(listener: socket.socket, link: socket.socket) -> None:
    """A bare asyncio protocol."""
    link.setblocking(False)
    asyncio.run(serve_bare(listener, link))


def be_uvicorn(http: Any, listener: socket.socket, link: socket.socket) -> None:
    """Uvicorn with an app that reads the body and hands the step over."""
    link.setblocking(False)
    waiting: deque[asyncio.Future[None]] = deque()

    def answered() -> None:
        for _ in link.recv(64):
            waiting.popleft().set_result(None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(link, answered)
        json.loads((await receive())["body"])
        waiting.append(loop.create_future())
        link.send(b"x")
        await waiting[-1]
        length = [(b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": ANSWER})

    config = uvicorn.Config(
        app, http=http, loop="asyncio", lifespan="off", log_level="error", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A child of this process while the block runs."""
    process = get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def direct(link: socket.socket, requests: int) -> list[float]:
    """How long the engine takes for one byte, in ms."""
    found = []
    for _ in range(requests):
        start = time.perf_counter()
        link.send(b"x")
        link.recv(1)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def cold(step_ms: float) -> dict[str, float]:
    """Median microseconds of one `json.dumps`, at once and after a pause."""

    def once() -> float:
        start = time.perf_counter_ns()
        json.dumps({"a": 1})
        return (time.perf_counter_ns() - start) / 1e3

    again = [once() for _ in range(1000)]
    paused = []
    for _ in range(100):
        time.sleep(step_ms / 1e3)
        paused.append(once())
    found = {"again_us": statistics.median(again), "after_a_step_us": statistics.median(paused)}
    return {name: round(us, 1) for name, us in found.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All ways in turn."""
    servers = {
        "asyncio": be_bare,
        "uvicorn_h11": partial(be_uvicorn, "h11"),
        "uvicorn_httptools": partial(be_uvicorn, "httptools"),
    }
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(running(be_engine, theirs, args.step_ms))
        ways: dict[str, Callable[[int], list[float]]] = {"direct": partial(direct, ours)}
        for name, serve in servers.items():
            near, far = socket.socketpair()
            stack.enter_context(running(be_engine, far, args.step_ms))
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.bind(("127.0.0.1", free_port()))
            listener.listen()
            stack.enter_context(running(serve, listener, near))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            ways[name] = partial(by_http, url, False, 1)
        for way in ways.values():
            way(10)
        rounds = [
            {name: percentiles(way(args.requests)) for name, way in ways.items()}
            for _ in range(args.rounds)
        ]
    adds = {name: medians([minus(one[name], one["direct"]) for one in rounds]) for name in servers}
    return {"http_adds_ms": adds, "cold": cold(args.step_ms)}


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100, help="per round and way")
    args = parser.parse_args()
    settings = {"step_ms": args.step_ms, "rounds": args.rounds, "requests": args.requests}
    print(json.dumps({"bench": "floor", "machine": machine(), **settings, **measure(args)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
