"""Costs of HTTP and the rings, and effects of a busy front end's core and many streams on LS.

- overhead: TTFT and whole answers of the same request through the Python API (engine on a thread of
  its own process), through the Python API over the rings (a second front end of the server's
  engine), and over HTTP, streamed (TTFT) and not (whole), on connections that are kept alive; and
  GET /version on a connection that is kept alive and on a fresh one. One at a time, in turn.
- small: the same for a model of a million parameters, whose TTFT is below 10 ms: the prefill of a
  large one would hide the cost of a connection (Nagle's algorithm and a delayed ACK: 40 ms).
- interference: LS TTFT over HTTP at a steady rate, with and without processes that only burn CPU
  on the front end's core, in turns. Engines are pinned to `--engine-core`; all other processes,
  with this client and the hogs, to `--front-core`.
- vllm: the same for vLLM's CPU build with one thread, its engine pinned like ours; installed as
  `bench/serving/peers.py` does. An error becomes the row.
- streams: CPU time of the front end with many streams open while the engine is stopped (SIGSTOP),
  so that no stream has an event; then the engine continues, and each stream must end.

The last line of stdout is one JSON document.

    python -m bench.serving.over_http [--size 300m] [--rounds 200] [--seconds 30] [--streams 1000]
    python -m bench.serving.over_http --quick
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

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
from bench.serving.qllm_serve import Serve, serving
from bench.serving.servers import PEERS, InstallError, Place, free_port, installed
from bench.serving.servers import serving as serving_peer
from qllm import QLLMEngine, SamplingParams
from qllm.measure.random_moe import cache_dir, make_random_moe
from qllm.measure.variants import KV_SIZES

PROMPT_TOKENS, MAX_TOKENS = 64, 4
SMALL_SIZE = "1m"
REACH = {
    "overhead_p50_ms": 3.0, "overhead_p99_ms": 10.0, "kept_alive_p50_ms": 1.0,
    "small_ttft_p50_ms": 10.0, "interference": 1.3, "idle_cores": 0.05,
}  # fmt: skip
"""Largest values that the project allows. `kept_alive`: GET /version on a connection that is kept
alive, minus on a fresh one. `small_ttft`: through the Python API; a slower model would hide the
cost that the row `small` measures."""
SETTINGS = {**KV_SIZES, "conformance": False}
ROWS = ("overhead", "small", "interference", "streams", "vllm")
PYTHONS = ("python", "python_over_rings")
HOG = "while True: pass"
IDLE_S = 10.0


def pin(pid: int, core: int | None) -> None:
    """Keep a process with all its threads on one core; None leaves it free."""
    if core is not None:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), {core})


def prompt(rng: random.Random) -> list[int]:
    """Return random ids that every model here has."""
    return [rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)]


def greedy() -> SamplingParams:
    """Return the sampling of the HTTP requests."""
    return SamplingParams(temperature=0, ignore_eos=True)


class Times(NamedTuple):
    """Times of one request, in milliseconds."""

    ttft: float
    whole: float


def python_times(engine: QLLMEngine, ids: list[int]) -> Times:
    """Measure one request through the Python API; return when it has ended."""
    start = time.perf_counter()
    handle = engine.submit(ids, "LS", MAX_TOKENS, sampling=greedy())
    next(iter(handle))
    ttft = time.perf_counter() - start
    handle.result(60)
    return Times(1e3 * ttft, 1e3 * (time.perf_counter() - start))


def body(ids: list[int], **more: Any) -> dict[str, Any]:
    """Return the JSON of the same request."""
    return {
        "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, **more,
    }  # fmt: skip


async def http_ttft_ms(session: aiohttp.ClientSession, url: str, ids: list[int]) -> float:
    """Measure TTFT of one request over HTTP; return when it has ended."""
    start = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body(ids)) as answer:
        answer.raise_for_status()
        await answer.content.readline()
        ttft = time.perf_counter() - start
        rest = await answer.read()
    if not rest.rstrip().endswith(b"[DONE]"):
        raise RuntimeError(f"a stream ended in {rest[-300:]!r}")
    return 1e3 * ttft


async def http_whole_ms(session: aiohttp.ClientSession, url: str, ids: list[int]) -> float:
    """Measure an answer that is not streamed, from the request to its last byte."""
    start = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body(ids, stream=False)) as answer:
        answer.raise_for_status()
        usage = (await answer.json())["usage"]
    if usage["completion_tokens"] != MAX_TOKENS:
        raise RuntimeError(f"an answer of {usage['completion_tokens']} tokens, not {MAX_TOKENS}")
    return 1e3 * (time.perf_counter() - start)


async def version_ms(session: aiohttp.ClientSession, url: str) -> float:
    """Measure `GET /version`, which computes nothing."""
    start = time.perf_counter()
    async with session.get(f"{url}/version") as answer:
        answer.raise_for_status()
        await answer.read()
    return 1e3 * (time.perf_counter() - start)


# -- the engine of the Python API, in its own process


def be_solo(model: str, threads: int) -> None:
    """Measure one request for every line (ids) of stdin."""
    with QLLMEngine.from_pretrained(model, run_in="thread", threads=threads, **SETTINGS) as engine:
        python_times(engine, [1] * PROMPT_TOKENS)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(python_times(engine, json.loads(line))), flush=True)


@contextmanager
def solo(model: str, threads: int, core: int | None) -> Iterator[Callable[[list[int]], Times]]:
    """Start that process; yield a function that measures a request in it."""
    module = [sys.executable, "-m", "bench.serving.over_http"]
    command = [*module, "--solo", "--model", model, "--threads", str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the engine of the Python API did not come up")
        pin(process.pid, core)

        def times(ids: list[int]) -> Times:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{json.dumps(ids)}\n")
            process.stdin.flush()
            return Times(*json.loads(process.stdout.readline()))

        yield times
        process.stdin.close()


# -- the rows


async def overhead(
    args: argparse.Namespace, model: str, server: Serve, socket: str
) -> dict[str, Any]:
    """Measure row 1, of any model."""
    rng = random.Random(args.seed)
    found: dict[str, dict[str, list[float]]] = {"ttft_ms": {}, "whole_ms": {}, "version_ms": {}}
    async with (
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as fresh,
    ):
        with (
            QLLMEngine.attach(socket) as attached,
            solo(model, args.threads, args.engine_core) as python,
        ):
            for n in range(args.rounds + 3):
                ids = prompt(rng)
                alone, rings = python(ids), python_times(attached, ids)
                one = {
                    "ttft_ms": {
                        "python": alone.ttft,
                        "python_over_rings": rings.ttft,
                        "http": await http_ttft_ms(session, server.url, ids),
                    },
                    "whole_ms": {
                        "python": alone.whole,
                        "python_over_rings": rings.whole,
                        "http": await http_whole_ms(session, server.url, ids),
                    },
                    "version_ms": {
                        "kept_alive": await version_ms(session, server.url),
                        "fresh": await version_ms(fresh, server.url),
                    },
                }
                for what, times in one.items() if n >= 3 else ():
                    for name, ms in times.items():
                        found[what].setdefault(name, []).append(ms)
    seen = {
        what: {name: percentiles(values) for name, values in of.items()}
        for what, of in found.items()
    }
    ttft, whole, version = seen["ttft_ms"], seen["whole_ms"], seen["version_ms"]
    return {
        "model": Path(model).name,
        "rounds": args.rounds,
        **seen,
        "http_ms": {f"over_{name}": _minus(ttft["http"], ttft[name]) for name in PYTHONS},
        "http_whole_ms": {f"over_{name}": _minus(whole["http"], whole[name]) for name in PYTHONS},
        "kept_alive_ms": _minus(version["kept_alive"], version["fresh"]),
    }


def _minus(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {key: round(left[key] - right[key], 3) for key in left}


@contextmanager
def hogs(count: int, core: int | None) -> Iterator[None]:
    """Run processes that burn CPU inside the block.

    Each has a session of its own: the kernel may share cores between sessions first, and a client
    in the same session would then wait for the hogs in place of the server.
    """
    hog = [sys.executable, "-c", HOG]
    processes = [subprocess.Popen(hog, start_new_session=True) for _ in range(count)]
    try:
        for process in processes:
            pin(process.pid, core)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def at_rate(url: str, rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Return each request's TTFT in an open loop, counted from its due time."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(due: float) -> float:
            late_ms = 1e3 * (time.perf_counter() - due)
            return late_ms + await http_ttft_ms(session, url, prompt(rng))

        tasks: list[asyncio.Task[float]] = []
        start = due = time.perf_counter()
        while (due := due + rng.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(due)))
        return list(await asyncio.gather(*tasks))


async def interference(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Measure row 2, of any server."""
    rng = random.Random(args.seed)
    found: dict[str, list[float]] = {"quiet": [], "hogged": []}
    for _ in range(args.turns):
        for name in found:
            with hogs(args.hogs if name == "hogged" else 0, args.front_core):
                found[name] += await at_rate(url, args.rate, args.seconds / args.turns, rng)
    ttft = {name: percentiles(values) for name, values in found.items()}
    return {
        "rate_per_s": args.rate,
        "hogs": args.hogs,
        "count": {name: len(values) for name, values in found.items()},
        "ttft_ms": ttft,
        "p99_ratio": round(ttft["hogged"]["p99"] / ttft["quiet"]["p99"], 3),
    }


