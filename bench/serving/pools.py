"""Pools of PLA-Serve, live: does a pool for long prompts shorten the wait of short ones?

    round-robin   each of two engines gets every second prompt
    length        long prompts go to the engines of their pool, and the pools change with pressure

Two engine processes with one thread each stand behind one front end in this process. Both routes
get the same requests: four of five prompts are short, and one token is asked for. Routes alternate,
and the engines stay up. `bench.serving.fleet` has the same comparison with simulated engines.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import Table, estimate, machine, paired, plain, quantile, result_file
from bench.energy import Run, answered_tokens, metered
from qllm import QLLMEngine, SamplingParams
from qllm.measure.random_moe import make_random_moe
from qllm.measure.variants import KV_SIZES

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
ROUTES = ("round-robin", "length")
SHORT, LONG, SHORT_SHARE = (16, 256), (1024, 4096), 0.8
MEAN = SHORT_SHARE * sum(SHORT) / 2 + (1 - SHORT_SHARE) * sum(LONG) / 2
"""Mean tokens of a prompt."""
MOST = {"p90": 0.7, "missed": 0.72}
"""Targets of PLA-Serve's P10 and P11: most of `length` over `round-robin`."""
LEAST_RATE = 0.95
"""Least prompt tokens/s of `length` over `round-robin`, so that short prompts gain at no cost."""
VOCABULARY, SEED = 240, 1


class Sizes(NamedTuple):
    """The amount of work that is measured."""

    size: str
    """Model, of `qllm.measure.random_moe`."""
    count: int
    """Prompts per round."""
    rounds: int
    loads: tuple[float, ...]
    """Parts of the rate that both engines together compute."""
    divisor: int = 1
    """Divisor of the lengths of prompts."""


FULL = Sizes("300m", 300, 3, (0.75, 0.85))
QUICK = Sizes("1m", 12, 1, (0.75,), divisor=8)


class Prompt(NamedTuple):
    """A prompt and its time."""

    at_s: float
    token_ids: list[int]
    is_short: bool


