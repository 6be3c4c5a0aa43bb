"""A model whose next token is a table, so that it gives any chosen answer."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qllm import QLLMEngine

END = "<|im_end|>"
WIDTH = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if false %}<think></think>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start }}{% endif %}"
)
"""Its variable `start` chooses the answer: `<S0>` begins the first."""


def byte_level(texts: Sequence[str], special: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, which also has some texts as tokens.

    Args:
        texts: Whole tokens, which text is never split into; a model may say them.
        special: Special tokens.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {split.pre_tokenize_str(text)[0][0] for text in texts if text not in special}
    pieces = [*letters, *sorted(known - {*letters})]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, chat_template=TEMPLATE)


def id_of(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The one token of a text."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = text in tokenizer.all_special_tokens
    found = tokenizer.convert_tokens_to_ids(text if special else split.pre_tokenize_str(text)[0][0])
    assert isinstance(found, int)
    return found


def follower(tokenizer: Any, follows: dict[int, int]) -> Qwen3MoeForCausalLM:
    """A model in which tokens are followed by those of a table."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=64, moe_intermediate_size=32,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=4096,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        kept = torch.randn(len(tokenizer), WIDTH, generator=torch.Generator().manual_seed(0))
        model.model.embed_tokens.weight.copy_(kept)
        for token, following in follows.items():
            model.lm_head.weight[following] += kept[token]
    return model


def engine_of(answers: Sequence[Sequence[str]], special: Sequence[str] = ()) -> QLLMEngine:
    """An engine that gives answer n, a list of tokens, behind `<S{n}>`; no token is in two.

    Args:
        answers: What it says.
        special: Texts that are special tokens.
    """
    starts = [f"<S{n}>" for n in range(len(answers))]
    texts = [text for answer in answers for text in answer]
    assert len(texts) == len(set(texts)), "a token is followed by one other"
    own = [END, "<|im_start|>", *starts, *special]
    tokenizer = byte_level(texts, own)
    follows = {}
    for start, answer in zip(starts, answers, strict=True):
        ids = [id_of(tokenizer, text) for text in (start, *answer, END)]
        follows |= dict(itertools.pairwise(ids))
    return QLLMEngine.from_model(
        follower(tokenizer, follows), tokenizer, conformance=False, threads=1, max_kv_tokens=2048
    )
