"""Digests of tested sources of transformers, which make trials unnecessary.

A part's results decide its kind (`qllm.models.parts.known`). If the source of a class
of transformers is in these tables, its kind was established earlier, and no trial is run.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from qllm.models.parts.digests import fingerprint, source_digest

TESTED_TRANSFORMERS = "5.23.0"
"""Version of transformers whose sources the tables were made from."""
FAMILIES = frozenset(
    {
        *("deepseek_v3", "gpt_oss", "granitemoe", "mixtral"),
        *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
    }
)
"""`model_type` of the families whose every part is known."""

LAYER_GLUE = {
    "beedea11a992": "plain",  # mixtral, phimoe
    "81d96d2d9d08": "plain",  # qwen2_moe, qwen3_moe, olmoe, deepseek_v3
    "dd4f84571e97": "plain",  # gpt_oss: its block returns a tuple
    "197d68bfbce0": "plain",  # qwen3_next, qwen3_5_moe: attention, or a Gated DeltaNet
    "74a792a86065": "plain",  # qwen3_5
    "0e4c9842356c": "scaled",  # granitemoe: both sums scale what they add
}
"""Kind of the layer's glue, by fingerprint of DecoderLayer.forward."""
BLOCK_GLUE = {
    "87832fef4351": "plain",  # mixtral
    "21a27c6fb476": "plain",  # qwen3_moe
    "de8f007fdef6": "plain",  # olmoe
    "728fe7dc9c9d": "plain",  # gpt_oss
    "9093b44f9f82": "plain",  # granitemoe
    "b42d4fc5f32f": "plain",  # granitemoe, transformers 5.17
    "36df0733fead": "plain",  # phimoe
    "ed30505cbacb": "shared",  # deepseek_v3
    "7b1ca88b5a70": "gated_shared",  # qwen2_moe, qwen3_next, qwen3_5_moe
}
"""Kind of the block's glue, by fingerprint of the MoE block's forward."""
ATTENTION = {
    "ce1772849260": "plain",  # mixtral
    "7d221b620ce4": "plain",  # qwen2_moe, granitemoe, phimoe
    "9b8e69f64c3f": "head_norm",  # qwen3_moe
    "4d62a8e741c1": "row_norm",  # olmoe; "clipped_row_norm" if its config sets `clip_qkv`
    "126b22544a55": "sinks",  # gpt_oss
    "9ff91ca11356": "gated_head_norm",  # qwen3_next, qwen3_5, qwen3_5_moe
    "6ed299336953": "flagged_head_norm",  # glm4_moe: `use_qk_norm`
}
"""Kind of attention, by fingerprint of Attention.forward. A kind names the work besides
projections: norms of queries and keys per head or over all heads, limits of projected values,
sinks, a gate of the output. The prefix "part_" means that only the first values of a head are
rotated.
"""
LATENTS = {
    "bf6d046d789e": "real",  # deepseek_v3: "halves", or "pairs" by its config
    "5034c8bfb8e2": "complex",  # deepseek_v2
}
"""Kind of rotation, by fingerprint of the forward of multi-head latent attention."""
DELTA_NET = {
    "9c6d1d9d60c0": "grouped",  # qwen3_next: projections by head of keys
    "a4d53c1d0b20": "split",  # qwen3_5, qwen3_5_moe
}
"""Layout of the projections, by fingerprint of the forward of a Gated DeltaNet."""
DELTA_RULE = {
    "apply_mask_to_padding_states": "73040205b4be",
    "causal_conv1d_update": "834dccb93fbb",
    "causal_conv1d_fn": "748d1554a844",
    "l2norm": "ad5636862455",
    "torch_chunk_gated_delta_rule": "ba218ac689e2",
    "torch_recurrent_gated_delta_rule": "79c55744edad",
}
"""Functions that a Gated DeltaNet calls, and their digests."""
DELTA_NORM = "52bf359a41c0"
"""Fingerprint of the gated norm of a Gated DeltaNet's output."""
DELTA_GROUPS = "de996db2a9cf"
"""Digest of the `fix_query_key_value_ordering` of the grouped kind."""
EXPANSION = "e5ae38130e7f"
"""Digest of the `expand_kv` that all MLA families of transformers share."""
HALVES = {"apply_rotary_pos_emb": "d7bb227c7094", "rotate_half": "b59dbfffe0ee"}
HALF_TABLE = {
    "apply_rotary_pos_emb": "72775e3bfa6e",
    "_apply_rotary_emb": "1d2cfaf3e4af",
    "eager_attention_forward": "b8862e7f17e6",
}
PART = {"apply_rotary_pos_emb": "5b52c0dc5bb2", "rotate_half": "b59dbfffe0ee"}
PAIRS = {"apply_rotary_pos_emb_interleave": "5af815f3c610"}
COMPLEX = {"apply_rotary_emb": "3c585dc0d8cb"}
"""Digests of functions in a model's file, for one way of rotation each. In the model's dtype there
are four ways: a head in halves, halves with cos and sin of half the width (and attention with
sinks), the first values of a head in halves, and pairs with output in halves. In fp32 there are
pairs as complex numbers.
"""
NORM = "5cf66a5b73d6"
"""Fingerprint of the RMS norm that rounds before it multiplies by its weight."""
WIDE_NORM = "6f6c68e4a6b2"
"""Digest of the norm that rounds after the product with its weight: gpt_oss."""
WIDE_NORM_FROM_ONE = "d99cb336a934", "292148824323"
"""Digests of a norm that also rounds afterwards but adds one to its weight, and of the norm's
`_norm` (qwen3_next).
"""
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
    "02159fcb353d": "softmax_fp32",  # deepseek_v2: groups if its `topk_method` has them
    "234a8dc21586": "sparse_mixer",  # phimoe
}
"""Kind of router, by fingerprint of Router.forward. "wide" and "flag": softmax over all experts,
then top-k. "chosen": softmax over the chosen, which equals the former renormalised. Others: their
name.
"""
CLAMPED = "7bcc81175575"
"""Digest of gpt_oss's `_apply_gate`: gate and up alternate, both clamped."""
SPARSE_MIXER = {"sparsemixer": "d888cf35f598"}


