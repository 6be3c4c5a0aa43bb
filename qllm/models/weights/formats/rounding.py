"""Rounding of bf16 weights to 4 bits while they are loaded: to the nearest value, not calibrated.

int4    64 inputs have a bf16 scale and offset: 16 values from the smallest weight to the largest
mxfp4   32 inputs have a power of two, 4-bit floats: the conversion of the OCP microscaling
        specification 1.0 (section 6.3)
"""

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels.quantised import AT_ONCE, E2M1, Quantised
from qllm.models.weights.formats.layout import blocked, pairs, power_of_two

INT4_GROUP, MXFP4_GROUP = 64, 32
INT4_MAX = 15
E2M1_EXPONENT = 2
"""Exponent of the largest 4-bit float."""
BIAS = 127
LEAST_EXPONENT = -100
"""Exponent of the power of two of a group whose values are zero or nearly zero."""


def int4(weight: Tensor) -> Quantised:
    """Round bf16 [n, k] or a stack [E, n, k] of any strides."""
    return _in_parts(weight, _int4)


def _int4(weight_NK: Tensor) -> Quantised:
    k = weight_NK.shape[-1]
    group = min(INT4_GROUP, k)
    grouped = _grouped(weight_NK, group, "replicate")
    least, most = grouped.amin(-1), grouped.amax(-1)
    scale, offset = ((most - least) / INT4_MAX).bfloat16(), least.bfloat16()
    step = torch.where(scale == 0, 1.0, scale.float()).unsqueeze(-1)
    codes = ((grouped - offset.float().unsqueeze(-1)) / step).round().clamp(0, INT4_MAX)
    return Quantised("u4", _packed(codes, k), scale, offset, group)


def mxfp4(weight: Tensor) -> Quantised:
    """Round in the same way. Values above the largest 4-bit float become that float."""
    return _in_parts(weight, _mxfp4)


def _mxfp4(weight_NK: Tensor) -> Quantised:
    k = weight_NK.shape[-1]
    group = min(MXFP4_GROUP, k)
    grouped = _grouped(weight_NK, group, "zero")
    exponent = torch.frexp(grouped.abs().amax(-1)).exponent - 1 - E2M1_EXPONENT
    scale = power_of_two(exponent.clamp(min=LEAST_EXPONENT) + BIAS)
    size = (grouped.abs() / scale.float().unsqueeze(-1)).contiguous()
    codes = _nearest(size) + 8 * (grouped < 0)
    return Quantised("e2m1", _packed(codes, k), scale, None, group)


ROUNDINGS: dict[str, Callable[[Tensor], Quantised]] = {"int4": int4, "mxfp4": mxfp4}
"""Rounding function for each value of `expert_weights` that rounds while a model loads."""


INT8_GROUPS = {"int8": 0, "int8-g64": 64}
"""Number of inputs per scale in int8, by `expert_weights`; 0 is all inputs."""
BITS = {"int4": 4 + 32 / INT4_GROUP, "mxfp4": 4 + 16 / MXFP4_GROUP, "int8": 8, "int8-g64": 8.5}
"""Bits of a weight in memory, by value of `expert_weights`."""


def _in_parts(weight: Tensor, rounded: Callable[[Tensor], Quantised]) -> Quantised:
    """Round some outputs at a time: temporary values take 18 times their memory."""
    *stack, n, k = weight.shape
    like = rounded(weight.new_zeros((1, k), dtype=torch.bfloat16))

    def room(one: Tensor) -> Tensor:
        return one.new_empty((*stack, n, one.shape[1]))

    offset = None if like.offset_NG is None else room(like.offset_NG)
    whole = like._replace(codes=room(like.codes), scale_NG=room(like.scale_NG), offset_NG=offset)
    step = max(1, AT_ONCE // k)
    for *expert, start in product(*map(range, stack), range(0, n, step)):
        at: tuple[int | slice, ...] = (*expert, slice(start, start + step))
        found = rounded(weight[at].bfloat16())
        whole.codes[at], whole.scale_NG[at] = found.codes, found.scale_NG
        if whole.offset_NG is not None and found.offset_NG is not None:
            whole.offset_NG[at] = found.offset_NG
    return whole


def _grouped(weight_NK: Tensor, group: int, fill: str) -> Tensor:
    """Return fp32 [..., n, groups, group]. A shorter last group is padded."""
    if not weight_NK.isfinite().all():
        raise ModelError("weights that are not finite cannot be rounded to 4 bits")
    more = -weight_NK.shape[-1] % group
    if more and fill == "replicate":
        last = weight_NK[..., -1:].expand(*weight_NK.shape[:-1], more)
        weight_NK = torch.cat((weight_NK, last), dim=-1)
    elif more:
        weight_NK = F.pad(weight_NK, (0, more))
    return blocked(weight_NK.float(), -1, group)


def _packed(codes: Tensor, k: int) -> Tensor:
    return pairs(codes.flatten(-2)[..., :k].to(torch.uint8))


def _nearest(size: Tensor) -> Tensor:
    """Return the nearest of the eight sizes, or between two of them the one with an even code."""
    sizes = torch.tensor(E2M1[:8], dtype=torch.float32, device=size.device)
    middles = (sizes[1:] + sizes[:-1]) / 2
    low, high = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    return torch.where(low % 2 == 0, low, high)
