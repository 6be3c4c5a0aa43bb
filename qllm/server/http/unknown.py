"""Fields of a request that are not served: which are ignored and told, and which are refused.

Clients add fields every month. A field that cannot change the text is ignored: the answer names it
in a header, and the log once. A field that asks for another text is refused by its name, and so is
one that is almost the name of a field that is served.
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
"""Most names of one request that may be ignored."""
MOST_LOGGED = 10_000
"""Names that the log was told: no client fills the memory with further ones."""
SHOWN_CHARS = 2000
"""Most characters of the header."""
LONGEST_NAME = 64
"""Characters of a name that may be a misspelt one."""
ALIKE = 0.86
"""How alike two names are of which one is the other, misspelt."""

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
"""Fields of other servers and routes that ask for another text, each with what to use instead."""


class Unserved(NamedTuple):
    """A part of a request that is not served."""

    name: str
    """What the header and the log call it: its path without numbers."""
    place: str
    """Where it stands."""
    why: str
    """What a refusal says of it."""
    is_refused: bool
    """Whether no setting takes it."""


def says_nothing(value: Any) -> bool:
    """Return whether a value asks for nothing: null, and what is empty."""
    return value is None or (isinstance(value, str | list | dict) and not value)


@lru_cache(maxsize=4096)
def _reason(model: type[BaseModel], name: str) -> str:
    """Say why a field that a model does not have is refused; empty if it may be ignored."""
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
    """Return what is not served of a request: each name once, refused if it is so at any place.

    Raises:
        ValueError: There is more of it than may be ignored.
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
    """Decides what is ignored, and tells of it.

    Args:
        log: Told of each name once.
        is_strict: Whether everything that is not served is refused.
    """

    def __init__(self, log: logging.Logger, *, is_strict: bool) -> None:
        self._log, self._is_strict = log, is_strict
        self._known: set[str] = set()

    def headers(self, unserved: Iterable[Unserved]) -> dict[str, str]:
        """The header that names what is ignored.

        Raises:
            ApiError: Something is refused.
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
