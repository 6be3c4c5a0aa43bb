"""The value of each idea: every policy on one engine, live and in the simulator.

    python -m bench.policies.ablation                       all rows, about half an hour
    python -m bench.policies.ablation --quick               the same in three minutes: to debug
    python -m bench.policies.ablation --live --rows S2,S7   some of them
    python -m bench.policies.ablation --rows S2 --settings qllm2,chunked-priority:step_tokens=512

A row that fails is reported, and the others run. Results are merged into
`bench/results/policies-cpu.json` row by row, so a part can be run again; every single run is kept
in `.benchmarks/policies/`. The very last line of stdout is one JSON document.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import (
    RESULTS,
    ROOT,
    Table,
    busy_cores,
    machine,
    plain,
    result_file,
    without_paths,
    write_result,
)
from bench.policies.equals import CLIENTS, FREE, REACH, equals_row
from bench.policies.fronts import Windows, front_row, points_of, stall_lines
from bench.policies.isolation import HELD, HELD_TARGET, Evicted, decode_row, held_row
from bench.policies.live import Bench, Timing
from bench.policies.loads import loads_row
from bench.policies.simulated import sim_row
from qllm.plugins import load_policy
from qllm.workloads.capacity import Capacity

FILE = RESULTS / "policies-cpu.json"
RUNS = ROOT / ".benchmarks" / "policies"
LIVE = ("loads", "decode", "equals", "S5", "S6", "S2", "S3", "S7")
ROWS = (*LIVE, "sim")
ENGINE = {"max_num_seqs": 16, "max_step_tokens": 4096}
"""Settings of the engine for every policy."""
LOADS_TARGET = {"prefill_only": 3.0, "co_run": 1.3}
Row = Callable[[Table, "Run"], dict[str, Any]]


class Run:
    """Values that the rows of one call share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.quick: bool = args.quick
        self.seeds: list[int] = args.seeds
        self._bench: Bench | None = None
        self._capacity: Capacity | None = None

    @property
    def bench(self) -> Bench:
        """Return the model, loaded on first use: simulated rows need none."""
        if self._bench is None:
            self._bench = Bench.load(self.args.size, **ENGINE)
        return self._bench

    @property
    def capacity(self) -> Capacity:
        """Return the capacity, measured on first use."""
        if self._capacity is None:
            self._capacity = self.bench.capacity()
        return self._capacity

    @property
    def timing(self) -> Timing:
        """Return the lengths of a window of S2, S3 and S7."""
        if self.quick:
            return Timing(warmup_s=0.3, window_s=1.5, drain_s=0.2)
        return Timing(warmup_s=2.0, window_s=self.args.seconds, drain_s=1.0)

    @property
    def windows(self) -> Windows:
        """Return the windows for the rows of policies."""
        return Windows(
            self.bench, self.capacity, self.timing, self.seeds, RUNS, self.args.settings, self.quick
        )


# rows


def row_loads(table: Table, run: Run) -> dict[str, Any]:
    """Measure expert bytes per request."""
    found = loads_row(run.bench, quick=run.quick)
    for name, ratio in found["ratios"].items():
        target = LOADS_TARGET["co_run" if "co_run" in name else "prefill_only"]
        table.add(
            f"expert bytes, chunked (256) / layered, {name}",
            "-" if ratio is None else f"{ratio:.2f}",
            f">= {target}",
            None if ratio is None else ratio >= target,
        )
    for name in found["missing"]:
        table.add(f"  {name}", "not installed")
    return found


def row_decode(table: Table, run: Run) -> dict[str, Any]:
    """Measure decode next to a prefill."""
    found = decode_row(run.bench, quick=run.quick)
    for name, entry in found["settings"].items():
        if entry.get("missing"):
            table.add(f"  {name}", "not installed")
            continue
        p99, allowed = entry["tbt_p99_ms"], entry["allowed_ms"]
        table.add(
            f"LS decode TBT p99 beside a {found['prompt_tokens']}-token BE prefill, {name}, ms",
            p99.text(0),
            f"<= {allowed:.0f} ({entry['allowed']})",
            p99.value <= allowed,
        )
        table.add(
            "  solo p50 / p99; beside p50; max; prefill took",
            f"{entry['solo_tbt_p50_ms']:.0f} / {entry['solo_tbt_p99_ms']:.0f}; "
            f"{entry['tbt_p50_ms']:.0f}; {entry['tbt_max_ms']:.0f}; {entry['prefill_ms']:.0f} ms",
        )
    return found


def row_equals(table: Table, run: Run) -> dict[str, Any]:
    """Measure a stream next to prompts of its own class."""
    found = equals_row(run.bench, quick=run.quick)
    declared_ms = load_policy("qllm2").max_prompt_gap_ms
    for side in found["sides"]:
        name, target_ms = side["setting"], side["target_ms"]
        what = name if target_ms is None else f"{name}, TPOT target {target_ms:g} ms"
        bound_ms = (declared_ms if target_ms is None else target_ms) if name == "qllm2" else None
        allowed_ms = None if bound_ms is None else bound_ms * REACH["gap"]
        table.add(
            f"gap of an LS stream beside {CLIENTS} LS prompts of {found['prompt_tokens']} tokens, "
            f"p50 / max, {what}, ms",
            f"{side['p50_ms']:.0f} / {side['max_ms']:.0f}",
            "" if allowed_ms is None else f"p50 <= {allowed_ms:.0f}",
            None if allowed_ms is None else side["p50_ms"] <= allowed_ms,
        )
        is_ours = name == "qllm2"
        table.add(
            f"  its prompts' tokens/s over {FREE}",
            f"{side['over_whole']:.2f} ({side['rate']:.0f}/s)",
            f">= {REACH['rate']}" if is_ours and target_ms is None else "",
            side["over_whole"] >= REACH["rate"] if is_ours and target_ms is None else None,
            energy=side["energy"],
        )
    return found


