"""Kernels for bf16 on the CPU, over torch tensors.

    Matrix      a weight in panels; `linear` reads it at the memory's speed for a few rows
    Attention   norm, QKV, q/k norm, rotation and KV write of one layer; attention on the KV slabs
    Router      norm, router, softmax, top-k
    Experts     gate/up, SwiGLU and down of ranges of expert units

A row's bits do not depend on the rows beside it nor on the number of threads: every output is a
sum over k in one fixed order. Rounding happens where transformers' modules round, so results
differ from theirs only by the order of fp32 sums. The source is C++ in this folder; where it was
not built (no compiler), `MISSING` says why and torch computes.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MISSING: str | None = None
"""Why the kernels are not there; None if they are."""
native: Any = None
try:
    native = import_module("qllm.kernels.cpu._native")
except ImportError as error:
    MISSING = f"qllm.kernels.cpu._native was not built ({error}); it needs a C++17 compiler"

HEAD_DIMS = (32, 64, 96, 128)
"""Widths of a head that `Attention` is made for."""
MAX_SHARE = 48
"""Query heads of one KV head."""
MAX_TOP_K = 64
HUGE_PAGE = 2 << 20
"""Bytes."""
ARENA_NUMEL = 8 << 20
"""Values that an arena gets from the system at once, if they are enough."""


class _Matrix(ctypes.Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64))


class _Attention(ctypes.Structure):
    _fields_ = (
        ("qkv", _Matrix),
        ("norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("norm_whole", c_int64),
        ("eps", c_float),
        ("qk_eps", c_float),
        ("scale", c_float),
    )


class _Router(ctypes.Structure):
    _fields_ = (
        ("norm", c_void_p),
        ("weight", _Matrix),
        ("top_k", c_int64),
        ("renormalise", c_int64),
        ("wide", c_int64),
        ("eps", c_float),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("num", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
    )


def kind() -> str:
    """The best instruction set that is there, for results."""
    return str(native.available()[0])


def set_threads(num: int) -> None:
    """Threads that the kernels compute with; nothing where they were not built."""
    if native is not None:
        native.threads(num)


def packed_numel(num_out: int, num_in: int) -> int:
    """Values of a packed [out, in] weight."""
    return -(-num_out // 16) * 16 * num_in


def huge_empty(numel: int) -> Tensor:
    """An uninitialised bf16 [numel] on huge pages where the system has them.

    A product with one row streams its weight once; on pages of 4 KiB that runs at half of the
    speed (measured: 15 against 29 GB/s on a Zen 4 core), because the prefetchers stop at the end
    of each. The memory is freed with the tensor.
    """
    size = max(1, numel) * 2
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=numel)


class Arena:
    """Gives out packed weights that lie one after the other on huge pages."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.bfloat16)

    def take(self, *shape: int) -> Tensor:
        """An uninitialised bf16 tensor, its start on a cache line."""
        numel = math.prod(shape)
        if numel > self._left.numel():
            self._left = huge_empty(max(numel, ARENA_NUMEL))
        found, self._left = self._left[:numel], self._left[-(-numel // 32) * 32 :]
        return found.view(shape)


def pack(weight_NK: Tensor, out: Tensor) -> None:
    """Copy one bf16 [out, in] weight of any strides into `out`, of `packed_numel` values."""
    n, k = weight_NK.shape
    if weight_NK.dtype is not torch.bfloat16 or out.dtype is not torch.bfloat16 or k % 2:
        raise ValueError(f"cannot pack {weight_NK.dtype} {tuple(weight_NK.shape)}")
    if out.numel() != packed_numel(n, k) or not out.is_contiguous():
        raise ValueError(f"{tuple(out.shape)} does not hold a packed {(n, k)}")
    native.pack(out.data_ptr(), weight_NK.data_ptr(), n, k, *weight_NK.stride())


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


class Matrix:
    """A packed weight.

    Args:
        weights: bf16 [out, in] each, of one input; put on top of each other.
        biases: bf16 [out] each, or all None.
        arena: Where the packed weight lies; by default in memory of its own.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        arena: Arena | None = None,
    ) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.num_out, self.num_in = weight.shape
        numel = packed_numel(*weight.shape)
        self.packed = weight.new_empty(numel) if arena is None else arena.take(numel)
        pack(weight, self.packed)
        given = [b for b in biases if b is not None]
        self.bias = torch.cat(given) if given else None
        self.struct = _Matrix(
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.num_out,
            self.num_in,
        )
        self._address = ctypes.addressof(self.struct)

    def linear(self, x: Tensor) -> Tensor:
        """`F.linear`; x is bf16 [..., in]."""
        x = _dense(x)
        out = x.new_empty((*x.shape[:-1], self.num_out))
        rows = x.numel() // self.num_in
        native.linear(out.data_ptr(), x.data_ptr(), self._address, rows)
        return out


class Attention:
    """One layer's attention without its output projection.

    A query's bits depend on its position and the keys alone, not on the queries beside it.

    Raises:
        ValueError: The kernels are not made for the shape.
    """

    def __init__(
        self,
        qkv: Matrix,
        norm_D: Tensor,
        eps: float,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qk_norm: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={head_dim}; known: {HEAD_DIMS}")
        if num_heads % num_kv_heads or num_heads > MAX_SHARE * num_kv_heads:
            raise ValueError(f"{num_heads} heads on {num_kv_heads}; at most {MAX_SHARE} on one")
        q_norm, k_norm, qk_eps = qk_norm or (None, None, 0.0)
        self._keep = (qkv, norm_D, q_norm, k_norm)
        self._num_heads, self._head_dim = num_heads, head_dim
        self._struct = _Attention(
            qkv.struct,
            norm_D.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            num_heads,
            num_kv_heads,
            head_dim,
            q_norm is not None and q_norm.numel() != head_dim,
            eps,
            qk_eps,
            scale,
        )
        self._address = ctypes.addressof(self._struct)

    def enter(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layer: int, spans: int, num_spans: int
    ) -> Tensor:
        """Queries [T, N * H]; keys and values go where the spans (an address) say."""
        x_TD, cos, sin = _dense(x_TD), _dense(cos), _dense(sin)
        num_tokens = x_TD.shape[0]
        q = x_TD.new_empty((num_tokens, self._num_heads * self._head_dim))
        native.attend_in(
            q.data_ptr(),
            x_TD.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            self._address,
            layer,
            spans,
            num_spans,
        )
        return q

    def attend(
        self, q: Tensor, layer: int, window: int | None, spans: int, num_spans: int, whole: bool
    ) -> Tensor:
        """Causal attention of the spans' queries, [T, N * H] as `q`.

        Args:
            q: What `enter` gave.
            layer: Its index.
            window: Of a sliding attention.
            spans: Address of the spans.
            num_spans: How many there are.
            whole: Every token is in a span; else the others get zeros.
        """
        out = torch.empty_like(q) if whole else torch.zeros_like(q)
        native.attend(
            out.data_ptr(), q.data_ptr(), self._address, layer, window or 0, spans, num_spans
        )
        return out


class Router:
    """Norm, router, softmax over all experts, top-k.

    Args:
        weight_ED: Of the router.
        norm_D: Weight of the RMS norm before it.
        eps: Of that norm.
        top_k: Experts per token.
        renormalise: Divide the weights by their sum.
        wide: Weights stay fp32; else they are rounded to bf16.
    """

    def __init__(
        self,
        weight_ED: Tensor,
        norm_D: Tensor,
        eps: float,
        *,
        top_k: int,
        renormalise: bool,
        wide: bool,
    ) -> None:
        if not 1 <= top_k <= min(MAX_TOP_K, weight_ED.shape[0]):
            raise ValueError(f"top_k={top_k} of {weight_ED.shape[0]} experts")
        matrix = Matrix([weight_ED])
        self._keep = (matrix, norm_D)
        self.top_k = top_k
        self.dtype = torch.float32 if wide else torch.bfloat16
        self._struct = _Router(norm_D.data_ptr(), matrix.struct, top_k, renormalise, wide, eps)
        self._address = ctypes.addressof(self._struct)

    def __call__(self, mid_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normed input [T, D], expert ids [T, K] and their weights [T, K]."""
        mid_TD = _dense(mid_TD)
        num = mid_TD.shape[0]
        normed = torch.empty_like(mid_TD)
        ids = torch.empty((num, self.top_k), dtype=torch.int64)
        weights = torch.empty((num, self.top_k), dtype=self.dtype)
        native.route(
            normed.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            mid_TD.data_ptr(),
            num,
            self._address,
        )
        return normed, ids, weights


class Experts:
    """SwiGLU experts of one layer.

    Args:
        up: bf16 [2F, D] per expert, gate first.
        down: bf16 [D, F] per expert.
    """

    def __init__(self, up: Sequence[Tensor], down: Sequence[Tensor]) -> None:
        (two_f, d), num, arena = up[0].shape, len(up), Arena()
        self._up = arena.take(num, packed_numel(two_f, d))
        self._down = arena.take(num, packed_numel(d, two_f // 2))
        for e in range(num):
            pack(up[e], self._up[e])
            pack(down[e], self._down[e])
        self._struct = _Experts(self._up.data_ptr(), self._down.data_ptr(), num, two_f // 2, d)
        self._address = ctypes.addressof(self._struct)

    def run(
        self, x_TD: Tensor, token_S: Tensor, units: int, num_units: int, slots_SD: Tensor
    ) -> None:
        """Run consecutive units (an address of expert, lo, hi) into their rows of `slots_SD`."""
        native.experts(
            slots_SD.data_ptr(),
            _dense(x_TD).data_ptr(),
            token_S.data_ptr(),
            units,
            num_units,
            self._address,
        )


def combine(slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum over k of weight times slot: [T, D]; `inverse_S` finds the slot of every (t, k)."""
    num_tokens, top_k = weights_TK.shape
    width = slots_SD.shape[1]
    out = slots_SD.new_empty((num_tokens, width))
    native.combine(
        out.data_ptr(),
        slots_SD.data_ptr(),
        inverse_S.data_ptr(),
        _dense(weights_TK).data_ptr(),
        weights_TK.dtype is torch.float32,
        num_tokens,
        top_k,
        width,
    )
    return out
