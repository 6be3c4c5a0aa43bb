"""JSON schemas for grammars: without annotations, and with limits if a schema sets no limits.

Descriptions, titles and unknown formats constrain no answer. So they are removed, and do not count
towards limits of size. An integer without limits gets a maximum number of digits that every program
reads. A string with a format gets a maximum length. A schema's own limits stay. Further limits are
in `qllm.grammar_bounds`.
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
"""Formats that a grammar can enforce. Other formats are annotations."""
MOST_DIGITS = 15
"""Most digits of an integer without limits. Every reader of JSON reads such an integer exactly."""
CALLS = "// calls of tools\n"
"""First line of a grammar of tool calls. The limits of JSON apply to the arguments of such calls.
"""
RAW = "// raw text between "
"""Start of the second line, if strings are raw text.

A JSON object follows. For the marker before each raw text it has the marker after the text, and
true if a list or an object may be there instead.
"""
LARK = "x-lark"
"""Keyword for a string that must match a client's own grammar in Lark's syntax."""
MOST_OF_FORMAT = 2_048
"""Most characters of a string that has a format but no length. A URI, for example, has no limit."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ONES = ("items", "additionalProperties")
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

Schema = dict[str, Any]


def bounded(schema: Any) -> Any:
    """Return a schema without annotations, with limits for integers and formats."""
    return _each(schema, _bounded)


def closed(schema: Any) -> Any:
    """Return a schema whose objects allow only the named properties, as `strict` requires.

    Parts of `allOf` do not change, because each part would forbid the properties of the others.
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
    if "multipleOf" in kept:  # such a number has no exponent, and ends only at a multiple
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
    """Return a schema's numbers for some keywords, such as `minimum`."""
    return [x for name in names if isinstance(x := schema.get(name), int | float)]


def _closed(schema: Schema) -> Schema:
    if "properties" not in schema or "additionalProperties" in schema:
        return schema
    return {**schema, "additionalProperties": False}


def _each(schema: Any, change: Callable[[Schema], Schema], besides: tuple[str, ...] = ()) -> Any:
    """Apply `change` to a schema and to each schema inside, and return the result.

    Lists under the keys in `besides` stay unchanged.
    """
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
