"""The claims on layered prefill, on KV that overflows, and on busy processes next to the engine."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import Estimate
from bench.papers.rates import rate_rows
from bench.papers.rows import BLINK, LAYERED, QLLM, SUPERINFER, Claim, Row, World
from bench.policies.isolation import Evicted, held_row
from bench.policies.live import Setting, Timing, run_requests
from bench.serving.over_http import hogs
from bench.serving.servers import PEERS, InstallError, Peer, Place, free_port, installed, serving
from qllm.config import EngineConfig
from qllm.measure.random_moe import cache_dir, make_random_moe
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import Priority, Slo
from qllm.workloads.arrivals import Gamma
from qllm.workloads.capacity import Capacity
from qllm.workloads.client import send_http
from qllm.workloads.generators import Workload
from qllm.workloads.lengths import between
from qllm.workloads.measure import Served, report
from qllm.workloads.spec import RequestSpec
from qllm.workloads.tokens import with_tokens
from qllm.workloads.traced import engine_report

# layered prefill

LAYERED_SETTINGS = ("chunked:step_tokens=512", "layered:group_tokens=512")
LAYERED_LOAD = 0.6
LAYERED_OUTPUT = (96, 160)


def long_prompts(
    capacity: Capacity, count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[RequestSpec]:
    """Return Poisson arrivals of long prompts of one class at 60 % load."""
    prompts, outputs, rng = between(*prompt), between(*output), random.Random(seed)
    rate = LAYERED_LOAD * capacity.requests_per_s(prompts.mean, outputs.mean)
    at = Gamma().times(rng, rate, 1.5 * count / rate + 1 / rate)[:count]
    return [
        RequestSpec(
            at_s=at_s,
            priority=Priority.LS,
            num_prompt_tokens=prompts.at(rng.uniform(0, 100)),
            max_tokens=outputs.at(rng.uniform(0, 100)),
            name=f"long-{i}",
        )
        for i, at_s in enumerate(at)
    ]


class Latencies(NamedTuple):
    """Latencies of one policy on long prompts."""

    ttft_ms: float
    e2e_ms: float
    tbt_p99_ms: float
    expert_loads: float
    """Number or bytes of experts read for all requests."""
    unfinished: int


def _latencies(entry: Mapping[str, Any], loads: float) -> Latencies:
    return Latencies(
        ttft_ms=entry["ttft_ms"]["mean"],
        e2e_ms=entry["e2e_ms"]["mean"],
        tbt_p99_ms=entry["tbt_ms"]["p99"],
        expert_loads=loads,
        unfinished=entry["arrived"] - entry["finished"],
    )


def simulated_layered_rows(world: World) -> list[Row]:
    """Measure layered against chunked prefill, unsaturated, on the simulator's H100."""
    costs, prompt = preset("h100", "qwen3-moe"), (4000, 8000)
    config = EngineConfig(max_kv_tokens=costs.max_kv_tokens, max_num_seqs=64, max_step_tokens=8192)
    count = world.scale.simulated
    requests = long_prompts(costs.capacity(config), count, prompt, LAYERED_OUTPUT, 1)

    def run(name: str) -> Latencies:
        setting = Setting.parse(name)
        found = simulate(
            requests, setting.policy, costs, policy_settings=dict(setting.parameters), config=config
        )
        window = Timing(warmup_s=0.0, window_s=found.end_ns / 1e9, drain_s=0.0).window
        return _latencies(engine_report(found.trace, requests, window)["LS"], found.expert_loads)

    how = f"simulated, {costs.machine}, {costs.model}, {count} prompts of 4,000-8,000 tokens"
    return _compared(world, run, how)


