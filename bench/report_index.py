"""Ten numbers at the top of the results, read from the committed results."""

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _line(what: str, before: str = "") -> Callable[[Row], str]:
    """Return a reader of a result's line about one thing, without intervals, up to a separator."""

    def read(document: Row) -> str:
        (found,) = (x["value"] for x in document["lines"] if x["name"].strip() == what)
        value = re.sub(r" \[[^]]*\]", "", found)
        return value.partition(before)[0] if before else value

    return read


def _rate(document: Row) -> str:
    last = list(document["trees"])[-1]
    return f"{document['trees'][last]['requests_per_s']:,.0f} per s"


def _gpu(document: Row) -> str:
    quiet = document["parts"]["qwen3"]["sections"]["loop_on_device"]["quiet"]
    return f"{quiet['batch_1']['tpot_ms']:.2f} ms"


LS = "LS TTFT p50 / p99; TPOT p99 ms; SLO"
HEADLINES: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("chat next to long jobs (300M): TTFT p50 / p99, ms", "peers-cpu.json",
     _line(f"qllm: {LS}", ";")),
    ("the same trace on vLLM, ms", "peers-cpu.json", _line(f"vllm-512: {LS}", ";")),
    ("decode of one stream (300M) over vLLM's", "capacity-cpu.json",
     _line("single: decode tokens/s qllm / vllm", " (")),
    ("prefill of 2,048 tokens (300M) over vLLM's", "capacity-cpu.json",
     _line("prefill: prompt tokens/s qllm / vllm", " (")),
    ("30B in 4 bits: decode, tokens/s", "real_size.json", _line("decode, tokens/s")),
    ("30B in 4 bits: load, s", "real_size.json", _line("load, s")),
    ("warm turn of a chat: TTFT over a cold one's", "kv.json:chats",
     lambda row: f"{row['warm_over_cold']:.3f}"),
    ("engine killed: next token over computing again", "kv.json:restart",
     lambda row: f"{row['file_over_none']:.3f}"),
    ("HTTP requests of one token, `tiny`", "rate.json", _rate),
    ("one token of Qwen3-30B-A3B's shape on a GPU", "gpu-h100.json", _gpu),
)  # fmt: skip
"""Each number: its name, its result and row, and how it is read."""


def headlines(documents: dict[str, Row]) -> list[str]:
    """Return the table of the numbers, with machine, and date or commit."""
    lines = ["## Ten numbers", "", "| number | measured | machine | date or commit |"]
    lines.append("|---|---|---|---|")
    for what, where, number in HEADLINES:
        name, _, row = where.partition(":")
        if document := documents.get(name):
            found = document[row] if row else document
            about = found["machine"]
            machine = "H100" if "H100" in (about.get("gpu") or "") else f"{about['cores']} cores"
            day = (found.get("at") or about["commit"])[:10]
            lines.append(f"| {what} | **{number(found)}** | {machine} | {day} |")
    return [*lines, "", "2 cores: AMD EPYC (Zen 4). H100: NVIDIA, 80 GB. What is slower than a "
            "rival, or misses its target, stands at the end of this page."]  # fmt: skip
