"""The claims on prompts: short and long ones (PLA-Serve), and those that arrive in pieces."""

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.common import estimate, paired, quantile
from bench.energy import per_ktok
from bench.papers.rates import mean
from bench.papers.rows import PRINTED, Claim, Row, World
from bench.policies.live import Setting, Timing, run_requests
from qllm import QLLMEngine, SamplingParams
from qllm.record.summary import request_metrics
from qllm.types import Priority, Slo
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload
from qllm.workloads.lengths import Lengths, between
from qllm.workloads.spec import RequestSpec, Turn

PLA = "PLA-Serve, arXiv:2601.11589 (H200, Qwen2.5-32B, against SGLang)"
STREAMS = "Stream2LLM, arXiv:2604.16395 (H200, crawler and nearest-neighbour traces)"
GREEDY = SamplingParams(temperature=0, ignore_eos=True)

# short and long prompts

SHORT, LONG = between(16, 64), between(1200, 2000)
LONG_SHARE = 0.15
TURNS = 5
LAPS = ("fcfs", "chunked:step_tokens=512", "laps", "laps:short_tokens=256")
LAPS_LOADS = {"latency": 0.8, "throughput": 2.0}
"""Parts of capacity at which latencies, and prefill tokens per second, are measured."""


def chats(per_s: float, count: int, seed: int) -> list[RequestSpec]:
    """Return chats of several turns that only prefill: one token is asked for.

    The first prompt of a chat is long or short. Each later turn adds a short text, and its begin is
    in the prefix cache.

    Args:
        per_s: New chats per second, a Poisson process.
        count: Number of chats.
        seed: Seed of times and lengths.
    """
    rng, at_s, out = random.Random(f"chats {seed}"), 0.0, list[RequestSpec]()
    for i in range(count):
        at_s += rng.expovariate(per_s)
        lengths: Lengths = LONG if rng.random() < LONG_SHARE else SHORT
        tokens = lengths.at(rng.uniform(0, 100))
        for turn in range(TURNS):
            name = f"chat-{i}.{turn}"
            before = f"chat-{i}.{turn - 1}"
            follows = Turn(before, rng.uniform(0.1, 0.5), extends=before) if turn else None
            out.append(
                RequestSpec(
                    at_s=at_s, priority=Priority.LS, num_prompt_tokens=tokens, max_tokens=1,
                    name=name, follows=follows,
                )
            )  # fmt: skip
            tokens += 1 + SHORT.at(rng.uniform(0, 100))
    return out


def new_tokens(requests: Sequence[RequestSpec]) -> dict[str, int]:
    """Return the tokens of each turn that no earlier turn has, by name."""
    whole = {r.name: r.num_prompt_tokens + r.max_tokens for r in requests}
    return {
        r.name: r.num_prompt_tokens - (whole[r.follows.extends] if r.follows else 0)
        for r in requests
    }


def chats_per_s(capacity: Capacity, load: float) -> float:
    """Return the new chats per second at a load."""
    per_chat = LONG_SHARE * LONG.mean + (TURNS - LONG_SHARE) * SHORT.mean
    return load * capacity.prefill_tokens_per_s / per_chat


def laps_timing(requests: Sequence[RequestSpec], drain_s: float) -> Timing:
    """Return a window for all chats to begin, and three seconds for their turns."""
    return Timing(warmup_s=0.0, window_s=max(r.at_s for r in requests) + 3.0, drain_s=drain_s)


