"""Rows on isolation: decode next to a long prefill, and LS while BE holds every seat or all KV."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bench.common import estimate, quantile
from bench.policies.live import Bench, Setting, Timing, run_workload
from bench.policies.loads import GREEDY, prompts
from qllm import QLLMEngine, Slo
from qllm.record.trace import Planned, Ran, Token
from qllm.types import NS_PER_MS, Priority
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload

DECODERS = 2
"""Number of LS requests that decode in the decode row."""
TARGET = 2.0
"""TPOT target of the decodes for `qllm2`, over the median solo gap."""
DECODE_SETTINGS = ("priority-layered", "qllm2")


# decode next to a prefill


def _gaps(engine: QLLMEngine, numbers: Sequence[int], start_ns: int, end_ns: int) -> list[float]:
    """Return the milliseconds between each request's tokens inside an interval."""
    out: list[float] = []
    for number in numbers:
        at = [e.at_ns for e in engine.trace if isinstance(e, Token) and e.request_id == number]
        out += [(b - a) / NS_PER_MS for a, b in pairwise(at) if a >= start_ns and b <= end_ns]
    return out


def _longest_program(engine: QLLMEngine, be: set[int]) -> float:
    """Return the milliseconds of the longest run of a program with these requests."""
    frames = {
        e.frame_id
        for e in engine.trace
        if isinstance(e, Planned) and any(row.request_id in be for row in e.rows)
    }
    runs = [e for e in engine.trace if isinstance(e, Ran) and e.frame_id in frames]
    return max(((e.at_ns - e.start_ns) / NS_PER_MS for e in runs), default=0.0)


def _decode_beside(
    bench: Bench,
    setting: Setting,
    num_tokens: int,
    count: int,
    slo: Slo | None,
    solo_s: float,
) -> dict[str, list[float]]:
    """Measure the gaps of LS decodes alone, and while BE prompts run one after the other."""
    out: dict[str, list[float]] = {"solo_ms": [], "beside_ms": [], "prefill_ms": []}
    with bench.engine(setting) as engine:
        for ids in prompts(bench, count, num_tokens, 0):  # new decodes: their context is short
            handles = [
                engine.submit(own, "LS", 4000, sampling=GREEDY, slo=slo)
                for own in prompts(bench, DECODERS, 64, 9000)
            ]
            numbers = [h.number for h in handles]
            time.sleep(solo_s / 3)
            start_ns = engine.now_ns()
            time.sleep(solo_s / count)
            turn_ns = engine.now_ns()
            engine.submit(ids, "BE", 1, sampling=GREEDY).result(600)
            end_ns = engine.now_ns()
            for handle in handles:
                handle.cancel()
                handle.result(600)
            out["solo_ms"] += _gaps(engine, numbers, start_ns, turn_ns)
            out["beside_ms"] += _gaps(engine, numbers, turn_ns, end_ns)
            out["prefill_ms"].append((end_ns - turn_ns) / NS_PER_MS)
    return out


def _group_ms(bench: Bench, setting: Setting, num_tokens: int, count: int) -> float:
    """Measure the longest program of BE prefills that run alone, one by one."""
    with bench.engine(setting) as engine:
        numbers = set()
        for ids in prompts(bench, count, num_tokens, 0):
            handle = engine.submit(ids, "BE", 1, sampling=GREEDY)
            handle.result(600)
            numbers.add(handle.number)
        return _longest_program(engine, numbers)


