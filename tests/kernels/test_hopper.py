"""The arithmetic of matrix units (`tests/support/hopper.py`) against what is published of cards."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.support import fused_sums
from tests.support.hopper import (
    AMPERE,
    HOPPER,
    UNITS,
    Unit,
    chain,
    fma_chain,
    fused_sum,
    matrix_unit,
    order,
)

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
UNIT = pytest.mark.parametrize("unit", [HOPPER, AMPERE])
TABLE = fused_sums.read()


def results(unit: Unit) -> np.ndarray:
    """Return the bits of the table's products by a unit's rule."""
    acc = TABLE.c
    for at in range(0, fused_sums.INPUTS, unit.products):
        of = slice(at, at + unit.products)
        acc = fused_sum(acc, TABLE.a[:, of], TABLE.b[:, of], unit)
    return acc.view(np.uint32)


@pytest.mark.parametrize("sm", fused_sums.CARDS)
def test_a_table_of_200_products_has_the_published_bits(sm: str) -> None:
    assert (results(UNITS[int(sm)]) == TABLE.bits[sm]).all()


@pytest.mark.parametrize(
    "mutant",
    [
        HOPPER._replace(bits=24), HOPPER._replace(bits=26), HOPPER._replace(products=8),
        HOPPER._replace(zero=-132), HOPPER._replace(zero=-999), AMPERE,
    ],
)  # fmt: skip
def test_the_table_finds_a_wrong_rule(mutant: Unit) -> None:
    assert (results(mutant) != TABLE.bits["90"]).any()


def test_the_table_finds_a_sum_that_is_rounded_to_the_nearest() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = ((TABLE.a.astype(np.float64) * TABLE.b).sum(1) + TABLE.c).astype(np.float32)
    assert (nearest.view(np.uint32) != TABLE.bits["90"]).sum() > 50


def one(a: list[float], b: list[float], c: float, unit: Unit) -> float:
    """Return one output of an instruction; inputs that are not given are 0."""
    rows = np.zeros((2, 16), np.float32)
    rows[0, : len(a)], rows[1, : len(b)] = a, b
    acc = np.array([[c]], np.float32)
    return float(chain(rows[:1], rows[1:].T, acc, unit)[0, 0])


@UNIT
def test_a_large_product_that_cancels_takes_its_small_neighbours_along(unit: Unit) -> None:
    """Seen on cards: all of a fused sum is lost next to a product that cancels with c."""
    large, small = 2.0**7, 2.0**-9
    for at in range(16):
        x = [small] * 16
        x[at] = large
        is_first_half = unit is AMPERE and at < 8
        assert one(x, x, -large * large, unit) == (8 * small * small if is_first_half else 0.0)


@UNIT
def test_bits_behind_the_largest_exponent(unit: Unit) -> None:
    """Seen on cards: c loses its last bit next to products of 2**1 (24 bits) or 2**2 (25 bits)."""
    x, last = (2.0 - 2.0**-10) * 2.0**-14, 2.0**-24
    power = -14
    while one([2.0**power, -(2.0**power)], [1.0, 1.0], x, unit) == x:
        power += 1
    assert power - 1 + 24 == unit.bits
    y = 2.0**power
    for sign in (1.0, -1.0):  # towards zero
        assert one([y, -y], [1.0, 1.0], sign * x, unit) == sign * (x - last)
        assert one([y, -y], [2.0, 2.0], sign * x, unit) == sign * (x - 3 * last)
    # The exponent is that of the factors: 1.5 * 1.5 counts as 1, and 2.25 as 2.
    assert one([1.5 * y, -1.5 * y], [1.5, 1.5], x, unit) == x - last
    assert one([2.25 * y, -2.25 * y], [1.0, 1.0], x, unit) == x - 3 * last


@UNIT
def test_tiny_factors_share_the_least_exponent(unit: Unit) -> None:
    x = 2.0**-126
    big = 2.0 ** (unit.bits + 1)
    assert one([x, x, x, x], [big, -big, 1.0, 1.0], 0.0, unit) == 0.0
    assert one([x, x, x, x], [big / 2, -big / 2, 1.0, 1.0], 0.0, unit) == 2 * x
    assert one([x / 2, x / 2, x, x], [big, -big, 1.0, 1.0], 0.0, unit) == 0.0


@UNIT
def test_results_are_cut_off(unit: Unit) -> None:
    last, largest = 2.0**-23, float(np.finfo(np.float32).max)
    for sign in (1.0, -1.0):
        quarters = [sign * 0.25] * 4
        assert one(quarters, [1.0] * 4, sign * 0.75 * last, unit) == sign
        three = [sign * 0.75] * 2
        assert one(three, [2.0**127] * 2, sign * largest / 4, unit) == sign * largest
        assert one([sign] * 2, [2.0**127] * 2, 0.0, unit) == sign * float("inf")
        tiny = 2.0**-148
        assert one([sign * 0.75 * last], [2.0**-126], sign * tiny, unit) == sign * tiny
        assert one([sign * 0.75 * last], [2.0**-126], 0.0, unit) == 0.0
    zero = one([-0.0] * 16, [1.0] * 16, -0.0, unit)
    assert np.copysign(1.0, zero) == 1.0


def random(seed: int, *shape: int) -> torch.Tensor:
    """Return numbers of many sizes, so that sums have to cut something off."""
    noise = torch.Generator().manual_seed(seed)
    power = torch.randint(-6, 3, shape, generator=noise).float()
    return torch.randn(shape, generator=noise) * torch.exp2(power)


def exact_chain(a: list[float], b: list[float], unit: Unit) -> float:
    """Return one output by whole numbers: no power of two is rounded on the way."""
    total = Fraction(0)
    for at in range(0, len(a), unit.products):
        pairs = list(zip(a[at : at + unit.products], b[at : at + unit.products], strict=True))
        terms = [(Fraction(x) * Fraction(y), _exponent(x) + _exponent(y)) for x, y in pairs]
        terms.append((total, _exponent(float(total))))
        most = max(e for value, e in terms if value)
        step = Fraction(2) ** (most - unit.bits)
        found = sum(int(value / step) for value, _ in terms) * step
        grain = Fraction(2) ** (_exponent(float(found)) - 23)
        total = int(found / grain) * grain
    return float(total)


def _exponent(x: float) -> int:
    return int(np.frexp(x)[1]) - 1


@UNIT
def test_a_chain_by_whole_numbers(unit: Unit) -> None:
    a, b = random(1, 5, 256).bfloat16().float(), random(2, 7, 256).bfloat16().float()
    found = chain(a.numpy(), b.numpy().T, np.zeros((5, 7), np.float32), unit)
    for m, n in itertools.product(range(5), range(7)):
        assert found[m, n] == exact_chain(a[m].tolist(), b[n].tolist(), unit)


def test_a_chain_of_fused_multiply_adds_by_whole_numbers() -> None:
    a, b = random(3, 3, 64), random(4, 5, 64)
    found = fma_chain(a.numpy(), b.numpy().T, np.zeros((3, 5), np.float32))
    for m, n in itertools.product(range(3), range(5)):
        acc = np.float32(0)
        for x, y in zip(a[m].tolist(), b[n].tolist(), strict=True):
            acc = _nearest(Fraction(x) * Fraction(y) + Fraction(float(acc)))
        assert found[m, n] == acc


def _nearest(exact: Fraction) -> np.float32:
    """Return the fp32 number next to an exact one; of two, the one with an even last bit."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf)]
    return min(
        (guess, *near),
        key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1),
    )


