"""KV in pages: one pool of device memory, one table of pages per request.

    page p      slots [p * page_size, (p + 1) * page_size) of every layer
    request     position t lies in slot pages[t // page_size] * page_size + t % page_size

The scheduler charges blocks of the same size, so the pool cannot run out before the scheduler
says so; `spare` pages cover requests whose last frame was dropped half way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels.select import Kernels
from qllm.runner.kv import RequestKV


class Pages:
    """The pool. Its memory is made at the first write, in the shape that is written.

    Args:
        num_layers: L.
        num_pages: Pages.
        page_size: Tokens of a page.
        kernels: Write the slots.
    """

    def __init__(self, num_layers: int, num_pages: int, page_size: int, kernels: Kernels) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self._kernels = kernels
        self._free = list(range(num_pages - 1, -1, -1))
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    @property
    def num_free(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def take(self, num: int) -> list[int]:
        """Hand out pages.

        Raises:
            InvariantError: There are not enough: the scheduler let in more than it may.
        """
        if num > len(self._free):
            raise InvariantError(f"{num} KV pages are wanted and {len(self._free)} are free")
        return [self._free.pop() for _ in range(num)]

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))

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
        self._kernels.write(k_TGD, v_TGE, *self._made(layer, k_TGD, v_TGE), slots_T)

    def rotate_and_write(
        self,
        layer: int,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        rope: tuple[Tensor, Tensor],
        slots_T: Tensor,
    ) -> None:
        """The same with keys that are not rotated yet; rotates the queries in place."""
        cos, sin = rope
        pages = self._made(layer, k_TGD, v_TGE)
        self._kernels.rotate_and_write(q_TND, k_TGD, v_TGE, cos, sin, *pages, slots_T)

    def _made(self, layer: int, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
        if self._k is None or self._v is None:
            slots = self.num_pages * self.page_size

            def make(like: Tensor) -> Tensor:
                return like.new_zeros((self.num_layers, slots, *like.shape[1:]))

            self._k, self._v = make(k_TGD), make(v_TGE)
        return self._k[layer], self._v[layer]


class PagedKV(RequestKV):
    """KV of one request. `write` and `read` are for what no kernel attends to (latents)."""

    __slots__ = ("_pool", "pages")

    def __init__(self, pool: Pages, capacity: int) -> None:
        super().__init__(0, capacity)
        self._pool = pool
        self.pages: list[int] = []

    def reserve(self, num_tokens: int) -> None:
        """Hold pages for positions [0, num_tokens)."""
        need = -(-num_tokens // self._pool.page_size) - len(self.pages)
        if need > 0:
            self.pages += self._pool.take(need)

    def trim(self) -> None:
        """Give back the pages that hold nothing committed."""
        keep = -(-self.committed // self._pool.page_size)
        self._pool.give(self.pages[keep:])
        del self.pages[keep:]
        self.written = self.committed

    def slot(self, position: int) -> int:
        """Where the KV of a position lies."""
        size = self._pool.page_size
        return self.pages[position // size] * size + position % size

    def _slots(self, lo: int, hi: int, device: torch.device) -> Tensor:
        return torch.tensor([self.slot(t) for t in range(lo, hi)], device=device)

    def write(self, layer: int, k_1GTH: Tensor, v_1GTH: Tensor, lo: int) -> None:
        hi = lo + k_1GTH.shape[2]
        self.reserve(hi)
        slots = self._slots(lo, hi, k_1GTH.device)
        self._pool.write(layer, k_1GTH[0].transpose(0, 1), v_1GTH[0].transpose(0, 1), slots)
        self.reach(hi)

    def read(self, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if hi > self.written:
            raise InvariantError(f"layer {layer} has no KV up to {hi} (I9)")
        k, v = self._pool.layer(layer)
        slots = self._slots(lo, hi, k.device)
        return k[slots].transpose(0, 1)[None], v[slots].transpose(0, 1)[None]

    def clear(self) -> None:
        self._pool.give(self.pages)
        self.pages = []
        self.committed = self.written = 0

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for layer in range(self._pool.num_layers if self.written else 0):
            for name, t in zip("kv", self.read(layer, 0, self.written), strict=True):
                yield f"{name}.{layer}", t
