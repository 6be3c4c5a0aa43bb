"""The weights of a layer's known submodules, and the kernels that are made of them.

    module  --heads_of, latents_of, mlp_of-->  weights  --kernel-->  object of `qllm.kernels.cpu`

Between both steps, `share` reduces weights to some of the heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.kernels.cpu import is_usable
from qllm.kernels.cpu.attention import HEAD_MULTIPLE, MAX_ROTATED, Attention, Latents
from qllm.kernels.cpu.experts import Mlp
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.quantised import matrix_of
from qllm.kernels.cpu.routers import DTYPES, MAX_TOP_K, Router
from qllm.kernels.quantised import Quantised
from qllm.models.discover import LayerParts
from qllm.models.heard import is_heard
from qllm.models.parts.known import (
    attention_kind,
    is_swiglu,
    latent_linears,
    norm_kind,
    num_turned,
    rotation_of_latents,
    router_kind,
)
from qllm.models.weights.quantised_linears import is_read, linear_in, values_of, weight_of


class Projection(NamedTuple):
    """The weight and the bias of a linear module."""

    weight: Tensor | Quantised
    bias: Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> "Projection":
        """Return the weight and the bias of a module. They share the module's memory."""
        return cls(weight_of(linear), None if linear.bias is None else linear.bias.detach())

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[0])

    def rows(self, start: int, stop: int) -> "Projection":
        """Return the weight of outputs [start, stop)."""
        which, weight = slice(start, stop), self.weight
        rows = weight.rows(which) if isinstance(weight, Quantised) else weight[which]
        return Projection(rows, None if self.bias is None else self.bias[which])

    def of_heads(self, heads: range, width: int) -> "Projection":
        """Return the outputs of some heads, which have `width` outputs each."""
        return self.rows(heads.start * width, heads.stop * width)


def matrix(projections: Sequence[Projection], arena: cpu.Arena) -> cpu.Matrix:
    """Return projections of the same input as one matrix, stacked along the outputs."""
    biases = [x.bias for x in projections]
    if any(b is not None for b in biases):
        given = zip(projections, biases, strict=True)
        biases = [
            torch.zeros(x.num_outputs, dtype=torch.bfloat16) if b is None else b for x, b in given
        ]
    return matrix_of([x.weight for x in projections], biases, arena)


# -- norms


def is_known_norm(module: Any) -> bool:
    """Return True if the kernels support a norm.

    A norm that rounds once may have an fp32 weight.
    """
    kind = None if module is None or is_heard(module) else norm_kind(module)
    weight = None if kind is None else module.weight
    wide = str(kind).startswith("rms_wide")
    return weight is not None and is_usable(weight.bfloat16() if wide else weight)


def norm_of(module: Any) -> Norm:
    """Return the kernels' norm for a module that `is_known_norm`."""
    eps = getattr(module, "variance_epsilon", None)
    bias, kind, weight = getattr(module, "bias", None), str(norm_kind(module)), module.weight
    if kind == "rms_wide_from_one":
        kind, weight = "rms_wide", 1.0 + weight.detach().float()
    return Norm(weight, module.eps if eps is None else eps, kind, bias)


def native_norm(module: Any) -> Norm | None:
    """Return the kernels' norm for a module; None if the kernels do not support the norm."""
    return norm_of(module) if is_known_norm(module) else None


# -- attention


class HeadWeights(NamedTuple):
    """The weights of attention over keys and values."""

    queries: Projection
    gate: Projection | None
    """Projection of the normed input to a gate of every value of every head."""
    keys: Projection
    values: Projection
    out: Projection
    norm: Norm
    qk_norm: tuple[Norm, Norm] | None
    sinks_N: Tensor | None
    head_dim: int
    scale: float
    clip: float | None
    half_table: bool
    rotated: int

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.queries.num_outputs // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.keys.num_outputs // self.head_dim

    @property
    def norm_is_whole(self) -> bool:
        """True if `qk_norm` reads all heads of a token together."""
        return self.qk_norm is not None and self.qk_norm[0].width != self.head_dim

    def share(self, heads: range, kv_heads: range) -> "HeadWeights":
        """Return the weights of some query heads and of their KV heads, with the whole `out`."""
        sinks, gate, width = self.sinks_N, self.gate, self.head_dim
        return self._replace(
            queries=self.queries.of_heads(heads, width),
            gate=None if gate is None else gate.of_heads(heads, width),
            keys=self.keys.of_heads(kv_heads, width),
            values=self.values.of_heads(kv_heads, width),
            sinks_N=None if sinks is None else sinks[heads.start : heads.stop],
        )

    def kernel(self, arena: cpu.Arena) -> Attention:
        """Pack the projections before attention and return the kernel."""
        return Attention(
            matrix([self.queries, self.keys, self.values], arena),
            self.norm,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            qk_norm=self.qk_norm,
            sinks_N=self.sinks_N,
            clip=self.clip,
            half_table=self.half_table,
            rotated=self.rotated,
        )


