"""What parts of a model compute, known by the digest of their source.

A part that is not in these tables is run by its own module.
"""

import inspect
import sys
from typing import Any

from torch import nn

from qllm.models.discover import fingerprint, source_digest

ATTENTION = {
    "ce1772849260": "plain",  # mixtral
    "7d221b620ce4": "plain",  # qwen2_moe, granitemoe, phimoe
    "9b8e69f64c3f": "head_norm",  # qwen3_moe
    "4d62a8e741c1": "row_norm",  # olmoe
}
"""Fingerprint of Attention.forward -> how queries and keys are normed: not, per head, or over all
heads."""
ROTATION = ("d7bb227c7094", "b59dbfffe0ee")
"""Digests of `apply_rotary_pos_emb` and `rotate_half`: in halves, in the dtype of the model."""
NORM = "5cf66a5b73d6"
"""Fingerprint of the RMS norm that rounds before it multiplies by its weight."""
ROUTER = {
    "3b47be678984": "wide",  # mixtral: renormalised, weights stay fp32
    "849827e64e0a": "flag",  # qwen2_moe, qwen3_moe, olmoe: `norm_topk_prob`
}
"""Fingerprint of Router.forward: softmax over all experts, then top-k."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is the usual RMS norm."""
    return hasattr(module, "variance_epsilon") and fingerprint(module) == NORM


def attention_kind(attn: Any) -> str | None:
    """A value of ATTENTION, if all of an attention module is known: its projections too."""
    kind = ATTENTION.get(fingerprint(attn))
    is_known = (
        getattr(attn.config, "clip_qkv", None) is None
        and all(type(getattr(attn, f"{x}_proj", None)) is nn.Linear for x in "qkvo")
        and _rotates_in_halves(attn)
    )
    return kind if is_known else None


def _rotates_in_halves(module: nn.Module) -> bool:
    names = vars(sys.modules[type(module).__module__])
    found: list[Any] = [names.get(name) for name in ("apply_rotary_pos_emb", "rotate_half")]
    if not all(inspect.isfunction(f) for f in found):
        return False
    return tuple(source_digest(f) for f in found) == ROTATION
