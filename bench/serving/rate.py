"""Short requests per second of the server, and the CPU time of one request.

Each tree (folders of this project, this one by default) serves `tiny`. Clients on kept-alive
connections ask for 1 token; the trees take turns with a fixed number of requests. CPU time per
request is that of the front end's process and of the engine's; on a busy machine only CPU time and
ratios count. The last line of stdout is one JSON document.

    python -m bench.serving.rate [--trees OTHER .] [--connections 64] [--requests 2000] [--turns 5]
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.common import ROOT, Line, machine, print_result, result_file, with_lines
from bench.serving.qllm_serve import Serve, serving

BODY = {"prompt": "Hello, world", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
WARM_UP = 300


class Cost(NamedTuple):
    """One turn of one tree."""

    requests_per_s: float
    front_end_us: float
    """CPU time per request, in us."""
    engine_us: float


def request(host: str) -> bytes:
    """Return a request as openai-python's client sends it, except for the values of its headers."""
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: gzip, deflate\r\n"
        "Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 2.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Async: false\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(url: str, left: list[int]) -> None:
    """Send requests on one connection until none is left, without a parser, which would cost more.

    Raises:
        RuntimeError: An answer is not 200.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    sent = request(where.netloc)
    while left[0] > 0:
        left[0] -= 1
        writer.write(sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(size)
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"an answer is {head!r} {body[-300:]!r}")
    writer.close()


async def turn(server: Serve, connections: int, requests: int) -> Cost:
    """Send a number of requests."""
    before, start, left = server.cpu_s(), time.perf_counter(), [requests]
    await asyncio.gather(*(ask(server.url, left) for _ in range(connections)))
    took, after = time.perf_counter() - start, server.cpu_s()
    used = {name: 1e6 * (after[name] - before[name]) / requests for name in after}
    return Cost(requests / took, used["front_end"], used["engine"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all turns of all trees."""
    costs: dict[str, list[Cost]] = {str(tree): [] for tree in args.trees}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(args.model, *args.options, tree=Path(name)))
            for name in costs
        }
        for server in servers.values():
            asyncio.run(turn(server, args.connections, WARM_UP))
        for _ in range(args.turns):
            for name, server in servers.items():
                costs[name].append(asyncio.run(turn(server, args.connections, args.requests)))
                print(name, *(round(x) for x in costs[name][-1]), file=sys.stderr)
    found = {name: _medians(of) for name, of in costs.items()}
    first = next(iter(costs))
    return {
        "connections": args.connections,
        "trees": found,
        "over_first": {name: _over(of, costs[first]) for name, of in costs.items()},
    }


def _medians(costs: list[Cost]) -> dict[str, float]:
    found = {field: statistics.median(getattr(c, field) for c in costs) for field in Cost._fields}
    return {field: round(value, 1) for field, value in found.items()}


def _over(costs: list[Cost], first: list[Cost]) -> dict[str, float]:
    """Return the medians of the ratios of neighbouring turns."""
    return {
        field: round(
            statistics.median(
                getattr(a, field) / (getattr(b, field) or 1e-9)
                for a, b in zip(costs, first, strict=True)
            ),
            3,
        )
        for field in Cost._fields
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of the results page: the last tree over the first."""
    first, *_, last = document["trees"]
    over, cost = document["over_first"][last], document["trees"]
    name, target = document.get("first", first), 2.0
    what = f"requests/s of 1 token on {document['connections']} connections, over {name}"
    ratio = over["requests_per_s"]
    lines: list[Line] = [Line(what, f"{ratio:.2f}", f">= {target:g}", ratio >= target)]
    for key, of in (("front_end_us", "front end"), ("engine_us", "engine")):
        found = f"{cost[last][key]:.0f} instead of {cost[first][key]:.0f}"
        lines.append(Line(f"  CPU time per request, {of}: us", found))
    return lines


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--options", nargs="*", default=[], help="further ones of `qllm serve`")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=result_file)
    return parser.parse_args()


def main() -> int:
    """Run the bench."""
    args = parse_args()
    document = {"bench": "rate", "machine": machine(), **run(args)}
    print_result(with_lines(document, lines_of(document)), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
