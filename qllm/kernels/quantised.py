"""Quantised weights in the layout of checkpoints, and the one definition of their values.

A weight is bf16(scale * code + offset): computed in fp32, rounded once to the nearest bf16 (ties to
even). Every kernel gives, bit for bit, the result of the bf16 kernel on these values.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Code = Literal["u4", "i4", "e2m1", "i8", "e4m3"]
"""Values of a code: 0 to 15, -8 to 7 (stored as 0 to 15), the 4-bit floats of MXFP4, -128 to 127,
or FP8's e4m3fn."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats by code, as in the OCP microscaling specification."""
INTEGERS = ("u4", "i4", "i8")
"""Codes that products with rounded rows can read."""
FOUR_BIT = ("u4", "i4", "e2m1")
I4_ZERO = 8
"""Code of "i4" that has the value 0."""
AT_ONCE = 1 << 19
"""Values that are dequantised at once; the intermediate values are fp32."""


class Quantised(NamedTuple):
    """One weight [n, k]: n outputs, k inputs."""

    code: Code
    codes: Tensor
    """uint8 [n, k / 2], where the low half of a byte is the even input; int8 [n, k] for "i8";
    float8_e4m3fn [n, k] for "e4m3"."""
    scale_NG: Tensor
    """fp32, fp16 or bf16 [n, k / group]; the last group may be shorter."""
    offset_NG: Tensor | None
    """Offsets with the shape and dtype of the scales; None is zero."""
    group: int
    """Inputs that share a scale."""
    activations: str = "bf16"
    """Dtype of the rows that a product reads: "bf16", or "int8" if codes are integers
    (`qllm/kernels/rounded.py`)."""

    @property
    def kind(self) -> str:
        """Codes and group, and the rows that products read if not bf16, as text: "i4 g32"."""
        rows = "" if self.activations == "bf16" else f" on {self.activations} rows"
        return f"{self.code} g{self.group}{rows}"

    def reading(self, activations: str) -> "Quantised":
        """Return the weight with other activations for its products, if the codes are integers."""
        return self._replace(activations=activations if self.code in INTEGERS else "bf16")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs n and inputs k."""
        *_, n, k = self.codes.shape
        return n, k * 2 if self.code in FOUR_BIT else k

    def one(self, index: int) -> "Quantised":
        """Return one weight of a stack."""
        offset = None if self.offset_NG is None else self.offset_NG[index]
        return self._replace(
            codes=self.codes[index], scale_NG=self.scale_NG[index], offset_NG=offset
        )

    def rows(self, which: slice | Tensor) -> "Quantised":
        """Return the weight of some of the outputs."""
        offset = None if self.offset_NG is None else self.offset_NG[which]
        codes = self.codes.view(torch.uint8)[which].view(self.codes.dtype)
        return self._replace(codes=codes, scale_NG=self.scale_NG[which], offset_NG=offset)

    def dequantised(self) -> Tensor:
        """Return the values, bf16 [n, k]."""
        n, k = self.shape
        if self.codes.dim() > 2 or n * k <= AT_ONCE:
            return self._values()
        out = torch.empty((n, k), dtype=torch.bfloat16, device=self.codes.device)
        step = max(1, AT_ONCE // k)
        for start in range(0, n, step):
            some = slice(start, start + step)
            out[some] = self.rows(some)._values()
        return out

    def _values(self) -> Tensor:
        codes = self.codes
        if self.code in FOUR_BIT:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
            if self.code == "e2m1":
                codes = torch.tensor(E2M1, device=codes.device, dtype=torch.float32)[codes.long()]
        value = codes.float()
        if self.code == "i4":
            value -= I4_ZERO
        _each(value, self.scale_NG, self.group, Tensor.mul_)
        if self.offset_NG is not None:
            _each(value, self.offset_NG, self.group, Tensor.add_)
        elif self.code == "i4":
            value += 0.0  # no weight is -0
        return value.bfloat16()


def _each(value: Tensor, per_group: Tensor, group: int, change: Callable[..., Tensor]) -> None:
    """Apply `change` to every input with the value of its group."""
    k, worth = value.shape[-1], per_group.float()
    if k % group == 0:
        change(value.view(*value.shape[:-1], -1, group), worth.unsqueeze(-1))
    else:
        change(value, worth.repeat_interleave(group, -1)[..., :k])
