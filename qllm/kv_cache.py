"""KV of requests: one contiguous slab per layer, reserved once at the longest length.

Reserving costs address space, not memory: pages are touched when tokens are written, so growth
never copies and attention reads one contiguous range per head.

    layer slab   k_1GSH   [. committed .|. written, not committed .|. reserved, untouched .......]
                          0             committed                  written            capacity
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qllm.errors import InvariantError


class RequestKV:
    """Slabs of one request. Slabs are made when a layer first writes, in the shape it writes."""

    __slots__ = ("capacity", "committed", "slabs", "written")

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        """Tokens whose KV exists in every layer."""
        self.written = 0
        """Tokens whose KV exists in some layer."""
        self.slabs: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        """Store the keys and values of positions [lo, lo + T)."""
        num_tokens = k_1GTH.shape[2]
        hi = lo + num_tokens
        slab = self.slabs[layer]
        if slab is None:
            slab = (self._reserve(k_1GTH), self._reserve(v_1GTH))
            self.slabs[layer] = slab
        slab[0].narrow(2, lo, num_tokens).copy_(k_1GTH)
        slab[1].narrow(2, lo, num_tokens).copy_(v_1GTH)
        if hi > self.written:
            self.written = hi

    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of positions [lo, hi)."""
        slab = self.slabs[layer]
        if slab is None or hi > self.written:
            raise InvariantError(f"layer {layer} has no KV up to {hi} (I9)")
        return slab[0].narrow(2, lo, hi - lo), slab[1].narrow(2, lo, hi - lo)

    def _reserve(self, like_1GTH: Tensor) -> Tensor:
        shape = (1, like_1GTH.shape[1], self.capacity, like_1GTH.shape[3])
        return torch.empty(shape, dtype=like_1GTH.dtype, device=like_1GTH.device)

    def clear(self) -> None:
        """Free the slabs; the request recomputes."""
        self.slabs = [None] * len(self.slabs)
        self.committed = self.written = 0

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Named copies of what is written, committed or not."""
        for layer, slab in enumerate(self.slabs):
            if slab is not None:
                for name, t in zip("kv", slab, strict=True):
                    yield f"{name}.{layer}", t[:, :, : self.written].clone()

    def restore(self, layer: int, k_1GSH: Tensor, v_1GSH: Tensor) -> None:
        """Put back what `export` gave for one layer."""
        self.write(layer, k_1GSH, v_1GSH, 0)
