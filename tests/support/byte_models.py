"""A tokenizer of bytes, and engines of tiny random models that speak it."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qllm import QLLMEngine
from tests.support.families import VOCAB, make_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)

KV = 1024


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, the id is the byte; it has a chat template."""
    bytes_ = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    values = [ord(c) for c in bytes_]
    rest = [b for b in range(256) if b not in values]
    chars = {b: c for b, c in zip(values, bytes_, strict=True)}
    chars.update({b: chr(256 + i) for i, b in enumerate(rest)})
    inner = Tokenizer(models.BPE(vocab={c: b for b, c in chars.items()}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE)


def engine_of(**settings: Any) -> QLLMEngine:
    model = make_model("mixtral")
    defaults = {"max_kv_tokens": KV, "conformance": False, "threads": 1}
    return QLLMEngine.from_model(model, byte_tokenizer(), **{**defaults, **settings})


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()
