"""Unserved fields of a request: some are ignored and reported, others are refused.

Clients add fields every month. A field that cannot change the answer is accepted. A field that
could is left out: the answer names it in a header, and the log once. A field that holds the answer,
or a misspelling of one, is refused by name. `foreign` has the names.
"""

import logging
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from qllm.server.http.access import CURRENT, plain
from qllm.server.http.errors import ApiError
from qllm.server.http.foreign import CHANGES, HOLDS, NONE, Effect, effect_of, is_neutral

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


class Unserved(NamedTuple):
    """A part of a request that is not served."""

    name: str
    """Path without indices, for the header and the log."""
    place: str
    """Path in the body."""
    why: str
    """Message of a refusal."""
    effect: Effect
    """The effect that the part could have on the answer."""


@lru_cache(maxsize=4096)
def _judged(model: type[BaseModel], name: str) -> tuple[Effect, str]:
    """Return the effect that an unknown field could have, and the advice about it."""
    known = [field.alias or own for own, field in model.model_fields.items()]
    holds = getattr(model, "may_hold", True)
    if name in HOLDS and holds:
        return Effect.HOLDS, _instead(name, known)
    if name in CHANGES or name in NONE or len(name) > LONGEST_NAME:
        return effect_of(name), ""
    spelt = {_bare(field): field for field in (*HOLDS, *known)}
    if close := get_close_matches(_bare(name), spelt, n=3, cutoff=ALIKE):
        meant = spelt[close[0]]
        if close[0] != _bare(name):  # as near to `stop` as to `top_p`: it may hold the answer
            meant = next((spelt[x] for x in close if spelt[x] in HOLDS), meant)
        effect = Effect.HOLDS if meant in HOLDS and holds else Effect.CHANGES
        if meant in known:
            return effect, f"is no field here; did you mean {meant!r}?"
        return effect, _instead(meant, known)
    return Effect.CHANGES, ""


def _instead(name: str, known: list[str]) -> str:
    """Return why a field that holds the answer is refused, with what to do."""
    ours = next((x for x in HOLDS[name] if x in known), None)
    hint = "leave it out" if ours is None else f"use {ours}"
    return f"holds the question or the answer and is not served here; {hint}"


def _bare(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def found(body: BaseModel) -> list[Unserved]:
    """Return the unserved parts of a request, each name once: refused if it is so at any place.

    Raises:
        ValueError: There are more than `MOST`.
    """
    seen: dict[str, Unserved] = {}
    for one in _walk(body, "", ""):
        if one.name not in seen or one.effect is Effect.HOLDS is not seen[one.name].effect:
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
        if not is_neutral(own, x):
            effect, advice = _judged(kind, own)
            where = _join(place, own)
            why = f"unknown field {where!r}" + (f": it {advice}" if advice else "")
            yield Unserved(_join(name, own), where, why, effect)
    for own, why in getattr(value, "unserved", tuple)():
        yield Unserved(_join(name, own), place or own, why, Effect.CHANGES)
    for own, field in kind.model_fields.items():
        x = getattr(value, own)
        if isinstance(x, BaseModel | list):
            alias = field.alias or own
            yield from _walk(x, _join(name, alias), _join(place, alias))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Told:
    """The rule that accepts, ignores or refuses unserved parts, and reports the ignored ones.

    Args:
        log: Logger for the ignored names, each once per client.
        is_strict: True to refuse every unserved part.
    """

    def __init__(self, log: logging.Logger, *, is_strict: bool) -> None:
        self._log, self._is_strict = log, is_strict
        self._known: set[tuple[str, str]] = set()
        """Clients, each with a name that was logged for it."""

    def headers(self, unserved: Iterable[Unserved]) -> dict[str, str]:
        """Return the header that names the ignored parts.

        Raises:
            ApiError: A part is refused.
        """
        names = []
        for one in unserved:
            if one.effect is Effect.HOLDS or self._is_strict:
                raise ApiError(400, one.why, param=one.place, code="unknown_field")
            if one.effect is Effect.CHANGES:
                names.append(plain(one.name))
        self._tell(names)
        return {HEADER: ", ".join(names)[:SHOWN_CHARS]} if names else {}

    def _tell(self, names: list[str]) -> None:
        """Log the names that are new for the client of this request."""
        exchange = CURRENT.get()
        client = "" if exchange is None else exchange.who
        new = [name for name in names if (client, name) not in self._known]
        if new and len(self._known) < MOST_LOGGED:
            self._known.update((client, name) for name in new)
            text = "ignored from now on in requests of %s: %.500s"
            self._log.warning(text, client or "a batch", ", ".join(new))
