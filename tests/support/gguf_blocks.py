"""Random blocks of GGUF formats."""

import torch
from torch import Tensor

from qllm.models.weights.formats import gguf as gguf_blocks


def made(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def raw_blocks(kind: str, rows: int, blocks: int) -> Tensor:
    """Random blocks with finite numbers, uint8 [rows, bytes]."""
    size, _ = gguf_blocks.READERS[kind]
    raw = torch.randint(256, (rows, blocks, size), generator=made(), dtype=torch.uint8)
    places = {"Q4_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2))
    for at in places:
        scale = torch.randn((rows, blocks, 1), generator=made(at)) * 0.01
        raw[..., at : at + 2] = scale.half().view(torch.uint8)
    return raw.flatten(1)
