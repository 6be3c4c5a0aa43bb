"""What parts of a model compute, known by the digest of their source.

A part that is not in these tables is run by its own module; the glue of layers has its tables in
`qllm.models.discover`. docs/families.md says how to add a family.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from qllm.models.digests import fingerprint, source_digest
from qllm.models.discover import (
    BLOCK_GLUE,
    LAYER_GLUE,
    LayerParts,
    base_model,
    layer_parts,
)

TESTED_TRANSFORMERS = "5.23.0"
"""Version of transformers whose sources the tables were made from and are tested with."""
FAMILIES = frozenset(
    {
        *("deepseek_v3", "gpt_oss", "granitemoe", "mixtral"),
        *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
    }
)
"""`model_type` of the families of which every part is in the tables."""

ATTENTION = {
    "ce1772849260": "plain",  # mixtral
    "7d221b620ce4": "plain",  # qwen2_moe, granitemoe, phimoe
    "9b8e69f64c3f": "head_norm",  # qwen3_moe
    "4d62a8e741c1": "row_norm",  # olmoe; "clipped_row_norm" if its config sets `clip_qkv`
    "126b22544a55": "sinks",  # gpt_oss
    "9ff91ca11356": "gated_head_norm",  # qwen3_next, qwen3_5, qwen3_5_moe
    "6ed299336953": "flagged_head_norm",  # glm4_moe: `use_qk_norm`
}
"""Fingerprint of Attention.forward -> what it does beside projections: norms of queries and keys
per head or over all heads, limits of what is projected, sinks, a gate of what it gives. A module
that turns only the first values of a head has "part_" before it."""
LATENTS = {
    "bf6d046d789e": "real",  # deepseek_v3: "halves", or "pairs" by its config
    "5034c8bfb8e2": "complex",  # deepseek_v2
}
"""Fingerprint of the forward of multi-head latent attention -> how it rotates."""
DELTA_NET = {
    "9c6d1d9d60c0": "grouped",  # qwen3_next: projections by head of keys
    "a4d53c1d0b20": "split",  # qwen3_5, qwen3_5_moe
}
"""Fingerprint of the forward of a Gated DeltaNet -> how its projections lie."""
DELTA_RULE = {
    "apply_mask_to_padding_states": "73040205b4be",
    "causal_conv1d_update": "834dccb93fbb",
    "causal_conv1d_fn": "748d1554a844",
    "l2norm": "ad5636862455",
    "torch_chunk_gated_delta_rule": "ba218ac689e2",
    "torch_recurrent_gated_delta_rule": "79c55744edad",
}
"""Functions that it calls, and their digests."""
DELTA_NORM = "52bf359a41c0"
"""Fingerprint of the norm behind it, which a gate scales."""
DELTA_GROUPS = "de996db2a9cf"
"""Digest of the `fix_query_key_value_ordering` of the grouped kind."""
EXPANSION = "e5ae38130e7f"
"""Digest of the `expand_kv` that all MLA families of transformers share."""
HALVES = {"apply_rotary_pos_emb": "d7bb227c7094", "rotate_half": "b59dbfffe0ee"}
HALF_TABLE = {"apply_rotary_pos_emb": "72775e3bfa6e", "_apply_rotary_emb": "1d2cfaf3e4af"}
PART = {"apply_rotary_pos_emb": "5b52c0dc5bb2", "rotate_half": "b59dbfffe0ee"}
PAIRS = {"apply_rotary_pos_emb_interleave": "5af815f3c610"}
COMPLEX = {"apply_rotary_emb": "3c585dc0d8cb"}
"""Functions of a model's file and their digests. A head is rotated in halves; with cos and sin of
half its width; the first values of it, in halves; in pairs, which come out in halves: all in the
dtype of the model. In pairs as complex numbers, in fp32."""
NORM = "5cf66a5b73d6"
"""Fingerprint of the RMS norm that rounds before it multiplies by its weight."""
WIDE_NORM = "6f6c68e4a6b2"
"""Digest of the norm that rounds afterwards: gpt_oss."""
WIDE_NORM_FROM_ONE = "d99cb336a934", "292148824323"
"""Digests of the norm that does and adds one to its weight, and of its `_norm`: qwen3_next."""
MLP = "4a9e0f851f1a"
"""Fingerprint of the usual SwiGLU: shared experts and dense layers of qwen2_moe and deepseek_v3."""
ROUTER = {
    "3b47be678984": "wide",  # mixtral: renormalised, weights stay fp32
    "849827e64e0a": "flag",  # qwen2_moe, qwen3_moe, qwen3_next, olmoe: `norm_topk_prob`
    "ebc513972d3d": "chosen",  # qwen3_5_moe
    "6106b5d77c20": "chosen",  # gpt_oss, with a bias
    "f94b2215875a": "chosen",  # granitemoe
    "f082c497de82": "chosen",  # granitemoe of transformers 5.17
    "e77292a9baca": "sigmoid",  # deepseek_v3: groups, and a correction for the choice
    "02159fcb353d": "softmax_fp32",  # deepseek_v2: groups if its `topk_method` says so
    "234a8dc21586": "sparse_mixer",  # phimoe
}
"""Fingerprint of Router.forward: softmax over all experts, then top-k; softmax over the chosen,
which is the same renormalised; or what it is called."""
SPARSE_MIXER = {"sparsemixer": "d888cf35f598"}


def norm_kind(module: Any) -> str | None:
    """The kind of a norm in `kernels.cpu.norms`, if it is known."""
    if type(module) is nn.LayerNorm:
        return "layer" if module.elementwise_affine and len(module.normalized_shape) == 1 else None
    if not hasattr(module, "variance_epsilon"):
        return "rms_wide_from_one" if _is_from_one(module) else None
    return {NORM: "rms", WIDE_NORM: "rms_wide"}.get(fingerprint(module))


def _is_from_one(norm: Any) -> bool:
    inner = getattr(type(norm), "_norm", None)
    return inner is not None and (fingerprint(norm), source_digest(inner)) == WIDE_NORM_FROM_ONE


def attention_kind(attn: Any) -> str | None:
    """A value of ATTENTION, if all of an attention module is known: its projections too."""
    kind = ATTENTION.get(fingerprint(attn))
    if kind == "flagged_head_norm":
        kind = "head_norm" if attn.use_qk_norm else "plain"
    if getattr(attn.config, "clip_qkv", None) is not None:
        kind = "clipped_row_norm" if kind == "row_norm" else None
    linears = [getattr(attn, f"{x}_proj", None) for x in "qkvo"]
    if kind is None or not all(type(x) is nn.Linear for x in linears):
        return None
    if uses(attn, {"sinks": HALF_TABLE, "gated_head_norm": PART}.get(kind, HALVES)):
        return kind
    return f"part_{kind}" if kind in {"plain", "head_norm"} and uses(attn, PART) else None


def rotation_of_latents(attn: Any) -> str | None:
    """How a multi-head latent attention rotates ("halves", "pairs", "complex"), if all is known."""
    kind = LATENTS.get(fingerprint(attn))
    if kind is None or source_digest(type(attn).expand_kv) != EXPANSION:
        return None
    if kind == "real":
        kind = "pairs" if attn.config.rope_interleave else "halves"
    functions = {"halves": HALVES, "pairs": PAIRS, "complex": COMPLEX}[kind]
    is_known = all(type(x) is nn.Linear for x in latent_linears(attn)) and uses(attn, functions)
    return kind if is_known else None


def latent_linears(attn: Any) -> list[Any]:
    """All projections of a multi-head latent attention; those of queries first."""
    queries = [attn.q_proj] if attn.q_lora_rank is None else [attn.q_a_proj, attn.q_b_proj]
    return [*queries, attn.kv_a_proj_with_mqa, attn.kv_b_proj, attn.o_proj]


def delta_net_kind(attn: Any) -> str | None:
    """A value of DELTA_NET, if all of a Gated DeltaNet is known."""
    kind = DELTA_NET.get(fingerprint(attn))
    if kind is None or not uses(attn, DELTA_RULE) or fingerprint(attn.norm) != DELTA_NORM:
        return None
    ordering = getattr(type(attn), "fix_query_key_value_ordering", None)
    is_known = (
        (kind == "split" or (ordering is not None and source_digest(ordering) == DELTA_GROUPS))
        and attn.activation == attn.norm.activation == "silu"
        and all(type(x) is nn.Linear and x.bias is None for x in delta_linears(attn))
        and type(attn.conv1d) is nn.Conv1d
        and attn.conv1d.bias is None
    )
    return kind if is_known else None


def delta_linears(attn: Any) -> list[Any]:
    """All projections of a Gated DeltaNet; that of its output last."""
    is_grouped = DELTA_NET.get(fingerprint(attn)) == "grouped"
    names = ("qkvz", "ba") if is_grouped else ("qkv", "z", "b", "a")
    return [*(getattr(attn, f"in_proj_{name}", None) for name in names), attn.out_proj]


def is_swiglu(mlp: Any) -> bool:
    """Whether a module is the usual SwiGLU of three plain projections."""
    linears = [getattr(mlp, f"{x}_proj", None) for x in ("gate", "up", "down")]
    return (
        fingerprint(mlp) == MLP
        and all(type(x) is nn.Linear and x.bias is None for x in linears)
        and type(mlp.act_fn).__name__ in {"SiLUActivation", "SiLU"}
    )


def router_kind(router: Any) -> str | None:
    """A value of ROUTER, if all of a router is known."""
    kind = ROUTER.get(fingerprint(router))
    return None if kind == "sparse_mixer" and not uses(router, SPARSE_MIXER) else kind


def uses(module: nn.Module, functions: dict[str, str]) -> bool:
    """Whether functions of a module's file have those digests."""
    names = vars(sys.modules[type(module).__module__])
    found: list[Any] = [names.get(name) for name in functions]
    if not all(inspect.isfunction(f) for f in found):
        return False
    return [source_digest(f) for f in found] == list(functions.values())


