"""The arithmetic of NVIDIA's matrix units on a CPU, for kernels in Triton's interpreter.

A matrix unit adds an accumulator and some products of bf16 numbers in one *fused sum*:

    1. A product's exponent is the sum of its factors' exponents; its significand is in [1, 4).
    2. All terms are moved to the largest exponent and cut off a number of bits behind it.
    3. Their exact sum is cut off to fp32.

One output is a *chain* of fused sums over ascending inputs. On sm_90, `mma.sync` and `wgmma` have
16 products and 25 bits, whatever the tile; on sm_80 and sm_89 there are 8 products and 24 bits. The
rule is that of MMA-Sim (arXiv:2511.10909), whose authors compared it bit by bit with cards. Until
a card of ours has given the bits of `tests/kernels/fused_sums.json`, it is a published rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.interpret import _widened

Array = npt.NDArray[Any]


class Unit(NamedTuple):
    """Arithmetic of a kind of matrix unit."""

    products: int
    """Number of products in one fused sum."""
    bits: int
    """Number of bits that a term keeps behind the largest exponent."""
    zero: int
    """Exponent of a term that is zero."""


HOPPER, AMPERE = Unit(16, 25, -133), Unit(8, 24, -132)
UNITS = {80: AMPERE, 86: AMPERE, 89: AMPERE, 90: HOPPER, 100: HOPPER, 120: HOPPER}
"""Unit of each SM version."""
LEAST = -126
"""Exponent of the smallest normal number in bf16 and fp32, which smaller numbers share."""


def fused_sum(acc: Array, a: Array, b: Array, unit: Unit) -> Array:
    """Return acc + the products of a and b along their last axis, added as the unit adds.

    Args:
        acc: Accumulators, fp32 [...].
        a: Factors that are bf16 numbers, fp32 [..., products].
        b: Other factors, of the same shape.
        unit: Unit to imitate.
    """
    (size_a, e_a), (size_b, e_b) = _parts(a), _parts(b)
    with np.errstate(invalid="ignore"):
        sizes = size_a * size_b
    return _added(*_parts(acc), sizes, e_a + e_b, unit)


def _parts(x: Array) -> tuple[Array, Array]:
    """Return significands with a size in [1, 2), and exponents."""
    size, exponent = np.frexp(x.astype(np.float64))
    exponent = np.where(np.isfinite(x), exponent.astype(np.int64) - 1, 0)
    shift = np.minimum(exponent - LEAST, 0)
    return 2.0 * size * _power(shift), exponent - shift


def _power(exponent: Array) -> Array:
    """Return two to a power of at least -1022. Whatever is smaller is cut off anyway."""
    power: Array = (np.maximum(exponent, -1022) + 1023 << 52).view(np.float64)
    return power


def _added(size_c: Array, e_c: Array, sizes: Array, exponents: Array, unit: Unit) -> Array:
    """Add accumulators and products that are given by significands and exponents."""
    with np.errstate(invalid="ignore", over="ignore"):
        e_c = np.where(size_c == 0, unit.zero, e_c)
        exponents = np.where(sizes == 0, unit.zero, exponents)
        most = np.maximum(exponents.max(-1), e_c)
        kept = np.trunc(sizes * _power(exponents - most[..., None] + unit.bits)).sum(-1)
        kept += np.trunc(size_c * _power(e_c - most + unit.bits))
        return cut_off(np.ldexp(kept, most - unit.bits))


def cut_off(exact: Array) -> Array:
    """Return fp64 numbers in fp32, rounded towards zero; every NaN and zero is one number."""
    nearest = exact.astype(np.float32)
    is_far = (np.abs(nearest.astype(np.float64)) > np.abs(exact)) & (np.abs(exact) < 2.0**128)
    found = np.where(is_far, np.nextafter(nearest, np.float32(0)), nearest) + np.float32(0)
    found[np.isnan(found)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return found


def order(num: int, width: int = 2) -> list[int]:
    """Return the inputs of a product in the order in which instructions add them.

    Args:
        num: Number of inputs.
        width: Number of neighbours along K in a thread's register, `kWidth` of Triton. With 2 the
            order is ascending.
    """
    if width < 2 or width % 2 or num % (8 * width):
        raise ValueError(
            f"{num} inputs with kWidth {width}: kWidth must be even, and the inputs a multiple of "
            f"{8 * width}"
        )
    return [
        block + half * 4 * width + thread * width + pair + one
        for block in range(0, num, 8 * width)
        for pair in range(0, width, 2)
        for half in (0, 1)
        for thread in range(4)
        for one in (0, 1)
    ]


def chain(a: Array, b: Array, acc: Array, unit: Unit, width: int = 2) -> Array:
    """Return acc [M, N] + a [M, K] @ b [K, N] by chains of fused sums in `order`."""
    inputs = order(a.shape[1], width)
    (size_a, e_a), (size_b, e_b) = _parts(a), _parts(b.T)
    acc = acc.astype(np.float32)
    for at in range(0, len(inputs), unit.products):
        of = inputs[at : at + unit.products]
        with np.errstate(invalid="ignore"):
            sizes = size_a[:, None, of] * size_b[None, :, of]
        acc = _added(*_parts(acc), sizes, e_a[:, None, of] + e_b[None, :, of], unit)
    return acc


def fma_chain(a: Array, b: Array, acc: Array) -> Array:
    """Return acc [M, N] + a [M, K] @ b [K, N] in fp32, one fused multiply-add after the other."""
    found = acc.astype(np.float32)
    for k in range(a.shape[1]):
        product = a[:, k, None].astype(np.float64) * b[None, k].astype(np.float64)
        found = _rounded_sum(product, found.astype(np.float64))
    return found


def _rounded_sum(x: Array, y: Array) -> Array:
    """Return x + y, which are fp64, rounded once to fp32."""
    total = x + y
    with np.errstate(invalid="ignore"):
        part = total - x
        rest = (x - (total - part)) + (y - part)  # exact: x + y = total + rest
    # Rounding to odd first makes the second rounding that of the exact sum.
    is_even = (total.view(np.int64) & 1) == 0
    is_off = np.isfinite(total) & (rest != 0) & is_even
    odd = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    with np.errstate(over="ignore"):
        return np.where(is_off, odd, total).astype(np.float32)


class _Product(interpreter.TensorHandle):  # type: ignore[misc]
    """A product without an accumulator, which is computed when it is used.

    The compiler makes one instruction of a product and the sum with it: `acc += tl.dot(a, b)` is
    `acc = tl.dot(a, b, acc)`.
    """

    def __init__(self, added_to: Callable[[Array], Array], shape: tuple[int, int]) -> None:
        self.added_to, self.dtype, self.attr, self._shape = added_to, tl.float32, {}, shape

    @cached_property
    def data(self) -> Array:
        return self.added_to(np.zeros(self._shape, np.float32))


def _adding(a: Any, b: Any, precision: Any, unit: Unit, width: int) -> Callable[[Array], Array]:
    """Return a function that adds the product of two blocks to an accumulator."""
    if a.data.ndim != 2:
        raise TypeError(f"a product of {a.data.ndim} axes: the arithmetic of 2 axes is known")
    if a.dtype.scalar == tl.bfloat16:
        return partial(chain, _widened(a).data, _widened(b).data, unit=unit, width=width)
    if a.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.IEEE:
        return partial(fma_chain, a.data, b.data)
    raise TypeError(
        f"a product of {a.dtype.scalar} with the precision {precision}: the arithmetic of bf16 is "
        'known, and that of fp32 with the precision "ieee"'
    )


@contextmanager
def matrix_unit(sm: int, width: int = 2) -> Iterator[None]:
    """Let interpreted kernels add as a card does, in products, and in no known order elsewhere.

    Products of bf16 numbers are chains of fused sums. Products of fp32 numbers with the precision
    "ieee" are chains of fused multiply-adds, because compiled kernels use no matrix unit there.
    Others are refused. `tl.sum` of floats adds in an order that depends on the shape of its block,
    because on a card the order depends on the layout: it is not the order of any card.

    Args:
        sm: SM version of the card, one of `UNITS`.
        width: Value of `kWidth` in the compiled kernel, see `order`.
    """
    if sm not in UNITS:
        raise ValueError(f"sm={sm}: the arithmetic of {', '.join(map(str, UNITS))} is known")
    is_alone = [False]
    dot, fadd = TritonSemantic.dot, interpreter.InterpreterBuilder.create_fadd

    def seen_dot(self: Any, lhs: Any, rhs: Any, acc: Any, *how: Any) -> Any:
        is_alone[0] = acc is None
        return dot(self, lhs, rhs, acc, *how)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, _imprecise: int) -> Any:
        added_to = _adding(a, b, precision, UNITS[sm], width)
        if is_alone[0]:
            return _Product(added_to, (a.data.shape[0], b.data.shape[1]))
        return interpreter.TensorHandle(added_to(d.data), tl.float32)

    def create_fadd(self: Any, lhs: Any, rhs: Any) -> Any:
        for product, other in ((rhs, lhs), (lhs, rhs)):
            if isinstance(product, _Product):
                return interpreter.TensorHandle(product.added_to(other.data), tl.float32)
        return fadd(self, lhs, rhs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonSemantic, "dot", seen_dot)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpreterBuilder, "create_fadd", create_fadd)
        patch.setattr(interpreter.ReduceOps, "sum", _sum_in_some_order)
        yield


def _sum_in_some_order(self: Any, x: Any) -> Any:
    """Sum in an order that follows from the shape; integers have one sum in any order."""
    data, axis = x.handle.data, self.axis
    if not x.dtype.is_floating():
        total = np.sum(data, axis=axis, keepdims=self.keep_dims)
        return self.to_tensor(total, x.dtype)
    parts = data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0)
    shuffled = np.random.default_rng(data.shape).permutation(len(parts))
    total = parts[shuffled[0]]
    for i in shuffled[1:]:
        total = total + parts[i]
    if self.keep_dims:
        total = total.reshape([1] * data.ndim) if axis is None else np.expand_dims(total, axis)
    return self.to_tensor(total, x.dtype)
