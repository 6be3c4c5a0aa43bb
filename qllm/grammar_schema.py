"""What of a JSON schema holds an answer: without annotations, and with ends that it leaves open.

A description, a title or a format that nobody knows allows and forbids nothing, so it counts
nothing either. An integer that a schema leaves without an end may have as many digits as a program
reads, and a string of a format has a length; a schema with limits of its own keeps them. Other ends
are those of `qllm.grammar_bounds`.
"""

from collections.abc import Callable, Mapping
from typing import Any

ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly", "contentEncoding", "contentMediaType", "$schema", "example"}
)
FORMATS = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "unknown"}
    | {"uri", "uuid"}
)
"""Those that a grammar knows; others are annotations."""
MOST_DIGITS = 15
"""Digits of an integer without limits: what every reader of JSON holds exactly."""
CALLS = "// calls of tools\n"
"""Begins a grammar of calls: what their arguments leave open has the ends of any JSON."""
MOST_OF_FORMAT = 2_048
"""Characters of a string of a format that says no limit: a URI may not end where it likes."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ONES = ("items", "additionalProperties")
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

Schema = dict[str, Any]


def bounded(schema: Any) -> Any:
    """A schema without annotations, whose integers and formats have an end."""
    return _each(schema, _bounded)


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others.

    That is what `strict` means. Parts of `allOf` stay: each would forbid what the others name.
    """
    return _each(schema, _closed, besides=("allOf",))


def _bounded(schema: Schema) -> Schema:
    kept = {name: x for name, x in schema.items() if name not in ANNOTATIONS}
    if kept.get("format") not in FORMATS:
        kept.pop("format", None)
    elif not kept.keys() & {"minLength", "maxLength"}:
        kept["maxLength"] = MOST_OF_FORMAT
    kind = kept.get("type")
    is_integer = kind == "integer" or (isinstance(kind, list) and "integer" in kind)
    is_other = isinstance(kind, list) and "number" in kind
    if "multipleOf" in kept:  # it has no powers, and may end only where it is such a multiple
        is_integer, is_other = True, False
    if not is_integer or is_other or kept.keys() & {"enum", "const"}:
        return kept
    most = 10**MOST_DIGITS - 1
    least, top = _limits(kept, _LEAST), _limits(kept, _MOST)
    if not top:
        kept["maximum"] = most + int(max([0, *(x for x in least if abs(x) <= most)]))
    if not least:
        kept["minimum"] = int(min([0, *(x for x in top if abs(x) <= most)])) - most
    return kept


def _limits(schema: Schema, names: tuple[str, ...]) -> list[float]:
    """The limits that a schema sets at one end."""
    return [x for name in names if isinstance(x := schema.get(name), int | float)]


def _closed(schema: Schema) -> Schema:
    if "properties" not in schema or "additionalProperties" in schema:
        return schema
    return {**schema, "additionalProperties": False}


def _each(schema: Any, change: Callable[[Schema], Schema], besides: tuple[str, ...] = ()) -> Any:
    """A schema with each of the schemas inside it, and itself, changed."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in MAPS:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _each(part, change, besides) for name, part in made[key].items()}
    for key in LISTS:
        if key not in besides and isinstance(made.get(key), list):
            made[key] = [_each(part, change, besides) for part in made[key]]
    for key in ONES:
        if isinstance(made.get(key), Mapping):
            made[key] = _each(made[key], change, besides)
    return change(made)
