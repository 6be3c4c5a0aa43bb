"""Write the pages and figures of docs/results from the committed results: one command.

    python -m bench.report
    python -m bench.report --check    only say what is wrong with the results; status 1 if anything

Every number of the pages is read from `bench/results/`: the JSON documents that the benchmarks
wrote there, or printed as their last line. Rows that miss their target are marked, and listed at
the end of the index.
"""

import argparse
import json
from functools import partial
from typing import Any

from bench.papers.rows import markdown
from bench.report_agents import agents_part, draw_agents
from bench.report_check import NOT_AGAIN, SINCE, problems
from bench.report_claims import PAGE as PAPERS
from bench.report_claims import elsewhere, with_rows
from bench.report_gpu import gpu_part
from bench.report_index import headlines
from bench.report_layout import fold
from bench.report_lines import IMAGES, ROOT, cell, machine_of, mark, number, table
from bench.report_policies import draw_policies, policies_part
from tests.long.validate_sim import BOUND, NUMBERS
from tests.long.validate_sim import draw as draw_predictions

RESULTS = ROOT / "bench" / "results"
PAGES = ROOT / "docs" / "results"
SIM_FIGURE = IMAGES / "validate_sim.png"

HEAD = """# Results

Made by `make bench-report` from the files in [bench/results](../../bench/results). A topic has a
page each. Every ratio comes from runs that alternate in one call. Intervals are 95 % bootstrap
intervals. Open loop, fixed output lengths, greedy; a request that was not served in its window
counts as a TTFT of at least its wait.
"""

COMMANDS = """
## Measure it

```
make bench-policies    every policy on one engine and in the simulator, about half an hour
make bench-peers       the same trace against vLLM, transformers, llama.cpp and ours
make bench-capacity    ours and vLLM at capacity, and a single stream
make bench-kernels     the CPU kernels against what the machine can do
make bench-engine      the engine by itself
make bench-shapes      two layers each of eight published shapes, and the machine's floors
make bench-papers      what the papers claim, about an hour
make bench-report      these pages and their figures
qllm bench 300m --workload S2 --policy qllm2,chunked-priority:step_tokens=256/512
qllm bench --url http://127.0.0.1:8000 --model NAME --trace azure.csv --scale be_share=0.8
```

`ARGS="--quick"` tries any of them in a few minutes; `ARGS="--rows S2"` measures a part again.
"""

KV_NOTES = """
### Reading it

- **Why swap stays below 1.5 where LS takes 0.2 of the time.** Swap can win no more than
  recomputing loses, which is what LS makes it compute again. The KV (640 tokens) holds one BE
  request of 640 or one chat of 300, so the two never share a step. A policy that serves LS first
  needs the time of the BE work without LS plus that of the chats without BE. Swap needs just that
  (the last line of the row: 1 but for noise) and computes nothing twice, so nothing is left to
  win. The ratio grows with how often LS takes the KV, and passes 1.5 at 0.3 and 0.4.
- **With the prefix cache**, which is on by default and finds most of what an evicted request had,
  recomputing loses little on a CPU, and swap wins little over it: no target.
"""

ENGINE_NOTES = """
### Reading it

- **LS** prompts have 64-128 tokens and 16-48 out, Poisson at 40 % of the LS capacity measured
  in the same run; **BE** has 40 prompts of 256-2,048 tokens waiting at all times. `priority` is
  `qllm2` at grain STEP: the same order, budget and stall bound, without preemption inside a
  step. `fcfs` and `ls-first` have no budget.
- **Tokens per step** are the knob of this row, the same for every policy, because they set how
  long `priority` makes an arrival wait: at 256 it waits less (predicted by the simulator: TTFT
  p99 1.7 times ours, BE 1.03 of its), at 512 more (3.2 times, BE 0.93), at the engine's default
  of 4,096 most (14 times, BE 0.65, measured with an older budget). `qllm2` does not depend on it.
- **What BE pays**: `ls-first` gives BE twice the tokens of `qllm2`, at four times the LS TTFT and
  seven times the LS TPOT. `ride_frac` moves along that line; a TPOT target of the requests
  replaces it.
- **Capacity** is measured with many LS requests at once. At 40 % of it LS is nearly always
  decoding, one or a few rows at a time, so there is little idle time for BE to harvest: BE gets
  what the budget leaves.
- **The decode row** is the tuned path: our own bf16 kernels, whose last bits may differ from
  Hugging Face's. The floor is the fastest read of 2 GiB on huge pages in the same run. With
  Hugging Face's own submodules (`kernels="reference"`) a step takes 22-25 ms here.
- **Cuts** cost prefill throughput, as the rows on cuts say; `max_segment_ms=float("inf")` removes
  them. These rows are of a tree that cut all ops by rows. Since 2026-11-28 ops stop inside where
  our kernels run every layer (docs/log), and the rows were not measured again.
- **Time added per preemption** is parking, resuming, and what the BE program finds cold afterwards:
  an LS prefill reads nearly all experts, so nothing of BE's stays in the caches. The LS request's
  own admission, decision and end are beside it.
- Random weights: routing and token streams say little about a trained model; times carry over.
- None of these rows ran on a GPU.
"""


