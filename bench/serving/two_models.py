"""Two models on the same cores: LS of one beside BE of the other, with and without pressure.

    apart     the engines do not know of each other
    shared    the engines are in one group (`shared_cores`), as `qllm serve A --also B` starts them

Two processes share the cores of this machine, each with as many threads as there are cores. LS
requests arrive at random at one engine, one after the other. The other engine has BE requests all
the time. The arms alternate. The output is a table, then one JSON line.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.common import Table, machine, plain, result_file
from qllm import Handle, QLLMEngine, SamplingParams
from qllm.measure.random_moe import make_random_moe
from qllm.record.summary import percentile

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
ARMS = {"apart": None, "shared": f"bench-{os.getpid()}"}
MOST_TTFT = 0.5
LS_PROMPT, LS_TOKENS, BE_PROMPT, BE_TOKENS, NUM_BE = 96, 8, 512, 256, 8
VOCABULARY, RATE, SEED = 1_000, 1.0, 1


@contextmanager
def engines_of(folder: Path, group: str | None) -> Iterator[tuple[QLLMEngine, QLLMEngine]]:
    """Start the engine of LS and the engine of BE."""
    how: dict[str, Any] = {
        "threads": len(os.sched_getaffinity(0)),
        "conformance": False,
        "max_kv_tokens": 32_768,
    }
    with ExitStack() as stack:
        made = [
            stack.enter_context(QLLMEngine.from_pretrained(folder, shared_cores=group, **how))
            for _ in range(2)
        ]
        yield made[0], made[1]


def window(pair: tuple[QLLMEngine, QLLMEngine], seed: int, num_ls: int) -> dict[str, Any]:
    """Serve LS at one engine and BE at the other; return TTFTs of LS, and BE's part of the time."""
    of_ls, of_be = pair
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(tokens)]

    def more_be() -> Handle:
        return of_be.submit(prompt(BE_PROMPT), "BE", BE_TOKENS, sampling=GREEDY)

    open_be = [more_be() for _ in range(NUM_BE)]
    time.sleep(1.0)
    before_s = of_be.stats()["time"]["be_s"]
    began, ttft_ms = time.monotonic(), list[float]()
    for _ in range(num_ls):
        time.sleep(rng.expovariate(RATE))
        ls = of_ls.submit(prompt(LS_PROMPT), "LS", LS_TOKENS, sampling=GREEDY)
        ttft = ls.result(timeout=600).metrics.ttft_ms
        assert ttft is not None
        ttft_ms.append(ttft)
        open_be = [more_be() if handle.has_ended else handle for handle in open_be]
    be_s = of_be.stats()["time"]["be_s"] - before_s
    share = be_s / (time.monotonic() - began)
    for handle in open_be:
        handle.cancel()
    return {"ttft_ms": ttft_ms, "be_share": share}


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short window of each")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    rounds, num_ls, size = (1, 12, "1m") if args.quick else (3, 40, "300m")
    folder, table = make_random_moe(size=size), Table()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(engines_of(folder, group)) for name, group in ARMS.items()
        }
        for pair in pairs.values():
            window(pair, 0, 2)  # the first pass touches the weights
        for number in range(rounds):
            for name in sorted(ARMS, reverse=number % 2 == 1):
                found[name].append(window(pairs[name], SEED + number, num_ls))
    p99 = {n: percentile([t for w in ws for t in w["ttft_ms"]], 99) for n, ws in found.items()}
    p50 = {n: percentile([t for w in ws for t in w["ttft_ms"]], 50) for n, ws in found.items()}
    be = {n: statistics.mean(w["be_share"] for w in ws) for n, ws in found.items()}
    ratio = p99["shared"] / p99["apart"]
    text = f"{ratio:.2f} ({p99['shared']:.0f} / {p99['apart']:.0f} ms)"
    table.add("LS TTFT p99, with pressure / without", text, f"<= {MOST_TTFT}", ratio <= MOST_TTFT)
    text = f"{p50['shared'] / p50['apart']:.2f} ({p50['shared']:.0f} / {p50['apart']:.0f} ms)"
    table.add("LS TTFT p50", text)
    table.add("part of the time in which BE ran", f"{be['shared']:.2f} / {be['apart']:.2f}")
    config = {"size": size, "rate": RATE, "num_ls": num_ls, "rounds": rounds, "seed": SEED}
    rows = {"ttft_p99_ms": p99, "ttft_p50_ms": p50, "be_share": be}
    result = {"bench": "two_models", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
