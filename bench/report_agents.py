"""The part of docs/results on agents in front of a batch, and its figure."""

from typing import Any

from bench.report_lines import IMAGES, machine_of, table
from qllm.measure.plots import INK, POLICY_COLORS, STYLE, draw_ttft, pyplot

FIGURE = IMAGES / "agents.png"
ARMS = {"with_batch": "qllm2", "priority": "priority"}
"""Arms with the batch, by the policy's name in the figure."""


def agents_part(document: dict[str, Any]) -> list[str]:
    """Return the rows of `bench/serving/agents.py`, and its figure."""
    config, rounds = document["config"], document["samples"]["with_batch"]["took_s"]
    asked = (
        f"{config['agents']} agents, sessions of {config['turns']} turns, lengths times "
        f"{config['scale']:.3g}, waits for tools times {config['wait_scale']:g}, subagents "
        f"{config['subagents']}, {len(rounds)} rounds; threads {config['threads']}"
    )
    return [
        "",
        "## Agents in front of an endless batch",
        "",
        f"- {machine_of(document)}",
        f"- {asked}",
        "",
        f"![LS TTFT of agents next to a batch](../images/{FIGURE.name})",
        *table(document["lines"]),
    ]


def draw_agents(document: dict[str, Any], path: str = str(FIGURE)) -> None:
    """Draw a committed result: TTFT of the agents' turns in each arm, and the batch's rate."""
    samples = document["samples"]
    shown = {label: samples[arm] for arm, label in ARMS.items()}
    if best := document["found"].get("vllm_best"):
        shown["vLLM"] = samples[best]
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(12, 4.8), width_ratios=(1.6, 1), layout="constrained"
        )
        alone = samples["alone"]["ttft_ms"]
        ttft = {label: of["ttft_ms"] for label, of in shown.items()}
        draw_ttft(left, {**ttft, "no batch": alone}, "no batch")
        means = [of["batch_tokens_per_s"] or 0.0 for of in shown.values()]
        right.bar(list(shown), means, color=POLICY_COLORS[: len(means)], width=0.6)
        for x, mean in enumerate(means):
            right.annotate(
                f"{mean:,.0f}", (x, mean), ha="center", xytext=(0, 4), color=INK,
                textcoords="offset points",
            )  # fmt: skip
        right.set(ylabel="tokens per second, in + out", title="The batch behind the agents")
        figure.savefig(path, format="png", dpi=160)
        plt.close(figure)
