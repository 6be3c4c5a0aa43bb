"""Losses, gains and costs of several engines behind one front end.

Rows: `killed` (two engines of `tiny`, one thread each, one killed with SIGKILL under load, answers
against those of a calm run), `pools` (four simulated engines, routes alternated on the same
requests), `prefix` (two to four engines of `tiny`, chats, hits as the engines count them), `router`
(CPU time of all work of a router for one request), `scale` (a router with up to 1,000 engines and
10^6 requests; no model runs), `state` (its bytes), `front_end` (memory of its process) and
`rebalance`, `rebalance_bound`, `rebalance_sim` (stalled BE migrates or stays; `rebalancing.py`).
The last line of stdout is one JSON document.

    python -m bench.serving.fleet [--quick]
        [--rows killed pools prefix router scale state front_end rebalance
         rebalance_bound rebalance_sim]
"""

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.common import machine, result_file, with_lines, write_result
from bench.serving.fleet_lines import lines_of
from bench.serving.qllm_serve import serving
from bench.serving.rebalancing import bound, rebalance, simulated
from qllm import QLLMEngine, SamplingParams, Slo
from qllm.config import EngineConfig
from qllm.fleet.members import Backoff
from qllm.fleet.router import Router
from qllm.fleet.routes import RouteCosts, load_route
from qllm.measure.variants import KV_SIZES
from qllm.record.summary import percentile, request_metrics
from qllm.sim.fleet import costs_of, simulate_fleet
from qllm.sim.presets import preset
from qllm.types import NS_PER_MS, Priority
from qllm.workloads.spec import RequestSpec

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TINY = {**KV_SIZES, "threads": 1, "conformance": False, "exactness": "batch-invariant"}


