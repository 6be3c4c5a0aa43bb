"""Streaming prompts: their gain, and their cost for other requests.

    python -m bench.serving.streams [--quick] [--rows low,high,...]

    low         300M model, one prompt at a time, gaps of twice a piece's prefill:
                TTFT after the last piece, streamed over whole                          <= 0.25
    high        S13 near saturation, simulated (Qwen3-30B-A3B, H200): mean TTFT, the same <= 0.12
    throughput  300M, prompts sent as fast as possible: time whole over streamed     >= 0.98
    short       S13, KV short, a fast and a slow link to move it, simulated (H100): mean TTFT of
                the better of always and never moving it, over that of the cost rule    >= 0.95
    others      LS chats next to S13, simulated: their TTFT p99, streamed over whole     <= 1.05
    append      300M: one append of 64 tokens at 8k of context over at 1k                <= 1.5
                (and the part of the pass itself: the same 64 tokens of a whole prompt)

Live rows alternate both kinds within one engine; the ratio is of medians. Simulated rows are
functions of their seed. The last line is JSON; `--out` merges the rows into a file.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common import (
    MODEL,
    SPECIAL,
    machine,
    model_folder,
    print_result,
    result_file,
    with_lines,
)
from bench.serving.stream_lines import lines_of
from qllm import QLLMEngine, SamplingParams
from qllm.config import EngineConfig
from qllm.measure.variants import KV_SIZES
from qllm.record.metrics import RequestMetrics
from qllm.record.summary import percentile, request_metrics
from qllm.record.trace import Ran
from qllm.sim.costs import CostFile
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import Priority, RequestStatus
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import named_workload
from qllm.workloads.spec import RequestSpec

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PIECES, PIECE = 6, 128
REACH = {
    "low": 0.25,
    "high": 0.12,
    "throughput": 0.98,
    "short": 0.95,
    "others": 1.05,
    "append": 1.5,
}
AT_LEAST = {"throughput", "short"}
PCIE_BYTES_PER_NS = 20.0
"""Nominal rate of a GPU's link."""
SLOW_BYTES_PER_NS = 0.5
"""Rate of a link over which KV takes longer than recomputing it."""


def ids_of(rng: np.random.Generator, count: int) -> list[int]:
    """Return random tokens."""
    return [int(i) for i in rng.integers(SPECIAL, MODEL["vocab_size"], count)]


def live(**settings: Any) -> QLLMEngine:
    """Start an engine of the 300M model without a prefix cache: every prompt is computed."""
    return QLLMEngine.from_pretrained(
        str(model_folder()),
        **{**KV_SIZES, "threads": 2, "conformance": False, "prefix_cache": False, **settings},
    )


def streamed(engine: QLLMEngine, ids: Sequence[int], gap_s: float) -> RequestMetrics:
    """Send a prompt piece by piece."""
    prompt = engine.open("LS")
    for at in range(0, len(ids), PIECE):
        if at:
            time.sleep(gap_s)
        prompt.append(ids[at : at + PIECE])
    return prompt.send(4, sampling=GREEDY).result().metrics


