"""Rows about the price of preemptibility: latency, added time, polling, cuts."""

import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common import Job, estimate, make_jobs, make_prompt, paired, quantile
from bench.engine import silent
from bench.engine.mixed import GREEDY, Flood
from qllm import QLLMEngine
from qllm.measure.variants import KV_SIZES
from qllm.record.trace import Event, Finished, Parked, Planned, Ran
from qllm.types import NS_PER_MS, Grain

# row 6: arrival to parked


def latency_row(model: Any, seconds: float, seed: int, every_s: float = 0.12) -> dict[str, Any]:
    """Measure LS probes of 16 tokens against a flood of prompts of 1k to 2k tokens."""
    rng = np.random.default_rng(seed)
    jobs = make_jobs(seed, 256, (1024, 2048), (32, 256))
    with QLLMEngine.from_model(
        model, threads=1, conformance=False, record=True, **KV_SIZES
    ) as engine:
        flood = Flood(engine, jobs, 16)
        flood.top_up()
        time.sleep(1.0)
        end = time.monotonic() + seconds
        probes = []
        while time.monotonic() < end:
            probes.append(engine.submit(make_prompt(rng, 16), "LS", 1, sampling=GREEDY))
            time.sleep(float(rng.exponential(every_s)))
            flood.top_up()
        for probe in probes:
            probe.result(60)
        stats = engine.stats()
    latency = stats["preempt_latencies_ms"]
    p99 = estimate([latency], quantile(99)) if latency else None
    return {
        "preemptions": len(latency),
        "p50_ms": float(np.median(latency)) if latency else None,
        "p99_ms": p99,
        "max_ms": max(latency, default=None),
        "longest_segment_ms": stats["longest_segment_ms"],
        "longest_segment_kind": stats["longest_segment_kind"],
        "max_segment_ms": stats["max_segment_ms"],
    }


# row 7: time added per preemption


def _timeline(events: Sequence[Event], be: int) -> dict[str, float]:
    """Return the milliseconds in BE programs, in parking and resuming them, and between programs.

    Parking lasts from the end of a run until the frame is parked. Resuming lasts from the end of
    the last LS request until BE runs. Time after the end of BE does not count.
    """
    frames: set[int] = set()
    out = dict.fromkeys(("be_ms", "between_ms", "park_ms", "resume_ms", "parks"), 0.0)
    between, last_ns, overtaken_ns = 0.0, None, None
    for event in events:
        if isinstance(event, Planned) and any(r.request_id == be for r in event.rows):
            frames.add(event.frame_id)
        elif isinstance(event, Ran):
            if last_ns is not None:
                between += (event.start_ns - last_ns) / NS_PER_MS
            last_ns = event.at_ns
            if event.frame_id in frames:
                out["be_ms"] += (event.at_ns - event.start_ns) / NS_PER_MS
                out["between_ms"] = between
                if overtaken_ns is not None:
                    out["resume_ms"] += (event.start_ns - overtaken_ns) / NS_PER_MS
                    overtaken_ns = None
        elif isinstance(event, Parked):
            assert last_ns is not None
            out["parks"] += event.preempted
            out["park_ms"] += (event.at_ns - last_ns) / NS_PER_MS
        elif isinstance(event, Finished) and event.request_id != be:
            overtaken_ns = event.at_ns
    return out