def engine_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/engine/engine.py`."""
    config = document["config"]
    model = config["model"]
    lines = [
        "",
        "## The engine",
        "",
        f"- {machine_of(document)}",
        f"- Qwen3-MoE, {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_experts']} experts top-{model['num_experts_per_tok']}, {config['weights']}",
        f"- threads {config['threads']}, seeds {config['seeds']}, windows of "
        f"{config['seconds']} s, workload {json.dumps(config['workload'])}",
    ]
    if document.get("note"):
        lines.append(f"- {document['note']}")
    return [*lines, *table(document["lines"]), *ENGINE_NOTES.splitlines()]


def peers_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/serving/peers.py`."""
    config = document["config"]
    lines = [
        "",
        "## Other servers",
        "",
        f"- {machine_of(document)}; {document['at']}",
        f"- {config['model']}; threads {config['threads']}; seeds {config['seeds']}; windows of "
        f"{config['seconds']} s after {config['warmup']} s; LS {config['ls_rate']}/s of 64-128 "
        f"tokens and 32 out, {config['be_burst']} BE jobs and {config['be_rate']}/s of 1,024-2,048 "
        "and 128-256 out; SLO 500 ms, 100 ms",
    ]
    if document.get("note"):
        lines.append(f"- {document['note']}")
    return [*lines, *table(document["lines"])]


def papers_part(document: dict[str, Any]) -> list[str]:
    """Return the table of `bench/papers/papers.py`."""
    config = document["config"]
    about = (
        f"{machine_of(document)}; live: {config['model']}, engine {json.dumps(config['engine'])}"
    )
    return ["", "## What the papers claim", "", f"- {about}", "", *markdown(document)]


def simulator_part(document: dict[str, Any]) -> list[str]:
    """Return the comparison of `tests/long/validate_sim.py`, and its figure."""
    config, policies = document["config"], document["policies"]
    lines = [
        "",
        "## The simulator against the engine",
        "",
        f"- {machine_of(document)}",
        f"- {config['model']}, one load of {config['seconds']:.0f} s per policy, seed "
        f"{config['seed']}, {config['ls_requests']} LS requests, {config['be_depth']} BE jobs "
        "always there; predicted from a calibration of the same machine",
        "",
        f"![Predicted against measured](../images/{SIM_FIGURE.name})",
        "",
        "| policy | number | measured | predicted | error | |",
        "|---|---|---|---|---|---|",
    ]
    for policy, numbers in policies.items():
        for name, n in numbers.items():
            error, ok = "-", None
            if n["error"] is not None:
                error, ok = f"{n['error']:+.0%}", abs(n["error"]) <= BOUND
            found = f"{number(n, 'measured')} | {number(n, 'predicted')} | {error}"
            lines.append(f"| {policy} | {NUMBERS[name]} | {found} | {mark(ok)} |")
    return lines


SMALL = {
    "over_http.json": "HTTP and the rings",
    "rate.json": "Short requests over HTTP",
    "ttft.json": "What HTTP adds to a step of 10 ms",
    "floor.json": "What HTTP adds where nothing is served",
    "on_ray.json": "A replica of Ray killed under load",
    "beside_mask.json": "Next to a row with a mask",
    "soak.json": "A long overload",
    "worst_bodies.json": "Next to the worst bodies of others",
    "decide.json": "A decision",
    "decide-native.json": "A decision in C++",
    "differential.json": "Two schedulers, the same decisions",
    "sim_speed.json": "The simulator's speed",
    "kv.json": "Cached KV",
    "long_turn.json": "A turn behind a long context",
    "drafts.json": "Drafts",
    "fleet.json": "Several engines behind one front end",
    "streams.json": "Prompts in pieces",
    "ranks.json": "One model on two ranks",
    "ranks_served.json": "Two ranks in a serving mix",
    "hosts.json": "Two hosts with a link of 1 Gbit/s",
    "two_models.json": "Two models on the same cores",
    "experts_disk.json": "Experts on a disk",
    "capacity-cpu.json": "At capacity, next to vLLM",
    "cpu_kernels.json": "The CPU kernels",
    "delta_net.json": "Gated DeltaNet",
    "queueing.json": "The simulator against queueing theory",
    "sampling-cpu.json": "Sampling on the CPU",
    "transformers_experts.json": "Our experts in a plain model of transformers",
    "weights.json": "Experts in 4 bits",
    "real_size.json": "30B parameters in 4 bits",
    "four_bits.json": "In 4 bits, next to llama.cpp",
    "four_bits_2048.json": "A prompt of 2,048 tokens in 4 bits",
    "four_bits_openvino.json": "In 4 bits, next to OpenVINO",
    "shapes-cpu.json": "Shapes of published models",
    "shapes-next.json": "Qwen3-Next since its states stop inside ops",
    "perplexity_talk.json": "Perplexity of `talk` per format",
    "perplexity.json": "Perplexity of `tiny` per format of its experts",
}
"""Results of one table, and the title of each."""
NOTES = {"kv.json": KV_NOTES}


def small_part(name: str, document: dict[str, Any]) -> list[str]:
    """Return one table under a title, and the notes on it."""
    lines = ["", f"## {SMALL[name]}", "", f"- {machine_of(document)}"]
    if document.get("note"):
        lines.append(f"- {document['note']}")
    return [*lines, *table(document["lines"]), *NOTES.get(name, "").splitlines()]


PARTS = {
    "policies-cpu.json": policies_part,
    "peers-cpu.json": peers_part,
    "papers.json": papers_part,
    "validate_sim.json": simulator_part,
    "engine-cpu.json": engine_part,
    "gpu-h100.json": gpu_part,
    "agents.json": agents_part,
    **{name: partial(small_part, name) for name in SMALL},
}

TOPICS = {
    "policies": ("Policies", ("policies-cpu.json",)),
    "engine": (
        "The engine and its decisions",
        ("engine-cpu.json", "drafts.json", "decide.json", "decide-native.json",
         "differential.json", "soak.json", "ranks.json", "ranks_served.json",
         "hosts.json"),
    ),
    "serving": (
        "Serving, and other servers",
        ("peers-cpu.json", "agents.json", "long_turn.json", "capacity-cpu.json",
         "over_http.json", "rate.json", "ttft.json", "floor.json", "beside_mask.json",
         "two_models.json", "worst_bodies.json"),
    ),
    "kernels": (
        "CPU kernels",
        ("cpu_kernels.json", "delta_net.json", "sampling-cpu.json", "transformers_experts.json"),
    ),
    "models": (
        "Models and weights",
        ("shapes-cpu.json", "shapes-next.json", "weights.json", "real_size.json",
         "four_bits.json", "four_bits_2048.json", "four_bits_openvino.json", "perplexity_talk.json",
         "perplexity.json", "experts_disk.json"),
    ),
    "kv": ("KV between requests", ("kv.json",)),
    "streams": ("Streaming prompts", ("streams.json",)),
    "fleet": ("Several engines", ("fleet.json", "on_ray.json")),
    "gpu": ("On a GPU", ("gpu-h100.json",)),
    "simulator": ("The simulator", ("validate_sim.json", "queueing.json", "sim_speed.json")),
    "papers": ("Numbers of the papers", ("papers.json",)),
}  # fmt: skip
"""The pages: name, title, and the results on each."""


def draw_figures(documents: dict[str, dict[str, Any]]) -> None:
    """Draw the figures of the pages into docs/images."""
    if document := documents.get("policies-cpu.json"):
        draw_policies(document)
    if document := documents.get("validate_sim.json"):
        draw_predictions(document["policies"], str(SIM_FIGURE))
    if document := documents.get("agents.json"):
        draw_agents(document)


def losing(documents: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the file and the text of each row that misses its target."""
    return [(name, line) for name, doc in documents.items() for line in doc.get("losing", ())]


