"""Claims of the papers: the rows of `papers.py`, and functions that its parts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.policies.live import Bench, Timing
from qllm.workloads.capacity import Capacity

QLLM = "QLLM, arXiv:2503.09304 (A100, Mixtral 4-bit, against HF TGI)"
LAYERED = "layered prefill, arXiv:2510.08055 (2x H100, Qwen3-30B-A3B, arXiv prompts, 1.3 req/s)"
SUPERINFER = "SuperInfer, arXiv:2601.20309 (GH200)"
BLINK = "Blink, arXiv:2604.07609 (interference from pbzip2 and Ninja on the host)"


class Row(NamedTuple):
    """A line of the table: `here`, or the reason why it is empty."""

    claim: str
    source: str
    paper: str
    how: str
    here: str | None = None
    why_not: str | None = None

    @classmethod
    def of(cls, claim: "Claim", here: str | None, how: str, why_not: str | None = None) -> "Row":
        """Return a claim with its measured value.

        Raises:
            ValueError: There is neither a value nor a reason, or there are both.
        """
        if (here is None) == (why_not is None):
            raise ValueError(f"{claim.what}: give either a value or a reason")
        return cls(claim.what, claim.source, claim.paper, how, here, why_not)


class Claim(NamedTuple):
    """A claim of a paper."""

    what: str
    source: str
    paper: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The amount of work that is measured."""

    seeds: Sequence[int]
    timing: Timing
    loads: Sequence[float]
    all_policies: bool
    prompt: tuple[int, int]
    """Prompt lengths of the row on layered prefill."""
    count: int
    """Requests of the row on layered prefill."""
    simulated: int
    """Requests of the row on layered prefill in the simulator."""
    hog_s: float
    """Seconds of each turn, quiet or hogged."""
    size: str = "300m"
    arms: Sequence[str] = ()
    """Arms of `servers.PEERS` in addition to ours in the row on hogs."""
    install: bool = False
    """True to install missing peers."""


QUICK = Scale(
    seeds=(1,),
    timing=Timing(warmup_s=0.3, window_s=1.5, drain_s=0.7),
    loads=(0.5, 2.0),
    all_policies=False,
    prompt=(512, 1024),
    count=3,
    simulated=20,
    hog_s=2.0,
    size="1m",
)
FULL = Scale(
    seeds=(1, 2),
    timing=Timing(warmup_s=3.0, window_s=20.0, drain_s=12.0),
    loads=(0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    all_policies=True,
    prompt=(2000, 4000),
    count=24,
    simulated=400,
    hog_s=60.0,
)


@dataclass(kw_only=True)
class World:
    """A model, and this machine's capacity with it, made on first use."""

    scale: Scale
    settings: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    """Numbers behind the rows, by part."""
    _bench: Bench | None = None
    _capacity: Capacity | None = None

    @property
    def bench(self) -> Bench:
        """Return the model."""
        if self._bench is None:
            self._bench = Bench.load(self.scale.size, **self.settings)
        return self._bench

    @property
    def capacity(self) -> Capacity:
        """Return the capacity of this machine."""
        if self._capacity is None:
            self._capacity = self.bench.capacity()
        return self._capacity


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return the table of a result: claim, paper, here, how."""
    lines = ["| claim | paper | here | how measured |", "|---|---|---|---|"]
    for part in document["parts"].values():
        for row in part["rows"]:
            here = row["here"] if row["here"] is not None else f"not measured: {row['why_not']}"
            how = f"{row['how']}; {part['at']}, commit {part['commit']}"
            cells = (row["claim"], f"{row['paper']} ({row['source']})", here, how)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines
