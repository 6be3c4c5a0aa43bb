"""The experts that are in memory, of a model whose experts are in a file.

    file -> slots, within one budget for all layers    table: expert -> its slot, read by kernels

A runner that `parks` returns when experts are missing, and another thread reads them (`reserve`,
`end_read`). Otherwise a read blocks the runner (`pinned`). Uses decide which expert an expert
displaces (`qllm.runner.displacing`). A pinned expert stays. An entry of the table is set when all
bytes of the expert are read and checked. It is cleared before its slot is used for another expert.

The budget counts all memory of experts: reads go into the slots, without a buffer.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.models.weights.expert_file import ExpertFile, refuse_too_few
from qllm.runner.displacing import NONE, Displacing, Slots, Use


class Residency:
    """The slots of one runner. Only the thread of the runner may use them.

    Args:
        file: Experts of all layers.
        max_bytes: Most bytes of experts in memory.
        top_k: Experts per token.

    Raises:
        ConfigError: `max_bytes` has no room for the experts of one token in one layer.
    """

    def __init__(self, file: ExpertFile, max_bytes: int, top_k: int) -> None:
        self._file = file
        self._slot_bytes = max(layer.expert_bytes for layer in file.layers)
        self.num_experts = sum(layer.num_experts for layer in file.layers)
        """Number of experts of all layers."""
        self.has_all = max_bytes >= file.num_bytes
        """True if there is room for all experts, which then need no slots."""
        self.num_slots = 0 if self.has_all else max_bytes // self._slot_bytes
        if not self.has_all:
            refuse_too_few(max_bytes, self._slot_bytes, top_k, file.num_bytes)
        self.clock = 0
        """Time of the last use of an expert: a number of ranges of work units."""
        self.num_reads = 0
        """Number of experts that were read into slots."""
        self.num_blocking = self.blocking_bytes = 0
        """Number and bytes of those experts that the runner itself read while others waited."""
        self.table = np.zeros((self.num_experts, 2), dtype=np.int64)
        """`Slot` of kernels.h of each expert, layer by layer: address, and time of the last use."""
        self.parks = False
        """True if a runner returns when experts are missing."""
        self.top_k = top_k
        """Experts per token."""
        self.displacing = Displacing(self.num_experts, self.num_slots, top_k)
        """Choice of the slots that lose their experts."""
        self._num_counted = 0
        """Time up to which uses are counted."""
        self._memory: Tensor | None = None
        self._slot_of = np.full(self.num_experts, NONE)
        self._owner = np.full(self.num_slots, NONE)
        self._coming = np.full(self.num_slots, NONE)
        """Rows of the experts that are read into the slots."""
        self._pins = np.zeros(self.num_slots, dtype=np.int64)

    def enter(self) -> None:
        """Allocate the slots. Idempotent."""
        if self._memory is None:
            self._memory = (
                cpu.huge_empty(self.num_bytes // 2).view(torch.uint8).view(-1, self._slot_bytes)
            )

    def leave(self) -> None:
        """Free the slots. Idempotent."""
        self._memory = None
        self.table[:] = 0
        self._slot_of[:] = self._owner[:] = self._coming[:] = NONE
        self._pins[:] = 0

    @property
    def file(self) -> ExpertFile:
        """Experts of all layers."""
        return self._file

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self._slot_bytes

    def name_of(self, layer: int) -> str:
        """Return the path of a layer's module of experts."""
        return self._file.layers[layer].name

    def layer(self, number: int) -> "LayerResidency":
        """Return the experts of one layer of the file."""
        nums = [layer.num_experts for layer in self._file.layers]
        return LayerResidency(self, number, sum(nums[:number]), nums[number])

    def slot(self, number: int) -> Tensor | None:
        """Return the bytes of an expert by its row of the table; None if it is not in memory."""
        slot = self._slot_of[number]
        return None if slot == NONE or self._memory is None else self._memory[slot]

    def place(self, number: int) -> int | None:
        """Return the number of the slot of an expert that is in memory; None if it is not."""
        slot = int(self._slot_of[number])
        return None if slot == NONE else slot

    @property
    def num_resident(self) -> int:
        """Number of experts in memory. Callable from any thread."""
        return int((self._owner != NONE).sum())

    def reserve(self, wanted: "Wanted", slot: int) -> memoryview:
        """Empty a slot for an expert, and pin the slot until `end_read`."""
        memory = self._empty(wanted.layer, slot)
        self._pins[slot] += 1
        self._coming[slot] = wanted.number
        view: memoryview = memory.numpy().data
        return view

    def end_read(self, slot: int, number: int | None) -> None:
        """Unpin a reserved slot.

        Args:
            slot: Number of the slot.
            number: Row of the expert whose bytes are in the slot; None if it was not read.
        """
        self._pins[slot] -= 1
        self._coming[slot] = NONE
        if number is not None:
            assert self._memory is not None, "the slots are not allocated"
            self._own(number, slot, self._memory[slot].data_ptr())

    def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Read an expert: see `ExpertFile.read`. Callable from any thread.

        Raises:
            ModelError: The expert cannot be read, or is damaged.
        """
        try:
            self._file.read(layer, expert, into)
        except OSError as error:
            raise ModelError(
                f"expert {expert} of {self.name_of(layer)} cannot be read from "
                f"{self._file.path} ({error}); check the disk"
            ) from error

    @contextmanager
    def pinned(self, layer: int, first: int, experts: Iterable[int]) -> Iterator[None]:
        """See `LayerResidency.pinned`. `first` is the layer's first row of the table."""
        wanted, pinned = list(dict.fromkeys(experts)), list[int]()
        self.count(Use.BE, 0)
        try:
            for expert in wanted:
                if (slot := int(self._slot_of[first + expert])) != NONE:
                    self._pin(slot, pinned)
            for expert in wanted:
                if self._slot_of[first + expert] != NONE:
                    continue
                if not (free := self.free_slots(1)):
                    break
                self._bring(layer, expert, first + expert, free[0])
                self._pin(free[0], pinned)
            if not pinned:
                raise InvariantError("every slot of experts is pinned, and another is needed")
            yield
        finally:
            self._pins[pinned] -= 1

    def _pin(self, slot: int, pinned: list[int]) -> None:
        self._pins[slot] += 1
        pinned.append(slot)

    def free_slots(
        self,
        most: int,
        keep: Collection[int] = (),
        use: Use = Use.BE,
        now_ns: int = 0,
        *,
        by_right: bool = False,
    ) -> list[int]:
        """Return unpinned slots for experts: see `Displacing.choose`.

        Args:
            most: Most slots.
            keep: Slots that stay, in addition to pinned slots.
            use: Kind of the frame that needs the slots.
            now_ns: The engine's clock.
            by_right: True to displace any expert whose slot may go.
        """
        may_go = self._pins == 0
        may_go[list(keep)] = False
        slots = Slots(self._owner, self._coming, self.table[self._owner, 1], may_go)
        return self.displacing.choose(slots, most, use, now_ns, by_right=by_right)

    def count(self, use: Use, now_ns: int) -> int:
        """Count the uses of experts since the last call; return their number."""
        numbers = np.flatnonzero(self.table[:, 1] > self._num_counted)
        self._num_counted = self.clock
        self.displacing.count(numbers, use, now_ns)
        return len(numbers)

    def _bring(self, layer: int, expert: int, number: int, slot: int) -> None:
        """Read an expert into an unpinned slot."""
        memory = self._empty(layer, slot)
        self.read(layer, expert, memory.numpy().data)
        self._own(number, slot, memory.data_ptr())
        self.num_blocking += 1
        self.blocking_bytes += memory.numel()

    def _empty(self, layer: int, slot: int) -> Tensor:
        """Empty a slot, and return its memory for an expert of a layer."""
        assert self._memory is not None, "the slots are not allocated"
        if (before := self._owner[slot]) != NONE:
            self.table[before, 0] = 0
            self._slot_of[before] = self._owner[slot] = NONE
        return self._memory[slot, : self._file.layers[layer].expert_bytes]

    def _own(self, number: int, slot: int, address: int) -> None:
        """Set the entry of an expert whose bytes are in a slot."""
        self._owner[slot], self._slot_of[number] = number, slot
        self.table[number] = address, self.clock
        self.num_reads += 1

    def use(self, numbers: "np.ndarray[Any, Any]") -> None:
        """Note that a range of work units used experts. The native sweep notes it by itself."""
        self.clock += 1
        self.table[numbers, 1] = self.clock


