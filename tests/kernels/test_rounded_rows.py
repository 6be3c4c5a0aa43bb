"""Rows rounded to int8: every kernel gives the bits of `kernels/rounded.py`, and a row's are its
own.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts, Formats, Mlp
from qllm.kernels.cpu.quantised import QuantisedMatrix, QuantisedStack, matrix_of
from qllm.kernels.quantised import INTEGERS, Quantised
from qllm.kernels.rounded import LARGEST, linear, rounded, runs
from qllm.runner.layers.work import Work
from tests.support.quantised_products import DTYPES, KINDS, ROWS, SHAPES, bits, quantised, rand

LONG = ((64, 600, 200), (70, 264, 264), (130, 272, 136))
"""Groups that are cut at 128 inputs."""


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


def integers(code: str, n: int, k: int, group: int, **more: Any) -> Quantised:
    return quantised(code, n, k, group, **more).reading("int8")


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal bits; where one is no number, both are none."""
    lost = wanted.isnan()
    return torch.equal(found.isnan(), lost) and torch.equal(bits(found[~lost]), bits(wanted[~lost]))


@pytest.mark.sampled(60)
@pytest.mark.parametrize("code", INTEGERS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES + LONG)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_products_have_the_bits_that_torch_gives(
    code: str, n: int, k: int, group: int, dtype: torch.dtype, offset: bool
) -> None:
    weight = integers(code, n, k, group, dtype=dtype, offset=offset)
    ours, bias = QuantisedMatrix(weight), rand(n, seed=9)
    biased = QuantisedMatrix(weight, bias)
    for num in ROWS:
        x = rand(num, k, seed=num)
        found = ours.linear(x)
        assert torch.equal(bits(found), bits(linear(x, weight))), num
        assert torch.equal(bits(biased.linear(x)), bits(linear(x, weight, bias)))
        assert found.any()


@pytest.mark.parametrize("code", INTEGERS)
def test_no_sum_of_bytes_saturates(code: str) -> None:
    """Two products of an unsigned byte and a signed one do not fit 16 bits."""
    weight = integers(code, 80, 256, 64)
    ends = (0x00, 0xFF) if code != "i8" else (0x80, 0x7F)
    for end in ends:
        codes = torch.full_like(weight.codes.view(torch.uint8), end).view(weight.codes.dtype)
        whole = weight._replace(codes=codes, scale_NG=torch.ones(80, 4))
        for sign in (1.0, -1.0):
            x = torch.full((7, 256), 3.0 * sign).bfloat16()
            wanted = (x.float() @ whole.dequantised().float().t()).bfloat16()
            for num in (1, 7):
                found = QuantisedMatrix(whole).linear(x[:num])
                assert torch.equal(found, wanted[:num])  # 127 of 127 is what it was


def test_rows_do_not_depend_on_their_number_or_the_threads() -> None:
    for offset in (False, True):
        matrix = QuantisedMatrix(integers("u4", 150, 320, 64, offset=offset))
        x = rand(211, 320, seed=1) * torch.logspace(-3, 3, 211).unsqueeze(1).bfloat16()
        whole = matrix.linear(x)
        for num in (1, 2, 3, 4, 5, 6, 7, 33, 97):
            assert torch.equal(matrix.linear(x[-num:]), whole[-num:])
        cpu.set_threads(3)
        for _ in range(5):
            assert torch.equal(matrix.linear(x), whole)
        cpu.set_threads(1)


def test_values_that_are_no_numbers_reach_no_other_row() -> None:
    weight, x = integers("i8", 80, 96, 32, offset=True), rand(9, 96)
    clean = linear(x, weight)
    x[2, 50], x[4, 1], x[6, 95] = torch.inf, torch.nan, -torch.inf
    for num in (9, 3):
        found = QuantisedMatrix(weight).linear(x[:num])
        assert same(found, linear(x[:num], weight))
        lost = [r for r in (2, 4, 6) if r < num]
        kept = [r for r in range(num) if r not in lost]
        assert found[lost].isnan().all()
        assert torch.equal(bits(found[kept]), bits(clean[kept]))


@pytest.mark.parametrize("size", [0.0, 2.0**-130, 2.0**-101, 2.0**-100, 2.0**-99, 2.0**120])
def test_the_smallest_and_largest_rows(size: float) -> None:
    weight = integers("i4", 70, 64, 32)
    weight = weight._replace(scale_NG=torch.full((70, 2), 0.5))
    x = torch.stack([torch.full((64,), size), torch.ones(64)]).bfloat16()
    x[0, ::3] *= -1
    x[1, 32:] *= size
    found = QuantisedMatrix(weight).linear(x)
    assert torch.equal(found, linear(x, weight))
    assert bool(found[0].any()) == (size >= 2.0**-100)


def test_the_nearest_whole_numbers_and_ties_to_even() -> None:
    """Through a weight that is one: what comes out is what a row was rounded to."""
    codes = torch.eye(64, dtype=torch.int8)
    one = Quantised("i8", codes, torch.ones(64, 1), None, 64, "int8")
    steps = torch.arange(64).float() / 2 - 16
    steps[0] = LARGEST
    row = steps.bfloat16().unsqueeze(0)
    for found in (QuantisedMatrix(one).linear(row), linear(row, one)):
        assert torch.equal(found[0].float(), steps.round())


