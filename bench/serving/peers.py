"""The same trace against other servers and ours, in alternation: `make bench-peers`.

    python -m bench.serving.peers                                   all peers, four seeds
    python -m bench.serving.peers --peers qllm,vllm --seconds 20 --seeds 1
    python -m bench.serving.peers --trace trace.json                arrivals and lengths of a file

Same machine, same weights (bfloat16), same threads, greedy, fixed lengths, open loop. The first
peers also serve LS alone, to show what the machine can do. A peer that cannot be installed
or does not start is part of the result, with its error. The last line of stdout is one JSON
document, also written to `bench/results/peers-cpu.json`.
"""

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import (
    RESULTS,
    ROOT,
    Table,
    busy_cores,
    estimate,
    machine,
    plain,
    quantile,
    result_file,
    with_lines,
    without_paths,
    write_result,
)
from bench.energy import Run, answered_tokens, metered
from bench.serving.servers import (
    PEERS,
    VLLM_ARMS,
    InstallError,
    Peer,
    Place,
    free_port,
    installed,
    platform,
    serving,
)
from qllm.measure.bench import corpus_of
from qllm.measure.random_moe import cache_dir, make_random_moe
from qllm.types import Priority, Slo
from qllm.workloads.client import send_http
from qllm.workloads.files import read_requests
from qllm.workloads.measure import Served, Window, report
from qllm.workloads.mix import Mix, make_workload, only
from qllm.workloads.spec import Arrival
from qllm.workloads.tokens import with_tokens

FILE = RESULTS / "peers-cpu.json"
SLO = Slo(ttft_ms=500.0, tpot_ms=100.0)
ALONE = ("qllm", "vllm-512")
"""Peers that also serve LS alone."""
OURS = ("qllm", "qllm-slo")
TARGET = 8.0
"""Least LS TTFT p99 of vLLM, with its best settings for LS, over ours."""
BE_TARGET, BE_SLO = 1.1, 0.98
"""Least BE output tokens/s of ours over that vLLM's, while ours meets this share of LS targets."""
SLO_POINTS = 3.0
"""Most percentage points of LS SLO attainment that BE may cost."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it started."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == pid:  # its session: servers start their own
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Bench:
    """Values that the runs of one call share."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        self.model = make_random_moe(size=args.size, seed=0)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.corpus = corpus_of(self.tokenizer)
        end = args.warmup + args.seconds
        self.window = Window(start_s=args.warmup, end_s=end, stop_s=end + args.drain)

    def arrivals(self, seed: int) -> tuple[Arrival, ...]:
        """Return one seed of the mix, or of the trace file with other places in the corpus."""
        if self.args.trace:
            found = [r for r in read_requests(self.args.trace) if r.at_s < self.window.end_s]
            return with_tokens(found, self.corpus, seed)
        mix = Mix(
            seconds=self.window.end_s,
            seed=seed,
            ls_rate=self.args.ls_rate,
            ls_tail=0.0,
            ls_prompt=(64, 128),
            ls_output=(32, 32),
            be_burst=self.args.be_burst,
            be_rate=self.args.be_rate,
            be_prompt=(1024, 2048),
            be_output=(128, 256),
        )
        return make_workload(mix, self.corpus)

    def run(self, peer: Peer, home: Path, seed: int, alone: bool) -> dict[str, Any]:
        """Start a server, warm it up, send one seed, and stop it."""
        arrivals = self.arrivals(seed)
        if alone:
            arrivals = only(arrivals, Priority.LS)
        place = Place(home, self.model, free_port(), self.args.threads)
        server = peer.server(place, self.tokenizer)
        log = self.args.logs / f"{peer.name.replace(' ', '-')}.log"
        with serving(peer, place, log) as process:
            warm = [Arrival(**_fields(a) | {"at_s": 0.0, "max_tokens": 4}) for a in arrivals[:2]]
            first = send_http(server, warm, 1.0 if self.args.quick else 5.0)
            cpu, busy, own = cpu_s(process.pid), busy_cores()[0], time.process_time()
            begin = time.monotonic()
            energy = list[Run]()
            with metered(energy) as tokens:
                served = send_http(server, arrivals, self.window.stop_s)
                tokens.append(answered_tokens(served))
            took = time.monotonic() - begin
            cores = (cpu_s(process.pid) - cpu) / took
            client = (time.process_time() - own) / took
            other = (busy_cores()[0] - busy) / took - cores - client
        errors = sorted({s.error for s in (*first, *served) if s.error})
        return {
            **report(served, self.window, {Priority.LS: SLO}),
            "seed": seed,
            "platform": platform(peer, home),
            "server_cores": cores,
            "client_cores": client,
            "other_cores": other,
            "errors": errors[:3],
            "energy": energy,
            "samples": _samples(served, self.window),
        }