def decode_row(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """Measure TBT p99 of LS decodes next to BE prefills of 2,048 tokens, against the bound."""
    num_tokens, count = (1024, 1) if quick else (2048, 4)
    out: dict[str, Any] = {"prompt_tokens": num_tokens, "decoders": DECODERS, "settings": {}}
    solo_s = 1.0 if quick else 3.0
    solo = _decode_beside(bench, Setting("qllm2"), 64, 1, None, solo_s)["solo_ms"]
    target_ms = TARGET * float(np.median(solo))
    for name in DECODE_SETTINGS:
        setting = Setting.parse(name)
        if not setting.is_installed:
            out["settings"][name] = {"missing": True}
            continue
        slo = Slo(tpot_ms=target_ms) if name == "qllm2" else None
        found = _decode_beside(bench, setting, num_tokens, count, slo, solo_s)
        entry: dict[str, Any] = {
            "solo_tbt_p50_ms": float(np.median(found["solo_ms"])),
            "solo_tbt_p99_ms": float(np.percentile(found["solo_ms"], 99)),
            "tbt_p50_ms": float(np.median(found["beside_ms"])),
            "tbt_p99_ms": estimate([found["beside_ms"]], quantile(99)),
            "tbt_max_ms": max(found["beside_ms"]),
            "gaps": len(found["beside_ms"]),
            "prefill_ms": float(np.median(found["prefill_ms"])),
        }
        if name == "qllm2":
            entry["allowed_ms"], entry["allowed"] = target_ms, "its TPOT target"
        else:
            group = _group_ms(bench, setting, num_tokens, count)
            entry["group_ms"] = group
            entry["allowed_ms"] = entry["solo_tbt_p99_ms"] + group
            entry["allowed"] = "solo p99 + the longest layer group alone"
        out["settings"][name] = entry
    return out


# seats and KV

HELD = {
    "S5": {"max_num_seqs": 8},
    "S6": {"max_kv_tokens": 2048},
}
"""Scarce resource of each row."""
HELD_LEN = {"S5": 2048, "S6": 512}
"""Most tokens of a request: several of S6 fit into the pool and outgrow it inside a window."""
HELD_TARGET = {"S5": 1.5, "S6": 2.0}
LS_SCALE = 0.25


class Evicted(NamedTuple):
    """Evictions of a setting, and the tokens recomputed after them."""

    evictions: int
    recomputed_tokens: int

    @classmethod
    def of(cls, runs: Iterable[Mapping[str, Any]], label: str) -> "Evicted":
        """Sum over the classes of all runs of a setting."""
        classes = [c for run in runs if run["label"] == label for c in run["classes"].values()]
        return cls(
            sum(c["evictions"] for c in classes),
            sum(c["evict_recomputed_tokens"] for c in classes),
        )

    def line(self, name: str, label: str) -> tuple[str, str, str, bool | None]:
        """Return a line of the table; a run of S6 without an eviction fails."""
        what = f"  {name}: evictions; tokens recomputed after them, {label}"
        found = f"{self.evictions:,}; {self.recomputed_tokens:,}"
        if name != "S6":
            return what, found, "", None
        return what, found, "evictions > 0", self.evictions > 0


def held_row(
    bench: Bench,
    name: str,
    capacity: Capacity,
    seeds: Sequence[int],
    timing: Timing,
    settings: Sequence[str] = ("qllm2", "ls-first"),
) -> dict[str, Any]:
    """Measure LS TTFT p99 while BE holds all seats or all KV, over the same LS requests alone."""
    scarce = HELD[name]
    workload = Workload(
        name=name,
        seconds=timing.total_s,
        capacity=replace(capacity, **scarce),
        ls_scale=LS_SCALE,
        max_len=HELD_LEN[name],
    )
    groups: dict[str, list[list[float]]] = {}
    runs = []
    for i, seed in enumerate(seeds):
        cases = [("alone", Setting(settings[0]), Priority.LS)]
        cases += [
            (text, Setting.parse(text), None) for text in (settings if i == 0 else settings[:1])
        ]
        for label, setting, only in cases:
            run = run_workload(bench, setting, workload, seed, timing, only=only, **scarce)
            groups.setdefault(label, []).append(run.pop("samples")["ttft_ms"])
            runs.append({"label": label, **run})
    out: dict[str, Any] = {"scarce": scarce, "runs": runs, "ttft_p99_ms": {}, "over_alone": {}}
    for label, found in groups.items():
        out["ttft_p99_ms"][label] = estimate(found, quantile(99))
        if label != "alone":
            alone = groups["alone"][: len(found)]
            out["over_alone"][label] = estimate(found, quantile(99), over=alone)
    return out
