"""Gated DeltaNet mixers of random weights, and the parts of their projections."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qllm.kernels import cpu
from qllm.runner.layers.deltas import DeltaMixer, delta_mixer

HIDDEN, K_HEADS, V_HEADS, KEY, VALUE, TAPS = 96, 2, 4, 32, 48, 4

CASES = {
    "grouped": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "split": (Qwen3_5MoeTextConfig, Qwen3_5MoeGatedDeltaNet),
}


def config_of(how: str, **more: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": K_HEADS,
        "linear_num_value_heads": V_HEADS,
        "linear_key_head_dim": KEY,
        "linear_value_head_dim": VALUE,
        "linear_conv_kernel_dim": TAPS,
    }
    return CASES[how][0](**{**sizes, **more})


def module_of(how: str, **more: Any) -> Any:
    """A random module whose decays, gates and weights differ from head to head."""
    torch.manual_seed(3)
    module = CASES[how][1](config_of(how, **more), 0).bfloat16().eval()
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-4, 1)
        elif parameter.dim() == 1:
            parameter.data.normal_(1, 0.5)
        else:
            parameter.data.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
    return module


def parts_of(module: Any, how: str) -> Any:
    config = config_of(how)
    return SimpleNamespace(
        self_attn=module, new_state=lambda: DynamicCache(config=config).layers[0]
    )


def mixer_of(module: Any, how: str) -> DeltaMixer:
    found = delta_mixer(parts_of(module, how), cpu.Arena())
    assert found is not None
    return found