@contextmanager
def engines_of(num: int, **settings: Any) -> Iterator[tuple[str, list[QLLMEngine]]]:
    """Start a number of engine processes on this machine; yield their address and the engines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [str(folder / f"engine-{i}") for i in range(num)]
        engines = [
            stack.enter_context(
                QLLMEngine.from_pretrained("tiny", listen=path, **{**TINY, **settings})
            )
            for path in paths
        ]
        yield ",".join(paths), engines


@contextmanager
def fleet(num: int, route: str, **settings: Any) -> Iterator[tuple[QLLMEngine, list[QLLMEngine]]]:
    """Start a front end to a number of engine processes of this machine."""
    with engines_of(num, **settings) as (there, engines):
        front = QLLMEngine.connect(there, route=route, backoff=Backoff(first_s=3600))
        with front:
            yield front, engines


def killed(quick: bool, seed: int) -> dict[str, Any]:
    """Measure answers of two engines, one of them killed, against those of a calm run."""
    rng = random.Random(seed)
    count, tokens = (16, 60) if quick else (64, 200)
    prompts = [[rng.randrange(8, 250) for _ in range(rng.randrange(8, 200))] for _ in range(count)]
    rounds = []
    for number in range(1 if quick else 3):
        with fleet(2, "class", max_kv_tokens=32768) as (front, engines):

            def ask(front: QLLMEngine = front) -> list[Any]:
                classes = ("LS", "BE")
                return [
                    front.submit(p, classes[i % 2], tokens, sampling=GREEDY)
                    for i, p in enumerate(prompts)
                ]

            calm = [handle.result(timeout=300).token_ids for handle in ask()]
            handles = ask()
            until = number * tokens // 4
            while min(len(handle.token_ids) for handle in handles[::2]) < until:
                time.sleep(0.001)
            client: Any = engines[number % 2]._client
            progress = [len(handle.token_ids) for handle in handles]
            os.kill(client._process.pid, signal.SIGKILL)
            began = time.monotonic()
            answers = [handle.result(timeout=300).token_ids for handle in handles]
            assert front.fleet is not None
            moved = sum(engine["taken"] for engine in front.fleet.engines())
            rounds.append(
                {
                    "requests": count, "moved": moved, "tokens_at_kill": sum(progress),
                    "lost": sum(len(a) != tokens for a in answers),
                    "changed_tokens": sum(
                        x != y for a, b in zip(answers, calm, strict=True)
                        for x, y in zip(a, b, strict=True)
                    ),
                    "seconds_to_last_answer": round(time.monotonic() - began, 2),
                }
            )  # fmt: skip
    return {"rounds": rounds}


def mixed(seed: int, seconds: float, load: float, costs: Any, config: Any) -> list[RequestSpec]:
    """Return many short prompts and few long ones, all LS, arriving at random."""
    rng = random.Random(seed)
    per_token = 4 * costs.capacity(config).prefill_tokens_per_s
    short_share, specs, at_s = 0.8, [], 0.0
    mean = short_share * 136 + (1 - short_share) * 4608
    slo = Slo(ttft_ms=400)
    while (at_s := at_s + rng.expovariate(load * per_token / mean)) < seconds:
        is_short = rng.random() < short_share
        tokens = rng.randint(16, 256) if is_short else rng.randint(1024, 8192)
        specs.append(
            RequestSpec(
                at_s=at_s, priority=Priority.LS, num_prompt_tokens=tokens, max_tokens=8,
                name=f"{'short' if is_short else 'long'}-{len(specs)}", slo=slo,
            )
        )  # fmt: skip
    return specs


def pools(quick: bool, seed: int) -> dict[str, Any]:
    """Measure TTFT of short prompts and missed targets, route by route, on the same requests."""
    costs = preset("h100", "qwen3-moe", "auto")
    config = EngineConfig(max_kv_tokens=costs.max_kv_tokens)
    seconds = 2.0 if quick else 12.0
    names = ("round-robin", "least", "class", "length")
    found: dict[str, Any] = {"simulated": costs.title, "boundary": costs_of(costs, config).boundary}
    for load in (0.7,) if quick else (0.75, 0.85):
        specs = mixed(seed, seconds, load, costs, config)
        rows: dict[str, dict[str, float]] = {}
        for name in names:
            served = simulate_fleet(
                specs, "fcfs", costs, engines=4, route=name, config=config, seconds=seconds
            )
            rows[name] = {"requests": len(specs), **waits(served, 400)}
        found[f"load {load}"] = {
            name: {
                "over_round_robin": ratios(row, rows["round-robin"]),
                "over_least": ratios(row, rows["least"]),
                **{key: round(value, 4) for key, value in row.items()},
            }
            for name, row in rows.items()
        }
    return found


def waits(served: Any, target_ms: float) -> dict[str, float]:
    """Return TTFTs of short prompts and missed targets; without a token, TTFT is the wait."""
    ttft = {"short": [], "long": []}
    for r in request_metrics(served.events):
        waited = (served.end_ns - r.arrival_ns) / NS_PER_MS if r.ttft_ms is None else r.ttft_ms
        ttft[r.name.partition("-")[0]].append(waited)
    everything = ttft["short"] + ttft["long"]
    return {
        "short_p50_ms": percentile(ttft["short"], 50),
        "short_p90_ms": percentile(ttft["short"], 90),
        "long_p90_ms": percentile(ttft["long"], 90),
        "violations": sum(x > target_ms for x in everything) / len(everything),
    }


def ratios(of: dict[str, float], base: dict[str, float]) -> dict[str, float | None]:
    """Return ratios of two runs of the same requests; None if the base is zero."""
    keys = ("short_p90_ms", "violations")
    return {key: round(of[key] / base[key], 3) if base[key] else None for key in keys}


FIRST, ASKED, ANSWERED = 400, 40, 24
"""Tokens at the start of a chat, of each further question, and of each answer."""


class Chats:
    """Chats of random tokens, the same for every route.

    Args:
        count: Number of chats.
        turns: Number of questions of each chat.
        seed: Seed of tokens and times.
    """

    def __init__(self, count: int, turns: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turns = turns
        self.history = [self.tokens(FIRST) for _ in range(count)]
        self.asked = [[self.tokens(ASKED) for _ in range(turns)] for _ in range(count)]

    def tokens(self, count: int) -> list[int]:
        """Return random tokens of `tiny`."""
        return [self.rng.randrange(8, 250) for _ in range(count)]

    def ask(self, front: QLLMEngine, chat: int, turn: int) -> Any:
        """Ask the next question of a chat."""
        self.history[chat] += self.asked[chat][turn]
        return front.submit(self.history[chat], "LS", ANSWERED, sampling=GREEDY)

    def at_once(self, front: QLLMEngine) -> None:
        """Ask all next questions at once, in random order, and again when all are answered."""
        chats = range(len(self.history))
        for turn in range(self.turns):
            order = self.rng.sample(chats, len(chats))
            handles = {chat: self.ask(front, chat, turn) for chat in order}
            for chat, handle in handles.items():
                self.history[chat] += handle.result(timeout=300).token_ids

    def at_random(self, front: QLLMEngine) -> None:
        """Ask each chat's next question after a random wait, a second on average."""
        seeds = [self.rng.random() for _ in self.history]

        def talk(chat: int) -> None:
            rng = random.Random(seeds[chat])
            time.sleep(rng.uniform(0, 2))
            for turn in range(self.turns):
                answer = self.ask(front, chat, turn).result(timeout=300)
                self.history[chat] += answer.token_ids
                time.sleep(rng.expovariate(1))

        with ThreadPoolExecutor(len(self.history)) as pool:
            list(pool.map(talk, range(len(self.history))))


