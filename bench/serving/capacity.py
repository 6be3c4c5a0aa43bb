"""The capacity of two servers, each at its own limit: closed loops, alternated.

    python -m bench.serving.capacity                     ours and vLLM, single stream, LS and BE
    python -m bench.serving.capacity --rounds 1 --peers qllm,vllm-512

Both servers stay up, with the same weights (bfloat16) and all cores each; one is loaded at a time,
in turns. Four loads, each with a constant number of open requests:

    single   1 of 96 tokens in, 128 out
    prefill  1 of 2,048 in, 1 out, each a new prompt
    LS       48 of 96 in, 32 out
    BE       16 of 1,024-2,048 in, 128-256 out

The last line of stdout is one JSON document, also written to `bench/results/capacity-cpu.json`.
"""

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import RESULTS, ROOT, Table, machine, paired, plain, result_file
from bench.energy import Run, answered_tokens, metered
from bench.serving.servers import (
    PEERS,
    Place,
    free_port,
    installed,
    ours_command,
    platform,
    serving,
)
from qllm.measure.bench import corpus_of
from qllm.measure.random_moe import cache_dir, make_random_moe
from qllm.types import Priority, Slo
from qllm.workloads.client import saturate_http
from qllm.workloads.measure import Served, Window, class_report
from qllm.workloads.spec import Arrival

FILE = RESULTS / "capacity-cpu.json"


SEATS = ("--set", "max_num_seqs=64")
"""Setting of our server: the most requests in a step that any load keeps open. vLLM's default is
256."""


class Load(NamedTuple):
    """A number of requests that are open all the time."""

    priority: Priority
    concurrency: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    warmup_s: float
    seconds: float
    """Measured seconds, after the warm-up."""

    @property
    def stop_s(self) -> float:
        """Return the end in seconds."""
        return self.warmup_s + self.seconds

    def scaled(self, by: float) -> "Load":
        """Return the same load for a longer or shorter time."""
        return self._replace(warmup_s=self.warmup_s * by, seconds=self.seconds * by)


LOADS = {
    "single": Load(Priority.LS, 1, (96, 96), (128, 128), 3.0, 12.0),
    "prefill": Load(Priority.LS, 1, (2048, 2048), (1, 1), 4.0, 20.0),
    "LS": Load(Priority.LS, 48, (96, 96), (32, 32), 8.0, 25.0),
    "BE": Load(Priority.BE, 16, (1024, 2048), (128, 256), 20.0, 60.0),
}
TARGETS = {"single": 1.5, "prefill": 1.2, "LS": 1.2, "BE": 1.25}
"""Least ratio of ours over vLLM's."""
KINDS = {"single": "decode ", "prefill": "prompt "}
"""Kind of tokens that count for a load, if not all."""


def requests(load: Load, corpus: Sequence[int], seed: int) -> Iterator[Arrival]:
    """Yield requests without end; prompts begin at random places of the corpus."""
    rng = random.Random(seed)
    for number in itertools.count():
        length = rng.randint(*load.prompt)
        start = rng.randrange(len(corpus) - length)
        yield Arrival(
            at_s=0.0,
            name=f"{load.priority.name}-{number}",
            priority=load.priority,
            token_ids=tuple(corpus[start : start + length]),
            max_tokens=rng.randint(*load.output),
        )


