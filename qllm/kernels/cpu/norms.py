"""Norms of rows: the usual RMS norm, an RMS norm that rounds once, and layer norm."""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from qllm.kernels.cpu import Blank, dense, native

KINDS = ("rms", "rms_wide", "layer")
"""`NormKind` in kernels.h: rounded before the weight, rounded once, with mean and bias."""


class NormStruct(ctypes.Structure):
    """`Norm` in kernels.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("kind", c_int64), ("eps", c_float))


class Norm:
    """A norm of bf16 rows.

    Args:
        weight_D: Weight, which is copied.
        eps: Number added to the mean of squares.
        kind: One of KINDS.
        bias_D: Bias of a layer norm, which is copied.
    """

    def __init__(
        self, weight_D: Tensor, eps: float, kind: str = "rms", bias_D: Tensor | None = None
    ) -> None:
        self.width = weight_D.numel()
        given = (weight_D, bias_D)
        self._keep = [None if x is None else _filled(x) for x in given]
        weight, bias = [None if x is None else x.data_ptr() for x in self._keep]
        self._blank = Blank(self.width, torch.bfloat16)
        self.struct = NormStruct(weight, bias, KINDS.index(kind), eps)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the normed rows."""
        x_TD = dense(x_TD)
        rows = x_TD.numel() // self.width
        out = self._blank.take(rows)
        address = ctypes.addressof(self.struct)
        native.norm(out.data_ptr(), x_TD.data_ptr(), address, rows, self.width)
        return out if x_TD.dim() == 2 else out.view(x_TD.shape)


def _filled(x_D: Tensor) -> Tensor:
    """Return a copy in fp32, padded with zeros to a multiple of 16."""
    return F.pad(x_D.detach().float(), (0, -x_D.numel() % 16)).clone()
