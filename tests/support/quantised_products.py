"""Random quantised weights, and the bits of their products."""

from typing import Any

import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.quantised import FOUR_BIT, Quantised

KINDS = tuple(cpu.native.available())

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SHAPES = (
    (64, 64, 16),
    (130, 70, 32),  # outputs fill no panel, the last group is shorter and fills no block
    (17, 320, 128),
    (100, 262, 64),
    (200, 72, 72),  # one group
    (1, 8, 8),
    (63, 138, 200),
    (49, 144, 48),  # a panel that is full only as it is filled up
)

ROWS = (1, 2, 3, 4, 5, 7, 97, 200)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantised(
    code: Any,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype = torch.float16,
    offset: bool = False,
    powers: bool = False,
    seed: int = 0,
) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    size = (n, k // 2 if code in FOUR_BIT else k)
    codes = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 8  # not a number
        codes = codes.view(torch.float8_e4m3fn)
    elif code == "i8":
        codes = codes.view(torch.int8)
    worths = n, -(-k // group)
    scale_NG = torch.randn(worths, generator=generator) * 0.01
    if powers:
        scale_NG = 2.0 ** torch.randint(-20, 5, worths, generator=generator)
    else:
        scale_NG[1:2, 0] = 0
    offset_NG = (torch.randn(worths, generator=generator) / 10).to(dtype) if offset else None
    return Quantised(code, codes, scale_NG.to(dtype), offset_NG, group)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)
