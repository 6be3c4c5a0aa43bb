"""The figure of a comparison: the wait of LS under each policy, and its reason.

matplotlib is imported when a figure is drawn (the extra `bench`).
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qllm.errors import ConfigError, pip_install
from qllm.record.summary import percentile
from qllm.record.trace import Arrived, Event, Parked, Planned, Ran, Token
from qllm.types import NS_PER_MS, FrameId, Priority, RequestId

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LS_COLOR, BE_COLOR, INK, MUTED = "#d1495b", "#4f7cac", "#222222", "#8a8a8a"
POLICY_COLORS = ("#4f7cac", "#e09f3e", "#6a994e", "#7b5ea7", "#2a9d8f", "#b5838d")
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True, slots=True)
class _Slice:
    """One `Ran`: the class of the best row, and the reason of the end."""

    start_ns: int
    end_ns: int
    priority: int


def pyplot() -> Any:
    """Import matplotlib's pyplot, without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg", force=False)
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigError(f"a figure needs matplotlib; {pip_install('bench')}") from error
    return plt


def _device_slices(events: Iterable[Event]) -> list[_Slice]:
    priorities: dict[RequestId, int] = {}
    best: dict[FrameId, int] = {}
    slices: list[_Slice] = []
    for event in events:
        match event:
            case Arrived():
                priorities[event.request_id] = event.priority
            case Planned():
                known = [priorities.get(row.request_id, Priority.BE) for row in event.rows]
                best[event.frame_id] = min(known, default=int(Priority.BE))
            case Ran():
                priority = best.get(event.frame_id, int(Priority.BE))
                slices.append(_Slice(event.start_ns, event.at_ns, priority))
            case _:
                pass
    return slices


def _preemptions(events: Sequence[Event]) -> list[tuple[Parked, int]]:
    """Return every preemption, and the time when the stopped frame or its replacement ran again."""
    next_run: dict[FrameId, int] = {}
    found: list[tuple[Parked, int]] = []
    for event in reversed(events):
        match event:
            case Ran():
                next_run[event.frame_id] = event.start_ns
            case Planned():
                again = next_run.get(event.frame_id)
                if again is not None:
                    next_run.update(dict.fromkeys(event.from_frames, again))
            case Parked() if event.preempted:
                found.append((event, next_run.get(event.frame_id, event.at_ns)))
            case _:
                pass
    return found[::-1]


