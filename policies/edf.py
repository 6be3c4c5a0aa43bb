"""Earliest deadline first, with as much prefill per step as the decodes have time for.

Inside a class the earliest deadline comes first: a prompt's TTFT target, or a decode's TPOT target.
The prefill of a step is as large as its predicted time allows before the first decode of the step
is due. Requests without targets get the targets of the policy, so other requests overtake them for
a limited time.

Source: the chunk rule of SLOWeave, arXiv:2609.07883 (largest chunk that meets the tightest slack),
on deadline order. Differences: the predicted time is linear, so a division finds the chunk instead
of a search; the class goes before the deadline.
"""

from dataclasses import dataclass, field

from qllm.policy import NO_DEADLINE, RankPolicy, Reads, Ride, Slack
from qllm.types import NS_PER_MS


@dataclass(frozen=True, kw_only=True)
class Edf(RankPolicy):
    """Earliest deadline first inside each class, chunks sized by the slack of the decodes."""

    reads = Reads.PROGRESS
    ride: Ride = field(default=Ride(unbounded=True), metadata={"fixed": True})
    ttft_ms: int = 5000
    """TTFT target in ms of requests without one."""
    tpot_ms: int = 100
    """TPOT target in ms of requests without one."""
    min_chunk_tokens: int = 64
    """Least prefill tokens of a step, even if its decodes are late."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slack", Slack(self.min_chunk_tokens, self.tpot_ms))
        super().__post_init__()

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        """Return the class as the tier, then the deadline as the key."""
        if deadline_ns == NO_DEADLINE:
            deadline_ns = arrival_ns + self.ttft_ms * NS_PER_MS
        return priority, deadline_ns
