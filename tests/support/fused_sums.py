"""A table of 200 products with their bits on two kinds of cards: `tests/kernels/fused_sums.json`.

A product is one instruction `m16n8k16` of bf16 numbers with an fp32 accumulator. The bits come from
MMA-Sim, which is no dependency:

    pip install mmasim==2.1.1 && python -m tests.support.fused_sums
"""

import json
from typing import NamedTuple

import numpy as np
import torch

from tests.support.files import ROOT

PATH = ROOT / "tests" / "kernels" / "fused_sums.json"
NUM, INPUTS = 200, 16
CARDS = {"90": "Hopper", "80": "Ampere"}
"""MMA-Sim's name of the card of each SM version."""


class Products(NamedTuple):
    """Inputs of the products, and the bits of their results."""

    a: np.ndarray
    """Factors that are bf16 numbers, fp32 [NUM, INPUTS]."""
    b: np.ndarray
    c: np.ndarray
    """Accumulators, fp32 [NUM]."""
    bits: dict[str, np.ndarray]
    """Results by SM version, uint32 [NUM]."""


def read() -> Products:
    """Read the table."""
    rows = [row.split() for row in json.loads(PATH.read_text())["products"]]
    a, b = (
        (_words(rows, i, "u2").astype(np.uint32) << 16).view(np.float32).reshape(NUM, INPUTS)
        for i in (0, 1)
    )
    bits = {sm: _words(rows, 3 + i, "u4") for i, sm in enumerate(CARDS)}
    return Products(a, b, _words(rows, 2, "u4").view(np.float32), bits)


def _words(rows: list[list[str]], column: int, kind: str) -> np.ndarray:
    """Return the numbers of a column of big-endian hexadecimal text."""
    text = bytes.fromhex("".join(row[column] for row in rows))
    return np.frombuffer(text, ">" + kind).astype(kind)


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw inputs of many sizes: some cancel, some are zero, tiny, huge or no numbers."""
    noise = torch.Generator().manual_seed(49)

    def drawn(*shape: int, spread: int) -> torch.Tensor:
        power = torch.randint(-spread, spread + 1, shape, generator=noise)
        return torch.randn(shape, generator=noise) * torch.exp2(power.float())

    a, b = drawn(NUM, INPUTS, spread=6).bfloat16(), drawn(NUM, INPUTS, spread=6).bfloat16()
    c = drawn(NUM, spread=12)
    exact = (a.double() * b.double()).sum(1)
    c[::3] = -exact[::3].float()  # little is left, so bits that were cut off are seen
    a[1::9, ::2], c[1::18] = 0.0, 0.0
    for i, scale in ((4, 2.0**-62), (5, 2.0**-70), (6, 2.0**63)):
        a[i::25], b[i::25], c[i::25] = a[i::25] * scale, b[i::25] * scale, c[i::25] * scale * scale
    for i, size in ((98, 2.0**-159), (99, 2.0**-158)):  # a zero's exponent cuts these off
        a[i], b[i], c[i] = 1.875 * size * 2.0**79, 2.0**-79, 0.0
        a[i, 0], b[i, 0] = 1.9921875 * 2.0**-75, 2.0**-75
    a[7, 3], a[32, 4], c[57], a[82, 5] = float("inf"), float("nan"), -float("inf"), float("inf")
    a[82, 6] = -float("inf")
    return a, b, c


def main() -> None:
    """Write the table with MMA-Sim's bits."""
    from mmasim.nv_ptx.sim import MMA

    a, b, c = draw()
    results = []
    for card in CARDS.values():
        unit = MMA(card, "m16n8k16.f32.bf16.bf16.f32")
        results.append(unit.dpa(a, b, c))
    lines = [
        " ".join((_hex(a[i], "i2"), _hex(b[i], "i2"), *(_hex(x[i], "i4") for x in (c, *results))))
        for i in range(NUM)
    ]
    about = f"MMA-Sim 2.1.1, m16n8k16.f32.bf16.bf16.f32; columns a, b, c, sm_{', sm_'.join(CARDS)}"
    PATH.write_text(json.dumps({"source": about, "products": lines}, indent=1) + "\n")


def _hex(x: torch.Tensor, kind: str) -> str:
    """Return the bits of numbers as big-endian hexadecimal text."""
    whole = x.view(torch.int16 if kind == "i2" else torch.int32).numpy()
    return whole.astype(">" + kind).tobytes().hex()


if __name__ == "__main__":
    main()
