"""Claims of the papers: the rows of `papers.py`, and functions that its parts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bench.common import Estimate
from bench.policies.live import Bench, Timing
from bench.report_lines import with_mark
from qllm.workloads.capacity import Capacity

QLLM = "QLLM, arXiv:2503.09304 (A100, Mixtral 4-bit, against HF TGI)"
LAYERED = "layered prefill, arXiv:2510.08055 (2x H100, Qwen3-30B-A3B, arXiv prompts, 1.3 req/s)"
SUPERINFER = "SuperInfer, arXiv:2601.20309 (GH200)"
BLINK = "Blink, arXiv:2604.07609 (interference from pbzip2 and Ninja on the host)"

Way = Literal["live", "simulated", "computed", "GPU"]
"""The way in which a number was found."""
PRINTED = "printed"
"""Target of a number that cannot miss: a control, a floor or a count."""


def reaches(value: float, target: str) -> bool | None:
    """Return True if a number reaches a target, written `>= 2` or `<= 0.5`; None for `PRINTED`.

    Raises:
        ValueError: The target has another form.
    """
    if target == PRINTED:
        return None
    sign, _, number = target.partition(" ")
    if sign not in ("<=", ">="):
        raise ValueError(f"target {target!r} must be '>= NUMBER', '<= NUMBER' or {PRINTED!r}")
    return value <= float(number) if sign == "<=" else value >= float(number)


class Claim(NamedTuple):
    """A claim of a paper, and the number that ours must reach."""

    name: str
    """Name of the claim on docs/papers.md, as Q13."""
    what: str
    source: str
    paper: str
    """Number of the paper."""
    target: str
    """Target, committed before the run; see `reaches`."""
    way: Way = "live"


class Row(NamedTuple):
    """A line of the table: `here`, or the reason why it is empty."""

    name: str
    claim: str
    source: str
    paper: str
    target: str
    way: Way
    how: str
    here: str | None = None
    why_not: str | None = None
    reached: bool | None = None
    """None for a number that is only printed, and for a row without a value."""

    @classmethod
    def of(
        cls,
        claim: Claim,
        here: Estimate | float | str | None,
        how: str,
        why_not: str | None = None,
        *,
        more: str = "",
    ) -> "Row":
        """Return a claim with its measured value.

        Args:
            claim: The claim.
            here: Number that is compared with the target; a text if the target is `PRINTED`.
            how: Conditions of the measurement.
            why_not: Reason why there is no value.
            more: Text behind the number.

        Raises:
            ValueError: There is neither a value nor a reason, or there are both; or a text has a
                target.
        """
        if (here is None) == (why_not is None):
            raise ValueError(f"{claim.what}: give either a value or a reason")
        if isinstance(here, str) and claim.target != PRINTED:
            raise ValueError(f"{claim.what}: {here!r} is no number, and the target is a number")
        text, reached = here, None
        if isinstance(here, Estimate):
            text, reached = here.text(), reaches(here.value, claim.target)
        elif isinstance(here, int | float):
            text, reached = f"{here:.2f}", reaches(here, claim.target)
        elif here is None:
            reaches(0.0, claim.target)  # checks the form
        return cls(
            name=claim.name,
            claim=claim.what,
            source=claim.source,
            paper=claim.paper,
            target=claim.target,
            way=claim.way,
            how=how,
            here=None if text is None else f"{text}{more}",
            why_not=why_not,
            reached=reached,
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The amount of work that is measured."""

    seeds: Sequence[int]
    timing: Timing
    """Seconds of a window of the rows on KV. The rows on rates keep its warm-up and drain."""
    loads: Sequence[float]
    """Parts of this machine's capacity at which rates are measured."""
    ls_requests: int
    """LS requests per policy and load, over all seeds."""
    all_policies: bool
    prompt: tuple[int, int]
    """Prompt lengths of the row on layered prefill."""
    count: int
    """Requests of the row on layered prefill."""
    simulated: int
    """Requests of the row on layered prefill in the simulator."""
    hog_s: float
    """Seconds of each turn, quiet or hogged."""
    chats: int
    """Chats per seed of the rows on short and long prompts."""
    stream_s: float
    """Seconds of a window of the rows on prompts in pieces."""
    rota: tuple[int, int]
    """Seeds, and requests per seed, of the rows on KV that rotates."""
    size: str = "300m"
    arms: Sequence[str] = ()
    """Arms of `servers.PEERS` in addition to ours."""
    install: bool = False
    """True to install missing peers."""


QUICK = Scale(
    seeds=(1,),
    timing=Timing(warmup_s=0.3, window_s=1.5, drain_s=0.7),
    loads=(0.5, 2.0),
    ls_requests=4,
    all_policies=False,
    prompt=(512, 1024),
    count=3,
    simulated=20,
    hog_s=2.0,
    chats=3,
    stream_s=4.0,
    rota=(1, 6),
    size="1m",
)
FULL = Scale(
    seeds=(1, 2),
    timing=Timing(warmup_s=3.0, window_s=20.0, drain_s=12.0),
    loads=(0.5, 0.75, 1.0, 1.5),
    ls_requests=300,
    all_policies=False,
    prompt=(2000, 4000),
    count=24,
    simulated=400,
    hog_s=60.0,
    chats=60,
    stream_s=60.0,
    rota=(5, 100),
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


def losing(parts: Mapping[str, Any]) -> list[str]:
    """Return the texts of the rows that miss their target."""
    return [
        f"{row['claim']}: {row['here']} (target {row['target']}, {row['way']})"
        for part in parts.values()
        for row in part["rows"]
        if row.get("reached") is False
    ]


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return the table of a result: claim, paper, here, target, how."""
    lines = ["| claim | paper | here | target | how measured |", "|---|---|---|---|---|"]
    for part in document["parts"].values():
        for row in part["rows"]:
            here = row["here"] if row["here"] is not None else f"not measured: {row['why_not']}"
            target = with_mark(row.get("target", "none"), row.get("reached"))
            how = f"{row['how']}; {part['at']}, commit {part['commit']}"
            cells = (row["claim"], f"{row['paper']} ({row['source']})", here, target, how)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines
