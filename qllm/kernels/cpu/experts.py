"""Experts of one layer: their packed weights, and the kernel over ranges of expert units."""

import ctypes
from ctypes import c_int64, c_void_p

from torch import Tensor

from qllm.kernels import cpu


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("num", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
    )


class Experts:
    """SwiGLU experts, packed one after the other on huge pages.

    Args:
        num: E experts.
        width: F, of one expert.
        hidden: D.
    """

    def __init__(self, num: int, width: int, hidden: int) -> None:
        up, down = cpu.packed_numel(2 * width, hidden), cpu.packed_numel(hidden, width)
        memory = cpu.huge_empty(num * (up + down))
        self._up, self._down = memory[: num * up].view(num, up), memory[num * up :].view(num, down)
        self._struct = _Experts(self._up.data_ptr(), self._down.data_ptr(), num, width, hidden)
        self._address = ctypes.addressof(self._struct)

    def pack(self, expert: int, up: Tensor, down: Tensor) -> None:
        """Take one expert's weights, bf16 [2F, D] (gate first) and [D, F] of any strides."""
        cpu.pack(up, self._up[expert])
        cpu.pack(down, self._down[expert])

    def unpack(self, expert: int, up: Tensor, down: Tensor) -> None:
        """Write one expert's weights as `pack` was given them."""
        cpu.unpack(self._up[expert], up)
        cpu.unpack(self._down[expert], down)

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
