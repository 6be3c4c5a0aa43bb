"""A checkpoint of the shape of Qwen3-30B-A3B in 4 bits, with seeded noise for weights.

Its format is that of compressed-tensors (pack-quantized, symmetric, groups of 128, bf16 scales), in
shards of two layers, one tensor of a shard after the other: 16 GB on disk, 1 GB in memory.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

GROUP = 128
SEED = 1
STEP = 0.004
"""Size of a step of 4 bits; weights have a spread of 0.02."""
SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
METHOD = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "lm_head"],
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
    "ignore": ["re:.*mlp.gate$"],
}
Named = Iterator[tuple[str, Tensor]]


class Noise:
    """Seeded weights of one model."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        self._rng = np.random.Generator(np.random.PCG64DXSM(SEED))
        self._config = config

    def quantised(self, name: str, n: int, k: int) -> Named:
        """Return a weight [n, k] of 4 bits.

        Half of the scales are negative. The codes from -8 to 7 have a mean below 0, and with scales
        of one sign each layer would let all tokens look more alike, and use the same experts.
        """
        words = self._rng.integers(0, 1 << 64, (n, k // 16), dtype=np.uint64)
        scale = self._rng.random((n, k // GROUP), dtype=np.float32) + 0.5
        scale *= self._rng.choice(np.float32([-1, 1]), scale.shape)
        yield f"{name}.weight_packed", torch.from_numpy(words.view(np.int32))
        yield f"{name}.weight_scale", (torch.from_numpy(scale) * STEP).bfloat16()
        yield f"{name}.weight_shape", torch.tensor([n, k])

    def plain(self, n: int, k: int, spread: float) -> Tensor:
        """Return a weight in bf16."""
        return torch.from_numpy(self._rng.standard_normal((n, k), np.float32) * spread).bfloat16()

    def layer(self, index: int) -> Named:
        """Return the tensors of a layer."""
        c, start = self._config, f"model.layers.{index}"
        d, h = c.hidden_size, c.head_dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}.{name}.weight", torch.ones(d).bfloat16()
        for name in ("q_norm", "k_norm"):
            yield f"{start}.self_attn.{name}.weight", torch.ones(h).bfloat16()
        queries, keys = c.num_attention_heads * h, c.num_key_value_heads * h
        for name, n in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from self.quantised(f"{start}.self_attn.{name}", n, d)
        yield from self.quantised(f"{start}.self_attn.o_proj", d, queries)
        yield f"{start}.mlp.gate.weight", self.plain(c.num_experts, d, 0.02)
        for expert in range(c.num_experts):
            f, stem = c.moe_intermediate_size, f"{start}.mlp.experts.{expert}"
            yield from self.quantised(f"{stem}.gate_proj", f, d)
            yield from self.quantised(f"{stem}.up_proj", f, d)
            yield from self.quantised(f"{stem}.down_proj", d, f)

    def ends(self) -> Named:
        """Return embedding, last norm and head."""
        c = self._config
        yield "model.embed_tokens.weight", self.plain(c.vocab_size, c.hidden_size, 1.0)
        yield "model.norm.weight", torch.ones(c.hidden_size).bfloat16()
        yield from self.quantised("lm_head", c.vocab_size, c.hidden_size)


def write(folder: Path, num_layers: int, shape: Mapping[str, Any] = SHAPE) -> int:
    """Write a checkpoint of so many layers; return its bytes.

    Args:
        folder: Folder, which is made.
        num_layers: Number of layers.
        shape: Other fields of the `Qwen3MoeConfig`.
    """
    config = Qwen3MoeConfig(**{**shape, "num_hidden_layers": num_layers})
    folder.mkdir(parents=True)
    noise, shards, total = Noise(config), dict[str, str](), 0
    starts = range(0, num_layers, 2)
    for number, start in enumerate([None, *starts]):
        if start is None:
            tensors = dict(noise.ends())
        else:
            layers = range(start, min(start + 2, num_layers))
            tensors = {name: t for layer in layers for name, t in noise.layer(layer)}
        name = f"model-{number + 1:05d}-of-{len(starts) + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        shards |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = config.to_dict() | {"dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"]}
    settings |= {"eos_token_id": None, "bos_token_id": None, "quantization_config": METHOD}
    (folder / "config.json").write_text(json.dumps(settings))
    return total


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    args = parser.parse_args()
    print(f"{write(args.folder, args.layers) / 1e9:.2f} GB in {args.folder}")


if __name__ == "__main__":
    main()
