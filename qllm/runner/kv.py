"""KV of requests. The scheduler assigns blocks to a request, and the backend places them in memory.

On a CPU blocks are only counted. A request has one contiguous slab per layer, reserved once for its
longest length. A reserved slab takes address space, and takes memory only for written tokens. So
growth never copies, and attention reads one contiguous range per head. The slabs of all layers lie
one after the other, so a kernel needs one address.

    layer slab   k_1GSH   [. committed .|. written, not committed .|. reserved, untouched .......]
                          0             committed                  written            capacity

On a device a block is a page (`qllm.cuda.pages`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.runner.states import States


class RequestKV(ABC):
    """The KV of one request.

    Args:
        capacity: Largest number of tokens.
    """

    __slots__ = ("capacity", "committed", "states", "written")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        """Number of tokens whose KV exists in every layer."""
        self.written = 0
        """Number of tokens whose KV exists in some layer."""
        self.states = States()
        """States of the layers that carry a state."""

    def reach(self, hi: int) -> None:
        """Mark positions below `hi` as written. They are written before they are read."""
        if hi > self.written:
            self.written = hi

    def clear(self) -> None:
        """Drop all KV. The request is computed again."""
        self.committed = self.written = 0
        self.states.clear()

    def cut(self, num_tokens: int, blocks: Sequence[int]) -> None:
        """Drop positions from `num_tokens` on, and all blocks except these first blocks."""
        if num_tokens < self.committed:
            self.states.clear()
        self.committed = min(self.committed, num_tokens)
        self.written = min(self.written, num_tokens)

    def begin_restore(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Reserve room for an `export` in blocks.

        Without blocks, the room is where swapped-out KV lies.
        """
        self.hold(blocks, num_tokens)

    def restore(self, layer: int, k_1GSH: Tensor, v_1GSH: Tensor) -> None:
        """Restore one layer of an `export`."""
        self.write(layer, k_1GSH, v_1GSH, 0)

    @abstractmethod
    def hold(self, blocks: Sequence[int], hi: int) -> None:
        """Set all blocks of the request. Positions below `hi` may be written from now on."""

    @abstractmethod
    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        """Store the keys and values of positions [lo, lo + T)."""

    @abstractmethod
    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of positions [lo, hi)."""

    @abstractmethod
    def copy_out(self, lo: int, hi: int) -> Any:
        """Return a copy of the keys and values of positions [lo, hi), each [layers, heads, T, H].

        Returns:
            The copy, which may still be in progress; None if there is no room for it.

        Raises:
            InvariantError: The positions are not committed.
        """

    @abstractmethod
    def copy_in(self, lo: int, page: Any) -> None:
        """Copy a page from `copy_out` into the KV at position `lo` and mark it committed."""

    def refer(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Set all blocks of the request. The first blocks hold KV that other requests computed.

        Raises:
            InvariantError: This KV does not lie in blocks.
        """
        raise InvariantError(f"{type(self).__name__} shares no blocks")

    @abstractmethod
    def swap_out(self) -> bool:
        """Move KV, committed or not, out of its blocks; return True if addresses of KV change."""

    @abstractmethod
    def swap_in(self, blocks: Sequence[int]) -> None:
        """Move KV back into these blocks. They become all blocks of the request."""

    def commit(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` tokens. KV of drafted tokens after them is not written."""
        self.committed = self.written = num_tokens
        self.states.commit(num_tokens)

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield named copies of the written KV, committed or not."""


class SlabKV(RequestKV):
    """The slabs of one request, allocated at its first write, in the shape of that write.

    Args:
        num_layers: Number of layers with a slab.
        capacity: Largest number of tokens.
        kv_layers: Layers that store keys and values; None is all layers.
    """

    __slots__ = ("_base", "kv_layers", "slabs")

    def __init__(
        self, num_layers: int, capacity: int, kv_layers: Sequence[int] | None = None
    ) -> None:
        super().__init__(capacity)
        self.kv_layers = range(num_layers) if kv_layers is None else kv_layers
        self.slabs: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._base: tuple[int, int] | None = None

    def hold(self, blocks: Sequence[int], hi: int) -> None:
        """Do nothing. The slab has room for any `hi`, and its address does not depend on blocks."""

    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        num_tokens = k_1GTH.shape[2]
        hi = lo + num_tokens
        slab = self.slabs[layer]
        if slab is None:
            self._reserve(k_1GTH, v_1GTH)
            slab = self.slabs[layer]
            assert slab is not None
        if slab[0].shape[1] != k_1GTH.shape[1] or slab[0].shape[3] != k_1GTH.shape[3]:
            slab = self.slabs[layer] = self._own(k_1GTH, v_1GTH)
        slab[0].narrow(2, lo, num_tokens).copy_(k_1GTH)
        slab[1].narrow(2, lo, num_tokens).copy_(v_1GTH)
        self.reach(hi)

    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        slab = self.slabs[layer]
        if slab is None or hi > self.written:
            raise InvariantError(f"layer {layer} has no KV up to {hi} (I9)")
        return slab[0].narrow(2, lo, hi - lo), slab[1].narrow(2, lo, hi - lo)

    def read_all(self, lo: int, hi: int) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of positions [lo, hi) of every layer that stores some."""
        return [self.read(layer, lo, hi) for layer in self.kv_layers]

    def copy_out(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if hi > self.committed:
            raise InvariantError(f"KV up to {hi} is kept and {self.committed} are committed")
        parts = self.read_all(lo, hi)
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def copy_in(self, lo: int, page: tuple[Tensor, Tensor]) -> None:
        if lo != self.committed:
            raise InvariantError(f"KV from {lo} on is taken up and {self.committed} are committed")
        for layer, k, v in zip(self.kv_layers, *page, strict=True):
            self.write(layer, k.unsqueeze(0), v.unsqueeze(0), lo)
        self.committed = lo + page[0].shape[2]

    def swap_out(self) -> bool:
        return False  # a slab is not in blocks, so it stays

    def swap_in(self, blocks: Sequence[int]) -> None:
        """Do nothing, because the KV was never moved."""

    def base(self, slab: tuple[int, int, int], like: Tensor) -> tuple[int, int]:
        """Return the addresses of the keys and of the values of layer 0.

        Args:
            slab: KV heads, and widths of a key and of a value.
            like: Tensor with the dtype and device of KV that is not reserved yet.
        """
        if self._base is None:
            if self.slabs[0] is None:
                num_heads, key, value = slab
                self._reserve(*(like.new_empty((1, num_heads, 0, w)) for w in (key, value)))
            first = self.slabs[0]
            assert first is not None
            self._base = first[0].data_ptr(), first[1].data_ptr()
        return self._base

    def _reserve(self, k_1GTH: Tensor, v_1GTH: Tensor) -> None:
        """Allocate the slabs of all layers in one shape.

        Layers of another shape get slabs of their own.
        """

        def layers(like_1GTH: Tensor) -> tuple[Tensor, ...]:
            _, heads, _, width = like_1GTH.shape
            shape = (len(self.slabs), 1, heads, self.capacity, width)
            return like_1GTH.new_empty(shape).unbind(0)

        self.slabs = list(zip(layers(k_1GTH), layers(v_1GTH), strict=True))

    def _own(self, k_1GTH: Tensor, v_1GTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return a slab of a layer whose heads or widths differ from those of the first write."""
        k, v = (t.new_empty((1, t.shape[1], self.capacity, t.shape[3])) for t in (k_1GTH, v_1GTH))
        return k, v

    def clear(self) -> None:
        super().clear()
        self.slabs = [None] * len(self.slabs)
        self._base = None

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for layer, slab in enumerate(self.slabs):
            if slab is not None and layer not in self.states.layers:
                for name, t in zip("kv", slab, strict=True):
                    yield f"{name}.{layer}", t[:, :, : self.written].clone()
