"""Attention of known kinds, in few launches between the layer's norm and the residual sum."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from qllm.cuda.latents import into_latents, keeps_latents, out_of_latents
from qllm.cuda.step import PagedStep
from qllm.cuda.together import Together
from qllm.kernels.routing import Angles, HeadNorms, Norm
from qllm.models.parts.known import attention_kind, norm_kind, rotation_of_latents
from qllm.runner.layers.drivers import Rope

ROTATING = {"plain", "head_norm", "row_norm", "clipped_row_norm", "sinks"}
"""Kinds of attention whose kernel rotates keys as it writes KV."""


Normed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attention(Protocol):
    """Attention of a layer."""

    def enter(self) -> None:
        """Join the weights that share an input into one tensor."""

    def leave(self) -> None:
        """Give the model's modules their own weights again."""

    def __call__(self, x_TD: Tensor, rope: Rope, step: Any) -> Tensor:
        """Return the attention's output for its normed input."""
        ...


class HeadAttention(Attention, Protocol):
    """Attention of a known kind, whose heads can be computed without the output projection."""

    normed: Normed | None
    """Norms of the queries and keys of all heads of a token; None without such norms."""

    def project(self, x_TD: Tensor) -> list[Tensor]:
        """Return the products of the normed input, queries first."""
        ...

    def heads(self, projected: Sequence[Tensor], rope: Rope, step: PagedStep) -> Tensor:
        """Return the heads side by side, [T, N E]: the input of the output projection."""
        ...


class KnownAttention:
    """Attention over keys and values.

    Args:
        attn: A module of a kind in ROTATING.
        window: Number of keys that a query sees, itself included; None is all.
        kind: Kind of the module.
    """

    def __init__(self, attn: Any, window: int | None, kind: str | None) -> None:
        self._attn, self._window = attn, window
        self._qkv = Together([attn.q_proj, attn.k_proj, attn.v_proj])
        self.enter, self.leave = self._qkv.enter, self._qkv.leave
        has_row_norms = kind in {"row_norm", "clipped_row_norm"}
        self.normed: Normed | None = self._normed if has_row_norms else None
        self._limit = attn.config.clip_qkv if kind == "clipped_row_norm" else None
        self._sinks = attn.sinks if kind == "sinks" else None
        self._head_norms: HeadNorms | None = None
        if kind == "head_norm":
            q, k = attn.q_norm, attn.k_norm
            norms = q.weight.detach(), k.weight.detach()
            self._head_norms = HeadNorms(*norms, q.variance_epsilon, k.variance_epsilon)

    def _normed(self, q_TF: Tensor, k_TF: Tensor) -> tuple[Tensor, Tensor]:
        return self._attn.q_norm(q_TF), self._attn.k_norm(k_TF)

    def project(self, x_TD: Tensor) -> list[Tensor]:
        return self._qkv(x_TD)

    def heads(self, projected: Sequence[Tensor], rope: Rope, step: PagedStep) -> Tensor:
        attn, (q, k, v) = self._attn, projected
        num, width = q.shape[0], attn.head_dim
        qkv = q.view(num, -1, width), k.view(num, -1, width), v.view(num, -1, width)
        how = self._head_norms, self._limit, attn.scaling, self._window, self._sinks
        return step.attend_known(attn.layer_idx, qkv, rope, *how).view(num, -1)

    def __call__(self, x_TD: Tensor, rope: Rope, step: PagedStep) -> Tensor:
        q, k, v = self.project(x_TD)
        if self.normed is not None:
            q, k = self.normed(q, k)
        attended: Tensor = self._attn.o_proj(self.heads((q, k, v), rope, step))
        return attended


class KnownLatents:
    """Multi-head latent attention.

    Args:
        attn: A module that `is_known_attention` accepts.
    """

    def __init__(self, attn: Any) -> None:
        self._attn = attn
        self._is_compressed = attn.q_lora_rank is not None
        """True if queries are computed from a shorter vector, which has a norm."""
        queries = attn.q_a_proj if self._is_compressed else attn.q_proj
        self._first = Together([queries, attn.kv_a_proj_with_mqa])
        self.enter, self.leave = self._first.enter, self._first.leave

    normed: Normed | None = None

    def project(self, x_TD: Tensor) -> list[Tensor]:
        return self._first(x_TD)

    def heads(self, projected: Sequence[Tensor], rope: Rope, step: PagedStep) -> Tensor:
        attn, (q, kv) = self._attn, projected
        num = q.shape[0]
        cos, sin = (t[0].contiguous() for t in rope)
        angles = Angles(cos, sin, attn.config.rope_interleave)
        out_TNR = q.new_empty((num, attn.num_heads, attn.kv_lora_rank))
        compressed = (q, _norm(attn.q_a_layernorm)) if self._is_compressed else None
        given = kv, _norm(attn.kv_a_layernorm), angles, out_TNR, compressed
        normed = step.write_latents(attn.layer_idx, *given)
        q = q if normed is None else attn.q_b_proj(normed)
        queries = into_latents(attn, q.view(num, attn.num_heads, -1))
        step.attend_latents(attn.layer_idx, *queries, angles, attn.scaling, out_TNR)
        return out_of_latents(attn, out_TNR).view(num, -1)

    def __call__(self, x_TD: Tensor, rope: Rope, step: PagedStep) -> Tensor:
        attended: Tensor = self._attn.o_proj(self.heads(self.project(x_TD), rope, step))
        return attended


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def is_known_attention(attn: Any) -> bool:
    """Return True if `known_attention` supports a module."""
    if not keeps_latents(attn):
        return attention_kind(attn) in ROTATING
    return rotation_of_latents(attn) in {"halves", "pairs"} and all(
        norm_kind(norm) == "rms"
        for norm in (attn.kv_a_layernorm, attn.q_a_layernorm)
        if norm is not None
    )


def known_attention(attn: Any, window: int | None, kind: str | None = None) -> HeadAttention:
    """Return the attention that replaces a module of a known kind.

    Args:
        attn: The module, or a rank's share of it.
        window: Number of keys that a query sees, itself included; None is all.
        kind: Kind of the whole module; None looks at `attn`.
    """
    if keeps_latents(attn):
        return KnownLatents(attn)
    return KnownAttention(attn, window, kind or attention_kind(attn))