def _run_be(engine: QLLMEngine, job: Job, every_s: float | None, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    begin = len(engine.trace)
    handle = engine.submit(job.token_ids, "BE", job.max_tokens, sampling=GREEDY)
    while handle.finish_reason is None:
        if every_s is None:
            time.sleep(0.01)
            continue
        time.sleep(float(rng.exponential(every_s)))
        engine.submit(make_prompt(rng, 32), "LS", 1, sampling=GREEDY).result(60)
    return _timeline(list(engine.trace)[begin:], handle.number)


def added_row(model: Any, pairs: int, seed: int, every_s: float = 0.04) -> dict[str, Any]:
    """Measure a prompt of 1,536 tokens with and without LS prefills of 32 tokens in between.

    The numbers are sums over the programs of a trace: slower BE ops (cold caches), parking,
    resuming. `between_ms` is the time in no program; it contains the LS request's own admission,
    decision and end. One engine runs both, in turns.
    """
    job = make_jobs(seed, 1, (1536, 1536), (1, 1))[0]
    cold: list[float] = []
    parts: dict[str, list[float]] = {"park_ms": [], "resume_ms": [], "between_ms": []}
    parks = 0.0
    with QLLMEngine.from_model(
        model, threads=1, conformance=False, record=True, **KV_SIZES
    ) as engine:
        _run_be(engine, job, None, seed)
        for i in range(pairs):
            runs = {
                every: _run_be(engine, job, every, seed + i)
                for every in random.Random(seed + i).sample([None, every_s], 2)
            }
            quiet, busy = runs[None], runs[every_s]
            n = max(1.0, busy["parks"])
            cold.append((busy["be_ms"] - quiet["be_ms"]) / n)
            for name, values in parts.items():
                values.append((busy[name] - quiet[name]) / n)
            parks += busy["parks"]
    added = zip(cold, parts["park_ms"], parts["resume_ms"], strict=True)
    return {
        "preemptions": parks,
        "pairs": pairs,
        "added_ms": paired([sum(x) for x in added]),
        "cold_ms": paired(cold),
        **{name: paired(values) for name, values in parts.items()},
    }


# row 8: boundaries without a preemption

GRAINS = {
    "none": (Grain.STEP, True),
    "step": (Grain.STEP, False),
    "layer": (Grain.LAYER, False),
    "expert": (Grain.EXPERT, False),
}
"""Grain, and True if polling is compiled out. One engine runs all: two engines hold two copies of
packed weights, and the place of a copy in memory costs more than polling."""


def boundary_row(model: Any, rounds: int, seed: int) -> dict[str, Any]:
    """Measure CPU time of the engine's thread on the same BE work, in pairs of short rounds."""
    work = {
        "prefill": make_jobs(seed, 1, (192, 192), (1, 1)),
        "decode": make_jobs(seed + 1, 2, (16, 16), (5, 5)),
    }
    order = random.Random(seed)
    spent = {name: {part: list[float]() for part in work} for name in GRAINS}
    with QLLMEngine.from_model(model, threads=1, conformance=False, **KV_SIZES) as engine:
        for i in range(rounds + 2):
            for name in order.sample(list(GRAINS), len(GRAINS)):
                grain, is_silent = GRAINS[name]
                object.__setattr__(engine.policy, "grain", grain)  # between runs: no run reads it
                silent.enable(is_silent)
                for part, jobs in work.items():
                    cpu_s = _cpu(engine, jobs)
                    if i > 1:
                        spent[name][part].append(cpu_s)
    silent.enable(False)
    out: dict[str, Any] = {"rounds": rounds}
    base = spent["none"]
    for name in ("step", "layer", "expert"):
        out[name] = {part: paired(_percent(spent[name][part], base[part])) for part in work}
        sums = [[a + b for a, b in zip(*v.values(), strict=True)] for v in (spent[name], base)]
        out[name]["both"] = paired(_percent(*sums))
    out["cpu_s"] = {n: {p: float(np.median(v)) for p, v in s.items()} for n, s in spent.items()}
    return out


def cuts_row(model: Any, rounds: int, seed: int) -> dict[str, Any]:
    """Measure the CPU time that cuts for 5 ms add to one prefill, against `max_segment_ms=inf`."""
    out: dict[str, Any] = {}
    with (
        QLLMEngine.from_model(model, threads=1, conformance=False, **KV_SIZES) as cut,
        QLLMEngine.from_model(
            copy.deepcopy(model),
            threads=1,
            conformance=False,
            max_segment_ms=float("inf"),
            **KV_SIZES,
        ) as uncut,
    ):
        for num in (192, 768, 1536):
            jobs = make_jobs(seed, 1, (num, num), (1, 1))
            pairs = [(_cpu(cut, jobs), _cpu(uncut, jobs)) for _ in range(rounds + 1)][1:]
            out[str(num)] = paired(_percent(*zip(*pairs, strict=True)))
    return out


def _percent(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [(x / y - 1) * 100 for x, y in zip(a, b, strict=True)]


def _cpu(engine: QLLMEngine, jobs: Sequence[Job]) -> float:
    begin = engine.call(time.thread_time)
    handles = [engine.submit(j.token_ids, "BE", j.max_tokens, sampling=GREEDY) for j in jobs]
    for handle in handles:
        handle.result(600)
    return float(engine.call(time.thread_time) - begin)
