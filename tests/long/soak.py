"""A server under more load than it can serve, from clients that misbehave; every answer is checked.

`qllm serve` runs as its own process. First each prompt runs alone, greedily: later answers must
be the same (the engine is batch-invariant). Then the server's capacity is measured, and the clients
offer 1.2 times that, LS and BE mixed: a calm run, then the soak, in which

- clients hang up before, in the middle of, and at the end of an answer,
- bodies are malformed,
- a second front end is attached to the same engine (`--set listen=...`), asks and cancels, and is
  killed (`kill -9`) again and again.

An answer that was accepted (HTTP 200) must end exactly once, with exactly its tokens; a broken
body must be a 4xx; at the end the engine must hold nothing. Any other outcome is a problem, and
the exit code is 1. The report also has the slope of resident memory after the warm-up (the first
third), and the TTFT of LS against the calm run. The last line of stdout is one JSON document.

    python -m tests.long.soak [--minutes 30] [--model tiny] [--calm-seconds 60] [--seed 0]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.common import ROOT, Line, at_most, machine, percentiles, print_result, with_lines
from bench.serving.qllm_serve import Serve, serving
from tests.support.soak_cases import MALFORMED, Case, StreamCheck, make_cases

LOAD = 1.2
LS_SHARE = 0.3
CALIBRATE_AT_ONCE = 16
MAX_OPEN_BE = 96
"""Most open BE requests: the queue is long enough for an overload, and short enough that LS is not
refused."""
KILL_EVERY_S = (4.0, 20.0)
SETTLE_S = 60.0
WAYS = {"stream": 50, "whole": 15, "leave": 15, "vanish": 8, "malformed": 12}
"""Behaviours of a client, with weights."""
SETTINGS = ("exactness=batch-invariant", "max_kv_tokens=32768", "max_num_seqs=16")


@dataclass
class Tally:
    """Counts, latencies and problems of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    """TTFTs of LS streams in ms, counted from sending."""

    def problem(self, text: str) -> None:
        """Record an event that must not happen."""
        self.counts["problems"] += 1
        if len(self.problems) < 20:
            self.problems.append(text[:500])
            print("PROBLEM", text[:500], file=sys.stderr)


