"""Experts of one layer: their packed weights, and the kernel over ranges of expert units.

Weights are bf16 as the model has them, or int8 with one fp32 scale for every output and group of
inputs (symmetric: a weight is value * scale). Activations and sums are the same for both.
"""

import ctypes
from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from qllm.kernels import cpu

INT8_MAX = 127
LEAST_SCALE = 1e-30
"""A group of zeros gets it; bf16(value * scale) is a normal number."""
Scales = tuple[Tensor, Tensor]
"""fp32 [E, groups, outputs] of up and down, outputs filled up to a multiple of 16."""


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("up_scale", c_void_p),
        ("down_scale", c_void_p),
        ("num", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
        ("group", c_int64),
    )


class Stack:
    """E weights bf16 [n, k] of one shape, packed one after the other on huge pages."""

    def __init__(self, num: int, n: int, k: int) -> None:
        size = cpu.packed_numel(n, k)
        self.packed = cpu.huge_empty(num * size).view(num, size)
        self.num_bytes = size * 2
        """Of one weight."""

    def pack(self, expert: int, weight_NK: Tensor) -> None:
        """Take one weight, bf16 [n, k] of any strides."""
        cpu.pack(weight_NK, self.packed[expert])

    def unpack(self, expert: int, out_NK: Tensor) -> None:
        """Write one weight with every bit that it had."""
        cpu.unpack(self.packed[expert], out_NK)


class Int8Stack:
    """E weights [n, k] of one shape in int8, packed one after the other on huge pages.

    Args:
        num: E.
        n: Outputs.
        k: Inputs, an even number.
        group: Inputs that share a scale, an even number; the last group may be shorter.
        scales: Those of an earlier stack. Weights that it unpacked are packed to the same values
            again: rounding to bf16 moves one by at most a quarter of a step.
    """

    def __init__(self, num: int, n: int, k: int, group: int, scales: Tensor | None = None) -> None:
        self._n, self._k, self._group = n, k, min(group, k)
        size = cpu.packed_numel(n, k)
        self.packed = cpu.huge_empty(num * size // 2).view(torch.int8).view(num, size)
        self._chooses = scales is None
        shape = (num, -(-k // self._group), -(-n // 16) * 16)
        self.scales = torch.zeros(shape) if scales is None else scales
        self.num_bytes = size + self.scales[0].numel() * 4
        """Of one weight."""

    def pack(self, expert: int, weight_NK: Tensor) -> None:
        """Take one weight, bf16 [n, k] of any strides, rounded to the nearest int8 * scale.

        Raises:
            ValueError: A value is not finite.
        """
        grouped = F.pad(weight_NK.float(), (0, -self._k % self._group))
        grouped = grouped.view(self._n, -1, self._group)
        scale_NG = self.scales[expert, :, : self._n].t()
        if self._chooses:
            scale_NG.copy_((grouped.abs().amax(2) / INT8_MAX).clamp_(min=LEAST_SCALE))
        if not scale_NG.isfinite().all():
            raise ValueError("weights that are not finite cannot be int8")
        values = (grouped / scale_NG.unsqueeze(2)).round_().to(torch.int8).view(self._n, -1)
        place = self.packed[expert].data_ptr()
        cpu.native.pack8(place, values.data_ptr(), self._n, self._k, *values.stride())

    def unpack(self, expert: int, out_NK: Tensor) -> None:
        """Write value * scale of one weight, rounded to bf16."""
        values = torch.empty((self._n, self._k), dtype=torch.int8)
        place = self.packed[expert].data_ptr()
        cpu.native.unpack8(values.data_ptr(), place, self._n, self._k, *values.stride())
        scale_NK = self.scales[expert, :, : self._n].t().repeat_interleave(self._group, 1)
        out_NK.copy_(values * scale_NK[:, : self._k])


class Experts:
    """SwiGLU experts of one layer.

    Args:
        num: E experts.
        width: F, of one expert.
        hidden: D.
        group: None holds weights in bf16; else in int8 with a scale per so many inputs, an even
            number; 0 is all inputs.
        scales: Of int8 weights that were packed before (see `Int8Stack`).
    """

    def __init__(
        self,
        num: int,
        width: int,
        hidden: int,
        group: int | None = None,
        scales: Scales | None = None,
    ) -> None:
        up, down = (num, 2 * width, hidden), (num, hidden, width)
        self.scales: Scales | None = None
        addresses: tuple[int | None, int | None] = (None, None)
        self._up: Stack | Int8Stack
        self._down: Stack | Int8Stack
        if group is None:
            self._up, self._down = Stack(*up), Stack(*down)
        else:
            group = group or max(width, hidden)
            up_scales, down_scales = scales or (None, None)
            self._up = Int8Stack(*up, group, up_scales)
            self._down = Int8Stack(*down, group, down_scales)
            self.scales = self._up.scales, self._down.scales
            addresses = self.scales[0].data_ptr(), self.scales[1].data_ptr()
        self.num_bytes = self._up.num_bytes + self._down.num_bytes
        """Of one expert."""
        weights = self._up.packed.data_ptr(), self._down.packed.data_ptr()
        self._struct = _Experts(*weights, *addresses, num, width, hidden, group or 0)
        self._address = ctypes.addressof(self._struct)

    def pack(self, expert: int, up: Tensor, down: Tensor) -> None:
        """Take one expert's weights, bf16 [2F, D] (gate first) and [D, F] of any strides."""
        self._up.pack(expert, up)
        self._down.pack(expert, down)

    def unpack(self, expert: int, up: Tensor, down: Tensor) -> None:
        """Write one expert's weights: bf16 as `pack` was given them, int8 rounded."""
        self._up.unpack(expert, up)
        self._down.unpack(expert, down)

    def run(
        self, x_TD: Tensor, token_S: Tensor, units: int, num_units: int, slots_SD: Tensor
    ) -> None:
        """Run consecutive units (an address of expert, lo, hi) into their rows of `slots_SD`."""
        cpu.native.experts(
            slots_SD.data_ptr(),
            cpu.dense(x_TD).data_ptr(),
            token_S.data_ptr(),
            units,
            num_units,
            self._address,
        )
