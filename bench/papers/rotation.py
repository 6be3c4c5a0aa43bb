"""The claims on KV that rotates by targets (SuperInfer): `rota` with swap against other ways."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from bench.common import paired
from bench.energy import Run, per_ktok
from bench.papers.rows import PRINTED, SUPERINFER, Claim, Row, World
from bench.papers.servers import rows_of_server
from bench.policies.live import Setting, Timing, run_requests
from bench.serving.servers import InstallError
from qllm.types import Priority, Slo
from qllm.workloads.spec import RequestSpec

PROMPT, OUTPUT = 256, 96
KV_TOKENS = 2 * (PROMPT + OUTPUT)
"""KV for two requests."""
LOAD = 0.87
LS_SHARE = 0.2
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fcfs": ("fcfs", {"prefix_cache": False}),
    "recompute": ("qllm2", {"prefix_cache": False}),
    "recompute with the prefix cache": ("qllm2", {"prefix_cache": "auto"}),
    "rota with swap": ("rota", {"prefix_cache": False, "swap_kv_tokens": 64 * (PROMPT + OUTPUT)}),
}
"""Policy and engine settings of each arm; all have KV for two requests."""
VLLM = "vllm-scarce"
"""Arm of `servers.PEERS` with as little KV."""


def requests_of(pair_s: float, count: int, slo: Slo, seed: int) -> list[RequestSpec]:
    """Return requests of two classes at 0.87 of the rate that two at a time allow."""
    rng, at_s, out = random.Random(f"rota {seed}"), 0.0, list[RequestSpec]()
    for i in range(count):
        at_s += rng.expovariate(2 * LOAD / pair_s)
        priority = Priority.LS if rng.random() < LS_SHARE else Priority.BE
        out.append(
            RequestSpec(
                at_s=at_s, priority=priority, num_prompt_tokens=PROMPT, max_tokens=OUTPUT,
                name=f"{priority.name.lower()}-{i}", slo=slo,
            )
        )  # fmt: skip
    return out


def drain_s(pair_s: float) -> float:
    """Return the most seconds after the last arrival."""
    return max(2.0, 6 * pair_s)


def pair_s_of(world: World) -> float:
    """Return the seconds that two requests take together."""
    both = [
        RequestSpec(at_s=0.0, priority=Priority.LS, num_prompt_tokens=PROMPT, max_tokens=OUTPUT,
                    name=f"ls-{i}")
        for i in range(2)
    ]  # fmt: skip
    capacity = world.capacity
    most_s = 20 * (PROMPT / capacity.prefill_tokens_per_s + OUTPUT / capacity.output_tokens_per_s)
    timing = Timing(warmup_s=0.0, window_s=0.1, drain_s=max(2.0, 8 * most_s))
    run = run_requests(
        world.bench,
        Setting("fcfs"),
        both,
        timing,
        max_kv_tokens=KV_TOKENS,
        prefix_cache=False,
        until_answered=True,
    )
    return max(run["samples"]["e2e_ms"].values()) / 1e3


def rotation_rows(world: World) -> list[Row]:
    """Measure TTFT targets met, TPOT and throughput where KV is short, over several seeds."""
    seeds, count = world.scale.rota
    pair_s = pair_s_of(world)
    slo = Slo(ttft_ms=700 * pair_s, tpot_ms=1e3 * pair_s / 7)
    arms: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    energy: dict[str, list[Run]] = {name: [] for name in ARMS}
    why_not = None
    for seed in range(1, seeds + 1):
        requests = requests_of(pair_s, count, slo, seed)
        last_s = requests[-1].at_s + 0.1
        timing = Timing(warmup_s=0.0, window_s=last_s, drain_s=drain_s(pair_s))
        for name, (policy, changes) in ARMS.items():
            run = run_requests(
                world.bench, Setting(policy), requests, timing, slo=slo, be_slo=slo,
                max_kv_tokens=KV_TOKENS, until_answered=True, **changes,
            )  # fmt: skip
            arms[name].append(numbers(run["classes"]))
            energy[name].append({n: run["engine"][n] for n in ("joules", "computed_tokens")})
        try:
            run = rows_of_server(world, VLLM, requests, timing, slo, be_slo=slo)
            arms.setdefault(VLLM, []).append(numbers(run["classes"]))
        except InstallError as error:
            why_not = str(error)
    world.found["rotation"] = arms
    how = (
        f"{world.scale.size} model, 1 thread, {seeds * count} requests of {PROMPT} + {OUTPUT} "
        f"tokens, 20 % LS, KV for two, load {LOAD:g}, {seeds} seeds; targets TTFT "
        f"{slo.ttft_ms:,.0f} ms, TPOT {slo.tpot_ms:,.0f} ms"
    )
    spent = per_ktok(energy["rota with swap"])
    others = [name for name in arms if name != "rota with swap"]
    rows = [row for name in others for row in _compared(arms, name, how, spent)]
    if why_not is not None:
        claim = Claim("SI6", f"rota with swap against {VLLM}", SUPERINFER, "+74.7 points", PRINTED)
        rows.append(Row.of(claim, None, how, why_not))
    return rows


def numbers(classes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return targets met, TPOT and tokens per second over both classes."""
    arrived = sum(c["arrived"] for c in classes.values())
    met = sum((c["slo_attainment"] or 0.0) * c["arrived"] for c in classes.values())
    tpots = [c["tpot_ms"]["p50"] for c in classes.values() if c["tpot_ms"]]
    return {
        "met": met / arrived if arrived else 0.0,
        "tpot_p50_ms": max(tpots, default=float("nan")),
        "tokens_per_s": sum(
            c["output_tokens_per_s"] + c["prefill_tokens_per_s"] for c in classes.values()
        ),
    }


def _compared(
    arms: Mapping[str, list[dict[str, float]]], name: str, how: str, spent: str
) -> Iterator[Row]:
    """Yield the rows of `rota` with swap against another arm, seed by seed."""
    pairs = list(zip(arms["rota with swap"], arms[name], strict=True))
    asked = {"fcfs": (">= 74.7", "<= 1.1", ">= 0.95")}.get(name, (PRINTED,) * 3)
    values = {
        "points more of requests that meet both targets": [
            100 * (a["met"] - b["met"]) for a, b in pairs
        ],
        "TPOT p50 of the slower class, ratio": [
            a["tpot_p50_ms"] / b["tpot_p50_ms"] for a, b in pairs
        ],
        "tokens/s, ratio": [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs],
    }
    for (what, found), target in zip(values.items(), asked, strict=True):
        claim = Claim("SI6", f"rota with swap against {name}: {what}", SUPERINFER,
                      "+74.7 points at comparable TBT and throughput", target)  # fmt: skip
        yield Row.of(claim, paired(found), how, more=f"; {spent}" if "tokens/s" in what else "")
