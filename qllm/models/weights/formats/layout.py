"""Descriptions of formats: the tensors that form one weight, and their reader."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels.quantised import I4_ZERO, Code, Quantised

Settings = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""
Parts = Mapping[str, Tensor]
"""The tensors of one weight, by the end of their names."""
SCALES = ("F32", "F16", "BF16")
"""Dtypes of scales, as safetensors spells them."""
WHOLE = ("I32", "I64")
"""Dtypes of integers: shapes, and the group of each input."""
Weight = Quantised | Tensor
"""A weight [n, k] or a stack [E, n, k]. It is bf16 if its codes have no groups of consecutive
inputs.
"""


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """Dtype as safetensors spells it: BF16, F8_E4M3."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of one weight: their names are the weight's stem and an end."""

    codes: str
    """End of the name of the codes."""
    needs: tuple[str, ...]
    """Ends of the names of further required tensors."""
    may_have: tuple[str, ...] = ()
    dtypes: tuple[str, ...]
    """Dtypes of the codes: a tensor of another dtype is a plain weight."""
    other_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dtypes of other tensors by the end of their names. Tensors that are not listed have
    SCALES."""
    weight: str = ".weight"
    """End of the name of an unquantised weight."""
    read: Callable[[Parts], Weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The layout of weights in the checkpoints of one method."""

    name: str
    layouts: tuple[Layout, ...]
    bits: float
    """Bits of a weight in memory, including its share of scales and offsets."""
    unused: tuple[str, ...] = ()
    """Ends of the names of ignored tensors, which describe quantised activations."""

    def weights(
        self, tensors: Mapping[str, Stored]
    ) -> Iterator[tuple[str, Layout, dict[str, str]]]:
        """Yield name, layout, and tensors by the end of their names, of every quantised weight.

        Raises:
            ModelError: Codes lack a tensor that belongs to them, or that tensor has another dtype.
        """
        for layout in self.layouts:
            ends = tuple(dict.fromkeys((layout.codes, *layout.needs, *layout.may_have)))
            for key, stored in tensors.items():
                if not key.endswith(layout.codes) or stored.dtype not in layout.dtypes:
                    continue
                stem = key.removesuffix(layout.codes)
                if stem.endswith(layout.needs) or key.endswith(self.unused):
                    continue
                missing = [end for end in layout.needs if stem + end not in tensors]
                if missing:
                    raise ModelError(
                        f"{key} ({stored.dtype}) is there without {stem}{missing[0]}, which "
                        f"{self.name} has beside it; download the checkpoint again"
                    )
                parts = {end: stem + end for end in ends if stem + end in tensors}
                self._check_dtypes(layout, parts, tensors)
                yield stem + layout.weight, layout, parts

    def _check_dtypes(
        self, layout: Layout, parts: Mapping[str, str], tensors: Mapping[str, Stored]
    ) -> None:
        for end, name in parts.items():
            found, allowed = tensors[name].dtype, layout.other_dtypes.get(end, SCALES)
            if end != layout.codes:
                check(
                    found in allowed,
                    f"{name} is {found}; {self.name} has {', '.join(allowed)} there: download the "
                    "checkpoint again",
                )


PLAIN = Format(name="plain", layouts=(), bits=16)
"""The format of checkpoints without quantised weights."""


def check(is_right: bool, what: str) -> None:
    """Raise a ModelError with this text unless a checkpoint is right."""
    if not is_right:
        raise ModelError(what)


def cdiv(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def check_order(of_input: Tensor, k: int, groups: int) -> None:
    """Raise a ModelError unless each of k inputs belongs to one of `groups` groups."""
    is_right = of_input.shape == (k,) and bool(((of_input >= 0) & (of_input < groups)).all())
    check(
        is_right,
        f"g_idx of shape {tuple(of_input.shape)} does not name one of {groups} groups for each "
        f"of {k} inputs",
    )


def check_scales(weight: Quantised) -> None:
    """Raise a ValueError unless every group of inputs has a scale, and an offset if any has."""
    _, k = weight.shape
    wanted = (*weight.codes.shape[:-1], cdiv(k, weight.group))
    for found in (weight.scale_NG, weight.offset_NG):
        if found is not None and found.shape != wanted:
            raise ValueError(f"scales or zeros of shape {tuple(found.shape)} for {wanted} groups")


def power_of_two(biased: Tensor) -> Tensor:
    """Return bf16 2^(exponent - 127), exactly, of exponents 0 to 254 of any integer dtype."""
    bits = biased.to(torch.int16) << 7
    return torch.where(bits == 0, 1 << 6, bits).to(torch.int16).view(torch.bfloat16)


def blocked(tensor: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension into several."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def nibbles(packed: Tensor) -> Tensor:
    """Return halves of bytes, the low one first: [..., m] -> uint8 [..., 2m]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pairs(codes: Tensor) -> Tensor:
    """Pack codes below 16, uint8 [..., k], into bytes [..., k / 2], the low half first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def shifted(code: Code, codes: Tensor, scale: Tensor, zero: Tensor | int, group: int) -> Quantised:
    """Return a weight of scale * (code - zero), exactly: in fp32 if the product needs more bits."""
    is_centred = zero == I4_ZERO
    if code == "u4" and (is_centred if isinstance(is_centred, bool) else bool(is_centred.all())):
        return Quantised("i4", codes, scale.contiguous(), None, group)
    return _with_offset(code, codes, scale, zero, group)


def uncentred(weight: Quantised) -> Quantised:
    """Return the same values with codes of "u4" instead of "i4"."""
    if weight.code != "i4":
        return weight
    return _with_offset("u4", weight.codes, weight.scale_NG, I4_ZERO, weight.group)


def _with_offset(
    code: Code, codes: Tensor, scale: Tensor, zero: Tensor | int, group: int
) -> Quantised:
    offset = -scale.float() * zero
    narrow = offset.to(scale.dtype)
    if not torch.equal(narrow.float(), offset):
        scale, narrow = scale.float(), offset
    return Quantised(code, codes, scale.contiguous(), narrow.contiguous(), group)


def signed(unsigned: Tensor) -> Tensor:
    """Return codes 0 to 255 minus 128, as int8."""
    return (unsigned ^ 128).view(torch.int8)