async def events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yield the data of server-sent events, without comments of a waiting stream."""
    async for line in content:
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text.removeprefix("data: ")


class Clients:
    """All HTTP clients of one run."""

    def __init__(self, session: aiohttp.ClientSession, url: str, cases: Sequence[Case]) -> None:
        self.session, self.cases = session, cases
        self.url = f"{url}/v1/completions"
        self.tally = Tally()
        self.num_open_be = 0

    async def one(self, way: str, case: Case, is_ls: bool, rng: random.Random) -> None:
        """Run one client with the given behaviour."""
        self.tally.counts[f"sent_{way}"] += 1
        self.num_open_be += not is_ls
        try:
            await getattr(self, f"_{way}")(case, is_ls, rng)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            self.tally.problem(f"{way}: {type(error).__name__}: {error}")
        finally:
            self.num_open_be -= not is_ls

    def _refused(self, way: str, status: int, text: str) -> bool:
        if status == 429:
            self.tally.counts["refused"] += 1
        elif status != 200:
            self.tally.problem(f"{way}: HTTP {status}: {text}")
        return status != 200

    async def _stream(self, case: Case, is_ls: bool, rng: random.Random) -> None:
        start = time.monotonic()
        async with self.session.post(self.url, json=case.body(is_ls, True)) as answer:
            if answer.status != 200:
                self._refused("stream", answer.status, await answer.text())
                return
            self.tally.counts["accepted"] += 1
            check, first = StreamCheck(case), None
            async for data in events(answer.content):
                first = first or time.monotonic()
                check.take(data)
        if is_ls and first is not None:
            self.tally.ttft_ms.append(1e3 * (first - start))
        for wrong in check.whole():
            self.tally.problem(f"stream: {wrong}")
        self.tally.counts["ended"] += 1

    async def _whole(self, case: Case, is_ls: bool, rng: random.Random) -> None:
        async with self.session.post(self.url, json=case.body(is_ls, False)) as answer:
            text = await answer.text()
            if self._refused("whole", answer.status, text):
                return
        self.tally.counts["accepted"] += 1
        body = json.loads(text)
        found = [(c["text"], c["finish_reason"]) for c in body["choices"]]
        if found != [(case.text, "length")]:
            self.tally.problem(f"whole: {found} is not {case.text!r}")
        if body["usage"]["completion_tokens"] != case.max_tokens:
            self.tally.problem(f"whole: {body['usage']} for max_tokens={case.max_tokens}")
        self.tally.counts["ended"] += 1

    async def _leave(self, case: Case, is_ls: bool, rng: random.Random) -> None:
        """Read some of an answer, then hang up."""
        async with self.session.post(self.url, json=case.body(is_ls, True)) as answer:
            if answer.status != 200:
                self._refused("leave", answer.status, await answer.text())
                return
            self.tally.counts["accepted_and_left"] += 1
            check, left = StreamCheck(case), rng.randint(0, case.max_tokens)
            async for data in events(answer.content):
                check.take(data)
                left -= 1
                if left < 0:
                    break
            answer.close()
        for wrong in check.wrong:
            self.tally.problem(f"leave: {wrong}")

    async def _vanish(self, case: Case, is_ls: bool, rng: random.Random) -> None:
        """Hang up without waiting for any answer."""
        post = self.session.post(self.url, json=case.body(is_ls, rng.random() < 0.5))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.2), post as answer:
                await answer.read()

    async def _malformed(self, case: Case, is_ls: bool, rng: random.Random) -> None:
        data = rng.choice(MALFORMED)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url, data=data, headers=headers) as answer:
            text = await answer.text()
            if not 400 <= answer.status < 500 or "error" not in json.loads(text):
                self.tally.problem(f"malformed {data!r:.60}: HTTP {answer.status}: {text}")

    async def run(self, rate: float, seconds: float, ways: dict[str, int], seed: int) -> None:
        """Send requests at `rate` per second in an open loop, then wait for their answers.

        The first requests use each behaviour once, so that a short run has them all.
        """
        rng, first = random.Random(seed), iter(ways)
        tasks: set[asyncio.Task[None]] = set()
        start = due = time.monotonic()
        while (due := due + rng.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            is_ls = rng.random() < LS_SHARE
            way = next(first, None) or rng.choices(list(ways), list(ways.values()))[0]
            if not is_ls and self.num_open_be >= MAX_OPEN_BE:
                self.tally.counts["not_sent"] += 1
                continue
            task = asyncio.create_task(self.one(way, rng.choice(self.cases), is_ls, rng))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLE_S + seconds)
        if tasks:
            self.tally.problem(f"{len(tasks)} requests never ended")

    async def capacity(self, seconds: float) -> float:
        """Return the requests per second of clients that wait for their answers."""
        deadline = time.monotonic() + seconds

        async def client(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < deadline:
                await self.one("stream", rng.choice(self.cases), seed % 3 == 0, rng)

        start = time.monotonic()
        await asyncio.gather(*(client(seed) for seed in range(CALIBRATE_AT_ONCE)))
        return self.tally.counts["ended"] / (time.monotonic() - start)


class Attached:
    """A second front end in its own process, killed and started again and again.

    A process with all imports forks each of them, so that Python's start is not measured.
    """

    def __init__(self, socket: str, cases: Path, tally: Tally) -> None:
        module = [sys.executable, "-m", "tests.long.soak"]
        self._command = [*module, "--attach", socket, "--cases", str(cases)]
        self._tally = tally

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process that forks them, and wait until it is ready."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, cwd=ROOT
        )
        assert process.stdout is not None
        await process.stdout.readline()
        return process

    async def run(self, process: asyncio.subprocess.Process, seconds: float, seed: int) -> None:
        """Start and kill front ends for some seconds."""
        assert process.stdin is not None
        assert process.stdout is not None
        rng = random.Random(seed)
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                process.stdin.write(f"{rng.randrange(1 << 30)}\n".encode())
                await self._life(process.stdout, rng.uniform(*KILL_EVERY_S), deadline)
        finally:
            process.stdin.close()
            await process.wait()

    async def _life(self, said: asyncio.StreamReader, life_s: float, deadline: float) -> None:
        """Follow one front end from the fork to the kill."""
        pid = json.loads(await said.readline())["pid"]
        last = json.loads(await said.readline())  # it has its first answers
        end = min(deadline, time.monotonic() + life_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                while "gone" not in last:
                    last = json.loads(await said.readline())
        if "gone" in last:
            self._tally.problem("an attached front end ended by itself")
            return
        os.kill(pid, signal.SIGKILL)
        self._tally.counts["front_ends_killed"] += 1
        while "gone" not in (line := json.loads(await said.readline())):
            last = line
        for name in ("ended", "cancelled"):
            self._tally.counts[f"attached_{name}"] += last.get(name, 0)
        for text in last["problems"]:
            self._tally.problem(f"attached: {text}")


TTFT_RATIO = 1.5
"""Target of the TTFT of LS under overload, over the calm run's."""