class Part(NamedTuple):
    """A part of a model's layers, and what the tables say of it."""

    role: str
    """"layer", "experts block", "attention", "router", "norm" or "mlp"."""
    source: str
    """The function whose source was digested, like "MixtralAttention.forward"."""
    digest: str
    """12 hexadecimal digits; empty if there is no source."""
    kind: str | None
    """Its entry in the tables; None if it is in none of them."""
    num_layers: int
    """Layers that have it."""


def parts_of(model: Any) -> list[Part]:
    """Every kind of part in the layers of a model, in the order of a layer.

    Args:
        model: A causal language model; its parameters may be on the meta device.

    Raises:
        ModelError: It does not declare its layers or their attention.
    """
    base = base_model(model)
    found: dict[tuple[str, str, str | None], Part] = {}
    for parts in layer_parts(base):
        of_layer = {
            (role, type(module).__name__, kind): module for role, module, kind in _of_layer(parts)
        }
        for key, module in of_layer.items():
            role, name, kind = key
            part = found.get(key) or Part(role, f"{name}.forward", fingerprint(module), kind, 0)
            found[key] = part._replace(num_layers=part.num_layers + 1)
    return list(found.values())


def _of_layer(parts: LayerParts) -> Iterator[tuple[str, nn.Module, str | None]]:
    yield "layer", parts.layer, LAYER_GLUE.get(fingerprint(parts.layer))
    for norm in (parts.input_layernorm, parts.post_attention_layernorm):
        if norm is not None:
            yield "norm", norm, norm_kind(norm)
    attn = parts.self_attn
    if attn is None:
        pass
    elif fingerprint(attn) in ATTENTION:
        yield "attention", attn, attention_kind(attn)
    elif fingerprint(attn) in DELTA_NET:
        is_known = delta_net_kind(attn) is not None
        yield "attention", attn, "delta_net" if is_known else None
    else:
        is_known = rotation_of_latents(attn) is not None
        yield "attention", attn, "latents" if is_known else None
    if parts.is_moe and parts.mlp is not None:
        yield "experts block", parts.mlp, BLOCK_GLUE.get(fingerprint(parts.mlp))
    if parts.router is not None:
        yield "router", parts.router, router_kind(parts.router)
    for mlp in (parts.shared, None if parts.is_moe else parts.mlp):
        if mlp is not None:
            yield "mlp", mlp, "swiglu" if is_swiglu(mlp) else None


def changed(model: Any) -> list[Part]:
    """Parts that are not in the tables though the model is of a family that is."""
    if getattr(model.config, "model_type", None) not in FAMILIES:
        return []
    return [part for part in parts_of(model) if part.kind is None]