def knows_attention(attn: Any, norm: Any) -> bool:
    """Return True if the kernels support an attention over keys and values after this norm."""
    kind = attention_kind(attn)
    return (
        kind is not None
        and not is_heard(attn)
        and attn.head_dim % HEAD_MULTIPLE == 0
        and all(is_read(getattr(attn, f"{x}_proj")) for x in "qkvo")
        and (not kind.startswith("gated") or is_usable(attn.q_proj.weight))
        and _num_rotated(attn) % HEAD_MULTIPLE == 0
        and is_known_norm(norm)
        and ("norm" not in kind or (is_known_norm(attn.q_norm) and is_known_norm(attn.k_norm)))
    )


def heads_of(attn: Any, norm: Any) -> HeadWeights:
    """Return the weights of a module that `knows_attention` accepted."""
    kind, queries = str(attention_kind(attn)), Projection.of(attn.q_proj)
    gate = None
    if kind.startswith("gated"):
        heads = queries.num_outputs // attn.head_dim // 2
        queries, gate = _halves_of_heads(attn.q_proj, heads)
    return HeadWeights(
        queries,
        gate,
        Projection.of(attn.k_proj),
        Projection.of(attn.v_proj),
        Projection.of(attn.o_proj),
        norm_of(norm),
        (norm_of(attn.q_norm), norm_of(attn.k_norm)) if "norm" in kind else None,
        attn.sinks if kind == "sinks" else None,
        attn.head_dim,
        attn.scaling,
        getattr(attn.config, "clip_qkv", None),
        kind == "sinks",
        _num_rotated(attn),
    )


def _num_rotated(attn: Any) -> int:
    """Return the number of values at the start of a head that are rotated."""
    is_part = str(attention_kind(attn)).startswith(("gated", "part"))
    return num_turned(attn) if is_part else int(attn.head_dim)


def _halves_of_heads(linear: nn.Linear, heads: int) -> tuple[Projection, Projection]:
    """Return the first and the second half of the outputs of every head, each with its bias."""
    weight, bias = linear.weight.detach(), linear.bias

    def half(which: int) -> Projection:
        own = None if bias is None else _half(bias.detach(), heads, which)
        return Projection(_half(weight, heads, which), own)

    return half(0), half(1)


def _half(x: Tensor, heads: int, half: int) -> Tensor:
    return x.reshape(heads, 2, -1, *x.shape[1:])[:, half].flatten(0, 1)


class LatentWeights(NamedTuple):
    """The weights of a multi-head latent attention."""

    queries: Projection
    """Projection to queries, from the input or from the queries' low rank."""
    low: Projection | None
    """Projection to the queries' low rank; None if queries are not compressed."""
    latent: Projection
    """Projection to the latent and the rotated part of a key."""
    out: Projection
    norm: Norm
    low_norm: Norm | None
    latent_norm: Norm
    expand_NVR: Tensor
    """Weight that expands a latent to keys and values of every head."""
    num_rotated: int
    value_dim: int
    scale: float
    rotation: str

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.expand_NVR.shape[0])

    def share(self, heads: range) -> "LatentWeights":
        """Return the weights of some heads, with the whole projection to latents and `out`."""
        width = self.queries.num_outputs // self.num_heads
        return self._replace(
            queries=self.queries.of_heads(heads, width),
            expand_NVR=self.expand_NVR[heads.start : heads.stop],
        )

    def kernel(self, arena: cpu.Arena) -> Latents:
        """Pack the projections before attention and return the kernel."""
        up = None
        if self.low_norm is not None:
            up = matrix([self.queries], arena), self.low_norm
        return Latents(
            matrix([self.queries if self.low is None else self.low, self.latent], arena),
            up,
            self.norm,
            self.latent_norm,
            self.expand_NVR,
            num_rotated=self.num_rotated,
            value_dim=self.value_dim,
            scale=self.scale,
            rotation=self.rotation,
            arena=arena,
        )


def knows_latents(attn: Any, norm: Any) -> bool:
    """Return True if the kernels support a multi-head latent attention after this norm."""
    return (
        rotation_of_latents(attn) is not None
        and not is_heard(attn)
        and attn.kv_lora_rank % HEAD_MULTIPLE == 0
        and attn.qk_rope_head_dim % HEAD_MULTIPLE == 0
        and attn.qk_rope_head_dim <= MAX_ROTATED
        and attn.qk_nope_head_dim % 2 == 0
        and all(is_read(x) for x in latent_linears(attn))
        and all(is_known_norm(x) for x in (norm, attn.kv_a_layernorm))
        and (attn.q_lora_rank is None or is_known_norm(attn.q_a_layernorm))
    )


