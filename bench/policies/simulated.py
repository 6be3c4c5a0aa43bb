"""Every installed policy on S1-S5, S7 and S8, on a virtual clock."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from bench.common import Table, without_paths
from bench.policies.live import Setting
from qllm.plugins import installed_policies
from qllm.types import Priority, Slo
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload, offered_rates
from qllm.workloads.measure import Window
from qllm.workloads.traced import engine_report

HARDWARE, MODEL = "h100", "qwen3-moe"
WORKLOADS = ("S1", "S2", "S3", "S4", "S5", "S7", "S8")
SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)
"""LS shares of S8."""
CHUNKS = (256, 512, 2048)
"""Chunk sizes of the policies that cut prompts by tokens."""
SEATS, STEP_TOKENS = 64, 8192
SECONDS, QUICK_SECONDS = 12.0, 2.0
"""Seconds of a window, on the virtual clock."""
QUICK_WORKLOADS = ("S2",)
WARMUP_S, DRAIN_S = 2.0, 1.0
SLO = Slo(ttft_ms=500.0, tpot_ms=None)
"""Targets for every policy: policies with deadlines use them, the others rank by class."""


def settings() -> list[Setting]:
    """Return every installed policy, those with a chunk size once per size."""
    out = []
    for name in sorted(installed_policies()):
        if name.startswith("chunked"):
            out += [Setting(name, (("step_tokens", chunk),)) for chunk in CHUNKS]
        else:
            out.append(Setting(name))
    return out


def cases(capacity: Capacity, quick: bool) -> dict[str, Workload]:
    """Return workloads by their names in the result."""
    out = {}
    for name in QUICK_WORKLOADS if quick else WORKLOADS:
        for share in SHARES if name == "S8" else (None,):
            title = name if share is None else f"{name} {share:.0%} LS"
            out[title] = Workload(
                name=name,
                seconds=WARMUP_S + (QUICK_SECONDS if quick else SECONDS) + DRAIN_S,
                capacity=capacity,
                ls_share=share,
                max_len=32768,
                ls_slo=SLO,
            )
    return out


class Job(NamedTuple):
    """One run."""

    title: str
    workload: Workload
    setting: Setting
    seed: int


def machine_of_sim() -> tuple[Any, Any]:
    """Return costs and engine settings of the simulated machine."""
    from qllm.config import EngineConfig
    from qllm.sim.presets import preset

    costs = preset(HARDWARE, MODEL)
    return costs, EngineConfig(
        max_num_seqs=SEATS, max_kv_tokens=costs.max_kv_tokens, max_step_tokens=STEP_TOKENS
    )


def simulate_one(job: Job) -> dict[str, Any]:
    """Simulate one run, with the report of a live one; a failure is its "error"."""
    try:
        return _simulate(job.workload, job.seed, job.setting)
    except Exception as error:  # noqa: BLE001 - the other policies must run
        return {"error": without_paths(f"{type(error).__name__}: {error}")[:300]}


def _simulate(workload: Workload, seed: int, setting: Setting) -> dict[str, Any]:
    from qllm.sim.run import simulate

    costs, config = machine_of_sim()
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
    found = engine_report(run.trace, requests, window, slos=judged)
    offered = offered_rates(requests, workload.seconds)
    return {
        "classes": {name: found[name] for name in ("LS", "BE") if name in found},
        "engine": found["engine"] | {"expert_loads": run.expert_loads},
        "offered_per_s": {Priority(p).name: rate for p, rate in offered.items()},
        "cpu_s": run.cpu_s,
        "refused": run.refused,
    }


def sim_row(table: Table, *, seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Measure medians over seeds of every policy on every workload; name failures."""
    costs, config = machine_of_sim()
    found = cases(costs.capacity(config), quick)
    jobs = [
        Job(title, workload, setting, seed)
        for title, workload in found.items()
        for setting in settings()
        for seed in seeds
    ]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for job, run in zip(jobs, pool.map(simulate_one, jobs), strict=True):
            runs.setdefault((job.title, job.setting.name), []).append(run)
    out: dict[str, Any] = {
        "hardware": costs.machine,
        "model": costs.model,
        "note": costs.note,
        "config": {"max_num_seqs": SEATS, "max_step_tokens": STEP_TOKENS},
        "window_s": QUICK_SECONDS if quick else SECONDS,
        "workloads": {},
    }
    for title, workload in found.items():
        rates = {p.name: rate for p, rate in workload.nominal_rates().items()}
        out["workloads"][title] = {"nominal_per_s": rates, "settings": {}}
    for (title, name), of_setting in runs.items():
        errors = [run["error"] for run in of_setting if "error" in run]
        served = [run for run in of_setting if "error" not in run]
        medians = _medians(served) if served else {}
        out["workloads"][title]["settings"][name] = medians | {"errors": errors}
        _line(table, title, name, medians, errors)
    out["cpu_s"] = sum(run.get("cpu_s", 0.0) for rs in runs.values() for run in rs)
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
