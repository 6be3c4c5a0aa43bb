"""Is a row computed alone equal to the same row in a batch? By the published arithmetic of cards.

The interpreter knows no layouts. So the order in which a compiled kernel feeds its inputs to the
matrix unit is a parameter here (`kWidth`). `test_reduction_law.py` reads in compiled code that it
is 2. Byte loads of codes would make it 4 or 8 in tiles of 16 rows.
"""

from typing import NamedTuple

import pytest
import torch

from bench.gpu import products
from qllm.kernels.quantised import Code, Quantised
from qllm.kernels.routing import Activation, ExpertWeights
from qllm.kernels.triton import moe
from qllm.models.weights.quantised_weights import DeviceWeights
from tests.support.hopper import matrix_unit
from tests.support.quantised_products import quantised
from tests.support.triton_cases import Noise

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
EXPERTS, WIDTH, INNER = 2, 256, 128
BATCHES = (1, 31, 100, 260)
"""Tokens, each with one expert. Tiles have 16, 16, 64 and 128 rows."""


class Case(NamedTuple):
    """Weights of experts, and the answer."""

    code: Code | None
    """Code of quantised weights; None is bf16."""
    sm: int
    width: int
    """`kWidth` of tiles of 16 rows; larger tiles have 2."""
    is_equal: bool


CASES = [
    Case(None, 80, 2, True), Case(None, 90, 2, True), Case("i8", 90, 2, True),
    Case("i4", 80, 2, True), Case("i4", 90, 2, True), Case("i8", 90, 4, False),
    Case("i4", 90, 8, False),
]  # fmt: skip


def noisy(noise: Noise, *shape: int) -> torch.Tensor:
    """Return numbers of many sizes, so that sums have to cut something off."""
    power = torch.randint(-6, 3, shape, generator=noise.generator).float()
    return (noise(*shape) * torch.exp2(power)).bfloat16()


def packed(code: Code, outputs: int, inputs: int) -> Quantised:
    ones = [
        quantised(code, outputs, inputs, 32, torch.bfloat16, seed=i, offset=False)
        for i in range(EXPERTS)
    ]
    held = DeviceWeights(EXPERTS, ones[0], torch.device("cpu"))
    held.take(0, [[one] for one in ones])
    return held.whole


def weights_of(noise: Noise, code: Code | None) -> ExpertWeights:
    if code is None:
        up, down = (
            noisy(noise, EXPERTS, *shape) * 0.1 for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
        )
        return ExpertWeights(up, down, None, None, False, Activation.SILU)
    stacks = packed(code, 2 * INNER, WIDTH), packed(code, WIDTH, INNER)
    return ExpertWeights(
        stacks[0].codes, stacks[1].codes, None, None, False, Activation.SILU, packed=stacks
    )


def run(x: torch.Tensor, weights: ExpertWeights, sm: int, width: int) -> torch.Tensor:
    """Run the experts on tokens that take them in turn; width is that of tiles of 16 rows."""
    ids = torch.arange(len(x)).remainder(EXPERTS)[:, None]
    num = torch.tensor([len(x)], dtype=torch.int32)
    slots = torch.full((len(x), 1, WIDTH), torch.nan)  # fp32, which hides nothing
    is_small = moe.tile_rows(len(x), EXPERTS) == 16
    with matrix_unit(sm, width if is_small else 2):
        routing = moe.route(ids, num, EXPERTS, torch.zeros(1, dtype=torch.int64))
        moe.run_experts(x, weights, routing, 0, EXPERTS, slots)
    return slots[:, 0]


def test_the_batches_have_tiles_of_every_size() -> None:
    assert [moe.tile_rows(num, EXPERTS) for num in BATCHES] == [16, 16, 64, 128]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.sm}-{case.width}")
def test_experts_of_a_token_alone_and_in_batches(case: Case) -> None:
    """Bits differ if codes at tiles of 16 rows come to the matrix unit in another order."""
    noise = Noise(1, "cpu")
    weights, x = weights_of(noise, case.code), noisy(noise, max(BATCHES), WIDTH) * 0.01
    outs = {num: run(x[:num], weights, case.sm, case.width) for num in BATCHES}
    whole = outs[max(BATCHES)]
    assert whole.isfinite().all()
    differing = {num: int((out != whole[:num]).sum()) for num, out in outs.items()}
    assert differing[100] == 0, "tiles of 64 and of 128 rows have one order"
    assert (sum(differing.values()) == 0) == case.is_equal, differing


@pytest.mark.parametrize("sm", [80, 90])
def test_a_product_in_any_tile_and_either_orientation(sm: int) -> None:
    """fp32 accumulators; the inputs of one iteration are 16 to 256."""
    noise = Noise(2, "cpu")
    x, w = noisy(noise, 70, 512), noisy(noise, 64, 512)
    tiles = [(16, 64, 256), (64, 16, 64), (32, 32, 16), (128, 64, 32)]
    with matrix_unit(sm):
        wanted, _ = products.product(x, w, products.Tile(64, 64, 64, 4, 3))
        for rows, columns, inputs in tiles:
            tile = products.Tile(rows, columns, inputs, 4, 3)
            for num in (1, 17, 70):
                assert torch.equal(products.product(x[:num], w, tile)[0], wanted[:num])
            assert torch.equal(products.product(w, x, tile)[0].T, wanted)
            out = torch.empty(70, 64)
            products.turned(x, w, out, products.Tile(16, 8, inputs, 1, 2))()
            assert torch.equal(out, wanted)


def test_a_product_whose_inputs_are_divided_is_another() -> None:
    """Split-K adds two chains: with it a row alone differs from a row in a batch."""
    noise = Noise(3, "cpu")
    x, w = noisy(noise, 16, 512), noisy(noise, 64, 512)
    tile = products.Tile(16, 64, 64, 4, 3)
    with matrix_unit(90):
        whole = products.product(x, w, tile)[0]
        halves = [
            products.product(x[:, part].contiguous(), w[:, part].contiguous(), tile)[0]
            for part in (slice(256), slice(256, 512))
        ]
    different = (whole != halves[0] + halves[1]).sum()
    assert different > whole.numel() // 8
    torch.testing.assert_close(whole, halves[0] + halves[1], rtol=1e-3, atol=1e-3)


def test_rows_that_lie_apart_are_refused() -> None:
    x, w = torch.zeros(16, 64).bfloat16(), torch.zeros(16, 64).bfloat16()
    tile = products.Tile(16, 16, 16, 1, 1)
    with pytest.raises(ValueError, match=r"^operands of shapes \[16, 32\] and \[16, 32\] must be"):
        products.product(x[:, :32], w[:, :32], tile)


def test_a_tile_that_does_not_divide_the_weights_is_refused() -> None:
    x, w = torch.zeros(1, 96).bfloat16(), torch.zeros(40, 96).bfloat16()
    with pytest.raises(ValueError, match=r"^a product of 40 x 96 weights needs whole tiles, not "):
        products.turned(x, w, torch.zeros(1, 40), products.Tile(16, 8, 32, 1, 2))
