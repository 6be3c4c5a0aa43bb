"""Tokenizers of GGUF files: the ids that the tokenizer of the safetensors gives, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from qllm.errors import ModelError
from qllm.models.tokenizer import load_tokenizer
from qllm.models.weights.gguf_tokenizer import SPLITTINGS, tokenizer_of

SPECIAL = ["<|end|>", "<｜begin▁of▁text｜>", "<｜tool｜>"]
"""Two have letters that are no bytes, as those of DeepSeek have; no key names the last."""
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ġ", "h"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġh", "e")]
PIECES = ["Ġh", "he", "ll", "hell", "hello", "Ġhe"]
WHOLE = "xyz"
"""A word of the vocabulary that no merges make."""
BYTES = [*SPECIAL, "<think>", *LETTERS, *PIECES, WHOLE]
BYTE_TYPES = [3, 3, 3, 4] + [1] * (len(BYTES) - 4)
SPM = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<tool>"]
SPM_TYPES = [2, 3, 3] + [6] * 256 + [4]
WORDS = ["▁", "h", "e", "l", "o", "he", "ll", "llo", "hello", "▁hello"]
SCORES = [0.0] * len(SPM) + [-float(i) for i in range(len(WORDS))]
OF_GPT2 = {"gpt-2", "olmo", "starcoder", "refact", "smollm"}
"""Values of `pre` that split as GPT-2 does. The last three split digits one by one."""
TEXTS = [
    "hello hello  hello",
    " hello 12345 It's HelloWorld/\n\n x\t",
    "cafe\u0301 café 你好 🙂",
    "<|end|>hello<｜begin▁of▁text｜> he<think>llo</s> <tool>he<｜tool｜>he",
    "xyz",
    "",
]


def write(path: Path, **changed: Any) -> Path:
    """A file that holds a vocabulary of bytes; keys that are None are left out."""
    keys: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": BYTES,
        "ggml.token_type": BYTE_TYPES,
        "ggml.merges": [" ".join(pair) for pair in MERGES],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 0,
    }
    writer = GGUFWriter(path, "llama")
    for key, value in (keys | changed).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{key}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_spm(path: Path, **changed: Any) -> Path:
    """A file that holds a vocabulary of sentencepiece."""
    keys = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [*SPM, *WORDS],
        "ggml.token_type": SPM_TYPES + [1] * len(WORDS),
        "ggml.merges": None,
        "ggml.scores": SCORES,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return write(path, **keys | changed)


def ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def saved(tokenizer: Any, folder: Path) -> Any:
    """The same tokenizer as it comes out of a folder."""
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_bytes_become_the_ids_of_the_safetensors(tmp_path: Path, pre: str, kind: Any) -> None:
    own = kind(
        vocab={t: i for i, t in enumerate(BYTES)},
        merges=MERGES,
        pad_token=None,
        unk_token=None,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[0],
    )
    own.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    own.add_tokens(["<think>"])
    wanted = saved(own, tmp_path / "folder")
    found: Any = tokenizer_of(write(tmp_path / "a.gguf", **{"ggml.pre": pre}))
    assert ids(found) == ids(wanted)
    assert [found.decode(i) for i in ids(found)] == [wanted.decode(i) for i in ids(wanted)]
    plain = [[t.decode(i, skip_special_tokens=True) for i in ids(t)] for t in (found, wanted)]
    assert plain[0] == plain[1]
    assert (found.bos_token_id, found.eos_token_id) == (1, 0)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_become_the_ids_of_the_safetensors(tmp_path: Path, prefix: bool) -> None:
    vocab = {token: i for i, token in enumerate([*SPM, *WORDS])}
    merges = generate_merges(vocab, dict(zip(vocab, SCORES, strict=True)))
    own: Any = LlamaTokenizer(
        vocab=vocab, merges=merges, add_prefix_space=prefix, add_bos_token=True
    )
    own.add_tokens(["<tool>"])
    wanted = saved(own, tmp_path / "folder")
    change = {} if prefix else {"ggml.add_space_prefix": False}
    found: Any = tokenizer_of(write_spm(tmp_path / "a.gguf", **change))
    assert ids(found) == ids(wanted)
    assert [found.decode(i) for i in ids(found)] == [wanted.decode(i) for i in ids(wanted)]


def test_texts_are_split_as_the_library_splits_them() -> None:
    shared = SPLITTINGS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert shared == SPLITTINGS.keys() - OF_GPT2
    for name in shared:
        assert SPLITTINGS[name].pattern == GGUF_PRE_TOKENIZER_SPLITS[name], name


@pytest.mark.parametrize("pre", sorted(OF_GPT2))
def test_digits_are_by_themselves_where_they_are_in_starcoder(tmp_path: Path, pre: str) -> None:
    found: Any = tokenizer_of(write(tmp_path / "a.gguf", **{"ggml.pre": pre}))
    split = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 120")
    numbers = ["Ġ120"] if pre in ("gpt-2", "olmo") else ["Ġ", "1", "2", "0"]
    assert [piece for piece, _ in split] == ["it", "'s", *numbers]


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_words_that_are_whole_and_starts_are_those_of_llama_cpp(tmp_path: Path, pre: str) -> None:
    """Llama 3 takes words of its vocabulary whole, and begins a text with a token."""
    is_llama3 = pre in ("llama3", "llama-v3", "llama-bpe", "tekken")
    found: Any = tokenizer_of(write(tmp_path / "a.gguf", **{"ggml.pre": pre}))
    letters = [BYTES.index(letter) for letter in WHOLE]
    assert found(WHOLE)["input_ids"] == ([1, BYTES.index(WHOLE)] if is_llama3 else letters)
    told = write(tmp_path / "b.gguf", **{"ggml.pre": pre, "ggml.add_bos_token": not is_llama3})
    said: Any = tokenizer_of(told)
    assert (said("")["input_ids"] == [1]) is not is_llama3


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("ggml.pre", "deepseek-llm", r"tokenizer\.ggml\.pre='deepseek-llm' says; known are gpt-2"),
        ("ggml.pre", None, r"tokenizer\.ggml\.pre=None says; known are gpt-2"),
        ("ggml.model", "bert", r"a tokenizer 'bert' .*; read are gpt2 and llama"),
        ("ggml.add_space_prefix", True, "add_space_prefix is for vocabularies of sentencepiece"),
        ("ggml.precompiled_charsmap", [1, 2], r"ggml\.precompiled_charsmap would be ignored"),
        ("ggml.remove_extra_whitespaces", True, "remove_extra_whitespaces would be ignored"),
        ("huggingface.json", "{}", r"tokenizer\.huggingface\.json would be ignored"),
        ("ggml.bos_token_id", 9999, "holds no tokenizer that works"),
        ("ggml.merges", ["h e", "h zzz"], "holds no tokenizer that works"),
        ("ggml.tokens", None, "holds no tokenizer that works"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        tokenizer_of(write(tmp_path / "a.gguf", **{key: value}))


def test_scores_that_are_all_the_same_are_refused(tmp_path: Path) -> None:
    """As the converter writes them where it finds no file of sentencepiece itself."""
    scores = [-1000.0] * len(SCORES)
    with pytest.raises(ModelError, match=r"all tokenizer\.ggml\.scores are -1000\.0"):
        tokenizer_of(write_spm(tmp_path / "a.gguf", **{"ggml.scores": scores}))


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    tokens = [*BYTES[:-1], "<think>"]
    with pytest.raises(ModelError, match=r"the token '<think>' is there twice"):
        tokenizer_of(write(tmp_path / "a.gguf", **{"ggml.tokens": tokens}))


def test_a_file_has_its_chat_templates_by_name(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    one = write(tmp_path / "a.gguf", **{"chat_template": template})
    found: Any = tokenizer_of(one)
    assert found.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi"
    more = {"chat_template": "d", "chat_template.tool_use": "t", "chat_templates": ["tool_use"]}
    several: Any = tokenizer_of(write(tmp_path / "b.gguf", **more))
    assert several.chat_template == {"default": "d", "tool_use": "t"}


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(write(tmp_path / "a.gguf", **{"ggml.model": "none"})) is None
    assert load_tokenizer(write(tmp_path / "b.gguf", **{"ggml.model": None})) is None
