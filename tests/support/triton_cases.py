"""Random inputs of Triton kernels, and how close their outputs must be."""

import math

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

FEW = settings(max_examples=8, deadline=None, phases=[Phase.generate])

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """bf16 is rounded twice on the way."""
    if found.dtype is torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    elif wanted.numel():
        assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()


class Noise:
    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def order(self, num: int) -> torch.Tensor:
        return torch.randperm(num, generator=self.generator).to(self.device)


def elsewhere(stack: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Put each entry of a stack at its place among others, which are far apart and all ones."""
    num, size = int(places.max()) + 2, stack[0].nbytes
    room = torch.full((num, size + 256), 0xFF, dtype=torch.uint8, device=stack.device)
    bits = stack.contiguous().view(torch.uint8).view(len(stack), size)
    room[places, :size] = bits
    return room.view(stack.dtype)[:, : stack[0].numel()].unflatten(1, stack.shape[1:])


def cache(
    noise: Noise,
    lengths: list[int],
    page: int,
    groups: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Pages in a random order, what no sequence owns is NaN."""
    per = max(math.ceil(n / page) for n in lengths)
    pages = noise.order(per * len(lengths) + 1)
    tables = pages[: per * len(lengths)].view(len(lengths), per).to(torch.int32)
    out = []
    for width in widths:
        x = torch.full(
            ((len(pages)) * page, groups, width), math.nan, dtype=dtype, device=noise.device
        )
        for r, n in enumerate(lengths):
            j = torch.arange(n, device=noise.device)
            x[tables[r].long()[j // page] * page + j % page] = noise(n, groups, width, dtype=dtype)
        out.append(x)
    return out, tables
