"""Copies of KV between pages on the device and page-locked memory, parallel to computing.

    out   page -> slot    on one stream      a page is cached, or KV is swapped out
    in    slot -> page    on another         KV is copied into the pages that the request has now

No call here waits on the host. The next user of a piece of memory waits on the device, for an
event:

    a page is written (computed, copied in)   after the copies that read it, and those that fill it
    a page is read (computed, copied out)     after the copies that fill it
    a slot is used                            after the copy that used it last

So pages and slots count as free as soon as no object refers to them.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.cuda.streams import StreamApi
from qllm.errors import InvariantError
from qllm.types import NS_PER_MS

PROBE_BYTES, PROBES = 8 << 20, 3
"""Bytes of a trial copy, and number of trials."""


def measured_bytes_per_ms(
    api: StreamApi, device: torch.device, now_ns: Callable[[], int] = time.perf_counter_ns
) -> int:
    """Return the best bytes per millisecond of a copy, in the slower direction. This waits.

    Args:
        api: Interface that copies.
        device: Device of the copies.
        now_ns: A clock.
    """
    here = api.lock(PROBE_BYTES).view(1, 1, 1, PROBE_BYTES)
    try:
        there = torch.zeros_like(here, device=device)
        took_ns, last = [], api.record(None)
        for to, source in ((here, there), (there, here)):
            stream = api.new_stream()
            api.wait(stream, last)
            for _ in range(PROBES):
                start_ns = now_ns()
                api.copy(to, source, stream)
                last = api.record(stream)
                api.finish(last)
                took_ns.append(now_ns() - start_ns)
    finally:
        api.unlock(here)
    return PROBE_BYTES * NS_PER_MS // max(1, min(took_ns[:PROBES]), min(took_ns[PROBES:]))


class Slot:
    """Room for the KV of some tokens in page-locked memory, freed with its last reference.

    A slot unpacks to keys and values, each [layers, heads, tokens, width].
    """

    __slots__ = ("_arena", "number")

    def __init__(self, arena: "Arena", number: int) -> None:
        self._arena, self.number = arena, number

    def __iter__(self) -> Iterator[Tensor]:
        """Yield keys and values in the layout that other code uses."""
        return (t.transpose(1, 2) for t in self.tensors())

    def __del__(self) -> None:
        """Return the room to the arena."""
        self._arena.free.append(self.number)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [layers, tokens, heads, width]."""
        return self._arena.tensors(self.number)

    @property
    def after(self) -> Any:
        """Event of the copy that used the slot last; None if there was none."""
        return self._arena.after.get(self.number)

    @after.setter
    def after(self, event: Any) -> None:
        self._arena.after[self.number] = event


def _unlock(api: StreamApi, after: Mapping[int, Any], memory: Tensor) -> None:
    """Wait for the last copy of each slot, then end the page-lock of their memory."""
    for event in {id(event): event for event in after.values()}.values():
        api.finish(event)
    api.unlock(memory)


