"""Unserved fields of a request: some are ignored and reported, others are refused.

Clients add fields every month. A field that cannot change the text is ignored: the answer names it
in a header, and the log once. A field is refused by name if it asks for a different text, or if its
name is almost that of a served field.
"""

import logging
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from qllm.server.http.access import plain
from qllm.server.http.errors import ApiError

HEADER = "x-qllm-ignored"
MOST = 200
"""Most ignored names in one request."""
MOST_LOGGED = 10_000
"""Most names that are logged, so that clients cannot fill the memory with new names."""
SHOWN_CHARS = 2000
"""Most characters of the header."""
LONGEST_NAME = 64
"""Longest name, in characters, that is checked for a misspelling."""
ALIKE = 0.86
"""Least similarity (0 to 1) of two names that counts as a misspelling."""

_TEMPLATE, _FORM = "chat_template_kwargs", "structured_outputs"
CHANGES = {
    "adapter": "", "assistant_prefill": "", "beam_width": "", "custom_logit_processor": "",
    "do_sample": "temperature", "dry_multiplier": "", "dynatemp_range": "", "ebnf": _FORM,
    "enable_thinking": _TEMPLATE, "format": "response_format", "frequency_penality": "",
    "function_call": "tool_choice", "functions": "tools", "grammar": _FORM, "guidance_scale": "",
    "guided_grammar": _FORM, "guided_json": _FORM, "guided_regex": _FORM, "guided_choice": _FORM,
    "input": "", "instructions": "", "json_schema": "response_format", "logit_bias": "",
    "lora": "", "lora_path": "", "max_length": "max_tokens", "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
    "max_tokens": "max_output_tokens", "max_tokens_to_sample": "max_tokens", "messages": "",
    "min_new_tokens": "min_tokens", "mirostat": "", "mirostat_eta": "", "mirostat_tau": "",
    "n": "", "n_predict": "max_tokens", "negative_prompt": "", "no_repeat_ngram_size": "",
    "num_beams": "", "num_ctx": "", "num_predict": "max_tokens", "options": "", "plugins": "",
    "prefill": "", "prefix": "", "prompt": "", "random_seed": "seed", "reasoning": _TEMPLATE,
    "regex": _FORM, "repeat_last_n": "", "repeat_penalty": "repetition_penalty",
    "response_format": "", "response_mime_type": "", "response_schema": "", "safe_prompt": "",
    "samplers": "", "seed": "", "separate_reasoning": "", "stop_sequences": "stop",
    "stop": "stop_sequences", "system": "", "template": "", "text": "", "tfs_z": "",
    "thinking": _TEMPLATE, "top_a": "", "transforms": "", "typical_p": "", "xtc_probability": "",
}  # fmt: skip
"""Fields of other servers and routes that ask for a different text, with their replacements."""


class Unserved(NamedTuple):
    """A part of a request that is not served."""

    name: str
    """Path without indices, for the header and the log."""
    place: str
    """Path in the body."""
    why: str
    """Reason and advice, for a refusal."""
    is_refused: bool
    """True if the part is refused under every setting."""


def says_nothing(value: Any) -> bool:
    """Return True if a value asks for nothing: it is null or empty."""
    return value is None or (isinstance(value, str | list | dict) and not value)


@lru_cache(maxsize=4096)
def _reason(model: type[BaseModel], name: str) -> str:
    """Return why an unknown field is refused; empty if it may be ignored."""
    known = [field.alias or own for own, field in model.model_fields.items()]
    if name in CHANGES:
        instead = CHANGES[name]
        hint = f"use {instead}" if instead in known else "leave it out"
        return f"would change the answer and is not served here; {hint}"
    if len(name) > LONGEST_NAME:
        return ""
    spelt = {_bare(field): field for field in (*known, *getattr(model, "no_ops", ()))}
    if close := get_close_matches(_bare(name), spelt, n=1, cutoff=ALIKE):
        return f"is no field here; did you mean {spelt[close[0]]!r}?"
    return ""


def _bare(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def found(body: BaseModel) -> list[Unserved]:
    """Return the unserved parts of a request, each name once: refused if it is so at any place.

    Raises:
        ValueError: There are more than `MOST`.
    """
    seen: dict[str, Unserved] = {}
    for one in _walk(body, "", ""):
        if one.name not in seen or (one.is_refused and not seen[one.name].is_refused):
            seen[one.name] = one
        if len(seen) > MOST:
            raise ValueError(f"more than {MOST} fields are unknown; leave them out")
    return list(seen.values())


def _walk(value: Any, name: str, place: str) -> Iterator[Unserved]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield from _walk(item, name, f"{place}[{index}]")
        return
    if not isinstance(value, BaseModel):
        return
    kind: type[BaseModel] = type(value)
    extra = {} if getattr(kind, "shows_all", False) else value.model_extra or {}
    for own, x in extra.items():
        if not says_nothing(x):
            why, where = _reason(kind, own), _join(place, own)
            yield Unserved(_join(name, own), where, why, bool(why))
    for own, why in getattr(value, "unserved", tuple)():
        yield Unserved(_join(name, own), place or own, why, False)
    for own, field in kind.model_fields.items():
        x = getattr(value, own)
        if isinstance(x, BaseModel | list):
            alias = field.alias or own
            yield from _walk(x, _join(name, alias), _join(place, alias))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Told:
    """The rule that ignores or refuses unserved parts, and reports the ignored ones.

    Args:
        log: Logger for the ignored names, each once.
        is_strict: True to refuse every unserved part.
    """

    def __init__(self, log: logging.Logger, *, is_strict: bool) -> None:
        self._log, self._is_strict = log, is_strict
        self._known: set[str] = set()

    def headers(self, unserved: Iterable[Unserved]) -> dict[str, str]:
        """Return the header that names the ignored parts.

        Raises:
            ApiError: A part is refused.
        """
        names = []
        for one in unserved:
            if one.is_refused or self._is_strict:
                text = f"unknown field {one.place!r}"
                if one.why:
                    text = f"{text}: it {one.why}" if one.is_refused else one.why
                raise ApiError(400, text, param=one.place, code="unknown_field")
            names.append(plain(one.name))
        new = [name for name in names if name not in self._known]
        if new and len(self._known) < MOST_LOGGED:
            self._known.update(new)
            self._log.warning("ignored in requests from now on: %.500s", ", ".join(new))
        return {HEADER: ", ".join(names)[:SHOWN_CHARS]} if names else {}
