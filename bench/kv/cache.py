"""Rows of `bench.kv` about the prefix cache: the value of a hit, and the cost of a miss."""

import statistics
import time
from typing import Any

import numpy as np

from bench.energy import Run, answered_tokens, metered
from bench.kv.asked import Asked, Ours, Turn, vllm
from bench.kv.parts import GREEDY, PAGE, THREADS, make_engine, make_ids
from bench.serving.servers import InstallError
from qllm import QLLMEngine
from qllm.scheduler.blocks import BlockPool

BLOCK = 16
"""Tokens of a block."""


def _turns(asked: Asked, seed: int, turns: int, context: int) -> list[Turn]:
    """Run one chat: every turn sends all earlier text, and 40 new tokens."""
    rng = np.random.default_rng(seed)
    ids, found = make_ids(rng, context), list[Turn]()
    for _ in range(turns):
        found.append(asked.chat(ids + make_ids(rng, 40), 24))
        ids = found[-1].all_ids
    return found


def chats_row(off: QLLMEngine, on: QLLMEngine, turns: int, num: int) -> dict[str, Any]:
    """Measure TTFT of the turns after the first."""
    cold = [turn for i in range(num) for turn in _turns(Ours(off), i, turns, 2048)]
    warm = [turn for i in range(num) for turn in _turns(Ours(on), i, turns, 2048)]
    later = [i for i in range(len(cold)) if i % turns]
    p50 = {
        name: statistics.median(arm[i].ttft_ms for i in later)
        for name, arm in (("cold", cold), ("warm", warm))
    }
    due = all(warm[i].num_cached >= _due(warm[i]) for i in later)
    return {
        "cold_ttft_p50_ms": p50["cold"],
        "warm_ttft_p50_ms": p50["warm"],
        "warm_over_cold": p50["warm"] / p50["cold"],
        "asked": 0.25,
        "same_tokens": [turn.token_ids for turn in cold] == [turn.token_ids for turn in warm],
        "hits_due": due,
    }


def _due(turn: Turn) -> int:
    """Return the tokens due from the turn before: all but the last one, in whole pages."""
    return (len(turn.prompt) - 41) // PAGE * PAGE


def flood(engine: QLLMEngine, seed: int, energy: list[Run]) -> tuple[float, list[tuple[int, ...]]]:
    """Return tokens/s, prompt and output, of 8 simultaneous requests without common tokens."""
    rng = np.random.default_rng(seed)
    with metered(energy) as computed:
        start = time.perf_counter()
        handles = [engine.submit(make_ids(rng, 512), "BE", 48, sampling=GREEDY) for _ in range(8)]
        found = [h.result(120) for h in handles]
        seconds = time.perf_counter() - start
        computed.append(answered_tokens(found))
    total = sum(len(r.prompt_token_ids) + len(r.token_ids) for r in found)
    return total / seconds, [r.token_ids for r in found]


def no_hit_row(off: QLLMEngine, on: QLLMEngine, rounds: int) -> dict[str, Any]:
    """Measure tokens/s, on over off, as the median of pairs in alternating order."""
    ratios, same, energy = [], True, list[Run]()
    for i in range(rounds):
        pair = {}
        for name in ("off", "on") if i % 2 else ("on", "off"):
            engine, runs = (on, energy) if name == "on" else (off, [])
            pair[name] = flood(engine, 100 + i, runs)
        ratios.append(pair["on"][0] / pair["off"][0])
        same &= pair["on"][1] == pair["off"][1]
    return {
        "on_over_off": statistics.median(ratios),
        "pairs": ratios,
        "energy": energy,
        "asked": 0.99,
        "same_tokens": same,
    }


def shared_row(off: QLLMEngine, on: QLLMEngine, num: int) -> dict[str, Any]:
    """Measure simultaneous chats over one system prompt."""
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
    """Count the blocks held if requests refer to the whole pages that they share."""
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
    """Measure LS chats before and after BE prompts of ten times the store, each sent once.

    Arms: LS pages stay (the default), plain least recently used (`keep_ls_s=0`), and vLLM, whose
    cache is its KV pool: it has as many tokens as our pool and store together.
    """
    arms: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for name, keep_ls_s in (("by_class", 600), ("lru", 0)):
        settings = {"prefix_cache": True, "prefix_cache_tokens": store, "keep_ls_s": keep_ls_s}
        with make_engine(model, max_kv_tokens=SWEEP_KV, **settings) as engine:
            arms[name], tokens[name] = _swept(Ours(engine), num, 10 * store)
    return {
        "store_tokens": store,
        **arms,
        "vllm": _swept_vllm(model, num, store),
        "after_over_before": arms["by_class"]["after_over_before"],
        "asked": 1.2,
        "same_tokens": tokens["by_class"] == tokens["lru"],
        "hits_due": all(arm["cached_before"] for arm in arms.values())
        and arms["by_class"]["cached_after"] == 1.0,
    }


SWEEP_KV = 8192
"""Tokens of KV for the running requests of a sweep."""


def _swept_vllm(model: str, num: int, store: int) -> dict[str, Any]:
    try:
        with vllm(model, SWEEP_KV + store, THREADS) as (server, chosen):
            return {**_swept(server, num, 10 * store)[0], "platform": chosen}
    except InstallError as error:
        return {"error": str(error)}


def _swept(asked: Asked, num: int, swept: int) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Run chats of four turns, the sweep, and one more turn."""
    rng = np.random.default_rng(11)
    asked.chat(make_ids(rng, 512), 8)  # the first pass touches the weights
    before = [_turns(asked, seed, 4, 2048) for seed in range(num)]
    asked.batch([make_ids(rng, 1024) for _ in range(swept // 1024)], 2)
    after = [asked.chat(turns[-1].all_ids + make_ids(rng, 40), 24) for turns in before]
    warm = [turn for turns in before for turn in turns[1:]]

    def ttft(of: list[Turn]) -> float:
        return statistics.median(turn.ttft_ms for turn in of)

    def cached(of: list[Turn]) -> float:
        return sum(min(turn.num_cached, _due(turn)) for turn in of) / sum(map(_due, of))

    found = {
        "warm_before_ttft_p50_ms": ttft(warm),
        "after_ttft_p50_ms": ttft(after),
        "after_over_before": ttft(after) / ttft(warm),
        "cached_before": cached(warm),
        "cached_after": cached(after),
    }
    return found, [turn.token_ids for turn in [*warm, *after]]