def _held(name: str) -> Row:
    def row(table: Table, run: Run) -> dict[str, Any]:
        timing = run.timing
        if not run.quick:
            timing = Timing(warmup_s=3.0, window_s=8.0, drain_s=1.0)
        found = held_row(run.bench, name, run.capacity, run.seeds, timing)
        scarce = ", ".join(f"{key}={value}" for key, value in HELD[name].items())
        for setting, ratio in found["over_alone"].items():
            own = setting == "qllm2"
            table.add(
                f"{name} ({scarce}): LS TTFT p99 / LS alone, {setting}",
                ratio.text(),
                f"<= {HELD_TARGET[name]}" if own else "",
                ratio.value <= HELD_TARGET[name] if own else None,
            )
        for entry in found["runs"]:
            entry.pop("samples", None)
        for setting in found["over_alone"]:
            table.add(*Evicted.of(found["runs"], setting).line(name, setting))
        return found

    return row


def _front(name: str) -> Row:
    def row(table: Table, run: Run) -> dict[str, Any]:
        return front_row(table, run.windows, name)

    return row


def row_stall(table: Table, run: Run) -> dict[str, Any]:
    """Measure S7: latency as in the other rows, and the worst stall over the declared bound."""
    found = front_row(table, run.windows, "S7")
    stall_lines(table, found)
    return found


def row_sim(table: Table, run: Run) -> dict[str, Any]:
    """Measure every installed policy in the simulator."""
    return sim_row(table, seeds=run.seeds, quick=run.quick)


MAKERS: dict[str, Row] = {
    "loads": row_loads,
    "decode": row_decode,
    "equals": row_equals,
    "S5": _held("S5"),
    "S6": _held("S6"),
    "S2": _front("S2"),
    "S3": _front("S3"),
    "S7": row_stall,
    "sim": row_sim,
}


# the run


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help=f"of {', '.join(ROWS)}; default all")
    parser.add_argument("--live", action="store_true", help="only the rows on the real engine")
    parser.add_argument("--sim", action="store_true", help="only the simulated rows")
    parser.add_argument("--settings", default="", help="of S2, S3 and S7, with commas between")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window of S2, S3, S7")
    parser.add_argument("--size", default="300m", help="of the model: 300m or 1m")
    parser.add_argument(
        "--out", type=result_file, default=str(FILE), help="results that this run is merged into"
    )
    parser.add_argument("--quick", action="store_true", help="tiny windows, one seed: to debug")
    args = parser.parse_args()
    chosen = (
        LIVE if args.live and not args.sim else ("sim",) if args.sim and not args.live else ROWS
    )
    args.rows = tuple(args.rows.split(",")) if args.rows else chosen
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    args.seeds = [int(s) for s in args.seeds.split(",")][: 1 if args.quick else None]
    args.settings = [s for s in args.settings.split(",") if s]
    return args


def measure(run: Run, name: str) -> dict[str, Any]:
    """Measure one row; an error is part of the result."""
    table = Table()
    begin, before = time.monotonic(), busy_cores()
    entry: dict[str, Any] = {}
    try:
        entry["result"] = MAKERS[name](table, run)
    except Exception as error:  # noqa: BLE001 - the other rows must run
        entry["error"] = without_paths("".join(traceback.format_exception(error))[-2000:])
        table.add(f"{name} FAILED", f"{type(error).__name__}: {error}"[:200], "", False)
    took, after = time.monotonic() - begin, busy_cores()
    foreign = (after[0] - before[0] - (after[1] - before[1])) / took
    table.add(f"  ({name}: {took:.0f} s, other processes used {foreign:.2f} cores)", "")
    about = machine()
    return {
        **entry,
        "lines": [line._asdict() for line in table.lines],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": about["commit"],
        "quick": run.quick,
        "seeds": run.seeds,
        "capacity": None if run._capacity is None else vars_of(run.capacity),
        "took_s": took,
        "foreign_cores": foreign,
    }


def vars_of(capacity: Capacity) -> dict[str, float]:
    """Return the fields of a capacity."""
    return {name: getattr(capacity, name) for name in capacity.__dataclass_fields__}


def merge(path: Path, rows: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Merge rows into existing results; other rows stay."""
    document: dict[str, Any] = {"bench": "policies", "rows": {}}
    if path.exists():
        document = json.loads(path.read_text())
    document |= {"machine": machine(), "config": config}
    document["rows"] = {
        name: rows.get(name) or document["rows"][name]
        for name in ROWS
        if name in rows or name in document["rows"]
    }
    document["losing"] = [
        f"{line['name']}: {line['value']} (target {line['target']})"
        for row in document["rows"].values()
        for line in row["lines"]
        if line["reached"] is False
    ]
    document = plain(document)
    write_result(path, json.dumps(document, indent=1))
    return document


def main() -> None:
    """Measure row by row, merge each at once, print the JSON line."""
    warnings.simplefilter("ignore")
    args = arguments()
    torch.set_num_threads(1)
    run = Run(args)
    config = {
        "model": f"qllm.measure.random_moe {args.size}, seed 0, bfloat16",
        "engine": ENGINE,
        "threads": 1,
        "seconds": run.timing.window_s,
        "quick": args.quick,
    }
    document: dict[str, Any] = {}
    for name in (r for r in ROWS if r in args.rows):
        print(f"\n== {name}", flush=True)
        document = merge(Path(args.out), {name: measure(run, name)}, config)
    for name, points in points_of(document).items():
        print(f"{name}: {len(points)} points")
    print(json.dumps(document, separators=(",", ":")))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
