"""Every installed policy on S1-S5, S7 and S8, on a virtual clock."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Table
from live import Setting

from qllm.plugins import installed_policies
from qllm.types import Priority, Slo
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload, offered_rates
from qllm.workloads.measure import Window
from qllm.workloads.traced import engine_report

HARDWARE, MODEL = "h100", "qwen3-30b-a3b"
WORKLOADS = ("S1", "S2", "S3", "S4", "S5", "S7", "S8")
SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)
"""LS shares of S8."""
CHUNKS = (256, 512, 2048)
"""Chunk sizes of the policies that cut by tokens."""
SEATS = 64
SECONDS = {"S1": 60.0, "S2": 60.0, "S3": 60.0, "S4": 30.0, "S5": 30.0, "S7": 60.0, "S8": 30.0}
WARMUP_S, DRAIN_S = 5.0, 2.0
SLO = Slo(ttft_ms=500.0, tpot_ms=None)
"""Handed to every policy: those that know deadlines use it, the others rank by class."""


def settings() -> list[Setting]:
    """Every installed policy, those with a chunk size once per size."""
    out = []
    for name in sorted(installed_policies()):
        if name.startswith("chunked"):
            out += [Setting(name, (("step_tokens", chunk),)) for chunk in CHUNKS]
        else:
            out.append(Setting(name))
    return out


def cases(capacity: Capacity, quick: bool) -> list[tuple[str, Workload]]:
    """Workloads by the name they have in the result."""
    scale = 0.2 if quick else 1.0
    out = []
    for name in WORKLOADS:
        seconds = WARMUP_S + SECONDS[name] * scale + DRAIN_S
        shares = SHARES if name == "S8" else (None,)
        for share in shares if not quick else shares[-1:]:
            title = name if share is None else f"{name} {share:.0%} LS"
            workload = Workload(
                name=name,
                seconds=seconds,
                capacity=capacity,
                ls_share=share,
                max_len=32768,
                ls_slo=SLO,
            )
            out.append((title, workload))
    return out


def simulate_one(
    workload: Workload, seed: int, setting: Setting, costs: Any, config: Any
) -> dict[str, Any]:
    """One run on the virtual clock, reported as a live one is."""
    from qllm.simulation.run import simulate

    requests = workload.requests(seed)
    run = simulate(
        requests,
        setting.policy,
        costs,
        policy_settings=dict(setting.parameters),
        config=config,
        seconds=workload.seconds,
    )
    window = Window(start_s=WARMUP_S, end_s=workload.seconds - DRAIN_S, stop_s=workload.seconds)
    judged = {Priority.LS: SLO._replace(tpot_ms=100.0)}
    found = engine_report(run.events, requests, window, slos=judged)
    offered = offered_rates(requests, workload.seconds)
    return {
        "classes": {name: found[name] for name in ("LS", "BE") if name in found},
        "engine": found["engine"] | {"expert_loads": run.expert_loads},
        "offered_per_s": {Priority(p).name: rate for p, rate in offered.items()},
        "cpu_s": run.cpu_s,
        "refused": run.refused,
    }


def sim_row(table: Table, *, seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Medians over seeds of every policy on every workload; what fails is named."""
    from qllm.config import EngineConfig
    from qllm.simulation.presets import preset

    costs = preset(HARDWARE, MODEL)
    config = EngineConfig(
        max_num_seqs=SEATS, max_kv_tokens=costs.max_kv_tokens, max_step_tokens=8192
    )
    capacity = costs.capacity(config)
    out: dict[str, Any] = {
        "hardware": costs.machine,
        "model": costs.model,
        "note": costs.note,
        "config": {"max_num_seqs": SEATS, "max_step_tokens": 8192},
        "workloads": {},
    }
    begin = time.process_time()
    for title, workload in cases(capacity, quick):
        entry: dict[str, Any] = {"settings": {}}
        entry["nominal_per_s"] = {p.name: r for p, r in workload.nominal_rates().items()}
        for setting in settings():
            runs, errors = [], []
            for seed in seeds:
                try:
                    runs.append(simulate_one(workload, seed, setting, costs, config))
                except Exception as error:  # noqa: BLE001 - the other policies must run
                    errors.append(f"{type(error).__name__}: {error}"[:300])
            found = _medians(runs) if runs else {}
            entry["settings"][setting.name] = found | {"errors": errors}
            _line(table, title, setting.name, found, errors)
        out["workloads"][title] = entry
    out["cpu_s"] = time.process_time() - begin
    return out


def _get(run: dict[str, Any], *path: str) -> float | None:
    found: Any = run
    for key in path:
        found = None if found is None else found.get(key)
    return found


COLUMNS = {
    "ls_ttft_p50_ms": ("classes", "LS", "ttft_ms", "p50"),
    "ls_ttft_p99_ms": ("classes", "LS", "ttft_ms", "p99"),
    "ls_tbt_p99_ms": ("classes", "LS", "tbt_ms", "p99"),
    "ls_slo_attainment": ("classes", "LS", "slo_attainment"),
    "be_prefill_per_s": ("classes", "BE", "prefill_tokens_per_s"),
    "be_output_per_s": ("classes", "BE", "output_tokens_per_s"),
    "be_ttft_p50_ms": ("classes", "BE", "ttft_ms", "p50"),
    "be_max_stall_ms": ("classes", "BE", "max_stall_ms"),
    "class_inversions": ("engine", "class_inversions"),
    "expert_loads": ("engine", "expert_loads"),
    "offered_ls_per_s": ("offered_per_s", "LS"),
    "cpu_s": ("cpu_s",),
}


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name, path in COLUMNS.items():
        values = [v for run in runs if (v := _get(run, *path)) is not None]
        out[name] = float(np.median(values)) if values else None
    return out


def _line(
    table: Table, title: str, name: str, found: dict[str, float | None], errors: Sequence[str]
) -> None:
    for error in errors:
        table.add(f"  {title} {name} FAILED", error, "", False)
    if not found:
        return

    def text(key: str) -> str:
        value = found[key]
        return "-" if value is None else f"{value:,.0f}"

    table.add(
        f"  sim {title} {name}: LS TTFT p50 / p99, TBT p99 ms; BE in + out /s; stall",
        f"{text('ls_ttft_p50_ms')} / {text('ls_ttft_p99_ms')}, {text('ls_tbt_p99_ms')}; "
        f"{text('be_prefill_per_s')} + {text('be_output_per_s')}; {text('be_max_stall_ms')} ms",
    )
