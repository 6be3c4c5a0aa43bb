"""The choice of the format of a model's answers: by its name, or by its chat template and tokens.

A package adds a format with an entry point of the group `qllm.tool_formats` that names a `Format`.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from qllm.errors import ConfigError
from qllm.frontend.detokenizer import added_tokens
from qllm.plugins import installed, loaded
from qllm.server.tools import harmony
from qllm.server.tools.format import Format
from qllm.server.tools.formats import FORMATS, HERMES

GROUP, KIND = "qllm.tool_formats", "tool format"
AUTO = "auto"
"""Name that leaves the choice to the chat template and the tokens."""


@lru_cache(maxsize=1)
def formats() -> Mapping[str, Format]:
    """Return all formats by name: ours, and those of installed packages.

    Raises:
        ConfigError: A package is broken, or its format has a name of ours.
    """
    found = dict(FORMATS)
    for name, point in installed(GROUP, KIND).items():
        if name in found or name == AUTO:
            raise ConfigError(
                f"{KIND} {name!r} of {point.value} has a name of ours; its package has to give it "
                "another one"
            )
        found[name] = loaded(point, KIND)
        if not isinstance(found[name], Format):
            raise ConfigError(
                f"{KIND} {name!r} is {type(found[name]).__name__} {point.value}, not a "
                "qllm.server.tools.format.Format; repair or uninstall its package"
            )
    return found


def check_name(name: str) -> None:
    """Return if a name is that of a format, or `auto`.

    Raises:
        ConfigError: It is neither.
    """
    if name != AUTO and name not in formats():
        raise ConfigError(
            f"tool_calls={name!r:.200} is unknown; use {AUTO}, or one of: "
            f"{', '.join(sorted(formats()))}"
        )


def check(tokenizer: Any, name: str) -> None:
    """Return if a model's answers can be read in a format.

    Raises:
        ConfigError: The name is unknown, or the tokenizer has not the tokens of the format.
    """
    check_name(name)
    found = format_of(tokenizer, name)
    if found is not None and found.has_heads and not harmony.marks_of(tokenizer):
        raise ConfigError(
            f"tool_calls={name!r}: answers of this format are read by its tokens "
            f"{' '.join(harmony.MARKS)}, and the tokenizer has not all of them; use {AUTO}"
        )


def format_of(tokenizer: Any, name: str = AUTO) -> Format | None:
    """Return the format of a model's answers; None if `auto` finds no sign of one.

    Of the formats whose signs are all there, the one with most of them in the chat template counts,
    because tokenizers also have the tokens of other formats.

    Args:
        tokenizer: The model's tokenizer, or None.
        name: Name of the format, or `auto`.
    """
    if name != AUTO:
        return formats()[name]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return _detected(template, frozenset(x.content for x in added_tokens(tokenizer).values()))


@lru_cache(maxsize=64)
def _detected(template: str, tokens: frozenset[str]) -> Format | None:
    best, most = None, (0, 0)
    for format in formats().values():
        seen = sum(sign in template for sign in format.signs)
        if all(sign in template or sign in tokens for sign in format.signs):
            best, most = max((best, most), (format, (seen, len(format.signs))), key=lambda x: x[1])
    return best


def told(tokenizer: Any, name: str) -> str:
    """Return the name of the format of a model's answers, and the reason for it."""
    if name != AUTO:
        return f"{name} (tool_calls)"
    found = format_of(tokenizer)
    if found is not None:
        return f"{found.name}, found by {' '.join(found.signs)}"
    if getattr(tokenizer, "response_template", None):
        return "the tokenizer's response_template, at the end of each answer"
    return f"{HERMES.name}, because no sign of another one was found"
