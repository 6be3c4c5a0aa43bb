"""Time that HTTP adds to the first token of a model whose steps take 10 ms.

The engine of `qllm serve tiny` burns CPU until each pass has taken `--step-ms`. It serves 1 and 8
clients, which ask for 1 token and wait for their answer: through the Python API (this process is a
second front end of the same engine), over HTTP with a stream (its first event) and without one (the
whole answer). The ways take turns in each round. The time that HTTP adds is the median over rounds
of the difference of percentiles. The last line of stdout is one JSON document.

    python -m bench.serving.ttft [--rounds 5] [--requests 200]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.common import (
    ROOT,
    Line,
    at_most,
    machine,
    percentiles,
    print_result,
    result_file,
    with_lines,
)
from bench.serving.qllm_serve import serving
from qllm import QLLMEngine, SamplingParams

REACH_MS = {"p50": 1.0, "p99": 3.0}
PROMPT = "Hello, world"
CLIENTS = (1, 8)


def slow_down(step_ms: float) -> None:
    """Let every pass of this process's engine take so long. Call it in the engine's process."""
    from qllm.runner.runner import TorchRunner

    run = TorchRunner.run

    def slow(self: Any, *args: Any) -> Any:
        end_ns = time.perf_counter_ns() + int(1e6 * step_ms)
        result = run(self, *args)
        while time.perf_counter_ns() < end_ns:
            pass
        return result

    TorchRunner.run = slow  # type: ignore[method-assign]


def ask_python(engine: QLLMEngine, requests: int) -> list[float]:
    """Return the TTFTs in ms of requests, one after the other."""
    found = []
    for _ in range(requests):
        start = time.perf_counter()
        handle = engine.submit(
            PROMPT, "LS", 1, sampling=SamplingParams(temperature=0, ignore_eos=True)
        )
        next(iter(handle))
        found.append(1e3 * (time.perf_counter() - start))
        handle.result(60)
    return found


def by_python(engine: QLLMEngine, clients: int, requests: int) -> list[float]:
    """Return the same for several clients, on a thread each."""
    with ThreadPoolExecutor(clients) as pool:
        jobs = [pool.submit(ask_python, engine, requests // clients) for _ in range(clients)]
        return [ms for job in jobs for ms in job.result()]


async def ask_http(url: str, stream: bool, requests: int) -> list[float]:
    """Return the TTFTs in ms of requests on one connection."""
    where, found = urlsplit(url), []
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    fields = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": stream}
    body = json.dumps({"prompt": PROMPT, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(requests):
        start = time.perf_counter()
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"an answer is {answer!r}")
        if stream:
            await reader.readuntil(b"\n\n")
            found.append(1e3 * (time.perf_counter() - start))
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            size = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            found.append(1e3 * (time.perf_counter() - start))
    writer.close()
    return found


def by_http(url: str, stream: bool, clients: int, requests: int) -> list[float]:
    """Return the same for several clients, on a connection each."""

    async def all_of_them() -> list[list[float]]:
        asks = (ask_http(url, stream, requests // clients) for _ in range(clients))
        return await asyncio.gather(*asks)

    return [ms for part in asyncio.run(all_of_them()) for ms in part]


def minus(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    """Return the differences by percentile."""
    return {p: left[p] - right[p] for p in left}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return medians over rounds, by percentile: a disturbed round does not count."""
    return {p: round(float(np.median([one[p] for one in rounds])), 3) for p in rounds[0]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure 1 client and 8 clients."""
    with tempfile.TemporaryDirectory(prefix="qllm-ttft-") as folder:
        listen = f"--set=listen={folder}/engine"
        with (
            serving("tiny", "--threads=1", listen, tree=ROOT) as server,
            QLLMEngine.attach(f"{folder}/engine") as engine,
        ):
            slow = import_module("bench.serving.ttft").slow_down  # pickled by this name
            engine.call(partial(slow, args.step_ms))
            ways: dict[str, Callable[[int, int], list[float]]] = {
                "python": partial(by_python, engine),
                "http_streamed": partial(by_http, server.url, True),
                "http_whole": partial(by_http, server.url, False),
            }
            found: dict[str, Any] = {}
            for clients in CLIENTS:
                for way in ways.values():
                    way(clients, 4 * clients)
                rounds = [
                    {name: percentiles(way(clients, args.requests)) for name, way in ways.items()}
                    for _ in range(args.rounds)
                ]
                ttft = {name: medians([one[name] for one in rounds]) for name in ways}
                adds = {
                    name: medians([minus(one[name], one["python"]) for one in rounds])
                    for name in ("http_streamed", "http_whole")
                }
                holds = all(ms[p] <= REACH_MS[p] for ms in adds.values() for p in REACH_MS)
                row = {
                    "requests": args.rounds * args.requests,
                    "ttft_ms": ttft,
                    "http_adds_ms": adds,
                }
                found[f"{clients} client{'s' * (clients > 1)}"] = {**row, "holds": holds}
                print(clients, json.dumps(row), file=sys.stderr)
    return found


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    lines: list[Line] = []
    for clients, row in document["found"].items():
        for name, ms in row["http_adds_ms"].items():
            for p, most in document["reach_ms"].items():
                how = name.removeprefix("http_")
                what = f"TTFT over HTTP minus Python, {how}, {clients}, {p}: ms"
                lines.append(at_most(what, ms[p], most, 2))
    return lines


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per round and way")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    settings = {"step_ms": args.step_ms, "rounds": args.rounds, "reach_ms": REACH_MS}
    found = measure(args)
    document = {"bench": "ttft", "machine": machine(), **settings, "found": found}
    print_result(with_lines(document, lines_of(document)), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
