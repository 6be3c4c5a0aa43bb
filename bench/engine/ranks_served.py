"""An engine on two ranks, against one process with two threads: a serving mix, and memory.

    mix       open-loop LS requests beside a flood of BE requests: BE tokens/s, TTFT of LS
    memory    peak of a rank that loads its share, over the peak of a process that loads all
    KV        bytes of a token's KV that a rank holds, over those of one process

Windows alternate. Memory is that of engines in processes of their own, less that of an engine with
the model of this package. The model is the one of `bench.common`. The output is a table, then one
JSON line.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Table, load_model, machine, model_folder, paired, plain, result_file
from bench.engine.mixed import GREEDY, Window, make_load, run_window
from qllm import QLLMEngine
from qllm.kernels import cpu

TP, SEED, RATE, SECONDS, WARMUP_S = 2, 1, 1.0, 20.0, 3.0
LEAST_BE, MOST_TTFT, MOST_MEMORY, LEAST_KV = 0.9, 1.15, 0.55, 1.8
TOKENS, REQUESTS = 1024, 9


def windows(folder: Path, rounds: int, seconds: float) -> dict[str, list[Window]]:
    """Serve the mix of some seeds on one process and on ranks, in turns."""
    found: dict[str, list[Window]] = {"whole": [], "ranks": []}
    for seed in range(SEED, SEED + rounds):
        load = make_load(seed, RATE, seconds)
        for name, tp in (("whole", 1), ("ranks", TP)):
            model = load_model(folder)
            found[name].append(
                run_window(
                    model,
                    "qllm2",
                    load,
                    seconds=seconds,
                    warmup_s=WARMUP_S,
                    flood=True,
                    threads=TP,
                    tp=tp,
                )
            )
    return found


def status(pid: int, name: str) -> int:
    """Return a size in bytes from the status of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def memory_of(folder: str | Path, tp: int) -> tuple[list[int], list[float]]:
    """Return the peak of each process of an engine, and the bytes of a token's KV in each."""
    settings: dict[str, Any] = {"max_kv_tokens": 1 << 14, "prefix_cache": False}
    rng = np.random.default_rng(SEED)
    with QLLMEngine.from_pretrained(
        folder, tp=tp, threads=TP, conformance=False, max_step_tokens=256, **settings
    ) as engine:
        stats = engine.stats()
        pids = [rank["pid"] for rank in stats["ranks"]] or [stats["pid"]]
        vocab = 1000
        prompts = [rng.integers(1, vocab, TOKENS).tolist() for _ in range(REQUESTS)]
        engine.submit(prompts[0][:64], "BE", 2, sampling=GREEDY).result(60)
        peaks = [status(pid, "VmHWM") for pid in pids]
        handles, seen = [], []
        for some in (prompts[:1], prompts[1:]):  # the first also fills the buffers of a step
            handles += [engine.submit(ids, "BE", TOKENS, sampling=GREEDY) for ids in some]
            while not all(handle.token_ids for handle in handles):
                time.sleep(0.01)
            seen.append([status(pid, "RssShmem") for pid in pids])
        for handle in handles:
            handle.cancel()
        whole = stats["memory"]["kv_bytes"] // stats["memory"]["kv_tokens"]
        num_tokens = TOKENS * (REQUESTS - 1)
        held = [(two - one) / num_tokens for one, two in zip(*seen, strict=True)]
    return peaks, held if tp > 1 else [whole]


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short window of each")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    table, rows, folder = Table(), dict[str, Any](), model_folder()
    for name, tp in (("whole", 1), ("ranks", TP)):
        (base, _), (peaks, held) = memory_of("tiny", tp), memory_of(folder, tp)
        own = [peak - other for peak, other in zip(peaks, base, strict=True)]
        rows[f"{name} memory"] = {"peak_bytes": own, "kv_bytes": held}
    whole, ranks = rows["whole memory"], rows["ranks memory"]
    share = max(ranks["peak_bytes"]) / whole["peak_bytes"][0]
    more = whole["kv_bytes"][0] / max(ranks["kv_bytes"])
    table.add(
        "memory of a rank / 1 process", f"{share:.2f}", f"<= {MOST_MEMORY}", share <= MOST_MEMORY
    )
    table.add(
        "KV tokens at equal memory per rank", f"{more:.2f}x", f">= {LEAST_KV}x", more >= LEAST_KV
    )
    found = windows(folder, 1 if args.quick else 5, 6.0 if args.quick else SECONDS)
    pairs = list(zip(found["whole"], found["ranks"], strict=True))
    speed = paired(
        [
            (two.be_prefill_per_s + two.be_output_per_s)
            / (one.be_prefill_per_s + one.be_output_per_s)
            for one, two in pairs
        ]
    )
    ttft = {
        name: [float(x) for x in np.percentile([t for w in each for t in w.ttft], [50, 99])]
        for name, each in found.items()
    }
    ratio = ttft["ranks"][1] / ttft["whole"][1]
    rows |= {"mix_be_tokens": speed, "mix_ttft_ms": ttft}
    table.add(
        f"mix: BE tokens/s, {TP} ranks / 1 process",
        speed.text(),
        f">= {LEAST_BE}",
        speed.value >= LEAST_BE,
        energy=[run for two in found["ranks"] for run in two.energy],
    )
    text = f"{ratio:.2f} ({ttft['ranks'][1]:.0f} / {ttft['whole'][1]:.0f} ms)"
    table.add(
        f"mix: LS TTFT p99, {TP} ranks / 1 process", text, f"<= {MOST_TTFT}", ratio <= MOST_TTFT
    )
    config = {"tp": TP, "rate": RATE, "seconds": SECONDS, "seed": SEED, "kernels": cpu.kind()}
    result = {"bench": "ranks_served", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
