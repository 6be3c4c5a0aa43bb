"""Weights of 4 and 8 bits, packed for the kernels: see quantised.inc.

Products with them equal, bit for bit, products with the bf16 weights of `Quantised.dequantised`.
"""

import copy
import ctypes
import threading
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.quantised import FOUR_BIT, INTEGERS, Quantised

CODES = {"u4": 1, "e2m1": 2, "i8": 3, "e4m3": 4, "i4": 5}
WORTHS = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
ROUNDED, EXACT, POWERS = 0, 1, 2
ACTIVATIONS: dict[str, int] = {"bf16": 0, "int8": 1}
"""`Code`, `Worth`, `Products` and `Activations` in kernels.h."""
BLOCK_INPUTS = 8
MOST_SCALE = 2.0**100
"""Largest scale or offset. The least one, except 0, is the inverse of this limit. The limit exists
because instructions that round to bf16 read subnormal numbers as 0. Within the limit no value gets
near subnormal numbers."""
ALLOWED_WORTHS = "0 and sizes from 2^-100 to 2^100 are allowed: check the checkpoint"


class FormatStruct(ctypes.Structure):
    """`Format` in kernels.h."""

    _fields_ = tuple(
        (name, c_int64) for name in ("code", "group", "scale", "offset", "products", "activations")
    )

    def reading(self, activations: str) -> "FormatStruct":
        """Return the format for products that read these activations, if codes are integers."""
        whole = any(self.code == CODES[code] for code in INTEGERS)
        kept = [getattr(self, name) for name, *_ in self._fields_[:-1]]
        return FormatStruct(*kept, ACTIVATIONS[activations if whole else "bf16"])


