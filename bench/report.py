"""Write docs/benchmarks.md from the committed results.

    python bench/report.py

Every number of the page is read from `bench/results/engine-cpu.json`, the last line that
`bench/engine.py` printed; rows that miss their target are marked.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "engine-cpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Made by `python bench/report.py` from
[bench/results/engine-cpu.json](../bench/results/engine-cpu.json): the last lines of
`python bench/engine.py`, one call per group of rows. Every ratio comes from runs that alternate
in one call. Intervals are 95 % bootstrap intervals. Open loop; a request that was not served in
its window counts as a TTFT of at least its wait.
"""

NOTES = """
## Reading it

- **LS** prompts have 64-128 tokens and 16-48 out, Poisson at 40 % of the LS capacity measured
  in the same run; **BE** has 40 prompts of 256-2,048 tokens waiting at all times. `priority` is
  `qllm2` at grain STEP: the same order, budget and stall bound, without preemption inside a
  step. `fcfs` and `ls-first` have no budget.
- **Capacity** is measured with many LS requests at once. At 40 % of it LS is nearly always
  decoding, one or a few rows at a time, so there is little idle time for BE to harvest: BE gets
  what the budget leaves.
- **The decode row misses its target.** The step is bound by one-row bf16 products: torch's
  fastest kernel for them (oneDNN, packed weights) reads 11-14 GB/s here, where a plain read of
  the same bytes reaches 25-30 GB/s (`LOG.md`). With Hugging Face's own submodules that alone is
  about twice the floor; the rest is some 40 small ops per layer.
- **Cuts cost prefill throughput.** The rows on cuts say how much; `max_segment_ms=float("inf")`
  removes them.
- **Time added per preemption** is a small difference of long runs: its interval says that it is
  not above a millisecond, not that preempting saves time.
- Random weights: routing and token streams say little about a trained model; times carry over.
- Nothing here ran on a GPU, and no other engine than transformers' continuous batching was
  compared yet.
"""


def page(document: dict[str, Any]) -> str:
    """Return the page of one result document."""
    machine, config = document["machine"], document["config"]
    lines = [HEAD, "## Machine and workload", ""]
    for key in ("cpu", "cores", "isa", "memory", "python", "torch", "transformers", "commit"):
        lines.append(f"- {key}: {machine.get(key)}")
    model = config["model"]
    lines.append(
        f"- model: Qwen3-MoE, {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_experts']} experts top-{model['num_experts_per_tok']}, {config['weights']}"
    )
    lines.append(
        f"- threads {config['threads']}, seeds {config['seeds']}, windows of "
        f"{config['seconds']} s, workload {json.dumps(config['workload'])}"
    )
    if document.get("note"):
        lines.append(f"- {document['note']}")
    lines += ["", "## Results", "", "| what | measured | target | |", "|---|---|---|---|"]
    for what, measured, target, reached in document["table"]:
        mark = {True: "reached", False: "**missed**", None: ""}[reached]
        lines.append(f"| {what.strip()} | {measured} | {target} | {mark} |")
    return "\n".join(lines) + "\n" + NOTES


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    print(f"wrote {PAGE.relative_to(ROOT)}")
