"""Attention of one layer on KV slabs, without its output projection.

    Attention   norm, QKV, q/k norm, rotation and KV write; attention
    Latents     the same for MLA: queries are projected to the latents' space; no latent is expanded
    Begun       an attention that was stopped between two blocks of keys

A query's bits depend on its position and the keys alone, not on the other queries.
"""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.kernels.cpu import Arena, Matrix, MatrixStruct, dense, native, pack, packed_numel
from qllm.kernels.cpu.norms import Norm, NormStruct

HEAD_MULTIPLE = 32
"""Divisor of the width of a head; in MLA, of both parts of a key."""
MAX_ROTATED = 256
"""Most rotated values of an MLA key (`kMaxRotated` in kernels.h)."""
ROTATIONS = ("halves", "pairs", "complex")
"""Ways in which MLA rotates (`Rotation` in kernels.h)."""


class _Heads(ctypes.Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("tail", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("heads", _Heads),
        ("qkv", MatrixStruct),
        ("norm", NormStruct),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("norm_whole", c_int64),
        ("cos_width", c_int64),
        ("rotated", c_int64),
        ("clip", c_float),
    )


class _Latents(ctypes.Structure):
    _fields_ = (
        ("heads", _Heads),
        ("down", MatrixStruct),
        ("up", MatrixStruct),
        ("norm", NormStruct),
        ("q_norm", NormStruct),
        ("kv_norm", NormStruct),
        ("into", c_void_p),
        ("out_of", c_void_p),
        ("key", c_int64),
        ("value", c_int64),
        ("rotation", c_int64),
    )


class PartStruct(ctypes.Structure):
    """`Part` in kernels.h."""

    _fields_ = (
        ("sums", c_void_p),
        ("softmax", c_void_p),
        ("begin", c_int64),
        ("end", c_int64),
        ("first", c_int64),
        ("last", c_int64),
    )


class Begun(NamedTuple):
    """An attention that has read some of its keys."""

    q: Tensor
    """Queries that `enter` returned."""
    sums: Tensor
    """fp32 [T, N, value]."""
    softmax: Tensor
    """fp32 [T, N, 2]: largest score and sum of each row so far."""

    def part(self, begin: int, end: int, first: bool, last: bool) -> PartStruct:
        """Return the part of keys [begin, end); `begin` is a multiple of KEY_BLOCK."""
        addresses = self.sums.data_ptr(), self.softmax.data_ptr()
        return PartStruct(*addresses, begin, end, first, last)


KEY_BLOCK = 64
"""Keys after which a part of an attention may end (`kKeys` in attention.inc)."""
_WHOLE = PartStruct(None, None, 0, 1 << 62, True, True)


class _Attends:
    """Base class of `Attention` and `Latents`, which write keys to a slab and attend over it."""

    slab: tuple[int, int, int]
    """KV heads, and the widths of a head's entry per token in the two slabs of a request."""
    _struct: Any
    _enter: Any

    @property
    def address(self) -> int:
        """Address of the object's struct of kernels.h."""
        return ctypes.addressof(self._struct)

    def _sizes(self) -> tuple[int, int]:
        heads = self._struct.heads
        return heads.heads * heads.head_dim, heads.heads * (heads.head_dim - heads.tail)

    def enter(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layer: int, spans: int, num_spans: int
    ) -> Tensor:
        """Return queries [T, N * H], and write keys and values to the spans at this address.

        Cos and sin are bf16 [1, T, .]; for a complex rotation both contain the same complex
        numbers.
        """
        x_TD, cos, sin = dense(x_TD), dense(cos), dense(sin)
        num_tokens = x_TD.shape[0]
        q = x_TD.new_empty((num_tokens, self._sizes()[0]))
        self._enter(
            q.data_ptr(),
            x_TD.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            self.address,
            layer,
            spans,
            num_spans,
        )
        return q

    def attend(
        self,
        q: Tensor,
        layer: int,
        window: int | None,
        spans: int,
        num_spans: int,
        whole: bool,
        part: PartStruct = _WHOLE,
    ) -> Tensor:
        """Compute causal attention of the spans' queries.

        Args:
            q: Queries that `enter` returned.
            layer: Index of the layer.
            window: Keys that a query of sliding attention sees; None is all.
            spans: Address of the spans.
            num_spans: Number of spans.
            whole: True if every token is in a span. If False, tokens outside of spans get zeros.
            part: Last part, if the attention is computed in parts.
        """
        shape = (q.shape[0], self._sizes()[1])
        out = q.new_empty(shape) if whole else q.new_zeros(shape)
        self._attend(out.data_ptr(), q, layer, window, spans, num_spans, part)
        return self._leave(out)

    def begin(self, q: Tensor) -> Begun:
        """Return the state that an attention in parts keeps between them."""
        num_tokens, num_heads = q.shape[0], self._struct.heads.heads
        widths = self._sizes()[1] // num_heads, 2
        sums, peaks = (torch.empty((num_tokens, num_heads, n), dtype=torch.float32) for n in widths)
        return Begun(q, sums, peaks)

    def attend_some(
        self,
        q: Tensor,
        layer: int,
        window: int | None,
        spans: int,
        num_spans: int,
        part: PartStruct,
    ) -> None:
        """Compute a part of `attend` that is not the last."""
        self._attend(0, q, layer, window, spans, num_spans, part)

    def _attend(
        self,
        out: int,
        q: Tensor,
        layer: int,
        window: int | None,
        spans: int,
        num_spans: int,
        part: PartStruct,
    ) -> None:
        heads, of = ctypes.addressof(self._struct.heads), ctypes.addressof(part)
        native.attend(out, q.data_ptr(), heads, layer, window or 0, spans, num_spans, of)

    def _leave(self, out: Tensor) -> Tensor:
        """Return the attention's output in the layout that the output projection reads."""
        return out


class Attention(_Attends):
    """Attention of query heads on KV heads.

    Args:
        qkv: Weight that projects to queries, keys and values.
        norm: Norm before the projection.
        num_heads: Query heads, N.
        num_kv_heads: KV heads, G.
        head_dim: Width of a head, H.
        scale: Factor of the scores.
        qk_norm: Norms of queries and keys, over one head or over all.
        sinks_N: Scores of a key without a value.
        clip: Limit of queries, keys and values after their norm.
        half_table: True if cos and sin are half as wide as the rotated values and serve both
            halves.
        rotated: Values at the start of a head that are rotated; None is all.

    Raises:
        ValueError: The kernels do not support the shape.
    """

    def __init__(
        self,
        qkv: Matrix,
        norm: Norm,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qk_norm: tuple[Norm, Norm] | None = None,
        sinks_N: Tensor | None = None,
        clip: float | None = None,
        half_table: bool = False,
        rotated: int | None = None,
    ) -> None:
        if head_dim % HEAD_MULTIPLE:
            raise ValueError(f"head_dim={head_dim} must be a multiple of {HEAD_MULTIPLE}")
        rotated = head_dim if rotated is None else rotated
        if rotated % HEAD_MULTIPLE or rotated > head_dim:
            raise ValueError(f"{rotated} rotated values must be a multiple of {HEAD_MULTIPLE}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads on {num_kv_heads}")
        sinks = None if sinks_N is None else sinks_N.detach().float().contiguous()
        self.qkv, self.norm = qkv, norm
        self._keep = (qk_norm, sinks)
        self.slab = num_kv_heads, head_dim, head_dim
        q_norm, k_norm = qk_norm or (None, None)
        self._enter = native.attend_in
        address = None if sinks is None else sinks.data_ptr()
        self._struct = _Attention(
            _Heads(num_heads, num_kv_heads, head_dim, 0, address, scale),
            qkv.struct,
            norm.struct,
            NormStruct() if q_norm is None else q_norm.struct,
            NormStruct() if k_norm is None else k_norm.struct,
            q_norm is not None and q_norm.width != head_dim,
            rotated // 2 if half_table else rotated,
            rotated,
            float("inf") if clip is None else clip,
        )

    def place(
        self, rows_TH: Tensor, cos: Tensor, sin: Tensor, layer: int, spans: int, num_spans: int
    ) -> Tensor:
        """Do the part of `enter` after the projection.

        Args:
            rows_TH: Projected rows, bf16 [T, (N + 2G) * H], which are overwritten.
            cos: Cosines, as in `enter`.
            sin: Sines, as in `enter`.
            layer: Index of the layer.
            spans: Address of the spans.
            num_spans: Number of spans.
        """
        rows_TH, cos, sin = dense(rows_TH), dense(cos), dense(sin)
        q = rows_TH.new_empty((rows_TH.shape[0], self._sizes()[0]))
        addresses = [x.data_ptr() for x in (q, rows_TH, cos, sin)]
        native.place_heads(*addresses, self.address, layer, spans, num_spans)
        return q


class Latents(_Attends):
    """Multi-head latent attention.

    Args:
        down: Weight that projects to queries (or their low rank), the latent and a key's rotated
            part.
        up: Weight that expands the queries' low rank, and the norm before it; None if queries are
            not compressed.
        norm: Norm before `down`.
        kv_norm: Norm of the latent, of rank R.
        expand_NVR: bf16 [N, E + V, R], which expands a latent to keys and values of every head.
        num_rotated: Rotated values of a key, F.
        value_dim: Width of a value, V.
        scale: Factor of the scores.
        rotation: One of `ROTATIONS`.
        arena: Allocator of the weights.

    Raises:
        ValueError: The kernels do not support the shape.
    """

    def __init__(
        self,
        down: Matrix,
        up: tuple[Matrix, Norm] | None,
        norm: Norm,
        kv_norm: Norm,
        expand_NVR: Tensor,
        *,
        num_rotated: int,
        value_dim: int,
        scale: float,
        rotation: str,
        arena: Arena,
    ) -> None:
        num, both, rank = expand_NVR.shape
        key = both - value_dim
        if rank % HEAD_MULTIPLE or num_rotated % HEAD_MULTIPLE or num_rotated > MAX_ROTATED:
            raise ValueError(
                f"latents of {rank} and {num_rotated} rotated values; both must be multiples of "
                f"{HEAD_MULTIPLE}, the latter at most {MAX_ROTATED}"
            )
        into = arena.take(num, packed_numel(rank, key))
        out_of = arena.take(num, packed_numel(value_dim, rank))
        for n in range(num):
            pack(expand_NVR[n, :key].t(), into[n])
            pack(expand_NVR[n, key:], out_of[n])
        self._keep = (down, up, norm, kv_norm, into, out_of)
        self._value_size = num * value_dim
        self.slab = 1, rank, num_rotated
        self._enter = native.latents_in
        self._struct = _Latents(
            _Heads(num, 1, rank + num_rotated, num_rotated, None, scale),
            down.struct,
            MatrixStruct() if up is None else up[0].struct,
            norm.struct,
            NormStruct() if up is None else up[1].struct,
            kv_norm.struct,
            into.data_ptr(),
            out_of.data_ptr(),
            key,
            value_dim,
            ROTATIONS.index(rotation),
        )

    def _leave(self, out: Tensor) -> Tensor:
        left = out.new_empty((out.shape[0], self._value_size))
        native.latents_out(left.data_ptr(), out.data_ptr(), self.address, out.shape[0])
        return left
