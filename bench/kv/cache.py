"""Rows of `bench.kv` about the prefix cache: what a hit is worth, and what a miss costs."""

import statistics
import time
from typing import Any

import numpy as np

from bench.kv.parts import GREEDY, PAGE, make_engine, make_ids
from qllm import QLLMEngine
from qllm.scheduler.blocks import BlockPool

BLOCK = 16
"""Tokens of a block."""


def _turns(engine: QLLMEngine, seed: int, turns: int, context: int) -> list[Any]:
    """One chat: every turn sends all before it, and 40 new tokens."""
    rng = np.random.default_rng(seed)
    ids, found = make_ids(rng, context), []
    for _ in range(turns):
        ids = ids + make_ids(rng, 40)
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


def flood(engine: QLLMEngine, seed: int) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens/s, prompt and output, of 8 requests at once that share nothing."""
    rng = np.random.default_rng(seed)
    start = time.perf_counter()
    handles = [engine.submit(make_ids(rng, 512), "BE", 48, sampling=GREEDY) for _ in range(8)]
    found = [h.result(120) for h in handles]
    total = sum(len(r.prompt_token_ids) + len(r.token_ids) for r in found)
    return total / (time.perf_counter() - start), [r.token_ids for r in found]


def no_hit_row(off: QLLMEngine, on: QLLMEngine, rounds: int) -> dict[str, Any]:
    """Tokens/s, on over off, the median of pairs in alternating order."""
    ratios, same = [], True
    for i in range(rounds):
        pair = {}
        for name in ("off", "on") if i % 2 else ("on", "off"):
            pair[name] = flood(on if name == "on" else off, 100 + i)
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
    system = make_ids(rng, 2048)
    prompts = [system + make_ids(rng, 40) for _ in range(num)]
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


def sweep_row(model: str, num: int, store: int = 6144) -> dict[str, Any]:
    """LS chats before and after BE prompts of ten times the store, which are never sent again.

    Arms: LS pages stay (the default), and plain least recently used (`keep_ls_s=0`).
    """
    arms: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for name, keep_ls_s in (("by_class", 600), ("lru", 0)):
        settings = {"prefix_cache": True, "prefix_cache_tokens": store, "keep_ls_s": keep_ls_s}
        with make_engine(model, **settings) as engine:
            arms[name], tokens[name] = _swept(engine, num, 10 * store)
    return {
        "store_tokens": store,
        **arms,
        "after_over_before": arms["by_class"]["after_over_before"],
        "asked": 1.2,
        "same_tokens": tokens["by_class"] == tokens["lru"],
        "hits_due": all(arm["cached_before"] for arm in arms.values())
        and arms["by_class"]["cached_after"] == 1.0,
    }


def _swept(engine: QLLMEngine, num: int, swept: int) -> tuple[dict[str, Any], Any]:
    """Chats of four turns, the sweep, and one turn more."""
    rng = np.random.default_rng(11)
    before = [_turns(engine, seed, 4, 2048) for seed in range(num)]
    handles = [
        engine.submit(make_ids(rng, 1024), "BE", 2, sampling=GREEDY) for _ in range(swept // 1024)
    ]
    for handle in handles:
        handle.result(300)
    after = []
    for turns in before:
        ids = [*turns[-1].prompt_token_ids, *turns[-1].token_ids, *make_ids(rng, 40)]
        after.append(engine.submit(ids, "LS", 24, sampling=GREEDY).result(120))
    warm = [r for turns in before for r in turns[1:]]

    def ttft(of: list[Any]) -> float:
        return statistics.median(r.metrics.ttft_ms or 0.0 for r in of)

    def cached(of: list[Any]) -> float:
        due = [(len(r.prompt_token_ids) - 41) // PAGE * PAGE for r in of]
        found = [r.metrics.num_cached_tokens for r in of]
        return sum(min(a, b) for a, b in zip(found, due, strict=True)) / sum(due)

    found = {
        "warm_before_ttft_p50_ms": ttft(warm),
        "after_ttft_p50_ms": ttft(after),
        "after_over_before": ttft(after) / ttft(warm),
        "cached_before": cached(warm),
        "cached_after": cached(after),
    }
    return found, [r.token_ids for r in [*warm, *after]]
