"""KV in pages: one pool of device memory, one table of pages per request.

    page p      slots [p * page_size, (p + 1) * page_size) of every layer
    request     position t lies in slot pages[t // page_size] * page_size + t % page_size

The pages of a request are its blocks. Only one place assigns blocks to requests:
`qllm.scheduler.blocks.BlockPool`, or the native scheduler where it runs on the device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from qllm.cuda.copies import Arena, Copies, Slot
from qllm.cuda.streams import StreamApi
from qllm.errors import InvariantError
from qllm.kernels.select import Kernels
from qllm.runner.kv import RequestKV


class Spare(NamedTuple):
    """Room for KV in page-locked memory of the host."""

    api: StreamApi
    """Interface that makes the copies."""
    bytes_per_ms: int
    """Speed of copies in one direction."""
    num_kept: int = 0
    """Number of KV pages of the prefix cache."""
    kept_tokens: int = 64
    """Tokens of a page of the prefix cache."""
    num_swapped: int = 0
    """Number of blocks for requests that are swapped out."""


class Pages:
    """The memory of all pages, allocated at the first write, in the shape of that write.

    Args:
        num_layers: Number of layers.
        num_pages: Number of pages.
        page_size: Tokens of a page.
        kernels: Kernels that write the slots.
        spare: Room for KV outside of the pages, allocated with the pages; None is no room.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kernels: Kernels,
        spare: Spare | None = None,
    ) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self._kernels, self._spare = kernels, spare
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.copies: Copies | None = None
        self.kept: Arena | None = None
        """Pages of the prefix cache."""
        self.swapped: Arena | None = None
        """KV that is swapped out."""
        self._lent = WeakSet[PagedKV]()
        """Requests whose copies ahead of a swap-out may be dropped."""

    def release(self) -> None:
        """Free the memory. No request may use it afterwards."""
        if self.copies is not None:
            self.copies.finish()
        for arena in (self.kept, self.swapped):
            if arena is not None:
                arena.close()
        self._k = self._v = self.copies = self.kept = self.swapped = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all layers; 0 until the first write."""
        if self._k is None or self._v is None:
            return 0
        return (self._k.nbytes + self._v.nbytes) // (self.num_pages * self.page_size)

    def lend(self, kv: "PagedKV", num: int) -> list[Slot]:
        """Return room for up to `num` pages. `take_swapped` may take the room back."""
        arena = self.swapped
        self._lent.add(kv)
        taken = [] if arena is None else [arena.take() for _ in range(num)]
        return [slot for slot in taken if slot is not None]

    def keep_ahead(self, kv: "PagedKV", slots: list[Slot]) -> list[Slot]:
        """Return slots for whole pages of a request. `take_swapped` may take the slots back."""
        self._lent.add(kv)
        return slots[: kv.committed // self.page_size]

    def take_swapped(self, num: int) -> list[Slot]:
        """Return room for `num` pages outside of the pool; no room if no page was ever written.

        Raises:
            InvariantError: There is too little room. `SwapSpace` counts the room, so this is a bug.
        """
        if self.copies is None:
            return []
        while self._lent and self.swapped is not None and len(self.swapped.free) < num:
            self._lent.pop().give_back_ahead()
        taken = [] if self.swapped is None else [self.swapped.take() for _ in range(num)]
        found = [slot for slot in taken if slot is not None]
        if len(found) < num:
            raise InvariantError(f"{num} pages are swapped out and {len(found)} have room")
        return found

    def _make_spare(self, memory: tuple[Tensor, Tensor]) -> None:
        spare = self._spare
        if spare is not None:
            self.copies = Copies(spare.api, memory, self.page_size)
            self.kept = Arena(spare.api, spare.num_kept, spare.kept_tokens, memory)
            self.swapped = Arena(spare.api, spare.num_swapped, self.page_size, memory)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [S, G, D] and values [S, G, E] of a layer.

        Raises:
            InvariantError: No KV was written yet.
        """
        if self._k is None or self._v is None:
            raise InvariantError(f"layer {layer} has no KV (I9)")
        return self._k[layer], self._v[layer]

    def write(self, layer: int, k_TGD: Tensor, v_TGE: Tensor, slots_T: Tensor) -> None:
        """Write keys and values of tokens into slots. A slot of -1 writes nothing."""
        self._kernels.write(k_TGD, v_TGE, *self.of(layer, k_TGD, v_TGE), slots_T)

    def read(self, layer: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return copies of the keys [T, G, D] and values [T, G, E] of slots of a layer."""
        k, v = self.layer(layer)
        at = torch.tensor(slots, device=k.device)
        return k[at], v[at]

    def of(self, layer: int, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's pages for keys and values of this shape; allocate them once."""
        if self._k is None or self._v is None:
            slots = self.num_pages * self.page_size

            def make(like: Tensor) -> Tensor:
                return like.new_zeros((self.num_layers, slots, *like.shape[1:]))

            self._k, self._v = make(k_TGD), make(v_TGE)
            self._make_spare((self._k, self._v))
        return self._k[layer], self._v[layer]


class PagedKV(RequestKV):
    """KV of one request. Checkpoints read and write through it; kernels use the slots.

    The class has many methods because it implements all of `RequestKV`.
    """

    __slots__ = ("__weakref__", "_ahead", "_away", "_memory", "_num_ready", "pages")

    def __init__(self, memory: Pages, capacity: int) -> None:
        super().__init__(capacity)
        self._memory = memory
        self.pages: list[int] = []
        self._num_ready = 0
        """Number of first pages that kernels may use."""
        self._away: list[Slot] = []
        """Slots of the request's KV while the request is swapped out."""
        self._ahead: list[Slot] = []
        """Copies of the request's first whole pages, made ahead of a swap-out."""

    def hold(self, blocks: Sequence[int], hi: int) -> None:
        size = self._memory.page_size
        if hi > len(blocks) * size:
            raise InvariantError(f"{len(blocks)} KV blocks of {size} tokens do not hold {hi}")
        self._have(blocks)
        self._compute_with(blocks)
        self.reach(hi)

    def _have(self, blocks: Sequence[int]) -> None:
        """Add a request's new blocks to its pages."""
        held = len(self.pages)
        if held and (len(blocks) < held or blocks[held - 1] != self.pages[-1]):
            raise InvariantError(f"the KV of a request moved from {self.pages} to {blocks}")
        new = blocks[held:]
        if new and not 0 <= min(new) <= max(new) < self._memory.num_pages:
            raise InvariantError(f"{blocks} are not all pages of {self._memory.num_pages}")
        self.pages += new

    def _compute_with(self, pages: Sequence[int]) -> None:
        """Let kernels launched from now on wait for the copies that fill or read new pages."""
        copies = self._memory.copies
        if copies is not None:
            whole = max(self._num_ready, self.committed // self._memory.page_size)
            copies.ready(pages[self._num_ready : whole])  # other requests may read it
            copies.own(pages[whole:])
        self._num_ready = len(pages)

    def slot(self, position: int) -> int:
        """Return the slot of a position."""
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
        k, v = self._memory.read(layer, [self.slot(t) for t in range(lo, hi)])
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def clear(self) -> None:
        super().clear()
        self.pages, self._away, self._ahead, self._num_ready = [], [], [], 0

    def cut(self, num_tokens: int, blocks: Sequence[int]) -> None:
        super().cut(num_tokens, blocks)
        size = self._memory.page_size
        num_whole = self.written // size
        self.pages, self._ahead = self.pages[: len(blocks)], self._ahead[:num_whole]
        self._away = self._away[: -(-self.written // size)]
        self._num_ready = min(self._num_ready, num_whole)  # a cut page is written again

    # pages that outlive the request

    def refer(self, blocks: Sequence[int], num_tokens: int) -> None:
        if self.written:
            raise InvariantError(f"a request with {self.written} tokens of KV refers to others'")
        self._have(blocks)
        self.committed = self.written = num_tokens

    def copy_out(self, lo: int, hi: int) -> Slot | None:
        if hi > self.committed:
            raise InvariantError(f"KV up to {hi} is kept and {self.committed} are committed")
        kept, copies, size = self._memory.kept, self._memory.copies, self._memory.page_size
        slot = None if kept is None else kept.take()
        if slot is not None and copies is not None:
            copies.out(self.pages[lo // size : hi // size], [slot])
        return slot

    def copy_in(self, lo: int, page: Slot) -> None:
        copies, size = self._memory.copies, self._memory.page_size
        if copies is None or lo != self.committed:
            raise InvariantError(f"KV from {lo} on is taken up and {self.committed} are committed")
        hi = lo + page.tensors()[0].shape[1]
        copies.into(self.pages[lo // size : hi // size], [page])
        self.committed = self.written = hi

    # swap

    def copy_ahead(self, most: int) -> int:
        """Copy whole pages out ahead of a swap-out, into room that is not needed yet.

        Returns:
            Number of copied pages, at most `most`.
        """
        first, copies = len(self._ahead), self._memory.copies
        pages = self.pages[first : self.committed // self._memory.page_size][:most]
        if copies is None or not pages:
            return 0
        slots = self._memory.lend(self, len(pages))
        if slots:
            copies.out(pages[: len(slots)], slots)
        self._ahead += slots
        return len(slots)

    def give_back_ahead(self) -> None:
        """Give back the room of copies made ahead, because other requests need it."""
        self._ahead = []

    def swap_out(self) -> bool:
        num_pages, copies = -(-self.written // self._memory.page_size), self._memory.copies
        ahead, self._ahead = self._ahead, []
        tail = self._memory.take_swapped(num_pages - len(ahead))
        if tail and copies is not None:
            copies.out(self.pages[len(ahead) : num_pages], tail)
        self.pages, self._num_ready, self._away = [], 0, [*ahead, *tail]
        return True

    def swap_in(self, blocks: Sequence[int]) -> None:
        copies = self._memory.copies
        self._have(blocks)
        if self._away and copies is not None:
            copies.into(self.pages[: len(self._away)], self._away)
        self._ahead = self._memory.keep_ahead(self, self._away)  # copies of whole pages stay valid
        self._away = []
        self._compute_with(self.pages)

    # checkpoints

    def begin_restore(self, blocks: Sequence[int], num_tokens: int) -> None:
        if blocks:
            self.hold(blocks, num_tokens)
        else:
            self.written = num_tokens

    def restore(self, layer: int, k_1GSH: Tensor, v_1GSH: Tensor) -> None:
        if self.pages:
            self.write(layer, k_1GSH, v_1GSH, 0)
            return
        k_SGD, v_SGE = (t[0].transpose(0, 1) for t in (k_1GSH, v_1GSH))
        self._memory.of(layer, k_SGD, v_SGE)  # allocates the memory if there is none yet
        if not self._away:
            self._away = self._memory.take_swapped(-(-self.written // self._memory.page_size))
            assert self._memory.copies is not None
            self._memory.copies.finish(self._away)
        size = self._memory.page_size
        for i, slot in enumerate(self._away):
            for part, new_SGD in zip(slot.tensors(), (k_SGD, v_SGE), strict=True):
                tokens = new_SGD[i * size : (i + 1) * size]
                part[layer, : len(tokens)].copy_(tokens)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        if self._away:
            yield from self._export_away()
            return
        for layer in range(self._memory.num_layers if self.written else 0):
            for name, t in zip("kv", self.read(layer, 0, self.written), strict=True):
                yield f"{name}.{layer}", t

    def _export_away(self) -> Iterator[tuple[str, Tensor]]:
        assert self._memory.copies is not None
        self._memory.copies.finish(self._away)
        k, v = zip(*(slot.tensors() for slot in self._away), strict=True)
        for name, parts in (("k", k), ("v", v)):
            whole = torch.cat(parts, 1)[:, : self.written].transpose(1, 2)
            for layer, t in enumerate(whole.clone()):
                yield f"{name}.{layer}", t[None]