def _is_of_transformers(module: object) -> bool:
    """Return True if a class is transformers' own. The tables do not apply to copies."""
    return type(module).__module__.startswith("transformers.")


def by_source(table: Mapping[str, str], module: nn.Module | None) -> str | None:
    """Return a table's entry for a module's forward; None if the class is not transformers'."""
    if module is None or not _is_of_transformers(module):
        return None
    return table.get(fingerprint(module))


def norm_by_source(module: Any) -> str | None:
    """Return a key of `formulas.NORMS`; None unless the source of a norm is known."""
    if hasattr(module, "variance_epsilon"):
        return by_source({NORM: "rms", WIDE_NORM: "rms_wide"}, module)
    inner, (own, digest) = getattr(type(module), "_norm", None), WIDE_NORM_FROM_ONE
    if inner is None or source_digest(inner) != digest:
        return None
    return by_source({own: "rms_wide_from_one"}, module)


def attention_by_source(attn: Any) -> str | None:
    """Return a value of ATTENTION; None unless the whole source of an attention is known."""
    kind = by_source(ATTENTION, attn)
    if kind == "flagged_head_norm":
        kind = "head_norm" if attn.use_qk_norm else "plain"
    if kind is not None and getattr(attn.config, "clip_qkv", None) is not None:
        kind = "clipped_row_norm" if kind == "row_norm" else None
    if kind is None or uses(attn, {"sinks": HALF_TABLE, "gated_head_norm": PART}.get(kind, HALVES)):
        return kind
    return f"part_{kind}" if kind in {"plain", "head_norm"} and uses(attn, PART) else None


def latents_by_source(attn: Any) -> str | None:
    """Return the rotation of latents ("halves", "pairs", "complex"), if the source is known."""
    kind = by_source(LATENTS, attn)
    if kind is None or not expands_by_source(attn):
        return None
    if kind == "real":
        kind = "pairs" if attn.config.rope_interleave else "halves"
    functions = {"halves": HALVES, "pairs": PAIRS, "complex": COMPLEX}[kind]
    return kind if uses(attn, functions) else None


def expands_by_source(attn: Any) -> bool:
    """Return True if the source of an attention's expansion of latents is known."""
    return _is_of_transformers(attn) and source_digest(type(attn).expand_kv) == EXPANSION


def delta_net_by_source(attn: Any) -> str | None:
    """Return a value of DELTA_NET; None unless the whole source of a Gated DeltaNet is known."""
    kind = by_source(DELTA_NET, attn)
    if kind is None or not uses(attn, DELTA_RULE) or fingerprint(attn.norm) != DELTA_NORM:
        return None
    ordering = getattr(type(attn), "fix_query_key_value_ordering", None)
    if kind == "grouped" and (ordering is None or source_digest(ordering) != DELTA_GROUPS):
        return None
    return kind if attn.activation == attn.norm.activation == "silu" else None


def is_swiglu_by_source(mlp: Any) -> bool:
    """Return True if the source of an MLP is the usual one, whatever its activation."""
    return by_source({MLP: "swiglu"}, mlp) is not None


def is_clamped_by_source(experts: Any) -> bool:
    """Return True if experts have gpt_oss's gate."""
    gate = type(experts)._apply_gate
    return _is_of_transformers(experts) and source_digest(gate) == CLAMPED


def router_by_source(router: Any) -> str | None:
    """Return a value of ROUTER; None unless the whole source of a router is known."""
    kind = by_source(ROUTER, router)
    return None if kind == "sparse_mixer" and not uses(router, SPARSE_MIXER) else kind


def uses(module: nn.Module, functions: Mapping[str, str]) -> bool:
    """Return True if functions of a module's file have those digests."""
    names = vars(sys.modules[type(module).__module__])
    found: list[Any] = [names.get(name) for name in functions]
    if not all(inspect.isfunction(f) for f in found):
        return False
    return [source_digest(f) for f in found] == list(functions.values())
