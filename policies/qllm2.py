"""QLLM repaired, the default: LS stops BE inside a layer, and BE uses the time that LS can spare.

An LS prefill stops a BE program at the next expert boundary, and runs alone. It also stops a step
of LS decodes that BE decodes joined. While LS only decodes, BE gets the time up to the TPOT target
of the LS requests. An admitted BE request never stalls for longer than `max_be_stall_ms`. Prompts
alternate with decodes of their own class. So no gap between two tokens is longer than the TPOT
target, or `max_prompt_gap_ms`.

Source: QLLM, arXiv:2503.09304, Algorithm 1. Differences: BE never joins an LS prefill; BE prefill
refills the batch; BE has a budget during LS decode; BE has a stall bound, and gaps between tokens
have a bound. The paper has none of these, and its order starves BE prefill.
"""

from dataclasses import dataclass, field

from qllm.errors import ConfigError
from qllm.policy import RankPolicy, Reads, Ride
from qllm.types import Grain


@dataclass(frozen=True, kw_only=True)
class Qllm2(RankPolicy):
    """Preemption at every expert, BE in LS decode steps up to a budget, a bound on BE stalls."""

    reads = Reads.FIXED
    grain: Grain = field(default=Grain.EXPERT, metadata={"fixed": True})
    max_prompt_gap_ms: int | None = 100
    max_be_stall_ms: int | None = 1000
    ride_frac: float = 0.5
    """Largest part by which BE may lengthen the step of LS decodes without a TPOT target."""

    def __post_init__(self) -> None:
        if not 0 <= self.ride_frac <= 100:
            raise ConfigError(f"ride_frac={self.ride_frac!r} must be in [0, 100]")
        super().__post_init__()
        object.__setattr__(self, "ride", Ride(frac=self.ride_frac))

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
