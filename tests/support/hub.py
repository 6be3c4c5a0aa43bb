"""Checkpoints of the aliases as they are published: configs, names, dtypes and shapes of tensors.

The configs are files in `tests/models/hub`; `docs/reference/aliases.md` says where each was found.
Names, dtypes and shapes are written here as functions of a config, by hand and not by
transformers, so that transformers' own renaming is tested too. `PUBLISHED` has what an index or the
headers of the original say of them: how many tensors, and how many bytes.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from qllm.models.aliases import ALIASES

CONFIGS = Path(__file__).parent.parent / "models" / "hub"
HUB = {alias: name for alias, name in ALIASES.items() if name}
"""Aliases that are hub ids."""
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
MAX_EXPERTS, VOCAB, WIDTH_BY, BLOCK = 16, 512, 16, 32
_HEADS = ("num_attention_heads", "num_key_value_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
)


class Stored(NamedTuple):
    """A tensor in a header: its dtype as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Published(NamedTuple):
    """What is known of the original's shards; None is not known."""

    shards: str
    """How they are named: the first number, and how many there are."""
    num_tensors: int | None = None
    num_bytes: int | None = None


PUBLISHED = {
    "mixtral": Published("1 of 19", None, 93_405_585_408),
    "qwen2-moe": Published("1 of 8", 4_659, 28_631_568_384),
    "qwen3-moe": Published("1 of 16", None, 61_064_245_248),
    "olmoe": Published("1 of 3", 3_219, 13_838_323_712),
    "gpt-oss": Published("0 of 2", None, 13_761_264_768),
    "deepseek-v3": Published("1 of 163", 91_991, 688_574_839_360),
    "granite-moe": Published("1 of 2"),
    "phi-moe": Published("1 of 17"),
}
Config = Mapping[str, Any]
Named = Iterator[tuple[str, Stored]]


