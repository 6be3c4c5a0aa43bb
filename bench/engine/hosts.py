"""A model on two hosts with one thread each: is the time of gathers hidden behind computing?

    hidden      part of the time of gathers of a prompt that pieces hide (`docs/design/sharded.md`)
    prefill     speed with pieces over without; speed of two hosts over one
    decode      speed of two hosts over one, with one request and with several

The other host is a network namespace of this machine, with `qllm rank` in it. The link is a pair of
virtual cards that the kernel limits to a rate (tbf). It needs root, and the programs `ip` and `tc`.
Runs alternate. The model is the one of `bench.common`. The output is a table, then one JSON line.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.common import Table, load_model, machine, model_folder, paired, plain, result_file
from bench.engine.ranks import SEATS, STEPS, Bench
from qllm.kernels import cpu
from qllm.runner.cpu import cpu_runner
from qllm.sharded.runner import sharded_runner

TP, SEED, PROMPT, GBIT = 2, 1, 4096, 1.0
PORT = 29546
NEVER = 1 << 40
"""Rows of a piece that no op has: every op is one piece."""
LEAST_HIDDEN = 0.7
PAPER = "the paper's 1.28x: 8 x H100"


def run(*words: str) -> None:
    """Run a command of the system."""
    subprocess.run(words, check=True)


@contextmanager
def network(gbit: float) -> Iterator[tuple[str, str]]:
    """Make a network namespace behind a link; yield its name, and the address of its card."""
    number = os.getpid() % (1 << 14)
    name, ends = f"qllm-{number}", [f"10.47.{number >> 6}.{4 * (number & 63) + i}" for i in (1, 2)]
    cards = [f"{name}{end}" for end in "ab"]
    inside = ("ip", "netns", "exec", name)
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", cards[0], "type", "veth", "peer", cards[1], "netns", name)
        for card, end, before in zip(cards, ends, ((), inside), strict=True):
            run(*before, "ip", "addr", "add", f"{end}/30", "dev", card)
            run(*before, "ip", "link", "set", card, "up")
            limit = ("rate", f"{gbit}gbit", "burst", "256kb", "latency", "50ms")
            run(*before, "tc", "qdisc", "add", "dev", card, "root", "tbf", *limit)
        yield name, ends[1]
    finally:
        run("ip", "netns", "del", name)


@contextmanager
def host(folder: Path, gbit: float) -> Iterator[tuple[str, bytes]]:
    """Run `qllm rank` in a namespace; yield its address, and the secret."""
    with network(gbit) as (name, address), tempfile.TemporaryDirectory() as place:
        file = Path(place) / "secret"
        file.write_text(secrets.token_hex(32))
        listen = f"{address}:{PORT}"
        command = [sys.executable, "-m", "qllm.cli", "rank", str(folder), "--listen", listen]
        command += ["--threads", "1", "--secret-file", str(file)]
        inside = ("ip", "netns", "exec", name)
        with subprocess.Popen([*inside, *command], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if "listening" not in process.stdout.readline():
                    raise RuntimeError(f"`qllm rank` does not listen at {listen}")
                yield listen, file.read_text().strip().encode()
            finally:
                process.terminate()


def measured(
    folder: Path, listen: str, secret: bytes, rounds: int, prompt: int
) -> dict[str, dict[str, list[float]]]:
    """Run all arms in turns; return the values of each row by arm."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ranks = sharded_runner(load_model(folder), TP, hosts=[listen], secret=secret)
    whole = cpu_runner(load_model(folder))
    backend: Any = ranks.backend
    sweep, group = backend.compute.sweep, backend.group
    arms = {"pieces": sweep.piece_rows, "no pieces": NEVER, "one host": 0}
    benches = {"hosts": Bench(ranks, 1), "one host": Bench(whole, 1)}
    try:
        for bench in benches.values():
            bench.add_seats()
        for at in range(1000, 1000 * (rounds + 2), 1000):
            for arm, rows in arms.items():
                bench = benches.get(arm, benches["hosts"])
                sweep.piece_rows = rows
                waited, num_bytes = group.waited_s, group.gathered_bytes
                values = {"prefill": bench.prefill(at, prompt)}
                values |= {"waited": group.waited_s - waited}
                values |= {"bytes": float(group.gathered_bytes - num_bytes)}
                values |= {"decode of 1": bench.seconds(range(at, at + 1), STEPS)}
                values |= {f"decode of {SEATS}": bench.seconds(range(SEATS), STEPS)}
                bench.remove(at)
                for row, value in values.items():
                    if at > 1000:  # the first round warms up
                        found[row][arm].append(value)
    finally:
        ranks.close()
        whole.close()
    return found


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of a short prompt")
    parser.add_argument("--gbit", type=float, default=GBIT, help="rate of the link")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, table, prompt = model_folder(), Table(), 1024 if args.quick else PROMPT
    with host(folder, args.gbit) as (listen, secret):
        found = measured(folder, listen, secret, 1 if args.quick else 7, prompt)

    def ratios(row: str, top: str, over: str) -> list[float]:
        return [a / b for a, b in zip(found[row][top], found[row][over], strict=True)]

    hidden = paired([1 - x for x in ratios("waited", "pieces", "no pieces")])
    rows: dict[str, Any] = {"hidden": hidden}
    table.add(
        f"gathers of {prompt:,} tokens: part of their time that is hidden",
        hidden.text(),
        f">= {LEAST_HIDDEN}",
        hidden.value >= LEAST_HIDDEN,
    )
    speed = paired(ratios("prefill", "no pieces", "pieces"))
    rows["speed of pieces"] = speed
    table.add("prefill, speed with pieces / without", f"{speed.text()} ({PAPER})")
    for row in ("prefill", "decode of 1", f"decode of {SEATS}"):
        rows[row] = gain = paired(ratios(row, "one host", "pieces"))
        table.add(f"{row}, speed of 2 hosts / 1 host", gain.text())
    sizes = {"prompt": prompt, "seats": SEATS, "seed": SEED, "gbit": args.gbit}
    config = {"tp": TP, "threads": 1, "kernels": cpu.kind(), **sizes}
    result = {"bench": "hosts", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result | {"runs": plain(found)}, args.out)


if __name__ == "__main__":
    main()
