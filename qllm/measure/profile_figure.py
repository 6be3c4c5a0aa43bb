"""The figure of a profile: early answers per layer, and the speed-up that they would give."""

import os

from qllm.measure.plots import INK, MUTED, POLICY_COLORS, STYLE, pyplot
from qllm.measure.profile import DRAFTS, Profile
from qllm.measure.profile_texts import ALL
from qllm.scheduler.drafts import LEAST_GAIN

GAIN = "Predicted speed-up"


def profile_figure(found: Profile, path: str | os.PathLike[str]) -> None:
    """Write one PNG: agreement and confidence by layer, and predicted speed-ups by layer.

    Args:
        found: The profile. Each kind of text and each number of drafts is drawn as a line.
        path: Path of the PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = pyplot()
    layers = range(1, found.num_layers)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for number, text in enumerate(found.num_tokens):
            color, exits = POLICY_COLORS[number % len(POLICY_COLORS)], found.of(text)
            agreed = [100 * e.agreement for e in exits]
            sure = [100 * e.confidence for e in exits]
            left.plot(layers, agreed, "o-", color=color, markersize=4, label=f"{text}: agrees")
            left.plot(layers, sure, "--", color=color, label=f"{text}: confidence")
        left.set(ylabel="%", ylim=(0, 101), title="Early answers and the whole model's")
        for number, drafts in enumerate(() if found.refused else DRAFTS):
            gains = [p.speedup for p in found.predictions(ALL) if p.draft_tokens == drafts]
            color = POLICY_COLORS[number % len(POLICY_COLORS)]
            label = f"{drafts} draft{'s' * (drafts > 1)}"
            right.plot(layers, gains, "o-", color=color, markersize=4, label=label)
        right.axhline(1, color=MUTED, linewidth=1)
        right.axhline(LEAST_GAIN, color=INK, linestyle=(0, (4, 2)), linewidth=1, label="pays")
        right.set(ylabel="tokens per second, without drafts = 1", title=GAIN)
        right.set_ylim(0, None)
        if found.refused:
            right.set_title(f"{GAIN}: none, drafts are refused")
        for ax in (left, right):
            ax.set_xlabel("layers that ran, E")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(color="#e6e6e6", linewidth=0.8)
            ax.set_axisbelow(True)
            ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
        figure.suptitle(found.model)
        figure.savefig(path, format="png", dpi=160)
        plt.close(figure)
