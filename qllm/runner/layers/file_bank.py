"""Experts of one layer that are in a file, for this project's kernels or for torch."""

from typing import Any, cast

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts, Formats
from qllm.kernels.quantised import Code, Quantised
from qllm.models.discover import PACKED
from qllm.models.weights.expert_file import CodeFormat, InFile, room_for
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.residency import FileResidency


class FileBank(NativeBank):
    """Experts of one layer that compute in slots, or from memory if all fit.

    Args:
        module: Module that `is_covered`, whose weights are in a file.
        place: Place of the weights.
        residency: Experts of all layers that are in memory.
        activations: Dtype of the rows that products with integer weights read.
    """

    def __init__(
        self, module: Any, place: InFile, residency: FileResidency, activations: str = "bf16"
    ) -> None:
        super().__init__(module)
        self._all, self._number, self._layer = residency, place.number, place.layer
        self._likes = Formats(*(_like(one, activations) for one in place.layer.formats))
        self.residency = None if residency.has_all else residency.layer(place.number)
        reads = dict.fromkeys("bf16" if one is None else one.kind for one in self._likes)
        kinds = "int8" if self._layer.group is not None else "+".join(reads)
        num, total = residency.num_slots, residency.num_experts
        self.kernel = f"qllm {cpu.kind()} {kinds} in {num} slots for {total} experts"
        if residency.has_all:
            self.kernel = f"qllm {cpu.kind()} {kinds} from a file"
        self.unit_bytes = sum(part.num_bytes for part in self._layer.parts)

    def pack(self) -> None:
        """Allocate the slots, or read all experts if they fit."""
        if self._packed is not None:
            return
        if self.residency is None:
            self._packed = self._read_all()
        else:
            self._all.enter()
            self._packed = self._experts(0)
            starts = {part.name: part.start for part in self._layer.parts}
            self._packed.place(self.residency.table, starts, self.num_experts)
        setattr(self._module, PACKED, True)

    def unpack(self) -> None:
        """Free the memory. The weights stay in the file."""
        if self._packed is not None:
            self._packed = None
            delattr(self._module, PACKED)
        self._all.leave()

    def values(self, down: bool, expert: int) -> Tensor:
        """Return the values of a weight, bf16 [in, out], in the memory layout of the parameter.

        Raises:
            InvariantError: The expert is not in memory.
        """
        packed, index = self._entered(), expert
        if self.residency is not None:
            slot = self.residency.slot(expert)
            if slot is None:
                raise InvariantError(f"expert {expert} of {self._layer.name} is not in memory")
            packed, index = self._experts(1), 0
            self._copy(slot, packed, 0)
        width, hidden = self._layer.width, self._layer.hidden
        out = torch.empty((hidden, width) if down else (2 * width, hidden), dtype=torch.bfloat16)
        packed.unpack_one(index, out, down=down)
        rows = out if down else self._module_order(out)
        return rows.t().contiguous() if self._module.is_transposed else rows.t()

    def _experts(self, num: int) -> Experts:
        """Return room for experts, with the formats of the file."""
        layer, biases = self._layer, self._biases(range(self.num_experts))
        shape = num, layer.width, layer.hidden
        made = Experts(*shape, layer.group, biases, self._clamp, self._likes)
        for format, own in zip(made.formats, layer.formats, strict=True):
            if format is not None and own is not None:
                format.products = own.products
        return made

    def _read_all(self) -> Experts:
        made, room = self._experts(self.num_experts), room_for(self._layer.expert_bytes)
        bytes_of = torch.frombuffer(room, dtype=torch.uint8)
        for expert in range(self.num_experts):
            self._all.read(self._number, expert, room)
            self._copy(bytes_of, made, expert)
        return made

    def _copy(self, slot: Tensor, to: Experts, index: int) -> None:
        """Copy the parts of an expert from a slot to packed experts."""
        parts = to.parts(index)
        for name, start, count in self._layer.parts:
            parts[name].copy_(slot[start : start + count])


def _like(format: CodeFormat | None, activations: str) -> Quantised | None:
    """Return a weight without values in a format of the file."""
    if format is None:
        return None
    dtypes = [None if name is None else getattr(torch, name) for name in format[2:4]]
    scale, offset = (None if kind is None else torch.empty((0, 0), dtype=kind) for kind in dtypes)
    assert scale is not None
    like = Quantised(
        cast(Code, format.code), torch.empty(0, dtype=torch.uint8), scale, offset, format.group
    )
    return like.reading(activations)
