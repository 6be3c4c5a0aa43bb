"""GGUF, as llama.cpp writes it: blocks of codes with their scales, one tensor per weight.

    Q4_0, Q4_1, Q8_0     32 inputs: an fp16 scale, and a minimum in Q4_1
    Q4_K, Q5_K           256 inputs: an fp16 scale and minimum, and 6 bits of each for 32 inputs
    Q6_K                 256 inputs: an fp16 scale, and 8 bits for 16 inputs

Values are computed in fp32 as the package gguf does (`gguf/quants.py`), and rounded to bf16 once.
Codes of 5 and 6 bits become int8. Two levels of scales become one level in fp32. Bits per weight
in memory:

    Q4_0 4.5    Q4_1 5    Q4_K 6    Q8_0 8.5    Q5_K 10    Q6_K 10
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.layout import blocked, pairs, shifted

SMALL = 32
"""Inputs of a block of the formats with one level of scales. K-quants have 256."""


def q4_0(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 18 bytes, uint8 [..., n, blocks, 18]."""
    return shifted("u4", _halves(blocks[..., 2:]), _fp16(blocks, 0), 8, SMALL)


def q4_1(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 20 bytes, uint8 [..., n, blocks, 20]."""
    return Quantised("u4", _halves(blocks[..., 4:]), _fp16(blocks, 0), _fp16(blocks, 2), SMALL)


def q8_0(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 34 bytes, uint8 [..., n, blocks, 34]."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(-2)
    return Quantised("i8", codes, _fp16(blocks, 0), None, SMALL)


def q4_k(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 144 bytes, uint8 [..., n, blocks, 144]."""
    codes = _k_nibbles(blocks[..., 16:], 32)
    return Quantised("u4", pairs(codes.flatten(-2)), *_k_scales(blocks), 32)


def q5_k(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 176 bytes, uint8 [..., n, blocks, 176]."""
    low = _k_nibbles(blocks[..., 48:], 32)
    high = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    codes = low | high.flatten(-2) << 4
    return Quantised("i8", codes.view(torch.int8).flatten(-2), *_k_scales(blocks), 32)


def q6_k(blocks: Tensor) -> Quantised:
    """Return the weight in blocks of 210 bytes, uint8 [..., n, blocks, 210]."""
    low = _k_nibbles(blocks[..., :128], 64)
    quarters = blocked(blocks[..., 128:192], 2, 1, 32)
    high = quarters >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3
    codes = (low | high.flatten(-3) << 4).view(torch.int8) - 32
    sixteenth = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scale = _fp16(blocks, 208).float().unsqueeze(-1) * sixteenth
    return Quantised("i8", codes.flatten(-2), scale.flatten(-2), None, 16)


READERS: dict[str, tuple[int, Callable[[Tensor], Quantised]]] = {
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q8_0": (34, q8_0),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
}
"""Bytes of a block, and its reader, by type of tensor."""
BITS = {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5, "Q4_K": 6.0, "Q5_K": 10.0, "Q6_K": 10.0}
"""Bits of a weight in memory, by type of tensor."""
PLAIN = ("F32", "F16", "BF16")
"""Types without blocks."""


def read(kind: str, data: Tensor) -> Quantised:
    """Read a weight of uint8 [..., n, bytes of a row]."""
    size, reader = READERS[kind]
    return reader(blocked(data, -1, size))


def _fp16(blocks: Tensor, start: int) -> Tensor:
    """Return one fp16 number per block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _halves(packed: Tensor) -> Tensor:
    """Return packed codes of blocks whose first half is in the low halves of their bytes."""
    return pairs(torch.cat((packed & 15, packed >> 4), dim=-1).flatten(-2))


def _k_nibbles(packed: Tensor, width: int) -> Tensor:
    """Return low and then high halves of `width` bytes at a time: [..., m] -> [..., 2m]."""
    parts = blocked(packed, -1, width)
    return torch.cat((parts & 15, parts >> 4), dim=-1).flatten(-2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 scales and offsets of the eight groups of 32, [..., n, groups]."""
    first, second, rest = blocked(blocks[..., 4:16], 3, 4).unbind(-2)
    scale = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=-1)
    least = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=-1)
    whole = [_fp16(blocks, at).float().unsqueeze(-1) for at in (0, 2)]
    return (whole[0] * scale).flatten(-2), -(whole[1] * least).flatten(-2)