def rates(load: Load, served: Sequence[Served]) -> dict[str, Any]:
    """Return the rates of the window; `value` is the one in the ratio."""
    window = Window(start_s=load.warmup_s, end_s=load.stop_s, stop_s=load.stop_s)
    found = class_report(served, window, Slo())
    errors = sorted({s.error for s in served if s.error})
    if errors:
        raise RuntimeError(f"requests failed: {errors[:3]}")
    value = found["output_tokens_per_s"]
    if load.output == (1, 1):
        value = 1000 * load.prompt[0] / found["ttft_ms"]["p50"]
    elif load.concurrency == 1:  # decode alone: TTFT is a separate number
        value = 1000 / found["tpot_ms"]["p50"]
    elif load.priority is Priority.BE:
        value += found["prefill_tokens_per_s"]
    return {
        "value": value,
        "output_tokens_per_s": found["output_tokens_per_s"],
        "prefill_tokens_per_s": found["prefill_tokens_per_s"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "tpot_p50_ms": found["tpot_ms"] and found["tpot_ms"]["p50"],
    }


Found = dict[str, dict[str, list[dict[str, Any]]]]
"""Runs by load and peer."""


def measure(args: argparse.Namespace) -> Found:
    """Start the servers and load them in turns."""
    from transformers import AutoTokenizer

    model = make_random_moe(size=args.size, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    corpus = corpus_of(tokenizer)
    found: Found = {what: {name: [] for name in args.peers} for what in args.loads}
    with ExitStack() as stack:
        servers = {}
        for name in args.peers:
            peer = PEERS[name]
            if name == "qllm":
                peer = replace(peer, command=ours_command(*SEATS))
            place = Place(installed(peer, args.cache), model, free_port(), args.threads)
            stack.enter_context(serving(peer, place, args.logs / f"capacity-{name}.log"))
            servers[name] = peer.server(place, tokenizer)
        for number, what in itertools.product(range(args.rounds), args.loads):
            load = LOADS[what].scaled(args.scale)
            for name in args.peers[:: -1 if number % 2 else 1]:
                source = requests(load, corpus, args.seed + number)
                energy = list[Run]()
                with metered(energy) as tokens:
                    served = saturate_http(servers[name], source, load.concurrency, load.stop_s)
                    tokens.append(answered_tokens(served))
                got = rates(load, served) | {"energy": energy}
                found[what][name].append(got)
                print(f"  round {number + 1}, {what}, {name}: {got['value']:.1f}", flush=True)
    return found


def energy_of(runs: Sequence[dict[str, Any]]) -> list[Run]:
    """Return the energy of all runs of a load."""
    return [one for run in runs for one in run["energy"]]


def tabulate(table: Table, found: Found) -> dict[str, Any]:
    """Add the lines; return the ratios."""
    ratios = {}
    for what, by_peer in found.items():
        ours = [r["value"] for r in by_peer["qllm"]]
        for name, runs in by_peer.items():
            out, prefill = (
                np.median([r[f"{kind}_tokens_per_s"] for r in runs])
                for kind in ("output", "prefill")
            )
            table.add(
                f"{what}, {name}: output + prefill tokens/s",
                f"{out:.0f} + {prefill:.0f}",
                energy=energy_of(runs),
            )
            if name == "qllm":
                continue
            ratio = paired([a / r["value"] for a, r in zip(ours, runs, strict=True)])
            ratios[f"{what}, qllm / {name}"] = ratio
            value = np.median([r["value"] for r in runs])
            table.add(
                f"{what}: {KINDS.get(what, '')}tokens/s qllm / {name}",
                f"{ratio.text()} ({np.median(ours):.0f} / {value:.0f})",
                f">= {TARGETS[what]}",
                ratio.value >= TARGETS[what],
                energy=energy_of(by_peer["qllm"]),
            )
    return ratios


def _platform(name: str, cache: Path) -> str | None:
    return platform(PEERS[name], installed(PEERS[name], cache))


def main() -> None:
    """Measure, print the table, then the JSON line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server outlives us
    args = arguments()
    args.logs.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    begin, table = time.time(), Table()
    found = measure(args)
    ratios = tabulate(table, found)
    config = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    platforms = {name: _platform(name, args.cache) for name in args.peers}
    for name, of in platforms.items():
        if of:
            table.add(f"{name}: vLLM's platform", of)
    document = plain(
        {
            "bench": "capacity",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
            "took_s": time.time() - begin,
            "machine": machine(),
            "config": {
                **config,
                "seats": " ".join(SEATS),
                "model": f"qllm.measure.random_moe {args.size}, seed 0, bfloat16",
            },
            "runs": found,
            "platforms": platforms,
            "ratios": ratios,
        }
    )
    table.finish(document, args.out)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="qllm,vllm", help="of `make bench-peers`; ours first")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of all durations")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", default="300m", help="of the model: 300m or 1m")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--logs", type=Path, default=ROOT / ".benchmarks" / "peers")
    parser.add_argument("--out", type=result_file, default=str(FILE))
    args = parser.parse_args()
    args.peers, args.loads = args.peers.split(","), args.loads.split(",")
    if unknown := set(args.peers) - set(PEERS) or set(args.loads) - set(LOADS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    main()
