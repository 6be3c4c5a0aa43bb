"""Position embeddings of a frame, by the model's own rotary module.

For static rope types the values of a position do not depend on the others in the call, so they
are computed once into a table. Dynamic types (LongRoPE) choose by the longest position of a
call; they are called per row, as a solo forward would.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STATIC = {"default", "linear", "llama3", "yarn"}


class RopeTable:
    """cos and sin of positions [0, n), grown by doubling."""

    def __init__(self, rotary_emb: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._module = rotary_emb
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._static = getattr(rotary_emb, "rope_type", "") in STATIC
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    def _call(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(lo, hi, device=self._like.device).unsqueeze(0)
        cos, sin = self._module(self._like, positions)
        return cos, sin

    def _rows(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if not self._static:
            return self._call(lo, hi)
        if self._cos is None or self._sin is None or hi > self._cos.shape[1]:
            size = 1024
            while size < hi:
                size *= 2
            self._cos, self._sin = self._call(0, size)
        return self._cos[:, lo:hi], self._sin[:, lo:hi]

    def of(self, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Cos and sin of ranges of positions, packed: each [1, T, H]."""
        parts = [self._rows(lo, hi) for lo, hi in ranges]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([cos for cos, _ in parts], 1), torch.cat([sin for _, sin in parts], 1)
