"""Rows of the results page about streaming prompts (`bench/serving/streams.py`)."""

from typing import Any

from bench.common import Line, at_least, at_most

Row = dict[str, Any]


def _ms(values: Row) -> str:
    return "; ".join(f"{name} {ms:,.0f}" for name, ms in values.items())


def _low(row: Row, reach: float) -> list[Line]:
    what = "one prompt at a time, TTFT after the last piece, streamed / whole, medians"
    return [at_most(what, row["ratio"], reach, 3), Line("  ms", _ms(row["ttft_ms"]))]


def _high(row: Row, reach: float) -> list[Line]:
    what = "S13 at 0.9 of what fits, simulated (H200), mean TTFT, streamed / whole"
    lines = [at_most(what, row["ratio"], reach, 3)]
    for name, load in row["loads"].items():
        card, part = name.split()
        ms = f"{load['streamed']:,.0f}; {load['whole']:,.0f} ms, p99 {load['streamed_p99']:,.0f}; "
        found = f"{load['ratio']:.3f} ({ms}{load['whole_p99']:,.0f}; {load['evicted']} evictions)"
        lines.append(Line(f"  {card.upper()}, load {part}", found))
    return lines


def _throughput(row: Row, reach: float) -> list[Line]:
    pairs = len(row["ratios"])
    what = f"prompts as fast as they can be sent, seconds whole / streamed, median of {pairs} pairs"
    span = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
    return [at_least(what, row["ratio"], reach, 3), Line("  single pairs", span)]


def _short(row: Row, reach: float) -> list[Line]:
    what = "KV short, simulated: mean TTFT, better of always and never moved / rule, worse link"
    means = [(name, _ms(link["mean_ttft_ms"])) for name, link in row["links"].items()]
    rest: list[Line] = [Line(f"  {name}, ms", ms) for name, ms in means]
    return [at_least(what, row["ratio"], reach, 3), *rest]


def _others(row: Row, reach: float) -> list[Line]:
    what = f"{row['chats']:,} LS chats beside S13, simulated: TTFT p99, streamed / whole"
    return [at_most(what, row["ratio"], reach, 3), Line("  ms", _ms(row["p99_ms"]))]


def _append(row: Row, reach: float) -> list[Line]:
    rest = {
        "the pass of the same 64 tokens of a whole prompt": "ratio_of_whole_prompts",
        "operations of that pass, counted": "ratio_of_flops",
        "what an append takes beside its pass": "ratio_outside_passes",
    }
    what = "an append of 64 tokens at 8k of context / at 1k"
    lines: list[Line] = [at_most(what, row["ratio"], reach, 2)]
    return lines + [Line(f"  {x}", f"{row[name]:.2f}") for x, name in rest.items()]


ROWS = {
    "low": _low,
    "high": _high,
    "throughput": _throughput,
    "short": _short,
    "others": _others,
    "append": _append,
}


def lines_of(document: Row) -> list[Line]:
    """Return the rows of a result."""
    reach = document["reach"]
    rows = document["rows"]
    return [
        line for name, of in ROWS.items() if name in rows for line in of(rows[name], reach[name])
    ]
