"""The tokenizer in a GGUF file.

Vocabularies are built here, because transformers ignores four settings: words that are taken whole,
the normal form of letters, a token at the start of a text, and special tokens with letters that are
no bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from qllm.errors import ModelError
from qllm.models.folders import first_line
from qllm.models.weights.gguf_file import open_reader

_START = "tokenizer."
_TEMPLATE = "chat_template"
_READ = {
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.token_type",
    "ggml.scores",
    "ggml.merges",
    "ggml.add_bos_token",
    "ggml.add_eos_token",
    "ggml.add_space_prefix",
}
_HARMLESS = {
    "ggml.add_sep_token": False,
    "ggml.remove_extra_whitespaces": False,
    "ggml.token_type_count": 1,
}
"""Keys that change nothing if they have this value."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens: of the vocabulary, special, and others that are never split."""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
    r"|{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """Rules that split a text into pieces. Byte-level BPE then merges bytes inside a piece."""

    pattern: str | None
    """Pattern of pieces; None is that of GPT-2."""
    is_llama3: bool = False
    """True if words of the vocabulary are taken whole, and a text begins with a token by default.
    """
    is_composed: bool = False
    """True if letters and their accents become one character, where one exists (NFC)."""
    is_by_digit: bool = False
    """True if every digit is a piece of its own."""


_GPT2 = Splitting(None)
_STARCODER = Splitting(None, is_by_digit=True)
_LLAMA3 = Splitting(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}", True)
_GPT4O = Splitting(_CASED.format(f"{_ENDINGS}?", r"\p{N}{1,3}"))
SPLITTINGS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "tekken": Splitting(_CASED.format("", r"\p{N}"), is_llama3=True),
    "qwen2": Splitting(
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}", is_composed=True
    ),
    "gpt-4o": _GPT4O,
    "minimax-m2": _GPT4O,
}
"""Rules by `tokenizer.ggml.pre`, for the known values."""


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a file; None if there is none.

    Raises:
        ModelError: A key of the tokenizer is unknown, or transformers makes no tokenizer of the
            file.
    """
    fields = open_reader(path).fields
    said = {
        key.removeprefix(_START): field for key, field in fields.items() if key.startswith(_START)
    }
    if "ggml.model" not in said or said["ggml.model"].contents() == "none":
        return None
    for key, field in said.items():
        is_known = key in _READ or key.endswith("_token_id") or key.startswith(_TEMPLATE)
        if not is_known and (key not in _HARMLESS or _HARMLESS[key] != field.contents()):
            raise ModelError(
                f"{path}: {_START}{key} would be ignored, and texts become other tokens; take the "
                "model's original checkpoint in safetensors instead"
            )
    values = {key.removeprefix("ggml."): field.contents() for key, field in said.items()}
    try:
        return _made(str(path), values)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ModelError(
            f"{path} holds no tokenizer that works ({type(error).__name__}: {first_line(error)}); "
            "download it again"
        ) from error


def _made(path: str, said: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    kind, tokens = said["model"], said["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if twice := next((token for i, token in enumerate(tokens) if vocab[token] != i), None):
        raise ModelError(f"{path}: the token {twice!r} is there twice; download it again")
    named = {
        f"{name}_token": tokens[said[key]] if (key := f"{long}_token_id") in said else None
        for name, long in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    own: Any
    fast: Any = PreTrainedTokenizerFast
    if kind == "gpt2":
        how = _splitting(path, said)
        own = fast(
            tokenizer_object=_of_bytes(path, said, vocab, how),
            add_bos_token=said.get("add_bos_token", how.is_llama3),
            add_eos_token=said.get("add_eos_token", False),
            **named,
        )
    elif kind == "llama":
        own = LlamaTokenizer(
            vocab=vocab,
            merges=_merges(said) or generate_merges(vocab, _scores(path, said)),
            add_prefix_space=said.get("add_space_prefix", True),
            add_bos_token=said.get("add_bos_token", True),
            add_eos_token=said.get("add_eos_token", False),
            **named,
        )
    else:
        raise ModelError(
            f"{path} has a tokenizer {kind!r} (tokenizer.ggml.model); read are gpt2 and llama: "
            "take the model's original checkpoint in safetensors instead"
        )
    _add(own, said)
    own.chat_template = _template(said)
    found: PreTrainedTokenizerBase = own
    return found


def _of_bytes(
    path: str, said: Mapping[str, Any], vocab: dict[str, int], how: Splitting
) -> Tokenizer:
    """Return a tokenizer of a vocabulary of bytes, without its special tokens."""
    if said.get("add_space_prefix"):
        raise ModelError(
            f"{path}: tokenizer.ggml.add_space_prefix is for vocabularies of sentencepiece, and "
            "this is one of bytes; take the model's original checkpoint in safetensors instead"
        )
    made = Tokenizer(models.BPE(vocab=vocab, merges=_merges(said), ignore_merges=how.is_llama3))
    made.decoder = decoders.ByteLevel()
    if how.is_composed:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if how.is_by_digit:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if how.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(how.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made


def _splitting(path: str, said: Mapping[str, Any]) -> Splitting:
    how = SPLITTINGS.get(said.get("pre", ""))
    if how is None:
        raise ModelError(
            f"{path} splits texts as tokenizer.ggml.pre={said.get('pre')!r} says; known are "
            f"{', '.join(SPLITTINGS)}: take the model's original checkpoint in safetensors instead"
        )
    return how


def _merges(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") for merge in said.get("merges", ()))
    return [(first, second) for first, second in pairs]


def _scores(path: str, said: Mapping[str, Any]) -> dict[str, float]:
    """Return scores by token, which decide the order of merges.

    Raises:
        ModelError: All are the same, as in files that were made without sentencepiece's own.
    """
    kinds = said.get("token_type") or [_NORMAL] * len(said["tokens"])
    triples = list(zip(said["tokens"], said["scores"], kinds, strict=True))
    normal = [score for _, score, kind in triples if kind == _NORMAL]
    if len(normal) > 1 and len(set(normal)) == 1:
        raise ModelError(
            f"{path}: all tokenizer.ggml.scores are {normal[0]}, so they do not say what is merged "
            "first; take the model's original checkpoint in safetensors instead"
        )
    return {token: score for token, score, _ in triples}


def _add(tokenizer: Any, said: Mapping[str, Any]) -> None:
    """Add the tokens that are never split. They keep their ids, since the vocabulary has them."""
    kinds = dict(zip(said["tokens"], said.get("token_type", ()), strict=False))
    for kind, add in (
        (_CONTROL, tokenizer.backend_tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.backend_tokenizer.add_tokens),
    ):
        chosen = [token for token, own in kinds.items() if own == kind]
        add([AddedToken(t, normalized=False, special=kind == _CONTROL) for t in chosen])


def _template(said: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or all templates by name if there are several."""
    start = f"{_TEMPLATE}."
    named = {key.removeprefix(start): said[key] for key in said if key.startswith(start)}
    default: str | None = said.get(_TEMPLATE)
    if named and default is not None:
        named["default"] = default
    return named or default
