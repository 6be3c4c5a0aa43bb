"""Activations rounded to int8, and the one definition of products with them.

A row of inputs is cut into runs: a group of the weight, or 128 inputs of a longer group. Each run
has its own scale, its largest absolute value over 127. So one large value costs the precision of
its run alone. The sum of products of a run is below 2^24, where fp32 holds every whole number. With
integer codes,

    q = round(x * (127 / largest))        to the nearest, ties to even
    sum += (float(sum of q * code) * (largest / 127)) * scale
    sum += ((largest / 127) * float(sum of q)) * offset

over the runs in order, every step in fp32. Then the bias is added, and the sum is rounded to bf16
once. Weights have the values of their codes, and are never rounded to bf16. A row depends on no
other row, and a sum of whole numbers on no order. So the kernels of every instruction set give the
same bits as this module.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qllm.kernels.quantised import FOUR_BIT, I4_ZERO, INTEGERS, Quantised

MOST_INPUTS = 128
"""Inputs of the longest run."""
LEAST = 2.0**-100
"""A run whose largest absolute value is below this counts as zeros."""
LARGEST = 127


class Rounded(NamedTuple):
    """Rows [t, k] in int8, with their scales."""

    q_TK: Tensor
    """int8 [t, k]."""
    scale_TR: Tensor
    """fp32 [t, runs]; NaN if a value of the run is not finite, and `q_TK` is 0 there."""

    def values(self, group: int) -> Tensor:
        """Return the values that the rows represent, fp32 [t, k]."""
        parts = [
            self.q_TK[:, lo:hi].float() * self.scale_TR[:, r : r + 1]
            for r, (lo, hi) in enumerate(runs(self.q_TK.shape[1], group))
        ]
        return torch.cat(parts, 1)


def runs(k: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield the first input and the end of every run of k inputs."""
    group = min(group, k)
    for begin in range(0, k, group):
        end = min(k, begin + group)
        for lo in range(begin, end, MOST_INPUTS):
            yield lo, min(end, lo + MOST_INPUTS)


def rounded(x_TK: Tensor, group: int) -> Rounded:
    """Round rows, for a weight with groups of this many inputs."""
    x, largest_int = x_TK.float(), torch.tensor(LARGEST, dtype=torch.float32)
    q_TK, scales = torch.zeros(x.shape, dtype=torch.int8), []
    for lo, hi in runs(x.shape[1], group):
        part = x[:, lo:hi]
        largest_T = part.abs().amax(1)
        good_T = largest_T.isfinite() & (largest_T >= LEAST)
        by_T = torch.where(good_T, largest_int / largest_T, 0.0)
        near = torch.where(good_T.unsqueeze(1), part * by_T.unsqueeze(1), 0.0).round()
        q_TK[:, lo:hi] = near.to(torch.int8)
        scale_T = torch.where(good_T, largest_T / largest_int, 0.0)
        scales.append(torch.where(part.isfinite().all(1), scale_T, torch.nan))
    return Rounded(q_TK, torch.stack(scales, 1))


def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of rounded rows.

    Args:
        x: bf16 [..., k].
        weight: Weight [n, k] with integer codes.
        bias: bf16 [n].

    Raises:
        ValueError: The codes are no integers.
    """
    if weight.code not in INTEGERS:
        raise ValueError(
            f"codes {weight.code!r} are no integers; activations in int8 are for "
            f"{', '.join(INTEGERS)}: leave activations at 'bf16'"
        )
    flat = x.reshape(-1, x.shape[-1])
    q_TK, scale_TR = rounded(flat, weight.group)
    codes_NK = _codes(weight)
    sum_TN = torch.zeros((len(flat), weight.shape[0]), dtype=torch.float32)
    group = min(weight.group, flat.shape[1])
    for r, (lo, hi) in enumerate(runs(flat.shape[1], group)):
        q, worth_T1 = q_TK[:, lo:hi].float(), scale_TR[:, r : r + 1]
        whole = q @ codes_NK[:, lo:hi].t()  # below 2^24: exact in any order
        sum_TN = sum_TN + (whole * worth_T1) * weight.scale_NG[:, lo // group].float()
        if weight.offset_NG is not None:
            share_T1 = worth_T1 * q.sum(1, keepdim=True)
            sum_TN = sum_TN + share_T1 * weight.offset_NG[:, lo // group].float()
    if bias is not None:
        sum_TN = sum_TN + bias.float()
    return sum_TN.bfloat16().view(*x.shape[:-1], -1)


def _codes(weight: Quantised) -> Tensor:
    """Return the codes as fp32 [n, k]."""
    codes = weight.codes
    if weight.code in FOUR_BIT:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return codes.float() - I4_ZERO if weight.code == "i4" else codes.float()
