"""The texts of a profile: files of several kinds, and their tokens."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import ConfigError, ModelError
from qllm.models.loader import LoadedModel

LEAST_TOKENS = 32
"""Fewest tokens of a text."""
MOST_BYTES = 16 << 20
"""Most bytes of a text file."""
ALL = "all"
"""Name of all texts together."""


def read_texts(given: Iterable[str]) -> dict[str, str]:
    """Read text files, each given as `NAME=FILE`, or as `FILE` with the file's stem as the name.

    Raises:
        ConfigError: No file, the same name twice, or a file that is missing, empty, no text or too
            large.
    """
    texts: dict[str, str] = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = Path(argument).stem, argument
        if not (name and path):
            raise ConfigError(f"text {argument!r} must be FILE or NAME=FILE")
        if name == ALL or name in texts:
            why = "means all texts together" if name == ALL else "is given twice"
            raise ConfigError(f"text {argument!r}: the name {name!r} {why}; give another NAME=FILE")
        texts[name] = _read(path)
    if not texts:
        raise ConfigError("a profile needs a text; give --text FILE or --text NAME=FILE")
    return texts


def _read(path: str) -> str:
    """Return the text of a file."""
    try:
        num_bytes = Path(path).stat().st_size
        if num_bytes > MOST_BYTES:
            raise ConfigError(
                f"text {path!r} has {num_bytes:,} bytes, at most {MOST_BYTES:,} are read; give a "
                "part of it"
            )
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"text {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"text {path!r} is no UTF-8 at byte {error.start}; give a text file"
        ) from error
    if not text.strip():
        raise ConfigError(f"text {path!r} is empty; a profile needs {LEAST_TOKENS} tokens or more")
    return text


class KindTokens(NamedTuple):
    """The tokens of one kind of text."""

    ids: list[int]
    """Tokens that are measured."""
    num_tokens: int
    """Number of tokens of the whole text."""


def tokens_of(
    loaded: LoadedModel, texts: Mapping[str, str], most: int
) -> tuple[list[int], dict[str, KindTokens]]:
    """Return the tokens that the model expects before a text, and the tokens of each text.

    Args:
        loaded: The model.
        texts: Texts by name.
        most: Most tokens of a text. Later ones are left out.

    Raises:
        ConfigError: A text has too few tokens.
        ModelError: The model has no tokenizer.
    """
    tokenizer: Any = loaded.tokenizer
    if tokenizer is None:
        raise ModelError(
            f"model {loaded.name!r} has no tokenizer, and a profile reads text; add the "
            "tokenizer's files to its folder"
        )
    found: dict[str, KindTokens] = {}
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        require_tokens(name, ids)
        found[name] = KindTokens(ids[:most], len(ids))
    plain, whole = (
        tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"]
        for special in (False, True)
    )
    begins = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return whole[:begins], found


def require_tokens(name: str, ids: Sequence[int]) -> None:
    """Raise ConfigError if a text has too few tokens."""
    if len(ids) < LEAST_TOKENS:
        num = "1 token" if len(ids) == 1 else f"{len(ids)} tokens"
        raise ConfigError(
            f"text {name!r} has {num}; a profile needs {LEAST_TOKENS} or more: give a longer text"
        )
