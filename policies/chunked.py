"""Chunked prefill: a step never has more tokens than a budget, so decodes never wait long.

Decodes come first. The rest of the budget is the next chunk of the oldest prompts. Priorities are
ignored.

Source: Sarathi-Serve, arXiv:2403.02310, stall-free batching. Difference: several prompts may share
a chunk, the oldest first.
"""

from dataclasses import dataclass

from .fcfs import Fcfs


@dataclass(frozen=True, kw_only=True)
class Chunked(Fcfs):
    """First come, first served, with prompts cut into chunks that fit a token budget."""

    step_tokens: int = 512
    """Most tokens of a step, decodes included."""
