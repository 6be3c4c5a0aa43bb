"""KV in pages: one pool of device memory, one table of pages per request.

    page p      slots [p * page_size, (p + 1) * page_size) of every layer
    request     position t lies in slot pages[t // page_size] * page_size + t % page_size

The pages of a request are its blocks, and whose block is whose is decided in one place:
`qllm.scheduler.blocks.BlockPool`, or the native scheduler where it runs on the device.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels.select import Kernels
from qllm.runner.kv import RequestKV


class Pages:
    """The memory of all pages. It is made at the first write, in the shape that is written.

    Args:
        num_layers: Number of layers.
        num_pages: Number of pages.
        page_size: Tokens of a page.
        kernels: Write the slots.
    """

    def __init__(self, num_layers: int, num_pages: int, page_size: int, kernels: Kernels) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self._kernels = kernels
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def release(self) -> None:
        """Free the memory; no request may use it any more."""
        self._k = self._v = None

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [S, G, D] and values [S, G, E] of a layer.

        Raises:
            InvariantError: Nothing was written yet.
        """
        if self._k is None or self._v is None:
            raise InvariantError(f"layer {layer} has no KV (I9)")
        return self._k[layer], self._v[layer]

    def write(self, layer: int, k_TGD: Tensor, v_TGE: Tensor, slots_T: Tensor) -> None:
        """Put keys and values of tokens into slots; -1 writes nothing."""
        self._kernels.write(k_TGD, v_TGE, *self.of(layer, k_TGD, v_TGE), slots_T)

    def of(self, layer: int, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of a layer for keys and values of this shape, made if there are none yet."""
        if self._k is None or self._v is None:
            slots = self.num_pages * self.page_size

            def make(like: Tensor) -> Tensor:
                return like.new_zeros((self.num_layers, slots, *like.shape[1:]))

            self._k, self._v = make(k_TGD), make(v_TGE)
        return self._k[layer], self._v[layer]


class PagedKV(RequestKV):
    """KV of one request. Checkpoints read and write through it; kernels use the slots."""

    __slots__ = ("_memory", "pages")

    def __init__(self, memory: Pages, capacity: int) -> None:
        super().__init__(capacity)
        self._memory = memory
        self.pages: list[int] = []

    def hold(self, blocks: Sequence[int], hi: int) -> None:
        size, held = self._memory.page_size, len(self.pages)
        if hi > len(blocks) * size:
            raise InvariantError(f"{len(blocks)} KV blocks of {size} tokens do not hold {hi}")
        if held and blocks[held - 1] != self.pages[-1]:
            raise InvariantError(f"the KV of a request moved from {self.pages} to {blocks}")
        new = blocks[held:]
        if new and not 0 <= min(new) <= max(new) < self._memory.num_pages:
            raise InvariantError(f"{blocks} are not all pages of {self._memory.num_pages}")
        self.pages += new
        self.reach(hi)

    def slot(self, position: int) -> int:
        """Where the KV of a position lies."""
        size = self._memory.page_size
        return self.pages[position // size] * size + position % size

    def _slots(self, lo: int, hi: int, device: torch.device) -> Tensor:
        return torch.tensor([self.slot(t) for t in range(lo, hi)], device=device)

    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        hi = lo + k_1GTH.shape[2]
        slots = self._slots(lo, hi, k_1GTH.device)
        self._memory.write(layer, k_1GTH[0].transpose(0, 1), v_1GTH[0].transpose(0, 1), slots)
        self.reach(hi)

    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if hi > self.written:
            raise InvariantError(f"layer {layer} has no KV up to {hi} (I9)")
        k, v = self._memory.layer(layer)
        slots = self._slots(lo, hi, k.device)
        return k[slots].transpose(0, 1)[None], v[slots].transpose(0, 1)[None]

    def clear(self) -> None:
        super().clear()
        self.pages = []

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for layer in range(self._memory.num_layers if self.written else 0):
            for name, t in zip("kv", self.read(layer, 0, self.written), strict=True):
                yield f"{name}.{layer}", t
