"""Tiny models that are wide enough to be split: several panels of columns, many heads."""

from typing import Any

import torch
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.support.families import COMMON, MAKERS, attention_of

WIDE: dict[str, Any] = {"hidden_size": 192, "vocab_size": 300}
"""Three panels of columns, and a vocabulary that ends inside a panel."""


def _gated() -> Any:
    """Return the config of a model with a gate on attention, shared experts and no states."""
    return Qwen3NextConfig(
        **COMMON,
        head_dim=64,
        partial_rotary_factor=0.5,
        intermediate_size=160,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        num_experts=8,
        layer_types=["full_attention"] * COMMON["num_hidden_layers"],
    )


def _of_family(family: str) -> Any:
    config = MAKERS[family][0]()
    if family in ("qwen2_moe", "qwen3_moe", "deepseek_v3"):
        config.intermediate_size = 160
    if family == "olmoe":  # its heads share the width of the model
        config.num_attention_heads, config.num_key_value_heads = 6, 3
    return config


SPLIT = (*MAKERS, "gated")
"""Names of models that `wide_model` makes."""


def wide_model(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """Return a seeded random model in evaluation mode; biases, sinks and norms are random too."""
    config = _gated() if name == "gated" else _of_family(name)
    config.hidden_size, config.vocab_size = WIDE["hidden_size"], WIDE["vocab_size"]
    config._attn_implementation = attention_of(name)
    config._experts_implementation = "grouped_mm"
    make: Any = Qwen3NextForCausalLM if name == "gated" else MAKERS[name][1]
    torch.manual_seed(seed)
    model: nn.Module = make(config)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + ("norm" in path))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if "embed" in path else p.shape[-1] ** -0.5))
    return model.to(dtype).eval()
