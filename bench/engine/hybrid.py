"""How much of the memory's read rate does decoding Qwen3-Next's shape reach? One JSON line.

Four layers, three of which are Gated DeltaNets, with random weights in bf16 (seed 0) and the sizes
of Qwen3-Next-80B-A3B, but for experts (48 of 512, ten per token as there) and vocabulary (32,768).
One request decodes. What a token reads: all weights once but the embedding and the experts that
were not chosen; the states, which are written too; keys and values. A round reads memory, decodes,
and reads memory again; a row has medians over rounds.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from bench.common import Table, active_bytes, machine
from bench.kernels.cpu_kernels import Memory
from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu

REACH = 0.6
"""The share of the roofline that is asked."""
SIZES = {"num_hidden_layers": 4, "num_experts": 48, "vocab_size": 32768}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
PROMPT = 64
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def make_model(sizes: dict[str, int]) -> Any:
    """A seeded model; what is not named is as in Qwen3-Next-80B-A3B."""
    config = Qwen3NextConfig(**sizes, layer_types=LAYERS, tie_word_embeddings=False)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen3NextForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16, help="decoded per round")
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds, tokens = (1, 4) if args.quick else (args.rounds, args.tokens)
    sizes = SIZES | ({"num_experts": 12, "vocab_size": 1024} if args.quick else {})
    torch.set_num_threads(args.threads)
    model, memory = make_model(sizes), Memory(args.threads)
    weights, found = active_bytes(model), []
    with QLLMEngine.from_model(
        model, threads=args.threads, conformance=False, prefix_cache=False
    ) as engine:
        states = engine.stats()["states"]["bytes_per_request"]
        ids = torch.randint(sizes["vocab_size"], (PROMPT,)).tolist()
        for number in range(rounds + 1):
            before = memory.gb_s()
            result = engine.submit(ids, "LS", tokens, sampling=GREEDY).result()
            rate = (before + memory.gb_s()) / 2
            assert result.metrics is not None
            assert result.metrics.tpot_ms is not None
            if number:  # the first warms up
                found.append((result.metrics.tpot_ms, rate))
        kernels = engine.kernels
    read = weights + states
    share = [read / rate / 1e6 / ms for ms, rate in found]
    row = {
        "token_ms": round(median(ms for ms, _ in found), 2),
        "read_gb_s": round(median(rate for _, rate in found), 2),
        "bytes": read,
        "state_bytes": states,
        "share": round(median(share), 3),
        "least": round(min(share), 3),
        "most": round(max(share), 3),
    }
    table = Table()
    what = "Qwen3-Next's shape, four layers, decode of one request: of the roofline of bytes read"
    table.add(what, f"{row['share']:.2f}", f">= {REACH}", row["share"] >= REACH)
    config = {"threads": args.threads, "rounds": rounds, "tokens": tokens, "seed": 0, **sizes}
    result_ = {"bench": "hybrid", "machine": machine(), "config": config, "kernels": kernels}
    result_ |= {"isa": cpu.kind(), "row": row}
    table.finish(result_, args.out)


if __name__ == "__main__":
    main()
