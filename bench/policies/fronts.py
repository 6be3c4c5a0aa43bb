"""Windows of S2, S3 and S7 under every policy, pooled over seeds, and ours against the rival."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Table, estimate, plain, quantile
from bench.policies.live import Bench, Setting, Timing, run_workload
from bench.policies.pareto import Match, Point, as_rows, match
from qllm.types import Priority
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload

RIVAL = "chunked-priority"
OURS = ("qllm2", "priority-layered")
SETTINGS = (
    "fcfs",
    "chunked-priority:step_tokens=128",
    "chunked-priority:step_tokens=256",
    "chunked-priority:step_tokens=512",
    "chunked-priority:step_tokens=1024",
    "qllm2",
    "qllm2:ride_frac=1",
    "qllm2:ride_frac=4",
    "layered",
    "priority-layered",
    "priority-layered:group_tokens=256",
)
FLOOD_SETTINGS = (
    "fcfs",
    "chunked-priority:step_tokens=256",
    "qllm2",
    "layered",
    "priority-layered",
)
SCALES: dict[str, dict[str, Any]] = {
    "S2": {"ls_scale": 1 / 8, "max_len": 8192},
    "S3": {"ls_scale": 1 / 8, "max_len": 8192},
    "S7": {"length_scale": 1 / 8},
}
"""Scales of the workloads. LS lengths are an eighth: otherwise this machine would answer two
requests per window."""
ALONE = {"LS alone": Priority.LS, "BE alone": Priority.BE}
TARGET_RATIO = 1.7


@dataclass(frozen=True, slots=True)
class Windows:
    """Values that the windows of one call share."""

    bench: Bench
    capacity: Capacity
    timing: Timing
    seeds: Sequence[int]
    runs: Path
    """Folder that gets a file of every run."""
    settings: Sequence[str]
    """Settings instead of the row's own, if any."""
    quick: bool

    def workload(self, name: str) -> Workload:
        """Return S2, S3 or S7 on this machine."""
        return Workload(
            name=name, seconds=self.timing.total_s, capacity=self.capacity, **SCALES[name]
        )

    def serve(self, name: str, label: str, seed: int) -> dict[str, Any]:
        """Serve one run and write its file; a failed run is a result too."""
        only = ALONE.get(label)
        setting = Setting("qllm2") if label in ALONE else Setting.parse(label)
        try:
            run = run_workload(
                self.bench, setting, self.workload(name), seed, self.timing, only=only
            )
        except Exception as error:  # noqa: BLE001 - the other policies must run
            run = {"error": f"{type(error).__name__}: {error}"[:500], "seed": seed}
        run |= {"label": label, "workload": name}
        self.runs.mkdir(parents=True, exist_ok=True)
        file = f"{name}-{seed}-{label.replace(' ', '-').replace(':', '-')}.json"
        (self.runs / file).write_text(json.dumps(plain(run)) + "\n")
        return run


def labels_of(name: str, settings: Sequence[str], quick: bool) -> list[str]:
    """Return the settings of a workload; a quick call takes one per policy."""
    chosen = list(settings or (FLOOD_SETTINGS if name == "S7" else SETTINGS))
    if quick and not settings:
        first = {Setting.parse(text).policy: text for text in reversed(chosen)}
        chosen = [text for text in chosen if text in first.values()]
    return [*([] if name == "S7" else ALONE), *chosen]


def front_row(table: Table, windows: Windows, name: str) -> dict[str, Any]:
    """Measure every setting on one workload: pooled metrics, and ours over the rival."""
    labels = labels_of(name, windows.settings, windows.quick)
    missing = [t for t in labels if t not in ALONE and not Setting.parse(t).is_installed]
    labels = [t for t in labels if t not in missing]
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for i, seed in enumerate(windows.seeds):
        for label in labels[i % len(labels) :] + labels[: i % len(labels)]:
            runs[label].append(windows.serve(name, label, seed))
    out: dict[str, Any] = {"missing": missing, "settings": {}}
    for label, found in runs.items():
        served = [r for r in found if "error" not in r]
        errors = [r["error"] for r in found if "error" in r]
        entry = pooled(served, runs) if served else {}
        out["settings"][label] = entry | {"errors": errors, "runs": [_brief(r) for r in served]}
        _lines(table, name, label, entry, errors)
    for label in missing:
        table.add(f"  {name} {label}", "not installed")
    out["nominal_per_s"] = {p.name: r for p, r in windows.workload(name).nominal_rates().items()}
    out["matches"] = as_rows(_matches(table, name, points(out)))
    return out


