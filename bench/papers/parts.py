"""The claims on layered prefill, and on busy processes next to the engine; and all parts."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.papers.prompts import PLA, STREAMS, laps_rows, stream_rows
from bench.papers.rates import rate_rows
from bench.papers.rotation import rotation_rows
from bench.papers.rows import (
    BLINK,
    LAYERED,
    PRINTED,
    QLLM,
    SUPERINFER,
    Claim,
    Row,
    Way,
    World,
)
from bench.papers.servers import core_time, samples_of, started
from bench.policies.live import Setting, Timing, run_requests
from bench.serving.over_http import hogs
from bench.serving.servers import PEERS, InstallError, Peer, Place
from qllm.config import EngineConfig
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import Priority, Slo
from qllm.workloads.arrivals import Gamma
from qllm.workloads.capacity import Capacity
from qllm.workloads.client import send_http
from qllm.workloads.generators import Workload
from qllm.workloads.lengths import between
from qllm.workloads.measure import SLO
from qllm.workloads.spec import RequestSpec
from qllm.workloads.tokens import with_tokens
from qllm.workloads.traced import engine_report

# layered prefill

LAYERED_SETTINGS = ("chunked:step_tokens=512", "layered:group_tokens=512")
LAYERED_LOAD = 0.6
LAYERED_OUTPUT = (96, 160)
LAYERED_OUTPUT_LIVE = (16, 32)


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

    how = f"{costs.machine}, {costs.model}, {count} prompts of 4,000-8,000 tokens"
    return _compared(world, run, how, "simulated")


def layered_timing(capacity: Capacity, requests: Sequence[RequestSpec], longest: int) -> Timing:
    """Return a window for all requests, and a drain for four prompts of the longest."""
    return Timing(
        warmup_s=0.0,
        window_s=requests[-1].at_s + 0.1,
        drain_s=4 * longest / capacity.prefill_tokens_per_s + 2.0,
    )


def layered_rows(world: World) -> list[Row]:
    """Measure the same live."""
    scale = world.scale
    low, high = scale.prompt
    capacity = world.bench.capacity((low + high) // 2)
    requests = long_prompts(capacity, scale.count, scale.prompt, LAYERED_OUTPUT_LIVE, 1)
    timing = layered_timing(capacity, requests, high)

    def run(name: str) -> Latencies:
        found = run_requests(
            world.bench,
            Setting.parse(name),
            requests,
            timing,
            max_step_tokens=8192,
            until_answered=True,
        )
        return _latencies(found["classes"]["LS"], found["engine"]["expert_bytes"])

    how = f"{scale.size} model, 1 thread, {len(requests)} prompts of {low:,}-{high:,} tokens"
    return _compared(world, run, how, "live")


def _compared(world: World, run: Callable[[str], Latencies], how: str, way: Way) -> list[Row]:
    chunked, layered = (run(name) for name in LAYERED_SETTINGS)
    how = f"{how} at {LAYERED_LOAD:.0%} of the rate that whole prefills allow"
    for name, found in zip(LAYERED_SETTINGS, (chunked, layered), strict=True):
        world.found[name] = found._asdict()
        if found.unfinished:
            how += f"; {found.unfinished} unfinished with {name} (lower bounds)"
    return list(_layered_rows(chunked, layered, how, way))


def layered_claim(name: str, what: str, paper: str, target: str, way: Way) -> Claim:
    """Return a claim on layered prefill."""
    text = f"layered / chunked (512), unsaturated: {what}"
    return Claim(name, text, LAYERED, paper, target, way)


def _layered_rows(chunked: Latencies, layered: Latencies, how: str, way: Way) -> Iterator[Row]:
    papers = {
        "ttft_ms": ("L7", "TTFT, mean", "2.80 -> 1.24 s (0.44)", "<= 0.44"),
        "e2e_ms": ("L8", "end to end, mean", "9.4 -> 5.5 s (0.59)", "<= 0.59"),
        "expert_loads": ("L6", "expert weights read", "35.6 -> 21.7 TB (0.61)", "<= 0.61"),
        "tbt_p99_ms": ("L10", "TBT p99", "-27 % (0.73)", "<= 0.73"),
    }
    for key, claim in papers.items():
        over = getattr(layered, key) / getattr(chunked, key)
        yield Row.of(layered_claim(*claim, way), over, how)


# hogs

HOG_LOAD = 0.25
HOG_WARM_S = 5.0
"""Seconds of arrivals that a server, or our process, answers before both turns."""


def hog_claim(arm: str, target: str = PRINTED) -> Claim:
    """Return the claim on interference, for one arm."""
    return Claim(
        "B2", f"p99 with a hog on every core / without: LS TTFT, {arm}", BLINK,
        "vLLM 150 -> 20,959 ms TTFT; Blink's unchanged (second-hand)", target,
    )  # fmt: skip


@contextmanager
def spinners() -> Iterator[int]:
    """Run a busy process of ordinary priority on every core that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        for core in cores:
            stack.enter_context(hogs(1, core))
        yield len(cores)


NICE = -10
"""Priority of the server that other work of ordinary priority, 0, hardly delays."""


def raise_session(session: int, nice: int) -> None:
    """Give a session of processes its priority over other sessions.

    With `sched_autogroup_enabled`, the kernel shares cores between sessions by this number alone,
    and `nice` only orders the processes inside one session.

    Raises:
        InstallError: This user may not give that priority.
    """
    if os.getpriority(os.PRIO_PROCESS, session) != nice:
        raise InstallError(f"this user may not start a process with nice {nice}")
    group = Path(f"/proc/{session}/autogroup")
    if group.exists():
        try:
            group.write_text(str(nice))
        except OSError as error:
            raise InstallError(f"this user may not give a session nice {nice}: {error}") from None


