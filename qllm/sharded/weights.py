"""The weights of a model that ranks may share, found in its modules.

A model can be split if this project's kernels compute all of it: their sums have one order. Other
models are refused by the name of the part that stands in the way.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.quantised import Quantised
from qllm.models.discover import LayerParts, ModelParts
from qllm.models.heard import is_heard
from qllm.models.weights.quantised_linears import is_read, weight_bytes, weight_of
from qllm.models.weights.quantised_weights import tensors_of
from qllm.runner.layers.native_experts import is_covered
from qllm.runner.layers.native_parts import (
    HeadWeights,
    LatentWeights,
    MlpWeights,
    heads_of,
    is_known_norm,
    knows_attention,
    knows_latents,
    knows_mlp,
    knows_router,
    latents_of,
    mlp_of,
)
from qllm.sharded.plan import LayerShape, ShardShape


class LayerWeights(NamedTuple):
    """The weights of one layer."""

    parts: LayerParts
    attention: HeadWeights | LatentWeights
    mlp: MlpWeights | None
    """Weights of the dense MLP or of the shared experts; None without them."""

    @classmethod
    def of(cls, parts: LayerParts) -> "LayerWeights":
        """Return the weights of a layer that `refuse_unsplit` accepts."""
        attn, norm = parts.self_attn, parts.input_layernorm
        module, gate = (parts.shared, parts.shared_gate) if parts.is_moe else (parts.mlp, None)
        return cls(
            parts,
            heads_of(attn, norm) if knows_attention(attn, norm) else latents_of(attn, norm),
            None if module is None else mlp_of(module, gate),
        )

    @property
    def shape(self) -> LayerShape:
        """Sizes of the layer, with bytes of weights."""
        attention, mlp, experts = self.attention, self.mlp, self.parts.experts
        queries = [attention.queries.weight]
        if isinstance(attention, LatentWeights):
            num_kv_heads, kv_weights = 1, [attention.latent.weight]
        else:
            num_kv_heads, kv_weights = attention.num_kv_heads, []
            kv_weights = [attention.keys.weight, attention.values.weight]
            queries += [] if attention.gate is None else [attention.gate.weight]
        num_experts, experts_bytes, expert_width = 0, 0, 0
        if experts is not None:
            num_experts, experts_bytes = _num_experts(experts), weight_bytes(experts)
            expert_width = _width(experts)
        width = 0 if mlp is None else int(mlp.gate.shape[0])
        inner = [] if mlp is None else [mlp.gate, mlp.up]
        hidden = attention.out.num_outputs
        down_bytes = 0 if mlp is None else bytes_of([mlp.down]) // hidden
        split = bytes_of(queries) + bytes_of(kv_weights) + bytes_of(inner)
        split += experts_bytes + down_bytes * hidden
        return LayerShape(
            attention.num_heads,
            num_kv_heads,
            bytes_of(queries) // attention.num_heads,
            bytes_of(kv_weights) // num_kv_heads,
            num_experts,
            experts_bytes // max(1, num_experts),
            expert_width,
            width,
            bytes_of(inner) // max(1, width),
            down_bytes,
            weight_bytes(self.parts.layer) - split,
        )


def shape_of(parts: ModelParts) -> ShardShape:
    """Return the sizes of a model that `refuse_unsplit` accepts."""
    embed: Any = parts.embed
    head, table = weight_of(parts.lm_head), embed.weight.detach()
    both = [table] if head is table or _same(head, table) else [table, head]
    bias = parts.lm_head.bias
    token_bytes = sum(bytes_of([w]) // len(table) for w in both)
    return ShardShape(
        tuple(LayerWeights.of(layer).shape for layer in parts.layers),
        int(table.shape[1]),
        int(table.shape[0]),
        token_bytes + (0 if bias is None else bias.element_size()),
        weight_bytes(parts.norm),
    )


def _same(head: Tensor | Quantised, table: Tensor) -> bool:
    return isinstance(head, Tensor) and head.data_ptr() == table.data_ptr()


def bytes_of(weights: Iterable[Tensor | Quantised]) -> int:
    """Return the bytes of weights, quantised ones as a checkpoint has them."""
    found = [tensors_of(w) if isinstance(w, Quantised) else [w] for w in weights]
    return sum(tensor.nbytes for tensors in found for tensor in tensors)


def _num_experts(experts: Any) -> int:
    return int(experts.down_proj.shape[0])


def _width(experts: Any) -> int:
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def refuse_unsplit(name: str, parts: ModelParts) -> None:
    """Refuse a model that cannot be split with the bits of one rank.

    Args:
        name: Name of the model's type.
        parts: Parts of the model.

    Raises:
        ModelError: A part cannot be split. The message names the first.
    """
    if why := why_unsplit(parts):
        raise ModelError(f"model {name!r} cannot be split over ranks: {why}; use one rank")


def why_unsplit(parts: ModelParts) -> str:
    """Return why no ranks can compute a model with the bits of one rank, or an empty text."""
    if cpu.MISSING:
        return cpu.MISSING
    if parts.around is not None:
        return "its own forward calls the layers"
    for layer in parts.layers:
        if why := _why_layer_unsplit(layer):
            return f"layer {layer.index} {why}"
    if not is_read(parts.lm_head) or not is_known_norm(parts.norm):
        return f"no kernel computes its head ({_kind(parts.lm_head)}) and the norm before it"
    embed: Any = parts.embed
    if type(embed) is not nn.Embedding or embed.max_norm is not None or is_heard(embed):
        return f"its embedding is no plain table but {_named(embed)}"
    if len(embed.weight) != parts.lm_head.out_features:
        return f"it has {len(embed.weight)} embeddings and {parts.lm_head.out_features} outputs"
    return ""


def _why_layer_unsplit(layer: LayerParts) -> str:
    attn, norm, experts = layer.self_attn, layer.input_layernorm, layer.experts
    if layer.new_state is not None:
        return f"carries a state ({_named(attn or layer.layer)})"
    if len(layer.attentions) > 1:
        return f"({_named(layer.layer)}) attends more than once"
    if norm is None or layer.post_attention_layernorm is None:
        return f"({_named(layer.layer)}) is run by hooks"
    if layer.rope_kind is not None:
        return f"has position embeddings of its own kind ({layer.rope_kind})"
    if not knows_attention(attn, norm) and not knows_latents(attn, norm):
        return f"has attention that no kernel computes ({_named(attn)}, {_kind(attn)})"
    if not layer.is_moe:
        mlp_kernel = knows_mlp(layer.mlp, None) and is_known_norm(layer.post_attention_layernorm)
        return "" if mlp_kernel else f"has an MLP that no kernel computes ({_named(layer.mlp)})"
    if not knows_router(layer):
        return f"has a router that no kernel computes ({_named(layer.router)})"
    if experts is None or not is_covered(experts):
        return f"has experts that no kernel computes ({_named(experts)})"
    if layer.shared is not None and not knows_mlp(layer.shared, layer.shared_gate):
        return f"has shared experts that no kernel computes ({_named(layer.shared)})"
    return ""


def _named(module: object) -> str:
    """Return the name of a module's class."""
    return type(module).__name__


def _kind(module: Any) -> str:
    """Return the dtype of a module's first weight as text."""
    dtype = next((p.dtype for p in module.parameters()), torch.bfloat16)
    return str(dtype).removeprefix("torch.")
