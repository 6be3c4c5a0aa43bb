"""What the prefix cache is worth and what it costs: `python -m bench.kv [--quick]`.

Rows, all on the 300M random MoE with 2 threads:
    chats      8-turn LS chats over a context of 2k tokens: TTFT of later turns, warm over cold
    no hit     prompts that share nothing: tokens/s, cache on over off, in turns
    shared     32 chats over one system prompt of 2k tokens: bytes of KV kept and copied, and all KV
               over that of one copy per chat: copied, as on a CPU, and by reference, as blocks
               are counted on a GPU
    swap       BE work of four times the KV pool, and LS chats that take its KV and a fifth, or two
               fifths, of the engine's time: swap over recompute, with the prefix cache and without
    rota       one class, KV for two requests, arrivals at 0.87 of what that can do: `rota` with
               swap over `fcfs`; and a burst of eight
    restart    `kill -9` at 4k tokens of context: time to the next token, with `kv_dir` over without
    mover      LS chats while 1 GB goes to the file and 1 GB comes from it: TTFT p99 over idle

Every arm's tokens are compared with those of another. The last line is JSON; the exit status is 1
if tokens differ, a hit that was due did not come, nothing was evicted, or a swapped request was
computed again.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from bench.common import MODEL, SPECIAL
from bench.kv_file import mover_row, restart_row
from qllm import QLLMEngine, SamplingParams
from qllm.measure.random_moe import make_random_moe
from qllm.scheduler.blocks import BlockPool
from qllm.types import Slo

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PAGE, BLOCK = 64, 16
ROWS = ("chats", "no_hit", "shared", "swap", "rota", "restart", "mover")


def _engine(model: str, cache: bool, **settings: Any) -> QLLMEngine:
    return QLLMEngine.from_pretrained(
        model,
        threads=2,
        conformance=False,
        prefix_cache=cache,
        prefix_cache_tokens=32768,
        **settings,
    )


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(i) for i in rng.integers(SPECIAL, MODEL["vocab_size"], count)]


def _turns(engine: QLLMEngine, seed: int, turns: int, context: int) -> list[Any]:
    """One chat: every turn sends all before it, and 40 new tokens."""
    rng = np.random.default_rng(seed)
    ids, found = _ids(rng, context), []
    for _ in range(turns):
        ids = ids + _ids(rng, 40)
        found.append(engine.submit(ids, "LS", 24, sampling=GREEDY).result(120))
        ids = ids + list(found[-1].token_ids)
    return found


def chats_row(off: QLLMEngine, on: QLLMEngine, turns: int, num: int) -> dict[str, Any]:
    """TTFT of the turns after the first."""
    cold = [r for i in range(num) for r in _turns(off, i, turns, 2048)]
    warm = [r for i in range(num) for r in _turns(on, i, turns, 2048)]
    later = [i for i in range(len(cold)) if i % turns]
    p50 = {
        name: statistics.median(arm[i].metrics.ttft_ms or 0.0 for i in later)
        for name, arm in (("cold", cold), ("warm", warm))
    }
    due = all(  # all of the turn before but its last token, in whole pages
        warm[i].metrics.num_cached_tokens >= (len(warm[i].prompt_token_ids) - 41) // PAGE * PAGE
        for i in later
    )
    return {
        "cold_ttft_p50_ms": p50["cold"],
        "warm_ttft_p50_ms": p50["warm"],
        "warm_over_cold": p50["warm"] / p50["cold"],
        "asked": 0.25,
        "same_tokens": [r.token_ids for r in cold] == [r.token_ids for r in warm],
        "hits_due": due,
    }


def _flood(engine: QLLMEngine, seed: int) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens/s, prompt and output, of 8 requests at once that share nothing."""
    rng = np.random.default_rng(seed)
    start = time.perf_counter()
    handles = [engine.submit(_ids(rng, 512), "BE", 48, sampling=GREEDY) for _ in range(8)]
    found = [h.result(120) for h in handles]
    total = sum(len(r.prompt_token_ids) + len(r.token_ids) for r in found)
    return total / (time.perf_counter() - start), [r.token_ids for r in found]


