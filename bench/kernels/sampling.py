"""Sampling at a vocabulary of 151,936: time of a row, and 16 sampled rows against 16 greedy.

    rows        each setting's time of a row, with all its Python, on one thread: the kernel, six
                rows in a call as in an engine, and the definition (numpy) in turns
    engine      tokens per second of 16 sampled requests over 16 greedy ones, in turns, on all
                cores: two layers of the shape of Qwen3-30B-A3B with the whole vocabulary,
                seeded weights

The output is a table, then one JSON line.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.common import Table, machine, paired, plain, result_file
from bench.energy import Run, answered_tokens, metered
from bench.kernels.transformers_experts import SHAPES, make
from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu
from qllm.runner.choosing import TOKENS_AT_ONCE
from qllm.runner.sampling.definition import Choice, SampledRow, choose, choose_all
from qllm.runner.sampling.sampler import Sampler

VOCAB, ROWS, SEED = 151_936, 16, 1
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, penalties": {"top_p": 0.9, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}
OUTPUTS = 300
"""Number of output tokens that penalties use."""
REACH_MS, REACH = 0.3, 0.95
PROMPT, TOKENS = 64, 48


def seconds(do: Callable[[], Any]) -> float:
    """Time a call."""
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def row_ms(settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time one row by the kernel and by the definition, in turns."""
    rng = np.random.default_rng(SEED)
    num = TOKENS_AT_ONCE // VOCAB
    logits = torch.from_numpy(rng.standard_normal((num, VOCAB)).astype(np.float32) * 3).bfloat16()
    sampling, sampler = SamplingParams(temperature=0.8, seed=SEED, **settings), Sampler()
    outputs = [int(i) for i in rng.integers(0, VOCAB, OUTPUTS)]
    for i in range(num):
        sampler.add(i, sampling, outputs[:50])
    row = SampledRow(logits[0], sampling, 2**52, outputs=np.array(outputs, np.int64))

    def kernel() -> None:
        sampler.sample(logits, range(num), [OUTPUTS] * num, [outputs] * num)

    def definition() -> Choice:
        return choose(row)

    assert choose_all([row])[0] == definition()
    found = [(seconds(kernel) / num, seconds(definition)) for _ in range(rounds + 1)][1:]
    ms = paired([1e3 * one for one, _ in found])
    return {"ms": ms, "definition_over_kernel": paired([two / one for one, two in found])}


def tokens_per_s(
    engine: QLLMEngine, rng: np.random.Generator, energy: list[Run], **settings: Any
) -> float:
    """Return the decode rate of simultaneous requests, from the last request's first token on."""
    handles = []
    with metered(energy) as computed:
        for i in range(ROWS):
            sampling = SamplingParams(seed=i, ignore_eos=True, **settings)
            prompt = [int(t) for t in rng.integers(8, VOCAB, PROMPT)]
            handles.append(engine.submit(prompt, "BE", TOKENS, sampling=sampling))
        results = [handle.result(600) for handle in handles]
        computed.append(answered_tokens(results))
    gaps = [gap for one in results for gap in one.metrics.itl_ms[8:]]
    return ROWS * 1e3 / float(np.median(gaps))


def whole_engine(rounds: int) -> dict[str, Any]:
    """Measure sampled over greedy rows of one engine, in turns."""
    model = make({**SHAPES["Qwen3-30B-A3B"], "vocab_size": VOCAB}, "eager")
    found, energy = [], list[Run]()
    with QLLMEngine.from_model(
        model, threads=os.cpu_count(), max_kv_tokens=8192, prefix_cache=False, conformance=False
    ) as engine:
        rng = np.random.default_rng(SEED)
        for _ in range(rounds + 1):
            greedy = tokens_per_s(engine, rng, [], temperature=0)
            sampled = tokens_per_s(engine, rng, energy, temperature=0.8, top_p=0.95, top_k=20)
            found.append((sampled, greedy))
    gc.collect()
    rates = {
        name: paired([pair[i] for pair in found[1:]])
        for i, name in enumerate(("sampled", "greedy"))
    }
    ratio = paired([one / two for one, two in found[1:]])
    return {**rates, "ratio": ratio, "energy": energy[1:]}


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, and no engine")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu.set_threads(1)
    table, rows = Table(), dict[str, Any]()
    for name, settings in SETTINGS.items():
        rows[name] = found = row_ms(settings, 3 if args.quick else 50)
        ms = found["ms"]
        table.add(f"{name}, ms a row", ms.text(3), f"<= {REACH_MS}", ms.value <= REACH_MS)
        table.add(f"{name}, definition / kernel", found["definition_over_kernel"].text(1))
    if not args.quick:
        rows["engine"] = found = whole_engine(5)
        ratio = found["ratio"]
        text = f"{ratio.text()} ({found['sampled'].text(0)} / {found['greedy'].text(0)} tokens/s)"
        what, energy = f"{ROWS} sampled rows / {ROWS} greedy", found["energy"]
        table.add(what, text, f">= {REACH}", ratio.value >= REACH, energy=energy)
    config = {"vocab": VOCAB, "rows": ROWS, "seed": SEED, "kernels": cpu.kind()}
    result = {"bench": "sampling", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
