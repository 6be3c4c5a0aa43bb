"""Layered prefill with one cohort per class, parked at its group boundary for a better class.

Between two groups of layers a prefill can be parked without cost, because its rows keep their
hidden states. So an LS prompt waits for one group of layers at most. Its cohort runs first, and the
BE cohort waits. Decodes of every class are in every step. A BE cohort that has waited for half of
`max_be_stall_ms` gets the next group of layers before all other cohorts. So an admitted BE request
never stalls for longer than the bound.

Source: layered prefill, arXiv:2510.08055. Differences: the paper has one cohort, no classes, no
parking and no stall bound.
"""

from dataclasses import dataclass

from qllm.policy import Groups

from .ls_first import LsFirst


@dataclass(frozen=True, kw_only=True)
class PriorityLayered(LsFirst):
    """LS cohorts overtake BE cohorts between groups of layers; decodes never wait."""

    max_be_stall_ms: int | None = 1000
    group_tokens: int = 512
    """Prompt tokens of a cohort per group of layers."""
    max_groups: int = 16
    """Most groups of a cohort."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", Groups(self.group_tokens, self.max_groups))
        super().__post_init__()
