"""Points of latency against throughput: the latency of each policy at the same BE throughput."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MATCH = 0.03
"""Relative difference up to which BE throughputs count as equal."""


class Point(NamedTuple):
    """One policy with one setting on one workload, seeds pooled."""

    setting: str
    be_tokens_per_s: float
    """BE tokens per second, prefill and output."""
    ls_ttft_p99_ms: float

    @property
    def policy(self) -> str:
        """Return the policy's name without parameters."""
        return self.setting.partition(":")[0]


class Match(NamedTuple):
    """The best of a rival's points against one of ours."""

    ours: Point
    rival_ms: float
    """LS TTFT p99 of the rival at our BE throughput."""
    rival_be_tokens_per_s: float
    how: str
    """Way of matching: "measured" within 3 %, "interpolated" between two settings, or a reason."""

    @property
    def ratio(self) -> float:
        """Return the rival's latency over ours."""
        return self.rival_ms / self.ours.ls_ttft_p99_ms


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats on both axes, by rising throughput."""
    out: list[Point] = []
    for p in sorted(points, key=lambda p: (-p.be_tokens_per_s, p.ls_ttft_p99_ms)):
        if not out or p.ls_ttft_p99_ms < out[-1].ls_ttft_p99_ms:
            out.append(p)
    return out[::-1]


def match(ours: Point, rivals: Sequence[Point]) -> Match | None:
    """Return the rival's best LS TTFT p99 at our BE throughput; None without rivals.

    A rival with at least our throughput, less 3 %, counts as measured: more BE work is no reason to
    skip it. Between two settings the logarithm of the latency is interpolated.
    """
    if not rivals:
        return None
    best = frontier(rivals)
    be = ours.be_tokens_per_s
    able = [p for p in best if p.be_tokens_per_s >= be * (1 - MATCH)]
    if not able:
        top = best[-1]
        return Match(ours, top.ls_ttft_p99_ms, top.be_tokens_per_s, "rival gives BE less")
    first = able[0]
    at = best.index(first)
    if first.be_tokens_per_s <= be * (1 + MATCH):
        return Match(ours, first.ls_ttft_p99_ms, first.be_tokens_per_s, "measured")
    if at == 0:
        return Match(ours, first.ls_ttft_p99_ms, first.be_tokens_per_s, "rival gives BE more")
    low = best[at - 1]
    part = (be - low.be_tokens_per_s) / (first.be_tokens_per_s - low.be_tokens_per_s)
    logs = math.log(low.ls_ttft_p99_ms), math.log(first.ls_ttft_p99_ms)
    value = math.exp(logs[0] + part * (logs[1] - logs[0]))
    return Match(ours, value, be, "interpolated")


COLORS = ("#777777", "#d9822b", "#1f5fbf", "#3f9c50", "#8b3fb0", "#b03060", "#5b7083", "#a08a00")


def draw(rows: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """Draw a panel per workload, with a line per policy and a dot per setting.

    Args:
        rows: Points by the title of their panel.
        path: Path of the PNG.
        title: Text above all panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(rows), figsize=(5.2 * len(rows), 4.4), squeeze=False)
    names = sorted({p.policy for points in rows.values() for p in points})
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    for ax, (panel, points) in zip(axes[0], rows.items(), strict=True):
        for name in names:
            own = sorted((p for p in points if p.policy == name), key=lambda p: p.be_tokens_per_s)
            if own:
                x, y = zip(*((p.be_tokens_per_s, p.ls_ttft_p99_ms) for p in own), strict=True)
                ax.plot(x, y, "o-", color=colors[name], label=name, linewidth=1, markersize=5)
                for p in own:
                    text = p.setting.partition(":")[2].partition("=")[2]
                    ax.annotate(
                        text,
                        (p.be_tokens_per_s, p.ls_ttft_p99_ms),
                        textcoords="offset points",
                        xytext=(4, 3),
                        fontsize=7,
                    )
        ax.set_yscale("log")
        ax.set_xlim(left=0)
        ax.set_xlabel("BE tokens/s (prefill + output)")
        ax.set_ylabel("LS TTFT p99, ms")
        ax.set_title(panel, fontsize=10)
        ax.grid(alpha=0.25, which="both", linewidth=0.5)
    axes[0][0].legend(fontsize=8, frameon=False)
    fig.suptitle(title, fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def as_rows(matches: Sequence[Match]) -> list[dict[str, Any]]:
    """Return the matches for JSON."""
    return [
        {
            "ours": m.ours.setting,
            "ls_ttft_p99_ms": m.ours.ls_ttft_p99_ms,
            "be_tokens_per_s": m.ours.be_tokens_per_s,
            "rival_ls_ttft_p99_ms": m.rival_ms,
            "rival_be_tokens_per_s": m.rival_be_tokens_per_s,
            "how": m.how,
            "ratio": m.ratio,
        }
        for m in matches
    ]
