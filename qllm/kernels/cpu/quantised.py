"""Weights of 4 and 8 bits, packed for the kernels: see quantised.inc.

Products with them are, bit for bit, those with the bf16 weights that `Quantised.dequantised` gives.
"""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.quantised import FOUR_BIT, I4_ZERO, Quantised

CODES = {"u4": 1, "e2m1": 2, "i8": 3, "e4m3": 4, "i4": 5}
WORTHS = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
ROUNDED, EXACT, POWERS = 0, 1, 2
"""`Code`, `Worth` and `Products` of kernels.h."""
BLOCK_INPUTS = 8
MOST_SCALE = 2.0**100
"""Scales and offsets are 0 or between it and its inverse: instructions that round to bf16 take
subnormal numbers as 0, and no value comes near them so."""
_SPARE_BITS = 0xFF
"""Last bits of an fp32 scale; where they are 0 its product with a code of 8 bits is exact."""


_EXPONENT = 0x7F800000


class FormatStruct(ctypes.Structure):
    """`Format` of kernels.h."""

    _fields_ = tuple((name, c_int64) for name in ("code", "group", "scale", "offset", "products"))


class _Layout(NamedTuple):
    """Where in the panels of a weight [n, k] things lie."""

    block: int
    """Bytes of 16 outputs times 8 inputs."""
    worth: int
    """Bytes of an output's scale and offset."""
    group: int
    k: int

    @classmethod
    def of(cls, like: Quantised, k: int) -> "_Layout":
        per_output = like.scale_NG.itemsize * (1 if like.offset_NG is None else 2)
        return cls(64 if like.code in FOUR_BIT else 128, per_output, min(like.group, k), k)

    def group_bytes(self, cols: int, inputs: int) -> int:
        """Bytes of so many outputs of a group of so many inputs."""
        return cols * self.worth + cols // 16 * -(-inputs // BLOCK_INPUTS) * self.block

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Runs of equal groups: the first, how many, inputs of each."""
        whole, rest = divmod(self.k, self.group)
        yield 0, whole, self.group
        if rest:
            yield whole, 1, rest

    def panel_bytes(self, cols: int) -> int:
        """Bytes of a panel."""
        return sum(num * self.group_bytes(cols, inputs) for _, num, inputs in self.groups())

    def panels(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Runs of equal panels: the first output, how many, outputs of each."""
        whole, rest = divmod(n, 64)
        if whole:
            yield 0, whole, 64
        if rest:
            yield whole * 64, 1, -(-rest // 16) * 16

    def weight_bytes(self, n: int) -> int:
        """Bytes of a weight."""
        return sum(num * self.panel_bytes(cols) for _, num, cols in self.panels(n))


def _blocks(like: Quantised, codes: Tensor) -> Tensor:
    """Bytes [outputs / 16, inputs / 8, block] of codes [outputs, inputs], a byte each."""
    n, k = codes.shape
    parts = codes.view(n // 16, 16, k // 8, 4, 2)  # of outputs, of inputs in pairs
    if like.code not in FOUR_BIT:
        return parts.permute(0, 2, 3, 1, 4).reshape(n // 16, k // 8, 128)
    if like.code == "e2m1":
        parts = parts.permute(3, 0, 2, 1, 4)
        low, high = parts[0::2], parts[1::2] << 4
        return (low | high).permute(1, 2, 3, 4, 0).reshape(n // 16, k // 8, 64)
    parts = codes.view(n // 16, 4, 4, k // 8, 2, 2, 2).permute(4, 0, 3, 1, 5, 2, 6)
    return (parts[0] | parts[1] << 4).reshape(n // 16, k // 8, 64)


def _sign_and_size(codes: Tensor) -> Tensor:
    """Codes of "i4" as the kernels have them: the size modulo 8, and 8 where it is below 0."""
    size = torch.where(codes < I4_ZERO, I4_ZERO - codes, codes - I4_ZERO) & 7
    return size | (codes < I4_ZERO).to(torch.uint8) << 3


def _code_bytes(weight: Quantised) -> Tensor:
    """Codes uint8 [n, k]."""
    if weight.code in FOUR_BIT:
        return torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(-2)
    return weight.codes.view(torch.uint8)


def _checked(weight: Quantised, n: int, k: int) -> None:
    """Raise a ValueError where a weight is not what the contract or the kernels ask for."""
    four = weight.code in FOUR_BIT
    wanted = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(weight.code, torch.uint8)
    groups = -(-k // weight.group)
    worths = [weight.scale_NG, *([] if weight.offset_NG is None else [weight.offset_NG])]
    if weight.codes.dtype is not wanted or weight.codes.shape != (n, k // 2 if four else k):
        raise ValueError(
            f"codes {weight.code!r} are {weight.codes.dtype} {tuple(weight.codes.shape)}; a weight "
            f"{(n, k)} has {wanted} {(n, k // 2 if four else k)}"
        )
    if k % 2 or (weight.group < k and weight.group % BLOCK_INPUTS):
        raise ValueError(
            f"{k} inputs in groups of {weight.group}: inputs are even, and groups of a multiple of "
            f"{BLOCK_INPUTS}, or of all inputs"
        )
    for worth in worths:
        if worth.dtype not in WORTHS or worth.shape != (n, groups):
            raise ValueError(
                f"scales and offsets are {worth.dtype} {tuple(worth.shape)}; {(n, groups)} of "
                "float32, float16 or bfloat16 are allowed"
            )


def _worths(worth: Tensor) -> Tensor:
    """Scales or offsets, once it is known that values which they give are no subnormal numbers."""
    size = worth.float().abs()
    bad = ~((size == 0) | ((size >= 1 / MOST_SCALE) & (size <= MOST_SCALE)))
    if bad.any():
        raise ValueError(
            f"a scale or offset of a weight is {worth[bad][0].item()}; 0 and sizes from 2^-100 to "
            "2^100 are allowed: check the checkpoint"
        )
    return worth


_SIZE_BITS = {"e2m1": 7, "e4m3": 127}


def _scales(weight: Quantised, codes: Tensor) -> Tensor:
    """Scales; 1 where a group has no other code than zeros, which a scale out of range may have."""
    scale_NG = weight.scale_NG
    if weight.offset_NG is None:
        zero = I4_ZERO if weight.code == "i4" else 0
        zeros = (codes & _SIZE_BITS.get(weight.code, 255)) == zero
        zeros = F.pad(zeros, (0, -zeros.shape[1] % weight.group), value=True)
        empty = zeros.view(len(zeros), -1, weight.group).all(-1)
        empty &= (scale_NG > 0) & scale_NG.isfinite()
        scale_NG = torch.where(empty, torch.ones_like(scale_NG), scale_NG)
    return _worths(scale_NG)


def _products(scale_NG: Tensor, offset_NG: Tensor | None = None) -> int:
    """What products of scales and codes are; an offset is added after they are rounded."""
    bits = scale_NG.float().view(torch.int32)
    if offset_NG is None:
        return EXACT if (bits & ~_EXPONENT).any() or (bits == 0).any() else POWERS
    return ROUNDED if (bits & _SPARE_BITS).any() else EXACT


class QuantisedStack:
    """E weights [n, k] of one shape and format, packed one after the other on huge pages.

    Args:
        num: E.
        n: Outputs.
        k: Inputs, an even number.
        like: A weight of the format: its code, group, and dtypes of scales and offsets count.
        arena: Where they lie; by default in memory of their own.
    """

    def __init__(
        self, num: int, n: int, k: int, like: Quantised, arena: cpu.Arena | None = None
    ) -> None:
        self._n, self._k, self._like = n, k, like
        self._layout = _Layout.of(like, k)
        self.num_bytes = self._layout.weight_bytes(n)
        """Bytes of one weight."""
        whole = (cpu.huge_empty if arena is None else arena.take)(num * self.num_bytes // 2)
        self.packed = whole.view(torch.uint8).view(num, self.num_bytes)
        offset = None if like.offset_NG is None else like.offset_NG.dtype
        worths = WORTHS[like.scale_NG.dtype], WORTHS[offset]
        products = POWERS if like.code == "e2m1" and offset is None else EXACT
        self.format = FormatStruct(CODES[like.code], self._layout.group, *worths, products)

    def pack(self, expert: int, weight: Quantised) -> None:
        """Take one weight.

        Raises:
            ValueError: It has another shape or format, or scales that are not finite or far from 1.
        """
        _checked(weight, self._n, self._k)
        if _format(weight, self._k) != _format(self._like, self._k):
            raise ValueError(
                f"a weight is {_format(weight, self._k)}, the others of its stack are "
                f"{_format(self._like, self._k)}; a stack has one format"
            )
        codes = _code_bytes(weight)
        if weight.code == "e4m3" and ((codes & 127) == 127).any():
            raise ValueError("a weight in e4m3 is not a number; check the checkpoint")
        if weight.code == "i4" and weight.offset_NG is None:
            # a scale of 0 makes zeros, which the kernels know by their code
            nothing = weight.scale_NG == 0
            inputs = nothing.repeat_interleave(weight.group, 1)[:, : self._k]
            codes = codes.masked_fill(inputs, I4_ZERO)
        worths = [_scales(weight, codes)]
        if weight.offset_NG is not None:
            worths.append(_worths(weight.offset_NG))
        self.format.products = min(self.format.products, _products(*worths))
        if weight.code == "i4":
            codes = _sign_and_size(codes)
        layout, more = self._layout, -self._n % 16
        codes = F.pad(codes, (0, -self._k % BLOCK_INPUTS, 0, more))
        worths = [F.pad(worth, (0, 0, 0, more)) for worth in worths]
        at = 0
        for first, num, cols in layout.panels(self._n):
            rows, end = slice(first, first + num * cols), at + num * layout.panel_bytes(cols)
            panels = self.packed[expert, at:end].view(num, -1)
            self._fill(panels, cols, codes[rows], [worth[rows] for worth in worths])
            at = end

    def _fill(self, panels: Tensor, cols: int, codes: Tensor, worths: list[Tensor]) -> None:
        layout, num_panels, at = self._layout, len(panels), 0
        for first, num, inputs in layout.groups():
            padded = -(-inputs // BLOCK_INPUTS) * BLOCK_INPUTS
            start = first * layout.group
            size = layout.group_bytes(cols, inputs)
            place = panels[:, at : at + num * size].view(num_panels, num, size)
            head = [
                w[:, first : first + num]
                .reshape(num_panels, cols, num)
                .transpose(1, 2)
                .contiguous()
                .view(torch.uint8)
                for w in worths
            ]
            place[:, :, : cols * layout.worth] = torch.cat(head, -1)
            blocks = _blocks(self._like, codes[:, start : start + num * padded])
            parts = blocks.view(num_panels, cols // 16, num, padded // BLOCK_INPUTS, -1)
            place[:, :, cols * layout.worth :] = parts.permute(0, 2, 3, 1, 4).flatten(2)
            at += num * size

    def unpack(self, expert: int, out_NK: Tensor) -> None:
        """Write the values of one weight into bf16 [n, k] of any strides."""
        values = torch.empty(cpu.packed_numel(self._n, self._k), dtype=torch.bfloat16)
        place, format = self.packed[expert].data_ptr(), ctypes.addressof(self.format)
        matrix = cpu.MatrixStruct(place, None, self._n, self._k, format)
        cpu.native.dequantise(values.data_ptr(), ctypes.addressof(matrix))
        cpu.unpack(values, out_NK)


class QuantisedMatrix(cpu.Matrix):
    """A packed weight of 4 or 8 bits; elsewhere it is as one in bf16.

    Args:
        weight: [out, in].
        bias: bf16 [out].
        arena: As of `Matrix`.
    """

    def __init__(
        self, weight: Quantised, bias: Tensor | None = None, arena: cpu.Arena | None = None
    ) -> None:
        shape = len(weight.codes), inputs_of(weight)
        stack = QuantisedStack(1, *shape, weight, arena)
        stack.pack(0, weight)
        self._hold(stack.packed, *shape, [bias], stack.format)


def matrix_of(
    weights: Sequence[Tensor | Quantised],
    biases: Sequence[Tensor | None] = (),
    arena: cpu.Arena | None = None,
) -> cpu.Matrix:
    """Weights of one input on top of each other; in bf16 if some are, or if their formats differ.

    Args:
        weights: bf16 [out, in] or quantised, of one input.
        biases: As of `Matrix`.
        arena: As of `Matrix`.
    """
    quantised = [w for w in weights if isinstance(w, Quantised)]
    whole = stacked(quantised) if len(quantised) == len(weights) else None
    if whole is None:
        plain = [w.dequantised() if isinstance(w, Quantised) else w for w in weights]
        return cpu.Matrix(plain, biases, arena)
    given = [b for b in biases if b is not None]
    return QuantisedMatrix(whole, torch.cat(given) if given else None, arena)


def _format(weight: Quantised, k: int) -> tuple[object, ...]:
    offset = None if weight.offset_NG is None else weight.offset_NG.dtype
    return weight.code, min(weight.group, k), weight.scale_NG.dtype, offset


def stacked(weights: Sequence[Quantised]) -> Quantised | None:
    """Weights of one input on top of each other; None if their formats differ."""
    first, k = weights[0], inputs_of(weights[0])
    if any(_format(w, k) != _format(first, k) for w in weights):
        return None
    codes = torch.cat([w.codes.view(torch.uint8) for w in weights]).view(first.codes.dtype)
    offsets = [w.offset_NG for w in weights if w.offset_NG is not None]
    return first._replace(
        codes=codes,
        scale_NG=torch.cat([w.scale_NG for w in weights]),
        offset_NG=torch.cat(offsets) if offsets else None,
    )


def inputs_of(weight: Quantised) -> int:
    """Its k."""
    return weight.codes.shape[1] * (2 if weight.code in FOUR_BIT else 1)
