"""Write docs/benchmarks.md and its figures from the committed results: one command.

    python -m bench.report

Every number of the page is read from `bench/results/`: JSON documents that the benchmarks wrote, or
printed as their last line. Rows that miss their target are marked, and listed first.
"""

import json
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.papers.rows import markdown
from bench.policies.fronts import ALONE, points_of
from bench.policies.pareto import draw
from bench.report_fleet import fleet_lines
from bench.report_kv import KV_NOTES, kv_lines
from bench.report_lines import (
    WITHOUT_ZEN,
    Line,
    at_most,
    beside_mask_lines,
    capacity_lines,
    floor_lines,
    on_ray_lines,
    over_http_lines,
    rate_lines,
    ttft_lines,
)
from bench.report_streams import streams_lines
from tests.long.validate_sim import BOUND, NUMBERS
from tests.long.validate_sim import draw as draw_predictions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURE = ROOT / "docs" / "images" / "policies.png"
SIM_FIGURE = ROOT / "docs" / "images" / "validate_sim.png"

HEAD = """# Benchmarks

Made by `python -m bench.report` from the files in [bench/results](../bench/results). Every ratio
comes from runs that alternate in one call. Intervals are 95 % bootstrap intervals. Open loop,
fixed output lengths, greedy; a request that was not served in its window counts as a TTFT of at
least its wait.

```
make bench-policies    every policy on one engine and in the simulator, about half an hour
make bench-peers       the same trace against vLLM, transformers, llama.cpp and ours
make bench-capacity    ours and vLLM at capacity, and a single stream
make bench-kernels     the CPU kernels against what the machine can do
make bench-engine      the engine by itself
make bench-shapes      two layers each of eight published shapes, and the machine's floors
make bench-papers      what the papers claim, about an hour
make bench-report      this page and its figure
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
- Nothing here ran on a GPU.
"""

POLICY_NOTES = """
- **Workloads** are those of `qllm/workloads/generators.py`, scaled to the capacity measured in
  the same call: S2 is chat over an endless batch of long documents, S3 code completion over very
  long summaries, S7 more LS than the machine can serve. LS lengths are an eighth of the traces',
  or this machine would see two LS requests per window.
- **At equal BE**: the rival is the best of a sweep of `chunked-priority` at our BE tokens/s,
  measured within 3 % or interpolated between two of its settings (in the logarithm of the
  latency). Where the rival gives BE more, or cannot give it as much, the line says so and has no
  target.
- **Expert bytes** count each expert once per layer of a program, under forced routing; in co-run
  the reads of the decodes are in it, whichever policy caused more of them.
- **Simulated** rows are not measurements: a cost model of a machine that this one is not.
"""


