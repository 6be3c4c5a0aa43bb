"""Gated DeltaNet: a short convolution, the recurrence of every head, and its gated norm."""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from qllm.kernels.cpu import Matrix, dense, native
from qllm.kernels.cpu.norms import Norm, NormStruct

HEAD_MULTIPLE = 16
"""Divisor of the widths of heads."""
SPAN_BYTES = 56
"""Bytes of a `DeltaSpan` in kernels.h."""


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
    """Destination of the state after the tokens. It is never the same object as `before`."""
    at: int
    num: int
    inputs: Tensor | None = None
    """Copy of the rows of the tokens, [num, width], to be written for `DeltaNet.carry`."""


class DeltaSpans:
    """Spans in the layout of the kernels: 7 integers each (`DeltaSpan` in kernels/cpu/kernels.h).

    The caller keeps the states of the spans alive.

    Args:
        rounds: Groups of spans that run together, one group after the other.
    """

    def __init__(self, rounds: Sequence[Sequence[DeltaSpan]]) -> None:
        self._nums, self._values = array("q", map(len, rounds)), array("q")
        for before, after, at, num, inputs in (span for spans in rounds for span in spans):
            read = (0, 0) if before is None else _addresses(before)
            kept = 0 if inputs is None else inputs.data_ptr()
            self._values.extend((*read, *_addresses(after), at, num, kept))
        self.address = self._values.buffer_info()[0]
        self.round_nums, self.num_rounds = self._nums.buffer_info()
        """Address and length of the numbers of spans per round."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the address and the number of spans of each round."""
        address = self.address
        for num in self._nums:
            yield address, num
            address += num * SPAN_BYTES


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
        self.into, self.out, self._norm = into, out, norm
        given = (conv_CK.detach().t(), rate_V.detach(), step_bias_V.detach())
        self._keep = [x.float().contiguous().clone() for x in given]
        self._channels, self._taps = conv_CK.shape
        self._heads = (rate_V.numel(), key, norm.width)
        addresses = (x.data_ptr() for x in self._keep)
        self._struct = DeltaStruct(
            k_heads, rate_V.numel(), key, norm.width, self._taps, *addresses, norm.struct
        )
        self.address = ctypes.addressof(self._struct)

    def new_state(self) -> DeltaState:
        """Return an uninitialised state, to be written."""
        conv = torch.empty((self._channels, self._taps), dtype=torch.bfloat16)
        return DeltaState(conv, torch.empty(self._heads, dtype=torch.float32))

    def __call__(self, x_TD: Tensor, spans: DeltaSpans, num_covered: int) -> Tensor:
        """Return the output [T, D] of bf16 tokens [T, D], with zeros for tokens outside of spans.

        Args:
            x_TD: Tokens.
            spans: States of the tokens.
            num_covered: Number of tokens in all spans.
        """
        mixed = self.into.linear(x_TD)
        make = torch.empty if num_covered == len(x_TD) else torch.zeros
        out = make((len(x_TD), self.out.num_in), dtype=torch.bfloat16)
        for address, num in spans:
            native.delta(out.data_ptr(), mixed.data_ptr(), self.address, address, num)
        return self.out.linear(dense(out))

    def carry(self, before: DeltaState, inputs_TW: Tensor, after: DeltaState) -> None:
        """Compute the state after tokens from the inputs that an earlier call has copied."""
        num = len(inputs_TW)
        out = torch.empty((num, self.out.num_in), dtype=torch.bfloat16)
        for address, num_spans in DeltaSpans([[DeltaSpan(before, after, 0, num)]]):
            native.delta(out.data_ptr(), inputs_TW.data_ptr(), self.address, address, num_spans)


def _addresses(state: DeltaState) -> tuple[int, int]:
    return state.conv.data_ptr(), state.heads.data_ptr()
