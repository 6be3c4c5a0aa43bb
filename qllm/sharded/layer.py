"""The share of a rank in one layer: packed weights, and the structs that the kernels read."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention, Latents
from qllm.kernels.cpu.experts import Cut, on_top
from qllm.kernels.cpu.quantised import expands, matrix_of
from qllm.kernels.quantised import Quantised
from qllm.runner.layers.native import NativeLayer
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import (
    HeadWeights,
    LatentWeights,
    MlpWeights,
    Projection,
    matrix,
    norm_of,
    router_of,
)
from qllm.runner.sweep import address_of, struct_of
from qllm.sharded.plan import LayerShare
from qllm.sharded.weights import LayerWeights


class ShareStruct(ctypes.Structure):
    """`Share` in ranks.h."""

    _fields_ = (
        ("out", c_void_p),
        ("column", c_int64),
        ("num_columns", c_int64),
        ("head_column", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_width", c_int64),
        ("k_width", c_int64),
        ("q_column", c_int64),
        ("k_column", c_int64),
        ("has_keys", c_int64),
        ("first_expert", c_int64),
        ("num_experts", c_int64),
        ("into", c_void_p),
        ("down", c_void_p),
        ("gate", c_void_p),
        ("width", c_int64),
        ("inner", c_int64),
        ("num_inner", c_int64),
    )


class RankLayer:
    """One layer of a rank.

    Args:
        weights: Weights of the whole layer.
        share: Share of the rank.
        bank: Routed experts of the layer; None in a dense layer.
        arena: Allocator of the packed weights.

    Raises:
        ModelError: The share would be computed in other formats than the whole weights.
    """

    def __init__(
        self, weights: LayerWeights, share: LayerShare, bank: NativeBank | None, arena: cpu.Arena
    ) -> None:
        parts, attention = weights.parts, weights.attention
        attn: Any = parts.self_attn
        post_norm, columns = parts.post_attention_layernorm, share.columns
        self._keep: list[Any] = []
        """Objects whose memory the structs refer to."""
        own: dict[str, Any] = {
            "column": columns.start,
            "num_columns": len(columns),
            "first_expert": share.experts.start,
            "num_experts": 0 if bank is None else bank.num_experts,
        }
        """Fields of the share."""
        self.mixer = self._attention(attention, share, arena, own)
        """Attention of the own heads."""
        out = matrix([attention.out], arena)
        if columns:
            own["out"] = self._kept(out.columns(columns.start, columns.stop)).address
        if weights.mlp is not None:
            own |= self._mlp(weights.mlp, share, arena)
        gate = None
        if isinstance(attention, HeadWeights) and attention.gate is not None:
            gate = matrix([attention.gate.of_heads(share.heads, attention.head_dim)], arena)
        router = None if parts.router is None else router_of(parts.router, post_norm)
        scale = parts.residual_multiplier
        self.native = NativeLayer(
            mixer=self.mixer,
            deltas=None,
            first_norm=attention.norm,
            gate=gate,
            out=out,
            router=router,
            mlp=None,  # the share has its parts
            norm=None if router is not None else norm_of(post_norm),
            number=int(attn.layer_idx),
            window=parts.window,
            scale=1.0 if scale is None else scale,
        )
        """The layer with the rank's heads. It has no MLP."""
        cut = None if share.cut is None else Cut(*share.cut)
        experts = None if bank is None else self._kept(bank.packed(share.experts, cut))
        self._share = ShareStruct(**own)
        packed = (None, 0) if experts is None else (experts.address, experts.num_bytes)
        self.struct = struct_of(self.native, *packed)
        """The layer for a sweep of the rank."""
        self.struct.share = ctypes.addressof(self._share)
        self.mlp_width = int(self._share.width)
        """Inner values of the MLP or of the shared experts, of all ranks; 0 without them."""
        self.expert_inner = 0 if experts is None else self.native.top_k * experts.cut_width
        """Inner values of a token's experts, if ranks share each expert; else 0."""
        self.query_columns = int(self._share.q_width + self._share.k_width)
        """Width of the queries and keys of all ranks, if they are normed together; else 0."""

    @property
    def has_shared(self) -> bool:
        """True if shared experts run beside the routed ones."""
        return self.native.router is not None and self.mlp_width > 0

    def _kept(self, x: Any) -> Any:
        self._keep.append(x)
        return x

    def _attention(
        self,
        weights: HeadWeights | LatentWeights,
        share: LayerShare,
        arena: cpu.Arena,
        own: dict[str, Any],
    ) -> Attention | Latents:
        """Return the kernel of the own heads, and add their fields to the share."""
        if isinstance(weights, LatentWeights):
            latents = weights.share(share.heads)
            refuse_lost_rounding(_stacked(weights), _stacked(latents))
            own["head_column"] = share.heads.start * weights.value_dim
            return latents.kernel(arena)
        heads, width = weights.share(share.heads, share.kv_heads), weights.head_dim
        refuse_lost_rounding(_stacked(weights), _stacked(heads))
        own["head_column"] = share.heads.start * width
        if weights.norm_is_whole and heads.qk_norm is not None:
            q_norm, k_norm = self._kept(heads.qk_norm)
            heads = heads._replace(qk_norm=None)
            per = weights.num_heads // weights.num_kv_heads
            own |= {
                "q_norm": address_of(q_norm),
                "k_norm": address_of(k_norm),
                "q_width": weights.num_heads * width,
                "k_width": weights.num_kv_heads * width,
                "q_column": share.heads.start * width,
                "k_column": share.kv_heads.start * width,
                "has_keys": share.heads.start == share.kv_heads.start * per,
            }
        return heads.kernel(arena)

    def _mlp(self, weights: MlpWeights, share: LayerShare, arena: cpu.Arena) -> dict[str, Any]:
        """Pack the own inner values and columns, and return their fields of the share."""
        inner, columns = share.inner, share.columns
        own: dict[str, Any] = {
            "width": int(weights.gate.shape[0]),
            "inner": inner.start,
            "num_inner": len(inner),
        }
        if inner:
            gate, up = (
                Projection(w).rows(inner.start, inner.stop).weight
                for w in (weights.gate, weights.up)
            )
            own["into"] = self._kept(matrix_of([on_top(gate, up)], arena=arena)).address
        if columns:
            down = Projection(weights.down).rows(columns.start, columns.stop).weight
            own["down"] = self._kept(matrix_of([down], arena=arena)).address
        if weights.share is not None:
            own["gate"] = self._kept(matrix_of([weights.share], arena=arena)).address
        return own


def _stacked(weights: HeadWeights | LatentWeights) -> list[Projection]:
    """Return the projections that are one matrix."""
    if isinstance(weights, LatentWeights):
        return [weights.queries if weights.low is None else weights.low, weights.latent]
    return [weights.queries, weights.keys, weights.values]


def refuse_lost_rounding(whole: Sequence[Projection], share: Sequence[Projection]) -> None:
    """Refuse a share that would read other activations than the whole weight.

    Weights of several formats become one bf16 matrix unless they end with a panel. A bf16 matrix
    rounds no activations.

    Raises:
        ModelError: The share and the whole differ in this, and the whole rounds activations.
    """
    found = [[p.weight for p in each] for each in (whole, share)]
    rounds = any(isinstance(w, Quantised) and w.activations != "bf16" for w in found[0])
    if rounds and expands(found[0]) != expands(found[1]):
        raise ModelError(
            "queries, keys and values are quantised in several formats, with rounded activations, "
            f"and a rank's share of them has {share[0].num_outputs} queries, no multiple of "
            f"{cpu.PANEL}; use one rank, or activations='bf16'"
        )
