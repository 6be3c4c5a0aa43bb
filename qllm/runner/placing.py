"""The places of experts in slots, without the memory of the slots.

A slot has one expert, or is empty, or gets an expert that is being read. A pinned slot keeps its
expert. Uses decide which expert another displaces (`qllm.runner.displacing`). The residency of a
runner (`qllm.runner.residency`) has memory in addition, and the simulator (`qllm.sim.experts`) has
none.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from qllm.runner.displacing import NONE, Displacing, Slots, Use


class Wanted(NamedTuple):
    """An expert that is read."""

    layer: int
    """Number of the layer in the file."""
    expert: int
    """Number of the expert in its layer."""
    number: int
    """Row of the expert in the table."""


class Placement(ABC):
    """The slots for the experts of all layers. Only one thread may use them.

    Args:
        nums: Number of experts of each layer.
        slot_bytes: Bytes of the largest expert.
        num_slots: Number of slots.
        top_k: Experts per token.
    """

    def __init__(self, nums: Sequence[int], slot_bytes: int, num_slots: int, top_k: int) -> None:
        self._nums, self._slot_bytes = list(nums), slot_bytes
        self.num_experts = sum(nums)
        """Number of experts of all layers."""
        self.num_slots = num_slots
        """Number of experts that fit in memory."""
        self.clock = 0
        """Time of the last use of an expert: a number of ranges of work units."""
        self.num_reads = 0
        """Number of experts that were read into slots."""
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
        self._slot_of = np.full(self.num_experts, NONE)
        self._owner = np.full(self.num_slots, NONE)
        self._coming = np.full(self.num_slots, NONE)
        """Rows of the experts that are read into the slots."""
        self._pins = np.zeros(self.num_slots, dtype=np.int64)

    @abstractmethod
    def name_of(self, layer: int) -> str:
        """Return the name of a layer's experts."""

    @property
    def cure(self) -> str:
        """Advice for a read that takes too long."""
        return "check the disk"

    @abstractmethod
    def read(self, layer: int, expert: int, into: Any) -> None:
        """Read an expert into the memory of a slot. Callable from any thread.

        Args:
            layer: Number of the layer.
            expert: Number of the expert in its layer.
            into: Result of `reserve`.

        Raises:
            ModelError: The expert cannot be read, or is damaged.
        """

    @abstractmethod
    def _memory_of(self, layer: int, slot: int) -> Sized:
        """Return the memory of a slot, for an expert of a layer. Its length is its bytes."""

    @abstractmethod
    def _address_of(self, slot: int) -> int:
        """Return the address of a slot for kernels, which is not 0."""

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return len(self._nums)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self._slot_bytes

    @property
    def num_resident(self) -> int:
        """Number of experts in memory. Callable from any thread."""
        return int((self._owner != NONE).sum())

    def place(self, number: int) -> int | None:
        """Return the number of the slot of an expert that is in memory; None if it is not."""
        slot = int(self._slot_of[number])
        return None if slot == NONE else slot

    def first_of(self, layer: int) -> int:
        """Return a layer's first row of the table."""
        return sum(self._nums[:layer])

    def absent(self, layer: int) -> list[Wanted]:
        """Return the experts of a layer that are not in memory."""
        first = self.first_of(layer)
        gone = np.flatnonzero(self._slot_of[first : first + self._nums[layer]] == NONE)
        return [Wanted(layer, expert, first + expert) for expert in gone.tolist()]

    def reserve(self, wanted: Wanted, slot: int) -> Sized:
        """Empty a slot for an expert, and pin the slot until `end_read`. Return its memory."""
        self._empty(slot)
        self._pins[slot] += 1
        self._coming[slot] = wanted.number
        return self._memory_of(wanted.layer, slot)

    def end_read(self, slot: int, number: int | None) -> None:
        """Unpin a reserved slot.

        Args:
            slot: Number of the slot.
            number: Row of the expert whose bytes are in the slot; None if it was not read.
        """
        self._pins[slot] -= 1
        self._coming[slot] = NONE
        if number is not None:
            self._own(number, slot)

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

    def use(self, numbers: "np.ndarray[Any, Any]") -> None:
        """Note that a range of work units used experts. The native sweep notes it by itself."""
        self.clock += 1
        self.table[numbers, 1] = self.clock

    def _empty(self, slot: int) -> None:
        """Take a slot away from its expert, if it has one."""
        if (before := self._owner[slot]) != NONE:
            self.table[before, 0] = 0
            self._slot_of[before] = self._owner[slot] = NONE

    def _own(self, number: int, slot: int) -> None:
        """Set the entry of an expert whose bytes are in a slot."""
        self._owner[slot], self._slot_of[number] = number, slot
        self.table[number] = self._address_of(slot), self.clock
        self.num_reads += 1


class LayerPlaces:
    """The experts of one layer that are in slots.

    Args:
        places: Slots of all layers.
        number: Number of the layer in the file.
        num_experts: Number of its experts.
    """

    def __init__(self, places: Placement, number: int, num_experts: int) -> None:
        self._places, self.num_experts = places, num_experts
        self._number, self._first = number, places.first_of(number)

    def wanted(self, expert: int) -> Wanted:
        """Return an expert of the layer as it is read."""
        return Wanted(self._number, expert, self._first + expert)

    def has(self, expert: int) -> bool:
        """Return True if an expert is in memory."""
        return bool(self._places.table[self._first + expert, 0])

    def use(self, experts: Iterable[int]) -> None:
        """Note that a range of work units used experts."""
        self._places.use(self._first + np.fromiter(experts, dtype=np.int64))
