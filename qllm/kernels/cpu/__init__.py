"""Kernels for bf16 on the CPU, over torch tensors.

    Matrix      a weight in panels; `linear` reads it at the memory's speed for a few rows
    Experts     (`experts`) gate and up, their activation, and down, for ranges of expert units
    norms, attention, routers
                modules of their own: the ops before the experts of a layer

A row's bits depend neither on the other rows nor on the number of threads: every output is a
sum over k in one fixed order. Rounding happens where transformers' modules round, so results
differ from theirs only by the order of fp32 sums. The source is C++ in this folder. If it was not
built (no compiler), `MISSING` contains the reason and torch computes.
"""

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("qllm")
MISSING: str | None = None
"""Reason that the kernels are missing; None if they are built."""
native: Any = None
try:
    native = import_module("qllm.kernels.cpu._native")
except ImportError as error:
    MISSING = f"qllm.kernels.cpu._native was not built ({error}); it needs a C++17 compiler"

TILES = "AMX"
"""Kernels that multiply bf16 in tiles."""
SUM_PAIRS = frozenset({TILES, "AVX-512 BF16"})
"""Kernels that sum products of bf16 in pairs."""
NEAR = 2.0**-8
"""Size of one bf16 step, relative to a sum of absolute products."""
_threads: tuple[int, int] | None = None
"""Process id, and the number of threads that this process has set."""
HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""
PANEL = 64
"""Number of outputs that are stored together in a packed weight."""
ARENA_NUMEL = 8 << 20
"""Fewest values that an arena allocates at once."""
BLANK_BYTES = 1 << 16
"""Bytes of blank tensors that are allocated at once. At least one tensor is."""


