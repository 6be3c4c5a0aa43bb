"""Small tokenizers of every kind: how they write a space and a byte, and what they put in front."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from qllm.models.tokenizer import load_tokenizer

CORPUS = [
    "the cat sat on the mat, the end.",
    "日本語と中文的文本 🎉👩‍👩‍👧 naïve café",
    "  x = y\n\n\treturn",
] * 3


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: tokens are byte strings, which may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def sentencepiece_like(words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Llama's kind: "▁" for spaces, one of which is stripped in front, and byte fallback.

    Args:
        words: Further tokens, which a model may say and text is never split into.
    """
    pieces = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdeT.", "ab", "▁a", "▁the", *words]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("a", "b"), ("▁", "a"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    put_around(tokenizer, ["<s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>", unk_token="<unk>"
    )


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """T5's kind: "▁" is made, and taken away, by Metaspace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<unk>"],
        initial_alphabet=[*"abcdeT. \n日本é🎉"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    put_around(tokenizer, ["<s>"], ["<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>", unk_token="<unk>"
    )


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: a space stands before each piece that has no "##"."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200,
        special_tokens=["<eos>", "<unk>"],
        initial_alphabet=[*"abcdeT.日本é🎉"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    put_around(tokenizer, ["[CLS]"], ["[SEP]"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", cls_token="[CLS]"
    )


@cache
def with_two_in_front() -> PreTrainedTokenizerFast:
    """GLM's kind: bytes, and two special tokens before every text."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    put_around(tokenizer, ["[gMASK]", "<sop>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def tiny() -> Any:
    """That of the model in the package."""
    return load_tokenizer("tiny")


def put_around(tokenizer: Tokenizer, front: Sequence[str], end: Sequence[str] = ()) -> None:
    """Have special tokens stand around every text."""
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*front, *end)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*front, "$A", *end],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in (*front, *end)],
    )


KINDS = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece_like,
    "metaspace": metaspace,
    "word pieces": word_pieces,
    "two in front": with_two_in_front,
    "tiny": tiny,
}
IN_FRONT = {
    "sentencepiece": ["<s>"],
    "metaspace": ["<s>"],
    "word pieces": ["[CLS]"],
    "two in front": ["[gMASK]", "<sop>"],
}
"""What those of some kinds put in front of every text."""
