"""Triton kernels of `bench.gpu.bits`: products in any tile, reads, and a node of a graph."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """The part of a product that a program computes, and how it is compiled."""

    rows: int
    columns: int
    inputs: int
    """Inputs of one iteration."""
    warps: int
    stages: int
    in_registers: bool = False
    """True if the first operand goes through registers."""


@triton.jit
def _dot(
    a: "Any", b: "Any", c: "Any", start: "Any", one: "Any", M: "Any", N: "Any", K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, REGISTERS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute c[M, N] = start[M] + a[M, K] @ b[N, K].T in fp32; `one` is 1.0."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32) + tl.load(start + m, mask=m < M, other=0.0)[:, None]
    for at in range(0, K, BK):
        x_at, w_at = a + m[:, None] * K + (at + k)[None, :], b + n[None, :] * K + (at + k)[:, None]
        x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
        w = tl.load(w_at, mask=(n < N)[None, :], other=0.0)
        if REGISTERS:
            x = (x.to(tl.float32) * one).to(w.dtype)
        acc = tl.dot(x, w, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["num"])
def _turned(
    x: "Any", w: "Any", out: "Any", num: "Any", N: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out[T, N] = x[T, K] @ w[N, K].T with weights as the first operand."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    w_at, x_at = w + n[:, None] * K + k[None, :], x + t[None, :] * K + k[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    for at in range(0, K, BK):
        xx = tl.load(x_at + at, mask=(t < num)[None, :], other=0.0)
        acc = tl.dot(tl.load(w_at + at), xx, acc)
    at = out + t[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(t < num)[None, :])


@triton.jit
def _read(
    x: "Any", out: "Any", NUM: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
) -> None:
    """Read NUM numbers TURNS times; each turn gives each program the part of another one."""
    acc = tl.zeros([BLOCK], tl.float32)
    programs, me = tl.num_programs(0), tl.program_id(0)
    for turn in range(TURNS):
        for at in range(0, NUM // BLOCK // programs):
            part = (me + turn * 7) % programs + at * programs
            acc += tl.load(x + part * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + me * BLOCK + tl.arange(0, BLOCK), acc)


@triton.jit
def _step(word: "Any", PDL: tl.constexpr) -> None:
    """Count one; with PDL the next node starts early, and waits before it reads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(word, tl.load(word) + 1)


def product(a: Tensor, b: Tensor, tile: Tile, start: Tensor | None = None) -> tuple[Tensor, str]:
    """Return a @ b.T as fp32 accumulators, and the instructions that made them.

    Args:
        a: First operand [M, K], bf16.
        b: Second operand [N, K].
        tile: Tile of a program.
        start: First value of the accumulators of a row; None is 0.
    """
    if not (a.is_contiguous() and b.is_contiguous()):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(f"operands of shapes {shapes} must be contiguous; copy them")
    (m, k), n = a.shape, len(b)
    c = torch.full((m, n), float("nan"), device=a.device)
    first = torch.zeros(m, device=a.device) if start is None else start
    made = _dot[(triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns))](
        a, b, c, first, 1.0, m, n, K=k, BM=tile.rows, BN=tile.columns, BK=tile.inputs,
        REGISTERS=tile.in_registers, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if made is None:
        return c, "interpreted"
    shapes = r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k16|mma\.sync\.aligned\.m16n8k\d+)"
    found = sorted(set(re.findall(shapes, made.asm["ptx"])))
    return c, " ".join(found).replace(".sync.aligned", "").replace("mma_async.", "")


def turned(x: Tensor, w: Tensor, out: Tensor, tile: Tile) -> Callable[[], Any]:
    """Return a launch of x @ w.T into out, with `rows` of weights and `columns` of tokens."""
    n, k = w.shape
    if k % tile.inputs or n % tile.rows:
        raise ValueError(f"a product of {n} x {k} weights needs whole tiles, not {tile}")
    grid = (n // tile.rows, triton.cdiv(len(x), tile.columns))
    return partial(
        _turned[grid], x, w, out, len(x), N=n, K=k, BN=tile.rows, BT=tile.columns, BK=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def read(x: Tensor, turns: int) -> tuple[Callable[[], Any], int]:
    """Return a launch that reads x some times, and the bytes that it reads."""
    programs, block = 1056, 2048
    out = torch.empty(programs * block, device=x.device)
    run = partial(_read[(programs,)], x, out, NUM=len(x), BLOCK=block, TURNS=turns, num_warps=8)
    return run, len(x) // block // programs * programs * block * x.itemsize * turns


def step(word: Tensor, programmatic: bool) -> Callable[[], Any]:
    """Return a launch that counts one, with programmatic edges or plain ones."""
    return partial(_step[(1,)], word, PDL=programmatic, num_warps=1, launch_pdl=programmatic)
