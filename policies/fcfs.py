"""First come, first served: iteration-level continuous batching, the baseline.

Running requests decode together with whole prompts of the oldest waiting requests. Priorities are
ignored, and no step is preempted.

Source: Orca (OSDI'22), iteration-level scheduling. Difference: prompts longer than
`max_step_tokens` are cut.
"""

from dataclasses import dataclass

from qllm.policy import RankPolicy, Reads


@dataclass(frozen=True, kw_only=True)
class Fcfs(RankPolicy):
    """First come, first served."""

    reads = Reads.FIXED

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
        """Return one tier for all requests, then the arrival as the key."""
        return 0, arrival_ns