def fork_attached(socket: str, cases: Sequence[Case]) -> None:
    """Fork a front end for every line (a seed) of stdin; report its birth and its end."""
    from qllm import QLLMEngine  # noqa: F401 - once, for all of them

    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            be_attached(socket, cases, int(line))
        print(json.dumps({"pid": pid}), flush=True)
        os.waitpid(pid, 0)
        print(json.dumps({"gone": pid}), flush=True)


def be_attached(socket: str, cases: Sequence[Case], seed: int) -> None:
    """Ask, cancel some requests, check, and report, until killed."""
    from qllm import QLLMEngine, SamplingParams

    rng = random.Random(seed)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    counts, problems, said_at = Counter[str](), [], 0.0
    with QLLMEngine.attach(socket) as engine:
        while True:
            chosen = rng.choices(cases, k=4)
            handles = [
                engine.submit(c.prompt, rng.choice(("LS", "BE")), c.max_tokens, sampling=greedy)
                for c in chosen
            ]
            for case, handle in zip(chosen, handles, strict=True):
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.05)
                    handle.cancel()
                result = handle.result(120)
                is_cancelled = result.finish_reason.value == "cancelled"
                counts["cancelled" if is_cancelled else "ended"] += 1
                text = result.text.rstrip("\ufffd") if is_cancelled else result.text
                is_right = case.text.startswith(text) if is_cancelled else text == case.text
                if not is_right:
                    problems.append(f"{result.text!r} is not {case.text!r}")
            if time.monotonic() - said_at > 0.5:
                said_at = time.monotonic()
                print(json.dumps({**counts, "problems": problems}), flush=True)


