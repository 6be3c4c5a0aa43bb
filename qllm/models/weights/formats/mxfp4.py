"""MXFP4, as gpt-oss is published: 4-bit floats, and a power of two for 32 inputs.

    <stem>_blocks   uint8 [E, n, k / 32, 16]: a byte is two inputs, the low half the first
    <stem>_scales   uint8 [E, n, k / 32]: exponent + 127

Source: the OCP microscaling specification 1.0; transformers, `integrations/mxfp4.py`. Every value
is a bf16 number: nothing is rounded.
"""

import torch

from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.layout import Format, Layout, Parts, Settings, check, power_of_two

GROUP = 32
NOT_A_NUMBER = 255
"""The exponent that stands for NaN."""
BIAS = 127
LEAST = BIAS - 100
"""Smallest exponent that the kernels accept. Quantisers give groups of zeros a smaller one. This is
harmless, because zeros are the same with any exponent.
"""
SIZES = 0x77
"""Bits of two inputs without their signs."""


def read(parts: Parts) -> Quantised:
    """Read a stack of weights, with outputs in the order of the checkpoint as rows."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    check(
        blocks.shape[-1] == GROUP // 2 and blocks.shape[:-1] == scales.shape,
        f"MXFP4 blocks of shape {tuple(blocks.shape)} do not fit scales of {tuple(scales.shape)}",
    )
    check(not bool((scales == NOT_A_NUMBER).any()), "MXFP4 scales have a NaN (exponent 255)")
    if bool((scales < LEAST).any()):
        is_empty = ((blocks & SIZES) == 0).all(-1)
        scales = torch.where(is_empty, BIAS, scales)
    return Quantised("e2m1", blocks.flatten(-2), power_of_two(scales), None, GROUP)


def mxfp4(_: Settings) -> Format:
    """Return the format, which has no settings."""
    layout = Layout(
        codes="_blocks",
        needs=("_scales",),
        dtypes=("U8",),
        other_dtypes={"_scales": ("U8",)},
        weight="",
        read=read,
    )
    return Format(name="mxfp4", layouts=(layout,), bits=4 + 16 / GROUP)
