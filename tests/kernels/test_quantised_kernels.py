"""Weights of 4 and 8 bits: every product has the bits of the bf16 kernel on the same values."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu.experts import BF16, Clamp, Experts, Formats, Mlp
from qllm.kernels.cpu.quantised import (
    EXACT,
    JUDGED_AT_ONCE,
    MOST_SCALE,
    POWERS,
    ROUNDED,
    QuantisedMatrix,
    QuantisedStack,
    matrix_of,
    problem_of,
    stacked,
)
from qllm.kernels.quantised import FOUR_BIT, Quantised
from qllm.models.weights.quantised_weights import Weights
from qllm.runner.layers.work import Work
from tests.support.quantised_products import DTYPES, KINDS, ROWS, SHAPES, bits, quantised, rand

assert cpu.MISSING is None, cpu.MISSING
CODES = ("u4", "i4", "e2m1", "i8", "e4m3")


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


def values_of(weight: Quantised, n: int, k: int) -> Tensor:
    """Packed as the second of a stack, and back."""
    out = torch.empty((n, k), dtype=torch.bfloat16)
    stack = QuantisedStack(2, n, k, weight)
    stack.pack(1, weight)
    stack.unpack(1, out)
    return out


def same_products(weight: Quantised, rows: tuple[int, ...] = ROWS, scale: float = 1.0) -> None:
    ours, plain = QuantisedMatrix(weight), cpu.Matrix([weight.dequantised()])
    for num in rows:
        x = rand(num, plain.num_in, seed=num) * scale
        found = ours.linear(x)
        assert torch.equal(bits(found), bits(plain.linear(x))), num
        assert found.any()


@pytest.mark.sampled(60)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_values_and_products_are_those_of_bf16(
    code: str, n: int, k: int, group: int, dtype: torch.dtype, offset: bool
) -> None:
    weight = quantised(code, n, k, group, dtype, offset)
    assert torch.equal(bits(values_of(weight, n, k)), bits(weight.dequantised()))
    same_products(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_scales_that_are_powers_of_two(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight = quantised("e2m1", n, k, group, dtype, powers=True)
    assert QuantisedMatrix(weight)._format.products == POWERS
    assert torch.equal(bits(values_of(weight, n, k)), bits(weight.dequantised()))
    same_products(weight)


def test_a_scale_of_zero_is_no_power_of_two() -> None:
    weight = quantised("e2m1", 33, 70, 32, torch.bfloat16, powers=True)
    weight.scale_NG[3, 1] = 0
    assert QuantisedMatrix(weight)._format.products == EXACT
    assert torch.equal(bits(values_of(weight, 33, 70)), bits(weight.dequantised()))
    same_products(weight, (1, 7))


@pytest.mark.parametrize("output", range(4, 9))
def test_codes_of_a_scale_of_zero_are_zeros_whichever_output_it_is_of(output: int) -> None:
    weight = quantised("i4", 33, 64, 32, torch.bfloat16)
    weight.scale_NG[output, 1] = 0
    assert torch.equal(bits(values_of(weight, 33, 64)), bits(weight.dequantised()))
    same_products(weight, (1, 7))


@pytest.mark.parametrize("code", CODES)
def test_products_that_fp32_rounds_are_rounded_before_the_offset_is_added(code: str) -> None:
    """A fused multiplication and addition would round once, and give other bits."""
    weight = quantised(code, 256, 512, 8, torch.float32, True)
    weight = weight._replace(offset_NG=-(weight.scale_NG * 7).float() * (1 + 2.0**-20))
    codes = weight.codes
    if code in FOUR_BIT:
        weight = weight._replace(codes=torch.full_like(codes, 0x77))
    matrix = QuantisedMatrix(weight)
    assert matrix._format.products == ROUNDED
    assert torch.equal(bits(values_of(weight, 256, 512)), bits(weight.dequantised()))
    exact = weight._replace(scale_NG=weight.scale_NG.bfloat16().float())
    assert QuantisedMatrix(exact)._format.products == EXACT


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("power", [-100, -60, 60, 100])
@pytest.mark.parametrize("offset", [False, True])
def test_extreme_scales(code: str, power: int, offset: bool) -> None:
    weight = quantised(code, 33, 70, 32, torch.bfloat16, offset, powers=True)
    one = torch.full_like(weight.scale_NG, 2.0**power)
    for sign in (1, -1):
        worths = {"scale_NG": one * sign, "offset_NG": one if offset else None}
        scaled = weight._replace(**worths)
        assert torch.equal(bits(values_of(scaled, 33, 70)), bits(scaled.dequantised()))
        same_products(scaled, (1, 7), 2.0 ** (-power // 2))


def test_scales_beyond_them_are_refused_but_for_groups_of_zeros() -> None:
    for bad in (torch.inf, torch.nan, 2 * MOST_SCALE, 0.5 / MOST_SCALE):
        for name in ("scale_NG", "offset_NG"):
            weight = quantised("i8", 16, 64, 32, torch.float32, True)
            getattr(weight, name)[3, 1] = bad
            with pytest.raises(ValueError, match=r"a scale or offset of a weight is .*2\^-100"):
                QuantisedMatrix(weight)
    for bad in (torch.inf, -torch.inf, torch.nan):
        for dtype in DTYPES:
            weight = quantised("i4", 16, 64, 32, dtype)
            weight.scale_NG[15, 1] = bad
            with pytest.raises(ValueError, match=r"a scale or offset of a weight is .*(nan|inf)"):
                QuantisedMatrix(weight)
    for code in CODES:
        weight = quantised(code, 16, 64, 32, torch.float32, powers=True)
        zeros = 0x88 if code == "i4" else 0
        weight.codes.view(torch.uint8)[3, weight.codes.shape[1] // 2 :] = zeros
        weight.scale_NG[3, 1] = torch.inf
        with pytest.raises(ValueError, match="a scale or offset of a weight is inf"):
            QuantisedMatrix(weight)
        weight.scale_NG[3, 1] = 2.0**-127
        same_products(weight, (1, 7))
        assert torch.equal(bits(values_of(weight, 16, 64)), bits(weight.dequantised()))


@pytest.mark.parametrize("n", [1, JUDGED_AT_ONCE, JUDGED_AT_ONCE + 1, 2 * JUDGED_AT_ONCE + 40])
def test_a_weight_is_judged_to_its_last_output(n: int) -> None:
    weight = quantised("i4", n, 64, 32)
    assert problem_of(weight) is None
    for row in {0, n // 2, n - 1}:
        bad = weight._replace(scale_NG=weight.scale_NG.clone())
        bad.scale_NG[row, 1] = torch.nan
        assert "a scale or offset of a weight is nan" in str(problem_of(bad)), row
    short = weight._replace(scale_NG=weight.scale_NG[:-1])
    assert f"scales and offsets are torch.float16 ({n - 1}, 2)" in str(problem_of(short))


def test_what_is_no_weight_is_refused() -> None:
    weight = quantised("u4", 16, 64, 32)
    stack = QuantisedStack(1, 16, 64, weight)
    for bad, message in (
        (weight._replace(codes=weight.codes[:, 1:]), r"codes 'u4' are torch.uint8 \(16, 31\)"),
        (weight._replace(codes=weight.codes.view(torch.int8)), r"codes 'u4' are torch.int8"),
        (weight._replace(group=12), "groups of a multiple of 8"),
        (
            weight._replace(scale_NG=weight.scale_NG.double()),
            "scales and offsets are torch.float64",
        ),
        (weight._replace(scale_NG=weight.scale_NG[:, 1:]), r"\(16, 1\); \(16, 2\) of float32"),
        (quantised("u4", 16, 64, 64), "a stack has one format"),
        (quantised("u4", 16, 64, 32, offset=True), "a stack has one format"),
        (quantised("u4", 16, 64, 32, torch.float32), "a stack has one format"),
        (quantised("e2m1", 16, 64, 32), "a stack has one format"),
    ):
        with pytest.raises(ValueError, match=message):
            stack.pack(0, bad)
    with pytest.raises(ValueError, match="a Tensor cannot be packed into a QuantisedStack"):
        Experts(1, 16, 64, formats=Formats(weight, None)).pack(0, rand(32, 64), rand(64, 16))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [0, 1, 7, 8, 39, 65, 69])  # the last 6 are no whole 8
def test_a_code_that_is_not_a_number_is_refused_wherever_it_is(place: int, byte: int) -> None:
    weight = quantised("e4m3", 16, 70, 32)
    weight.codes.view(torch.uint8)[5, place] = byte
    with pytest.raises(ValueError, match="is not a number"):
        QuantisedMatrix(weight)


@pytest.mark.parametrize("missing", [None, "no compiler"])
def test_weights_may_be_taken_in_any_order(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MISSING", missing)
    given = [quantised("i4", 80, 64, 32, seed=seed) for seed in range(4)]
    weights = Weights(4, given[0])
    for first, some in ((2, given[2:3]), (3, given[3:]), (0, given[:2])):
        weights.take(first, [[one] for one in some])
    for expert, one in enumerate(given):
        assert torch.equal(bits(weights.values(expert)), bits(one.dequantised()))


def test_rows_do_not_depend_on_their_number_or_the_threads() -> None:
    matrix, x = QuantisedMatrix(quantised("u4", 150, 320, 64, offset=True)), rand(211, 320, seed=1)
    whole = matrix.linear(x)
    for num in (1, 2, 3, 4, 5, 6, 97):
        assert torch.equal(matrix.linear(x[-num:]), whole[-num:])
    cpu.set_threads(3)
    for _ in range(5):
        assert torch.equal(matrix.linear(x), whole)


def test_weights_on_top_of_each_other_and_biases() -> None:
    first, second = quantised("u4", 20, 64, 32), quantised("u4", 7, 64, 32, seed=1)
    plain, other = rand(5, 64), quantised("i8", 9, 64, 32)
    x, biases = rand(3, 64, seed=4), [rand(20, seed=2), rand(7, seed=3)]
    values = [first.dequantised(), second.dequantised()]
    ours = matrix_of([first, second], biases)
    assert isinstance(ours, QuantisedMatrix)
    assert torch.equal(ours.linear(x), cpu.Matrix(values, biases).linear(x))
    assert stacked([first, other]) is None
    for more in (plain, other):
        mixed = matrix_of([first, second, more])
        whole = more.dequantised() if isinstance(more, Quantised) else more
        assert not isinstance(mixed, QuantisedMatrix)
        assert torch.equal(mixed.linear(x), cpu.Matrix([*values, whole]).linear(x))


@pytest.mark.parametrize("last", [1, 20, 64, 130])
def test_parts_in_formats_of_their_own(last: int) -> None:
    k = 96
    weights = [
        quantised("u4", 64, k, 32, offset=True),
        quantised("u4", 64, k, 32, offset=True, seed=1),
        quantised("i8", 128, k, 16, torch.float32, seed=2),
        rand(192, k, seed=3),
        quantised("e2m1", last, k, 32, powers=True, seed=4),
    ]
    values = [w.dequantised() if isinstance(w, Quantised) else w for w in weights]
    for biases in ((), [rand(len(v), seed=5 + i) for i, v in enumerate(values)]):
        mixed, plain = matrix_of(weights, biases), cpu.Matrix(values, biases)
        assert mixed.packed.nbytes < plain.packed.nbytes / 4
        for rows in ROWS:
            x = rand(rows, k, seed=rows)
            assert torch.equal(bits(mixed.linear(x)), bits(plain.linear(x)))
    cpu.set_threads(3)
    assert torch.equal(bits(mixed.linear(x)), bits(plain.linear(x)))


def test_an_arena_holds_packed_weights() -> None:
    arena, x = cpu.Arena(), rand(3, 70)
    weights = [quantised("i8", n, 70, 70, seed=n) for n in (1, 17, 130)]
    packed = [QuantisedMatrix(w, arena=arena) for w in weights]
    for weight, matrix in zip(weights, packed, strict=True):
        assert matrix.packed.data_ptr() % 64 == 0
        assert torch.equal(matrix.linear(x), cpu.Matrix([weight.dequantised()]).linear(x))


# -- experts

E = 3


def slots_of(experts: Experts, x: Tensor, rows: int) -> Tensor:
    """Slots of every token at every expert, units of at most `rows` rows."""
    bank: Any = SimpleNamespace(
        num_experts=E, out_width=x.shape[1], dtype=torch.bfloat16, residency=None
    )
    work = Work(bank, torch.arange(E).repeat(len(x), 1), rows)
    units = work.flat.buffer_info()[0]
    experts.run(x, work.token_S, units, len(work.units), work.slots_SD)
    return work.slots_SD


@pytest.mark.sampled(40)
@pytest.mark.parametrize("up", [*CODES, None])
@pytest.mark.parametrize("down", ["u4", "i4", "e2m1", None])
@pytest.mark.parametrize(("d", "f"), [(64, 32), (70, 40), (130, 66)])
@pytest.mark.parametrize("clamped", [False, True])
def test_experts_are_those_of_bf16(
    up: str | None, down: str | None, d: int, f: int, clamped: bool
) -> None:
    def made(code: str | None, n: int, k: int, expert: int) -> Tensor | Quantised:
        if code is None:
            return rand(n, k, seed=expert)
        return quantised(code, n, k, 16, offset=code == "u4", powers=code == "e2m1", seed=expert)

    given = [(made(up, 2 * f, d, e), made(down, d, f, e + E)) for e in range(E)]
    formats = Formats(*(w if isinstance(w, Quantised) else None for w in given[0]))
    biases = (rand(E, 2 * f), rand(E, d)) if clamped else None
    clamp = Clamp(1.7, 7.0) if clamped else None
    ours = Experts(E, f, d, biases=biases, clamp=clamp, formats=formats)
    plain = Experts(E, f, d, biases=biases, clamp=clamp)
    for e, weights in enumerate(given):
        ours.pack(e, *weights)
        values = [w.dequantised() if isinstance(w, Quantised) else w for w in weights]
        plain.pack(e, *values)
        back = [torch.empty_like(value) for value in values]
        ours.unpack(e, *back)
        for found, value in zip(back, values, strict=True):
            assert torch.equal(bits(found), bits(value))
    if (up, down) != (None, None):
        assert ours.num_bytes < plain.num_bytes
    for tokens, rows in ((1, 96), (3, 1), (40, 96), (130, 7)):
        x = rand(tokens, d, seed=tokens)
        assert torch.equal(bits(slots_of(ours, x, rows)), bits(slots_of(plain, x, rows)))


def test_formats_are_bf16_unless_given() -> None:
    assert BF16 == (None, None)
    assert Experts(1, 16, 64).num_bytes == 3 * 16 * 64 * 2


@pytest.mark.parametrize("codes", [("u4", "u4"), ("u4", "i8")])
def test_an_mlp_is_that_of_bf16(codes: tuple[str, str]) -> None:
    gate, up = (quantised(code, 40, 70, 32, seed=i) for i, code in enumerate(codes))
    down, share, x = (
        quantised("e2m1", 70, 40, 32, powers=True),
        quantised("i8", 1, 70, 70),
        rand(9, 70),
    )
    values = [w.dequantised() for w in (gate, up, down, share)]
    assert torch.equal(bits(Mlp(gate, up, down, share)(x)), bits(Mlp(*values)(x)))
