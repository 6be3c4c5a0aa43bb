"""Rows of the results pages: their form, their targets, and those of HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"

Line = tuple[str, str, str, bool | None]
"""The row's name, the measured value, the target, and True if it is reached."""


def mark(ok: bool | None) -> str:
    """Return the last cell of a row: reached, missed, or nothing."""
    return {True: "reached", False: "**missed**", None: ""}[ok]


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.strip().replace("|", "\\|")


def table(lines: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a result as a table: what, measured, target, reached."""
    out = ["", "| what | measured | target | |", "|---|---|---|---|"]
    for what, found, target, ok in lines:
        out.append(f"| {cell(what)} | {cell(found)} | {cell(target)} | {mark(ok)} |")
    return out


def machine_of(document: dict[str, Any]) -> str:
    """Return the machine, packages and commit of a result."""
    about = document.get("machine") or _machine_of_rows(document)
    names = ("cpu", "cores", "memory", "python", "torch", "transformers", "commit")
    return "; ".join(f"{name} {about.get(name)}" for name in names)


def _machine_of_rows(document: dict[str, Any]) -> dict[str, Any]:
    """Return the machine of rows that were measured one by one, and all their commits."""
    machines = [row["machine"] for row in document.get("rows", document).values()]
    return machines[0] | {"commit": ", ".join(sorted({m["commit"] for m in machines}))}


def number(entry: dict[str, Any], key: str) -> str:
    """Return a number of an entry as a cell."""
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


def at_most(what: str, found: float, target: float, digits: int = 1) -> Line:
    """Return a row whose number is reached if it is not above its target."""
    return what, f"{found:,.{digits}f}", f"<= {target:g}", found <= target


WITHOUT_ZEN = (
    "vLLM ran without zentorch here, so not at full speed on this CPU. With it, seen from outside "
    "at commit 0b86876 (2 threads, 300M, medians): ours over vLLM single stream 1.51, prefill of "
    "2,048 tokens 0.99, 48 LS 1.02, 16 BE 1.11; mixed trace, LS TTFT p99 16 and 23 times lower"
)
"""A note on results that do not name vLLM's platform."""


def capacity_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/capacity.py`, and how strong the rival was."""
    found = document.get("platforms")
    if found is None:
        return [*document["lines"], (WITHOUT_ZEN, "", "", None)]
    ran = [(f"{name}: vLLM's platform", of, "", None) for name, of in found.items() if of]
    return [*document["lines"], *ran]


def over_http_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/over_http.py`."""
    reach = document["reach"]
    lines: list[Line] = []
    for row in ("overhead", "small"):
        if found := document.get(row):
            lines += _http_overhead_lines(found, reach)
    if "small" not in document:
        missing = "not measured: 40 ms per answer would hide in the prefill of the model above"
        lines.append(
            ("the same with a TTFT below 10 ms, and answers not streamed", missing, "", None)
        )
    what = "LS TTFT p99, other work hogs the front end's core / quiet"
    if found := document.get("interference"):
        lines.append(at_most(what, found["p99_ratio"], reach["interference"], 2))
        lines.append(("  quiet; hogged, ms", _quiet_hogged(found), "", None))
    if (found := document.get("vllm")) and "p99_ratio" in found:
        same = f"  the same, vLLM's CPU build: {_quiet_hogged(found)} ms"
        lines.append((same, f"{found['p99_ratio']:.2f}", "", None))
    if found := document.get("streams"):
        what = f"{found['open']:,} open streams, idle: cores"
        lines.append(at_most(what, found["front_end_cores"], reach["idle_cores"], 3))
    return lines


def _http_overhead_lines(found: dict[str, Any], reach: dict[str, float]) -> list[Line]:
    """Return the rows of one model: HTTP minus the Python API, and the cost of a connection."""
    python = found["ttft_ms"]["python"]["p50"]
    model = f", TTFT {python:.1f} ms" if "model" in found else ""
    kinds = {
        "TTFT over HTTP and the rings": found["http_ms"],
        "an answer that is not streamed": found.get("http_whole_ms"),
    }
    lines = [
        at_most(
            f"{what} minus the Python API{model}, {name} ms",
            ms["over_python"][name],
            reach[f"overhead_{name}_ms"],
        )
        for what, ms in kinds.items()
        if ms is not None
        for name in ("p50", "p99")
    ]
    if kept := found.get("kept_alive_ms"):
        what = f"GET /version, kept-alive minus fresh connection{model}, p50 ms"
        lines.append(at_most(what, kept["p50"], reach["kept_alive_p50_ms"]))
    return lines


def _quiet_hogged(found: dict[str, Any]) -> str:
    return "; ".join(f"{found['ttft_ms'][name]['p99']:.0f}" for name in ("quiet", "hogged"))


def rate_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/rate.py`: the last tree over the first."""
    first, *_, last = document["trees"]
    over, cost = document["over_first"][last], document["trees"]
    name, target = document.get("first", first), 2.0
    what = f"requests/s of 1 token on {document['connections']} connections, over {name}"
    ratio = over["requests_per_s"]
    lines: list[Line] = [(what, f"{ratio:.2f}", f">= {target:g}", ratio >= target)]
    for key, of in (("front_end_us", "front end"), ("engine_us", "engine")):
        found = f"{cost[last][key]:.0f} instead of {cost[first][key]:.0f}"
        lines.append((f"  CPU time per request, {of}: us", found, "", None))
    return lines


def ttft_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/ttft.py`."""
    lines: list[Line] = []
    for clients, row in document["found"].items():
        for name, ms in row["http_adds_ms"].items():
            for p, most in document["reach_ms"].items():
                how = name.removeprefix("http_")
                what = f"TTFT over HTTP minus Python, {how}, {clients}, {p}: ms"
                lines.append(at_most(what, ms[p], most, 2))
    return lines


def floor_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/floor.py`."""
    step, cold = document["step_ms"], document["cold"]
    lines: list[Line] = [
        (f"a step of {step:g} ms over HTTP, server {name}: ms", f"{ms['p50']:.2f}", "", None)
        for name, ms in document["http_adds_ms"].items()
    ]
    found = f"{cold['again_us']:.1f} and {cold['after_a_step_us']:.1f}"
    lines.append((f"json.dumps again and again, and every {step:g} ms: us", found, "", None))
    return lines


def beside_mask_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/beside_mask.py`."""
    lines: list[Line] = []
    for row in document["found"]:
        for form, over in row["over_none"].items():
            what = f"TPOT beside a row with a mask ({form}, {row['vocabulary']:,} tokens) / without"
            found = f"{over['ratio']:.3f} [{over['low']:.3f}, {over['high']:.3f}]"
            lines.append((what, found, f"<= {document['reach']:g}", over["holds"]))
    return lines


def on_ray_lines(document: dict[str, Any]) -> list[Line]:
    """Return the rows of `bench/serving/on_ray.py`."""
    lines: list[Line] = []
    asked = document["requests"]
    for name, what in (("killed", "one of two replicas killed"), ("calm", "none killed")):
        row = document[name]
        whole = row["answered"] == row["equal"] == asked
        found = f"{row['answered']} and {row['equal']} of {asked}"
        lines.append((f"{what}: answered, with the tokens of an engine alone", found, "all", whole))
        before, after = (row["ls_ttft_ms"][half]["p99"] for half in ("before", "after"))
        halves = "before and after the kill" if name == "killed" else "in the same halves"
        lines.append((f"  LS TTFT p99 {halves}: ms", f"{before:.0f}, {after:.0f}", "", None))
    back_s = document["killed"]["two_replicas_again_s"]
    lines.append(("  two replicas again after: s", f"{back_s:.0f}", "", None))
    return lines