def family(pid: int) -> Iterator[int]:
    """Yield the processes that a process started, and their children."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from family(int(child))


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Measure row 4: vLLM's server on the front end's core, its child processes on the engine's."""
    peer = PEERS["vllm"]
    try:
        home = installed(peer, cache_dir() / "peers")
        place = Place(home, Path(args.model), free_port(), args.threads)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the server inherits this
        with (
            tempfile.TemporaryDirectory(prefix="qllm-vllm-") as folder,
            serving_peer(peer, place, Path(folder) / "log") as process,
        ):
            for pid in (os.getpid(), process.pid):
                pin(pid, args.front_core)
            for child in family(process.pid):
                pin(child, args.engine_core)
            return asyncio.run(interference(args, f"http://127.0.0.1:{place.port}"))
    except InstallError as error:
        return {"error": str(error)}


async def streams(args: argparse.Namespace, server: Serve) -> dict[str, Any]:
    """Measure row 3."""
    rng = random.Random(args.seed)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def hold() -> aiohttp.ClientResponse:
            more = {"service_tier": "flex", "max_tokens": 1}
            answer = await session.post(
                f"{server.url}/v1/completions", json=body(prompt(rng)[:8], **more)
            )
            answer.raise_for_status()
            return answer

        os.kill(server.engine_pid, signal.SIGSTOP)
        try:
            answers = [await hold() for _ in range(args.streams)]
            await asyncio.sleep(1)
            before, start = server.cpu_s()["front_end"], time.monotonic()
            await asyncio.sleep(args.idle_seconds)
            used = server.cpu_s()["front_end"] - before
            cores = used / (time.monotonic() - start)
            rss = server.rss_mb()["front_end"]
        finally:
            os.kill(server.engine_pid, signal.SIGCONT)
        ends = await asyncio.gather(*(answer.read() for answer in answers))
    return {
        "open": len(answers),
        "ended": sum(end.rstrip().endswith(b"[DONE]") for end in ends),
        "front_end_cores": round(cores, 4),
        "front_end_rss_mb": round(rss, 1),
        "seconds": args.idle_seconds,
    }


