"""Layered prefill: cut the prompts by layers instead of tokens, so experts are loaded once.

The oldest prompts form a cohort that crosses the model one group of layers per step, while
decodes go through all layers in every step. No prompt joins a cohort that has started.
Longer cohorts get more groups, so a step holds about `group_tokens` prefill tokens' worth of
work. Priorities are ignored.

Source: layered prefill, arXiv:2510.08055. Differs: the number of groups is the cohort's tokens
over `group_tokens`, not a table of powers of two, and follows the members that are left; a
cohort never loses its KV to an equal (there, decodes are evicted first).
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
