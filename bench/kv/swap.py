"""Rows of `bench.kv` about scarce KV: swapping over recomputing, and requests that rotate."""

import math
import statistics
import time
from typing import Any

import numpy as np

from bench.energy import Meter, answered_tokens
from bench.kv.parts import GREEDY, make_engine, make_ids
from qllm import QLLMEngine
from qllm.types import Slo


def _contend(engine: QLLMEngine, seed: int, num_be: int, every_s: float) -> dict[str, Any]:
    """Run 640-token BE requests at once, and an LS chat of 300 at intervals until they end."""
    rng = np.random.default_rng(seed)
    prompts = [make_ids(rng, 512) for _ in range(num_be)]
    meter, start, due = Meter(), time.perf_counter(), every_s / 6
    batch = [engine.submit(ids, "BE", 128, sampling=GREEDY) for ids in prompts]
    chats = []
    while any(h.finish_reason is None for h in batch):
        time.sleep(0.005)
        if time.perf_counter() - start >= due:
            due += every_s
            chats.append(engine.submit(make_ids(rng, 284), "LS", 16, sampling=GREEDY))
    done = [h.result(300) for h in batch]
    seconds, joules = time.perf_counter() - start, meter.joules()
    answers = [h.result(300) for h in chats]
    ttft = [r.metrics.ttft_ms or 0.0 for r in answers]
    return {
        "seconds": seconds,
        "energy": {"joules": joules, "computed_tokens": answered_tokens(done + answers)},
        "num_chats": len(chats),
        "be_tokens_per_s": num_be * 640 / seconds,
        "ls_ttft_p99_ms": float(np.percentile(ttft, 99)) if ttft else 0.0,
        "evictions": sum(r.metrics.evictions for r in done),
        "recomputed": sum(r.metrics.evict_recomputed_tokens for r in done + answers),
        "swapped_tokens": engine.stats()["swap"]["out_tokens"],
        "tokens": [r.token_ids for r in done],
    }


