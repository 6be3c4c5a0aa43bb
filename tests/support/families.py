"""Tiny random models of every family the fast driver knows, on which order mistakes show.

K = 4 experts per token of 8: with K = 2 a sum in the wrong order has the same bits. Embeddings
are untied: tied random embeddings make every token predict itself. Heads are as wide as the CPU
kernels take them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 256
WIDTH = 64
LAYERS = 3
EXPERTS = 8
TOP_K = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _qwen(config: Callable[..., Any], **more: Any) -> Any:
    return config(
        **COMMON,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=EXPERTS,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        **more,
    )


def _deepseek() -> Any:
    return DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=32,
        v_head_dim=16,
    )


def _local(config: Callable[..., Any], **more: Any) -> Any:
    settings = {
        **COMMON,
        "head_dim": 32,
        "intermediate_size": 48,
        "num_local_experts": EXPERTS,
        **more,
    }
    return config(**settings)


MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any], nn.Module]]] = {
    "mixtral": (lambda: _local(MixtralConfig), MixtralForCausalLM),
    "qwen2_moe": (
        lambda: _qwen(Qwen2MoeConfig, shared_expert_intermediate_size=80),
        Qwen2MoeForCausalLM,
    ),
    "qwen3_moe": (lambda: _qwen(Qwen3MoeConfig), Qwen3MoeForCausalLM),
    "olmoe": (
        lambda: OlmoeConfig(  # heads share the width of the model
            **{**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1},
            intermediate_size=48,
            num_experts=EXPERTS,
            clip_qkv=2.0,
        ),
        OlmoeForCausalLM,
    ),
    "gpt_oss": (
        lambda: _local(
            GptOssConfig,
            intermediate_size=64,
            sliding_window=12,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        GptOssForCausalLM,
    ),
    "deepseek_v3": (_deepseek, DeepseekV3ForCausalLM),
    "granitemoe": (
        lambda: _local(
            GraniteMoeConfig,
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            logits_scaling=2.0,
            attention_multiplier=0.2,
        ),
        GraniteMoeForCausalLM,
    ),
    "phimoe": (  # its router always takes two
        lambda: _local(PhimoeConfig, lm_head_bias=True, num_experts_per_tok=2),
        PhimoeForCausalLM,
    ),
}
FAMILIES = tuple(MAKERS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def attention_of(family: str) -> str:
    """The attention implementation that the family is compared with."""
    return "eager" if family == "gpt_oss" else "sdpa"


def make_model(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, num_layers: int | None = None
) -> Any:
    """A seeded random model in evaluation mode; biases, sinks and norms are random too."""
    make_config, make = MAKERS[family]
    config = make_config()
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    config._attn_implementation = attention_of(family)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(seed)
    model = make(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + ("norm" in name))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if "embed" in name else p.shape[-1] ** -0.5))
    return model.to(dtype).eval()