def index(documents: dict[str, dict[str, Any]]) -> list[str]:
    """Return the index: ten numbers, the pages, and the rows that miss their target."""
    lines = [HEAD, *headlines(documents)]
    lines += ["", "## Pages", ""]
    for topic, (title, names) in TOPICS.items():
        if any(name in documents for name in names):
            lines.append(f"- [{title}]({topic}.md)")
    lines += [COMMANDS, "## What misses its target", ""]
    return [*lines, *(f"- {cell(line)} ({name})" for name, line in losing(documents))]


def with_reason(name: str, lines: list[str]) -> list[str]:
    """Return the lines of a result; behind its machine, the reason why it was not made again."""
    if name not in NOT_AGAIN:
        return lines
    first = next(i for i, line in enumerate(lines) if line.startswith("- "))
    reason = f"- older than {SINCE}, and not measured again: {NOT_AGAIN[name]}"
    return [*lines[: first + 1], reason, *lines[first + 1 :]]


def pages(documents: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the text of each page by its name."""
    found = {"index": index(documents)}
    for topic, (title, names) in TOPICS.items():
        parts = [
            line
            for name in names
            if name in documents
            for line in with_reason(name, PARTS[name](documents[name]))
        ]
        if topic == "papers":
            parts += elsewhere(documents)
        if parts:
            found[topic] = [f"# {title}", "", "[All results](index.md)", *parts]
    return {name: "\n".join(fold(lines)).rstrip() + "\n" for name, lines in found.items()}


def read() -> dict[str, dict[str, Any]]:
    """Return the committed results that the pages show."""
    return {
        name: json.loads((RESULTS / name).read_text())
        for name in PARTS
        if (RESULTS / name).exists()
    }


def main() -> None:
    """Write the pages and draw their figures, or check the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say what is wrong")
    documents = read()
    if parser.parse_args().check:
        found = problems(documents)
        print("\n".join(found) or "every row has a target and a source, of a tree that is there")
        raise SystemExit(bool(found))
    PAPERS.write_text(with_rows(PAPERS.read_text(), documents))
    PAGES.mkdir(exist_ok=True)
    for name, text in pages(documents).items():
        (PAGES / f"{name}.md").write_text(text)
    draw_figures(documents)
    print(f"wrote {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
