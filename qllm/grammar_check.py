"""Check of a grammar in a process with limits of CPU time and memory.

Some small JSON schemas take llguidance minutes. An example is many patterns under `allOf`: each
pattern doubles the time. A thread that builds such a grammar cannot be ended, but a process can.
`python -m qllm.grammar_check` reads a grammar and its schema, and writes the error as JSON.

llguidance accepts some grammars that match no text, and fails at the first token. So this module
tries each grammar with a vocabulary of single bytes, up to the first place with a choice.
"""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from qllm.grammar_schema import LISTS, MAPS, ONES

CPU_S = 2
"""Most seconds of CPU time. A usual schema takes milliseconds. The process starts in 70 ms."""
MEMORY_BYTES = 2 << 30
"""Most bytes of address space."""
TIMEOUT_S = 60
"""Longest wait in seconds, for a machine whose CPU is busy."""
MOST_PLACES = 200
"""Most parts of a refused schema that are tried to find the wrong part."""
MOST_CHARS = 1000
"""Most characters of a message of llguidance. The rest is cut off."""
NOTHING = "NoExtensionBias"
"""Error of llguidance for a grammar that allows no further token."""
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of the cost of a grammar and of each token, for llguidance's own counters."""
JSON_OPTIONS: Any = {"whitespace_pattern": r"\n?[ ]{0,20}"}
"""White space between the parts of a JSON value. Without a limit, a model could write white space
without end. A schema changes this option with `x-guidance`.
"""


@lru_cache(maxsize=256)
def wrong_with(grammar: str, schema: str | None) -> str | None:
    """Return a grammar's error, as text to put after the field's name; None for a correct grammar.

    Args:
        grammar: Grammar in llguidance's syntax.
        schema: JSON schema that the grammar was made from, if any. The error names a place in it.

    Raises:
        RuntimeError: The process failed for another reason.
    """
    data = json.dumps({"grammar": grammar, "schema": schema})
    command = [sys.executable, "-m", "qllm.grammar_check"]
    too_much = f": it takes more than {CPU_S} s of CPU time or {MEMORY_BYTES >> 30} GiB to build; "
    too_much += "make it smaller (fewer patterns under allOf)"
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return too_much
    if done.returncode < 0:  # a signal, because CPU time or memory ran out
        return too_much
    if done.returncode > 0:
        raise RuntimeError(f"the check of a grammar failed: {done.stderr[-MOST_CHARS:]}")
    found: str | None = json.loads(done.stdout)
    return found


def _error(text: str) -> str:
    """Return llguidance's error for a grammar; an empty text for an accepted grammar."""
    is_error, texts = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return texts[0].removesuffix("<non-verbose/>").strip() if is_error else ""


def find(grammar: str, schema: str | None) -> str | None:
    """Return the same error as `wrong_with`, but in this process and without limits."""
    if schema is not None:
        return _wrong_schema(json.loads(schema), _error(grammar) or _stuck(grammar))
    for rule, inner in schemas_in(grammar):
        if (wrong := _wrong_schema(inner, _error_of(inner))) is not None:
            return f" in {rule}{wrong}"
    error = _error(grammar) or _stuck(grammar)
    return f": {error[:MOST_CHARS]}" if error else None


def _wrong_schema(schema: Any, error: str) -> str | None:
    """Return the place and the reason of a schema's `error`, or of a reference that loops."""
    path = ""
    if (loop := _loop(schema) or (None if error else _endless(schema))) is not None:
        path, error = loop
    elif error:
        path, error = _place(schema, schema, error, iter(range(MOST_PLACES)))
    return f"{' at ' + path if path else ''}: {error[:MOST_CHARS]}" if error else None


def _error_of(schema: Any) -> str:
    """Return llguidance's error for one part of a schema; an empty text for an accepted part."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{json.dumps(schema):.80} must be a schema: an object, true or false"
    try:
        text = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS)
    except ValueError as error:  # a number is too large, or the schema is too deep
        return str(error)
    return _error(text)


def schemas_in(grammar: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON schemas inside a grammar in Lark's syntax, each after the name of its rule."""
    for found in re.finditer(r"%json\s+(?={)", grammar):
        names = re.findall(r"^(\w+)\s*:", grammar[: found.start()], re.MULTILINE)
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # llguidance will report the error
            continue
        yield names[-1] if names else "%json", schema


