"""Every number that the engine claims, measured in one run on one machine.

    python -m bench.engine.engine                                    all rows, about half an hour
    python -m bench.engine.engine --rows mixed,decode --seeds 1,2    some of them
    python -m bench.engine.engine --trace trace.json                 arrivals of `loadgen.py trace`

The model is a Qwen3-MoE of about 300M random bfloat16 weights with untied embeddings. Ratios
compare runs that alternate in this one run. The output is a table; its last line is one JSON
document.
"""

# ruff: noqa: E402 - the number of threads and bench/engine/silent.py must be set before the imports

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine import silent

silent.install()

import numpy as np
import torch

from bench.common import (
    EMBED_STD,
    MODEL,
    Estimate,
    Job,
    Line,
    Table,
    busy_cores,
    estimate,
    load_model,
    machine,
    make_prompt,
    model_folder,
    plain,
    quantile,
    result_file,
)
from bench.engine.exactness import exactness_row
from bench.engine.mixed import (
    BACKLOG,
    BE_OUTPUT,
    BE_PROMPT,
    LS_OUTPUT,
    LS_PROMPT,
    Arrival,
    Load,
    Window,
    ls_capacity,
    make_load,
    run_window,
)
from bench.engine.overhead import added_row, boundary_row, cuts_row, latency_row
from bench.engine.throughput import decode_row, peer_row

ROWS = ("exact", "mixed", "latency", "added", "boundary", "peer", "decode")
LS_LOAD = 0.4
"""LS rate over the measured LS capacity."""
SLO_OVER_ALONE = 2.0
"""TPOT target of the setup `targets`, over the TPOT p99 of LS alone so far."""
SETUPS = {
    "alone": ("qllm2", False),  # first: its TPOT sets the target
    "qllm2": ("qllm2", True),
    "targets": ("qllm2", True),
    "priority": ("priority", True),
    "ls-first": ("ls-first", True),
    "fcfs": ("fcfs", True),
}
"""Policy of each setup, and True if BE floods it."""


def load_of_trace(path: str, seed: int) -> Load:
    """Return a load with the times and lengths of a trace, and random ids."""
    rng = np.random.default_rng([seed, 2])
    ls, be = [], []
    for r in sorted(json.loads(Path(path).read_text())["requests"], key=lambda r: r["t"]):
        job = Job(make_prompt(rng, int(r["prompt_tokens"])), int(r["max_tokens"]))
        if r["cls"] == "LS":
            ls.append(Arrival(float(r["t"]), job))
        else:
            be.append(job)
    return Load(seed, ls, be * 8)


# rows