@pytest.mark.parametrize("width", [2, 4, 8])
def test_every_input_is_added_once(width: int) -> None:
    found = order(128, width)
    assert sorted(found) == list(range(128))
    assert (found == list(range(128))) == (width == 2)
    # An instruction m16n8k16 has two pairs of neighbours of each of four threads.
    first = {2: range(16), 4: (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)}
    if width in first:
        assert found[:16] == list(first[width])


@pytest.mark.parametrize(("num", "width"), [(24, 2), (16, 4), (64, 3), (64, 1)])
def test_an_order_that_no_instruction_has_is_refused(num: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"^{num} inputs with kWidth {width}: kWidth must be even"):
        order(num, width)


@triton.jit
def _product(
    a: "Any", b: "Any", c: "Any", K: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
    IEEE: tl.constexpr,
) -> None:  # fmt: skip
    m, k = tl.arange(0, 16), tl.arange(0, BLOCK)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    acc = tl.zeros([16, 16], tl.float32)
    for at in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * K + (at + k)[None, :])
        w = tl.load(b + m[None, :] * K + (at + k)[:, None])
        if LAST:
            acc += tl.dot(x, w, input_precision=precision)
        else:
            acc = tl.dot(x, w, acc, input_precision=precision)
    tl.store(c + m[:, None] * 16 + m[None, :], acc)


