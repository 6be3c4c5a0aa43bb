"""Write the pages and figures of docs/results from the committed results: one command.

    python -m bench.report

Every number of the pages is read from `bench/results/`: the JSON documents that the benchmarks
wrote there, or printed as their last line. Rows that miss their target are marked, and listed at
the end of the index.
"""

import json
from functools import partial
from operator import itemgetter
from typing import Any

from bench.papers.rows import markdown
from bench.report_fleet import fleet_lines
from bench.report_gpu import gpu_part
from bench.report_index import headlines
from bench.report_kv import KV_NOTES, kv_lines
from bench.report_layout import fold
from bench.report_lines import (
    IMAGES,
    ROOT,
    WITHOUT_ZEN,
    Line,
    at_most,
    beside_mask_lines,
    capacity_lines,
    cell,
    floor_lines,
    machine_of,
    mark,
    number,
    on_ray_lines,
    over_http_lines,
    rate_lines,
    table,
    ttft_lines,
)
from bench.report_policies import draw_policies, policies_part
from bench.report_streams import streams_lines
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
    return [*lines, *table(document["table"]), *ENGINE_NOTES.splitlines()]


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
    if not any("platform" in runs[0] for runs in document["runs"].values() if runs):
        lines.append(f"- {WITHOUT_ZEN}")
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


def decide_lines(document: dict[str, Any]) -> list[Line]:
    """Return the lines of `bench/scheduler/decide.py`: the slowest policy."""
    args, rows = document["args"], document["rows"]
    slowest = max(rows, key=lambda row: row["p99_us"])
    what = f"decision and program, {args['scheduler']} scheduler, {args['live']} live requests"
    policies = f"worst of {len({row['policy'] for row in rows})} policies ({slowest['policy']})"
    lines = [at_most(f"{what}, p99 us, {policies}", slowest["p99_us"], DECISION_US, 0)]
    cores = [row["core_p99_us"] for row in rows if row["core_p99_us"]]
    if cores:
        lines.append(at_most("  of it the decision in C++, p99 us", max(cores), CORE_US))
    fixed = max(row["yardstick_p50_us"] for row in rows)
    return [
        *lines,
        ("  the machine: a fixed loop of 10 us on a quiet Zen 4", f"{fixed:.1f}", "", None),
    ]


def sim_speed_lines(document: dict[str, Any]) -> list[Line]:
    """Return the lines of `bench/sim/sim_speed.py`."""
    what = f"{document['config']['requests']:,} Azure-like requests through 48 layers, CPU s"
    grains = document["grains"].items()
    return [at_most(f"{what}, grain {name}", g["cpu_s"], g["limit_s"]) for name, g in grains]


def perplexity_lines(document: dict[str, Any]) -> list[Line]:
    """Return the lines of `bench/kernels/perplexity.py`."""
    lines: list[Line] = []
    for name, found in document["formats"].items():
        text = f"{found['perplexity']:.3f} ({found['bits_per_byte']:.4f} bits per byte)"
        what = "`model.forward`" if name == "reference" else f'`expert_weights="{name}"`'
        size = found["expert_bytes"]
        lines.append((f"{what}" + (f", {size:,} bytes per expert" if size else ""), text, "", None))
    return lines


def differential_lines(document: dict[str, Any]) -> list[Line]:
    """Return the lines of `tests/long/differential.py`."""
    num, differences = sum(document["traces"].values()), document["differences"]
    found = f"{num:,} traces, {document['agreed_on']['decisions']:,} decisions, {differences}"
    ok = num >= DIFFERENTIAL_TRACES and not differences
    target = f"0 in >= {DIFFERENTIAL_TRACES:,}"
    return [("differences between the native scheduler and the Python one", found, target, ok)]


def soak_lines(document: dict[str, Any]) -> list[Line]:
    """Return the lines of `tests/long/soak.py`."""
    minutes, counts, memory = document["seconds"] / 60, document["counts"], document["memory"]
    accepted = sum(counts.get(name, 0) for name in ("ended", "accepted_and_left", "sent_vanish"))
    problems = len(document["problems"])
    what = f"{minutes:.0f} minutes at {document['load']} of capacity, {accepted:,} requests"
    lines: list[Line] = [
        (f"{what}: lost, duplicated or wrong answers", f"{problems}", "0", not problems)
    ]
    lines.append(
        at_most("  LS TTFT p99 / the calm run", document["ls_ttft_p99_ratio"], SOAK_RATIO, 2)
    )
    for name in ("front_end", "engine"):
        slope = memory[f"{name}_rss_mb_per_minute"]
        found = f"{slope:+.2f} MB a minute at {memory[f'{name}_rss_mb']:,.0f} MB"
        lines.append(
            (f"  resident memory of the {name.replace('_', ' ')} after warm-up", found, "", None)
        )
    return lines


DECISION_US, CORE_US, DIFFERENTIAL_TRACES, SOAK_RATIO = 300.0, 5.0, 10_000, 1.5
"""Targets of the project, where a result does not contain them."""