def latents_of(attn: Any, norm: Any) -> LatentWeights:
    """Return the weights of a module that `knows_latents` accepted."""
    is_low = attn.q_lora_rank is not None
    expanded = linear_in(attn.kv_b_proj)
    if expanded is not None:
        expanded.read("bf16")  # the weight's factors become bf16
    return LatentWeights(
        Projection.of(attn.q_b_proj if is_low else attn.q_proj),
        Projection.of(attn.q_a_proj) if is_low else None,
        Projection.of(attn.kv_a_proj_with_mqa),
        Projection.of(attn.o_proj),
        norm_of(norm),
        norm_of(attn.q_a_layernorm) if is_low else None,
        norm_of(attn.kv_a_layernorm),
        values_of(attn.kv_b_proj).view(attn.num_heads, -1, attn.kv_lora_rank),
        attn.qk_rope_head_dim,
        attn.v_head_dim,
        attn.scaling,
        str(rotation_of_latents(attn)),
    )


# -- MLPs and routers


class MlpWeights(NamedTuple):
    """The weights of a dense layer's MLP or of shared experts."""

    gate: Tensor | Quantised
    up: Tensor | Quantised
    down: Tensor | Quantised
    share: Tensor | Quantised | None
    """Weight [1, D]. The sigmoid of its product with a row scales the row's output."""

    def kernel(self) -> Mlp:
        """Pack the weights and return the kernel."""
        return Mlp(*self)


def knows_mlp(mlp: Any, gate: Any) -> bool:
    """Return True if the kernels support an MLP whose output this module's gate scales."""
    return (
        is_swiglu(mlp)
        and not is_heard(mlp)
        and (gate is None or not is_heard(gate))
        and all(is_read(getattr(mlp, f"{x}_proj")) for x in ("gate", "up", "down"))
        and (gate is None or (type(gate) is nn.Linear and gate.bias is None))
        and (gate is None or is_read(gate))
    )


def mlp_of(mlp: Any, gate: Any) -> MlpWeights:
    """Return the weights of modules that `knows_mlp` accepted."""
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    share = None if gate is None else weight_of(gate)
    gate_FD, up_FD, down_DF = (weight_of(x) for x in linears)
    return MlpWeights(gate_FD, up_FD, down_DF, share)


def knows_router(parts: LayerParts) -> bool:
    """Return True if the kernels support the router of a layer and the norm before it."""
    router: Any = parts.router
    kind = router_kind(router)
    return (
        kind is not None
        and not is_heard(router)
        and is_usable(router.weight, DTYPES if _is_in_bf16(parts) else (torch.bfloat16,))
        and (router.top_k == 2 if kind == "sparse_mixer" else router.top_k <= MAX_TOP_K)
        and is_known_norm(parts.post_attention_layernorm)
    )


def _is_in_bf16(parts: LayerParts) -> bool:
    """Return True if a layer computes in bf16.

    The dtype of its router's weight does not matter.
    """
    return any(x.dtype is torch.bfloat16 for x in parts.layer.parameters())


def router_of(router: Any, norm: Any) -> Router:
    """Return the kernel of a router that `knows_router` accepted, after this norm."""
    kind = router_kind(router)
    settings: dict[str, Any] = {"renormalise": True, "wide": kind == "wide"}
    if kind == "flag":
        settings["renormalise"] = router.norm_topk_prob
    elif kind == "chosen":
        settings["bias_E"] = getattr(router, "bias", None)
    elif kind == "sigmoid":
        settings = {
            "kind": kind,
            "renormalise": router.norm_topk_prob,
            "wide": True,
            "correction_E": router.e_score_correction_bias,
            "groups": router.num_group,
            "top_groups": router.topk_group,
            "scaling": router.routed_scaling_factor,
        }
    elif kind == "softmax_fp32":
        is_grouped = router.topk_method == "group_limited_greedy"
        settings = {
            "kind": kind,
            "renormalise": False,
            "wide": True,
            "groups": router.num_group if is_grouped else 1,
            "top_groups": router.topk_group if is_grouped else 1,
            "scaling": router.routed_scaling_factor,
        }
    elif kind == "sparse_mixer":
        jitter = torch.tensor(
            2 * router.router_jitter_noise, dtype=torch.bfloat16
        )  # in the form that the model compares
        settings = {"kind": kind, "renormalise": False, "wide": False, "jitter": float(jitter)}
    return Router(router.weight.detach(), norm_of(norm), top_k=router.top_k, **settings)