def layered_rows(world: World) -> list[Row]:
    """Measure the same live."""
    scale = world.scale
    low, high = scale.prompt
    capacity = world.bench.capacity((low + high) // 2)
    requests = long_prompts(capacity, scale.count, scale.prompt, (16, 32), 1)
    timing = Timing(
        warmup_s=0.0,
        window_s=requests[-1].at_s + 0.1,
        drain_s=4 * high / capacity.prefill_tokens_per_s + 2.0,
    )

    def run(name: str) -> Latencies:
        found = run_requests(
            world.bench, Setting.parse(name), requests, timing, max_step_tokens=8192
        )
        return _latencies(found["classes"]["LS"], found["engine"]["expert_bytes"])

    how = f"live, {scale.size} model, 1 thread, {len(requests)} prompts of {low:,}-{high:,} tokens"
    return _compared(world, run, how)


def _compared(world: World, run: Callable[[str], Latencies], how: str) -> list[Row]:
    chunked, layered = (run(name) for name in LAYERED_SETTINGS)
    how = f"{how} at {LAYERED_LOAD:.0%} of the rate that whole prefills allow"
    for name, found in zip(LAYERED_SETTINGS, (chunked, layered), strict=True):
        world.found[name] = found._asdict()
        if found.unfinished:
            how += f"; {found.unfinished} unfinished with {name} (lower bounds)"
    return list(_layered_rows(chunked, layered, how))


def _layered_rows(chunked: Latencies, layered: Latencies, how: str) -> Iterator[Row]:
    papers = {
        "ttft_ms": ("TTFT, mean", "2.80 -> 1.24 s (0.44)"),
        "e2e_ms": ("end to end, mean", "9.4 -> 5.5 s (0.59)"),
        "expert_loads": ("expert weights read", "35.6 -> 21.7 TB (0.61)"),
        "tbt_p99_ms": ("TBT p99", "-27 % (0.73)"),
    }
    for key, (what, paper) in papers.items():
        over = getattr(layered, key) / getattr(chunked, key)
        yield Row.of(
            Claim(f"layered / chunked (512), unsaturated: {what}", LAYERED, paper),
            f"{over:.2f}",
            how,
        )


# KV that overflows


class NoEvictionError(Exception):
    """A run whose KV pool never overflowed, so that it shows nothing about evictions."""


def kv_rows(world: World) -> list[Row]:
    """Measure LS under BE that outgrows the KV pool, and tokens recomputed after evictions.

    Raises:
        NoEvictionError: No KV was evicted.
    """
    scale = world.scale
    timing = scale.timing
    if scale.size != "1m":
        timing = replace(timing, window_s=16.0, drain_s=2.0)
    found = held_row(world.bench, "S6", world.capacity, scale.seeds, timing, ("qllm2",))
    evicted = Evicted.of(found["runs"], "qllm2")
    for run in found["runs"]:
        run.pop("samples", None)
    world.found["S6"] = found
    if not evicted.evictions:
        raise NoEvictionError(
            "S6 evicted nothing, so it says nothing of what evictions cost; lower max_kv_tokens "
            "or make its window longer"
        )
    over: Estimate = found["over_alone"]["qllm2"]
    how = (
        f"live, {scale.size} model, S6: BE outgrows max_kv_tokens="
        f"{found['scarce']['max_kv_tokens']:,}; there is no KV swap, so evictions recompute"
    )
    paper = "with swap: TTFT SLO attainment +74.7 points"
    tokens = f"{evicted.recomputed_tokens:,} in {evicted.evictions:,} evictions"
    return [
        Row.of(Claim("tokens recomputed under KV shortage, qllm2", SUPERINFER, paper), tokens, how),
        Row.of(
            Claim("LS TTFT p99 under KV shortage / LS alone, qllm2", SUPERINFER, paper),
            over.text(),
            how,
        ),
    ]


# hogs

HOG_LOAD = 0.25
HOG_CLAIM = Claim(
    "p99 with a hog on every core / without: LS TTFT; TPOT, {arm}",
    BLINK,
    "vLLM 150 -> 20,959 ms TTFT; Blink's unchanged (second-hand)",
)


@contextmanager
def spinners() -> Iterator[int]:
    """Run a busy process of ordinary priority on every core that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        for core in cores:
            stack.enter_context(hogs(1, core))
        yield len(cores)


def _p99s(samples: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    ttft, tpot = samples["ttft_ms"], samples["tpot_ms"]
    if not ttft or not tpot:
        raise ValueError(f"{len(ttft)} TTFTs and {len(tpot)} TPOTs: the turn was too short")
    return float(np.percentile(ttft, 99)), float(np.percentile(tpot, 99))


def _chats(world: World, seed: int) -> tuple[list[RequestSpec], Timing]:
    """Return LS requests alone, at a load that leaves most of the machine idle."""
    scale = world.scale
    timing = Timing(warmup_s=0.0, window_s=scale.hog_s, drain_s=scale.hog_s / 2)
    workload = Workload(
        name="S9",
        ls_share=1.0,
        seconds=scale.hog_s,
        capacity=world.capacity,
        load=HOG_LOAD,
        length_scale=0.125,
        max_len=1024,
        ls_slo=Slo(),
    )
    return workload.requests(seed), timing


def _in_process(world: World, seed: int) -> Mapping[str, Sequence[float]]:
    requests, timing = _chats(world, seed)
    found: Mapping[str, Sequence[float]] = run_requests(
        world.bench, Setting("qllm2"), requests, timing
    )["samples"]
    return found


def hog_rows(world: World) -> list[Row]:
    """Measure tail latencies next to spinners: ours in one process, ours and peers over HTTP."""
    base = f"{world.scale.size} model, LS alone at load {HOG_LOAD:g}, {world.scale.hog_s:g} s each"
    quiet = _p99s(_in_process(world, 1))
    with spinners() as count:
        hogged = _p99s(_in_process(world, 1))
    named = HOG_CLAIM._replace(what=HOG_CLAIM.what.format(arm="qllm, one process and thread"))
    how = f"live, Python API, {base}; {count} spinners"
    rows = [_hog_row(named, quiet, hogged, how)]
    for name in ("qllm", *world.scale.arms):
        claim = HOG_CLAIM._replace(what=HOG_CLAIM.what.format(arm=f"{name} over HTTP"))
        how = f"live, HTTP, {base}, 1 thread; {count} spinners"
        try:
            rows.append(_hog_row(claim, *_served_twice(world, PEERS[name]), how))
        except InstallError as error:
            rows.append(Row.of(claim, None, how, str(error)))
    world.found["hogs"] = {row.claim: row.here for row in rows}
    return rows


def _hog_row(
    claim: Claim, quiet: tuple[float, float], hogged: tuple[float, float], how: str
) -> Row:
    parts = [f"{b / a:.2f} ({a:,.1f} -> {b:,.1f} ms)" for a, b in zip(quiet, hogged, strict=True)]
    return Row.of(claim, "; ".join(parts), how)


def _home(world: World, peer: Peer) -> Path:
    """Return the environment of a peer.

    Raises:
        InstallError: The peer is not installed, and this run may not install it or failed to.
    """
    cache = cache_dir() / "peers"
    is_there = peer.environment is None or (cache / f"{peer.environment}.json").exists()
    if not is_there and not world.scale.install:
        raise InstallError(f"{peer.name} is not installed here; run with --install")
    return installed(peer, cache)


def _served_twice(world: World, peer: Peer) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return TTFT and TPOT p99 of one server, quiet and hogged."""
    from transformers import AutoTokenizer

    requests, timing = _chats(world, 1)
    arrivals = with_tokens(requests, world.bench.corpus)
    model = make_random_moe(size=world.scale.size, seed=0)
    place = Place(_home(world, peer), model, free_port(), 1)
    server = peer.server(place, AutoTokenizer.from_pretrained(model))
    with (
        tempfile.TemporaryDirectory(prefix="qllm-papers-") as folder,
        serving(peer, place, Path(folder) / "log"),
    ):
        send_http(server, [replace(a, at_s=0.0, max_tokens=4) for a in arrivals[:2]], 5.0)
        quiet = send_http(server, arrivals, timing.total_s)
        with spinners():
            hogged = send_http(server, arrivals, timing.total_s)
    return _judged(quiet, timing, peer), _judged(hogged, timing, peer)


def _judged(served: Sequence[Served], timing: Timing, peer: Peer) -> tuple[float, float]:
    errors = report(served, timing.window)["LS"]["errors"]
    if errors:
        said = next(s.error for s in served if s.error)
        raise RuntimeError(f"{errors} requests to {peer.name} failed: {said}")
    return _p99s(
        {
            "ttft_ms": [s.ttft_ms(timing.total_s) for s in served],
            "tpot_ms": [t for s in served if (t := s.tpot_ms) is not None],
        }
    )


PARTS: dict[str, Callable[[World], list[Row]]] = {
    "rates": rate_rows,
    "layered-sim": simulated_layered_rows,
    "layered": layered_rows,
    "kv": kv_rows,
    "hogs": hog_rows,
}
CLAIMS = {
    "rates": Claim("LS TTFT, turnaround, SLO attainment and throughput", QLLM, "65.2x, 12.8x"),
    "layered-sim": Claim("layered / chunked (512), unsaturated", LAYERED, "0.44 of the TTFT"),
    "layered": Claim("layered / chunked (512), unsaturated", LAYERED, "0.44 of the TTFT"),
    "kv": Claim("tokens recomputed under KV shortage, qllm2", SUPERINFER, "+74.7 points"),
    "hogs": HOG_CLAIM._replace(what="p99 with a hog on every core / without"),
}
"""Claims of the parts, for the row of a part that failed."""
