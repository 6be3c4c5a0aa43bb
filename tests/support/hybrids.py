"""Tiny random hybrids of which our kernels compute every layer (bf16)."""

from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NATIVE = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}
"""Families of which every part is ours, by model type."""


def make_hybrid(family: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Any:
    """A seeded random model in evaluation mode; norms, decays and biases are random too."""
    config_class, model_class = NATIVE[family]
    config = config_class(**SIZES)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(seed)
    model: nn.Module = model_class(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-4, 1)
            elif p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + (name.endswith("linear_attn.norm.weight")))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if "embed" in name else p.shape[-1] ** -0.5))
    return model.to(dtype).eval()
