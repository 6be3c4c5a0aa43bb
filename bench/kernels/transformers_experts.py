"""`experts_implementation="qllm"` against those of transformers: a table, then one JSON line.

Two layers each of two shapes, seeded bf16 weights, no engine: a forward pass of 512 tokens and one
of one token, under `torch.no_grad()`, without a cache. The implementations take turns in every
round; a ratio is the time of theirs over ours in one round, and the median of the rounds is
reported. All implementations are in memory at once, with a model each (9 GB for the larger shape).
"""

import argparse
import gc
import time
from statistics import median
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import qllm.transformers
from bench.common import RESULTS, Table, machine, result_file

SHAPES: dict[str, dict[str, int]] = {
    "300M": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 24,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
    },
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
RIVALS = ("grouped_mm", "batched_mm")
TOKENS = {"prefill of 512": 512, "decode": 1}
REACH = 1.0
"""Least ratio of theirs over ours, in every row."""
MOST_BATCHED = 64
"""Most rows for which `batched_mm` runs: it copies the weights of every (token, expert)."""
FILE = RESULTS / "transformers_experts.json"


def make(shape: dict[str, int], implementation: str) -> Any:
    """Make a model of two layers with seeded weights.

    Args:
        shape: Fields of its config.
        implementation: Name of the experts' implementation in transformers.
    """
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"vocab_size": 1024, "num_hidden_layers": 2, "norm_topk_prob": True, **shape},
        tie_word_embeddings=False,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def seconds(model: Any, ids: torch.Tensor) -> float:
    """Time one forward pass."""
    begin = time.perf_counter()
    model(ids, use_cache=False)
    return time.perf_counter() - begin


def compare(shape: dict[str, int], rounds: int) -> dict[str, dict[str, Any]]:
    """Time all implementations in turn.

    Args:
        shape: Fields of the model's config.
        rounds: Number of rounds.

    Returns:
        Per row, milliseconds of each implementation (medians) and each rival's ratio to ours.
    """
    found: dict[str, dict[str, Any]] = {}
    models = {name: make(shape, name) for name in (qllm.transformers.NAME, *RIVALS)}
    for row, num_tokens in TOKENS.items():
        ids = torch.arange(num_tokens)[None] * 7 % 1024
        names = [n for n in models if n != "batched_mm" or num_tokens <= MOST_BATCHED]
        for name in names:
            seconds(models[name], ids)
        times = [{name: seconds(models[name], ids) for name in names} for _ in range(rounds)]
        ours = [each[qllm.transformers.NAME] for each in times]
        ratios = {
            name: median(each[name] / own for each, own in zip(times, ours, strict=True))
            for name in names[1:]
        }
        ms = {name: 1e3 * median(each[name] for each in times) for name in names}
        found[row] = {"ms": ms, "theirs_over_ours": ratios}
    return found


def main() -> None:
    """Measure, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of the smaller shape")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=result_file, default=FILE)
    args = parser.parse_args()
    out = None if args.quick else result_file(args.out)
    table, result = Table(), {"machine": machine(), "seed": 0, "threads": torch.get_num_threads()}
    shapes = {"300M": SHAPES["300M"]} if args.quick else SHAPES
    with torch.no_grad():
        for name, shape in shapes.items():
            found = compare(shape, 1 if args.quick else args.rounds)
            result[name] = found
            for row, each in found.items():
                for rival, ratio in each["theirs_over_ours"].items():
                    table.add(
                        f"{name}, {row}: {rival} / ours",
                        f"{ratio:.2f} ({each['ms'][rival]:.1f} / {each['ms']['qllm']:.1f} ms)",
                        f">= {REACH}",
                        ratio >= REACH,
                    )
            gc.collect()
    table.finish(result, out)


if __name__ == "__main__":
    main()