def _mark(ok: bool | None) -> str:
    return {True: "reached", False: "**missed**", None: ""}[ok]


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _table(lines: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a result: quantity, measured value, target, and a mark."""
    out = ["", "| what | measured | target | |", "|---|---|---|---|"]
    for what, found, target, ok in lines:
        out.append(f"| {_cell(what)} | {_cell(found)} | {_cell(target)} | {_mark(ok)} |")
    return out


def _machine(document: dict[str, Any]) -> str:
    about = document.get("machine") or _machine_of_rows(document)
    names = ("cpu", "cores", "memory", "python", "torch", "transformers", "commit")
    return "; ".join(f"{name} {about.get(name)}" for name in names)


def _machine_of_rows(document: dict[str, Any]) -> dict[str, Any]:
    """Return the machine of rows that were measured one by one, and all their commits."""
    machines = [row["machine"] for row in document.get("rows", document).values()]
    return machines[0] | {"commit": ", ".join(sorted({m["commit"] for m in machines}))}


def engine_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/engine/engine.py`."""
    config = document["config"]
    model = config["model"]
    lines = [
        "",
        "## The engine",
        "",
        f"- {_machine(document)}",
        f"- Qwen3-MoE, {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_experts']} experts top-{model['num_experts_per_tok']}, {config['weights']}",
        f"- threads {config['threads']}, seeds {config['seeds']}, windows of "
        f"{config['seconds']} s, workload {json.dumps(config['workload'])}",
    ]
    if document.get("note"):
        lines.append(f"- {document['note']}")
    return [*lines, *_table(document["table"]), *ENGINE_NOTES.splitlines()]


TITLES = {
    "S2": "S2: chat over a batch",
    "S3": "S3: code completion over very long prompts",
    "S7": "S7: an LS flood",
    "S5": "S5: BE holds every seat",
    "S6": "S6: BE fills the KV pool",
    "decode": "Decode beside a long prefill",
    "equals": "A stream beside prompts of its class",
    "loads": "Expert bytes per request",
    "sim": "Every policy, simulated",
}


def policies_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/policies/ablation.py`, and its figure."""
    config = document["config"]
    lines = [
        "",
        "## Policies",
        "",
        f"- {_machine(document)}",
        f"- {config['model']}; threads {config['threads']}; engine {json.dumps(config['engine'])}",
    ]
    points = {TITLES[n]: p for n, p in points_of(document).items() if n != "S7" and p}
    if points:
        commits = {
            row["commit"] for name, row in document["rows"].items() if TITLES[name] in points
        }
        draw(points, FIGURE, f"live on CPU, commit {', '.join(sorted(commits))}; lower right wins")
        lines += ["", f"![LS TTFT p99 against BE tokens/s](images/{FIGURE.name})"]
    lines += POLICY_NOTES.splitlines()
    for name, title in TITLES.items():
        row = document["rows"].get(name)
        if row is None:
            continue
        quick = ", quick" if row["quick"] else ""
        lines += [
            "",
            f"### {title}",
            "",
            f"{row['at']}, commit {row['commit']}{quick}, seeds {row['seeds']}",
        ]
        if name in ("S2", "S3", "S7") and "result" in row:
            lines += _front(row["result"])
            lines += _table([line for line in row["lines"] if not line[0].startswith(f"  {name}")])
        elif name == "sim" and "result" in row:
            lines += _simulated(row["result"])
        else:
            lines += _table(row["lines"])
    return lines


FRONT = (
    ("LS TTFT p50 / p99 ms", ("ls_ttft_p50_ms", "ls_ttft_p99_ms")),
    ("LS TBT p99 ms", ("ls_tbt_p99_ms",)),
    ("LS SLO", ("ls_slo_attainment",)),
    ("LS slowdown p50", ("ls_slowdown_p50",)),
    ("BE in + out /s", ("be_prefill_per_s", "be_output_per_s")),
    ("of BE alone", ("be_harvest",)),
    ("BE TTFT p50 ms", ("be_ttft_p50_ms",)),
    ("BE stall ms", ("be_max_stall_ms",)),
    ("preempt p99 ms", ("preempt_latency_p99_ms",)),
    ("inversions", ("class_inversions",)),
)


def _number(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if isinstance(value, dict):
        value = value["value"]
    if value is None:
        return "-"
    if key in ("ls_slo_attainment", "be_harvest"):
        return f"{value:.0%}"
    if key == "class_inversions":
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


def _rates(rates: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate:.2f}/s" for name, rate in rates.items())


def _front(result: dict[str, Any]) -> list[str]:
    mixed = [e["offered_per_s"] for name, e in result["settings"].items() if _is_mixed(name, e)]
    offered = f"; offered {_rates(mixed[0])}, mean of the seeds" if mixed else ""
    lines = ["", f"Nominal {_rates(result['nominal_per_s'])}{offered}.", ""]
    lines += ["| setting | " + " | ".join(title for title, _ in FRONT) + " |"]
    lines += ["|---|" + "---|" * len(FRONT)]
    for label, entry in result["settings"].items():
        if "policy" not in entry:
            lines.append(f"| {label} | failed: {_cell('; '.join(entry['errors']))} |")
            continue
        cells = [" / ".join(_number(entry, key) for key in keys) for _, keys in FRONT]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _is_mixed(name: str, entry: dict[str, Any]) -> bool:
    return name not in ALONE and "offered_per_s" in entry


SIM = (
    ("LS TTFT p50 ms", "ls_ttft_p50_ms"),
    ("p99", "ls_ttft_p99_ms"),
    ("LS TBT p99 ms", "ls_tbt_p99_ms"),
    ("LS SLO", "ls_slo_attainment"),
    ("BE in /s", "be_prefill_per_s"),
    ("BE out /s", "be_output_per_s"),
    ("BE stall ms", "be_max_stall_ms"),
)


def _simulated(result: dict[str, Any]) -> list[str]:
    config = json.dumps(result["config"])
    lines = ["", f"{result['model']} on {result['hardware']} ({result['note']}); engine {config}."]
    for title, entry in result["workloads"].items():
        lines += ["", f"**{title}**: nominal {_rates(entry['nominal_per_s'])}", ""]
        lines += ["| setting | " + " | ".join(title for title, _ in SIM) + " |"]
        lines += ["|---|" + "---|" * len(SIM)]
        for name, found in entry["settings"].items():
            if len(found) == 1:
                lines.append(f"| {name} | failed: {_cell('; '.join(found['errors']))} |")
                continue
            lines.append(f"| {name} | " + " | ".join(_number(found, key) for _, key in SIM) + " |")
    return lines


def peers_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/serving/peers.py`."""
    config = document["config"]
    lines = [
        "",
        "## Other servers",
        "",
        f"- {_machine(document)}; {document['at']}",
        f"- {config['model']}; threads {config['threads']}; seeds {config['seeds']}; windows of "
        f"{config['seconds']} s after {config['warmup']} s; LS {config['ls_rate']}/s of 64-128 "
        f"tokens and 32 out, {config['be_burst']} BE jobs and {config['be_rate']}/s of 1,024-2,048 "
        "and 128-256 out; SLO 500 ms, 100 ms",
    ]
    if not any("platform" in runs[0] for runs in document["runs"].values() if runs):
        lines.append(f"- {WITHOUT_ZEN}")
    return [*lines, *_table(document["lines"])]


def papers_part(document: dict[str, Any]) -> list[str]:
    """Return the table of `bench/papers/papers.py`."""
    config = document["config"]
    about = f"{_machine(document)}; live: {config['model']}, engine {json.dumps(config['engine'])}"
    return ["", "## What the papers claim", "", f"- {about}", "", *markdown(document)]


def simulator_part(document: dict[str, Any]) -> list[str]:
    """Return the comparison of `tests/long/validate_sim.py`, and its figure."""
    config, policies = document["config"], document["policies"]
    draw_predictions(policies, str(SIM_FIGURE))
    lines = [
        "",
        "## The simulator against the engine",
        "",
        f"- {_machine(document)}",
        f"- {config['model']}, one load of {config['seconds']:.0f} s per policy, seed "
        f"{config['seed']}, {config['ls_requests']} LS requests, {config['be_depth']} BE jobs "
        "always there; predicted from a calibration of the same machine",
        "",
        f"![Predicted against measured](images/{SIM_FIGURE.name})",
        "",
        "| policy | number | measured | predicted | error | |",
        "|---|---|---|---|---|---|",
    ]
    for policy, numbers in policies.items():
        for name, n in numbers.items():
            error, ok = "-", None
            if n["error"] is not None:
                error, ok = f"{n['error']:+.0%}", abs(n["error"]) <= BOUND
            found = f"{_number(n, 'measured')} | {_number(n, 'predicted')} | {error}"
            lines.append(f"| {policy} | {NUMBERS[name]} | {found} | {_mark(ok)} |")
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
"""Targets of the project that the result does not contain."""

SMALL = {
    "over_http.json": ("HTTP and the rings", over_http_lines),
    "rate.json": ("Short requests over HTTP", rate_lines),
    "ttft.json": ("What HTTP adds to a step of 10 ms", ttft_lines),
    "floor.json": ("What HTTP adds where nothing is served", floor_lines),
    "on_ray.json": ("A replica of Ray killed under load", on_ray_lines),
    "beside_mask.json": ("Beside a row with a mask", beside_mask_lines),
    "soak.json": ("A long overload", soak_lines),
    "worst_bodies.json": ("Beside the worst bodies of others", itemgetter("lines")),
    "decide.json": ("A decision", decide_lines),
    "decide-native.json": ("A decision in C++", decide_lines),
    "differential.json": ("Two schedulers, the same decisions", differential_lines),
    "sim_speed.json": ("The simulator's speed", sim_speed_lines),
    "kv.json": ("KV that outlives its row", kv_lines),
    "fleet.json": ("Several engines behind one front end", fleet_lines),
    "streams.json": ("Prompts that come in pieces", streams_lines),
    "capacity-cpu.json": ("At capacity, beside vLLM", capacity_lines),
    "cpu_kernels.json": ("The CPU kernels", itemgetter("lines")),
    "delta_net.json": ("Gated DeltaNet", itemgetter("lines")),
    "hybrid.json": ("Qwen3-Next's shape", itemgetter("lines")),
    "queueing.json": ("The simulator against queueing theory", itemgetter("lines")),
    "weights.json": ("Experts in 4 bits", itemgetter("lines")),
    "real_size.json": ("30B parameters in 4 bits", itemgetter("lines")),
    "four_bits.json": ("In 4 bits, beside llama.cpp", itemgetter("lines")),
    "shapes-cpu.json": ("Shapes of published models", itemgetter("lines")),
    "perplexity_talk.json": ("Perplexity of `talk` per format", itemgetter("lines")),
    "perplexity.json": ("Perplexity of `tiny` per format of its experts", perplexity_lines),
}
"""Results of one table: title, and a function that returns its lines."""
NOTES = {"kv.json": KV_NOTES}


def small_part(name: str, document: dict[str, Any]) -> list[str]:
    """Return one table under a title, and its notes."""
    title, lines_of = SMALL[name]
    lines = ["", f"## {title}", "", f"- {_machine(document)}", *_table(lines_of(document))]
    return [*lines, *NOTES.get(name, "").splitlines()]


PARTS = {
    "policies-cpu.json": policies_part,
    "peers-cpu.json": peers_part,
    "papers.json": papers_part,
    "validate_sim.json": simulator_part,
    "engine-cpu.json": engine_part,
    **{name: partial(small_part, name) for name in SMALL},
}


def page(documents: dict[str, dict[str, Any]]) -> str:
    """Return the page of the existing results, missed targets first."""
    losing = [(name, line) for name, doc in documents.items() for line in doc.get("losing", ())]
    losing += [
        (name, f"{what.strip()}: {found} (target {target})")
        for name, (_, lines_of) in SMALL.items()
        if name in documents and "losing" not in documents[name]
        for what, found, target, ok in lines_of(documents[name])
        if ok is False
    ]
    lines = [HEAD]
    if losing:
        lines += ["## What misses its target", ""]
        lines += [f"- {_cell(line)} ({name})" for name, line in losing]
    for name, document in documents.items():
        lines += PARTS[name](document)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    found = {
        name: json.loads((RESULTS / name).read_text())
        for name in PARTS
        if (RESULTS / name).exists()
    }
    PAGE.write_text(page(found))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