def row_exact(table: Table, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens against solo runs and `generate` (rows 1 to 3)."""
    dtypes = ("bfloat16", "float32")
    count = 12 if not args.quick else 6
    found = exactness_row(lambda d: load_model(folder, d), folder, count, args.seeds[0], dtypes)
    for name, entry in found.items():
        own, n = entry["logprob_bit_equal"], entry["streams"]
        invariant = "batch-invariant" in name
        what = f"mixed = solo, tokens and 20 log-probs, {name}"
        table.add(
            what,
            f"{own}/{n} (tokens {entry['token_equal']}/{n})",
            "100 %" if invariant else "",
            own == n if invariant else None,
        )
        against = entry["generate"]
        first = max((d["margin"] for d in against["first_divergences"]), default=0.0)
        text = f"{against['token_equal']}/{n}, worst margin {first:.4f}"
        if "float32" in name:
            table.add(
                f"mixed = generate, {name}",
                text,
                "100 %" if invariant else "",
                against["token_equal"] == n if invariant else None,
            )
        else:
            noise = against["noise_max"]
            table.add(
                f"mixed = generate, {name}",
                text,
                f"< noise {noise:.4f}",
                against["unexplained"] == 0,
            )
    lost = sum(e["preempt_recomputed_tokens"] for e in found.values())
    preemptions = sum(e["preemptions"] for e in found.values())
    table.add("preempt_recomputed_tokens", f"{lost} in {preemptions} preemptions", "0", lost == 0)
    return found


def row_mixed(table: Table, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure LS next to a BE flood under each policy (rows 4 and 5)."""
    count = 24 if args.quick else 64
    capacity = float(
        np.median([ls_capacity(model, count, s) for s in (1, 2, 3)[: 1 + 2 * (not args.quick)]])
    )
    rate = LS_LOAD * capacity
    table.add("LS capacity; LS rate", f"{capacity:.2f}/s; {rate:.2f}/s")
    names = args.policies or list(SETUPS)
    windows: dict[str, list[Window]] = {name: [] for name in names}
    settings = {"max_step_tokens": args.max_step_tokens}
    for i, seed in enumerate(args.seeds):
        load = (
            load_of_trace(args.trace, seed) if args.trace else make_load(seed, rate, args.seconds)
        )
        for name in names[i % len(names) :] + names[: i % len(names)]:
            policy, flood = SETUPS[name]
            target = _tpot_target(windows) if name == "targets" else None
            window = run_window(
                model,
                policy,
                load,
                seconds=args.seconds,
                warmup_s=args.warmup,
                flood=flood,
                tpot_target_ms=target,
                **settings,
            )
            if args.keep:
                Path(args.keep).mkdir(parents=True, exist_ok=True)
                window.trace.write_jsonl(Path(args.keep) / f"{name}-{seed}.jsonl")
            window.trace = None
            windows[name].append(window)
    out: dict[str, Any] = {"ls_capacity_per_s": capacity, "ls_rate_per_s": rate, "setups": {}}
    for name, ws in windows.items():
        out["setups"][name] = entry = _setup(ws)
        table.add(
            f"  {name}: LS TTFT p50 / p99 ms",
            f"{_text(entry['ttft_p50_ms'], 0)} / {_text(entry['ttft_p99_ms'], 0)}",
        )
        table.add(
            f"  {name}: LS TPOT p50 / p99 ms",
            f"{_text(entry['tpot_p50_ms'], 0)} / {_text(entry['tpot_p99_ms'], 0)}",
        )
        if name != "alone":
            table.add(
                f"  {name}: BE prefill + output tokens/s; preemptions",
                f"{entry['be_prefill_per_s']:.0f} + {entry['be_output_per_s']:.1f}; "
                f"{entry['preemptions']}",
                energy=[run for w in ws for run in w.energy],
            )
    out.update(_mixed_ratios(table, windows))
    return out


def _tpot_target(windows: dict[str, list[Window]]) -> float:
    if not windows.get("alone"):
        raise SystemExit("the setup 'targets' takes its target from 'alone': name both, that first")
    tpot = np.concatenate([w.tpot for w in windows["alone"]])
    return SLO_OVER_ALONE * quantile(99)(tpot)


def _text(found: Estimate | None, digits: int = 2) -> str:
    return "-" if found is None else found.text(digits)


def _setup(ws: Sequence[Window]) -> dict[str, Any]:
    ttft, tpot = [w.ttft for w in ws], [w.tpot for w in ws]
    latency = [x for w in ws for x in w.preempt_latency]
    return {
        "ttft_p50_ms": estimate(ttft, quantile(50)),
        "ttft_p90_ms": estimate(ttft, quantile(90)),
        "ttft_p99_ms": estimate(ttft, quantile(99)),
        "tpot_p50_ms": estimate(tpot, quantile(50)),
        "tpot_p99_ms": estimate(tpot, quantile(99)),
        "be_prefill_per_s": float(np.median([w.be_prefill_per_s for w in ws])),
        "be_output_per_s": float(np.median([w.be_output_per_s for w in ws])),
        "preemptions": sum(w.preemptions for w in ws),
        "preempt_latency_p99_ms": float(np.percentile(latency, 99)) if latency else None,
        "max_be_stall_ms": max(w.max_stall for w in ws),
        "censored": sum(w.num_censored for w in ws),
        "num_ls": sum(w.num_ls for w in ws),
        "windows": [w.as_json() for w in ws],
    }


def _mixed_ratios(table: Table, windows: dict[str, list[Window]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    p99 = quantile(99)

    def ratio(
        key: str, what: str, top: str, bottom: str, field: str, limit: float, below: bool
    ) -> None:
        if not (windows.get(top) and windows.get(bottom)):
            return
        over = [getattr(w, field) for w in windows[bottom]]
        found = estimate([getattr(w, field) for w in windows[top]], p99, over=over)
        out[key] = found
        if found is not None:
            ok = found.value <= limit if below else found.value >= limit
            table.add(what, found.text(), f"{'<=' if below else '>='} {limit}", ok)

    ratio(
        "ttft_over_alone",
        "LS TTFT p99 with the flood / alone, qllm2",
        "qllm2",
        "alone",
        "ttft",
        1.05,
        True,
    )
    if ws := windows.get("targets"):
        over = [[t / w.tpot_target_ms for t in w.tpot] for w in ws]
        out["tpot_over_target"] = found = estimate(over, p99)
        if found is not None:
            what = f"LS TPOT p99 over a target of {SLO_OVER_ALONE:g}x its p99 alone"
            table.add(what, found.text(), "<= 1.0", found.value <= 1)
    for other in ("priority", "ls-first", "fcfs"):
        if windows.get(other) and windows.get("qllm2"):
            key, what = f"ttft_{other}_over_qllm2", f"LS TTFT p99 {other} / qllm2"
            ratio(key, what, other, "qllm2", "ttft", 1.8, False)
            if other != "priority":
                table.lines.append(Line(*table.lines.pop()[:2]))
    if windows.get("priority") and windows.get("qllm2"):
        work = {
            n: [w.be_prefill_per_s + w.be_output_per_s for w in windows[n]]
            for n in ("priority", "qllm2")
        }
        pairs = [a / b for a, b in zip(work["qllm2"], work["priority"], strict=True)]
        found = estimate([pairs], lambda v: float(np.median(v)))
        out["be_qllm2_over_priority"] = found
        assert found is not None
        table.add(
            "BE tokens/s qllm2 / priority",
            found.text(),
            ">= 0.95",
            found.value >= 0.95,
            energy=[run for w in windows["qllm2"] for run in w.energy],
        )
    ratio(
        "tpot_over_alone",
        "LS TPOT p99 with the flood / alone, qllm2",
        "qllm2",
        "alone",
        "tpot",
        1.5,
        True,
    )
    return out


def row_latency(table: Table, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time from an LS arrival until BE is parked (row 6)."""
    found = latency_row(model, args.seconds * (0.5 if args.quick else 2), args.seeds[0])
    bound = found["max_segment_ms"] + 1
    p99 = found["p99_ms"]
    if p99 is not None:
        table.add(
            f"LS arrival to BE parked, p99 ms (n={found['preemptions']})",
            p99.text(),
            f"<= {bound:g}",
            p99.value <= bound,
        )
        table.add(
            "  p50; max; longest segment ms",
            f"{found['p50_ms']:.2f}; {found['max_ms']:.2f}; "
            f"{found['longest_segment_ms']:.2f} {found['longest_segment_kind']}",
        )
    return found


def row_added(table: Table, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time added per preemption (row 7)."""
    found = added_row(model, 4 if args.quick else 4 * args.rounds, args.seeds[0])
    added = found["added_ms"]
    table.add("BE time added per preemption, ms", added.text(), "<= 1", added.value <= 1)
    table.add(
        "  cold caches; park; resume; (all between programs, the LS request's own part included)",
        "; ".join(f"{found[n].value:.2f}" for n in ("cold_ms", "park_ms", "resume_ms"))
        + f"; ({found['between_ms'].value:.2f})",
    )
    return found


def row_boundary(table: Table, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of boundaries and cuts without a preemption (row 8)."""
    found = boundary_row(model, 3 if args.quick else 8 * args.rounds, args.seeds[0])
    for name, limit in (("expert", 2.0), ("layer", 1.0), ("step", None)):
        both = found[name]["both"]
        ok = both.low <= 0 <= both.high or both.value <= 0 if limit is None else both.value <= limit
        target = "in the interval" if limit is None else f"<= {limit:g} %"
        table.add(f"CPU time lost to boundaries, {name}, %", both.text(), target, ok)
    found["cuts"] = cuts = cuts_row(model, 2 if args.quick else args.rounds, args.seeds[0])
    for num, lost in cuts.items():
        table.add(f"CPU time that the cuts add to a prefill of {num}, %", lost.text(1))
    return found


def row_peer(table: Table, model: Any, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure throughput against continuous batching of transformers (row 9)."""
    found = peer_row(model, folder, 1 if args.quick else max(3, args.rounds // 2), args.seeds[0])
    for name, entry in found.items():
        table.add(
            f"out tokens/CPU-s over transformers' CB, {name}",
            entry["ratio"].text(),
            f">= {entry['target']}",
            entry["ratio"].value >= entry["target"],
            energy=entry["energy"],
        )
        table.add(
            "  ours; theirs",
            f"{entry['ours_tokens_per_cpu_s']:.1f}; "
            f"{entry['peer_tokens_per_cpu_s']:.1f} tokens/CPU-s",
            energy=entry["energy"],
        )
    return found


def row_decode(table: Table, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a decode step against reading memory (row 10)."""
    found = decode_row(model, 3 if args.quick else args.rounds, args.seeds[0])
    ratio = found["ratio_cpu"]
    table.add(
        "decode step at batch 1 / one read of active weights (CPU)",
        ratio.text(),
        "<= 2.7",
        ratio.value <= 2.7,
    )
    table.add(
        "  step; floor ms; read by",
        f"{found['step_cpu_ms']:.1f}; {found['floor_ms']:.1f}; {found['read_by']} "
        f"{found['read_gb_per_s'][found['read_by']]:.1f} GB/s",
    )
    table.add("  the same, wall", found["ratio_wall"].text())
    return found


# the run


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seconds", type=float, default=30.0, help="of one mixed window")
    parser.add_argument("--warmup", type=float, default=6.0, help="seconds of flood before it")
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--policies", default="", help=f"of the mixed row: {', '.join(SETUPS)}")
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        default=384,
        help="of the mixed row, for every policy (sweep it)",
    )
    parser.add_argument("--rounds", type=int, default=10, help="pairs of the paired rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trace", help="a JSON trace of loadgen.py with the arrivals to use")
    parser.add_argument("--keep", help="a folder for the event traces of the mixed windows")
    parser.add_argument("--models", help="where the model's weights are kept (default /tmp)")
    parser.add_argument("--out", type=result_file, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="few repetitions: only to debug")
    args = parser.parse_args()
    args.seeds = [int(s) for s in args.seeds.split(",")]
    args.rows = args.rows.split(",")
    args.policies = [p for p in args.policies.split(",") if p]
    unknown = set(args.rows) - set(ROWS) | set(args.policies) - set(SETUPS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.threads != 1:
        parser.error("--threads must be 1: every target of these rows is for one thread")
    return args


def measure(table: Table, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen rows."""
    folder = model_folder(args.models)
    model = load_model(folder)
    found: dict[str, Any] = {}
    for row in ROWS:
        if row not in args.rows:
            continue
        begin, before = time.monotonic(), busy_cores()
        if row == "exact":
            found[row] = row_exact(table, folder, args)
        elif row == "peer":
            found[row] = row_peer(table, model, folder, args)
        else:
            found[row] = globals()[f"row_{row}"](table, model, args)
        took, after = time.monotonic() - begin, busy_cores()
        foreign = (after[0] - before[0] - (after[1] - before[1])) / took
        found[row] = {"result": found[row], "took_s": took, "foreign_cores": foreign}
        table.add(f"  ({row}: {took:.0f} s, other processes used {foreign:.2f} cores)", "")
    return found


def main() -> None:
    """Measure, print the table, then the JSON line."""
    warnings.simplefilter("ignore")
    args = arguments()
    torch.set_num_threads(1)
    table = Table()
    begin = time.time()
    found = measure(table, args)
    document = {
        "bench": "engine",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "took_s": time.time() - begin,
        "machine": machine(),
        "config": {
            "model": MODEL,
            "embed_std": EMBED_STD,
            "weights": "random, torch.manual_seed(0), bfloat16, experts and head untied",
            "threads": 1,
            "seeds": args.seeds,
            "seconds": args.seconds,
            "warmup_s": args.warmup,
            "rounds": args.rounds,
            "quick": args.quick,
            "trace": args.trace,
            "max_step_tokens": args.max_step_tokens,
            "workload": {
                "ls_prompt": LS_PROMPT,
                "ls_output": LS_OUTPUT,
                "be_prompt": BE_PROMPT,
                "be_output": BE_OUTPUT,
                "be_backlog": BACKLOG,
                "ls_load": LS_LOAD,
            },
        },
        "rows": found,
    }
    table.finish(plain(document), args.out)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