def no_hit_row(off: QLLMEngine, on: QLLMEngine, rounds: int) -> dict[str, Any]:
    """Tokens/s, on over off, the median of pairs in alternating order."""
    ratios, same = [], True
    for i in range(rounds):
        pair = {}
        for name in ("off", "on") if i % 2 else ("on", "off"):
            pair[name] = _flood(on if name == "on" else off, 100 + i)
        ratios.append(pair["on"][0] / pair["off"][0])
        same &= pair["on"][1] == pair["off"][1]
    return {
        "on_over_off": statistics.median(ratios),
        "pairs": ratios,
        "asked": 0.99,
        "same_tokens": same,
    }


def shared_row(off: QLLMEngine, on: QLLMEngine, num: int) -> dict[str, Any]:
    """Chats at once over one system prompt."""
    on.reset_prefix_cache()
    rng = np.random.default_rng(7)
    system = _ids(rng, 2048)
    prompts = [system + _ids(rng, 40) for _ in range(num)]
    arms = {}
    for name, engine in (("off", off), ("on", on)):
        start = time.perf_counter()
        handles = [engine.submit(ids, "LS", 8, sampling=GREEDY) for ids in prompts]
        arms[name] = [h.result(300) for h in handles], time.perf_counter() - start
    stats = on.stats()["prefix_cache"]
    per_token = stats["kept_bytes"] / max(1, stats["kept_tokens"])
    hits = sum(r.metrics.num_cached_tokens for r in arms["on"][0])
    lengths = [len(r.prompt_token_ids) + len(r.token_ids) for r in arms["on"][0]]
    each = sum(-(-n // BLOCK) for n in lengths) * BLOCK
    by_reference = _blocks_by_reference(len(system), lengths) * BLOCK
    return {
        "copied_over_one_copy_each": (stats["kept_tokens"] + each) / each,
        "by_reference_over_one_copy_each": (stats["kept_tokens"] + by_reference) / each,
        "chats": num,
        "kept_bytes": stats["kept_bytes"],
        "kept_tokens": stats["kept_tokens"],
        "copied_bytes": int(hits * per_token),
        "pool_bytes_at_once": int(sum(map(len, prompts)) * per_token),
        "hit_tokens": hits,
        "seconds_off": arms["off"][1],
        "seconds_on": arms["on"][1],
        "same_tokens": [r.token_ids for r in arms["on"][0]]
        == [r.token_ids for r in arms["off"][0]],
        "hits_due": hits > 0,
    }


def _blocks_by_reference(num_shared: int, lengths: list[int]) -> int:
    """Blocks that are held where requests refer to the whole pages that they share; counted."""
    pool = BlockPool(sum(lengths), BLOCK)
    pages = [i.to_bytes(4, "little") for i in range(num_shared // PAGE)]
    for request_id, num_tokens in enumerate(lengths):
        shared = pool.find(pages)
        pool.share(request_id, shared)
        table = [*shared, *pool.take(request_id, pool.blocks_for(num_tokens) - len(shared))]
        for i, page in enumerate(pages):
            pool.name(page, table[i * PAGE // BLOCK : (i + 1) * PAGE // BLOCK])
    return pool.num_blocks - pool.num_free


def _contend(engine: QLLMEngine, seed: int, num_be: int, every_s: float) -> dict[str, Any]:
    """BE requests of 640 tokens at once, and an LS chat of 300 now and then until they end."""
    rng = np.random.default_rng(seed)
    prompts = [_ids(rng, 512) for _ in range(num_be)]
    start, due = time.perf_counter(), every_s / 6
    batch = [engine.submit(ids, "BE", 128, sampling=GREEDY) for ids in prompts]
    chats = []
    while any(h.finish_reason is None for h in batch):
        time.sleep(0.005)
        if time.perf_counter() - start >= due:
            due += every_s
            chats.append(engine.submit(_ids(rng, 284), "LS", 16, sampling=GREEDY))
    done = [h.result(300) for h in batch]
    seconds = time.perf_counter() - start
    answers = [h.result(300) for h in chats]
    ttft = [r.metrics.ttft_ms or 0.0 for r in answers]
    return {
        "be_tokens_per_s": num_be * 640 / seconds,
        "ls_ttft_p99_ms": float(np.percentile(ttft, 99)),
        "evictions": sum(r.metrics.evictions for r in done),
        "recomputed": sum(r.metrics.evict_recomputed_tokens for r in done + answers),
        "swapped_tokens": engine.stats()["swap"]["out_tokens"],
        "tokens": [r.token_ids for r in done],
    }


def swap_row(model: str, rounds: int, num_be: int, load: float) -> dict[str, Any]:
    """KV for a quarter of the BE work; three arms in turns.

    Args:
        model: Its folder.
        rounds: Runs of each arm.
        num_be: BE requests.
        load: Part of the engine's time that LS would take alone.
    """
    pool = num_be * 640 // 4
    arms = {
        "swap": {"cache": True, "swap_kv_tokens": num_be * 640},
        "recompute": {"cache": False},
        "recompute_cache": {"cache": True},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for i in range(rounds):
        every_s = _chat_s(model) / load
        for name in arms if i % 2 else reversed(arms):
            with _engine(model, max_kv_tokens=pool, **arms[name]) as engine:  # type: ignore[arg-type]
                _flood_one(engine)
                found[name].append(_contend(engine, 200 + i, num_be, every_s))

    def over(name: str, what: str) -> float:
        pairs = zip(found["swap"], found[name], strict=True)
        return statistics.median([a[what] / b[what] for a, b in pairs])

    swap, plain = found["swap"], found["recompute"]
    return {
        "ls_load": load,
        "recomputed": sum(x["recomputed"] for x in swap),
        "recomputed_without": [sum(x["recomputed"] for x in found[n]) for n in list(arms)[1:]],
        "evictions_without": [sum(x["evictions"] for x in found[n]) for n in list(arms)[1:]],
        "swapped_tokens": sum(x["swapped_tokens"] for x in swap),
        "be_tokens_per_s": statistics.median(x["be_tokens_per_s"] for x in swap),
        "be_over_recompute": over("recompute", "be_tokens_per_s"),
        "be_over_recompute_cache": over("recompute_cache", "be_tokens_per_s"),
        "be_asked": 1.5,
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
    """How long an LS chat of `_contend` takes alone, on this machine as it is now."""
    with _engine(model, False) as engine:
        _flood_one(engine)
        ids = _ids(np.random.default_rng(2), 284)
        times = [engine.submit(ids, "LS", 16, sampling=GREEDY).result(120) for _ in range(3)]
    return statistics.median(r.metrics.e2e_ms or 0.0 for r in times) / 1e3


def _flood_one(engine: QLLMEngine) -> None:
    engine.submit(_ids(np.random.default_rng(1), 256), "BE", 8, sampling=GREEDY).result(120)


def rota_row(model: str, num: int) -> dict[str, Any]:
    """KV for two requests of 256 + 96 tokens, `num` arrivals; the policy knows the targets."""
    settings: dict[str, Any] = {"max_kv_tokens": 2 * 352}
    with _engine(model, False, policy="fcfs", **settings) as engine:
        _flood_one(engine)
        pair_s = max(r.metrics.e2e_ms or 0.0 for r in _served(engine, [0.0] * 2, Slo())) / 1e3
    slo = Slo(ttft_ms=700.0 * pair_s, tpot_ms=1e3 * pair_s / 7)
    rng = np.random.default_rng(1)
    open_s = np.cumsum(rng.exponential(pair_s / 2 / 0.87, num)).tolist()
    return {
        "pair_s": pair_s,
        "ttft_target_ms": slo.ttft_ms,
        "tpot_target_ms": slo.tpot_ms,
        **_rota_arms(model, settings, open_s, slo),
        "burst": _rota_arms(model, settings, [0.0] * 8, slo._replace(ttft_ms=1400.0 * pair_s)),
    }


def _served(engine: QLLMEngine, at_s: list[float], slo: Slo) -> list[Any]:
    """Requests that arrive at these times."""
    start, handles = time.perf_counter(), []
    for i, due_s in enumerate(at_s):
        time.sleep(max(0.0, start + due_s - time.perf_counter()))
        ids = _ids(np.random.default_rng(300 + i), 256)
        handles.append(engine.submit(ids, "BE", 96, sampling=GREEDY, slo=slo))
    return [h.result(600) for h in handles]


def _rota_arms(model: str, settings: dict[str, Any], at_s: list[float], slo: Slo) -> dict[str, Any]:
    arms: dict[str, list[Any]] = {}
    for name, more in (("fcfs", {}), ("rota", {"swap_kv_tokens": len(at_s) * 352})):
        with _engine(model, False, policy=name, **settings, **more) as engine:
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
        "met_ttft": {name: met(name, "ttft_ms") for name in arms},
        "met_tpot": {name: met(name, "tpot_ms") for name in arms},
        "points": 100 * (met("rota", "ttft_ms") - met("fcfs", "ttft_ms")),
        "points_asked": 30,
        "tpot_p50_ms": tpot,
        "tpot_p50_rota_over_fcfs": tpot["rota"] / tpot["fcfs"],
        "tpot_asked": 1.1,
        "same_tokens": [r.token_ids for r in arms["fcfs"]] == [r.token_ids for r in arms["rota"]],
        "hits_due": sum(r.metrics.evict_recomputed_tokens for r in arms["rota"]) == 0,
    }


def main() -> int:
    """Run all rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer turns, rounds and chats")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    asked = parser.parse_args()
    rows = _run(set(asked.rows), asked.quick)
    for name, row in rows.items():
        print(name, {k: v for k, v in row.items() if k != "pairs"})
    right = all(row["same_tokens"] and row.get("hits_due", True) for row in rows.values())
    print(json.dumps({"right": right, **rows}))
    return 0 if right else 1


def _run(asked: set[str], quick: bool) -> dict[str, dict[str, Any]]:
    model = str(make_random_moe(size="300m"))
    rows = _cache_rows(model, asked, quick)
    if "swap" in asked:
        for load in (0.2, 0.4):
            name = f"swap_{load}"
            rows[name] = swap_row(model, 1 if quick else 3, 4 if quick else 8, load)
    if "rota" in asked:
        rows["rota"] = rota_row(model, 30 if quick else 80)
    if "restart" in asked:
        rows["restart"] = restart_row(model, 1 if quick else 4, 4000)
    if "mover" in asked:
        rows["mover"] = mover_row(model, 2 if quick else 6, 8 if quick else 20)
    return rows


def _cache_rows(model: str, asked: set[str], quick: bool) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    if not asked & {"chats", "no_hit", "shared"}:
        return rows
    with _engine(model, False) as off, _engine(model, True) as on:
        for engine in (off, on):
            _flood(engine, 99)  # the first pass touches the weights
        if "chats" in asked:
            rows["chats"] = chats_row(off, on, 3 if quick else 8, 1 if quick else 2)
        if "no_hit" in asked:
            rows["no_hit"] = no_hit_row(off, on, 2 if quick else 7)
        if "shared" in asked:
            rows["shared"] = shared_row(off, on, 4 if quick else 32)
    return rows


if __name__ == "__main__":
    sys.exit(main())
