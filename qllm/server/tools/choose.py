"""The choice of a format for a model's answers: by name, or by the model's template and tokens.

A package adds a format with an entry point of the group `qllm.tool_formats`. The entry point names
a `Format`.
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
"""Name of no format: the chat template and the tokens decide."""


@lru_cache(maxsize=1)
def formats() -> Mapping[str, Format]:
    """Return all formats by name: qllm's own formats, and the formats of installed packages.

    Raises:
        ConfigError: A package is broken, or a package's format has the name of a format of qllm.
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
    """Refuse a name that is neither `auto` nor the name of a format.

    Raises:
        ConfigError: The name is unknown.
    """
    if name != AUTO and name not in formats():
        raise ConfigError(
            f"tool_calls={name!r:.200} is unknown; use {AUTO}, or one of: "
            f"{', '.join(sorted(formats()))}"
        )


def check(tokenizer: Any, name: str) -> None:
    """Refuse a format in which the model's answers cannot be read.

    Raises:
        ConfigError: The name is unknown, or the tokenizer lacks tokens of the format.
    """
    check_name(name)
    found = format_of(tokenizer, name)
    if found is not None and found.has_heads and not harmony.marks_of(tokenizer):
        raise ConfigError(
            f"tool_calls={name!r}: answers of this format are read by its tokens "
            f"{' '.join(harmony.MARKS)}, and the tokenizer has not all of them; use {AUTO}"
        )


def format_of(tokenizer: Any, name: str = AUTO) -> Format | None:
    """Return the format of a model's answers; None if `auto` finds the signs of no format.

    A format is possible if all its signs are in the chat template or the tokenizer. `auto` chooses
    the possible format with the most signs in the template, because tokenizers also have the tokens
    of other formats.

    Args:
        tokenizer: The model's tokenizer, or None.
        name: Name of the format, or `auto`.
    """
    if name != AUTO:
        return formats()[name]
    return _detected(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))


@lru_cache(maxsize=16)
def _detected(tokenizer: Any, template: str) -> Format | None:
    tokens = {token.content for token in added_tokens(tokenizer).values()}
    best, most = None, (0, 0)
    for format in formats().values():
        seen = sum(sign in template for sign in format.signs)
        if all(sign in template or sign in tokens for sign in format.signs):
            best, most = max((best, most), (format, (seen, len(format.signs))), key=lambda x: x[1])
    return best


def told(tokenizer: Any, name: str) -> str:
    """Return the name of the format of a model's answers, and the reason for the choice."""
    if name != AUTO:
        return f"{name} (tool_calls)"
    found = format_of(tokenizer)
    if found is not None:
        return f"{found.name}, found by {' '.join(found.signs)}"
    if getattr(tokenizer, "response_template", None):
        return "the tokenizer's response_template, at the end of each answer"
    return f"{HERMES.name}, because no sign of another one was found"
