"""Layered prefill: prompts are cut by layers instead of tokens, so experts are loaded once.

The oldest prompts form a cohort that crosses the model one group of layers per step, while decodes
go through all layers in every step. No prompt joins a cohort that has started. Longer cohorts get
more groups. So a step has about as much work as `group_tokens` prefill tokens. Priorities are
ignored.

Source: layered prefill, arXiv:2510.08055. Differences: the number of groups is the cohort's tokens
divided by `group_tokens`, not from a table of powers of two; the number changes when members end; a
cohort never loses its KV to a request of its tier (in the paper, decodes are evicted first).
"""

from dataclasses import dataclass

from qllm.policy import Groups

from .fcfs import Fcfs


@dataclass(frozen=True, kw_only=True)
class Layered(Fcfs):
    """First come, first served, with prompts that advance by groups of layers."""

    group_tokens: int = 512
    """Prompt tokens of a cohort per group of layers."""
    max_groups: int = 16
    """Most groups of a cohort."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", Groups(self.group_tokens, self.max_groups))
        super().__post_init__()
