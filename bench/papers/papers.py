"""The papers' own numbers: each claim, this machine's number, and the way of measuring it.

    python -m bench.papers.papers --estimate          how long each part takes, by measured rates
    python -m bench.papers.papers                     all parts: hours (bench/README.md)
    python -m bench.papers.papers --quick             the same parts with a tiny model: to debug
    python -m bench.papers.papers --parts layered,kv  some of them; the others stay in the results
    python -m bench.papers.papers --arms vllm-512 --install   install the peers

Every row has a target, and a value or the reason why it has none. After a part that failed, the
exit status is 1. Results are merged into `bench/results/papers.json` part by part. The very last
line of stdout is one JSON document.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import (
    RESULTS,
    busy_cores,
    machine,
    plain,
    result_file,
    without_paths,
    write_result,
)
from bench.papers.estimate import estimated, lines
from bench.papers.parts import CLAIMS, PARTS
from bench.papers.rows import FULL, QUICK, Row, World, losing
from bench.serving.servers import PEERS

FILE = RESULTS / "papers.json"
ENGINE = {"max_num_seqs": 16, "max_step_tokens": 4096}
"""Settings of the engine for every policy."""
ARMS = "vllm-512"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--seeds", default="", help="of the live windows, with commas between")
    parser.add_argument("--arms", default=ARMS, help=f"peers, of {', '.join(PEERS)}")
    parser.add_argument("--install", action="store_true", help="install peers that are not there")
    parser.add_argument(
        "--out", type=result_file, default=FILE, help="results that this run is merged into"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="only say how long the parts take, and end"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing is written")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    args.arms = [arm for arm in args.arms.split(",") if arm]
    for kind, asked, known in (("parts", args.parts, PARTS), ("arms", args.arms, PEERS)):
        if unknown := set(asked) - set(known):
            parser.error(f"unknown {kind}: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return args


def measure(world: World, name: str) -> dict[str, Any]:
    """Measure one part; an error becomes its row."""
    begin, before = time.monotonic(), busy_cores()
    entry: dict[str, Any] = {"error": None}
    try:
        rows = PARTS[name](world)
    except Exception as error:  # noqa: BLE001 - the other parts must run
        text = without_paths(f"{type(error).__name__}: {error}")
        entry["error"] = without_paths("".join(traceback.format_exception(error))[-2000:])
        rows = [Row.of(CLAIMS[name], None, "failed", text[:500])]
    took, after = time.monotonic() - begin, busy_cores()
    for row in rows:
        print(f"{row.claim}\n    paper: {row.paper}\n    here:  {row.here or row.why_not}")
        print(f"    asked: {row.target} ({row.way}; {row.reached})")
        print(f"    how:   {row.how}", flush=True)
    about = machine()
    return entry | {
        "rows": [row._asdict() for row in rows],
        "found": world.found,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": about["commit"],
        "took_s": took,
        "foreign_cores": (after[0] - before[0] - (after[1] - before[1])) / took,
    }


def merge(path: Path | None, parts: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Merge parts into existing results, if any; other parts stay."""
    document: dict[str, Any] = {"bench": "papers", "parts": {}}
    if path is not None and path.exists():
        document = json.loads(path.read_text())
    found = document["parts"] | parts
    document |= {"machine": machine(), "config": config}
    document["parts"] = {name: found[name] for name in PARTS if name in found}
    document["losing"] = losing(document["parts"])
    return dict(plain(document))


def main() -> int:
    """Measure part by part, print the table and the JSON line."""
    warnings.simplefilter("ignore")
    args = arguments()
    torch.set_num_threads(1)
    scale = QUICK if args.quick else FULL
    if args.seeds:
        scale = replace(scale, seeds=tuple(int(seed) for seed in args.seeds.split(",")))
    scale = replace(scale, arms=tuple(args.arms), install=args.install)
    config = {
        "model": f"qllm.measure.random_moe {scale.size}, seed 0, bfloat16",
        "engine": ENGINE,
        "threads": 1,
        "seeds": list(scale.seeds),
        "quick": args.quick,
    }
    world = World(scale=scale, settings=ENGINE)
    if args.estimate:
        print("\n".join(lines(world, args.parts)))
        return 0
    out, done = None if args.quick else result_file(args.out), {}
    document: dict[str, Any] = {}
    for name in args.parts:
        span = estimated(world, name)
        print(f"\n== {name}: {'simulated' if span is None else span.text()}", flush=True)
        world.found = {}
        done[name] = measure(world, name)
        document = merge(out, done, config)
        if out is not None:
            write_result(out, json.dumps(document, indent=1))
    print(json.dumps(document, separators=(",", ":")))
    return int(any(part["error"] for part in done.values()))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