@triton.jit
def _product_alone(a: "Any", b: "Any", c: "Any") -> None:
    m = tl.arange(0, 16)
    x, w = tl.load(a + m[:, None] * 16 + m[None, :]), tl.load(b + m[None, :] * 16 + m[:, None])
    tl.store(c + m[:, None] * 16 + m[None, :], 2.0 * tl.dot(x, w))


@interpreted
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_added", [False, True], ids=["accumulated", "added"])
@pytest.mark.parametrize("block", [16, 64])
def test_an_interpreted_product_is_one_chain(
    sm: int, kind: torch.dtype, is_added: bool, block: int
) -> None:
    """Blocks of K do not show. The compiler adds a product to the accumulator in the unit."""
    a, b = random(5, 16, 192).to(kind), random(6, 16, 192).to(kind)
    found = torch.full((16, 16), torch.nan)
    with matrix_unit(sm):
        _product[(1,)](a, b, found, K=192, BLOCK=block, LAST=is_added, IEEE=kind is torch.float32)
    given = a.float().numpy(), b.float().numpy().T, np.zeros((16, 16), np.float32)
    wanted = fma_chain(*given) if kind is torch.float32 else chain(*given, UNITS[sm])
    assert (found.numpy() == wanted).all()


@interpreted
def test_a_product_that_nothing_is_added_to() -> None:
    a, b, found = random(7, 16, 16).bfloat16(), random(8, 16, 16).bfloat16(), torch.zeros(16, 16)
    with matrix_unit(90):
        _product_alone[(1,)](a, b, found)
    zero = np.zeros((16, 16), np.float32)
    wanted = chain(a.float().numpy(), b.float().numpy().T, zero, HOPPER)
    assert (found.numpy() == 2 * wanted).all()


@interpreted
def test_the_order_of_a_wider_register() -> None:
    a, b = random(9, 16, 64).bfloat16(), random(10, 16, 64).bfloat16()
    outs = []
    for width in (2, 8):
        outs.append(torch.zeros(16, 16))
        with matrix_unit(90, width):
            _product[(1,)](a, b, outs[-1], K=64, BLOCK=64, LAST=False, IEEE=False)
    sorted_a, sorted_b = (x[:, order(64, 8)].float().numpy() for x in (a, b))
    wanted = chain(sorted_a, sorted_b.T, np.zeros((16, 16), np.float32), HOPPER)
    assert (outs[1].numpy() == wanted).all()
    assert not torch.equal(*outs)


@interpreted
def test_arithmetic_that_is_not_known_is_refused() -> None:
    found = torch.zeros(16, 16)
    with matrix_unit(90), pytest.raises(Exception, match="the arithmetic of bf16 is known") as why:
        _product[(1,)](
            random(1, 16, 16), random(2, 16, 16), found, K=16, BLOCK=16, LAST=False, IEEE=False
        )
    assert "TF32" in str(why.value)
    with pytest.raises(ValueError, match=r"^sm=75: the arithmetic of 80, 86, 89, 90, 100"):
        matrix_unit(75).__enter__()


@triton.jit
def _sums(x: "Any", whole: "Any", out: "Any", more: "Any", ROWS: tl.constexpr) -> None:
    r, c = tl.arange(0, ROWS), tl.arange(0, 64)
    tl.store(out + r, tl.sum(tl.load(x + r[:, None] * 64 + c[None, :]), 1))
    tl.store(more + r, tl.sum(tl.load(whole + r[:, None] * 64 + c[None, :]), 1))


@interpreted
def test_a_sum_of_floats_depends_on_its_block_and_one_of_integers_does_not() -> None:
    x, whole = random(11, 32, 64), torch.arange(32 * 64).view(32, 64)
    found = {}
    for rows in (1, 32):
        found[rows] = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
        with matrix_unit(90):
            _sums[(1,)](x, whole, *found[rows], ROWS=rows)
    differing = [not torch.equal(found[1][i], found[32][i][:1]) for i in (0, 1)]
    assert differing == [True, False]
    torch.testing.assert_close(found[32][0], x.sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[32][1], whole.sum(1))
