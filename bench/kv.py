"""What the prefix cache is worth and what it costs: `python -m bench.kv [--quick]`.

Rows, all on the 300M random MoE with 2 threads:
    chats      8-turn LS chats over a context of 2k tokens: TTFT of later turns, warm over cold
    no hit     prompts that share nothing: tokens/s, cache on over off, in turns
    shared     32 chats over one system prompt of 2k tokens: bytes of KV kept and copied

Every arm's tokens are compared with those of the arm without a cache. The last line is JSON; the
exit status is 1 if tokens differ or a hit that was due did not come.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from bench.common import MODEL, SPECIAL
from qllm import QLLMEngine, SamplingParams
from qllm.measure.random_moe import make_random_moe

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PAGE = 64


def _engine(model: str, cache: bool) -> QLLMEngine:
    return QLLMEngine.from_pretrained(
        model, threads=2, conformance=False, prefix_cache=cache, prefix_cache_tokens=32768
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
    return {
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


def main() -> int:
    """Run all rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer turns, rounds and chats")
    quick = parser.parse_args().quick
    model = str(make_random_moe(size="300m"))
    rows: dict[str, dict[str, Any]] = {}
    with _engine(model, False) as off, _engine(model, True) as on:
        for engine in (off, on):
            _flood(engine, 99)  # the first pass touches the weights
        rows["chats"] = chats_row(off, on, 3 if quick else 8, 1 if quick else 2)
        rows["no_hit"] = no_hit_row(off, on, 2 if quick else 7)
        rows["shared"] = shared_row(off, on, 4 if quick else 32)
    for name, row in rows.items():
        print(name, {k: v for k, v in row.items() if k != "pairs"})
    right = all(row["same_tokens"] and row.get("hits_due", True) for row in rows.values())
    print(json.dumps({"right": right, **rows}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
