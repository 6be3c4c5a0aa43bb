"""Masks of tokens: logits become -inf where a bit is not set."""

import torch
from torch import Tensor

from qllm.kernels.cpu import native


def keep_allowed(x_V: Tensor, words: Tensor) -> None:
    """Set the logits of all tokens whose bit is 0 to -inf, in place.

    Args:
        x_V: fp64 [V], contiguous.
        words: int32 [ceil(V / 32)], contiguous; token i has bit i % 32 of word i // 32.
    """
    if native is None:
        by_hand(x_V, words)
    else:
        native.mask(x_V.data_ptr(), words.data_ptr(), x_V.numel())


def by_hand(x_V: Tensor, words: Tensor) -> None:
    """Do what `keep_allowed` does in torch: without built kernels, and as a reference in tests."""
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    x_V[bits.flatten()[: x_V.numel()] == 0] = -torch.inf
