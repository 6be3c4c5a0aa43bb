"""Grammars of the values of arguments, for markups in which a string is raw text.

Such a markup writes a string unchanged, up to a marker, and other values as JSON. So this module
splits a JSON schema by the types of its values. Strings become a terminal of llguidance's Lark
syntax. The rest stays a JSON schema. A schema that cannot be split is refused, so no value is left
unconstrained.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qllm.server.tools.values import kinds_in

CANONICAL = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as chat templates write it."""
ANY_TEXT = "/(?s:.*)/"
_NUMBER_LIKE = r"[-+.0-9\[{\x22'](?s:.*)"
NO_TEXT = rf"/[\s\x00-\x20]*({_NUMBER_LIKE}|(?i:true|false|null|none)[\s\x00-\x20]*)/"
"""Texts that a reader may take for a value of another type."""
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
_ANNOTATIONS = frozenset(("$defs", "definitions", "x-guidance"))
_HEX, _BYTE = "[0-9a-f]", "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[-+]{_CLOCK})"
_HOST = r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?){0,7}"
_PATH = "[-A-Za-z0-9._~!$&*+,;=:@/]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T[0-9]{1,4}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,15}}://{_HOST}(:[0-9]{{1,4}})?(/{_PATH}{{0,999}})?"
    rf"(\?{_PATH}{{0,999}})?(#{_PATH}{{0,99}})?",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
}
"""Regular expressions by JSON schema `format`. Some valid texts of a format do not match."""


class UnheldError(ValueError):
    """Error: a markup cannot write the values of a schema.

    The message has the place and the reason.
    """


class Part(NamedTuple):
    """The values of one type that a schema allows."""

    kind: str
    schema: Mapping[str, Any]


def parts_of(schema: Any, root: Mapping[str, Any], depth: int = 16) -> list[Part]:
    """Return the types of values that a schema allows, with a schema for each type.

    Args:
        schema: The schema, without annotations.
        root: Schema that `$ref` points into.
        depth: Number of references and alternatives to follow.

    Raises:
        UnheldError: The types cannot be separated.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping) or not depth:
        raise UnheldError(f"{json.dumps(schema):.80} is no schema that can be split into kinds")
    kinds = kinds_in(schema, root)
    kinds -= {"integer"} if "number" in kinds else set()
    if len(kinds) == 1:
        return [Part(next(iter(kinds)), schema)]
    given = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key in ("anyOf", "oneOf"):
        some = given.get(key)
        if isinstance(some, list) and given.keys() <= {key, "type"}:
            found = [part for one in some for part in parts_of(one, root, depth - 1)]
            found = [part for part in found if part.kind in kinds]
            if key == "oneOf" and len({part.kind for part in found}) < len(found):
                raise UnheldError("oneOf has several parts of one kind")
            return found
    if isinstance(ref := given.get("$ref"), str) and given.keys() <= {"$ref", "type"}:
        found = parts_of(target(ref, root), root, depth - 1)
        return [part for part in found if part.kind in kinds]
    if given.keys() & {"anyOf", "oneOf", "allOf", "$ref", "not", "if"}:
        raise UnheldError("it allows strings and other kinds beside " + ", ".join(sorted(given)))
    values = given["enum"] if "enum" in given else [given["const"]] if "const" in given else None
    if values is None:
        return [Part(kind, {**schema, "type": kind}) for kind in KINDS if kind in kinds]
    rest = {key: value for key, value in given.items() if key not in ("enum", "const")}
    of_kind = {kind: [x for x in values if _is_of(x, kind)] for kind in KINDS if kind in kinds}
    return [Part(k, {**rest, "type": k, "enum": some}) for k, some in of_kind.items() if some]


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict}
    return value is None if kind == "null" else isinstance(value, kinds[kind])


def target(ref: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference points to.

    Raises:
        UnheldError: The reference points to nothing.
    """
    found: Any = root
    for name in ref.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    if not ref.startswith("#") or found is None:
        raise UnheldError(f"$ref {ref!r:.80} points to nothing")
    return found


def text_terminal(schema: Any, root: Mapping[str, Any], depth: int = 16) -> str:
    """Return the terminal of the strings that a schema allows, as raw text.

    Raises:
        UnheldError: A terminal cannot express a keyword of the schema.
    """
    if schema is True:
        return ANY_TEXT
    if not isinstance(schema, Mapping) or not depth:
        raise UnheldError(f"{json.dumps(schema):.80} is no schema that raw text can follow")
    if wrong := sorted(schema.keys() & {"not", "if", "then", "else"}):
        raise UnheldError(f"raw text cannot follow {wrong[0]!r}")
    both = list(_texts(schema, root, depth))
    return " & ".join(both) if both else ANY_TEXT


def _texts(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the terminals that a text must match, one for each keyword."""
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        yield _any(quoted(x) for x in values if isinstance(x, str))
    if isinstance(ref := schema.get("$ref"), str):
        yield f"({text_terminal(target(ref, root), root, depth - 1)})"
    for key in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(key), list):
            of_text = [x for x in some if "string" in kinds_in(x, root)]
            if key == "oneOf" and len(of_text) > 1:
                raise UnheldError("oneOf has several parts of strings")
            yield _any(f"({text_terminal(x, root, depth - 1)})" for x in of_text)
    for one in schema.get("allOf") or ():
        yield f"({text_terminal(one, root, depth - 1)})"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.{{{int(least)},{most and int(most)}}})/"
    if isinstance(pattern := schema.get("pattern"), str):
        yield _pattern(pattern)
    if (known := FORMATS.get(str(schema.get("format")))) is not None:
        yield slashed(known)


def _any(terminals: Iterator[str]) -> str:
    found = list(terminals)
    if not found:
        raise UnheldError("no string is allowed")
    return f"({' | '.join(found)})"


def _pattern(pattern: str) -> str:
    """Return the terminal of all texts that contain a match of a pattern."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_alternatives(inner):
        raise UnheldError(f"pattern {pattern!r:.80} needs brackets around its alternatives")
    return slashed(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}")


def _has_alternatives(pattern: str) -> bool:
    """Return True if a pattern has a "|" outside of brackets."""
    depth = 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False


def slashed(pattern: str) -> str:
    """Return a regular expression as a terminal."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL) + "/"


def quoted(text: str) -> str:
    """Return the terminal of exactly one text."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any, root: Mapping[str, Any]) -> str:
    """Return the body of a rule for the JSON of a schema. The schema may be a part of `root`."""
    made = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    for name in ("$defs", "definitions"):
        if name in root:
            made.setdefault(name, root[name])
    return f"%json {json.dumps({'x-guidance': CANONICAL, **made})}"


def joined(schemas: Sequence[Any]) -> Any:
    """Return the schema of all values that at least one of the schemas allows."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
