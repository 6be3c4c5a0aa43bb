"""Attention that turns the first values of a head only, by our kernels: GLM 4.5."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu
from qllm.models.fingerprints import attention_kind

GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
}
CASES = {"part_plain": {"use_qk_norm": False}, "part_head_norm": {"use_qk_norm": True}}
"""The kind of attention, and the setting of a config that has it: GLM 4.5 Air, and GLM 4.5."""


def model_of(**more: Any) -> Any:
    """Make a model of three layers in bf16 whose heads are turned by half."""
    config = AutoConfig.for_model(
        "glm4_moe",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **GLM,
        **more,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            p.copy_(noise * 0.1 + ("norm" in name) if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
    return model.bfloat16().eval()


@pytest.mark.skipif(cpu.native is None, reason="the kernels were not built")
@pytest.mark.parametrize("kind", CASES)
def test_it_is_ours_and_passes_the_check_at_the_start(kind: str) -> None:
    """The check compares the logits of a run that is preempted and cut with `model.forward`."""
    model = model_of(**CASES[kind])
    assert attention_kind(model.model.layers[1].self_attn) == kind
    prompts = [[7, 3, 250, 11, 98, 4, 61, 200], [5, 90, 1], list(range(3, 60))]
    greedy = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
    with QLLMEngine.from_model(model, max_kv_tokens=2048) as engine:
        assert "3 of 3 layers" in engine.kernels["attention"]
        assert engine.kernels["sweep"] == "3 of 3 layers in one call"
        alone = [engine.submit(p, "BE", 12, sampling=greedy).result(60) for p in prompts]
        handles = [engine.submit(p, "BE", 12, sampling=greedy) for p in prompts]
        together = [handle.result(60) for handle in handles]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
