"""A Ray replica killed under load: answers of all requests, and the TTFT of LS.

Two replicas of `tiny`, one thread each, run behind `qllm.ray:app` on a cluster of this machine. 200
requests, LS and BE mixed, arrive at random times of a seed, at a twentieth of the measured rate of
two engines alone (Ray's streams on two cores carry no more). Each is streamed over HTTP with token
ids. There are two runs: a calm one, and one with `kill -9` of a replica after half of the arrivals.
Expected are the tokens of an engine alone. If other work shares the cores, TTFT has little meaning;
answers and tokens do not depend on it. The environment is that of `make test-ray`:

    .venv/ray/bin/python -m bench.serving.on_ray [--requests 200] [--load 0.05] [--out FILE]
"""

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import ray
from ray import serve

import qllm.ray
from bench.common import SPECIAL, Line, machine, print_result, result_file, with_lines
from qllm import QLLMEngine
from qllm.measure.variants import KV_SIZES
from qllm.ray.run import start_here
from qllm.record.summary import percentile

PORT = 8741
URL = f"http://127.0.0.1:{PORT}/v1/completions"
LS_SHARE = 0.6
EXACT = "batch-invariant"
VOCABULARY = 3072
"""Number of tokens in the vocabulary of `tiny`."""


class Job(NamedTuple):
    """One request."""

    at_s: float
    is_ls: bool
    prompt: list[int]
    max_tokens: int
    seed: int

    @property
    def body(self) -> dict[str, Any]:
        """Return the request's JSON for HTTP."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "service_tier": "default" if self.is_ls else "flex",
        }


class Seen(NamedTuple):
    """Answer of one request, as its client saw it."""

    job: Job
    ttft_ms: float | None
    tokens: list[int]
    error: str | None


def jobs_of(count: int, seed: int, vocab_size: int) -> list[Job]:
    """Return requests with arrivals between 0 and 1, to be scaled."""
    rng = np.random.default_rng(seed)
    found = []
    for at in np.sort(rng.random(count)):
        is_ls = bool(rng.random() < LS_SHARE)
        length = int(rng.integers(16, 64) if is_ls else rng.integers(100, 300))
        output = int(rng.integers(16, 33) if is_ls else rng.integers(64, 129))
        prompt = [int(i) for i in rng.integers(SPECIAL, vocab_size, length)]
        found.append(Job(float(at), is_ls, prompt, output, int(rng.integers(2**31))))
    return found


def alone(jobs: list[Job]) -> tuple[list[list[int]], float]:
    """Return the tokens of every job on an engine alone, all at once, and the seconds."""
    with QLLMEngine.from_pretrained("tiny", threads=1, exactness=EXACT, **KV_SIZES) as engine:
        start = time.perf_counter()
        handles = [
            engine.submit(
                job.prompt,
                "LS" if job.is_ls else "BE",
                job.max_tokens,
                temperature=1.0,
                seed=job.seed,
                ignore_eos=True,
            )
            for job in jobs
        ]
        tokens = [list(handle.result().token_ids) for handle in handles]
        return tokens, time.perf_counter() - start


async def ask(session: aiohttp.ClientSession, job: Job, zero_s: float, over_s: float) -> Seen:
    """Send a request at its time and read its stream."""
    await asyncio.sleep(zero_s + job.at_s * over_s - time.perf_counter())
    start, ttft_ms, tokens = time.perf_counter(), None, []
    try:
        async with session.post(URL, json=job.body) as answer:
            if answer.status != 200:
                return Seen(job, None, [], f"{answer.status}: {await answer.text()}")
            done = False
            async for line in answer.content:
                text = line.decode().removeprefix("data: ").strip()
                done = done or text == "[DONE]"
                if not text.startswith("{"):
                    continue
                said = json.loads(text)
                if "error" in said:
                    return Seen(job, ttft_ms, tokens, str(said["error"]))
                for choice in said["choices"]:
                    tokens += choice.get("token_ids") or []
                if tokens and ttft_ms is None:
                    ttft_ms = 1e3 * (time.perf_counter() - start)
            return Seen(job, ttft_ms, tokens, None if done else "the stream was cut off")
    except aiohttp.ClientError as error:
        return Seen(job, ttft_ms, tokens, repr(error))


def victim() -> int:
    """Return the process id of a replica that has an engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(b"ray::ServeReplica:bench:engines"):
            found.append(int(folder.name))
    return min(found)