def _stuck(grammar: str) -> str:
    """Return the reason why a grammar allows no answer; an empty text if an answer can begin."""
    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():  # the grammar uses tokens of the model's vocabulary
        return ""
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    why = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return f"no answer can begin: {'nothing is of it' if why == NOTHING else why}"


def _loop(root: Any) -> tuple[str, str] | None:
    """Return a reference that only leads back to itself, as JSON pointer and error, or None."""
    for path, part in _walk(root):
        seen: list[str] = []
        while (ref := _ref(part)) is not None and ref not in seen:
            seen.append(ref)
            part = _target(root, ref)
        if ref is not None:
            return path, f"$ref {ref!r} leads back to itself"
    return None


def _endless(root: Any) -> tuple[str, str] | None:
    """Return a referenced part without a finite value, as JSON pointer and error, or None."""
    refs = {ref for _, part in _walk(root) if (ref := _ref(part)) is not None}
    ending: set[str] = set()
    while more := {x for x in refs - ending if _ends(_target(root, x), ending)}:
        ending |= more
    if not (endless := sorted(refs - ending)):
        return None
    return endless[0][1:], "every value of it holds another value of it, without end"


def _ends(schema: Any, ending: AbstractSet[str]) -> bool:
    """Return True if a schema has a finite value, judged by `required`, `minItems` and references.

    Args:
        schema: A schema, or a part of it.
        ending: References to parts with a finite value. Parts of other references count as endless.
    """
    if not isinstance(schema, Mapping):
        return True
    ref = _ref(schema)
    whole = [ref is None or ref in ending]
    whole += [_ends(part, ending) for part in _list(schema, "allOf")]
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            whole.append(any(_ends(part, ending) for part in parts))
    kinds = schema.get("type")
    if kinds == "object" or kinds == ["object"]:
        whole += [_ends(_property(schema, name), ending) for name in _list(schema, "required")]
    if kinds == "array" or kinds == ["array"]:
        first, least = _list(schema, "prefixItems"), schema.get("minItems", 0)
        num = int(least) if isinstance(least, int | float) else 0
        items = [*first[:num], *[schema.get("items")] * (num > len(first))]
        whole += [_ends(item, ending) for item in items]
    return all(whole)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _property(schema: Mapping[str, Any], name: Any) -> Any:
    """Return the schema of a property; None if there is no schema for it."""
    known = schema.get("properties")
    return known.get(name) if isinstance(known, Mapping) and isinstance(name, str) else None


def _walk(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas inside, each after its JSON pointer."""
    left = [(path, schema)]
    while left:
        path, schema = left.pop()
        yield path, schema
        left += ((path + more, part) for more, part in _parts(schema))


def _ref(schema: Any) -> str | None:
    """Return the reference of a schema to a place in the same document.

    Return None without a reference.
    """
    ref = schema.get("$ref") if isinstance(schema, Mapping) else None
    return ref if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else None


def _target(root: Any, ref: str) -> Any:
    """Return the value at a place in a schema; None if the place does not exist."""
    found = root
    for name in unquote(ref).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _place(schema: Any, root: Any, error: str, left: Iterator[int]) -> tuple[str, str]:
    """Return the JSON pointer and the error of the innermost part that is refused on its own."""
    for path, part in _parts(schema):
        if next(left, None) is None:
            break
        if why := _error_of(_alone(part, root)):
            inner, why = _place(part, root, why, left)
            return path + inner, why
    return "", error


def _alone(value: Any, root: Any) -> Any:
    """Return a part of a schema without valid references. Their targets are tried separately."""
    if isinstance(value, list):
        return [_alone(item, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    ref = _ref(value)
    leads = ref is not None and _target(root, ref) is not None
    return {k: _alone(x, root) for k, x in value.items() if not (leads and k == "$ref")}


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, each after its relative JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    for key in MAPS:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                escaped = str(name).replace("~", "~0").replace("/", "~1")
                yield f"/{key}/{escaped}", part
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(schema[key]))
    for key in ONES:
        if key in schema and not isinstance(schema[key], list):
            yield f"/{key}", schema[key]


def main() -> None:
    """Check the grammar on standard input, and write the error, or null, to standard output."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.write(json.dumps(find(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