def published_config(alias: str) -> dict[str, Any]:
    """The config.json of an alias."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{alias}.json").read_text())
    return config


def scaled(config: Config) -> dict[str, Any]:
    """The config of a small model of the same structure.

    The rule, for all of them: the ratio of heads to heads of keys stays, and there are as few as
    can be, but two. Widths are divided by the least number from 16 on that leaves a hidden size of
    whole blocks of 32. There are two layers behind the dense ones, at most 16 experts, and 512
    ids, so an id of a token beyond them is the last. Lists by layer or by angle are cut, or go on
    with their last number. Everything else stays, widths of heads too where the config has them.
    """
    small, hidden = dict(config), config["hidden_size"]
    by = next(n for n in range(WIDTH_BY, hidden) if hidden % (n * BLOCK) == 0)
    small |= {key: config[key] // by for key in _WIDTHS if config.get(key)}
    small |= {key: min(config[key], MAX_EXPERTS) for key in _EXPERTS if key in config}
    heads, keys = (config[name] for name in _HEADS)
    small |= dict(zip(_HEADS, (heads // keys, 1) if heads > keys else (2, 2), strict=True))
    small |= {"vocab_size": VOCAB, "num_hidden_layers": config.get("first_k_dense_replace", 0) + 2}
    small |= {key: VOCAB - 1 for key in _TOKENS if (config.get(key) or 0) >= VOCAB}
    if "layer_types" in config:
        small["layer_types"] = config["layer_types"][: small["num_hidden_layers"]]
    scaling = small.get("rope_scaling") or {}
    for key in {"long_factor", "short_factor"} & scaling.keys():
        angles, factors = head_dim(small) // 2, scaling[key]
        scaling = {**scaling, key: (factors + factors[-1:] * angles)[:angles]}
        small["rope_scaling"] = scaling
    return small


def head_dim(config: Config) -> int:
    """The width of a head, which some configs leave to be computed."""
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found


def header(alias: str, config: Config) -> dict[str, Stored]:
    """Every tensor of a checkpoint."""
    return dict(_HEADERS[alias](config))


def _bf16(name: str, *shape: int) -> tuple[str, Stored]:
    return name, Stored("BF16", shape)


def _ends(c: Config, tied: bool = False, bias: bool = False) -> Named:
    yield _bf16("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"])
    yield _bf16("model.norm.weight", c["hidden_size"])
    if not tied:
        yield _bf16("lm_head.weight", c["vocab_size"], c["hidden_size"])
    if bias:
        yield _bf16("model.norm.bias", c["hidden_size"])
        yield _bf16("lm_head.bias", c["vocab_size"])


def _attention(c: Config, start: str, biases: str = "", norms: bool = False) -> Named:
    """Norms of a layer and its attention; biases on the projections that are named by a letter."""
    hidden, wide = c["hidden_size"], head_dim(c)
    queries, keys = (c[name] * wide for name in _HEADS)
    outputs = {"q": queries, "k": keys, "v": keys, "o": hidden}
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _bf16(f"{start}.{name}.weight", hidden)
        if norms:
            yield _bf16(f"{start}.{name}.bias", hidden)
    for letter, num in outputs.items():
        inputs = queries if letter == "o" else hidden
        yield _bf16(f"{start}.self_attn.{letter}_proj.weight", num, inputs)
        if letter in biases:
            yield _bf16(f"{start}.self_attn.{letter}_proj.bias", num)


def _mlp(start: str, hidden: int, width: int, names: str = "gate_proj up_proj down_proj") -> Named:
    gate, up, down = names.split()
    yield _bf16(f"{start}.{gate}.weight", width, hidden)
    yield _bf16(f"{start}.{up}.weight", width, hidden)
    yield _bf16(f"{start}.{down}.weight", hidden, width)


def _layers(c: Config) -> list[str]:
    return [f"model.layers.{i}" for i in range(c["num_hidden_layers"])]


def _mixtral(c: Config, phi: bool = False) -> Named:
    yield from _ends(c, bias=phi)
    for start in _layers(c):
        yield from _attention(c, start, biases="qkvo" if phi else "", norms=phi)
        block, hidden, num = f"{start}.block_sparse_moe", c["hidden_size"], c["num_local_experts"]
        yield _bf16(f"{block}.gate.weight", num, hidden)
        for e in range(num):
            yield from _mlp(f"{block}.experts.{e}", hidden, c["intermediate_size"], "w1 w3 w2")


def _phi(c: Config) -> Named:
    return _mixtral(c, phi=True)


def _qwen_experts(c: Config, start: str, width: int) -> Named:
    yield _bf16(f"{start}.mlp.gate.weight", c["num_experts"], c["hidden_size"])
    for e in range(c["num_experts"]):
        yield from _mlp(f"{start}.mlp.experts.{e}", c["hidden_size"], width)


def _qwen2(c: Config) -> Named:
    yield from _ends(c)
    for start in _layers(c):
        yield from _attention(c, start, biases="qkv")
        yield from _qwen_experts(c, start, c["moe_intermediate_size"])
        shared, hidden = f"{start}.mlp.shared_expert", c["hidden_size"]
        yield from _mlp(shared, hidden, c["shared_expert_intermediate_size"])
        yield _bf16(f"{shared}_gate.weight", 1, hidden)


def _qwen3(c: Config) -> Named:
    yield from _ends(c)
    for start in _layers(c):
        yield from _attention(c, start)
        for letter in "qk":
            yield _bf16(f"{start}.self_attn.{letter}_norm.weight", head_dim(c))
        yield from _qwen_experts(c, start, c["moe_intermediate_size"])


def _olmoe(c: Config) -> Named:
    yield from _ends(c)
    for start in _layers(c):
        yield from _attention(c, start)
        for letter, heads in zip("qk", _HEADS, strict=True):
            yield _bf16(f"{start}.self_attn.{letter}_norm.weight", c[heads] * head_dim(c))
        yield from _qwen_experts(c, start, c["intermediate_size"])


def _granite(c: Config) -> Named:
    yield from _ends(c, tied=c["tie_word_embeddings"])
    hidden, width, num = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for start in _layers(c):
        yield from _attention(c, start)
        block = f"{start}.block_sparse_moe"
        yield _bf16(f"{block}.router.layer.weight", num, hidden)
        yield _bf16(f"{block}.input_linear.weight", num, 2 * width, hidden)
        yield _bf16(f"{block}.output_linear.weight", num, hidden, width)


def _gpt_oss(c: Config) -> Named:
    yield from _ends(c)
    hidden, width, num = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for start in _layers(c):
        yield from _attention(c, start, biases="qkvo")
        yield _bf16(f"{start}.self_attn.sinks", c["num_attention_heads"])
        yield _bf16(f"{start}.mlp.router.weight", num, hidden)
        yield _bf16(f"{start}.mlp.router.bias", num)
        for name, outputs, inputs in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            stem, blocks = f"{start}.mlp.experts.{name}_proj", inputs // BLOCK
            yield _bf16(f"{stem}_bias", num, outputs)
            yield f"{stem}_blocks", Stored("U8", (num, outputs, blocks, BLOCK // 2))
            yield f"{stem}_scales", Stored("U8", (num, outputs, blocks))


def _fp8(c: Config, weights: Named) -> Named:
    """Matrices as codes, each with a scale for every block, the last of which may be cut."""
    rows, columns = c["quantization_config"]["weight_block_size"]
    for name, (_, shape) in weights:
        yield name, Stored("F8_E4M3", shape)
        scales = (-(-shape[0] // rows), -(-shape[1] // columns))
        yield f"{name}_scale_inv", Stored("F32", scales)


def _mla(c: Config, start: str) -> Named:
    heads, rope = c["num_attention_heads"], c["qk_rope_head_dim"]
    hidden, queries, keys = c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
    own, values = c["qk_nope_head_dim"], c["v_head_dim"]
    attention = f"{start}.self_attn"
    yield _bf16(f"{attention}.q_a_proj.weight", queries, hidden)
    yield _bf16(f"{attention}.q_b_proj.weight", heads * (own + rope), queries)
    yield _bf16(f"{attention}.kv_a_proj_with_mqa.weight", keys + rope, hidden)
    yield _bf16(f"{attention}.kv_b_proj.weight", heads * (own + values), keys)
    yield _bf16(f"{attention}.o_proj.weight", hidden, heads * values)


def _deepseek_layer(c: Config, layer: int) -> Named:
    start, hidden = f"model.layers.{layer}", c["hidden_size"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _bf16(f"{start}.{name}.weight", hidden)
    for name, width in (("q_a", c["q_lora_rank"]), ("kv_a", c["kv_lora_rank"])):
        yield _bf16(f"{start}.self_attn.{name}_layernorm.weight", width)
    yield from _fp8(c, _mla(c, start))
    if layer < c["first_k_dense_replace"]:
        yield from _fp8(c, _mlp(f"{start}.mlp", hidden, c["intermediate_size"]))
        return
    num, width = c["n_routed_experts"], c["moe_intermediate_size"]
    yield _bf16(f"{start}.mlp.gate.weight", num, hidden)
    yield f"{start}.mlp.gate.e_score_correction_bias", Stored("F32", (num,))
    for e in range(num):
        yield from _fp8(c, _mlp(f"{start}.mlp.experts.{e}", hidden, width))
    shared = width * c["n_shared_experts"]
    yield from _fp8(c, _mlp(f"{start}.mlp.shared_experts", hidden, shared))


def _deepseek(c: Config) -> Named:
    """The model, and one more layer that predicts a further token and that nobody asks for."""
    yield from _ends(c)
    last, hidden = c["num_hidden_layers"], c["hidden_size"]
    for layer in range(last + c["num_nextn_predict_layers"]):
        yield from _deepseek_layer(c, layer)
    start = f"model.layers.{last}"
    yield _bf16(f"{start}.embed_tokens.weight", c["vocab_size"], hidden)
    yield _bf16(f"{start}.eh_proj.weight", hidden, 2 * hidden)
    yield _bf16(f"{start}.shared_head.head.weight", c["vocab_size"], hidden)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _bf16(f"{start}.{name}.weight", hidden)


_HEADERS: dict[str, Callable[[Config], Named]] = {
    "mixtral": _mixtral,
    "qwen2-moe": _qwen2,
    "qwen3-moe": _qwen3,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "deepseek-v3": _deepseek,
    "granite-moe": _granite,
    "phi-moe": _phi,
}


# -- laid into a cache


def drawn(tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Values for a header: finite ones that a model computes with."""
    made = torch.Generator().manual_seed(0)
    found = {}
    for name, (kind, shape) in tensors.items():
        if kind == "U8":  # codes of 4 bits, and exponents around 2 ** -6
            least, most = (119, 123) if name.endswith("_scales") else (0, 256)
            found[name] = torch.randint(least, most, shape, generator=made).to(torch.uint8)
            continue
        value = torch.randn(shape, generator=made) * (0.02 if len(shape) > 1 else 0.1)
        if name.endswith("norm.weight"):
            value += 1
        if name.endswith("_scale_inv"):
            value = value.abs() + 0.01
        elif kind == "F8_E4M3":
            value *= 50
        found[name] = value.to(DTYPES[kind])
    return found


def lay(cache: Path, alias: str, config: Config, tensors: Mapping[str, Tensor]) -> Path:
    """Lay a checkpoint into a hub cache as a download leaves it: two of its shards, and an index.

    Returns:
        Its folder.
    """
    home = cache / f"models--{HUB[alias].replace('/', '--')}"
    folder = home / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (folder / "config.json").write_text(json.dumps(config))
    first, num = map(int, PUBLISHED[alias].shards.split(" of "))
    names, half = list(tensors), len(tensors) // 2
    index = {}
    for number, own in ((first, names[:half]), (num, names[half:])):
        shard = f"model-{number:05}-of-{num:05}.safetensors"
        whole = {name: tensors[name] for name in own}
        save_file(whole, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(own, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def kinds(tensors: Mapping[str, Any]) -> dict[str, str]:
    """One tensor of every kind: names that differ in the numbers of layers and experts are one.

    Returns:
        Kind -> the last name of it.
    """
    return {re.sub(r"\.\d+\.", ".N.", name): name for name in tensors}