class Arena:
    """Slots of a fixed number of tokens.

    An arena that is dropped without `close` is unlocked before its memory is unmapped. A device
    that still has the old pages locked would copy them instead of what is mapped there later.

    Args:
        api: Interface that locks memory.
        num_slots: Number of slots.
        tokens: Tokens of a slot.
        pages: Keys and values on the device, each [layers, slots, heads, width].
    """

    def __init__(
        self, api: StreamApi, num_slots: int, tokens: int, pages: tuple[Tensor, Tensor]
    ) -> None:
        self._api, self.num_slots, self.tokens = api, num_slots, tokens
        self.free: list[int] = list(range(num_slots - 1, -1, -1))
        """Numbers of free slots. Any thread may append."""
        self.after: dict[int, Any] = {}
        shapes = [(t.shape[0], tokens, *t.shape[2:]) for t in pages]
        sizes = [torch.Size(shape).numel() * pages[0].itemsize for shape in shapes]
        self._memory = api.lock(max(1, num_slots) * sum(sizes))
        self._unlock = weakref.finalize(self, _unlock, api, self.after, self._memory)
        self._unlock.atexit = False  # a device that computes would delay the exit
        slots = self._memory.view(max(1, num_slots), sum(sizes))
        k, v = (
            part.view(pages[0].dtype).view(-1, *shape)
            for part, shape in zip(
                (slots[:, : sizes[0]], slots[:, sizes[0] :]), shapes, strict=True
            )
        )
        self._k, self._v = k, v

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a slot, see `Slot.tensors`."""
        return self._k[number], self._v[number]

    def take(self) -> Slot | None:
        """Return a free slot; None if there is none."""
        return Slot(self, self.free.pop()) if self.free else None

    def close(self) -> None:
        """Unlock the memory. No copy may be under way. Idempotent."""
        if self._unlock.detach() is not None:
            self._api.unlock(self._memory)


class Copies:
    """Starter of copies, which are also ordered with the computing stream.

    Args:
        api: Streams and events.
        pages: Keys and values on the device, each [layers, slots, heads, width].
        page_size: Tokens of a page.
    """

    def __init__(self, api: StreamApi, pages: tuple[Tensor, Tensor], page_size: int) -> None:
        self._api, self.page_size = api, page_size
        self._k, self._v = pages
        self._out, self._in = api.new_stream(), api.new_stream()
        self._reads: dict[int, Any] = {}
        """Events of the last copy that reads each page."""
        self._fills: dict[int, Any] = {}
        """Events of the last copy that fills each page, until the page is used in computing."""

    def out(self, pages: Sequence[int], slots: Sequence[Slot]) -> None:
        """Copy pages into slots in order, after all work that was launched earlier."""
        events = [self._fills.get(page) for page in pages]
        event = self._copy(self._out, pages, slots, events, is_out=True)
        self._reads |= dict.fromkeys(pages, event)

    def into(self, pages: Sequence[int], slots: Sequence[Slot]) -> None:
        """Fill pages from slots in order. No kernel may use the pages before `ready` or `own`."""
        events = [of.get(page) for of in (self._reads, self._fills) for page in pages]
        event = self._copy(self._in, pages, slots, events, is_out=False)
        self._fills |= dict.fromkeys(pages, event)

    def _copy(
        self, stream: Any, pages: Sequence[int], slots: Sequence[Slot], events: list[Any],
        *, is_out: bool,
    ) -> Any:  # fmt: skip
        api, size = self._api, self.page_size
        self._wait(stream, [api.record(None), *events, *(slot.after for slot in slots)])
        at = [(slot, lo) for slot in slots for lo in range(0, slot.tensors()[0].shape[1], size)]
        if len(at) < len(pages):
            raise InvariantError(f"{len(pages)} pages are copied and {len(at)} have room")
        try:
            for page, (slot, lo) in zip(pages, at, strict=False):
                for there, here in zip((self._k, self._v), slot.tensors(), strict=True):
                    device, host = there[:, page * size :][:, :size], here[:, lo : lo + size]
                    api.copy(*((host, device) if is_out else (device, host)), stream)
        finally:  # after a failure, copies that were launched are under way
            event = api.record(stream)
            for slot in slots:
                slot.after = event
        return event

    def ready(self, pages: Iterable[int]) -> None:
        """Let kernels launched from now on read pages."""
        self._wait(None, [self._fills.pop(page, None) for page in pages])

    def own(self, pages: Iterable[int]) -> None:
        """Let kernels launched from now on write pages that belong to one request alone."""
        pages = list(pages)
        self._wait(
            None, [of.pop(page, None) for of in (self._fills, self._reads) for page in pages]
        )

    def _wait(self, stream: Any, events: Iterable[Any]) -> None:
        for event in {id(event): event for event in events if event is not None}.values():
            self._api.wait(stream, event)

    def finish(self, slots: Iterable[Slot] = ()) -> None:
        """Wait until slots are filled, or without slots until no copy runs; not while serving."""
        events = [slot.after for slot in slots if slot.after is not None]
        for event in events or [self._api.record(s) for s in (self._out, self._in)]:
            self._api.finish(event)
