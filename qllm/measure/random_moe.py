"""A Qwen3-MoE of about 300M random weights with a real tokenizer, made on this machine.

Nothing is downloaded: the tokenizer is trained on Python's standard library. The weights are seeded
noise, scaled so that activations keep their size and greedy streams do not repeat one token. The
folder is made once and kept in the user's cache.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qllm.models.folders import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE = 2
"""Version in the cache folder's name. It must be raised when the model changes."""
EOS, START, PAD, TEXT_END = "<|im_end|>", "<|im_start|>", "<pad>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_POSITION = 8192
SHARPNESS, ATTENTION_GAIN = 2.0, 4.0
"""Gains that make each position attend to a few others. So greedy answers depend on their context,
and do not repeat soon: 24 tokens have 19 to 22 distinct tokens (6 to 12 without the gains)."""
_MAX_FILE_BYTES = 400_000
_BYTES_PER_ID = 700
"""Bytes of the tokenizer's training text, per entry of its vocabulary."""

SIZES: dict[str, dict[str, int]] = {
    "300m": {
        "vocab_size": 16384,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 384,
        "num_experts": 24,
        "num_experts_per_tok": 4,
    },
    "1m": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 4,
    },
}
"""Shapes of models by name. "1m" is for tests."""


def source_text(max_bytes: int) -> Iterator[str]:
    """Yield files of the standard library, sorted by name, up to about `max_bytes`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left = max_bytes
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if "site-packages" in parts or file.name.startswith("_sysconfigdata"):
            continue
        if file.stat().st_size > _MAX_FILE_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield text
        left -= len(text)
        if left < 0:
            return


def make_random_moe(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: str = "300m",
    seed: int = 0,
    tied: bool = False,
    positions: int = MAX_POSITION,
) -> Path:
    """Make the model, unless its folder exists, and return the folder.

    Args:
        folder: Folder to write; None is a folder in the user's cache, named after the other
            arguments.
        size: Key of `SIZES`.
        seed: Seed of the weights.
        tied: True uses the embedding also as the output matrix. A model with random tied weights
            repeats one token.
        positions: Longest context in tokens. The weights do not depend on it.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"random-moe-{size}-r{RECIPE}-py{python}-s{seed}{'-tied' if tied else ''}"
    name += f"-p{positions}" if positions != MAX_POSITION else ""
    place = cache_dir() / name if folder is None else Path(folder)
    if (place / "config.json").is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        tokenizer = train_tokenizer(SIZES[size]["vocab_size"])
        tokenizer.model_max_length = positions
        tokenizer.save_pretrained(work)
        model = _random_model(SIZES[size], len(tokenizer), tokenizer, seed, tied, positions)
        model.save_pretrained(work)
        work.chmod(0o755)
        try:
            work.rename(place)
        except OSError:
            if not (place / "config.json").is_file():  # another process wrote the folder first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def train_tokenizer(vocab_size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE of at most `vocab_size` ids with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TEXT_END, START, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(source_text(vocab_size * _BYTES_PER_ID), trainer)
    made: PreTrainedTokenizerBase = make(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[TEXT_END, START],
        model_max_length=MAX_POSITION,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return made


def _random_model(
    shape: dict[str, int], vocab_size: int, tokenizer: Any, seed: int, tied: bool, positions: int
) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make: Any = Qwen3MoeConfig
    config = make(
        **{**shape, "vocab_size": vocab_size},
        intermediate_size=2 * shape["hidden_size"],
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        norm_topk_prob=True,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    if tied:
        model.tie_weights()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.fill_(SHARPNESS if "q_norm" in name or "k_norm" in name else 1.0)
            else:
                std = 0.5 if "embed" in name else p.shape[-1] ** -0.5
                std *= ATTENTION_GAIN if "o_proj" in name else 1.0
                p.normal_(0.0, std, generator=noise)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.train(False)