def choose_window(events: Sequence[Event], width_ns: int | None = None) -> tuple[int, int]:
    """Return a window of time that shows a preemption, from arrival to resumption.

    The preemption whose frame is parked for the median time is shown, which is typical. A third of
    the window lies before the arrival. Without a preemption, the window shows the first work.
    """
    slices = _device_slices(events)
    if not slices:
        return 0, width_ns or NS_PER_MS
    parked = _preemptions(events)
    if not parked:
        first = slices[0].start_ns
        return first, first + (width_ns or max(s.end_ns for s in slices[:20]) - first)
    parked.sort(key=lambda pair: pair[1] - pair[0].at_ns)
    chosen, again_ns = parked[len(parked) // 2]
    begin = chosen.at_ns if chosen.arrival_ns is None else chosen.arrival_ns
    whole = again_ns - begin
    width = width_ns or max(3 * whole, 5 * NS_PER_MS)
    return max(0, begin - width // 3), begin - width // 3 + width


def _brief(values: Sequence[float], p: float) -> str:
    at = percentile(values, p)
    return f"{at:,.0f}" if at >= 100 else f"{at:.2g}"


def draw_ttft(ax: "Axes", results: Mapping[str, Sequence[float]], alone: str | None) -> None:
    """Draw the distributions of TTFTs in ms.

    Args:
        ax: Axes to draw on.
        results: TTFTs by policy.
        alone: Key of the reference (a dashed line), if it is there.
    """
    colors = iter(POLICY_COLORS * (len(results) // len(POLICY_COLORS) + 1))
    for name, values in results.items():
        if not values:
            continue
        ordered = sorted(values)
        n = len(ordered)
        is_alone = name == alone
        ax.step(
            [ordered[0], *ordered],
            [0.0, *((i + 1) / n * 100 for i in range(n))],
            where="post",
            color=INK if is_alone else next(colors),
            linestyle=(0, (4, 2)) if is_alone else "-",
            linewidth=1.3 if is_alone else 2.2,
            label=f"{name}   p50 {_brief(values, 50)}   p99 {_brief(values, 99)}",
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set(
        xlabel="TTFT of LS requests, ms (log scale)",
        ylabel="% of LS requests at or below",
        ylim=(0, 101),
        title="LS time to first token",
    )
    ax.grid(axis="both", color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, prop={"size": 9}
    ).set_title("policy, TTFT in ms")


def _bars(ax: "Axes", spans: Sequence[tuple[float, float]], y: float, color: str) -> None:
    ax.broken_barh(
        list(spans), (y, 0.6), facecolors=color, edgecolors="white", linewidth=0.6, zorder=3
    )


def _draw_timeline(ax: "Axes", events: Sequence[Event], begin: int, end: int, policy: str) -> None:
    def ms(at_ns: int) -> float:
        return (at_ns - begin) / NS_PER_MS

    arrived = {e.request_id: e for e in events if isinstance(e, Arrived)}
    ls: list[tuple[float, float]] = []
    be: list[tuple[float, float]] = []
    for s in _device_slices(events):
        if s.end_ns > begin and s.start_ns < end:
            row = ls if s.priority < Priority.BE else be
            cut_ns = max(s.start_ns, begin)
            row.append((ms(cut_ns), (min(s.end_ns, end) - cut_ns) / NS_PER_MS))
    _bars(ax, ls, 1.0, LS_COLOR)
    _bars(ax, be, 0.0, BE_COLOR)
    parked = [(e, again) for e, again in _preemptions(events) if e.at_ns < end and again > begin]
    for n, (event, again_ns) in enumerate(parked):
        a, b = max(ms(event.at_ns), 0.0), min(ms(again_ns), ms(end))
        label = "BE frame parked" if n == 0 else None
        ax.broken_barh(
            [(a, b - a)],
            (0.0, 0.6),
            facecolors="#e8eef5",
            edgecolors="#a9bfd8",
            hatch="///",
            linewidth=0,
            zorder=2,  # drawn below the work in that time
            label=label,
        )
        if event.at_ns >= begin:
            ax.plot([a, a], [0.6, 1.0], color=INK, linewidth=1.2)
    arrivals = [
        ms(e.at_ns)
        for e in arrived.values()
        if e.priority < Priority.BE and begin <= e.at_ns <= end
    ]
    ax.plot(
        arrivals,
        [1.78] * len(arrivals),
        marker="v",
        color=LS_COLOR,
        markersize=7,
        linestyle="none",
        label="LS request arrives",
    )
    tokens = [
        ms(e.at_ns)
        for e in events
        if isinstance(e, Token)
        and begin <= e.at_ns <= end
        and e.request_id in arrived
        and arrived[e.request_id].priority < Priority.BE
    ]
    ax.plot(
        tokens,
        [1.78] * len(tokens),
        marker="o",
        color=INK,
        markersize=4,
        linestyle="none",
        label="LS token",
    )
    ax.set(
        xlim=(0, ms(end)),
        ylim=(-0.25, 2.1),
        yticks=[0.3, 1.3],
        yticklabels=["BE", "LS"],
        xlabel=f"ms since {begin / NS_PER_MS:,.1f} ms of the run",
        title=f"The device under {policy}" + (", around one preemption" if parked else ""),
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, prop={"size": 9}
    )


def ttft_figure(
    results: Mapping[str, Sequence[float]],
    trace: Iterable[Event],
    path: str | os.PathLike[str],
    *,
    policy: str,
    alone: str | None = "LS alone",
    window_ns: int | None = None,
) -> None:
    """Write a PNG with LS TTFT per policy, and the work of the device around a preemption.

    Args:
        results: TTFTs of LS requests in ms, by policy.
        trace: Events of the run whose device is shown.
        path: Path of the PNG.
        policy: Policy of the shown run.
        alone: Key of the reference in `results`, which is drawn as a dashed line if it exists.
        window_ns: Width of the timeline. With None, a preemption fills a third of the width.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = pyplot()
    events = tuple(trace)
    begin, end = choose_window(events, window_ns)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(12, 4.8), width_ratios=(1, 1.35), layout="constrained"
        )
        draw_ttft(left, results, alone)
        _draw_timeline(right, events, begin, end, policy)
        figure.get_layout_engine().set(w_pad=0.15)
        figure.savefig(path, format="png", dpi=160)
        plt.close(figure)