def laps_rows(world: World) -> list[Row]:
    """Measure `laps` against `fcfs` and `chunked`, live, on chats that only prefill."""
    scale = world.scale
    slo = Slo(ttft_ms=4e3 * SHORT.mean / world.capacity.prefill_tokens_per_s)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAPS}
    for seed in scale.seeds:
        for name in LAPS:
            found[name].append({})
        for what, load in LAPS_LOADS.items():
            requests = chats(chats_per_s(world.capacity, load), scale.chats, seed)
            timing = laps_timing(requests, scale.timing.drain_s)
            for name in LAPS:
                run = run_requests(
                    world.bench, Setting.parse(name), requests, timing, slo=slo, until_answered=True
                )
                found[name][-1] |= _laps_numbers(what, run, new_tokens(requests), slo)
    world.found["laps"] = found
    how = (
        f"{scale.size} model, 1 thread, {scale.chats} chats of {TURNS} turns, {LONG_SHARE:.0%} "
        f"begin with {LONG.at(0):,}-{LONG.at(100):,} tokens, one token asked for, "
        f"{len(scale.seeds)} seeds; SLO {slo.ttft_ms:,.0f} ms; load"
    )
    return [row for name in LAPS[1:] for row in _laps_rows(name, found, how)]


def _laps_numbers(
    what: str, run: Mapping[str, Any], fresh: Mapping[str, int], slo: Slo
) -> dict[str, Any]:
    if what == "throughput":
        energy = {n: run["engine"][n] for n in ("joules", "computed_tokens")}
        return {
            "prefill_per_s": run["classes"]["LS"]["prefill_tokens_per_s"],
            "energy": energy,
        }
    first_ms = run["samples"]["first_ms"]
    shorts = [ms for name, ms in first_ms.items() if fresh[name] <= SHORT.longest]
    return {"short_ms": shorts, "missed": sum(ms > (slo.ttft_ms or 0) for ms in shorts)}


def _laps_rows(name: str, found: Mapping[str, list[dict[str, Any]]], how: str) -> Iterator[Row]:
    base, mine = found["fcfs"], found[name]
    short = estimate(
        [x["short_ms"] for x in mine], quantile(90), over=[x["short_ms"] for x in base]
    )
    missed, of = (sum(x["missed"] for x in side) for side in (mine, base))
    rates = [a["prefill_per_s"] / b["prefill_per_s"] for a, b in zip(mine, base, strict=True)]
    low, high = LAPS_LOADS.values()
    part = missed / of if of else None
    for claim, what, paper, target, value, load in (
        ("P10", "TTFT p90 of short prompts", "-30 %", "<= 0.7", short, low),
        ("P11", "SLO violations of short prompts", "-28 %", "<= 0.72", part, low),
        ("P12", "prefill tokens/s", "+35 %", ">= 1.35", paired(rates), high),
    ):  # fmt: skip
        target = target if name == "laps" else PRINTED
        more = f" ({missed} of {of})" if claim == "P11" and of else ""
        why = None if value is not None else "fcfs violated none"
        if claim == "P12":
            more = f"; {per_ktok([x['energy'] for x in mine])}"
        named = Claim(claim, f"{what}: {name} / fcfs", PLA, paper, target)
        yield Row.of(named, value, f"{how} {load:g}", why, more=more)


# prompts in pieces


class Due(NamedTuple):
    """A piece of a streaming prompt and its time."""

    at_s: float
    number: int
    piece: int


def stream(engine: QLLMEngine, requests: Sequence[RequestSpec], corpus: Sequence[int]) -> list[Any]:
    """Send prompts piece by piece at their times; return the handles of all answers."""
    due = sorted(
        Due(request.at_s + (piece.after_s if piece else 0.0), number, i)
        for number, request in enumerate(requests)
        for i, piece in enumerate(request.pieces or (None,))
    )
    open_ones: dict[int, Any] = {}
    handles, start = [], time.monotonic()
    for at_s, number, i in due:
        time.sleep(max(0.0, start + at_s - time.monotonic()))
        request = requests[number]
        rng = random.Random(f"{request.name} {i}")
        begin = rng.randrange(len(corpus))
        level = Priority(request.priority).name

        def cut(num: int, begin: int = begin) -> list[int]:
            return [corpus[(begin + k) % len(corpus)] for k in range(num)]

        if not request.pieces:
            ids = cut(request.num_prompt_tokens)
            handles.append(
                engine.submit(
                    ids, level, request.max_tokens, sampling=GREEDY, request_id=request.name
                )
            )
            continue
        if i == 0:
            open_ones[number] = engine.open(level, request_id=request.name)
        prompt, piece = open_ones[number], request.pieces[i]
        if prompt.num_tokens > piece.keep:
            prompt.replace(piece.keep, cut(piece.num_tokens))
        else:
            prompt.append(cut(piece.num_tokens))
        if i + 1 == len(request.pieces):
            handles.append(prompt.send(request.max_tokens, sampling=GREEDY))
    return handles