def prefix(quick: bool, seed: int) -> dict[str, Any]:
    """Measure the cached prompt tokens over those that engines looked for.

    Engines cache 1.25 times their share of six chats each: together all, none alone. `most` is the
    result if every whole page computed before is found.
    """
    turns, seeds = (2, 1) if quick else (5, 3)
    lengths = [FIRST + ASKED + turn * (ASKED + ANSWERED) for turn in range(turns)]
    most = sum((length - ASKED - 1) // 64 * 64 for length in lengths[1:]) / sum(lengths)
    kept = int(1.25 * 6 * (FIRST + turns * (ASKED + ANSWERED)))
    rows = []
    for num in (3,) if quick else (3, 2, 4):
        settings = {"prefix_cache": True, "prefix_cache_tokens": kept}
        with engines_of(num, **settings) as (there, _):
            for how in ("at_once", "at_random") if num == 3 else ("at_random",):
                found = [
                    {
                        route: hits(there, route, Chats(6 * num, turns, seed + i), how)
                        for route in ("round-robin", "prefix")
                    }
                    for i in range(seeds)
                ]
                ratios = [
                    pair["prefix"]["hit_share"] / max(pair["round-robin"]["hit_share"], 1e-9)
                    for pair in found
                ]
                rows.append(
                    {
                        "engines": num, "chats": 6 * num, "turns": turns, "how": how,
                        "most": round(most, 4),
                        "prefix_over_round_robin": round(statistics.median(ratios), 2),
                        "seeds": found,
                    }
                )  # fmt: skip
    return {"rows": rows}


def hits(there: str, route: str, chats: Chats, how: str) -> dict[str, Any]:
    """Serve chats by one route, with engines whose caches are empty."""
    with QLLMEngine.connect(there, route=route) as front:
        front.reset_prefix_cache()
        before = front.stats()["prefix_cache"]
        getattr(chats, how)(front)
        stats = front.stats()["prefix_cache"]
        assert front.fleet is not None
        sent = [engine["sent"] for engine in front.fleet.engines()]
    found, asked = (stats[key] - before[key] for key in ("hit_tokens", "queried_tokens"))
    return {"hit_share": round(found / asked, 4), "sent": sent}


def cost_of(router: Router, prompts: list[list[int]], count: int) -> list[float]:
    """Return the CPU microseconds per request: viewed, routed, sent, three reports, ended."""
    took, clock = [], time.thread_time_ns
    open_: list[int] = []
    for number in range(count):
        prompt, priority = prompts[number % len(prompts)], (Priority.LS, Priority.BE)[number % 2]
        begin = clock()
        request = router.view(priority, prompt, 100)
        engine = router.choose(request, number / 1000)
        assert engine is not None
        router.sent(number, request, engine)
        for tokens in (1, 2, 3):
            router.heard(number, tokens, priority)
        open_.append(number)
        if len(open_) > 200:
            router.left(open_.pop(0))
        took.append((clock() - begin) / 1000)
    return took


def router(quick: bool, seed: int) -> dict[str, Any]:
    """Measure a router's cost of one request, with four engines and 200 open requests."""
    rng = random.Random(seed)
    heads = [[rng.randrange(8, 50000) for _ in range(2048)] for _ in range(8)]
    found: dict[str, Any] = {}
    for length in (200, 4096):
        prompts = [
            [*rng.choice(heads), *(rng.randrange(8, 50000) for _ in range(length))][:length]
            for _ in range(64)
        ]
        for name in ("round-robin", "least", "class", "length", "prefix"):
            made = Router(load_route(name))
            for number in range(4):
                made.up(f"engine-{number}", kept_tokens=65536)
            took = cost_of(made, prompts, 2000 if quick else 20000)
            found[f"{name}, prompts of {length}"] = {
                f"p{p}_us": round(percentile(took, p), 1) for p in (50, 99)
            }
    return found


def grown(route: str, engines: int, count: int, seed: int) -> Router:
    """Return a router that had so many requests; the last tenth is open."""
    rng = random.Random(seed)
    made = Router(load_route(route))
    for number in range(engines):
        costs = RouteCosts(1e-4 * rng.uniform(0.5, 2))
        made.up(f"engine-{number}", costs=costs, kept_tokens=65536)
    for number in range(count):
        priority = (Priority.LS, Priority.BE)[number % 2]
        request = made.view(priority, range(rng.randrange(10, 4000)), 100)
        engine = made.choose(request, 0.0)
        assert engine is not None
        made.sent(number, request, engine)
        if number >= count // 10:
            made.left(number - count // 10)
    return made


def scale(quick: bool, seed: int) -> dict[str, Any]:
    """Measure the time of a router as engines and requests grow; a tenth of them is open."""
    rows = []
    for engines, count in ((10, 10**4), (100, 10**5), (1000, 10**5), (1000, 10**6)):
        if quick and engines * count > 10**7:
            continue
        begin = time.process_time()
        made = grown("class", engines, count, seed)
        took_s = time.process_time() - begin
        sent = [engine.num_sent for engine in made.engines]
        rows.append(
            {
                "engines": engines, "requests": count, "open": made.num_open,
                "us_per_request": round(1e6 * took_s / count, 1),
                "sent_least_most": [min(sent), max(sent)],
            }
        )  # fmt: skip
        del made
    return {"rows": rows}


def state(quick: bool, seed: int) -> dict[str, Any]:
    """Measure the bytes of a router, by engines and by open requests; a tenth of them is open."""
    sizes = [
        *(("class", engines, 0) for engines in (10, 100, 1000)),
        *(("class", 10, count) for count in (10**3, 10**4, 10**5)),
        *(("prefix", 10, count) for count in (10**3, 10**4)),
    ]
    rows = [
        {"route": route, "engines": engines, "requests": count, **held(route, engines, count, seed)}
        for route, engines, count in sizes
        if not quick or engines + count <= 10**4
    ]
    return {"rows": rows}


def held(route: str, engines: int, count: int, seed: int) -> dict[str, int]:
    """Return the bytes that a router has allocated and not freed."""
    tracemalloc.start()
    try:
        made = grown(route, engines, count, seed)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        return {"open": made.num_open, "bytes": size}
    finally:
        tracemalloc.stop()


def front_end(quick: bool, seed: int) -> dict[str, Any]:
    """Measure the memory of the HTTP process in front of two engines, after some answers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [str(folder / f"engine-{i}") for i in range(2)]
        for path in paths:
            stack.enter_context(QLLMEngine.from_pretrained("tiny", listen=path, **TINY))
        there = ("--role", "frontend", "--engine", ",".join(paths))
        server = stack.enter_context(serving(*there))
        body = {"model": "tiny", "prompt": "def f(", "max_tokens": 8, "temperature": 0}
        for _ in range(4 if quick else 64):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        engines = httpx.get(f"{server.url}/health").json()["engines"]
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        return {
            "rss_mb": round(resident_kb(server.pid) / 1024, 1), "torch": "libtorch" in maps,
            "sent": [engine["sent"] for engine in engines],
        }  # fmt: skip


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process in KB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


ROWS = {
    "killed": killed,
    "pools": pools,
    "prefix": prefix,
    "router": router,
    "scale": scale,
    "state": state,
    "front_end": front_end,
    "rebalance": rebalance,
    "rebalance_bound": bound,
    "rebalance_sim": simulated,
}


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_file, help="a document whose other rows are kept")
    args = parser.parse_args()
    document: dict[str, Any] = {"bench": "fleet", "rows": {}}
    if args.out is not None and args.out.exists():
        document = json.loads(args.out.read_text())
    for name in args.rows:
        begin = time.monotonic()
        found = ROWS[name](args.quick, args.seed)
        took = {"seconds": round(time.monotonic() - begin, 1), "seed": args.seed}
        document["rows"][name] = {**found, **took, "quick": args.quick, "machine": machine()}
        print(json.dumps({name: found}, indent=1), flush=True)
        if args.out is not None:
            document = with_lines(document, lines_of(document))
            write_result(args.out, json.dumps(document, indent=1))
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
