"""Rows of the results page about a GPU (`bench/gpu/check.py`)."""

from typing import Any

Row = dict[str, Any]
LOADS = {
    "ls_alone": "no BE",
    "mixed_qllm2": "`qllm2`",
    "interference": "`qllm2`, every host core busy",
    "mixed_priority-layered": "`priority-layered`",
    "mixed_chunked-priority": "`chunked-priority`",
    "mixed_fcfs": "`fcfs`",
    "mixed_layered": "`layered`",
}


def gpu_part(document: Row) -> list[str]:
    """Return the decode steps and the mixed load of Qwen3-30B-A3B's shape."""
    machine, parts = document["machine"], document["parts"]
    sections = parts["qwen3"]["sections"]
    failed = [name for name, part in parts.items() if part["status"]]
    lines = [
        "",
        "## Qwen3-30B-A3B's shape on a GPU",
        "",
        f"- {machine['gpu']}; torch {machine['torch']}; commit {machine['commit']}",
        f"- {sections['model']['layers']} layers, random weights in bf16",
        f"- parts of the run that failed or were cut off: {', '.join(failed) or 'none'}",
        "- what it means: [GPU](../design/gpu.md)",
        "",
        "| decode | batch 1, ms | batch 32, ms |",
        "|---|---|---|",
    ]
    decode, loop = sections["decode"], sections["loop_on_device"]
    steps = {
        "floor: bytes over the rate of reads": {
            batch: row["floor_ms"] for batch, row in decode.items() if batch.startswith("batch_")
        },
        "loop on the host": {
            batch: row["tpot_ms"] for batch, row in decode.items() if batch.startswith("batch_")
        },
        "loop on the device": {b: row["tpot_ms"] for b, row in loop["quiet"].items()},
        "the same, every host core busy": {b: row["tpot_ms"] for b, row in loop["busy"].items()},
    }
    for name, ms in steps.items():
        lines.append(f"| {name} | {ms['batch_1']:.2f} | {ms['batch_32']:.2f} |")
    lines += [
        "",
        f"{loop['equal_to_host']} of {loop['of']} sequences of the loop on the device have the "
        "tokens of the host's.",
        "",
        "| LS beside BE | LS TTFT mean, p99 ms | LS TPOT p99 ms | BE tokens/s |",
        "|---|---|---|---|",
    ]
    for name, title in LOADS.items():
        if row := sections.get(name):
            ttft = f"{row['ls_ttft_mean_ms']:.1f}, {row['ls_ttft_p99_ms']:.1f}"
            rest = f"{row['ls_tpot_p99_ms']:.1f} | {row['be_tokens_per_s']:,.0f}"
            lines.append(f"| {title} | {ttft} | {rest} |")
    return lines