def first_ms(
    world: World, setting: str, requests: Sequence[RequestSpec], **changes: Any
) -> dict[str, float]:
    """Serve requests; return ms from the last piece to the first token of LS answers, by name."""
    with world.bench.engine(setting, **changes) as engine:
        for handle in stream(engine, requests, world.bench.corpus):
            handle.result(600)
        metrics = request_metrics(engine.trace)
    found = {m.name: m.ttft_ms for m in metrics if m.priority <= Priority.LS}
    return {name: ms for name, ms in found.items() if ms is not None}


def retrieval(world: World, name: str, seed: int, load: float) -> list[RequestSpec]:
    """Return the requests of a workload of prompts in pieces, in the sizes of a small machine."""
    mix = Workload(
        name=name, seconds=world.scale.stream_s, capacity=world.capacity, load=load,
        length_scale=0.1, retrieval_scale=0.5, max_len=2048,
    )  # fmt: skip
    return mix.requests(seed)


SCARCE_KV = 4096


def stream_rows(world: World) -> list[Row]:
    """Measure prompts in pieces, live: replaced pieces over whole prompts, and KV that is short."""
    rows = []
    how = (
        f"{world.scale.size} model, 1 thread, lengths * 0.1, windows of "
        f"{world.scale.stream_s:g} s, {len(world.scale.seeds)} seeds"
    )
    for name, what in (("S13", "appended pieces (crawler)"), ("S14", "replaced pieces (ANNS)")):
        arms: dict[str, list[list[float]]] = {"pieces": [], "whole": []}
        for seed in world.scale.seeds:
            requests = retrieval(world, name, seed, 0.3)
            for arm, some in (("pieces", requests), ("whole", [r.whole() for r in requests])):
                some = sorted(some, key=lambda r: r.at_s)
                arms[arm].append(list(first_ms(world, "qllm2", some).values()))
        claim = Claim(
            "S9", f"TTFT after the last piece, mean: {what}, in pieces / whole, {name}", STREAMS,
            "3.9 to 4.3x lower", "<= 0.25",
        )  # fmt: skip
        found = estimate(arms["pieces"], mean, over=arms["whole"])
        rows.append(Row.of(claim, found, f"{how}; load 0.3", None if found else "no answer"))
    of: dict[str, list[float]] = {name: [] for name in ("fcfs", "lcas", "mcps")}
    for seed in world.scale.seeds:
        requests = retrieval(world, "S13", seed, 0.9)
        for policy, means in of.items():
            answers = first_ms(world, policy, requests, max_kv_tokens=SCARCE_KV)
            means.append(statistics.fmean(answers.values()) if answers else float("nan"))
    world.found["streams"] = of
    for policy in ("lcas", "mcps"):
        ratios = [a / b for a, b in zip(of[policy], of["fcfs"], strict=True) if np.isfinite(a / b)]
        claim = Claim(
            "S10", f"TTFT after the last piece, mean, KV short: {policy} / fcfs, S13", STREAMS,
            "LCAS and MCPS help under memory pressure", "<= 0.9",
        )  # fmt: skip
        text = f"{how}; load 0.9, max_kv_tokens={SCARCE_KV:,}"
        rows.append(Row.of(claim, paired(ratios) if ratios else None, text,
                           None if ratios else "no answer"))  # fmt: skip
    return rows
