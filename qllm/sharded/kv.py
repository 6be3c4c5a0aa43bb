"""KV of a request whose heads lie on several ranks, in memory that all ranks share."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.runner.kv import SlabKV
from qllm.sharded.memory import SharedMemory
from qllm.sharded.plan import without_copies


class RankKV(SlabKV):
    """The slabs of one request: those of each rank's heads, one rank after the other.

    Several ranks may have the same head. Then each has a copy.

    Args:
        num_layers: Number of layers with a slab.
        capacity: Largest number of tokens.
        kv_layers: Layers that store keys and values; None is all layers.
        memory: Memory of the slabs.
        heads: KV heads of each rank, the same in all layers.
    """

    __slots__ = ("_heads", "_memory", "parts")

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        kv_layers: Sequence[int] | None,
        memory: SharedMemory,
        heads: Sequence[range],
    ) -> None:
        super().__init__(num_layers, capacity, kv_layers)
        self._memory, self._heads = memory, heads
        self.parts: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each rank, [layers, heads, capacity, width] each."""

    def bases(self, widths: tuple[int, int], dtype: torch.dtype) -> list[tuple[int, int]]:
        """Return the addresses of the keys and of the values of layer 0, by rank.

        Args:
            widths: Widths of a key and of a value.
            dtype: Dtype of KV that is not reserved yet.
        """
        if not self.parts:
            self.parts = [
                (self._empty(heads, widths[0], dtype), self._empty(heads, widths[1], dtype))
                for heads in self._heads
            ]
        return [(k.data_ptr(), v.data_ptr()) for k, v in self.parts]

    def _empty(self, heads: range, width: int, dtype: torch.dtype) -> Tensor:
        shape = (len(self.slabs), len(heads), self.capacity, width)
        return self._memory.empty(shape, dtype)

    def base(self, slab: tuple[int, int, int], like: Tensor) -> tuple[int, int]:
        return self.bases(slab[1:], like.dtype)[0]

    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        self.bases((k_1GTH.shape[3], v_1GTH.shape[3]), k_1GTH.dtype)
        hi = lo + k_1GTH.shape[2]
        for rank, (heads, part) in enumerate(zip(self._heads, self.parts, strict=True)):
            for mine, given in zip(part, (k_1GTH, v_1GTH), strict=True):
                mine[layer, :, lo:hi] = given[0, heads.start : heads.stop]
                self._memory.share(mine[layer, :, lo:hi], rank)
        self.reach(hi)

    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of positions [lo, hi)."""
        self._fetch((layer,), lo, hi)
        return self._read(layer, lo, hi)

    def read_all(self, lo: int, hi: int) -> list[tuple[Tensor, Tensor]]:
        self._fetch(self.kv_layers, lo, hi)
        return [self._read(layer, lo, hi) for layer in self.kv_layers]

    def _fetch(self, layers: Sequence[int], lo: int, hi: int) -> None:
        """Let rank 0 read the KV of positions [lo, hi) that other ranks have written."""
        if self.parts and hi <= self.written:
            owners = [rank for rank, _ in without_copies(self._heads)]
            wanted = [(t, rank) for rank in owners for t in self.parts[rank]]
            self._memory.fetch([(t[n, :, lo:hi], rank) for t, rank in wanted for n in layers])

    def _read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if not self.parts or hi > self.written:
            raise InvariantError(f"layer {layer} has no KV up to {hi} (I9)")
        k, v = (self._of_all(which, layer, lo, hi).unsqueeze(0) for which in (0, 1))
        return k, v

    def _of_all(self, which: int, layer: int, lo: int, hi: int) -> Tensor:
        """Return the keys or the values of all heads, [G, hi - lo, H]: a view if one rank has all.

        No other position is copied: the prefix cache reads a page at a time.
        """
        every = without_copies(self._heads)
        found = [self.parts[rank][which][layer, skip:, lo:hi] for rank, skip in every]
        return found[0] if len(found) == 1 else torch.cat(found)

    def clear(self) -> None:
        super().clear()
        self.parts = []

    def export(self) -> Iterator[tuple[str, Tensor]]:
        found = self.read_all(0, self.written) if self.parts else []
        for layer, both in zip(self.kv_layers, found, strict=bool(found)):
            for name, t in zip("kv", both, strict=True):
                yield f"{name}.{layer}", t.clone()