def pooled(
    served: Sequence[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return one setting over its seeds: LS samples pooled, BE rates averaged."""
    out: dict[str, Any] = {"policy": served[0]["policy"]}
    samples = [r["samples"] for r in served]
    for name in ("ttft_ms", "tbt_ms", "tpot_ms"):
        groups = [s[name] for s in samples]
        for p in (50, 90, 99):
            out[f"ls_{name.removesuffix('_ms')}_p{p}_ms"] = estimate(groups, quantile(p))
    count = sum(len(s["ttft_ms"]) for s in samples)
    if count:
        out["ls_max_ttft_ms"] = max(x for s in samples for x in s["ttft_ms"])
        out["ls_slo_attainment"] = sum(s["met"] for s in samples) / count
        out["ls_requests"] = count
        out["ls_e2e_p99_ms"] = float(
            np.percentile([x for s in samples for x in s["e2e_ms"].values()], 99)
        )
    slow = _slowdowns(served, runs.get("LS alone", []))
    if slow:
        out["ls_slowdown_p50"], out["ls_slowdown_p99"] = (
            float(np.percentile(slow, p)) for p in (50, 99)
        )
    be = [r["classes"]["BE"] for r in served if "BE" in r["classes"]]
    if be:
        rates = [(b["prefill_tokens_per_s"], b["output_tokens_per_s"]) for b in be]
        out["be_prefill_per_s"], out["be_output_per_s"] = (
            float(x) for x in np.mean(np.array(rates), axis=0)
        )
        out["be_tokens_per_s"] = out["be_prefill_per_s"] + out["be_output_per_s"]
        waits = [b["ttft_ms"]["p50"] for b in be if b["ttft_ms"]]
        out["be_ttft_p50_ms"] = float(np.median(waits)) if waits else None
        out["be_max_stall_ms"] = max(b["max_stall_ms"] for b in be)
        alone = [r["classes"]["BE"] for r in runs.get("BE alone", []) if "error" not in r]
        best = sum(b["prefill_tokens_per_s"] + b["output_tokens_per_s"] for b in alone)
        if best:
            out["be_harvest"] = out["be_tokens_per_s"] * len(alone) / best
    engine = [r["engine"] for r in served]
    out["energy"] = [{n: e.get(n) for n in ("joules", "computed_tokens")} for e in engine]
    latency = [e["preempt_latency_ms"]["p99"] for e in engine if e["preempt_latency_ms"]]
    out["preempt_latency_p99_ms"] = max(latency, default=None)
    out["class_inversions"] = sum(e["class_inversions"] for e in engine)
    for cause in ("preempt", "evict"):
        key = f"{cause}_recomputed_tokens"
        out[key] = sum(c.get(key, 0) for r in served for c in r["classes"].values())
    out["expert_gb_per_s"] = float(np.mean([e["expert_bytes"] for e in engine])) / 1e9
    out["expert_gb_per_s"] /= float(np.mean([r["took_s"] for r in served]))
    out["declared_be_stall_ms"] = served[0]["declared_be_stall_ms"]
    out["policy_errors"] = [x for e in engine for x in e["policy_errors"]]
    out["offered_per_s"] = {
        name: float(np.mean([r["offered_per_s"].get(name, 0.0) for r in served]))
        for name in ("LS", "BE")
    }
    return out


def _slowdowns(served: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> list[float]:
    """Return E2E over that of the same request in the run with LS alone."""
    by_seed = {r["seed"]: r["samples"]["e2e_ms"] for r in alone if "error" not in r}
    return [
        ms / by_seed[r["seed"]][name]
        for r in served
        for name, ms in r["samples"]["e2e_ms"].items()
        if name in by_seed.get(r["seed"], {})
    ]


def _brief(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run for the committed results, without samples."""
    return {key: value for key, value in run.items() if key != "samples"}


def _lines(
    table: Table, name: str, label: str, entry: dict[str, Any], errors: Sequence[str]
) -> None:
    for error in errors:
        table.add(f"  {name} {label} FAILED", error, "", False)
    if not entry:
        return
    ttft = [entry[f"ls_ttft_p{p}_ms"] for p in (50, 99)]
    if ttft[1] is not None:
        tbt = entry["ls_tbt_p99_ms"]
        table.add(
            f"  {name} {label}: LS TTFT p50 / p99; TBT p99 ms; SLO",
            f"{ttft[0].text(0)} / {ttft[1].text(0)}; "
            f"{'-' if tbt is None else tbt.text(0)}; {entry['ls_slo_attainment']:.0%}",
        )
    if "be_tokens_per_s" in entry:
        harvest = f"; {entry['be_harvest']:.0%} of alone" if "be_harvest" in entry else ""
        wait = entry["be_ttft_p50_ms"]
        table.add(
            f"  {name} {label}: BE prefill + output tokens/s; TTFT p50; stall",
            f"{entry['be_prefill_per_s']:.0f} + {entry['be_output_per_s']:.1f}{harvest}; "
            f"{'-' if wait is None else format(wait, '.0f')} ms; {entry['be_max_stall_ms']:.0f} ms",
            energy=entry["energy"],
        )


def points(row: dict[str, Any]) -> list[Point]:
    """Return the points of a row of results, as measured or as read from JSON."""
    out = []
    for label, entry in row["settings"].items():
        ttft = entry.get("ls_ttft_p99_ms")
        if label in ALONE or ttft is None or "be_tokens_per_s" not in entry:
            continue
        value = ttft["value"] if isinstance(ttft, dict) else ttft.value
        out.append(Point(label, entry["be_tokens_per_s"], value))
    return out


def points_of(document: dict[str, Any]) -> dict[str, list[Point]]:
    """Return the points of every workload in a document of results."""
    rows = {name: row.get("result") for name, row in document.get("rows", {}).items()}
    return {name: points(rows[name]) for name in ("S2", "S3", "S7") if rows.get(name)}


def _matches(table: Table, name: str, found: Sequence[Point]) -> list[Match]:
    rivals = [p for p in found if p.policy == RIVAL]
    out = []
    for ours in (p for p in found if p.policy in OURS):
        best = match(ours, rivals)
        if best is None:
            continue
        out.append(best)
        judged = name != "S7" and best.how in ("measured", "interpolated")
        table.add(
            f"{name}: LS TTFT p99 best {RIVAL} / {ours.setting} at equal BE",
            f"{best.ratio:.2f} (BE {best.rival_be_tokens_per_s:.0f} / "
            f"{ours.be_tokens_per_s:.0f}, {best.how})",
            f">= {TARGET_RATIO}" if judged else "",
            best.ratio >= TARGET_RATIO if judged else None,
        )
    return out


def stall_lines(table: Table, found: dict[str, Any]) -> None:
    """Add the worst BE stalls over the bounds that policies declare."""
    for label, entry in found["settings"].items():
        bound = entry.get("declared_be_stall_ms")
        if "be_max_stall_ms" not in entry:
            continue
        if bound is None:
            table.add(f"S7 worst BE stall, {label}", f"{entry['be_max_stall_ms']:.0f} ms; no bound")
            continue
        ratio = entry["be_max_stall_ms"] / bound
        table.add(
            f"S7 worst BE stall / declared bound ({bound} ms), {label}",
            f"{ratio:.2f}",
            "<= 1.0",
            ratio <= 1.0,
        )
