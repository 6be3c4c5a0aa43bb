"""The config of a model from the metadata of its GGUF file: a table for each architecture.

Keys are llama.cpp's (`gguf.constants`), with the meaning that its converter gives them. Each key
under the name of the file's architecture is read, compared with its expected value, or refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from qllm.errors import ModelError
from qllm.models.folders import first_line

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that scales Llama 3's rotations, which is no parameter of a model."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Attribute of the config for each key that every file has."""
_USUAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters from which the converter computes the factors of rotations. The largest factor is a
further parameter."""
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_SCALINGS = {"linear": {"factor": "factor"}, "yarn": _YARN}
"""Config names of the keys `rope.scaling.<key>`, for each `rope.scaling.type`."""
_NEEDED = {"rope.scaling.factor", "rope.scaling.original_context_length"}
"""Keys that a file must have if its type of scaling uses them."""
_SAME = {
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "rope.scaling.finetuned": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}
"""Expected values of keys without further meaning: a value, or the name of an attribute."""


class Architecture(NamedTuple):
    """The rules by which the files of an architecture give a config."""

    model_type: str
    keys: Mapping[str, str] = {}
    """Further attributes of the config by key. A key is required if no tensor gives its value."""
    fixed: Mapping[str, Any] = {}
    """Attributes without a key: llama.cpp assumes these values."""
    same: Mapping[str, Any] = {}
    """Expected values of keys: a number, or the name of an attribute with the same value."""
    flags: Mapping[str, str] = {}
    """Attribute that is True if a layer has a tensor whose name ends so."""
    pairs: bool = False
    """True if rows of queries and keys are stored in the order for rotating neighbours."""
    is_partial: bool = False
    """True if only a part of each head may be rotated."""
    with_experts: "Architecture | None" = None
    """Rules for files of the same architecture that have experts."""


_SIGMOID = 2
"""Value of `expert_gating_func` for experts that are chosen by a sigmoid."""
_ROUTED = {"expert_used_count": "num_experts_per_tok"}
_QWEN_MOE = _ROUTED | {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_BIAS = {"attn_q.bias": "attention_bias"}
_BIASES = _BIAS | {"ffn_up.bias": "mlp_bias"}
_MIXTRAL = Architecture(
    "mixtral",
    keys=_ROUTED | {"expert_count": "num_local_experts"},
    fixed={"sliding_window": None},
    pairs=True,
)
ARCHITECTURES = {
    "llama": Architecture("llama", flags=_BIASES, pairs=True, with_experts=_MIXTRAL),
    "qwen2": Architecture("qwen2", fixed={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", fixed={"use_sliding_window": False}, flags=_BIAS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys=_QWEN_MOE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False, "use_sliding_window": False},
        flags={"attn_q.bias": "qkv_bias"},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        keys=_QWEN_MOE,
        fixed={"norm_topk_prob": True, "use_sliding_window": False},
        flags=_BIAS,
    ),
    "olmoe": Architecture(
        "olmoe",
        keys=_ROUTED | {"expert_count": "num_experts"},
        fixed={"norm_topk_prob": False},
        flags=_BIAS,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        flags={"attn_q.bias": "use_bias"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        keys=_ROUTED | {"expert_count": "num_local_experts"},
        same={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": _SIGMOID},
        is_partial=True,
    ),
    "granite": Architecture(
        "granite",
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        flags=_BIASES,
        pairs=True,
    ),
}
"""Rules by `general.architecture`, for the supported ones."""
_WIDTHS = {
    "ffn_gate_exps.weight": ("moe_intermediate_size", -2),
    "ffn_gate_shexp.weight": ("shared_expert_intermediate_size", -2),
    "token_embd.weight": ("vocab_size", 0),
}
"""Size and dimension that a tensor gives where no key does, by tensor."""


class Metadata(NamedTuple):
    """The description of a model in a GGUF file."""

    file: str
    """Path of the file, for errors."""
    architecture: str
    values: Mapping[str, Any]
    """Values by key, without the architecture's prefix."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the file's tensors by name, rows first."""
    ends: Sequence[int] = ()
    """Ids of the tokens that end an answer."""
    start: int | None = None
    """Id of the token that begins a text."""
    rope_factors: Tensor | None = None


def architecture_of(said: Metadata) -> Architecture:
    """Return the rules for reading a file."""
    found = ARCHITECTURES[said.architecture]
    has_experts = bool(said.values.get("expert_count"))
    return found.with_experts if has_experts and found.with_experts is not None else found


def config_of(said: Metadata) -> PreTrainedConfig:
    """Return the config given by a file's metadata and the shapes of its tensors.

    Raises:
        ModelError: A key is missing or unknown, or transformers makes no config of them.
    """
    how, left = architecture_of(said), dict(said.values)
    _refuse_keys(said, [key for key, value in left.items() if isinstance(value, list)])
    _refuse_missing(said, how)
    ends = list(dict.fromkeys(said.ends))
    settings: dict[str, Any] = {
        "bos_token_id": said.start,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
        "tie_word_embeddings": "output.weight" not in said.shapes,
    }
    for key, attribute in (_SIZES | _USUAL | dict(how.keys)).items():
        if key in left:
            settings[attribute] = left.pop(key)
    settings |= how.fixed
    settings |= {name: f"blk.0.{end}" in said.shapes for end, name in how.flags.items()}
    _add_sizes_of_tensors(said, how, settings)
    settings["rope_parameters"] = _rotation(said, left, settings["head_dim"])
    if how.is_partial:
        part = left.pop("rope.dimension_count") / settings["head_dim"]
        settings["rope_parameters"]["partial_rotary_factor"] = part
    same = {**_SAME, **how.same}
    for key in same.keys() & left.keys():
        if left[key] == settings.get(same[key], same[key]):
            del left[key]
    _refuse_keys(said, left)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(how.model_type, **settings)
    except Exception as error:
        raise ModelError(f"{said.file} gives no config: {first_line(error)}") from error
    return config


def _refuse_missing(said: Metadata, how: Architecture) -> None:
    """Refuse a file that lacks a key whose value no tensor gives and llama.cpp does not assume."""
    of_tensors = {attribute for attribute, _ in _WIDTHS.values()}
    needed = {key for key, name in how.keys.items() if name not in of_tensors}
    needed |= {"rope.dimension_count"} if how.is_partial else set()
    missing = sorted(needed - said.values.keys())
    if missing := [key for key in _SIZES if not said.values.get(key)] + missing:
        raise ModelError(f"{said.file} lacks {said.architecture}.{missing[0]}; download it again")


def _refuse_keys(said: Metadata, keys: Iterable[str]) -> None:
    """Refuse a file with unknown keys, such as lists of a value per layer."""
    if names := ", ".join(f"{said.architecture}.{key}" for key in sorted(keys)):
        raise ModelError(
            f"{said.file}: {names} would be ignored, and the model wrong; take its original "
            "checkpoint in safetensors instead"
        )


def _add_sizes_of_tensors(said: Metadata, how: Architecture, settings: dict[str, Any]) -> None:
    """Add sizes that the file lacks: the defaults of a config fit one model only."""
    heads = settings["num_attention_heads"]
    settings.setdefault("num_key_value_heads", heads)
    rows = said.shapes.get("blk.0.attn_q.weight", (settings["hidden_size"],))[0]
    settings.setdefault("head_dim", rows // heads)
    attributes = {"vocab_size", *how.keys.values()}
    for end, (attribute, dim) in _WIDTHS.items():
        shape = next((shape for name, shape in said.shapes.items() if name.endswith(end)), None)
        if shape is not None and attribute in attributes:
            settings.setdefault(attribute, shape[dim])


def _rotation(said: Metadata, left: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the rotation of positions, and remove its keys from `left`."""
    found = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base", 10000.0)}
    kind = left.get("rope.scaling.type")
    keys = {f"rope.scaling.{key}": name for key, name in _SCALINGS.get(str(kind), {}).items()}
    if kind == "none":
        del left["rope.scaling.type"]
    elif keys and keys.keys() & _NEEDED <= left.keys():
        found["rope_type"] = left.pop("rope.scaling.type")
        found |= {name: left.pop(key) for key, name in keys.items() if key in left}
    if said.rope_factors is not None and bool((said.rope_factors != 1).any()):
        llama3 = {"rope_type": "llama3", "factor": float(said.rope_factors.max())} | _LLAMA3
        if found["rope_type"] != "default" or not torch.allclose(
            _factors(found | llama3, head_dim), said.rope_factors, rtol=1e-5
        ):
            raise ModelError(
                f"{said.file}: the tensor {ROPE_FACTORS} scales rotations in another way than "
                "Llama 3 does; take its original checkpoint in safetensors instead"
            )
        found |= llama3
    return found


def _factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return the converter's divisors of rotation speeds for the parameters of a Llama 3."""
    factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old = rope["original_max_position_embeddings"]
    length = 2 * pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    smooth = ((old / length - low) / (high - low)).clamp(0, 1)
    slower: Tensor = (1 - smooth) / factor + smooth
    return 1 / slower
