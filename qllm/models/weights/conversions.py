"""Conversions of quantised weights, in which no value changes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.layout import Weight, uncentred


def expanded(name: str, weight: Weight) -> Tensor:
    """Return the values of a weight.

    Args:
        name: Name of the weight in its checkpoint.
        weight: The weight, or its values.

    Raises:
        ModelError: A value is not finite.
    """
    value = weight.dequantised() if isinstance(weight, Quantised) else weight
    if not value.isfinite().all():
        raise ModelError(f"{name} has codes or scales that are not finite; download it again")
    return value


def alike(weights: Sequence[Weight]) -> list[Quantised] | None:
    """Return weights with scales and offsets of one dtype; None if codes, groups or inputs differ.

    No value changes: scales become fp32 if some are, and a missing offset becomes zero.
    """
    found = [one for one in weights if isinstance(one, Quantised)]
    if {one.code for one in found} == {"u4", "i4"}:
        found = [uncentred(one) for one in found]
    kinds = {(one.code, one.group, one.codes.shape[-1]) for one in found}
    if len(found) != len(weights) or len(kinds) != 1:
        return None
    both = [t for one in found for t in (one.scale_NG, one.offset_NG) if t is not None]
    dtypes, has_offset = {t.dtype for t in both}, any(one.offset_NG is not None for one in found)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return [_with_dtype(one, dtype, has_offset) for one in found]


def _with_dtype(one: Quantised, dtype: torch.dtype, has_offset: bool) -> Quantised:
    offset = one.offset_NG
    if offset is None and has_offset:
        offset = torch.zeros_like(one.scale_NG)
    return one._replace(
        scale_NG=one.scale_NG.to(dtype), offset_NG=None if offset is None else offset.to(dtype)
    )