class Wanted(NamedTuple):
    """An expert that is read."""

    layer: int
    """Number of the layer in the file."""
    expert: int
    """Number of the expert in its layer."""
    number: int
    """Row of the expert in the table."""


class LayerResidency:
    """The experts of one layer that are in memory.

    Args:
        residency: Experts of all layers.
        number: Number of the layer in the file.
        first: First row of the layer in the table.
        num: Number of experts.
    """

    def __init__(self, residency: Residency, number: int, first: int, num: int) -> None:
        self.all, self.num_experts = residency, num
        self._number, self._first = number, first

    @property
    def table(self) -> int:
        """Address of `Slot` of kernels.h of each expert."""
        return self.all.table[self._first :].ctypes.data

    def wanted(self, expert: int) -> Wanted:
        """Return an expert of the layer as it is read."""
        return Wanted(self._number, expert, self._first + expert)

    def has(self, expert: int) -> bool:
        """Return True if an expert is in memory."""
        return bool(self.all.table[self._first + expert, 0])

    def slot(self, expert: int) -> Tensor | None:
        """Return the bytes of an expert, uint8; None if it is not in memory."""
        return self.all.slot(self._first + expert)

    def use(self, experts: Iterable[int]) -> None:
        """Note that a range of work units used experts."""
        self.all.use(self._first + np.fromiter(experts, dtype=np.int64))

    def pinned(self, experts: Iterable[int]) -> AbstractContextManager[None]:
        """Hold experts in memory inside the `with` block, as many as there are slots for.

        Absent experts are read first, in this order.

        Raises:
            ModelError: An expert cannot be read, or is damaged.
            InvariantError: Every slot is pinned already.
        """
        return self.all.pinned(self._number, self._first, experts)


class Missing(NamedTuple):
    """Experts that a frame needs and that are not in memory."""

    residency: LayerResidency
    experts: tuple[int, ...]
    """Numbers of the experts, in the order of their units."""
    is_range: bool
    """True if a range has begun that needs all of these experts; False if any unit may be next."""

    def in_memory(self) -> AbstractContextManager[None]:
        """Hold these experts in memory inside the `with` block, as many as fit."""
        return self.residency.pinned(self.experts)