class CodesStruct(ctypes.Structure):
    """`Codes` in kernels.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("packed", c_void_p),
        ("found", c_int64),
        ("worth", c_float),
    )


NO_POWER, LONG, NO_NUMBER, BAD_WORTH = 1, 2, 4, 8
"""`Found` in kernels.h."""


class _Layout(NamedTuple):
    """The layout of a weight [n, k] in panels."""

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
        """Return the bytes of `cols` outputs of a group of `inputs` inputs."""
        return cols * self.worth + cols // 16 * -(-inputs // BLOCK_INPUTS) * self.block

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs of equal groups: the first group, their number, and the inputs of each."""
        whole, rest = divmod(self.k, self.group)
        yield 0, whole, self.group
        if rest:
            yield whole, 1, rest

    def panel_bytes(self, cols: int) -> int:
        """Return the bytes of a panel of `cols` outputs."""
        return sum(num * self.group_bytes(cols, inputs) for _, num, inputs in self.groups())

    def panels(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of equal panels: the first output, their number, and the outputs of each."""
        whole, rest = divmod(n, 64)
        if whole:
            yield 0, whole, 64
        if rest:
            yield whole * 64, 1, -(-rest // 16) * 16

    def weight_bytes(self, n: int) -> int:
        """Return the bytes of a weight of n outputs."""
        return sum(num * self.panel_bytes(cols) for _, num, cols in self.panels(n))


def _checked(weight: Quantised, n: int, k: int) -> None:
    """Raise a ValueError if a weight violates the contract or the kernels cannot read it."""
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
    if weight.activations != "bf16" and weight.code not in INTEGERS:
        raise ValueError(
            f"codes {weight.code!r} are no integers, and rows in {weight.activations} are for "
            f"{', '.join(INTEGERS)}"
        )
    for worth in worths:
        if worth.dtype not in WORTHS or worth.shape != (n, groups):
            raise ValueError(
                f"scales and offsets are {worth.dtype} {tuple(worth.shape)}; {(n, groups)} of "
                "float32, float16 or bfloat16 are allowed"
            )


class QuantisedStack:
    """E weights [n, k] of one shape and format, packed one after the other on huge pages.

    Args:
        num: Weights, E.
        n: Outputs.
        k: Inputs, an even number.
        like: Weight with the format: its code, group, and dtypes of scales and offsets are used.
        arena: Allocator of the weights; None allocates memory for them alone.
    """

    def __init__(
        self, num: int, n: int, k: int, like: Quantised, arena: cpu.Arena | None = None
    ) -> None:
        self._n, self._k, self._like = n, k, like
        self._layout = _Layout.of(like, k)
        self.num_bytes = self._layout.weight_bytes(n)
        """Bytes of one weight."""
        self.panel_bytes = self._layout.panel_bytes(cpu.PANEL)
        """Bytes of a whole panel of one weight."""
        whole = (cpu.huge_empty if arena is None else arena.take)(num * self.num_bytes // 2)
        self.packed = whole.view(torch.uint8).view(num, self.num_bytes)
        offset = None if like.offset_NG is None else like.offset_NG.dtype
        worths = WORTHS[like.scale_NG.dtype], WORTHS[offset]
        products = POWERS if like.code == "e2m1" and offset is None else EXACT
        rows = ACTIVATIONS[like.activations]
        self.format = FormatStruct(CODES[like.code], self._layout.group, *worths, products, rows)
        self._formats: dict[str, FormatStruct] = {}
        self._judging = threading.Lock()

    def pack(self, first: int, *weights: Quantised | Sequence[Quantised]) -> None:
        """Pack weights from number `first` on. A sequence of weights is stacked into one weight.

        Several threads may pack at the same time, each into different places.

        Raises:
            ValueError: A weight has another shape or format, or scales that are not finite or far
                from 1.
        """
        structs, held = dict[tuple[int, int], list[CodesStruct]](), []
        for i, weight in enumerate(weights):
            place = self.packed[first + i].data_ptr()
            for at, part in self._parts(weight):
                given = [part.codes, part.scale_NG, part.offset_NG]
                dense = [None if t is None else cpu.dense(t) for t in given]
                addresses = [None if t is None else t.data_ptr() for t in dense]
                n = part.shape[0]
                to = place + at // cpu.PANEL * self.panel_bytes
                structs.setdefault((at, n), []).append(CodesStruct(*addresses, n, self._k, to))
                held.append(dense)
        for same in structs.values():
            found = (CodesStruct * len(same))(*same)
            format = ctypes.addressof(self.format)
            cpu.native.pack_codes(ctypes.addressof(found), len(same), format)
            for struct in found:
                self._judge(struct.found, struct.worth)

    def part(self, numbers: range) -> "QuantisedStack":
        """Return consecutive weights as a stack that shares their memory."""
        part = copy.copy(self)
        part.packed = self.packed[numbers.start : numbers.stop]
        return part

    def outputs(self, *ranges: range) -> "QuantisedStack":
        """Return a stack of copies of some outputs of each weight, range after range.

        Raises:
            ValueError: A range starts or ends inside a panel.
        """
        part, pieces = copy.copy(self), []
        for own in ranges:
            ends = [at for at in (own.start, own.stop) if at % cpu.PANEL and at != self._n]
            if ends or (len(own) % cpu.PANEL and own is not ranges[-1]):
                raise ValueError(
                    f"outputs {own.start} to {own.stop} of {self._n}: a copy starts and ends at a "
                    f"multiple of {cpu.PANEL}"
                )
            first, last = own.start // cpu.PANEL, own.stop // cpu.PANEL
            end = self.num_bytes if own.stop == self._n else last * self.panel_bytes
            pieces.append(self.packed[:, first * self.panel_bytes : end])
        part._n, part.num_bytes = sum(map(len, ranges)), sum(piece.shape[1] for piece in pieces)
        whole = cpu.huge_empty(len(self.packed) * part.num_bytes // 2).view(torch.uint8)
        part.packed = whole.view(len(self.packed), part.num_bytes)
        torch.cat(pieces, 1, out=part.packed)
        return part

    def _parts(self, weight: Quantised | Sequence[Quantised]) -> Iterator[tuple[int, Quantised]]:
        """Yield the parts of a weight, each with its first output, a multiple of PANEL."""
        if isinstance(weight, Quantised):
            _checked(weight, self._n, self._k)
        parts = [weight] if isinstance(weight, Quantised) else list(weight)
        for part in parts:
            if _format(part, self._k) != _format(self._like, self._k):
                raise ValueError(
                    f"a weight is {_format(part, self._k)}, the others of its stack are "
                    f"{_format(self._like, self._k)}; a stack has one format"
                )
        if any(part.shape[0] % cpu.PANEL for part in parts[:-1]):
            parts = [one for one in (stacked(parts),) if one is not None]
        at = 0
        for part in parts:
            _checked(part, part.shape[0], self._k)
            yield at, part
            at += part.shape[0]
        if at != self._n:
            raise ValueError(f"a weight has {at} outputs, the others of its stack {self._n}")

    def _judge(self, found: int, worth: float) -> None:
        if found & NO_NUMBER:
            raise ValueError("a weight in e4m3 is not a number; check the checkpoint")
        if found & BAD_WORTH:
            raise ValueError(f"a scale or offset of a weight is {worth}; {ALLOWED_WORTHS}")
        products = EXACT if found & NO_POWER else POWERS
        if self._like.offset_NG is not None:  # the offset is added after the products are rounded
            products = ROUNDED if found & LONG else EXACT
        with self._judging:
            self.format.products = min(self.format.products, products)

    def format_for(self, activations: str) -> FormatStruct:
        """Return the format of products that read these activations.

        All weights must be packed before.
        """
        return self._formats.setdefault(activations, self.format.reading(activations))

    def unpack(self, expert: int, out_NK: Tensor, values: Tensor | None = None) -> None:
        """Write the values of one weight into bf16 [n, k] of any strides.

        Args:
            expert: Number of the weight.
            out_NK: Destination.
            values: Memory for the values, bf16 [`packed_numel`]. Reuse keeps the memory in the
                cache.
        """
        if values is None:
            values = torch.empty(cpu.packed_numel(self._n, self._k), dtype=torch.bfloat16)
        place, format = self.packed[expert].data_ptr(), ctypes.addressof(self.format)
        matrix = cpu.MatrixStruct(place, None, self._n, self._k, format)
        cpu.native.dequantise(values.data_ptr(), ctypes.addressof(matrix))
        cpu.unpack(values, out_NK)


class QuantisedMatrix(cpu.Matrix):
    """A packed weight of 4 or 8 bits, with the interface of a packed bf16 weight.

    Args:
        weight: Weight [out, in].
        bias: bf16 [out].
        arena: Allocator of the packed weight; None allocates memory for it alone.
    """

    def __init__(
        self, weight: Quantised, bias: Tensor | None = None, arena: cpu.Arena | None = None
    ) -> None:
        stack = QuantisedStack(1, *weight.shape, weight, arena)
        stack.pack(0, weight)
        self._hold(stack.packed, *weight.shape, [bias], stack.format)
        self._panel_bytes = stack.panel_bytes

    def _panel_numel(self) -> int:
        return self._panel_bytes


def matrix_of(
    weights: Sequence[Tensor | Quantised],
    biases: Sequence[Tensor | None] = (),
    arena: cpu.Arena | None = None,
) -> cpu.Matrix:
    """Return one matrix of stacked weights with the same inputs, each in its own format.

    Weights before another format must have a multiple of 64 outputs. Otherwise all weights become
    bf16.

    Args:
        weights: bf16 [out, in] or quantised weights, of the same inputs.
        biases: bf16 [out] tensors, or None.
        arena: Allocator of the packed weights; None allocates memory for them alone.
    """
    given = list(biases) or [None] * len(weights)
    if expands(weights):
        plain = [w.dequantised() if isinstance(w, Quantised) else w for w in weights]
        return cpu.Matrix(plain, biases, arena)
    left = iter([bias for _, bias in zip(weights, given, strict=True)])
    runs = [(run, [next(left) for _ in run]) for run in _runs(weights)]
    rest: cpu.Matrix | None = None
    for run, own in reversed(runs):
        matrix = _of_one_format(run, own, arena)
        matrix.followed_by(rest)
        rest = matrix
    assert rest is not None
    return rest


def expands(weights: Sequence[Tensor | Quantised]) -> bool:
    """Return True if `matrix_of` makes bf16 of quantised weights, because formats differ."""
    return any(sum(map(_outputs, run)) % cpu.PANEL for run in _runs(weights)[:-1])


def _runs(weights: Sequence[Tensor | Quantised]) -> list[list[Tensor | Quantised]]:
    """Return consecutive weights of one format together."""
    runs: list[list[Tensor | Quantised]] = []
    for weight in weights:
        if not runs or not _alike(runs[-1][-1], weight):
            runs.append([])
        runs[-1].append(weight)
    return runs


def _of_one_format(
    weights: list[Tensor | Quantised], biases: list[Tensor | None], arena: cpu.Arena | None
) -> cpu.Matrix:
    whole = stacked([w for w in weights if isinstance(w, Quantised)])
    if whole is None:
        return cpu.Matrix([w for w in weights if isinstance(w, Tensor)], biases, arena)
    given = [b for b in biases if b is not None]
    return QuantisedMatrix(whole, torch.cat(given) if given else None, arena)


def _alike(one: Tensor | Quantised, other: Tensor | Quantised) -> bool:
    if isinstance(one, Quantised) and isinstance(other, Quantised):
        return _format(one, one.shape[1]) == _format(other, other.shape[1])
    return isinstance(one, Quantised) == isinstance(other, Quantised)


def is_like(weight: Quantised, other: Quantised) -> bool:
    """Return True if two weights have the same format and number of inputs."""
    return weight.shape[1] == other.shape[1] and _alike(weight, other)


def _outputs(weight: Tensor | Quantised) -> int:
    return int(weight.shape[0])


def _format(weight: Quantised, k: int) -> tuple[object, ...]:
    offset = None if weight.offset_NG is None else weight.offset_NG.dtype
    worths = weight.scale_NG.dtype, offset
    return weight.code, min(weight.group, k), *worths, weight.activations


def stacked(weights: Sequence[Quantised]) -> Quantised | None:
    """Join weights that read the same inputs. Return None without weights, or if formats differ."""
    if not weights or not all(_alike(weights[0], other) for other in weights):
        return None
    first = weights[0]
    codes = torch.cat([w.codes.view(torch.uint8) for w in weights]).view(first.codes.dtype)
    offsets = [w.offset_NG for w in weights if w.offset_NG is not None]
    return first._replace(
        codes=codes,
        scale_NG=torch.cat([w.scale_NG for w in weights]),
        offset_NG=torch.cat(offsets) if offsets else None,
    )


JUDGED_AT_ONCE = 2048
"""Number of outputs that a check of a weight packs at once, always into the same memory."""


def problem_of(weight: Quantised) -> str | None:
    """Return the reason that the kernels cannot read a weight [n, k]; None if they can."""
    n, k = weight.shape
    step = min(n, JUDGED_AT_ONCE)
    try:
        _checked(weight, n, k)
        stack = QuantisedStack(1, step, k, weight)
        for start in range(0, n, step):  # the last rows are checked together with some earlier rows
            first = min(start, n - step)
            stack.pack(0, weight.rows(slice(first, first + step)))
    except ValueError as error:
        return str(error)
    return None
