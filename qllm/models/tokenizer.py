"""The loader of a model's tokenizer. Plain tokenizers need no torch."""

import hashlib
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from qllm.errors import ModelError
from qllm.models.folders import GGUF, first_line, locate, read_json
from qllm.torchless import hide_torch, show_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes defined fully by tokenizer.json: AutoTokenizer would find the same one."""
LONG_TEXT = 2048
"""Least number of characters of a text that is encoded without the interpreter's lock."""
MOST_IN_FRONT = 4
"""Most tokens before a text that are searched for a second token like the first."""
_LONGEST: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""Results of `longest_token`."""


def import_tokenizers(name_or_path: str, trust_remote_code: bool) -> None:
    """Import the modules that a model's tokenizer needs, which takes a second."""
    folder = Path(name_or_path)
    is_gguf = folder.suffix == GGUF or (folder.is_dir() and any(folder.glob(f"*{GGUF}")))
    if not (trust_remote_code or is_gguf):
        hide_torch()
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - later imports find it


def load_tokenizer(
    name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer alone, for a front end whose model is in another process.

    Raises:
        ConfigError: The name is unknown.
        ModelError: The folder is missing or its tokenizer is broken.
    """
    name, folder = locate(os.fspath(name_or_path), weights=False, code=trust_remote_code)
    return tokenizer_in(name, folder, trust_remote_code)


def tokenizer_in(
    name: str, folder: Path, trust_remote_code: bool
) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in the folder of a model, or in its GGUF file; None if there is none.

    Raises:
        ModelError: The tokenizer is broken.
    """
    if folder.suffix == GGUF:
        show_torch()
        from qllm.models.weights.gguf_tokenizer import tokenizer_of

        return tokenizer_of(folder)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    how: dict[str, Any] = {"local_files_only": True}
    (show_torch if trust_remote_code else hide_torch)()
    plain = read_json(folder / "tokenizer_config.json").get("tokenizer_class") in _PLAIN
    if plain and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast
    else:
        from transformers import AutoTokenizer  # takes seconds if torch is importable

        make, how["trust_remote_code"] = AutoTokenizer, trust_remote_code
    try:
        tokenizer: PreTrainedTokenizerBase = make.from_pretrained(folder, **how)
        return tokenizer
    except Exception as error:
        raise ModelError(
            f"tokenizer of model {name!r} cannot be loaded: {first_line(error)}"
        ) from error


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return a digest of the text of every id; None without a tokenizer."""
    if tokenizer is None:
        return None
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def ids_of(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Return the ids that a tokenizer makes of a text.

    Where transformers would only pass the text to the tokenizers library, call the library
    directly: this saves 0.05 ms for a short text, and a third of the time for a long one, during
    which it releases the interpreter's lock.

    Args:
        tokenizer: A tokenizer of transformers.
        text: The text to encode.
        special: True adds the special tokens around the text. A text rendered by a template may
            begin with the special tokens already. Then no second ones are added before it.
    """
    ids = _ids_of(tokenizer, text, special)
    if special:
        del ids[: num_doubled(tokenizer, ids)]
    return ids


def num_doubled(tokenizer: Any, ids: Sequence[int]) -> int:
    """Count the first ids that a tokenizer added before a text which begins with the same ids.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Ids of the text, with the special tokens around it.
    """
    if not ids or ids[0] not in ids[1 : MOST_IN_FRONT + 1]:
        return 0
    whole, bare = (_ids_of(tokenizer, "a", special) for special in (True, False))
    num = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return num if ids[:num] == ids[num : 2 * num] else 0


def _ids_of(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the ids of a text; see `ids_of`."""
    kind: Any = type(tokenizer)
    if _hands_on(kind):
        backend = tokenizer.backend_tokenizer
        is_plain = backend.truncation is None and backend.padding is None
        if is_plain and backend.encode_special_tokens == tokenizer.split_special_tokens:
            ids: list[int]
            if len(text) < LONG_TEXT:
                ids = backend.encode(text, add_special_tokens=special).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
            return ids
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def longest_token(tokenizer: Any) -> int:
    """Return the characters of a tokenizer's longest token; 0 if it does not list its tokens."""
    found = _LONGEST.get(tokenizer)
    if found is None:
        tokens = getattr(tokenizer, "get_vocab", dict[str, int])()
        found = _LONGEST[tokenizer] = max(map(len, tokens), default=0)
    return found


def renders_as_usual(tokenizer: Any) -> bool:
    """Return True if a chat has the tokens that `ids_of` makes of its template's text."""
    from transformers import PreTrainedTokenizerBase

    kind: Any = type(tokenizer)
    usual = PreTrainedTokenizerBase.apply_chat_template
    return _hands_on(kind) and kind.apply_chat_template is usual


@lru_cache
def _hands_on(kind: type) -> bool:
    """Return True if a class only passes a single text to the tokenizers library."""
    if not hasattr(kind, "backend_tokenizer"):
        return False
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    same = ("_encode_plus", "set_truncation_and_padding", "backend_tokenizer")
    is_usual = all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in same
    )
    return is_usual and kind.__call__ is PreTrainedTokenizerBase.__call__
