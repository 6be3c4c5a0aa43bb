"""Chunked prefill with classes: the best possible policy between iterations.

Every step takes all decodes, LS first, and fills the rest of the token budget with prompts, LS
first. LS and BE share every step, and nothing is preempted inside one: preemption has to beat
this rival.

Source: Sarathi-Serve, arXiv:2403.02310, with the waiting line sorted by class. Differs: LS gets
the seat of a BE request as well as its KV.
"""

from dataclasses import dataclass

from .ls_first import LsFirst


@dataclass(frozen=True, kw_only=True)
class ChunkedPriority(LsFirst):
    """LS first in every step, with prompts cut into chunks that fit a token budget."""

    step_tokens: int = 512
    """Most tokens of a step, decodes included."""
