"""GGUF files that are made of a folder of safetensors, as llama.cpp's converter makes them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter, Keys, TokenType
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
}
"""Model type -> what a file calls it, where that differs."""
TURNS_PAIRS = ("llama", "granite")
"""Architectures whose queries and keys the converter reorders."""
_LLM, _ATTENTION = Keys.LLM, Keys.Attention
_BASE: dict[str, tuple[str, ...]] = {
    _LLM.BLOCK_COUNT: ("num_hidden_layers",),
    _LLM.CONTEXT_LENGTH: ("max_position_embeddings",),
    _LLM.EMBEDDING_LENGTH: ("hidden_size",),
    _LLM.FEED_FORWARD_LENGTH: ("intermediate_size",),
    _ATTENTION.HEAD_COUNT: ("num_attention_heads",),
    _ATTENTION.HEAD_COUNT_KV: ("num_key_value_heads",),
    _ATTENTION.LAYERNORM_RMS_EPS: ("rms_norm_eps",),
    _LLM.EXPERT_COUNT: ("num_local_experts", "num_experts"),
    _LLM.EXPERT_USED_COUNT: ("num_experts_per_tok",),
    _ATTENTION.KEY_LENGTH: ("head_dim",),
    _ATTENTION.VALUE_LENGTH: ("head_dim",),
}
"""What is written of every model -> settings of its config, the first that is there."""
_MORE: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {_LLM.VOCAB_SIZE: ("vocab_size",)},
    "qwen2moe": {
        _LLM.EXPERT_FEED_FORWARD_LENGTH: ("moe_intermediate_size",),
        _LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: ("shared_expert_intermediate_size",),
    },
    "ernie4_5-moe": {
        _LLM.EXPERT_COUNT: ("moe_num_experts",),
        _LLM.EXPERT_USED_COUNT: ("moe_k",),
        _LLM.EXPERT_FEED_FORWARD_LENGTH: ("moe_intermediate_size",),
        _LLM.EXPERT_SHARED_COUNT: ("moe_num_shared_experts",),
        _LLM.INTERLEAVE_MOE_LAYER_STEP: ("moe_layer_interval",),
        _LLM.LEADING_DENSE_BLOCK_COUNT: ("moe_layer_start_index",),
    },
    "minimax-m2": {_LLM.EXPERT_FEED_FORWARD_LENGTH: ("intermediate_size",)},
    "granite": {
        _LLM.VOCAB_SIZE: ("vocab_size",),
        _ATTENTION.SCALE: ("attention_multiplier",),
        _LLM.EMBEDDING_SCALE: ("embedding_multiplier",),
        _LLM.RESIDUAL_SCALE: ("residual_multiplier",),
        _LLM.LOGIT_SCALE: ("logits_scaling",),
    },
    "qwen3moe": {_LLM.EXPERT_FEED_FORWARD_LENGTH: ("moe_intermediate_size",)},
}
"""What is written beside that, by architecture."""


def convert(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    pre: str = "gpt-2",
    stacks: bool = True,
    more: Mapping[str, str] | None = None,
) -> Path:
    """Write a file of a folder that `save_pretrained` wrote.

    Args:
        folder: With weights and a tokenizer.
        path: Of the file.
        kind: The type of its matrices.
        pre: What the converter calls the way in which the tokenizer splits a text.
        stacks: Whether the experts of a layer are one tensor, as they are since 2024.
        more: Keys beside those of the converter.
    """
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, name)
    for key, attributes in (_BASE | _MORE.get(name, {})).items():
        value = next((config[a] for a in attributes if config.get(a) is not None), None)
        if value is not None:
            write = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            write(key.format(arch=name), value)
    for key, text in (more or {}).items():
        writer.add_string(key, text)
    _write_rotation(writer, config, name)
    _write_vocabulary(writer, folder, pre)
    for tensor, value in _tensors(folder, config, name, stacks):
        _write(writer, tensor, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_as(name: str, value: Tensor, kind: str) -> str:
    """The type of a tensor in a file whose matrices have that kind."""
    is_matrix = value.dim() > 1 and name.endswith(".weight")
    is_small = not is_matrix or "norm" in name or "ffn_gate_inp" in name
    return "F32" if is_small or kind == "F32" else kind


def _write(writer: GGUFWriter, name: str, value: Tensor, kind: str) -> None:
    number = GGMLQuantizationType[stored_as(name, value, kind)]
    data = gguf.quantize(value.float().contiguous().numpy(), number)
    writer.add_tensor(name, data, raw_dtype=number)


def _write_rotation(writer: GGUFWriter, config: dict[str, Any], name: str) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, write in {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }.items():
            if rope.get(key) is not None:
                write(rope[key])
    if name in ("llama", "granite", "minimax-m2"):
        part = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(_head_dim(config) * part))
    if name == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_vocabulary(writer: GGUFWriter, folder: Path, pre: str) -> None:
    """Write a tokenizer that merges bytes."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["special"] for token in whole["added_tokens"]}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kinds[added[i]] if i in added else 1 for _, i in tokens])
    writer.add_token_merges([" ".join(pair) for pair in whole["model"]["merges"]])
    for write, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
    ):
        if number is not None:
            write(number)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensors(
    folder: Path, config: dict[str, Any], name: str, stacks: bool
) -> Iterator[tuple[str, Tensor]]:
    """Names in the file, and what is stored."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: dict[str, dict[int, Tensor]] = {}
    files = sorted(folder.glob("*.safetensors"))
    for key, value in (pair for file in files for pair in load_file(file).items()):
        number = re.search(r"\.experts\.(\d+)\.", key)
        spelling = re.sub(r"\.experts\.\d+\.", ".experts.", key)
        spelling = spelling.replace("e_score_correction_bias", "e_score_correction.bias")
        tensor = names.get_name(spelling, (".weight", ".bias"))
        assert tensor is not None, key
        if number is not None:
            experts.setdefault(tensor, {})[int(number[1])] = value
        elif name in TURNS_PAIRS and re.search(r"attn_[qk]\.", tensor):
            of = "num_attention_heads" if "attn_q." in tensor else "num_key_value_heads"
            yield tensor, _in_pairs(value, config[of])
        else:
            yield tensor, value
    for tensor, stack in experts.items():
        if stacks:
            yield tensor, torch.stack([stack[i] for i in range(len(stack))])
        else:
            yield from ((tensor.replace("_exps", f".{i}"), one) for i, one in stack.items())
    if config["rope_parameters"]["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head as the converter puts them: what turns together lies side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _llama3_factors(config: dict[str, Any]) -> Tensor:
    """What the converter writes of a Llama 3's rotations, number by number as it does."""
    rope, dim = config["rope_parameters"], _head_dim(config)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], 8192
    factors = []
    for freq in 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)):
        length = 2 * torch.pi / freq
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return torch.tensor(factors, dtype=torch.float32)