def whole(engine: QLLMEngine, ids: Sequence[int], gap_s: float) -> RequestMetrics:
    """Send a prompt whole when the last piece is there."""
    time.sleep(gap_s * (len(ids) // PIECE - 1))
    return engine.submit(list(ids), "LS", 4, sampling=GREEDY).result().metrics


def low(quick: bool) -> dict[str, Any]:
    """Measure TTFT after the last piece at low load."""
    rng, found = np.random.default_rng(0), {"streamed": [], "whole": []}
    with live() as engine:
        whole(engine, ids_of(rng, PIECE), 0)
        begin = time.monotonic()
        whole(engine, ids_of(rng, PIECE), 0)
        gap_s = 2 * (time.monotonic() - begin)
        for _ in range(3 if quick else 12):
            for name, send in (("streamed", streamed), ("whole", whole)):
                ttft = send(engine, ids_of(rng, PIECES * PIECE), gap_s).ttft_ms
                found[name].append(ttft)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"ratio": medians["streamed"] / medians["whole"], "ttft_ms": medians, "gap_s": gap_s}


def throughput(quick: bool) -> dict[str, Any]:
    """Measure prompts sent as fast as possible; the ratio is the median over pairs.

    A pair has the same prompts, so both of its runs use the same experts.
    """
    rng, found = np.random.default_rng(1), {"streamed": [], "whole": []}

    def run(engine: QLLMEngine, in_pieces: bool, prompts: Sequence[list[int]]) -> float:
        begin = time.monotonic()
        if in_pieces:
            opened = [engine.open("BE") for _ in prompts]
            for at in range(0, PIECES * PIECE, PIECE):
                for prompt, ids in zip(opened, prompts, strict=True):
                    prompt.append(ids[at : at + PIECE])
            handles = [prompt.send(8, sampling=GREEDY) for prompt in opened]
        else:
            handles = [engine.submit(ids, "BE", 8, sampling=GREEDY) for ids in prompts]
        for handle in handles:
            handle.result()
        return time.monotonic() - begin

    with live() as engine:
        for i in range(3 if quick else 21):
            prompts = [ids_of(rng, PIECES * PIECE) for _ in range(6)]
            for name in ("streamed", "whole") if i % 2 else ("whole", "streamed"):
                seconds = run(engine, name == "streamed", prompts)
                if i:  # the first pair warms up
                    found[name].append(seconds)
    ratios = [w / s for w, s in zip(found["whole"], found["streamed"], strict=True)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"ratio": statistics.median(ratios), "ratios": ratios, "seconds": medians}


CONTEXTS = (1024, 7936)
"""Tokens before an append; with three appends of 64 tokens at most 8,192 in total."""


def append(quick: bool) -> dict[str, Any]:
    """Measure one append of 64 tokens, from the call to the end of its computation."""
    rng, medians, outside = np.random.default_rng(2), {}, {}
    settings: dict[str, Any] = {"run_in": "thread", "max_kv_tokens": 16384, "record": True}
    with live(**settings, max_step_tokens=64) as engine:
        chunks = _chunks(engine, ids_of(rng, CONTEXTS[1] + 192))
    with live(**settings) as engine:
        for context in CONTEXTS:
            prompt, times, passes = engine.open("LS"), [], []
            prompt.append(ids_of(rng, context))
            _settle(engine, prompt)
            for _ in range(3):
                begin, seen = time.monotonic(), len(engine.trace.events)
                prompt.append(ids_of(rng, 64))
                _settle(engine, prompt)
                times.append(1000 * (time.monotonic() - begin))
                passes.append(_pass_ms(engine, seen))
            prompt.cancel()
            medians[context] = statistics.median(times)
            rests = [a - b for a, b in zip(times, passes, strict=True)]
            outside[context] = statistics.median(rests)
    few, many = CONTEXTS
    return {
        "ratio": medians[many] / medians[few],
        "ratio_of_whole_prompts": chunks[many] / chunks[few],
        "ratio_outside_passes": outside[many] / outside[few],
        "ratio_of_flops": _flops(many) / _flops(few),
        "ms": medians,
        "whole_prompts_ms": chunks,
        "outside_passes_ms": outside,
    }


def _chunks(engine: QLLMEngine, ids: list[int]) -> dict[int, float]:
    """Return the milliseconds of the pass of 64 tokens at each context of a whole prompt."""
    engine.submit(ids, "LS", 1, sampling=GREEDY).result()
    ran = [e for e in engine.trace.events if isinstance(e, Ran)]
    ms = [(e.at_ns - e.start_ns) / 1e6 for e in ran]
    return {at: statistics.median(ms[at // 64 : at // 64 + 3]) for at in CONTEXTS}


def _pass_ms(engine: QLLMEngine, seen: int) -> float:
    ran = [e for e in engine.trace.events[seen:] if isinstance(e, Ran)]
    return sum(e.at_ns - e.start_ns for e in ran) / 1e6


def _flops(context: int) -> int:
    """Return the operations per token of a layer at a context, without the head."""
    m = MODEL
    width, heads, kv_heads = m["hidden_size"], m["num_attention_heads"], m["num_key_value_heads"]
    dense = width * m["head_dim"] * 2 * (heads + kv_heads)
    dense += 3 * width * m["moe_intermediate_size"] * m["num_experts_per_tok"]
    return 2 * dense + 4 * heads * m["head_dim"] * context


def _settle(engine: QLLMEngine, prompt: Any) -> None:
    """Wait until all received pieces of a prompt are computed."""
    engine.call(int)
    while prompt.handle.status is not RequestStatus.OPEN:
        time.sleep(0.0002)


# -- simulated


def h100(bytes_per_ns: float | None = None) -> CostFile:
    """Return costs of Qwen3-30B-A3B on an H100 from data sheets; with a rate, KV can be moved."""
    found = preset("h100", "qwen3-moe")
    if bytes_per_ns is None:
        return found
    token_bytes = 2 * 48 * 4 * 128 * 2  # K and V, layers, heads, width, bytes
    costs = {**found.costs, "move_token_ns": token_bytes / bytes_per_ns}
    return found.model_copy(update={"costs": costs})


CAPACITY = Capacity(prefill_tokens_per_s=30_000, output_tokens_per_s=3_000)


def ttfts(requests: Sequence[RequestSpec], costs: CostFile, **how: Any) -> dict[str, list[float]]:
    """Return TTFTs in ms, of retrieval and of chats, by name; best effort is in neither."""
    run = simulate(requests, "qllm2", costs, **how)
    found: dict[str, list[float]] = {"retrieval": [], "chat": [], "evicted": []}
    for m in request_metrics(run.events):
        kind = {"ls": "retrieval", "chat": "chat"}.get(m.name.partition("-")[0])
        if m.ttft_ms is not None and kind is not None:
            found[kind].append(m.ttft_ms)
        found["evicted"].append(m.evictions)
    return found


def high(quick: bool) -> dict[str, Any]:
    """Measure near and beyond saturation: prompts computed while they stream have little left.

    An H200 has enough KV. An H100 cannot hold that of about 25 streaming prompts; the row is about
    computing, so that number is only printed.
    """
    seconds = 60 if quick else 300
    rows = {}
    for name, load in (("h200", 0.3), ("h200", 0.6), ("h200", 0.9), ("h200", 1.1), ("h100", 0.9)):
        requests = named_workload("S13", seconds=seconds, capacity=CAPACITY, load=load)
        found = {
            arm: ttfts(some, preset(name, "qwen3-moe"))
            for arm, some in (("streamed", requests), ("whole", [r.whole() for r in requests]))
        }
        mean = {arm: statistics.mean(x["retrieval"]) for arm, x in found.items()}
        p99 = {f"{arm}_p99": percentile(x["retrieval"], 99) for arm, x in found.items()}
        evicted = sum(found["streamed"]["evicted"])
        ratio = mean["streamed"] / mean["whole"]
        rows[f"{name} {load}"] = {**mean, **p99, "evicted": evicted, "ratio": ratio}
    return {"ratio": rows["h200 0.9"]["ratio"], "loads": rows}


def short(quick: bool) -> dict[str, Any]:
    """Measure a KV pool for a few prompts: lost KV is moved or recomputed."""
    rows = {
        f"{rate:g} GB/s": _short(quick, rate) for rate in (PCIE_BYTES_PER_NS, SLOW_BYTES_PER_NS)
    }
    return {"ratio": min(row["ratio"] for row in rows.values()), "links": rows}


def _short(quick: bool, bytes_per_ns: float) -> dict[str, Any]:
    seconds = 60 if quick else 200
    requests = named_workload("S13", seconds=seconds, capacity=CAPACITY, load=0.7)
    costs, pool = h100(bytes_per_ns), 60_000
    arms: dict[str, dict[str, Any]] = {
        "rule": {"swap": 8 * pool, "move": None},
        "always moved": {"swap": 8 * pool, "move": 0},
        "never moved": {"swap": 0, "move": None},
    }
    means, evicted = {}, {}
    for name, arm in arms.items():
        config = EngineConfig(max_kv_tokens=pool, swap_kv_tokens=arm["swap"])
        found = ttfts(requests, costs, config=config, move_token_ns=arm["move"])
        means[name], evicted[name] = statistics.mean(found["retrieval"]), sum(found["evicted"])
    if not evicted["never moved"]:
        raise SystemExit("nobody lost KV: the row says nothing")
    best = min(means["always moved"], means["never moved"])
    return {"ratio": best / means["rule"], "mean_ttft_ms": means, "evictions": evicted}


def others(quick: bool) -> dict[str, Any]:
    """Measure LS chats next to retrieval."""
    seconds = 60 if quick else 300
    streams = named_workload("S13", seconds=seconds, capacity=CAPACITY, load=0.4)
    chats = [
        RequestSpec(
            at_s=r.at_s,
            priority=Priority.LS,
            num_prompt_tokens=r.num_prompt_tokens,
            max_tokens=r.max_tokens,
            name=f"chat-{i}",
        )
        for i, r in enumerate(named_workload("S5", seconds=seconds, capacity=CAPACITY, load=0.1))
        if r.priority == Priority.LS
    ]
    p99 = {
        name: percentile(ttfts([*some, *chats], h100())["chat"], 99)
        for name, some in (("streamed", streams), ("whole", [r.whole() for r in streams]))
    }
    return {"ratio": p99["streamed"] / p99["whole"], "chats": len(chats), "p99_ms": p99}


ROWS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "low": low, "high": high, "throughput": throughput, "short": short, "others": others,
    "append": append,
}  # fmt: skip


def main() -> None:
    """Run rows and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.rows.split(","):
        rows[name] = found = ROWS[name](args.quick)
        ratio, reach = found["ratio"], REACH[name]
        found["reached"] = ratio >= reach if name in AT_LEAST else ratio <= reach
        found["machine"] = machine()
        sign = ">=" if name in AT_LEAST else "<="
        print(f"{name:10} {ratio:.3f} ({sign} {reach}) {'ok' if found['reached'] else 'MISSED'}")
    document = {"quick": args.quick, "reach": REACH, "rows": rows}
    if args.out is not None and args.out.exists():
        document["rows"] = json.loads(args.out.read_text())["rows"] | rows
    print_result(with_lines(document, lines_of(document)), args.out)


if __name__ == "__main__":
    main()