def is_usable(tensor: Tensor, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> bool:
    """Return True if the kernels can read a weight, which must have one of these dtypes."""
    in_memory = tensor.device.type == "cpu" and tensor.dtype in dtypes
    return in_memory and tensor.shape[-1] % 2 == 0 and MISSING is None


class MatrixStruct(ctypes.Structure):
    """`Matrix` in kernels.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_void_p),
        ("rest", c_void_p),
        ("first", c_int64),
    )


def choose(module: Any) -> str:
    """Select the best kernels of this machine and return their name.

    The tile kernels were tested only in emulation. So a few of their products are first compared
    with those of the vector kernels. The difference may be at most that of another order of fp32
    sums.
    """
    best, *others = (str(name) for name in module.available())
    if best == TILES and not _agree(module, best, others[0]):
        _log.warning(
            "AMX gives other products than %s on this machine: %s is used", others[0], others[0]
        )
        best = others[0]
    module.use(best)
    return best


def _agree(module: Any, one: str, other: str) -> bool:
    """Return True if two kinds of kernels agree up to rounding, in shapes that fill no tile."""
    generator = torch.Generator().manual_seed(0)
    for rows, num_out, num_in in ((1, 64, 32), (17, 80, 70), (50, 150, 96)):
        x = torch.randn((rows, num_in), generator=generator, dtype=torch.float32).bfloat16()
        weight = torch.randn((num_out, num_in), generator=generator, dtype=torch.float32).bfloat16()
        matrix = Matrix([weight])
        found = [torch.empty((rows, num_out), dtype=torch.bfloat16) for _ in range(2)]
        for name, out in zip((one, other), found, strict=True):
            module.use(name)
            module.linear(out.data_ptr(), x.data_ptr(), matrix.address, rows)
        near = x.float().abs() @ weight.float().abs().t() * NEAR
        if not ((found[0].float() - found[1].float()).abs() <= near).all():
            return False
    return True


def kind() -> str:
    """Return the instruction set in use, for results."""
    return _kind


def set_threads(num: int) -> None:
    """Set the number of kernel threads of the process; do nothing if the kernels were not built."""
    global _threads
    if native is not None and _threads != (os.getpid(), num):
        native.threads(num)
        _threads = os.getpid(), num


def packed_numel(num_out: int, num_in: int) -> int:
    """Return the number of values of a packed [out, in] weight."""
    return -(-num_out // 16) * 16 * num_in


def huge_empty(numel: int) -> Tensor:
    """Return an uninitialised bf16 [numel], on huge pages where the system has them.

    A product with one row streams its weight once. On pages of 4 KiB that runs at half the speed
    (measured: 15 against 29 GB/s on a Zen 4 core), because the prefetchers stop at the end of each
    page. The memory is freed with the tensor.
    """
    num = max(1, numel)
    size = num * 2
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=num)[:numel]


class Arena:
    """An allocator of packed weights, which lie one after the other on huge pages."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.bfloat16)

    def take(self, *shape: int) -> Tensor:
        """Return an uninitialised bf16 tensor that starts on a cache line."""
        numel = math.prod(shape)
        if numel > self._left.numel():
            self._left = huge_empty(max(numel, ARENA_NUMEL))
        found, self._left = self._left[:numel], self._left[-(-numel // 32) * 32 :]
        return found.view(shape)


def pack(weight_NK: Tensor, out: Tensor) -> None:
    """Copy one bf16 [out, in] weight of any strides into `out`, which has `packed_numel` values."""
    n, k = _checked(weight_NK, out)
    native.pack(out.data_ptr(), weight_NK.data_ptr(), n, k, *weight_NK.stride())


def unpack(packed: Tensor, out_NK: Tensor) -> None:
    """Copy a packed weight back into a bf16 [out, in] tensor of any strides, bit for bit."""
    n, k = _checked(out_NK, packed)
    native.unpack(out_NK.data_ptr(), packed.data_ptr(), n, k, *out_NK.stride())


def _checked(weight_NK: Tensor, packed: Tensor) -> torch.Size:
    n, k = weight_NK.shape
    if weight_NK.dtype is not torch.bfloat16 or packed.dtype is not torch.bfloat16 or k % 2:
        raise ValueError(f"cannot pack {weight_NK.dtype} {tuple(weight_NK.shape)}")
    if packed.numel() != packed_numel(n, k) or not packed.is_contiguous():
        raise ValueError(f"{tuple(packed.shape)} does not hold a packed {(n, k)}")
    return weight_NK.shape


def dense(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the same values, as the kernels need it."""
    return x if x.is_contiguous() else x.contiguous()


class Blank:
    """An allocator of uninitialised tensors [rows, width]. It makes several at once.

    The weights of a step may have evicted PyTorch's code from the CPU's caches. Making one tensor
    then takes more than a tenth of a millisecond.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._num_rows = 0
        self._left: list[Tensor] = []

    def take(self, num_rows: int) -> Tensor:
        """Return an uninitialised tensor [num_rows, width]."""
        if num_rows != self._num_rows or not self._left:
            size = max(1, num_rows) * self._width * self._dtype.itemsize
            shape = (max(1, BLANK_BYTES // size), num_rows, self._width)
            self._left = list(torch.empty(shape, dtype=self._dtype).unbind())
            self._num_rows = num_rows
        return self._left.pop()


class Matrix:
    """A packed weight.

    Args:
        weights: bf16 [out, in] tensors with the same inputs; stacked along the outputs.
        biases: bf16 [out] tensors, or all None.
        arena: Allocator of the packed weight; None allocates memory for it alone.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        arena: Arena | None = None,
    ) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        numel = packed_numel(*weight.shape)
        packed = weight.new_empty(numel) if arena is None else arena.take(numel)
        pack(weight, packed)
        num_out, num_in = weight.shape
        self._hold(packed, num_out, num_in, biases)

    def _hold(
        self,
        packed: Tensor,
        num_out: int,
        num_in: int,
        biases: Sequence[Tensor | None],
        format: ctypes.Structure | None = None,
    ) -> None:
        given = [b for b in biases if b is not None]
        self.packed, self.num_out, self.num_in = packed, num_out, num_in
        self.bias = torch.cat(given) if given else None
        self._format = format
        self.struct = MatrixStruct(
            packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            num_out,
            num_in,
            None if format is None else ctypes.addressof(format),
        )
        self.address = ctypes.addressof(self.struct)

    def followed_by(self, rest: "Matrix | None") -> None:
        """Append the outputs of another matrix, perhaps in another format, after the own outputs.

        The number of own outputs must be a multiple of PANEL. Neither matrix may change afterwards.
        """
        if rest is None:
            return
        self._rest, self.struct.rest, self.struct.first = rest, rest.address, self.num_out
        self.num_out += rest.num_out
        self.struct.n = self.num_out

    def columns(self, start: int, stop: int) -> "Matrix":
        """Return outputs [start, stop) as a matrix that shares the memory of this one.

        Raises:
            ValueError: The range starts or ends inside a panel, or another matrix follows.
        """
        ends = (start % PANEL, stop % PANEL if stop != self.num_out else 0)
        if ends != (0, 0) or not 0 <= start < stop <= self.num_out or self.struct.rest:
            raise ValueError(
                f"outputs {start} to {stop} of {self.num_out}: a range of one matrix starts and "
                f"ends at a multiple of {PANEL}, or ends with the last output"
            )
        part = Matrix.__new__(Matrix)
        bias = None if self.bias is None else self.bias[start:stop]
        packed = self.packed.view(-1)[start // PANEL * self._panel_numel() :]
        part._hold(packed, stop - start, self.num_in, [bias], self._format)
        return part

    def _panel_numel(self) -> int:
        """Return the number of packed values of a whole panel."""
        return PANEL * self.num_in

    def linear(self, x: Tensor) -> Tensor:
        """Return `F.linear` of x, bf16 [..., in]."""
        x = dense(x)
        out = x.new_empty((*x.shape[:-1], self.num_out))
        rows = x.numel() // self.num_in
        native.linear(out.data_ptr(), x.data_ptr(), self.address, rows)
        return out


def combine(slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the sum over k of weight times slot, [T, D].

    `inverse_S` contains the slot of every (t, k).
    """
    num_tokens, top_k = weights_TK.shape
    width = slots_SD.shape[1]
    out = slots_SD.new_empty((num_tokens, width))
    native.combine(
        out.data_ptr(),
        slots_SD.data_ptr(),
        inverse_S.data_ptr(),
        dense(weights_TK).data_ptr(),
        weights_TK.dtype is torch.float32,
        num_tokens,
        top_k,
        width,
    )
    return out


_kind = "torch" if native is None else choose(native)
