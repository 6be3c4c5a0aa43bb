"""Gated DeltaNet: a short convolution, the recurrence of every head, and its gated norm."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from qllm.kernels.cpu import Matrix, dense, native
from qllm.kernels.cpu.norms import Norm, NormStruct

HEAD_MULTIPLE = 16
"""Divisor of the widths of heads."""


class DeltaStruct(ctypes.Structure):
    """`DeltaNet` in kernels.h."""

    _fields_ = (
        ("k_heads", c_int64),
        ("v_heads", c_int64),
        ("key", c_int64),
        ("value", c_int64),
        ("taps", c_int64),
        ("conv", c_void_p),
        ("rate", c_void_p),
        ("step_bias", c_void_p),
        ("norm", NormStruct),
    )


class DeltaState(NamedTuple):
    """The state that a layer carries from one token of a request to the next."""

    conv: Tensor
    """bf16 [channels, taps]: the last inputs of the convolution."""
    heads: Tensor
    """fp32 [v_heads, key, value]"""


class DeltaSpan(NamedTuple):
    """Tokens [at, at + num) of a call, all of one request."""

    before: DeltaState | None
    """State before the tokens; None is all zeros."""
    after: DeltaState
    """Destination of the state after the tokens. It may be the same object as `before`."""
    at: int
    num: int


class DeltaNet:
    """Gated DeltaNet of one layer. The bits of a token do not depend on where spans end.

    Args:
        into: Weight that projects [D] to q, k [k_heads, key], v, z [v_heads, value], b and a
            [v_heads].
        out: Weight that projects [v_heads * value] back.
        conv_CK: Weights of the causal convolution over the channels of q, k and v; copied.
        rate_V: Rate of a head's decay per token, exp(rate * softplus(a + step_bias)); copied.
        step_bias_V: Bias in the decay's formula; copied.
        norm: RMS norm of a head's values, which silu(z) scales.
        k_heads: Heads of q and k.
        key: Width of heads of q and k, a multiple of HEAD_MULTIPLE; the norm has the width of v.
    """

    def __init__(
        self,
        into: Matrix,
        out: Matrix,
        conv_CK: Tensor,
        rate_V: Tensor,
        step_bias_V: Tensor,
        norm: Norm,
        *,
        k_heads: int,
        key: int,
    ) -> None:
        self._into, self._out, self._norm = into, out, norm
        given = (conv_CK.detach().t(), rate_V.detach(), step_bias_V.detach())
        self._keep = [x.float().contiguous().clone() for x in given]
        self._channels, self._taps = conv_CK.shape
        self._heads = (rate_V.numel(), key, norm.width)
        addresses = (x.data_ptr() for x in self._keep)
        self._struct = DeltaStruct(
            k_heads, rate_V.numel(), key, norm.width, self._taps, *addresses, norm.struct
        )

    def new_state(self) -> DeltaState:
        """Return an uninitialised state, to be written."""
        conv = torch.empty((self._channels, self._taps), dtype=torch.bfloat16)
        return DeltaState(conv, torch.empty(self._heads, dtype=torch.float32))

    def __call__(
        self, x_TD: Tensor, rounds: Iterable[Sequence[DeltaSpan]], num_covered: int
    ) -> Tensor:
        """Return the output [T, D] of bf16 tokens [T, D], with zeros for tokens outside of spans.

        Args:
            x_TD: Tokens.
            rounds: Groups of spans that run together. The next group is requested after the states
                of the group before are written.
            num_covered: Number of tokens in all spans.
        """
        mixed = self._into.linear(x_TD)
        make = torch.empty if num_covered == len(x_TD) else torch.zeros
        out = make((len(x_TD), self._out.num_in), dtype=torch.bfloat16)
        layer = ctypes.addressof(self._struct)
        for spans in rounds:
            values = array("q")
            for before, after, at, num in spans:
                read = (0, 0) if before is None else _addresses(before)
                values.extend((*read, *_addresses(after), at, num))
            address = values.buffer_info()[0]
            native.delta(out.data_ptr(), mixed.data_ptr(), layer, address, len(spans))
        return self._out.linear(dense(out))


def _addresses(state: DeltaState) -> tuple[int, int]:
    return state.conv.data_ptr(), state.heads.data_ptr()