SMALL = {
    "over_http.json": ("HTTP and the rings", over_http_lines),
    "rate.json": ("Short requests over HTTP", rate_lines),
    "ttft.json": ("What HTTP adds to a step of 10 ms", ttft_lines),
    "floor.json": ("What HTTP adds where nothing is served", floor_lines),
    "on_ray.json": ("A replica of Ray killed under load", on_ray_lines),
    "beside_mask.json": ("Next to a row with a mask", beside_mask_lines),
    "soak.json": ("A long overload", soak_lines),
    "worst_bodies.json": ("Next to the worst bodies of others", itemgetter("lines")),
    "decide.json": ("A decision", decide_lines),
    "decide-native.json": ("A decision in C++", decide_lines),
    "differential.json": ("Two schedulers, the same decisions", differential_lines),
    "sim_speed.json": ("The simulator's speed", sim_speed_lines),
    "kv.json": ("Cached KV", kv_lines),
    "fleet.json": ("Several engines behind one front end", fleet_lines),
    "streams.json": ("Prompts in pieces", streams_lines),
    "capacity-cpu.json": ("At capacity, next to vLLM", capacity_lines),
    "cpu_kernels.json": ("The CPU kernels", itemgetter("lines")),
    "delta_net.json": ("Gated DeltaNet", itemgetter("lines")),
    "hybrid.json": ("Qwen3-Next's shape", itemgetter("lines")),
    "queueing.json": ("The simulator against queueing theory", itemgetter("lines")),
    "sampling-cpu.json": ("Sampling on the CPU", itemgetter("lines")),
    "transformers_experts.json": (
        "Our experts in a plain model of transformers",
        itemgetter("lines"),
    ),
    "weights.json": ("Experts in 4 bits", itemgetter("lines")),
    "real_size.json": ("30B parameters in 4 bits", itemgetter("lines")),
    "four_bits.json": ("In 4 bits, next to llama.cpp", itemgetter("lines")),
    "four_bits_2048.json": ("A prompt of 2,048 tokens in 4 bits", itemgetter("lines")),
    "four_bits_openvino.json": ("In 4 bits, next to OpenVINO", itemgetter("lines")),
    "shapes-cpu.json": ("Shapes of published models", itemgetter("lines")),
    "perplexity_talk.json": ("Perplexity of `talk` per format", itemgetter("lines")),
    "perplexity.json": ("Perplexity of `tiny` per format of its experts", perplexity_lines),
}
"""Results of one table: title, and the lines of it."""
NOTES = {"kv.json": KV_NOTES}


def small_part(name: str, document: dict[str, Any]) -> list[str]:
    """Return one table under a title, and the notes on it."""
    title, lines_of = SMALL[name]
    lines = ["", f"## {title}", "", f"- {machine_of(document)}", *table(lines_of(document))]
    return [*lines, *NOTES.get(name, "").splitlines()]


PARTS = {
    "policies-cpu.json": policies_part,
    "peers-cpu.json": peers_part,
    "papers.json": papers_part,
    "validate_sim.json": simulator_part,
    "engine-cpu.json": engine_part,
    "gpu-h100.json": gpu_part,
    **{name: partial(small_part, name) for name in SMALL},
}

TOPICS = {
    "policies": ("Policies", ("policies-cpu.json",)),
    "engine": (
        "The engine and its decisions",
        ("engine-cpu.json", "decide.json", "decide-native.json", "differential.json", "soak.json"),
    ),
    "serving": (
        "Serving, and other servers",
        ("peers-cpu.json", "capacity-cpu.json", "over_http.json", "rate.json", "ttft.json",
         "floor.json", "beside_mask.json", "worst_bodies.json"),
    ),
    "kernels": (
        "CPU kernels",
        ("cpu_kernels.json", "delta_net.json", "sampling-cpu.json", "transformers_experts.json"),
    ),
    "models": (
        "Models and weights",
        ("shapes-cpu.json", "hybrid.json", "weights.json", "real_size.json", "four_bits.json",
         "four_bits_2048.json", "four_bits_openvino.json", "perplexity_talk.json",
         "perplexity.json"),
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


def losing(documents: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the file and the text of each row that misses its target."""
    found = [(name, line) for name, doc in documents.items() for line in doc.get("losing", ())]
    return found + [
        (name, f"{what.strip()}: {measured} (target {target})")
        for name, (_, lines_of) in SMALL.items()
        if name in documents and "losing" not in documents[name]
        for what, measured, target, ok in lines_of(documents[name])
        if ok is False
    ]


def index(documents: dict[str, dict[str, Any]]) -> list[str]:
    """Return the index: ten numbers, the pages, and the rows that miss their target."""
    lines = [HEAD, *headlines(documents)]
    lines += ["", "## Pages", ""]
    for topic, (title, names) in TOPICS.items():
        if any(name in documents for name in names):
            lines.append(f"- [{title}]({topic}.md)")
    lines += [COMMANDS, "## What misses its target", ""]
    return [*lines, *(f"- {cell(line)} ({name})" for name, line in losing(documents))]


def pages(documents: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the text of each page by its name."""
    found = {"index": index(documents)}
    for topic, (title, names) in TOPICS.items():
        parts = [
            line for name in names if name in documents for line in PARTS[name](documents[name])
        ]
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
    """Write the pages and draw their figures."""
    documents = read()
    PAGES.mkdir(exist_ok=True)
    for name, text in pages(documents).items():
        (PAGES / f"{name}.md").write_text(text)
    draw_figures(documents)
    print(f"wrote {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
