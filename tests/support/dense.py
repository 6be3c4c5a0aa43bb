"""Tiny dense models in folders, for the tests of upcycling and of GGUF files."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, WIDTH, FFN, LAYERS, HEADS, KV_HEADS = 260, 64, 96, 2, 4, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def dense_model(family: str, *, tied: bool = False, **settings: Any) -> Any:
    """A seeded dense model in float32; its biases and norms are not what they start as."""
    config, model, more = FAMILIES[family]
    torch.manual_seed(3)
    made = model(config(**SIZES, **more, tie_word_embeddings=tied, **settings)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed" in name or "lm_head" in name:
                weight.normal_(0, 0.5)
    return made


def byte_tokens() -> list[str]:
    """A vocabulary of bytes and four special tokens."""
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*special, *letters, letters[0] + letters[1]]


def save(model: Any, folder: Path, shard: str = "5GB") -> Path:
    """Write a folder with a tokenizer."""
    model.save_pretrained(folder, max_shard_size=shard)
    tokens = {token: i for i, token in enumerate(byte_tokens())}
    bpe = Tokenizer(models.BPE(vocab=tokens, merges=[tuple(byte_tokens()[-1])]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return folder


def folded(moe: Any) -> Any:
    """The dense Llama that a Mixtral of equal experts was made of, by its first experts."""
    wanted = moe.config.to_dict() | {"model_type": "llama"}
    config = LlamaConfig(**{k: v for k, v in wanted.items() if k in LlamaConfig().to_dict()})
    config.head_dim = moe.config.head_dim
    tensors = {}
    for name, weight in moe.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj")
            gate, up = weight[0].chunk(2)
            tensors |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            tensors[name.replace("experts.down_proj", "down_proj.weight")] = weight[0]
        elif not name.endswith("mlp.gate.weight"):
            tensors[name] = weight
    with torch.device("meta"):
        dense = LlamaForCausalLM(config)
    dense.load_state_dict(tensors, assign=True, strict=True)
    rotary: Any = type(dense.model.rotary_emb)
    dense.model.rotary_emb = rotary(config=config)
    return dense.eval()