def _fields(arrival: Arrival) -> dict[str, Any]:
    return {name: getattr(arrival, name) for name in arrival.__dataclass_fields__}


def _samples(served: Sequence[Served], window: Window) -> dict[str, Any]:
    ls = [s for s in served if s.spec.priority <= Priority.LS and window.counts(s.spec)]
    return {
        "ttft_ms": [s.ttft_ms(window.stop_s) for s in ls],
        "tpot_ms": [t for s in ls if (t := s.tpot_ms) is not None],
        "met": sum(s.meets(SLO) for s in ls),
    }


def pooled(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one peer's numbers over its seeds."""
    samples = [r["samples"] for r in runs]
    count = sum(len(s["ttft_ms"]) for s in samples)
    out: dict[str, Any] = {"ls_requests": count}
    for p in (50, 90, 99):
        out[f"ls_ttft_p{p}_ms"] = estimate([s["ttft_ms"] for s in samples], quantile(p))
    for p in (50, 99):
        out[f"ls_tpot_p{p}_ms"] = estimate([s["tpot_ms"] for s in samples], quantile(p))
    out["ls_slo_attainment"] = sum(s["met"] for s in samples) / count if count else None
    out["ls_no_first_token"] = sum(r["LS"]["no_first_token"] for r in runs if "LS" in r)
    for name in ("prefill_tokens_per_s", "output_tokens_per_s"):
        rates = [r["BE"][name] for r in runs if "BE" in r]
        out[f"be_{name}"] = sum(rates) / len(rates) if rates else None
    out["energy"] = [one for r in runs for one in r["energy"]]
    out["platform"] = runs[0]["platform"]
    out["other_cores"] = max(r["other_cores"] for r in runs)
    out["errors"] = sorted({e for r in runs for e in r["errors"]})
    return out


Runs = dict[str, list[dict[str, Any]]]


def measure(
    bench: Bench, save: Callable[[Runs, dict[str, str]], None]
) -> tuple[Runs, dict[str, str]]:
    """Run every seed, peers in turns; report a peer that cannot run once.

    Args:
        bench: Values of this call.
        save: Callback with the results so far, after every run.
    """
    homes, failed = _install(bench.args)
    cases = [(name, name, False) for name in homes]
    if bench.args.alone:
        cases += [(f"LS alone, {name}", name, True) for name in ALONE if name in homes]
    runs: Runs = {}
    for i, seed in enumerate(bench.args.seeds):
        for label, name, alone in cases[i % len(cases) :] + cases[: i % len(cases)]:
            if label in failed:
                continue
            begin = time.monotonic()
            try:
                run = bench.run(PEERS[name], homes[name], seed, alone)
            except Exception as error:  # noqa: BLE001 - the other peers must run
                failed[label] = without_paths(f"{type(error).__name__}: {error}"[-700:])
            else:
                runs.setdefault(label, []).append(run)
            print(f"  seed {seed}, {label}: {time.monotonic() - begin:.0f} s", flush=True)
            save(runs, failed)
    return runs, failed


def tabulate(table: Table, runs: Runs, failed: dict[str, str]) -> dict[str, Any]:
    """Pool the runs and add their lines."""
    found = {label: pooled(rs) for label, rs in runs.items()}
    for label, entry in found.items():
        _lines(table, label, entry)
    for label, error in failed.items():
        table.add(f"{label} FAILED", error)
    _ratios(table, runs)
    return found


def _install(args: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Return environments by peer, and errors by peer."""
    homes: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for name in args.peers:
        try:
            homes[name] = installed(PEERS[name], args.cache)
        except InstallError as error:
            failed[name] = without_paths(f"not installed: {error}")
    return homes, failed


def _lines(table: Table, label: str, entry: dict[str, Any]) -> None:
    ttft = " / ".join(entry[f"ls_ttft_p{p}_ms"].text(0) for p in (50, 99))
    tpot = entry["ls_tpot_p99_ms"]
    table.add(
        f"{label}: LS TTFT p50 / p99; TPOT p99 ms; SLO",
        f"{ttft}; {'-' if tpot is None else tpot.text(0)}; {entry['ls_slo_attainment']:.1%}",
    )
    if entry["be_output_tokens_per_s"] is not None:
        table.add(
            f"  {label}: BE prefill + output tokens/s",
            f"{entry['be_prefill_tokens_per_s']:.0f} + {entry['be_output_tokens_per_s']:.0f}",
            energy=entry["energy"],
        )
    if entry["platform"] is not None:
        table.add(f"  {label}: vLLM's platform", entry["platform"])
    for error in entry["errors"]:
        table.add(f"  {label}: requests failed", error[:200])


def _ratios(table: Table, runs: Runs) -> None:
    """Add every other server against ours, with and without latency targets."""
    best = _best_vllm(runs)
    for name in OURS:
        if name not in runs:
            continue
        ours = [r["samples"]["ttft_ms"] for r in runs[name]]
        for label, rs in runs.items():
            if label in OURS or label.startswith("LS alone"):
                continue
            ratio = estimate([r["samples"]["ttft_ms"] for r in rs], quantile(99), over=ours)
            if ratio is None:
                continue
            table.add(
                f"LS TTFT p99 {label} / {name}",
                ratio.text(),
                f">= {TARGET}" if label == best else "",
                ratio.value >= TARGET if label == best else None,
            )
        if alone := runs.get("LS alone, qllm"):
            met, least = _attainment(runs[name]), _attainment(alone) - SLO_POINTS / 100
            table.add(f"LS SLO, {name}", f"{met:.1%}", f">= {least:.1%} (alone - 3)", met >= least)
        if best is not None:
            rates = [_be_output(runs[name]), _be_output(runs[best])]
            judged = name == "qllm-slo"  # without targets LS comes first, however little BE gets
            table.add(
                f"BE output tokens/s {name} / {best}",
                f"{rates[0] / rates[1]:.2f} ({rates[0]:.0f} / {rates[1]:.0f}), "
                f"SLO {_attainment(runs[name]):.1%}",
                f">= {BE_TARGET} at SLO >= {BE_SLO:.0%}" if judged else "",
                rates[0] >= BE_TARGET * rates[1] and _attainment(runs[name]) >= BE_SLO
                if judged
                else None,
                energy=[one for r in runs[name] for one in r["energy"]],
            )


def _best_vllm(runs: Runs) -> str | None:
    """Return the settings of vLLM with the lowest LS TTFT p99."""
    p99 = {
        label: quantile(99)(np.concatenate([r["samples"]["ttft_ms"] for r in rs]))
        for label, rs in runs.items()
        if label in VLLM_ARMS
    }
    return min(p99, key=p99.__getitem__, default=None)


def _attainment(runs: Sequence[dict[str, Any]]) -> float:
    met = sum(r["samples"]["met"] for r in runs)
    return float(met / sum(len(r["samples"]["ttft_ms"]) for r in runs))


def _be_output(runs: Sequence[dict[str, Any]]) -> float:
    return float(sum(r["BE"]["output_tokens_per_s"] for r in runs) / len(runs))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas between")
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one window")
    parser.add_argument("--warmup", type=float, default=8.0)
    parser.add_argument("--drain", type=float, default=5.0)
    parser.add_argument("--ls-rate", type=float, default=3.2)
    parser.add_argument("--be-burst", type=int, default=24)
    parser.add_argument("--be-rate", type=float, default=1.0)
    parser.add_argument(
        "--trace", type=Path, help="a trace file instead; every seed cuts other prompts"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", default="300m", help="of the model: 300m or 1m")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--logs", type=Path, default=ROOT / ".benchmarks" / "peers")
    parser.add_argument("--out", type=result_file, default=str(FILE))
    parser.add_argument(
        "--alone", action=argparse.BooleanOptionalAction, default=True, help="serve LS alone too"
    )
    parser.add_argument("--quick", action="store_true", help="one short seed: to debug")
    args = parser.parse_args()
    args.peers = [p for p in args.peers.split(",") if p]
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    args.seeds = [int(s) for s in args.seeds.split(",")]
    if args.quick:
        args.seeds, args.seconds, args.warmup, args.drain = args.seeds[:1], 8.0, 1.0, 1.0
    return args


def main() -> None:
    """Measure, print the table, then the JSON line."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends its servers too
    args = arguments()
    args.logs.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    begin, table = time.time(), Table()
    config = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    config |= {
        "model": f"qllm.measure.random_moe {args.size}, seed 0, bfloat16",
        "slo": SLO._asdict(),
    }

    def save(runs: Runs, failed: dict[str, str], **more: Any) -> dict[str, Any]:
        briefs = {k: [{**r, "samples": None} for r in rs] for k, rs in runs.items()}
        document: dict[str, Any] = plain(
            {
                "bench": "peers",
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
                "took_s": time.time() - begin,
                "machine": machine(),
                "config": config,
                "failed": failed,
                "runs": briefs,
                **more,
            }
        )
        document = with_lines(document, table.lines)
        write_result(args.out, json.dumps(document, indent=1))
        return document

    runs, failed = measure(Bench(args), save)
    document = save(runs, failed, peers=tabulate(table, runs, failed))
    print(json.dumps(document, separators=(",", ":")))


if __name__ == "__main__":
    main()
