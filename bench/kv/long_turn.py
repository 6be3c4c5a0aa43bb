"""Warm cost of a turn: new tokens behind a long cached context, over the least time of the pass.

    python -m bench long_turn             500 tokens behind 65,536: two layers of Qwen3-30B-A3B
    python -m bench long_turn --quick     behind 4,096: to see that it runs

The floor is that of the same pass on this machine: its products (attention's too) at the rate of
the fastest product, and one read of the KV at the rate of a plain read, one after the other. Both
rates are measured between the turns. The context is computed once before. Each turn has other new
tokens, so only the context is found in the cache. Next to it stands the same turn behind nothing.
The last line of stdout is one JSON document.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common import Table, estimate, machine, plain, result_file
from bench.common import median as middle
from bench.models.noise_folder import skeleton, write
from bench.models.published_shapes import SHAPES, VOCAB, config_of
from bench.models.shape_floors import Measured, Needs
from qllm import QLLMEngine, SamplingParams

NEW, CONTEXT, QUICK_CONTEXT = 500, 65_536, 4096
POSITIONS = 131_072
KEPT = 64
"""Tokens of the answer to the context. An engine caches at most so many pages per step as it copies
in `max_segment_ms`, and none after the answer: a short one would leave pages out."""
REACH = 1.3
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def ids(rng: np.random.Generator, num: int) -> list[int]:
    """Return random token ids."""
    return [int(i) for i in rng.integers(8, VOCAB, num)]


def turn_s(engine: QLLMEngine, prompt: list[int], cached: int, answer: int = 1) -> float:
    """Return the seconds to the first token of a prompt.

    Args:
        engine: Idle engine.
        prompt: Token ids.
        cached: Number of them that the cache has.
        answer: Number of tokens to produce.

    Raises:
        RuntimeError: Another number of its tokens was in the cache.
    """
    found = engine.submit(prompt, "LS", answer, sampling=GREEDY).result().metrics
    assert found is not None
    assert found.ttft_ms is not None
    if found.num_cached_tokens != cached:
        raise RuntimeError(f"{found.num_cached_tokens} tokens were cached, not {cached}")
    return found.ttft_ms / 1000


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure turns with and without the context, and the machine between them."""
    config = config_of(SHAPES[args.shape], SHAPES[args.shape].num_layers)
    config.max_position_embeddings = POSITIONS
    model = skeleton(config)
    rng, times = np.random.default_rng(args.seed), dict[str, list[float]](warm=[], alone=[])
    settings = {"max_kv_tokens": POSITIONS, "prefix_cache_tokens": POSITIONS}
    measured = Measured(args.threads)
    with tempfile.TemporaryDirectory(prefix="qllm-long-turn-") as folder:
        write(model, Path(folder) / "model")
        with QLLMEngine.from_pretrained(
            str(Path(folder) / "model"), threads=args.threads, run_in="thread",
            prefix_cache=True, conformance=False, **settings,
        ) as engine:  # fmt: skip
            turn_s(engine, ids(rng, NEW), 0)  # touches the weights
            context = ids(rng, args.context)
            context_s = turn_s(engine, context, 0, answer=KEPT)
            for _ in range(args.rounds):
                measured.once()
                times["warm"].append(turn_s(engine, context + ids(rng, NEW), args.context))
                times["alone"].append(turn_s(engine, ids(rng, NEW), 0))
    rates, work = measured.machine(), Needs(model).turn(NEW, args.context)
    products_s, read_s = work.flops / rates.gflops / 1e9, work.bytes / rates.gb_s / 1e9
    return {
        "times_s": times,
        "context_s": context_s,
        "products_s": products_s,
        "read_kv_s": read_s,
        "over_floor": estimate([times["warm"]], middle, [[products_s + read_s]]),
        "rates": rates._asdict(),
    }


def main() -> None:
    """Measure, print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Qwen3-30B-A3B")
    parser.add_argument("--context", type=int, default=CONTEXT, help="a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a short context, two rounds")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    if args.quick:
        args.context, args.rounds = QUICK_CONTEXT, 2
    found, table = measure(args), Table()
    over = found["over_floor"]
    table.add(
        f"turn of {NEW} tokens behind {args.context:,} / products and one read of KV",
        over.text(),
        f"<= {REACH:g}",
        over.value <= REACH,
    )
    warm, alone = (median(found["times_s"][name]) for name in ("warm", "alone"))
    floor = f"{found['products_s']:.3f} + {found['read_kv_s']:.3f}"
    table.add("  the turn; products + one read of KV; the turn behind nothing, s",
              f"{warm:.3f}; {floor}; {alone:.3f}")  # fmt: skip
    table.add("  the context itself, computed once, s", f"{found['context_s']:.1f}")
    config = {k: v for k, v in vars(args).items() if k != "out"}
    document = {"bench": "long_turn", "machine": machine(), "config": config, "reach": REACH}
    table.finish(plain(document | found), args.out)


if __name__ == "__main__":
    main()
