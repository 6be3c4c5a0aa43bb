"""Ranges of outputs, of experts and of heads: put together, they have the bits of the whole."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention
from qllm.kernels.cpu.experts import Clamp, Cut, Experts, Mlp, on_top, swiglu
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.quantised import QuantisedStack, matrix_of
from qllm.kernels.quantised import Quantised
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.work import Work
from tests.support.quantised_products import quantised, rand

KINDS = tuple(cpu.native.available())
FORMATS = ("bf16", "u4", "i4", "e2m1", "i8", "e4m3", "u4 on int8 rows", "i8 on int8 rows")
ROWS = (1, 3, 17, 70)


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    with torch.inference_mode():
        yield request.param
    cpu.native.use(KINDS[0])


def weight_of(form: str, n: int, k: int, seed: int = 0) -> Tensor | Quantised:
    """A random weight [n, k]."""
    if form == "bf16":
        return rand(n, k, seed=seed)
    code, _, rows = form.partition(" on ")
    found = quantised(code, n, k, 32, torch.bfloat16, offset=code == "u4", seed=seed)
    return found.reading("int8") if rows else found


def rows_of(weight: Tensor | Quantised, start: int, stop: int) -> Tensor | Quantised:
    which = slice(start, stop)
    return weight.rows(which) if isinstance(weight, Quantised) else weight[which]


def cut(rng: random.Random, num: int, multiple: int = cpu.PANEL) -> list[tuple[int, int]]:
    """Random consecutive ranges of [0, num) that start at multiples."""
    inside = [at for at in range(multiple, num, multiple) if rng.random() < 0.6]
    return list(pairwise([0, *inside, num]))


def is_whole(parts: list[Tensor], whole: Tensor) -> bool:
    """Compare every bit of the joined parts with the whole."""
    joined = torch.cat(parts, -1)
    return joined.shape == whole.shape and torch.equal(
        joined.view(torch.int16), whole.view(torch.int16)
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMATS)
def test_ranges_of_outputs_have_the_bits_of_the_whole(form: str) -> None:
    rng = random.Random(form)
    for seed in range(6):
        n, k = rng.randint(65, 520), 2 * rng.randint(16, 140)
        weight, bias = weight_of(form, n, k, seed), rand(n, seed=seed + 1)
        whole = matrix_of([weight], [bias], cpu.Arena())
        x, ranges = rand(rng.choice(ROWS), k, seed=seed + 2), cut(rng, n)
        expected = whole.linear(x)
        views = [whole.columns(a, b).linear(x) for a, b in ranges]
        assert is_whole(views, expected), (n, k, ranges)
        packed = [matrix_of([rows_of(weight, a, b)], [bias[a:b]]) for a, b in ranges]
        assert is_whole([part.linear(x) for part in packed], expected), (n, k, ranges)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMATS)
def test_a_split_by_inputs_fails_the_same_comparison(form: str) -> None:
    """The usual tensor parallelism: every rank multiplies some inputs, and the sums are added."""
    n, k = 192, 256
    weight, x = weight_of(form, n, k), rand(70, k, seed=2)
    values = weight.dequantised() if isinstance(weight, Quantised) else weight
    halves = [
        matrix_of([values[:, part]]).linear(x[:, part]) for part in (slice(128), slice(128, k))
    ]
    added = (halves[0].float() + halves[1].float()).bfloat16()
    expected = matrix_of([values]).linear(x)
    assert not is_whole([added], expected)
    share = (added != expected).float().mean()
    assert 0.05 < share < 0.9, "a rounding error changes some outputs, not all"
    assert is_whole([expected[:, :64], expected[:, 64:]], expected)


def test_a_range_that_does_not_start_or_end_with_a_panel_is_refused() -> None:
    whole = matrix_of([rand(130, 32)])
    for start, stop in ((1, 64), (0, 63), (64, 64), (0, 131), (128, 64), (-64, 64)):
        with pytest.raises(
            ValueError, match=f"outputs {start} to {stop} of 130: .* multiple of 64"
        ):
            whole.columns(start, stop)
    both = matrix_of([weight_of("u4", 64, 32), rand(64, 32)])
    with pytest.raises(ValueError, match="of 128: a range of one matrix"):
        both.columns(0, 64)


# -- experts and MLPs


NUM, WIDTH, HIDDEN = 7, 48, 96
EXPERT_FORMATS = ("bf16", "int8", "u4", "e2m1")


def stack_of(form: str, n: int, k: int, seed: int) -> QuantisedStack:
    weights: list[Any] = [weight_of(form, n, k, seed + e) for e in range(NUM)]
    assert isinstance(weights[0], Quantised)
    stack = QuantisedStack(NUM, n, k, weights[0])
    stack.pack(0, *weights)
    return stack


def experts_of(form: str, numbers: range) -> Experts:
    """Some of seven experts."""
    biases = rand(NUM, 2 * WIDTH, seed=7), rand(NUM, HIDDEN, seed=8)
    own = biases[0][numbers.start : numbers.stop], biases[1][numbers.start : numbers.stop]
    size, gate = (len(numbers), WIDTH, HIDDEN), Clamp(1.7, 2.0)
    if form in FORMATS[1:]:
        stacks = stack_of(form, 2 * WIDTH, HIDDEN, 10), stack_of(form, HIDDEN, WIDTH, 50)
        packed = stacks[0].part(numbers), stacks[1].part(numbers)
        return Experts(*size, None, own, gate, packed=packed)
    found = Experts(*size, 0 if form == "int8" else None, own, gate)
    for i, e in enumerate(numbers):
        found.pack(i, rand(2 * WIDTH, HIDDEN, seed=10 + e), rand(HIDDEN, WIDTH, seed=50 + e))
    return found


class Sized:
    """The sizes that `Work` reads of a bank."""

    kernel, num_experts, out_width, dtype, unit_bytes = "", NUM, HIDDEN, torch.bfloat16, 0
    residency = None


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_ranges_of_experts_fill_the_slots_of_the_whole(form: str) -> None:
    rng, x = random.Random(form), rand(40, HIDDEN, seed=3)
    for _ in range(3):
        ids = torch.tensor([rng.sample(range(NUM), 3) for _ in range(40)])
        bank: Any = Sized()
        work = Work(bank, ids, 8)
        experts_of(form, range(NUM)).run(
            x, work.token_S, work.flat.buffer_info()[0], len(work.units), work.slots_SD
        )
        found = torch.zeros_like(work.slots_SD)
        for start, stop in cut(rng, NUM, 1):
            own = [
                u._replace(expert=u.expert - start) for u in work.units if start <= u.expert < stop
            ]
            flat = torch.tensor(own)
            experts = experts_of(form, range(start, stop))
            experts.run(x, work.token_S, flat.data_ptr(), len(own), found)
        assert is_whole([found], work.slots_SD)


def cut_experts(form: str, width: int, hidden: int, own: Cut | None) -> Experts:
    """Seven experts, or a share of each."""
    biases = rand(NUM, 2 * width, seed=7), rand(NUM, hidden, seed=8)
    if own is not None:
        biases = (
            own.of_up(biases[0].t()).t().contiguous(),
            own.of_down(biases[1].t()).t().contiguous(),
        )
    size, gate = (NUM, width, hidden), Clamp(1.7, 2.0)
    if form in FORMATS[1:]:
        stacks = stack_of(form, 2 * width, hidden, 10), stack_of(form, hidden, width, 50)
        if own is not None:
            first, last = own.inner.start, own.inner.stop
            up = stacks[0].outputs(own.inner, range(width + first, width + last))
            stacks = up, stacks[1].outputs(own.columns)
        return Experts(*size, None, biases, gate, packed=stacks, cut=own)
    found = Experts(*size, 0 if form == "int8" else None, biases, gate, cut=own)
    for e in range(NUM):
        up, down = rand(2 * width, hidden, seed=10 + e), rand(hidden, width, seed=50 + e)
        found.pack(e, *((up, down) if own is None else (own.of_up(up), own.of_down(down))))
    return found


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_shares_of_each_expert_fill_the_slots_of_the_whole(form: str) -> None:
    """Inner values of all shares come first, then the outputs. Units are computed in two runs."""
    rng, width, hidden = random.Random(form), 256, 200
    x = rand(40, hidden, seed=3)
    whole = cut_experts(form, width, hidden, None)
    for num in (1, 9, 40):
        bank: Any = Sized()
        bank.out_width = hidden
        work = Work(bank, torch.tensor([rng.sample(range(NUM), 3) for _ in range(num)]), 8)
        units, size = work.flat.buffer_info()[0], 3 * work.flat.itemsize
        whole.run(x[:num], work.token_S, units, len(work.units), work.slots_SD)
        found, inner = torch.zeros_like(work.slots_SD), rand(3 * num, width)
        at = {0, width}
        at |= {64 * rng.randint(1, 3) for _ in range(2)}
        ranges = list(pairwise(sorted(at)))
        columns = (
            [(0, 64), (64, hidden)] if len(ranges) == 2 else [(0, 64), (64, 128), (128, hidden)]
        )
        cuts = [Cut(range(*a), range(*b)) for a, b in zip(ranges, columns, strict=True)]
        shares = [cut_experts(form, width, hidden, own) for own in cuts]
        first = len(work.units) // 2
        for lo, count in ((0, first), (first, len(work.units) - first)):
            if not count:
                continue
            place = units + lo * size
            given = x[:num].data_ptr(), work.token_S.data_ptr(), place, count
            for own in shares:
                cpu.native.experts_in(inner.data_ptr(), *given, own.address)
            for own in shares:
                given_out = inner.data_ptr(), place, count
                cpu.native.experts_out(found.data_ptr(), *given_out, own.address)
        assert is_whole([found], work.slots_SD)


def test_outputs_that_do_not_start_and_end_with_a_panel_are_not_copied() -> None:
    stack = stack_of("u4", 200, 32, 1)
    for own in (range(1, 64), range(63), range(64, 190)):
        with pytest.raises(ValueError, match=f"outputs {own.start} to {own.stop} of 200: .* of 64"):
            stack.outputs(own)
    with pytest.raises(ValueError, match="outputs 128 to 200 of 200"):
        stack.outputs(range(128, 200), range(64))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("down_form", ["bf16", "i8"])
def test_an_mlp_by_columns_has_the_bits_of_the_whole(form: str, down_form: str) -> None:
    rng = random.Random(form + down_form)
    width, hidden, x = 200, 136, rand(37, 136, seed=4)
    gate, up = (weight_of(form, width, hidden, seed) for seed in (1, 2))
    down = weight_of(down_form, hidden, width, 3)
    parts = []
    for a, b in cut(rng, width):
        both = matrix_of([on_top(rows_of(gate, a, b), rows_of(up, a, b))])
        parts.append(swiglu(both.linear(x)))
    inner, projection = torch.cat(parts, 1), matrix_of([down])
    found = [projection.columns(a, b).linear(inner) for a, b in cut(rng, hidden)]
    assert is_whole(found, Mlp(gate, up, down)(x))


# -- attention


@pytest.mark.parametrize("clip", [None, 0.5])
def test_projected_rows_are_placed_as_if_they_were_projected_there(clip: float | None) -> None:
    heads, groups, width, hidden, num = 4, 2, 32, 64, 19
    qkv = matrix_of([rand((heads + 2 * groups) * width, hidden)])
    norm = Norm(rand(hidden, seed=1), 1e-5)
    qk_norm = Norm(rand(width, seed=2), 1e-5), Norm(rand(width, seed=3), 1e-5)
    kernel = Attention(
        qkv,
        norm,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=width,
        scale=0.2,
        qk_norm=qk_norm,
        clip=clip,
    )
    x, cos, sin = (rand(num, n, seed=i) for i, n in enumerate((hidden, width, width)))
    found = []
    for is_whole_call in (True, False):
        kv = SlabKV(2, 64)
        step = Step([Span(kv, 0, 0, num)], num, False)
        spans = step.addresses(kernel.slab, x).address
        step.reach()
        if is_whole_call:
            q = kernel.enter(x, cos, sin, 1, spans, 1)
        else:
            q = kernel.place(qkv.linear(norm(x)), cos, sin, 1, spans, 1)
        found.append([q, *(t.clone() for t in kv.read(1, 0, num))])
    for one, other in zip(*found, strict=True):
        assert is_whole([one], other)
    assert found[0][1].abs().sum() > 0