def swap_row(model: str, rounds: int, num_be: int, load: float) -> dict[str, Any]:
    """Measure KV for a quarter of the BE work, with arms in turns.

    `of_both_apart` compares swap with a bound of every engine that serves LS first and has KV for
    one of them: the time of the same BE work without LS, plus that of the chats without BE.

    Args:
        model: Folder of the model.
        rounds: Number of runs of each arm.
        num_be: Number of BE requests.
        load: Part of the engine's time that LS would take alone.
    """
    pool = num_be * 640 // 4
    arms: dict[str, dict[str, Any]] = {
        "swap": {"prefix_cache": True, "swap_kv_tokens": num_be * 640},
        "recompute": {"prefix_cache": False},
        "recompute_cache": {"prefix_cache": True},
        "without_ls": {"prefix_cache": False},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    chat_s = []
    for i in range(rounds):
        chat_s.append(_chat_s(model))
        for name in arms if i % 2 else reversed(arms):
            every_s = math.inf if name == "without_ls" else chat_s[-1] / load
            with make_engine(model, max_kv_tokens=pool, **arms[name]) as engine:
                _flood_one(engine)
                found[name].append(_contend(engine, 200 + i, num_be, every_s))

    def over(name: str, what: str) -> float:
        pairs = zip(found["swap"], found[name], strict=True)
        return statistics.median([a[what] / b[what] for a, b in pairs])

    swap, plain = found["swap"], found["recompute"]
    apart = zip(swap, found["without_ls"], chat_s, strict=True)
    return {
        "ls_load": load,
        "recomputed": sum(x["recomputed"] for x in swap),
        "recomputed_without": [sum(x["recomputed"] for x in found[n]) for n in list(arms)[1:3]],
        "evictions_without": [sum(x["evictions"] for x in found[n]) for n in list(arms)[1:3]],
        "swapped_tokens": sum(x["swapped_tokens"] for x in swap),
        "be_tokens_per_s": statistics.median(x["be_tokens_per_s"] for x in swap),
        "be_over_recompute": over("recompute", "be_tokens_per_s"),
        "be_over_recompute_cache": over("recompute_cache", "be_tokens_per_s"),
        "be_asked": 1.5,
        "energy": [x["energy"] for x in swap],
        "of_both_apart": statistics.median(
            x["seconds"] / (alone["seconds"] + x["num_chats"] * s) for x, alone, s in apart
        ),
        "ls_ttft_p99_ms": statistics.median(x["ls_ttft_p99_ms"] for x in swap),
        "ls_ttft_p99_over_recompute": over("recompute", "ls_ttft_p99_ms"),
        "ls_ttft_p99_over_recompute_cache": over("recompute_cache", "ls_ttft_p99_ms"),
        "ls_asked": 1.1,
        "same_tokens": [x["tokens"] for x in swap] == [x["tokens"] for x in plain],
        "hits_due": sum(x["evictions"] for x in plain) > 0
        and sum(x["swapped_tokens"] for x in swap) > 0
        and sum(x["recomputed"] for x in swap) == 0,
    }


def _chat_s(model: str) -> float:
    """Return the seconds of an LS chat of `_contend` alone, on this machine now."""
    with make_engine(model, prefix_cache=False) as engine:
        _flood_one(engine)
        ids = make_ids(np.random.default_rng(2), 284)
        times = [engine.submit(ids, "LS", 16, sampling=GREEDY).result(120) for _ in range(3)]
    return statistics.median(r.metrics.e2e_ms or 0.0 for r in times) / 1e3


def _flood_one(engine: QLLMEngine) -> None:
    engine.submit(make_ids(np.random.default_rng(1), 256), "BE", 8, sampling=GREEDY).result(120)


ROTA: dict[str, Any] = {"max_kv_tokens": 2 * 352}
"""Settings with KV for two requests of 256 + 96 tokens."""


def rota_row(model: str, num: int) -> dict[str, Any]:
    """Measure random arrivals at 0.87 of the engine's capacity; the policy knows the targets."""
    pair_s = _pair_s(model)
    rng = np.random.default_rng(1)
    at_s = np.cumsum(rng.exponential(pair_s / 2 / 0.87, num)).tolist()
    return _rota_arms(model, at_s, _targets(pair_s, 0.7), points_asked=30, pair_s=pair_s)


def rota_burst(model: str, num: int) -> dict[str, Any]:
    """Measure a burst, with a target that half of it meets in the order of arrival."""
    pair_s = _pair_s(model)
    return _rota_arms(model, [0.0] * num, _targets(pair_s, 1.4), points_asked=0, pair_s=pair_s)


def _pair_s(model: str) -> float:
    """Return the seconds of two simultaneous requests, on this machine now."""
    with make_engine(model, prefix_cache=False, policy="fcfs", **ROTA) as engine:
        _flood_one(engine)
        return max(r.metrics.e2e_ms or 0.0 for r in _served(engine, [0.0] * 2, Slo())) / 1e3


def _targets(pair_s: float, share: float) -> Slo:
    """Return a TTFT target of a share of a pair's time."""
    return Slo(ttft_ms=1e3 * share * pair_s, tpot_ms=1e3 * pair_s / 7)


def _served(engine: QLLMEngine, at_s: list[float], slo: Slo) -> list[Any]:
    """Serve requests that arrive at these times."""
    start, handles = time.perf_counter(), []
    for i, due_s in enumerate(at_s):
        time.sleep(max(0.0, start + due_s - time.perf_counter()))
        ids = make_ids(np.random.default_rng(300 + i), 256)
        handles.append(engine.submit(ids, "BE", 96, sampling=GREEDY, slo=slo))
    return [h.result(600) for h in handles]


def _rota_arms(
    model: str, at_s: list[float], slo: Slo, *, points_asked: int, pair_s: float
) -> dict[str, Any]:
    arms: dict[str, list[Any]] = {}
    for name, more in (("fcfs", {}), ("rota", {"swap_kv_tokens": len(at_s) * 352})):
        with make_engine(model, prefix_cache=False, policy=name, **ROTA, **more) as engine:
            _flood_one(engine)
            arms[name] = _served(engine, at_s, slo)

    def met(name: str, what: str) -> float:
        limit = getattr(slo, what)
        return sum((getattr(r.metrics, what) or 0) <= limit for r in arms[name]) / len(at_s)

    tpot = {
        name: statistics.median(r.metrics.tpot_ms or 0 for r in arm) for name, arm in arms.items()
    }
    return {
        "num": len(at_s),
        "pair_s": pair_s,
        "ttft_target_ms": slo.ttft_ms,
        "tpot_target_ms": slo.tpot_ms,
        "met_ttft": {name: met(name, "ttft_ms") for name in arms},
        "met_tpot": {name: met(name, "tpot_ms") for name in arms},
        "points": 100 * (met("rota", "ttft_ms") - met("fcfs", "ttft_ms")),
        "points_asked": points_asked,
        "tpot_p50_ms": tpot,
        "tpot_p50_rota_over_fcfs": tpot["rota"] / tpot["fcfs"],
        "tpot_asked": 1.1,
        "same_tokens": [r.token_ids for r in arms["fcfs"]] == [r.token_ids for r in arms["rota"]],
        "hits_due": sum(r.metrics.evict_recomputed_tokens for r in arms["rota"]) == 0,
    }