class Memory:
    """Samples of resident memory over time."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self.samples: list[tuple[float, dict[str, float]]] = []

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.samples.append((time.monotonic(), self._server.rss_mb()))
            await asyncio.sleep(1.0)

    def report(self) -> dict[str, Any]:
        """Return per process the last value, and the slope after the first third of the samples."""
        found: dict[str, Any] = {}
        rest = self.samples[len(self.samples) // 3 :]
        for name in ("front_end", "engine"):
            found[f"{name}_rss_mb"] = round(self.samples[-1][1][name], 1)
            if len(rest) >= 3:
                minutes = [t / 60 for t, _ in rest]
                slope = np.polyfit(minutes, [rss[name] for _, rss in rest], 1)[0]
                found[f"{name}_rss_mb_per_minute"] = round(float(slope), 3)
        return found


async def samples_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the server's metrics, summed over labels."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("qllm:")] += float(value)
    return dict(found)


async def settled(session: aiohttp.ClientSession, url: str, tally: Tally) -> dict[str, float]:
    """Wait until the engine holds nothing; anything left is a problem."""
    deadline = time.monotonic() + SETTLE_S
    names = ("num_requests_running", "num_requests_waiting", "num_requests_parked",
             "kv_cache_usage_perc")  # fmt: skip
    while True:
        now = await samples_of(session, url)
        left = {name: now[name] for name in names if now[name]}
        if not left or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if left:
        tally.problem(f"left in the engine: {left}")
    return now


async def soak(args: argparse.Namespace, server: Serve, socket: str) -> dict[str, Any]:
    """Run the calm run and the soak; return the report."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        cases = []
        for case in make_cases(args.seed):
            async with session.post(
                f"{server.url}/v1/completions", json=case.body(True, False)
            ) as answer:
                body = await answer.json()
                cases.append(case._replace(text=body["choices"][0]["text"]))
        before = await samples_of(session, server.url)
        while before["request_success_total"] < len(cases):  # the last one is counted after its end
            await asyncio.sleep(0.05)
            before = await samples_of(session, server.url)
        warm, calm, wild = (Clients(session, server.url, cases) for _ in range(3))
        rate = LOAD * await warm.capacity(args.calibrate_seconds)
        file = Path(socket).with_name("cases.json")
        file.write_text(json.dumps(cases))
        memory, attached = Memory(server), Attached(socket, file, wild.tally)
        forker = await attached.start()
        await calm.run(rate, args.calm_seconds, {"stream": 1}, args.seed)
        sampling = asyncio.create_task(memory.run())
        await asyncio.gather(
            wild.run(rate, args.seconds, WAYS, args.seed + 1),
            attached.run(forker, args.seconds, args.seed + 2),
        )
        sampling.cancel()
        after = await settled(session, server.url, wild.tally)
    runs = (warm, calm, wild)
    counted = after["request_success_total"] - before["request_success_total"]
    least = sum(r.tally.counts["ended"] + r.tally.counts["accepted_and_left"] for r in runs)
    most = least + wild.tally.counts["sent_vanish"]
    if not least <= counted <= most:
        wild.tally.problem(f"{counted:.0f} requests ended, but {least} to {most} were accepted")
    ttft_ms = {
        name: percentiles(r.tally.ttft_ms, digits=2) | {"count": len(r.tally.ttft_ms)}
        for name, r in (("calm", calm), ("soak", wild))
    }
    calm_ms, soak_ms = (ttft_ms[name].get("p99") for name in ("calm", "soak"))
    ratio = soak_ms / calm_ms if soak_ms and calm_ms else None
    return {
        "ok": not any(r.tally.problems for r in runs),
        "problems": [text for r in runs for text in r.tally.problems],
        "seconds": args.seconds,
        "model": args.model,
        "offered_per_s": round(rate, 3),
        "load": LOAD,
        "counts": dict(wild.tally.counts),
        "ended_in_the_engine": counted,
        "ls_ttft_ms": ttft_ms,
        "ls_ttft_p99_ratio": None if ratio is None else round(ratio, 3),
        "memory": memory.report(),
        "cores": sorted(os.sched_getaffinity(0)),
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    minutes, counts, memory = document["seconds"] / 60, document["counts"], document["memory"]
    accepted = sum(counts.get(name, 0) for name in ("ended", "accepted_and_left", "sent_vanish"))
    problems = len(document["problems"])
    what = f"{minutes:.0f} minutes at {document['load']} of capacity, {accepted:,} requests"
    lines: list[Line] = [
        Line(f"{what}: lost, duplicated or wrong answers", f"{problems}", "0", not problems)
    ]
    lines.append(
        at_most("  LS TTFT p99 / the calm run", document["ls_ttft_p99_ratio"], TTFT_RATIO, 2)
    )
    for name in ("front_end", "engine"):
        slope = memory[f"{name}_rss_mb_per_minute"]
        found = f"{slope:+.2f} MB a minute at {memory[f'{name}_rss_mb']:,.0f} MB"
        lines.append(
            Line(f"  resident memory of the {name.replace('_', ' ')} after warm-up", found)
        )
    return lines


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, help="instead of --minutes")
    parser.add_argument("--calm-seconds", type=float, default=60.0)
    parser.add_argument("--calibrate-seconds", type=float, default=10.0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attach", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seconds = 60 * args.minutes if args.seconds is None else args.seconds
    return args


def main() -> int:
    """Run the soak, or the attached front end."""
    args = parse_args()
    if args.attach:
        cases = [Case(*values) for values in json.loads(args.cases.read_text())]
        fork_attached(args.attach, cases)
        return 0
    with tempfile.TemporaryDirectory(prefix="qllm-soak-") as folder:
        socket = f"{folder}/engine"
        settings = [f"--set={text}" for text in (*SETTINGS, f"listen={socket}")]
        with serving(args.model, f"--threads={args.threads}", *settings) as server:
            report = asyncio.run(soak(args, server, socket))
    document = {"bench": "soak", "machine": machine(), **report}
    print_result(with_lines(document, lines_of(document)), None)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