def running() -> int:
    """Return the number of serving replicas with an engine."""
    status = serve.status().applications["bench"].deployments["engines"]
    return int(status.replica_states.get("RUNNING", 0))


async def turn(jobs: list[Job], over_s: float, kill: bool) -> tuple[list[Seen], float | None]:
    """Run all jobs; with `kill`, also return the seconds until there were two replicas again."""
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        zero = time.perf_counter() + 1.0
        asks = [asyncio.create_task(ask(session, job, zero, over_s)) for job in jobs]
        back_s = None
        if kill:
            await asyncio.sleep(zero + jobs[len(jobs) // 2].at_s * over_s - time.perf_counter())
            os.kill(victim(), signal.SIGKILL)
            start = time.perf_counter()
            while await asyncio.to_thread(running) == 2:
                await asyncio.sleep(0.1)
            while await asyncio.to_thread(running) < 2:
                await asyncio.sleep(0.1)
            back_s = time.perf_counter() - start
        return await asyncio.gather(*asks), back_s


def summary(seen: list[Seen], expected: list[list[int]]) -> dict[str, Any]:
    """Return counts, and TTFT of LS before and after the middle, the time of the kill."""
    middle = seen[len(seen) // 2].job.at_s
    halves: dict[str, list[float]] = {"before": [], "after": []}
    for one in seen:
        if one.job.is_ls and one.ttft_ms is not None:
            halves["after" if one.job.at_s >= middle else "before"].append(one.ttft_ms)
    pairs = list(zip(seen, expected, strict=True))
    return {
        "answered": sum(one.error is None for one in seen),
        "equal": sum(one.tokens == tokens for one, tokens in pairs),
        "errors": [one.error for one in seen if one.error][:5],
        "ls_ttft_ms": {
            name: {"n": len(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}
            for name, values in halves.items()
        },
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    lines: list[Line] = []
    asked = document["requests"]
    for name, what in (("killed", "one of two replicas killed"), ("calm", "none killed")):
        row = document[name]
        whole = row["answered"] == row["equal"] == asked
        found = f"{row['answered']} and {row['equal']} of {asked}"
        lines.append(
            Line(f"{what}: answered, with the tokens of an engine alone", found, "all", whole)
        )
        before, after = (row["ls_ttft_ms"][half]["p99"] for half in ("before", "after"))
        halves = "before and after the kill" if name == "killed" else "in the same halves"
        lines.append(Line(f"  LS TTFT p99 {halves}: ms", f"{before:.0f}, {after:.0f}"))
    back_s = document["killed"]["two_replicas_again_s"]
    lines.append(Line("  two replicas again after: s", f"{back_s:.0f}"))
    return lines


def main() -> None:
    """Run both and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.05, help="of what two engines compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    jobs = jobs_of(args.requests, args.seed, VOCABULARY)
    expected, took_s = alone(jobs)
    over_s = took_s / 2 / args.load
    start_here(num_cpus=4)
    rows: dict[str, Any] = {}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        settings = {"model": "tiny", "threads": 1, "engine.exactness": EXACT, "ray.cpus": 0.5}
        settings |= {"ray.min_replicas": 2, "ray.max_replicas": 2, "ray.health_s": 1.0}
        serve.run(qllm.ray.app(settings), name="bench")
        for name in ("calm", "killed"):
            seen, back_s = asyncio.run(turn(jobs, over_s, kill=name == "killed"))
            rows[name] = summary(seen, expected)
            if back_s is not None:
                rows[name]["two_replicas_again_s"] = back_s
    finally:
        serve.shutdown()
        ray.shutdown()
    found = {
        "bench": "on_ray",
        "machine": machine(),
        "ray": ray.__version__,
        "requests": args.requests,
        "load": args.load,
        "seed": args.seed,
        "arrivals_s": over_s,
        **rows,
    }
    print_result(with_lines(found, lines_of(found)), args.out)


if __name__ == "__main__":
    main()