def test_a_large_value_costs_its_own_run_alone() -> None:
    x = rand(1, 256)
    x[0, 5] = 1000
    rows = rounded(x, 256)
    off = (rows.values(256) - x.float()).abs()[0]
    assert list(runs(256, 256)) == [(0, 128), (128, 256)]
    assert off[128:].max() < 0.02 < off[:128].max()


@pytest.mark.parametrize("last", [1, 20, 64, 130])
def test_parts_that_read_different_rows(last: int) -> None:
    k = 96
    weights: list[Tensor | Quantised] = [
        integers("u4", 64, k, 32, offset=True),
        integers("i8", 128, k, 16, dtype=torch.float32, seed=2),
        rand(192, k, seed=3),
        quantised("u4", 64, k, 32, seed=5),
        quantised("e2m1", 64, k, 32, powers=True, seed=4),
        integers("i8", last, k, 96, seed=6),
    ]
    biases = [rand(len(w) if isinstance(w, Tensor) else w.shape[0], seed=7) for w in weights]
    mixed = matrix_of(weights, biases)
    for rows in ROWS:
        x = rand(rows, k, seed=rows)
        wanted = []
        for weight, bias in zip(weights, biases, strict=True):
            if isinstance(weight, Tensor):
                wanted.append(cpu.Matrix([weight], [bias]).linear(x))
            elif weight.activations == "int8":
                wanted.append(linear(x, weight, bias))
            else:
                wanted.append(QuantisedMatrix(weight, bias).linear(x))
        assert torch.equal(bits(mixed.linear(x)), bits(torch.cat(wanted, 1)))


def test_codes_that_are_no_integers_are_refused() -> None:
    for code in ("e2m1", "e4m3"):
        weight = quantised(code, 16, 64, 32)._replace(activations="int8")
        with pytest.raises(ValueError, match=rf"codes '{code}' are no integers"):
            QuantisedMatrix(weight)
        with pytest.raises(ValueError, match=rf"codes '{code}' are no integers.*u4, i4, i8"):
            linear(rand(1, 64), weight)
        assert weight.reading("int8").activations == "bf16"
    one, other = integers("u4", 64, 64, 32), quantised("u4", 64, 64, 32)
    with pytest.raises(ValueError, match="a stack has one format"):
        QuantisedStack(1, 64, 64, one).pack(0, other)


# -- experts

E, D, F = 3, 72, 40


def slots_of(experts: Experts, x: Tensor, rows: int) -> Tensor:
    bank: Any = SimpleNamespace(num_experts=E, out_width=D, dtype=torch.bfloat16, residency=None)
    work = Work(bank, torch.arange(E).repeat(len(x), 1), rows)
    experts.run(x, work.token_S, work.flat.buffer_info()[0], len(work.units), work.slots_SD)
    return work.slots_SD


def gated(h: Tensor) -> Tensor:
    """What the kernel's gate makes of [t, 2F]."""
    gate, up = torch.eye(2 * F).bfloat16().split(F)
    wide = Mlp(gate, up, torch.cat([torch.eye(F), torch.zeros(F, F)]).bfloat16())
    return wide(h)[:, :F].contiguous()


@pytest.mark.parametrize("codes", [("i4", "i4"), ("u4", "i8"), ("i8", "u4"), ("i4", "e2m1")])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_round_what_both_products_read(codes: tuple[str, str], shared: bool) -> None:
    """Shared: packed before anybody asks for rounded rows."""
    given = [
        (quantised(codes[0], 2 * F, D, 24, seed=e), quantised(codes[1], D, F, 16, seed=e + E))
        for e in range(E)
    ]
    asked = [(up.reading("int8"), down.reading("int8")) for up, down in given]
    if shared:
        stacks = QuantisedStack(E, 2 * F, D, given[0][0]), QuantisedStack(E, D, F, given[0][1])
        for e, (up, down) in enumerate(given):
            stacks[0].pack(e, up)
            stacks[1].pack(e, down)
        ours = Experts(E, F, D, packed=stacks, activations="int8")
        plain = Experts(E, F, D, packed=stacks)
    else:
        ours = Experts(E, F, D, formats=Formats(*asked[0]))
        plain = Experts(E, F, D, formats=Formats(*given[0]))
        for e in range(E):
            ours.pack(e, *asked[e])
            plain.pack(e, *given[e])
    for tokens, rows in ((1, 96), (3, 1), (40, 96), (130, 7)):
        x, found = rand(tokens, D, seed=tokens), []
        for up, down in asked:
            act = gated(QuantisedMatrix(up).linear(x))
            found.append(QuantisedMatrix(down).linear(act))
        assert torch.equal(bits(slots_of(ours, x, rows)), bits(torch.cat(found)))
        assert not torch.equal(slots_of(ours, x, rows), slots_of(plain, x, rows))


def test_an_mlp_reads_rounded_rows() -> None:
    gate, up = (integers("u4", F, D, 24, seed=i) for i in (1, 2))
    down, share, x = integers("i4", D, F, 16), integers("i8", 1, D, D), rand(9, D)
    h = torch.cat([QuantisedMatrix(w).linear(x) for w in (gate, up)], 1)
    wanted = QuantisedMatrix(down).linear(gated(h))
    assert torch.equal(bits(Mlp(gate, up, down)(x)), bits(wanted))
    scaled = Mlp(gate, up, down, share)(x)
    for row in range(9):
        assert torch.equal(
            bits(Mlp(gate, up, down, share)(x[row : row + 1])), bits(scaled[row : row + 1])
        )
