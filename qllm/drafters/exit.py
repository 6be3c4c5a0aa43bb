"""Drafts from the model itself: tokens that leave it at an early layer.

Source: early exit in "HELIOS", arXiv:2504.10724; self-speculative decoding, arXiv:2404.16710.
"""

from typing import NamedTuple


class Exit(NamedTuple):
    """The layer at which drafted tokens leave the model, through its own last norm and head.

    The engine runs draft rows for it (`qllm.scheduler.request`). The row that verifies the drafts
    begins at this layer, with the hidden states of the draft rows. So no layer runs twice.
    """

    layer: int
    """Number of layers that a draft runs: at least 1, and less than the model has."""
