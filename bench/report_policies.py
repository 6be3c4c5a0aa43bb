"""Part of the results pages about policies (`bench/policies/ablation.py`)."""

import json
from typing import Any

from bench.policies.fronts import ALONE, points_of
from bench.policies.pareto import draw
from bench.report_lines import IMAGES, cell, machine_of, number, table

FIGURE = IMAGES / "policies.png"

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

TITLES = {
    "S2": "S2: chat over a batch",
    "S3": "S3: code completion over very long prompts",
    "S7": "S7: an LS flood",
    "S5": "S5: BE holds every seat",
    "S6": "S6: BE fills the KV pool",
    "decode": "Decode next to a long prefill",
    "equals": "A stream next to prompts of its class",
    "loads": "Expert bytes per request",
    "sim": "Every policy, simulated",
}


def _points(document: dict[str, Any]) -> dict[str, Any]:
    """Return the points of the figure, by the title of their row."""
    return {TITLES[n]: p for n, p in points_of(document).items() if n != "S7" and p}


def policies_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/policies/ablation.py`, and its figure."""
    config = document["config"]
    lines = [
        "",
        "## Policies",
        "",
        f"- {machine_of(document)}",
        f"- {config['model']}; threads {config['threads']}; engine {json.dumps(config['engine'])}",
    ]
    if _points(document):
        lines += ["", f"![LS TTFT p99 against BE tokens/s](../images/{FIGURE.name})"]
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
            lines += table([x for x in row["lines"] if not x["name"].startswith(f"  {name}")])
        elif name == "sim" and "result" in row:
            lines += _simulated(row["result"])
        else:
            lines += table(row["lines"])
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
            lines.append(f"| {label} | failed: {cell('; '.join(entry['errors']))} |")
            continue
        cells = [" / ".join(number(entry, key) for key in keys) for _, keys in FRONT]
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
                lines.append(f"| {name} | failed: {cell('; '.join(found['errors']))} |")
                continue
            lines.append(f"| {name} | " + " | ".join(number(found, key) for _, key in SIM) + " |")
    return lines


def draw_policies(document: dict[str, Any]) -> None:
    """Draw the latency of LS against the throughput of BE, for each policy."""
    points = _points(document)
    rows = document["rows"].items()
    commits = sorted({row["commit"] for name, row in rows if TITLES[name] in points})
    if points:
        draw(points, FIGURE, f"live on CPU, commit {', '.join(commits)}; lower right wins")