def nice_server() -> Peer:
    """Return our server, started by `nice` with a higher priority."""

    def command(place: Place) -> list[str]:
        return ["nice", "-n", str(NICE), *PEERS["qllm"].command(place)]

    return replace(PEERS["qllm"], name=f"qllm with nice {NICE}", command=command)


class Tail(NamedTuple):
    """Latencies of a turn, quiet or hogged."""

    ttft_ms: float
    tpot_ms: float
    waited: float | None
    """Part of the time in which the server's threads waited for a core; None if not counted."""

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], waited: float | None = None) -> "Tail":
        """Return the 99th percentiles of samples."""
        ttft, tpot = samples["ttft_ms"], samples["tpot_ms"]
        if not ttft or not tpot:
            raise ValueError(f"{len(ttft)} TTFTs and {len(tpot)} TPOTs: the turn was too short")
        return cls(float(np.percentile(ttft, 99)), float(np.percentile(tpot, 99)), waited)


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
        world.bench, Setting("qllm2"), requests, timing, until_answered=True
    )["samples"]
    return found


def hog_rows(world: World) -> list[Row]:
    """Measure tail latencies next to spinners: ours in one process, ours and peers over HTTP."""
    base = f"{world.scale.size} model, LS alone at load {HOG_LOAD:g}, {world.scale.hog_s:g} s each"
    warm = replace(world, scale=replace(world.scale, hog_s=HOG_WARM_S))
    _in_process(warm, 1)
    quiet = Tail.of(_in_process(world, 1))
    with spinners() as count:
        hogged = Tail.of(_in_process(world, 1))
    named = hog_claim("qllm, one process and thread", "<= 1.3")
    how = f"Python API, {base}; {count} spinners"
    rows = [_hog_row(named, quiet, hogged, how)]
    asked = "<= 1.3"
    arms = [(PEERS["qllm"], 0, asked), (nice_server(), NICE, asked)]
    arms += [(PEERS[arm], 0, PRINTED) for arm in world.scale.arms]
    for peer, nice, target in arms:
        claim = hog_claim(f"{peer.name} over HTTP", target)
        how = f"HTTP, {base}, 1 thread; {count} spinners"
        try:
            rows.append(_hog_row(claim, *_served_twice(world, peer, nice), how))
        except InstallError as error:
            rows.append(Row.of(claim, None, how, str(error)))
    world.found["hogs"] = {row.claim: row.here for row in rows}
    return rows


def _hog_row(claim: Claim, quiet: Tail, hogged: Tail, how: str) -> Row:
    ttft, tpot = (
        (b / a, f"{a:,.1f} -> {b:,.1f} ms") for a, b in zip(quiet[:2], hogged[:2], strict=True)
    )
    more = f" ({ttft[1]}); TPOT {tpot[0]:.2f} ({tpot[1]})"
    if quiet.waited is not None and hogged.waited is not None:
        more += f"; its threads waited for a core {quiet.waited:.0%} -> {hogged.waited:.0%}"
    return Row.of(claim, ttft[0], how, more=more)


def _served_twice(world: World, peer: Peer, nice: int) -> tuple[Tail, Tail]:
    """Return the latencies of one server, quiet and hogged.

    Both turns have the same lengths and arrivals, and other tokens, so that the second finds no
    prefix of the first. A short third turn comes before them.

    Args:
        world: Model and scale.
        peer: The server.
        nice: Priority that its command asks for; 0 asks for none.

    Raises:
        InstallError: The peer is not there, or this user may not start it with its priority.
    """
    requests, timing = _chats(world, 1)
    warm, first, second = (with_tokens(requests, world.bench.corpus, seed) for seed in range(3))
    slos = {Priority.LS: SLO}
    early = [arrival for arrival in warm if arrival.at_s < HOG_WARM_S]
    with started(world, peer, requests) as (server, session):
        if nice:
            raise_session(session, nice)
        send_http(server, early, 2 * HOG_WARM_S, until_answered=True)
        times = [core_time(session)]
        quiet = send_http(server, first, timing.total_s, until_answered=True)
        times.append(core_time(session))
        with spinners():
            hogged = send_http(server, second, timing.total_s, until_answered=True)
        times.append(core_time(session))
    before, beside = (
        Tail.of(samples_of(served, timing, slos, peer)["samples"], end.waited_since(begin))
        for served, (begin, end) in zip((quiet, hogged), pairwise(times), strict=True)
    )
    return before, beside


PARTS: dict[str, Callable[[World], list[Row]]] = {
    "rates": rate_rows,
    "layered-sim": simulated_layered_rows,
    "layered": layered_rows,
    "rotation": rotation_rows,
    "laps": laps_rows,
    "streams": stream_rows,
    "hogs": hog_rows,
}
CLAIMS = {
    "rates": Claim("Q13", "LS TTFT, turnaround, SLO and throughput", QLLM, "65.2x", ">= 65.2"),
    "layered-sim": layered_claim("L7", "all numbers", "0.44 of the TTFT", "<= 0.44", "simulated"),
    "layered": layered_claim("L7", "all numbers", "0.44 of the TTFT", "<= 0.44", "live"),
    "rotation": Claim("SI6", "targets met", SUPERINFER, "+74.7 points", ">= 74.7"),
    "laps": Claim("P10", "TTFT p90 of short prompts: laps / fcfs", PLA, "-30 %", "<= 0.7"),
    "streams": Claim("S9", "TTFT in pieces / whole", STREAMS, "3.9 to 4.3x lower", "<= 0.25"),
    "hogs": hog_claim("all arms"),
}
"""Claims of the parts, for the row of a part that failed."""
