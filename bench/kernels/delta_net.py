"""Gated DeltaNet of Qwen3-Next's shape, our kernel against transformers' module: one JSON line.

One layer, projections included, bf16, one thread: the prefill of a prompt of 2,048 tokens and then
tokens one by one. Both sides alternate, round by round. A row has the median of each side and of
the rounds' ratios. Weights and inputs are random (seed 0).
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from bench.common import Table, machine, result_file
from qllm.kernels import cpu
from qllm.models.discover import LayerParts
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.deltas import delta_mixer
from qllm.types import Driver

REACH = {"prefill": 2.0, "decode": 2.0}
"""Least speed over transformers' module."""
Run = Callable[[Tensor, int], object]
"""A function that runs the tokens [T, D] of a request from a position on."""


def make_layer(config: Any) -> tuple[Callable[[], Run], Callable[[], Run]]:
    """Return our run and transformers' of a new request, over the same weights."""
    torch.manual_seed(0)
    module: Any = Qwen3NextGatedDeltaNet(config, 0).bfloat16().eval()
    parts = LayerParts(
        index=0,
        layer=module,
        self_attn=module,
        driver=Driver.HOOKED,
        is_moe=False,
        new_state=lambda: DynamicCache(config=config).layers[0],
    )
    mixer = delta_mixer(parts, cpu.Arena())
    assert mixer is not None, "our kernels do not know this module"

    def ours() -> Run:
        kv = SlabKV(1, 1 << 20)

        def run(x_TD: Tensor, lo: int) -> object:
            kv.committed = lo
            step = Step([Span(kv, 0, lo, lo + len(x_TD))], len(x_TD), latent=False)
            return mixer(module.forward, hidden_states=x_TD[None], cache_params=step)

        return run

    def theirs() -> Run:
        cache = DynamicCache(config=config)
        return lambda x_TD, _: module(x_TD[None], cache_params=cache)

    return ours, theirs


def round_of(run: Run, x_TD: Tensor, num_decoded: int) -> dict[str, float]:
    """Return the milliseconds of a prefill and of the median token after it."""
    start = time.perf_counter()
    run(x_TD, 0)
    prefill = time.perf_counter() - start
    tokens = []
    for i in range(num_decoded):
        start = time.perf_counter()
        run(x_TD[i : i + 1], len(x_TD) + i)
        tokens.append(time.perf_counter() - start)
    return {"prefill": 1e3 * prefill, "decode": 1e3 * median(tokens)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu.set_threads(1)
    config = Qwen3NextConfig()
    ours, theirs = make_layer(config)
    x_TD = torch.randn((args.tokens, config.hidden_size)).bfloat16()
    found = []
    with torch.inference_mode():
        for number in range(args.rounds + 1):
            sides = [round_of(make(), x_TD, 16) for make in (ours, theirs)]
            if number:  # the first warms up
                found.append(sides)
    rows, table = [], Table()
    for what, reach in REACH.items():
        ratios = [theirs[what] / ours[what] for ours, theirs in found]
        rows.append(
            {
                "what": what,
                "qllm_ms": round(median(ours[what] for ours, _ in found), 3),
                "transformers_ms": round(median(theirs[what] for _, theirs in found), 3),
                "speedup": round(median(ratios), 3),
                "least": round(min(ratios), 3),
                "reach": reach,
            }
        )
        name = f"Gated DeltaNet, ours over transformers' module: {what}"
        table.add(name, f"{median(ratios):.2f}", f">= {reach:g}", median(ratios) >= reach)
    shape = {"hidden": config.hidden_size, "k_heads": config.linear_num_key_heads}
    shape |= {"v_heads": config.linear_num_value_heads, "head_dim": config.linear_key_head_dim}
    line = {"bench": "delta_net", "machine": machine(), "kernels": cpu.kind(), "shape": shape}
    line |= {"tokens": args.tokens, "rounds": args.rounds, "rows": rows}
    table.finish(line, args.out)


if __name__ == "__main__":
    main()
