"""Slots on a device for experts that do not fit there; all experts are in page-locked memory.

    host, page-locked -> slot, by a stream of its own    place: expert -> slot, read by kernels

No frame waits on the device. A frame that misses experts is parked, as on the CPU. A reading thread
(`qllm.engine.storage.reads`) starts the copy, and waits for it. So what other frames compute
never runs behind a copy, and a kernel that reads a slot is launched after the slot is filled. The
other order is kept on the device:

    a slot is filled    after the last kernel that was launched to read it

The choice of experts is made on the device, so the host reads it once per layer and frame
(`SlotWork`). Only engines whose experts come and go do that.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceExperts, DeviceWork
from qllm.cuda.streams import StreamApi
from qllm.errors import InvariantError, ModelError
from qllm.models.weights.on_host import in_lines, parts_of
from qllm.models.weights.quantised_weights import tensors_of, with_tensors
from qllm.runner.cuts import CutCosts
from qllm.runner.displacing import NONE
from qllm.runner.layers.work import Unit
from qllm.runner.residency import Residency


class ExpertRoom(NamedTuple):
    """Room on the device for experts that come and go."""

    api: StreamApi
    """Interface that makes the copies."""
    max_bytes: int
    """Most bytes of experts on the device."""


class HostLayer:
    """The experts of one layer in the host's memory.

    Args:
        name: Path of the module.
        module: Module of experts whose weights are on the host.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.parts = name, parts_of(module)
        """Tensors with an entry for each expert: weights, or codes, scales and offsets."""
        self.num_experts = len(self.parts[0])
        self.starts, self.expert_bytes = list[int](), 0
        for part in self.parts:
            self.starts.append(self.expert_bytes)
            self.expert_bytes += in_lines(part[0].nbytes)

    def bytes_of(self, expert: int) -> list[Tensor]:
        """Return the bytes of each part of an expert, uint8 [1, bytes]."""
        return [part[expert].view(torch.uint8).reshape(1, -1) for part in self.parts]

    def stacks_in(self, slots: Tensor) -> list[Tensor]:
        """Return each part as a stack over all slots, with the shape of one expert's part.

        Args:
            slots: Memory of the slots, uint8 [slots, bytes of a slot].
        """
        found = []
        for part, start in zip(self.parts, self.starts, strict=True):
            rows = slots.view(part.dtype)[:, start // part.itemsize :][:, : part[0].numel()]
            found.append(rows.view(len(slots), *part.shape[1:]))
        return found


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """A slot that is to be filled."""

    number: int
    num_bytes: int
    after: Any
    """Event of the last kernel that reads what was in the slot before."""

    def __len__(self) -> int:
        return self.num_bytes


def _unlock(api: StreamApi, stream: Any, locked: list[Tensor]) -> None:
    """Wait for the copies of a stream, then end the page-locks of tensors and forget them."""
    if locked:
        api.finish(api.record(stream))
    while locked:
        api.unlock(locked.pop())


class DeviceResidency(Residency):
    """Slots on a device.

    Experts are unlocked by `leave`, and before they are freed if this object is dropped without it.

    Args:
        layers: Experts of all layers.
        room: Room for the slots.
        top_k: Experts per token.
        device: The device.

    Raises:
        ConfigError: The room is too small for the experts of one token in one layer.
    """

    where, cure = "page-locked memory of the host", "check the device"

    def __init__(
        self, layers: Sequence[HostLayer], room: ExpertRoom, top_k: int, device: torch.device
    ) -> None:
        super().__init__(layers, room.max_bytes, top_k)
        self._host, self._api, self._device = layers, room.api, device
        self._stream: Any = None
        self._launching = Lock()
        self._after: list[Any] = []
        """Event of the last kernel that reads each slot."""
        self._unlock: Callable[[], object] = lambda: None

    def enter(self) -> None:
        """Page-lock all experts, and allocate the slots. Idempotent.

        Raises:
            DeviceError: The host has too little memory that can be page-locked.
        """
        if self._memory is not None:
            return
        self._stream = self._api.new_stream()
        locked: list[Tensor] = []
        unlock = weakref.finalize(self, _unlock, self._api, self._stream, locked)
        unlock.atexit = False  # a device that computes would delay the exit
        self._unlock = unlock
        for layer in self._host:
            for part in layer.parts:
                self._api.lock_in_place(part)
                locked.append(part)
        super().enter()
        # torch may have taken the memory from tensors that launched kernels still use
        self._after = [self._api.record(None)] * self.num_slots

    def leave(self) -> None:
        """Wait for copies, free the slots, and end the page-locks. Idempotent."""
        self._unlock()
        super().leave()

    def _allocated(self) -> Tensor:
        shape = self.num_slots, self._slot_bytes
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def stacks(self, layer: int) -> list[Tensor]:
        """Return the parts of a layer's experts as stacks over all slots."""
        return self._host[layer].stacks_in(self._slots())

    def used(self, slots: Iterable[int]) -> None:
        """Note that the kernels that were launched last read slots."""
        event = self._api.record(None)
        for slot in slots:
            self._after[slot] = event

    def _memory_of(self, layer: int, slot: int) -> SlotMemory:
        return SlotMemory(slot, self._host[layer].expert_bytes, self._after[slot])

    def read(self, layer: int, expert: int, into: SlotMemory) -> None:
        """Copy an expert into a slot, and wait for the copy. Callable from any thread.

        Raises:
            ModelError: The expert cannot be copied.
        """
        own, memory = self._host[layer], self._slots()[into.number]
        try:
            with self._launching:  # the copies of a slot follow its event, on one stream
                self._api.wait(self._stream, into.after)
                for source, start in zip(own.bytes_of(expert), own.starts, strict=True):
                    to = memory[start : start + source.shape[1]].view(1, -1)
                    self._api.copy(to, source, self._stream)
                event = self._api.record(self._stream, sleeps=True)
            self._api.finish(event)
        except Exception as error:
            raise ModelError(
                f"expert {expert} of {own.name} was not copied to the device "
                f"({type(error).__name__}: {error}); look at the log of its driver"
            ) from error


class SlotExperts:
    """The experts of one layer, of which some are in slots.

    Args:
        experts: Weights and kernels of the layer. The weights are those of the host.
        residency: Slots of all layers.
        number: Number of the layer among those with experts.
        turned: True if the parameters have inputs first, so that the weights are their transposes.
    """

    def __init__(
        self, experts: DeviceExperts, residency: DeviceResidency, number: int, *, turned: bool
    ) -> None:
        self._experts, self._all, self._turned = experts, residency, turned
        self.residency = residency.layer(number)
        self._number, self._first = number, residency.first_of(number)

    def enter(self) -> None:
        """Let the kernels read weights in the slots, which are allocated."""
        own, stacks = self._experts.weights, self._all.stacks(self._number)
        if own.packed is None:
            up, down = (one.transpose(1, 2) if self._turned else one for one in stacks)
        else:
            left = iter(stacks)
            found = [with_tensors(one, islice(left, len(tensors_of(one)))) for one in own.packed]
            if any(_differ(one.scale_NG, one.offset_NG) for one in found):
                raise ModelError(
                    f"the experts of {self._all.name_of(self._number)} have scales and offsets of "
                    "different types, which no kernel reads from slots; leave max_expert_bytes out"
                )
            own = own._replace(packed=(found[0], found[1]))
            up, down = found[0].codes, found[1].codes
        self._experts.weights = own._replace(up_EFD=up, down_EDI=down)

    def begin(self, ids_TK: Tensor, num_ranges: int) -> "SlotWork":
        """Return the experts that tokens chose as work. This reads the choice from the device."""
        return SlotWork(self, self._experts, ids_TK, num_ranges)

    def run(
        self, x_TD: Tensor, ids_TK: Tensor, num_tokens: Tensor, chosen: list[int], out_TKD: Tensor
    ) -> None:
        """Run experts that are in slots, and no others.

        Args:
            x_TD: Input of the experts.
            ids_TK: Experts of each token.
            num_tokens: Number of tokens, on the device.
            chosen: Experts to run.
            out_TKD: Outputs. Those of other experts do not change.
        """
        num, kernels = self.residency.num_experts, self._experts.kernels
        found = [self._all.place(self._first + expert) for expert in chosen]
        slots = [slot for slot in found if slot is not None]
        if len(slots) < len(chosen):
            raise InvariantError(f"experts {chosen} run, and not all of them are in slots")
        own, place = np.full(num, NONE), np.zeros(num, dtype=np.int64)
        own[chosen], place[chosen] = chosen, slots
        own_E, place_E = torch.from_numpy(np.stack((own, place))).to(x_TD.device)
        # every expert keeps its number, so tiles have the sizes that they have without slots
        routing = kernels.route(own_E[ids_TK], num_tokens, num, self._experts.hits)
        weights = self._experts.weights._replace(place_E=place_E)
        kernels.run_experts(x_TD, weights, routing, 0, num, out_TKD)
        self._all.used(slots)


def _differ(scale: Tensor, offset: Tensor | None) -> bool:
    return offset is not None and offset.dtype != scale.dtype


class SlotWork(DeviceWork):
    """The EXPERTS op of one layer. A unit is an expert that tokens chose."""

    __slots__ = ("_per_range", "_slots")

    def __init__(
        self, slots: SlotExperts, experts: DeviceExperts, ids_TK: Tensor, num_ranges: int
    ) -> None:
        self._slots = slots
        chosen, counts = np.unique(ids_TK.cpu().numpy(), return_counts=True)
        ends = np.cumsum(counts)
        every = zip(chosen.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        self._begin(experts, ids_TK, [Unit(*one) for one in every], slots.residency)
        self._per_range = -(-len(chosen) // num_ranges)

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert unit of [{start}, {stop}) would run twice (I1)")
        out_TKD = self.slots_SD.view(*self.ids_TK.shape, -1)
        chosen = [unit.expert for unit in self.units[start:stop]]
        self._slots.run(x_TD, self.ids_TK, self._num_tokens, chosen, out_TKD)
        self._slots.residency.use(chosen)
        self.done[start:stop] = b"\1" * (stop - start)
        return self.rows(start, stop)

    def end_of_range(self, start: int, costs: CutCosts) -> int:
        """Return the end of the range: the units of experts that are in slots, at most a share."""
        stop, most = start, min(len(self.units), start + self._per_range)
        while stop < most and self._slots.residency.has(self.units[stop].expert):
            stop += 1
        return stop
