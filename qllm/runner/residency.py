"""The experts that are in memory, of a model whose experts do not fit.

    file -> slots, within one budget for all layers    table: expert -> its slot, read by kernels

On a GPU all experts are in the host's memory, and the slots on the device (`qllm.cuda.slots`).

A runner that `parks` returns when experts are missing, and another thread reads them (`reserve`,
`end_read`). Otherwise a read blocks the runner (`pinned`). Which experts are in which slots is
`qllm.runner.placing`. A pinned expert stays. An entry of the table is set when all bytes of the
expert are read and checked. It is cleared before its slot is used for another expert.

The budget counts all memory of experts: reads go into the slots, without a buffer.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.models.weights.expert_file import ExpertFile, refuse_too_few
from qllm.runner.displacing import NONE, Use
from qllm.runner.placing import LayerPlaces, Placement


class Layer(Protocol):
    """The experts of one layer, as slots have them."""

    @property
    def name(self) -> str:
        """Path of the layer's module of experts."""
        ...

    @property
    def num_experts(self) -> int: ...

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot."""
        ...


class Residency(Placement):
    """The slots of one runner. Only the thread of the runner may use them.

    Args:
        layers: Layers with experts, in the order of the model.
        max_bytes: Most bytes of experts in memory.
        top_k: Experts per token.

    Raises:
        ConfigError: `max_bytes` has no room for the experts of one token in one layer.
    """

    where: str
    """Place of all experts, for people: the path of their file."""

    def __init__(self, layers: Sequence[Layer], max_bytes: int, top_k: int) -> None:
        self.layers = layers
        slot_bytes = max(layer.expert_bytes for layer in layers)
        self.stored_bytes = sum(layer.num_experts * layer.expert_bytes for layer in layers)
        """Bytes of all experts."""
        self.has_all = max_bytes >= self.stored_bytes
        """True if there is room for all experts, which then need no slots."""
        if not self.has_all:
            refuse_too_few(max_bytes, slot_bytes, top_k, self.stored_bytes)
        num_slots = 0 if self.has_all else max_bytes // slot_bytes
        super().__init__([layer.num_experts for layer in layers], slot_bytes, num_slots, top_k)
        self.num_blocking = self.blocking_bytes = 0
        """Number and bytes of the experts that the runner itself read while others waited."""
        self._memory: Tensor | None = None

    @abstractmethod
    def _allocated(self) -> Tensor:
        """Return memory for all slots, uint8 [slots, bytes of a slot]."""

    def enter(self) -> None:
        """Allocate the slots. Idempotent."""
        if self._memory is None:
            self._memory = self._allocated()

    def leave(self) -> None:
        """Free the slots. Idempotent."""
        self._memory = None
        self.clear()

    def clear(self) -> None:
        """Empty all slots. No expert may be on its way."""
        self.table[:] = 0
        self._slot_of[:] = self._owner[:] = self._coming[:] = NONE
        self._pins[:] = 0

    def name_of(self, layer: int) -> str:
        """Return the path of a layer's module of experts."""
        return self.layers[layer].name

    def layer(self, number: int) -> "LayerResidency":
        """Return the experts of one layer."""
        return LayerResidency(self, number)

    def slot(self, number: int) -> Tensor | None:
        """Return the bytes of an expert by its row of the table; None if it is not in memory."""
        slot = self._slot_of[number]
        return None if slot == NONE or self._memory is None else self._memory[slot]

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

    def _bring(self, layer: int, expert: int, number: int, slot: int) -> None:
        """Read an expert into an unpinned slot."""
        self._empty(slot)
        memory = self._memory_of(layer, slot)
        self.read(layer, expert, memory)
        self._own(number, slot)
        self.num_blocking += 1
        self.blocking_bytes += len(memory)

    def _address_of(self, slot: int) -> int:
        return self._slots()[slot].data_ptr()

    def _slots(self) -> Tensor:
        assert self._memory is not None, "the slots are not allocated"
        return self._memory


class FileResidency(Residency):
    """Slots in memory for experts of a file.

    Args:
        file: Experts of all layers.
        max_bytes: Most bytes of experts in memory.
        top_k: Experts per token.

    Raises:
        ConfigError: `max_bytes` has no room for the experts of one token in one layer.
    """

    def __init__(self, file: ExpertFile, max_bytes: int, top_k: int) -> None:
        super().__init__(file.layers, max_bytes, top_k)
        self._file, self.where = file, str(file.path)

    def _allocated(self) -> Tensor:
        return cpu.huge_empty(self.num_bytes // 2).view(torch.uint8).view(-1, self._slot_bytes)

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

    def _memory_of(self, layer: int, slot: int) -> memoryview:
        num_bytes = self.layers[layer].expert_bytes
        view: memoryview = self._slots()[slot, :num_bytes].numpy().data
        return view


class LayerResidency(LayerPlaces):
    """The experts of one layer that are in memory.

    Args:
        residency: Experts of all layers.
        number: Number of the layer in the file.
    """

    def __init__(self, residency: Residency, number: int) -> None:
        super().__init__(residency, number, residency.layers[number].num_experts)
        self.all = residency

    @property
    def table(self) -> int:
        """Address of `Slot` of kernels.h of each expert."""
        return self.all.table[self._first :].ctypes.data

    def slot(self, expert: int) -> Tensor | None:
        """Return the bytes of an expert, uint8; None if it is not in memory."""
        return self.all.slot(self._first + expert)

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
