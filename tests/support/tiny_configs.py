"""A tiny random model of every causal language model that transformers knows.

A config is made from its class: each size below is set if the class has it, in nested text configs
too. The window and the chunk of attention are shorter than the prompts of the comparisons, so the
tokens show a part that a driver leaves out.
"""

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
EMBED_STD = 1.5
"""Standard deviation of embeddings. Smaller ones give greedy answers that repeat one token, which
prove little."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "expert_ffn_hidden_size": 32,
    "hidden_size_per_layer_input": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "local_attention": 16,
    "window_size": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
"""Sizes, set if a config class has the name. All differ from the defaults of the classes. An
indexer sums positive scores of its heads. With few heads many sums are 0, and the choice of equal
ones depends on the number of keys of a call. Published models have 64 heads, and rarely equal sums.

An indexer sums positive scores of its heads; with few heads many sums are 0, and which of equal
ones are taken depends on how many keys a call sees. Published ones have 64 heads, and equal sums
hardly ever.
"""
MLA_SIZES = {"num_key_value_heads": 4}
"""Sizes of families with latents: every head has its own expanded keys."""
MIXED = ["linear_attention", "full_attention"] * 2
GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "top_k_experts": 2,
}
QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": MIXED},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 8,
            "moe_top_k": 2,
        },
    },
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            *["compressed_sparse_attention"] * 2,
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 3,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED},
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes of single families in addition to SIZES, by model type."""
NOT_MADE = {
    "blt": "its three byte-level parts have no common sizes; a model takes a minute to make",
}
"""Families that are not tried, with the reason."""


class CannotMakeError(Exception):
    """A family whose tiny model cannot be made automatically."""


def model_types() -> list[str]:
    """Return every model type with a causal language model in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _takes(default: Any, name: str) -> bool:
    """Return True if a config accepts a value under this name."""
    described = getattr(type(default), name, None)
    if isinstance(described, property) and described.fset is None:
        return False
    try:
        return hasattr(default, name)
    except Exception:  # noqa: BLE001 - some classes raise for values that differ per layer
        return True


def tiny_config(config_class: type[Any], own: dict[str, Any] | None = None) -> Any:
    """Return a config with the sizes above, if its class has them."""
    default = config_class()
    wanted = {**SIZES, **(MLA_SIZES if _takes(default, "kv_lora_rank") else {}), **(own or {})}
    given = {name: value for name, value in wanted.items() if _takes(default, name)}
    parts = getattr(config_class, "sub_configs", None) or {}
    for name in parts:
        part = getattr(default, name, None)
        if part is not None and name not in (own or {}):
            given[name] = tiny_config(type(part), own)
    return config_class(**given)


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """Return a seeded random model in fp32 and evaluation mode; norms, biases and sinks are random.

    Raises:
        CannotMakeError: The class refuses the sizes; the message has its error.
    """
    if model_type in NOT_MADE:
        raise CannotMakeError(NOT_MADE[model_type])
    try:
        config = tiny_config(transformers.CONFIG_MAPPING[model_type], OWN.get(model_type))
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise CannotMakeError(f"{type(error).__name__}: {str(error).strip()[:200]}") from error
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            if p.dim() <= 1:
                p.copy_(torch.randn_like(p) * 0.1 + ("norm" in name))
            else:
                p.copy_(
                    torch.randn_like(p) * (EMBED_STD if "embed" in name else p.shape[-1] ** -0.5)
                )
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token id, from a checkpoint
                num = int(model.config.n_routed_experts)
                rows = [torch.randperm(num)[: table.shape[1]] for _ in table]
                table.copy_(torch.stack(rows))
    return model.eval()
