"""Experts of one layer: packed weights, the kernel over ranges of units, and `Mlp` for all rows.

Weights are bf16 as in the model, codes as in a quantised checkpoint (`QuantisedStack`), or int8
Activations and sums are the same for all.
"""

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu.quantised import FormatStruct, QuantisedStack, matrix_of, stacked
from qllm.kernels.quantised import Quantised

INT8_MAX = 127
LEAST_SCALE = 1e-30
"""Scale of a group of zeros; bf16(value * scale) is a normal number."""


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("up_scale", c_void_p),
        ("down_scale", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("num", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("num_inner", c_int64),
        ("column", c_int64),
        ("num_columns", c_int64),
        ("group", c_int64),
        ("up_format", c_void_p),
        ("down_format", c_void_p),
        ("alpha", c_float),
        ("limit", c_float),
        ("slots", c_void_p),
        ("up_at", c_int64),
        ("down_at", c_int64),
        ("up_scale_at", c_int64),
        ("down_scale_at", c_int64),
    )


class Clamp(NamedTuple):
    """The gate of gpt_oss: (up + 1) * gate * sigmoid(alpha * gate), both at most `limit`."""

    alpha: float
    limit: float


class Cut(NamedTuple):
    """The share of a rank in each expert of a layer."""

    inner: range
    """Inner values of the rank."""
    columns: range
    """Outputs of the rank."""

    def of_up(self, rows_N: Tensor) -> Tensor:
        """Return the own rows of [2F, ...], the gate's first."""
        gate, up = (half[self.inner.start : self.inner.stop] for half in rows_N.chunk(2))
        return torch.cat([gate, up])

    def of_down(self, rows_N: Tensor) -> Tensor:
        """Return the own rows of [D, ...]."""
        return rows_N[self.columns.start : self.columns.stop]


class Stack:
    """E weights bf16 [n, k] of one shape, packed one after the other on huge pages."""

    def __init__(self, num: int, n: int, k: int) -> None:
        size = cpu.packed_numel(n, k)
        self.packed = cpu.huge_empty(num * size).view(num, size)
        self.num_bytes = size * 2
        """Bytes of one weight."""

    def pack(self, expert: int, weight_NK: Tensor) -> None:
        """Pack one weight, bf16 [n, k] of any strides."""
        cpu.pack(weight_NK, self.packed[expert])

    def unpack(self, expert: int, out_NK: Tensor) -> None:
        """Write one weight, bit for bit as it was packed."""
        cpu.unpack(self.packed[expert], out_NK)


class Int8Stack:
    """E weights [n, k] of one shape in int8, packed one after the other on huge pages.

    Unpacking and packing again gives the same bits. The largest value of a group is a bf16 number,
    so neither this value nor the scale changes. The other values change by less than half a step.

    Args:
        num: Experts, E.
        n: Outputs.
        k: Inputs, an even number.
        group: Inputs that share a scale, an even number; the last group may be shorter.
    """

    def __init__(self, num: int, n: int, k: int, group: int) -> None:
        self._n, self._k, self._group = n, k, min(group, k)
        size = cpu.packed_numel(n, k)
        self.packed = cpu.huge_empty(num * size // 2).view(torch.int8).view(num, size)
        shape = (num, -(-k // self._group), -(-n // 16) * 16)
        self.scales = torch.zeros(shape, dtype=torch.float32)
        """fp32 [E, groups, outputs]; outputs are padded to a multiple of 16."""
        self.num_bytes = size + shape[1] * shape[2] * 4
        """Bytes of one weight."""

    def pack(self, expert: int, weight_NK: Tensor) -> None:
        """Pack one weight, bf16 [n, k] of any strides, rounded to the nearest int8 * scale.

        Raises:
            ValueError: A value is not finite.
        """
        grouped = F.pad(weight_NK.float(), (0, -self._k % self._group))
        grouped = grouped.view(self._n, -1, self._group)
        scale_NG = self.scales[expert, :, : self._n].t()
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


class _Mlp(ctypes.Structure):
    _fields_ = (("weights", c_void_p), ("gate", c_void_p))


class Formats(NamedTuple):
    """Quantised weights that have the formats of the experts' weights; None is bf16."""

    up: Quantised | None
    down: Quantised | None


BF16 = Formats(None, None)
"""Formats of weights that are not quantised."""


AnyStack = Stack | Int8Stack | QuantisedStack


def _stack(num: int, n: int, k: int, like: Quantised | None) -> Stack | QuantisedStack:
    return Stack(num, n, k) if like is None else QuantisedStack(num, n, k, like)


def _address(format: FormatStruct | None) -> int | None:
    return None if format is None else ctypes.addressof(format)


def _pack(stack: AnyStack, expert: int, weight: Tensor | Quantised) -> None:
    if isinstance(stack, QuantisedStack) != isinstance(weight, Quantised):
        raise ValueError(
            f"a {type(weight).__name__} cannot be packed into a {type(stack).__name__}"
        )
    stack.pack(expert, weight)  # type: ignore[arg-type]


class Experts:
    """The experts of one layer.

    Args:
        num: Number of experts, E.
        width: Inner width of one expert, F.
        hidden: Width of a token, D.
        group: Inputs that share a scale in int8, an even number, 0 for all inputs; None is bf16.
        biases: bf16 [E, 2F] (gate first) and [E, D].
        clamp: The gate; None is SwiGLU.
        formats: Formats of quantised weights; `group` is then None.
        packed: Up and down weights that are packed already; they are shared.
        activations: Dtype of rows that products with `packed` read, "bf16" or "int8".
        cut: Inner values and outputs of the experts here, on a rank that has a share of each. Their
            weights are [2 inner, D] and [outputs, F], and their biases as wide. None is all.
    """

    def __init__(
        self,
        num: int,
        width: int,
        hidden: int,
        group: int | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        clamp: Clamp | None = None,
        formats: Formats = BF16,
        packed: tuple[QuantisedStack, QuantisedStack] | None = None,
        activations: str = "bf16",
        cut: Cut | None = None,
    ) -> None:
        inner, columns = cut or (range(width), range(hidden))
        up, down = (num, 2 * len(inner), hidden), (num, len(columns), width)
        self._biases = biases
        no: tuple[int | None, int | None] = (None, None)
        scaled, biased = no, no
        self._up: AnyStack
        self._down: AnyStack
        if packed is not None:
            self._up, self._down = packed
        elif group is None:
            self._up, self._down = _stack(*up, formats.up), _stack(*down, formats.down)
        else:
            group = group or max(width, hidden)
            self._up, self._down = Int8Stack(*up, group), Int8Stack(*down, group)
            scaled = self._up.scales.data_ptr(), self._down.scales.data_ptr()
        if biases is not None:
            biased = biases[0].data_ptr(), biases[1].data_ptr()
        self.cut_width = 0 if cut is None else width
        """Inner values of an expert if ranks share it; else 0."""
        self.num_bytes = self._up.num_bytes + self._down.num_bytes
        """Bytes of one expert."""
        weights = self._up.packed.data_ptr(), self._down.packed.data_ptr()
        own = inner.start, len(inner), columns.start, len(columns)
        shape = num, width, hidden, *own
        stacks = self._up, self._down
        found = [s.format if isinstance(s, QuantisedStack) else None for s in stacks]
        if packed is not None:
            found = [s.format_for(activations) for s in packed]
        self.formats = found[0], found[1]
        """Formats of up and down; None if they are not quantised."""
        formed = map(_address, found)
        gate = clamp or Clamp(0.0, 0.0)
        self._struct = _Experts(*weights, *scaled, *biased, *shape, group or 0, *formed, *gate)
        self.address = ctypes.addressof(self._struct)

    def place(self, table: int, starts: Mapping[str, int], num: int) -> None:
        """Compute with experts that each have a slot, in place of these packed weights.

        Args:
            table: Address of a `Slot` of kernels.h for each expert. The slot of an expert must be
                set while a unit of the expert runs.
            starts: First byte of each part in a slot, by the names of `parts`.
            num: Number of experts.
        """
        self._struct.slots, self._struct.num = table, num
        for name, start in starts.items():
            setattr(self._struct, f"{name}_at", start)

    def pack(self, expert: int, up: Tensor | Quantised, down: Tensor | Quantised) -> None:
        """Pack one expert's weights, [2F, D] (gate first) and [D, F].

        They are bf16 of any strides, or quantised in the formats of `formats`.
        """
        _pack(self._up, expert, up)
        _pack(self._down, expert, down)

    def unpack(self, expert: int, up: Tensor, down: Tensor) -> None:
        """Write one expert's weights: bf16 bit for bit as packed, others rounded to bf16."""
        self._up.unpack(expert, up)
        self._down.unpack(expert, down)

    def unpack_one(self, expert: int, out_NK: Tensor, *, down: bool) -> None:
        """Write the values of one expert's up or down weight, as `unpack` does."""
        (self._down if down else self._up).unpack(expert, out_NK)

    def parts(self, expert: int) -> dict[str, Tensor]:
        """Return the packed bytes of one expert, uint8 [bytes] that share its memory, by name.

        The names are those of the pointers of `Experts` in kernels.h.
        """
        found = {"up": self._up.packed[expert], "down": self._down.packed[expert]}
        for name, stack in (("up_scale", self._up), ("down_scale", self._down)):
            if isinstance(stack, Int8Stack):
                found[name] = stack.scales[expert]
        return {name: part.view(-1).view(torch.uint8) for name, part in found.items()}

    def run(
        self, x_TD: Tensor, token_S: Tensor, units: int, num_units: int, slots_SD: Tensor
    ) -> None:
        """Compute consecutive units, and write the results to their rows of `slots_SD`.

        `units` is the address of the first unit, which is three numbers: expert, lo and hi.
        """
        cpu.native.experts(
            slots_SD.data_ptr(),
            cpu.dense(x_TD).data_ptr(),
            token_S.data_ptr(),
            units,
            num_units,
            self.address,
        )


def swiglu(h_TF: Tensor) -> Tensor:
    """Return silu(gate) * up of bf16 rows [T, 2F], which contain the gate first."""
    h_TF = cpu.dense(h_TF)
    rows, width = h_TF.shape[0], h_TF.shape[1] // 2
    out = h_TF.new_empty((rows, width))
    cpu.native.swiglu(out.data_ptr(), h_TF.data_ptr(), rows, width)
    return out


def _shape(weight: Tensor | Quantised) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def on_top(gate: Tensor | Quantised, up: Tensor | Quantised) -> Tensor | Quantised:
    """Return both weights as one, quantised if their formats allow it."""
    whole = None
    if isinstance(gate, Quantised) and isinstance(up, Quantised):
        whole = stacked([gate, up])
    if whole is not None:
        return whole
    return torch.cat([w.dequantised() if isinstance(w, Quantised) else w for w in (gate, up)])


class Mlp:
    """A SwiGLU for all rows: shared experts, or a dense layer.

    Args:
        gate_FD: Weights [F, D], in bf16 or quantised.
        up_FD: Weights [F, D], in bf16 or quantised.
        down_DF: Weights [D, F].
        share_1D: Gate weight [1, D]. The sigmoid of its product with a row scales the row's output.
    """

    def __init__(
        self,
        gate_FD: Tensor | Quantised,
        up_FD: Tensor | Quantised,
        down_DF: Tensor | Quantised,
        share_1D: Tensor | Quantised | None = None,
    ) -> None:
        both, formats = on_top(gate_FD, up_FD), []
        for weight in (both, down_DF):
            formats.append(weight if isinstance(weight, Quantised) else None)
        self._experts = Experts(1, *_shape(gate_FD), formats=Formats(*formats))
        self._experts.pack(0, both, down_DF)
        self._share = None if share_1D is None else matrix_of([share_1D])
        share = None if self._share is None else self._share.address
        self._struct = _Mlp(self._experts.address, share)
        self.address = ctypes.addressof(self._struct)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the MLP's output for bf16 rows."""
        x_TD = cpu.dense(x_TD)
        out = torch.empty_like(x_TD)
        cpu.native.mlp(out.data_ptr(), x_TD.data_ptr(), self.address, len(x_TD))
        return out
