"""Rows of the results page about several engines (`bench/serving/fleet.py`)."""

from statistics import median
from typing import Any

from bench.common import Line, at_least, at_most

Row = dict[str, Any]

ROUND_ROBIN_P90, ROUND_ROBIN_MISSED, LEAST_MISSED = 0.70, 0.72, 0.88
"""Most of short prompts' p90, and of missed targets, over those two routes."""
PREFIX_HITS, ROUTER_US, FRONT_END_MB = 2.0, 100.0, 150.0


def _killed(row: Row) -> list[Line]:
    rounds = row["rounds"]
    num, moved = (sum(found[key] for found in rounds) for key in ("requests", "moved"))
    lost, changed = (sum(found[key] for found in rounds) for key in ("lost", "changed_tokens"))
    what = f"two engines, one killed under load, {len(rounds)} times, {num} requests, {moved} moved"
    found = f"{lost} lost, {changed} changed tokens"
    return [Line(what, found, "0 lost, 0 changed", lost == changed == 0)]


def _pools(row: Row) -> list[Line]:
    lines: list[Line] = []
    for load, routes in row.items():
        if not load.startswith("load "):
            continue
        for name in ("class", "length"):
            over, least = (routes[name][f"over_{base}"] for base in ("round_robin", "least"))
            what = f"four simulated engines, {load}, route `{name}`: "
            lines += [
                _over(what + "short p90 / round robin", over["short_p90_ms"], ROUND_ROBIN_P90),
                _over(
                    what + "missed targets / round robin", over["violations"], ROUND_ROBIN_MISSED
                ),
                _over(what + "missed targets / least loaded", least["violations"], LEAST_MISSED),
                Line(what + "short p90 / least loaded", f"{least['short_p90_ms']:.2f}"),
            ]
        p90 = "; ".join(
            f"{name} {found['short_p90_ms']:.0f} ms, {100 * found['violations']:.1f} %"
            for name, found in routes.items()
        )
        lines.append(Line(f"  {load}: short p90 and missed targets", p90))
    return lines


def _over(what: str, found: float | None, most: float) -> Line:
    """Return a row of a ratio; None if there was nothing to lower."""
    if found is None:
        return Line(what, "none missed by either")
    return at_most(what, found, most, 2)


def _prefix(row: Row) -> list[Line]:
    lines: list[Line] = []
    for case in row["rows"]:
        how = case["how"].replace("_", " ")
        what = f"{case['engines']} engines, {case['chats']} chats {how}: share of prompt tokens "
        ratio = case["prefix_over_round_robin"]
        shares = [
            f"{name} {median(found[name]['hit_share'] for found in case['seeds']):.2f}"
            for name in ("round-robin", "prefix")
        ]
        lines += [
            at_least(what + "found, `prefix` / `round-robin`", ratio, PREFIX_HITS),
            Line("  shares; at most", f"{'; '.join(shares)}; {case['most']:.2f}"),
        ]
    return lines


def _rebalance(row: Row) -> list[Line]:
    """Return the ratios over never moving a request."""
    lines: list[Line] = []
    for name, case in row.items():
        lines += _moves(f"two simulated engines, LS {name}", case) if isinstance(case, dict) else []
    return lines


def _bound(row: Row) -> list[Line]:
    return _moves(f"two engines, {row['ls_per_s']} LS a second at one of them", row)


def _moves(what: str, case: Row) -> list[Line]:
    lines: list[Line] = []
    for after, found in case.items():
        if after.startswith("after "):
            keys = ("be_mean_s", "be_last_s", "ls_ttft_p50_ms", "ls_ttft_p99_ms")
            ratios = ", ".join(f"{found[key]:.2f}" for key in keys)
            told = f"{what}, BE moved {after}: BE mean, BE last, LS TTFT p50, p99"
            lines.append(Line(told, f"{ratios}; {found['moved']} moved"))
    return lines


def _router(row: Row) -> list[Line]:
    costs = {what: found["p99_us"] for what, found in row.items() if ", prompts of " in what}
    return [
        at_most(f"a router's CPU time per request, {what} tokens: p99 us", us, ROUTER_US)
        for what, us in costs.items()
    ]


def _scale(row: Row) -> list[Line]:
    lines: list[Line] = []
    for found in row["rows"]:
        what = (
            f"{found['engines']:,} engines, {found['requests']:,} requests, {found['open']:,} open"
        )
        lines.append(
            Line(f"a router's CPU time per request, {what}: us", f"{found['us_per_request']:.1f}")
        )
    return lines


def _state(row: Row) -> list[Line]:
    lines: list[Line] = []
    for found in row["rows"]:
        what = f"state of a router, route `{found['route']}`, {found['engines']:,} engines, "
        what += f"{found['requests']:,} requests, {found['open']:,} open: bytes"
        lines.append(Line(what, f"{found['bytes']:,}"))
    return lines


def _front_end(row: Row) -> list[Line]:
    what = "resident memory of a front end to two engines: MB"
    loaded = "loaded" if row["torch"] else "not loaded"
    torch = Line("  torch in it", loaded, "not loaded", not row["torch"])
    return [at_most(what, row["rss_mb"], FRONT_END_MB), torch]


ROWS = {
    "killed": _killed,
    "pools": _pools,
    "prefix": _prefix,
    "rebalance_bound": _bound,
    "rebalance_sim": _rebalance,
    "router": _router,
    "front_end": _front_end,
    "scale": _scale,
    "state": _state,
}


def lines_of(document: Row) -> list[Line]:
    """Return the rows of a result."""
    rows = document["rows"]
    return [line for name, of in ROWS.items() if name in rows for line in of(rows[name])]
