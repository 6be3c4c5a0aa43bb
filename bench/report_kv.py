"""Rows of the results page about cached KV (`bench/kv`)."""

from collections.abc import Callable
from typing import Any

from bench.report_lines import Line, at_most

Row = dict[str, Any]

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


def _at_least(what: str, found: float, target: float, digits: int = 2) -> Line:
    return what, f"{found:,.{digits}f}", f">= {target:g}", found >= target


def _chats(row: Row) -> list[Line]:
    what = "LS chats of 8 turns over 2k tokens, TTFT p50, warm / cold"
    return [
        at_most(what, row["warm_over_cold"], row["asked"], 3),
        ("  warm; cold, ms", "; ".join(f"{row[f'{x}_ttft_p50_ms']:.0f}" for x in ("warm", "cold")),
         "", None),
    ]  # fmt: skip


def _sweep(row: Row) -> list[Line]:
    what = "a warm turn after BE prompts of ten times the store / before"
    lines = [at_most(what, row["after_over_before"], row["asked"], 2)]
    for name, of in (("lru", "the same, plain least recently used"), ("vllm", "the same, vLLM")):
        arm = row.get(name)
        if arm is None:
            lines.append((f"  {of}", "not measured", "", None))
        elif "error" in arm:
            lines.append((f"  {of}", arm["error"], "", None))
        else:
            ms = f"{arm['warm_before_ttft_p50_ms']:.0f} ms before, {arm['after_ttft_p50_ms']:.0f}"
            found = f"{arm['after_over_before']:.1f} ({ms} after; found {arm['cached_after']:.0%})"
            platform = f" ({arm['platform']})" if arm.get("platform") else ""
            lines.append((f"  {of}{platform}", found, "", None))
    return lines


def _no_hit(row: Row) -> list[Line]:
    what = f"no hit at all: tokens/s, cache on / off, median of {len(row['pairs'])} pairs"
    return [_at_least(what, row["on_over_off"], row["asked"], 3)]


def _shared(row: Row) -> list[Line]:
    what = f"{row['chats']} chats over one system prompt of 2k: all KV / one copy per chat"
    seconds = f"{row['seconds_on']:.1f}; {row['seconds_off']:.1f}"
    return [
        (f"{what}, on a CPU", f"{row['copied_over_one_copy_each']:.2f}", "", None),
        ("  by reference, as blocks are counted on a GPU",
         f"{row['by_reference_over_one_copy_each']:.3f}", "", None),
        ("  seconds with the cache; without", seconds, "", None),
    ]  # fmt: skip


def _swap(row: Row) -> list[Line]:
    load, end = row["ls_load"], "LS TTFT p99 over recomputing"
    what = f"KV for a quarter of BE, LS takes {load:g} of the time"
    with_cache = (
        f"{row['be_over_recompute_cache']:.2f}; {row['ls_ttft_p99_over_recompute_cache']:.2f}"
    )
    lines = [
        (f"{what}: tokens recomputed ({sum(row['evictions_without'][:1])} evictions without swap)",
         f"{row['recomputed']} instead of {row['recomputed_without'][0]:,}", "0",
         row["recomputed"] == 0),
        _at_least(f"  BE tokens/s over recomputing, LS {load:g}", row["be_over_recompute"],
                  row["be_asked"]),
        at_most(f"  {end}", row["ls_ttft_p99_over_recompute"], row["ls_asked"], 2),
        ("  both, over recomputing with the prefix cache", with_cache, "", None),
    ]  # fmt: skip
    if "of_both_apart" in row:
        apart = "  its time over that of BE without LS plus LS without BE"
        lines.append((apart, f"{row['of_both_apart']:.2f}", "", None))
    return lines


def _rota(row: Row) -> list[Line]:
    is_burst = not row["points_asked"]
    how = "all at once" if is_burst else "arriving at 0.87 of what fits"
    what = f"`rota` with swap over `fcfs`, {row['num']} requests {how}, KV for two"
    met = "; ".join(f"{100 * row['met_ttft'][name]:.0f} %" for name in ("rota", "fcfs"))
    points, tpot = row["points"], row["tpot_p50_rota_over_fcfs"]
    if is_burst:
        return [
            (f"{what}: TTFT target met", met, "", None),
            ("  TPOT p50 over that of `fcfs`", f"{tpot:.2f}", "", None),
        ]
    return [
        (f"{what}: points of TTFT target met ({met})", f"{points:+.0f}",
         f">= +{row['points_asked']}", points >= row["points_asked"]),
        at_most("  TPOT p50 over that of `fcfs`", tpot, row["tpot_asked"], 2),
    ]  # fmt: skip


def _handover(row: Row) -> list[Line]:
    what = (
        f"a request of {row['context']:,} tokens moves ({row['profile']}): next token / computing"
    )
    seconds = f"{row['with_kv_s']:.2f}; {row['computed_s']:.2f}"
    return [
        at_most(what, row["handover_over_computing"], row["asked"], 3),
        ("  seconds with its KV; computed", seconds, "", None),
    ]


def _restart(row: Row) -> list[Line]:
    what = f"killed at {row['context']:,} tokens of context: next token, file / none"
    return [
        at_most(what, row["file_over_none"], row["asked"], 3),
        ("  seconds", f"{row['file_s']:.2f}; {row['none_s']:.2f}", "", None),
    ]


def _mover(row: Row) -> list[Line]:
    gb = "; ".join(f"{row[name] / 1e9:.1f} GB" for name in ("read_bytes", "written_bytes"))
    what = f"LS TTFT p99 while KV moves both ways ({gb}), {row['chats']} chats, over an idle mover"
    stalls = row["be_stall_max_ms"]
    return [
        at_most(what, row["busy_over_idle"], row["asked"], 2),
        ("  p50", f"{row['busy_over_idle_p50']:.2f}", "", None),
        ("  longest stall of BE, busy; idle, ms", f"{stalls['busy']:.0f}; {stalls['idle']:.0f}",
         f"<= {row['be_stall_bound_ms']}", max(stalls.values()) <= row["be_stall_bound_ms"]),
    ]  # fmt: skip


_KINDS: dict[str, Callable[[Row], list[Line]]] = {
    "chats": _chats,
    "sweep": _sweep,
    "no_hit": _no_hit,
    "shared": _shared,
    "swap": _swap,
    "rota": _rota,
    "restart": _restart,
    "handover_tcp": _handover,
    "handover_shm": _handover,
    "mover": _mover,
}


def kv_lines(document: dict[str, Row]) -> list[Line]:
    """Return the lines of `bench/kv`: each measured row, in the order of its documentation."""
    wrong = [name for name, row in document.items() if not row["same_tokens"]]
    found = "all" if not wrong else f"not in {', '.join(wrong)}"
    rows = f"in {len(document)} rows: the same tokens in every arm of every row"
    lines: list[Line] = [(rows, found, "all", not wrong)]
    for kind, lines_of in _KINDS.items():
        for name in sorted(document):
            if name.partition("_")[0] == kind or name == kind:
                lines += lines_of(document[name])
    return lines
