"""Attention whose rotation is not that of whole heads in halves, by our kernels.

GLM 4.5 turns the first values of a head; DeepSeek V2 turns pairs as complex numbers in fp32.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu
from qllm.models.parts.known import attention_kind, rotation_of_latents

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
"""The rotation of DeepSeek-V2-Lite, with a shorter original length."""
BEST_GROUPS = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GLM-4.5-Air": ("glm4_moe", "part_plain", {**GLM, "use_qk_norm": False}),
    "GLM-4.5": ("glm4_moe", "part_head_norm", {**GLM, "use_qk_norm": True}),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        "complex",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN},
    ),
    "DeepSeek-V2": ("deepseek_v2", "complex", {**DEEPSEEK, "q_lora_rank": 48, **BEST_GROUPS}),
}
"""Published models: their family, how their attention is known, and settings of a small config."""


def model_of(family: str, settings: dict[str, Any]) -> Any:
    """Make a model of three layers in bf16."""
    config = AutoConfig.for_model(family, **SIZES, **settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            p.copy_(noise * 0.1 + ("norm" in name) if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
    return model.bfloat16().eval()


@pytest.mark.skipif(cpu.native is None, reason="the kernels were not built")
@pytest.mark.parametrize("name", CASES)
def test_it_is_ours_and_passes_the_check_at_the_start(name: str) -> None:
    """The check compares the logits of a run that is preempted and cut with `model.forward`."""
    family, kind, settings = CASES[name]
    model = model_of(family, settings)
    attn = model.model.layers[1].self_attn
    assert kind in {attention_kind(attn), rotation_of_latents(attn)}
    prompts = [[7, 3, 250, 11, 98, 4, 61, 200], [5, 90, 1], list(range(3, 90))]
    greedy = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
    with QLLMEngine.from_model(model, max_kv_tokens=2048) as engine:
        assert "3 of 3 layers" in engine.kernels["attention"]
        assert "2 of 3 layers" in engine.kernels["router"]
        assert engine.kernels["sweep"] == "3 of 3 layers in one call"
        alone = [engine.submit(p, "BE", 12, sampling=greedy).result(60) for p in prompts]
        handles = [engine.submit(p, "BE", 12, sampling=greedy) for p in prompts]
        together = [handle.result(60) for handle in handles]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
