"""KV of requests. The scheduler says which blocks a request has, the backend where they lie.

On a CPU a block is only counted: a request has one contiguous slab per layer, reserved once at its
longest length. Reserving costs address space, not memory: pages are touched when tokens are
written, so growth never copies and attention reads one contiguous range per head. The slabs of the
layers lie one after the other, so that a kernel finds all of them from one address.

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
    """KV of one request.

    Args:
        capacity: Most tokens.
    """

    __slots__ = ("capacity", "committed", "states", "written")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        """Tokens whose KV exists in every layer."""
        self.written = 0
        """Tokens whose KV exists in some layer."""
        self.states = States()
        """What layers that carry a state left."""

    def reach(self, hi: int) -> None:
        """Note that positions below `hi` are written, or will be before they are read."""
        if hi > self.written:
            self.written = hi

    def clear(self) -> None:
        """Let go of everything; the request recomputes."""
        self.committed = self.written = 0
        self.states.clear()

    def cut(self, num_tokens: int, blocks: Sequence[int]) -> None:
        """Forget positions from `num_tokens` on, and have these blocks, the first, from now on."""
        if num_tokens < self.committed:
            self.states.clear()
        self.committed = min(self.committed, num_tokens)
        self.written = min(self.written, num_tokens)

    def begin_restore(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Have room for what `export` gave: in blocks, or without any where swapped-out KV lies."""
        self.hold(blocks, num_tokens)

    def restore(self, layer: int, k_1GSH: Tensor, v_1GSH: Tensor) -> None:
        """Put back what `export` gave for one layer."""
        self.write(layer, k_1GSH, v_1GSH, 0)

    @abstractmethod
    def hold(self, blocks: Sequence[int], hi: int) -> None:
        """Take all blocks of the request; positions below `hi` may be written from now on."""

    @abstractmethod
    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        """Store the keys and values of positions [lo, lo + T)."""

    @abstractmethod
    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """The keys and values of positions [lo, hi)."""

    @abstractmethod
    def copy_out(self, lo: int, hi: int) -> Any:
        """A copy of the keys and the values of positions [lo, hi), each [layers, heads, T, H].

        Returns:
            It may be under way still; None if there is no room for it.

        Raises:
            InvariantError: They are not committed.
        """

    @abstractmethod
    def copy_in(self, lo: int, page: Any) -> None:
        """Take up what `copy_out` gave, from position `lo` on, as committed."""

    def refer(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Take all blocks of the request, of which the first have KV that others computed.

        Raises:
            InvariantError: KV is not in blocks here.
        """
        raise InvariantError(f"{type(self).__name__} shares no blocks")

    @abstractmethod
    def swap_out(self) -> bool:
        """Move KV, committed or not, out of its blocks; whether its addresses are others then."""

    @abstractmethod
    def swap_in(self, blocks: Sequence[int]) -> None:
        """Move it into blocks again, which are all that the request has."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Named copies of what is written, committed or not."""


class SlabKV(RequestKV):
    """Slabs of one request, made when it first writes, in the shape it writes.

    Args:
        num_layers: Of the cache.
        capacity: Most tokens.
        kv_layers: Those that keys and values are written to; None is all.
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
        """See `RequestKV`: the slab has room for any `hi`, and its address is no block's."""

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

    def copy_out(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if hi > self.committed:
            raise InvariantError(f"KV up to {hi} is kept and {self.committed} are committed")
        parts = [self.read(layer, lo, hi) for layer in self.kv_layers]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def copy_in(self, lo: int, page: tuple[Tensor, Tensor]) -> None:
        if lo != self.committed:
            raise InvariantError(f"KV from {lo} on is taken up and {self.committed} are committed")
        for layer, k, v in zip(self.kv_layers, *page, strict=True):
            self.write(layer, k.unsqueeze(0), v.unsqueeze(0), lo)
        self.committed = lo + page[0].shape[2]

    def swap_out(self) -> bool:
        return False  # a slab is no block's, and stays

    def swap_in(self, blocks: Sequence[int]) -> None:
        """See `RequestKV`: it never left."""

    def base(self, slab: tuple[int, int, int], like: Tensor) -> tuple[int, int]:
        """Addresses of the keys and of the values of layer 0.

        Args:
            slab: KV heads, and widths of a key and of a value.
            like: Dtype and device of KV that is not reserved yet.
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
        """Make the slabs of all layers, in one shape; a layer of another shape gets its own."""

        def layers(like_1GTH: Tensor) -> tuple[Tensor, ...]:
            _, heads, _, width = like_1GTH.shape
            shape = (len(self.slabs), 1, heads, self.capacity, width)
            return like_1GTH.new_empty(shape).unbind(0)

        self.slabs = list(zip(layers(k_1GTH), layers(v_1GTH), strict=True))

    def _own(self, k_1GTH: Tensor, v_1GTH: Tensor) -> tuple[Tensor, Tensor]:
        """A slab of a layer whose heads or widths are not those of the first that wrote."""
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
