"""Chunked prefill with classes: the best possible policy between iterations.

Every step takes all decodes, LS first, and fills the rest of the token budget with prompts, LS
first. LS and BE share every step, and no step is preempted. Policies that preempt are compared with
this one.

Source: Sarathi-Serve, arXiv:2403.02310, with the waiting requests sorted by class. Difference: LS
gets the seat of a BE request in addition to the KV.
"""

from dataclasses import dataclass

from .ls_first import LsFirst


@dataclass(frozen=True, kw_only=True)
class ChunkedPriority(LsFirst):
    """LS first in every step, with prompts cut into chunks that fit a token budget."""

    step_tokens: int = 512
    """Most tokens of a step, decodes included."""
