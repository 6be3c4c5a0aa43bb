"""Shapes of published models, with few of their layers and a small vocabulary.

Fields are those of each `config.json` that determine the computation.
Differences:

- The vocabulary has 16,384 tokens: with two layers, a whole one would measure the head.
- Layers are two, chosen so that every kind of layer occurs. Those before the first with experts
  (DeepSeek-V2-Lite, GLM-4.5-Air and ERNIE-4.5-21B-A3B have one) are left out. Qwen3-8B is dense.
- Llama-4-Scout has its positions unscaled, which changes no time.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from bench.common import MODEL

VOCAB = 16384


class Shape(NamedTuple):
    """Values taken from a published model."""

    config: str
    """Name of its class of configs in transformers."""
    source: str
    """Place of its config.json."""
    fields: dict[str, Any]
    per_layer: Mapping[str, list[Any]] = MappingProxyType({})
    """Fields with a value per layer."""
    num_layers: int = 2
    note: str = ""


YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 4096}
SHAPES: dict[str, Shape] = {
    "300M": Shape(
        "Qwen3MoeConfig",
        "bench/common.py",
        {key: value for key, value in MODEL.items() if key != "num_hidden_layers"},
        num_layers=12,
    ),
    "Qwen3-30B-A3B": Shape(
        "Qwen3MoeConfig",
        "Qwen/Qwen3-30B-A3B",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
    ),
    "Mixtral-8x7B": Shape(
        "MixtralConfig",
        "mistralai/Mixtral-8x7B-v0.1",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "gpt-oss-20b": Shape(
        "GptOssConfig",
        "openai/gpt-oss-20b",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False},
        },
        {"layer_types": ["sliding_attention", "full_attention"]},
        note="one layer with a window of 128 tokens, one without",
    ),
    "OLMoE": Shape(
        "OlmoeConfig",
        "allenai/OLMoE-1B-7B-0924",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
    ),
    "DeepSeek-V2-Lite": Shape(
        "DeepseekV2Config",
        "deepseek-ai/DeepSeek-V2-Lite",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_parameters": YARN
            | {"rope_theta": 10000.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        note="without its first layer, which has no experts",
    ),
    "GLM-4.5-Air": Shape(
        "Glm4MoeConfig",
        "zai-org/GLM-4.5-Air",
        {
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        },
        note="without its first layer, which has no experts",
    ),
    "Qwen3-Next-80B": Shape(
        "Qwen3NextConfig",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        },
        {"layer_types": ["linear_attention", "full_attention"]},
        note="one layer of linear attention, one of full",
    ),
    "ERNIE-4.5-21B-A3B": Shape(
        "Ernie4_5_MoeConfig",
        "baidu/ERNIE-4.5-21B-A3B-PT",
        {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
            "use_bias": False,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        note="without its first layer, which has no experts",
    ),
    "Qwen3-8B": Shape(
        "Qwen3Config",
        "Qwen/Qwen3-8B",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
        note="dense",
    ),
    "Llama-4-Scout": Shape(
        "Llama4TextConfig",
        "meta-llama/Llama-4-Scout-17B-16E",
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
        note="one layer with positions and chunks of 8,192 tokens, one without",
    ),
}


def config_of(shape: Shape, num_layers: int) -> Any:
    """Make the config of the first layers of a shape."""
    fields = {"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
    fields |= {"pad_token_id": None, **shape.fields, "vocab_size": VOCAB}
    fields |= {"num_hidden_layers": num_layers, "dtype": "bfloat16"}
    fields |= {name: values[:num_layers] for name, values in shape.per_layer.items()}
    return getattr(transformers, shape.config)(**fields)
