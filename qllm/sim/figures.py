"""A figure of a capacity plan: the price of BE throughput for LS, per policy."""

import os
from collections.abc import Sequence

from qllm.measure.plots import INK, MUTED, POLICY_COLORS, STYLE, pyplot
from qllm.sim.capacity import Answer, Question


def plan_figure(
    answers: Sequence[Answer], question: Question, path: str | os.PathLike[str], machine: str = ""
) -> None:
    """Write one PNG: attainment and LS TTFT p99 over BE tokens per second.

    Args:
        answers: Answers, each drawn as a line. A ring marks the best load.
        question: Question with the targets to draw.
        path: Path of the PNG.
        machine: Title of the figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for number, answer in enumerate(answers):
            color = POLICY_COLORS[number % len(POLICY_COLORS)]
            harvest = [t.outcome.be_per_s for t in answer.tried]
            kept = [100 * (t.outcome.attainment or 0.0) for t in answer.tried]
            ttft = [t.outcome.ls_ttft_p99 or float("nan") for t in answer.tried]
            left.plot(harvest, kept, "o-", color=color, markersize=4, label=answer.label)
            right.plot(harvest, ttft, "o-", color=color, markersize=4, label=answer.label)
            best = answer.best
            if best is not None:
                x = best.outcome.be_per_s
                for ax, y in (
                    (left, 100 * (best.outcome.attainment or 0.0)),
                    (right, best.outcome.ls_ttft_p99 or float("nan")),
                ):
                    ax.plot(x, y, "o", markersize=13, markerfacecolor="none", color=color)
        left.axhline(99, color=INK, linestyle=(0, (4, 2)), linewidth=1)
        left.set(ylabel="% of LS requests that met both targets", title="LS targets met")
        right.set_yscale("log")
        right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        right.set(ylabel="LS TTFT p99, ms (log scale)", title="LS time to first token")
        if question.slo.ttft_ms is not None:
            right.axhline(question.slo.ttft_ms, color=INK, linestyle=(0, (4, 2)), linewidth=1)
        for ax in (left, right):
            ax.set(xlabel="BE tokens per second, in + out", xlim=(0, None))
            ax.grid(color="#e6e6e6", linewidth=0.8)
            ax.set_axisbelow(True)
        figure.suptitle(machine)
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
            title="policy",
        )
        left.annotate("99 %", (0, 99), xytext=(4, -12), textcoords="offset points", color=MUTED)
        figure.savefig(path, format="png", dpi=160)
        plt.close(figure)