def holds(report: dict[str, Any]) -> dict[str, bool]:
    """Return True or False for each target that this run measured."""
    found: dict[str, bool] = {}
    for row in ("overhead", "small"):
        if row not in report:
            continue
        for kind in ("http_ms", "http_whole_ms"):
            ms = report[row][kind]["over_python"]
            name = row if kind == "http_ms" else f"{row}_whole"
            found[f"{name}_p50"] = ms["p50"] <= REACH["overhead_p50_ms"]
            found[f"{name}_p99"] = ms["p99"] <= REACH["overhead_p99_ms"]
        kept = report[row]["kept_alive_ms"]["p50"]
        found[f"{row}_kept_alive"] = kept <= REACH["kept_alive_p50_ms"]
    if "small" in report:
        ttft = report["small"]["ttft_ms"]["python"]["p50"]
        found["small_ttft"] = ttft <= REACH["small_ttft_p50_ms"]
    if "interference" in report:
        found["interference"] = report["interference"]["p99_ratio"] <= REACH["interference"]
    if "streams" in report:
        row = report["streams"]
        found["streams"] = row["ended"] == row["open"]
        found["idle"] = row["front_end_cores"] < REACH["idle_cores"]
    return found


def served(
    args: argparse.Namespace,
    model: str,
    rows: dict[str, Callable[[Serve, str], Coroutine[Any, Any, dict[str, Any]]]],
) -> dict[str, Any]:
    """Measure these rows of one server."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="qllm-http-") as folder:
        socket = f"{folder}/engine"
        settings = [f"--set={k}={json.dumps(v)}" for k, v in SETTINGS.items()]
        settings.append(f"--set=listen={socket}")
        with serving(model, f"--threads={args.threads}", *settings) as server:
            pin(server.pid, args.front_core)
            pin(server.engine_pid, args.engine_core)
            for name, row in rows.items():
                report[name] = asyncio.run(row(server, socket))
                print(name, json.dumps(report[name]), file=sys.stderr)
    return report


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen rows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report: dict[str, Any] = {
        "model": Path(args.model).name, "threads": args.threads,
        "cores": {"engine": args.engine_core, "front": args.front_core},
    }  # fmt: skip
    pin(os.getpid(), args.front_core)
    found: dict[str, Callable[[Serve, str], Coroutine[Any, Any, dict[str, Any]]]] = {
        "overhead": lambda server, socket: overhead(args, args.model, server, socket),
        "interference": lambda server, _: interference(args, server.url),
        "streams": lambda server, _: streams(args, server),
    }
    rows = {name: row for name, row in found.items() if name in args.rows}
    if rows:
        report |= served(args, args.model, rows)
    if "small" in args.rows:
        small = str(make_random_moe(size=SMALL_SIZE, seed=0))
        report |= served(args, small, {"small": lambda *at: overhead(args, small, *at)})
    if "vllm" in args.rows:
        report["vllm"] = vllm(args)
        print("vllm", json.dumps(report["vllm"]), file=sys.stderr)
    return {**report, "reach": REACH, "holds": holds(report)}


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    reach = document["reach"]
    lines: list[Line] = []
    for row in ("overhead", "small"):
        if found := document.get(row):
            lines += _http_overhead_lines(found, reach)
    if "small" not in document:
        missing = "not measured: 40 ms per answer would hide in the prefill of the model above"
        lines.append(Line("the same with a TTFT below 10 ms, and answers not streamed", missing))
    what = "LS TTFT p99, other work hogs the front end's core / quiet"
    if found := document.get("interference"):
        lines.append(at_most(what, found["p99_ratio"], reach["interference"], 2))
        lines.append(Line("  quiet; hogged, ms", _quiet_hogged(found)))
    if (found := document.get("vllm")) and "p99_ratio" in found:
        same = f"  the same, vLLM's CPU build: {_quiet_hogged(found)} ms"
        lines.append(Line(same, f"{found['p99_ratio']:.2f}"))
    if found := document.get("streams"):
        what = f"{found['open']:,} open streams, idle: cores"
        lines.append(at_most(what, found["front_end_cores"], reach["idle_cores"], 3))
    return lines


def _http_overhead_lines(found: dict[str, Any], reach: dict[str, float]) -> list[Line]:
    """Return the rows of one model: HTTP minus the Python API, and the cost of a connection."""
    python = found["ttft_ms"]["python"]["p50"]
    model = f", TTFT {python:.1f} ms" if "model" in found else ""
    kinds = {
        "TTFT over HTTP and the rings": found["http_ms"],
        "an answer that is not streamed": found.get("http_whole_ms"),
    }
    lines = [
        at_most(
            f"{what} minus the Python API{model}, {name} ms",
            ms["over_python"][name],
            reach[f"overhead_{name}_ms"],
        )
        for what, ms in kinds.items()
        if ms is not None
        for name in ("p50", "p99")
    ]
    if kept := found.get("kept_alive_ms"):
        what = f"GET /version, kept-alive minus fresh connection{model}, p50 ms"
        lines.append(at_most(what, kept["p50"], reach["kept_alive_p50_ms"]))
    return lines


def _quiet_hogged(found: dict[str, Any]) -> str:
    return "; ".join(f"{found['ttft_ms'][name]['p99']:.0f}" for name in ("quiet", "hogged"))


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="alias or folder, instead of --size")
    parser.add_argument("--size", default="300m", help="of a random model")
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas between")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="per side of interference")
    parser.add_argument("--turns", type=int, default=4, help="of quiet and hogged")
    parser.add_argument("--rate", type=float, default=2.0, help="LS requests per second")
    parser.add_argument("--hogs", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_S)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine-core", type=int)
    parser.add_argument("--front-core", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 rounds, short, without vllm")
    parser.add_argument("--out", type=result_file)
    parser.add_argument("--solo", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    if args.quick:
        args.rows = [row for row in args.rows if row != "vllm"]
        args.rounds, args.seconds, args.turns, args.streams, args.idle_seconds = 20, 8, 1, 100, 2
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    args.model = args.model or str(make_random_moe(size=args.size, seed=0))
    return args


def main() -> int:
    """Run the bench, or the engine of the Python API."""
    args = parse_args()
    if args.solo:
        be_solo(args.model, args.threads)
        return 0
    document = {"bench": "over_http", "machine": machine(), **run(args)}
    print_result(with_lines(document, lines_of(document)), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
