"""LS first in every batch, BE in the remaining room: priority as in vLLM.

Waiting requests are sorted by priority. Every step takes all decodes and as many prompt tokens as
fit, whatever their class. Nothing bounds BE's part of the time, and no step is preempted.

Source: vLLM 0.33 `--scheduling-policy priority`. Differences: prompts below `max_step_tokens` are
not cut, and LS gets the seat of a BE request in addition to the KV.
"""

from dataclasses import dataclass, field

from qllm.policy import RankPolicy, Reads, Ride


@dataclass(frozen=True, kw_only=True)
class LsFirst(RankPolicy):
    """Unbounded batching with LS first."""

    reads = Reads.FIXED
    ride: Ride = field(default=Ride(unbounded=True), metadata={"fixed": True})

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
        """Return the class as the tier, then the arrival as the key."""
        return priority, arrival_ns