def prompts_of(sizes: Sizes, per_s: float, seed: int) -> list[Prompt]:
    """Return short and long prompts, a Poisson process.

    Args:
        sizes: Sizes of the bench.
        per_s: Prompts per second.
        seed: Seed of times, lengths and tokens.
    """
    rng, at_s, out = random.Random(seed), 0.0, list[Prompt]()
    for _ in range(sizes.count):
        at_s += rng.expovariate(per_s)
        is_short = rng.random() < SHORT_SHARE
        num = max(1, rng.randint(*(SHORT if is_short else LONG)) // sizes.divisor)
        out.append(Prompt(at_s, [rng.randrange(8, VOCABULARY) for _ in range(num)], is_short))
    return out


@contextmanager
def two_engines(size: str) -> Iterator[tuple[str, QLLMEngine]]:
    """Start two engines, a process and a thread each; yield their addresses and the first."""
    model = make_random_moe(size=size, seed=0)
    how: dict[str, Any] = {**KV_SIZES, "max_kv_tokens": 32_768, "prefix_cache": False}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [str(folder / f"engine-{i}") for i in range(2)]
        engines = [
            stack.enter_context(
                QLLMEngine.from_pretrained(
                    model, listen=path, policy="fcfs", threads=1, conformance=False, **how
                )
            )
            for path in paths
        ]
        yield ",".join(paths), engines[0]


def prompt_s(engine: QLLMEngine, num: int) -> float:
    """Return the seconds of a prompt of this length, alone on an engine; the median of three."""
    times = []
    for seed in range(4):
        rng = random.Random(seed)
        ids = [rng.randrange(8, VOCABULARY) for _ in range(num)]
        begin = time.monotonic()
        engine.submit(ids, "LS", 1, sampling=GREEDY).result(600)
        times.append(time.monotonic() - begin)
    return float(np.median(times[1:]))


class Served(NamedTuple):
    """The results of a route in one round."""

    short_ms: list[float]
    """TTFTs of short prompts, from when they were due."""
    long_ms: list[float]
    tokens_per_s: float
    """Prompt tokens over the time from the first arrival to the last answer."""
    sent: list[int]
    """Prompts by engine."""


def serve(there: str, route: str, prompts: Sequence[Prompt], energy: list[Run]) -> Served:
    """Send prompts at their times by a route, and wait for all answers."""
    with QLLMEngine.connect(there, route=route, rebalance_s=0) as front, metered(energy) as tokens:
        start, handles, late_ms = time.monotonic(), [], []
        for prompt in prompts:
            time.sleep(max(0.0, start + prompt.at_s - time.monotonic()))
            late_ms.append(1e3 * (time.monotonic() - start - prompt.at_s))
            handles.append(front.submit(prompt.token_ids, "LS", 1, sampling=GREEDY))
        results = [handle.result(600) for handle in handles]
        seconds = time.monotonic() - start - prompts[0].at_s
        tokens.append(answered_tokens(results))
        assert front.fleet is not None
        sent = [engine["sent"] for engine in front.fleet.engines()]
    ttft: dict[bool, list[float]] = {True: [], False: []}
    for prompt, late, result in zip(prompts, late_ms, results, strict=True):
        assert result.metrics.ttft_ms is not None  # it has a token
        ttft[prompt.is_short].append(late + result.metrics.ttft_ms)
    rate = sum(len(prompt.token_ids) for prompt in prompts) / seconds
    return Served(ttft[True], ttft[False], rate, sent)


def measure(sizes: Sizes, table: Table) -> dict[str, Any]:
    """Serve every load by both routes in turns, and add the rows."""
    out: dict[str, Any] = {}
    with two_engines(sizes.size) as (there, engine):
        one_s = prompt_s(engine, max(1, sum(LONG) // 2 // sizes.divisor))
        per_s = sum(LONG) / (one_s * MEAN)  # of two engines, each with its own thread
        target_ms = 1e3 * one_s
        for load in sizes.loads:
            found: dict[str, list[Served]] = {route: [] for route in ROUTES}
            energy: dict[str, list[Run]] = {route: [] for route in ROUTES}
            for number in range(sizes.rounds):
                prompts = prompts_of(sizes, load * per_s, SEED + number)
                for route in ROUTES[:: -1 if number % 2 else 1]:
                    found[route].append(serve(there, route, prompts, energy[route]))
            out[f"load {load:g}"] = add_rows(table, load, found, energy, target_ms)
    return {"prompts_per_s": per_s, "target_ms": target_ms, **out}


def add_rows(
    table: Table,
    load: float,
    found: dict[str, list[Served]],
    energy: dict[str, list[Run]],
    target_ms: float,
) -> dict[str, Any]:
    """Add the rows of a load; return its numbers.

    Args:
        table: Table that gets the rows.
        load: Load of the rows.
        found: Rounds of each route.
        energy: Energy of each route.
        target_ms: TTFT target of short prompts.
    """
    base, mine = (found[route] for route in ROUTES)
    what = f"two engines, load {load:g}, length / round-robin: "
    p90 = estimate([s.short_ms for s in mine], quantile(90), over=[s.short_ms for s in base])
    missed = {
        route: sum(ms > target_ms for s in of for ms in s.short_ms) for route, of in found.items()
    }
    if p90 is not None:
        reached = p90.value <= MOST["p90"]
        table.add(f"P10 {what}short TTFT p90", p90.text(), f"<= {MOST['p90']}", reached)
    name, target = f"P11 {what}short prompts over {target_ms:,.0f} ms", f"<= {MOST['missed']}"
    counts = f"{missed['length']} / {missed['round-robin']}"
    if missed["round-robin"]:
        part = missed["length"] / missed["round-robin"]
        table.add(name, f"{part:.2f} ({counts})", target, part <= MOST["missed"])
    else:
        table.add(name, f"round-robin missed none ({counts})")
    rate = paired([a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, base, strict=True)])
    table.add(
        f"{what}prompt tokens/s", rate.text(), f">= {LEAST_RATE}", rate.value >= LEAST_RATE,
        energy=energy["length"],
    )  # fmt: skip
    for route, of in found.items():
        ms = [np.percentile([x for s in of for x in s.long_ms] or [np.nan], 90)]
        sent = [sum(each) for each in zip(*(s.sent for s in of), strict=True)]
        text = f"{ms[0]:,.0f} ms; {' + '.join(map(str, sent))}"
        table.add(f"  {route}, load {load:g}: long TTFT p90; prompts by engine", text)
    return {
        "p90": p90,
        "missed": missed,
        "rate": rate,
        "energy": energy,
        "rounds": {route: [s._asdict() for s in of] for route, of in found.items()},
    }


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    table, sizes = Table(), QUICK if args.quick else FULL
    rows = measure(sizes, table)
    config = {"sizes": sizes._asdict(), "short": SHORT, "long": LONG, "share": SHORT_SHARE}
    result = {"bench": "pools", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
