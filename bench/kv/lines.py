"""Rows of the results page about cached KV (`bench/kv`)."""

from collections.abc import Callable
from typing import Any

from bench.common import Line, at_least, at_most

Row = dict[str, Any]


def _chats(row: Row) -> list[Line]:
    what = "LS chats of 8 turns over 2k tokens, TTFT p50, warm / cold"
    return [
        at_most(what, row["warm_over_cold"], row["asked"], 3),
        Line(
            "  warm; cold, ms",
            "; ".join(f"{row[f'{x}_ttft_p50_ms']:.0f}" for x in ("warm", "cold")),
        ),
    ]


def _sweep(row: Row) -> list[Line]:
    what = "a warm turn after BE prompts of ten times the store / before"
    lines = [at_most(what, row["after_over_before"], row["asked"], 2)]
    for name, of in (("lru", "the same, plain least recently used"), ("vllm", "the same, vLLM")):
        arm = row.get(name)
        if arm is None:
            lines.append(Line(f"  {of}", "not measured"))
        elif "error" in arm:
            lines.append(Line(f"  {of}", arm["error"]))
        else:
            ms = f"{arm['warm_before_ttft_p50_ms']:.0f} ms before, {arm['after_ttft_p50_ms']:.0f}"
            found = f"{arm['after_over_before']:.1f} ({ms} after; found {arm['cached_after']:.0%})"
            platform = f" ({arm['platform']})" if arm.get("platform") else ""
            lines.append(Line(f"  {of}{platform}", found))
    return lines


def _no_hit(row: Row) -> list[Line]:
    what = f"no hit at all: tokens/s, cache on / off, median of {len(row['pairs'])} pairs"
    return [at_least(what, row["on_over_off"], row["asked"], 3, energy=row.get("energy", ()))]


def _shared(row: Row) -> list[Line]:
    what = f"{row['chats']} chats over one system prompt of 2k: all KV / one copy per chat"
    seconds = f"{row['seconds_on']:.1f}; {row['seconds_off']:.1f}"
    return [
        Line(f"{what}, on a CPU", f"{row['copied_over_one_copy_each']:.2f}"),
        Line(
            "  by reference, as blocks are counted on a GPU",
            f"{row['by_reference_over_one_copy_each']:.3f}",
        ),
        Line("  seconds with the cache; without", seconds),
    ]


def _swap(row: Row) -> list[Line]:
    load, end = row["ls_load"], "LS TTFT p99 over recomputing"
    what = f"KV for a quarter of BE, LS takes {load:g} of the time"
    with_cache = (
        f"{row['be_over_recompute_cache']:.2f}; {row['ls_ttft_p99_over_recompute_cache']:.2f}"
    )
    evicted = sum(row["evictions_without"][:1])
    lines = [
        Line(
            f"{what}: tokens recomputed ({evicted} evictions without swap)",
            f"{row['recomputed']} instead of {row['recomputed_without'][0]:,}",
            "0",
            row["recomputed"] == 0,
        ),
        at_least(
            f"  BE tokens/s over recomputing, LS {load:g}",
            row["be_over_recompute"],
            row["be_asked"],
            energy=row.get("energy", ()),  # older results lack it
        ),
        at_most(f"  {end}", row["ls_ttft_p99_over_recompute"], row["ls_asked"], 2),
        Line("  both, over recomputing with the prefix cache", with_cache),
    ]
    if "of_both_apart" in row:
        apart = "  its time over that of BE without LS plus LS without BE"
        lines.append(Line(apart, f"{row['of_both_apart']:.2f}"))
    return lines


def _rota(row: Row) -> list[Line]:
    is_burst = not row["points_asked"]
    how = "all at once" if is_burst else "arriving at 0.87 of what fits"
    what = f"`rota` with swap over `fcfs`, {row['num']} requests {how}, KV for two"
    met = "; ".join(f"{100 * row['met_ttft'][name]:.0f} %" for name in ("rota", "fcfs"))
    points, tpot = row["points"], row["tpot_p50_rota_over_fcfs"]
    if is_burst:
        return [
            Line(f"{what}: TTFT target met", met),
            Line("  TPOT p50 over that of `fcfs`", f"{tpot:.2f}"),
        ]
    return [
        Line(
            f"{what}: points of TTFT target met ({met})",
            f"{points:+.0f}",
            f">= +{row['points_asked']}",
            points >= row["points_asked"],
        ),
        at_most("  TPOT p50 over that of `fcfs`", tpot, row["tpot_asked"], 2),
    ]


def _handover(row: Row) -> list[Line]:
    what = (
        f"a request of {row['context']:,} tokens moves ({row['profile']}): next token / computing"
    )
    seconds = f"{row['with_kv_s']:.2f}; {row['computed_s']:.2f}"
    return [
        at_most(what, row["handover_over_computing"], row["asked"], 3),
        Line("  seconds with its KV; computed", seconds),
    ]


def _restart(row: Row) -> list[Line]:
    what = f"killed at {row['context']:,} tokens of context: next token, file / none"
    return [
        at_most(what, row["file_over_none"], row["asked"], 3),
        Line("  seconds", f"{row['file_s']:.2f}; {row['none_s']:.2f}"),
    ]


def _mover(row: Row) -> list[Line]:
    gb = "; ".join(f"{row[name] / 1e9:.1f} GB" for name in ("read_bytes", "written_bytes"))
    what = f"LS TTFT p99 while KV moves both ways ({gb}), {row['chats']} chats, over an idle mover"
    stalls = row["be_stall_max_ms"]
    more = []
    if rates := row.get("gb_per_s"):  # older results lack it
        one = max(rates["loads"], rates["stores"])
        each = "; ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
        preempt = row["preempt_p99_ms"]
        more = [
            at_least("  GB/s both ways at once, over the faster way alone", rates["both"] / one,
                     row["both_asked"]),
            Line("  GB/s", each),
            at_most("  preemption p99, busy / idle", preempt["busy"] / preempt["idle"],
                    row["preempt_asked"], 2),
        ]  # fmt: skip
    return [
        *more,
        at_most(what, row["busy_over_idle"], row["asked"], 2),
        Line("  p50", f"{row['busy_over_idle_p50']:.2f}"),
        Line(
            "  longest stall of BE, busy; idle, ms",
            f"{stalls['busy']:.0f}; {stalls['idle']:.0f}",
            f"<= {row['be_stall_bound_ms']}",
            max(stalls.values()) <= row["be_stall_bound_ms"],
        ),
    ]


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


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result: each measured row, in the order of its documentation."""
    rows = {name: row for name, row in document.items() if isinstance(row, dict)}
    wrong = [name for name, row in rows.items() if not row["same_tokens"]]
    found = "all" if not wrong else f"not in {', '.join(wrong)}"
    what = f"in {len(rows)} rows: the same tokens in every arm of every row"
    lines = [Line(what, found, "all", not wrong)]
    for kind, of_kind in _KINDS.items():
        for name in sorted(rows):
            if name.partition("_")[0] == kind or name == kind:
                lines += of_kind(rows[name])
    return lines
