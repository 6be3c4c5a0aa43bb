"""Check a grammar in a process that may use so much CPU time and memory, and no more.

Some small JSON schemas take llguidance minutes (many patterns under `allOf`: it doubles with each).
A thread that builds one cannot be ended; a process is. `python -m qllm.grammar_check` reads a
grammar and its schema, and writes what is wrong, as JSON.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

CPU_S = 2
"""Seconds of CPU time; a usual schema takes milliseconds, the start of the process 70 ms."""
MEMORY_BYTES = 2 << 30
"""Address space."""
TIMEOUT_S = 60
"""For a machine that has no CPU time to give."""
MOST_PLACES = 200
"""Parts of a refused schema that are tried to find the one to blame."""
MOST_CHARS = 1000
"""Longest message of llguidance that is passed on."""
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
"""What one grammar may cost to build, and each of its tokens: llguidance's own counters."""
JSON_OPTIONS: Any = {"whitespace_pattern": r"\n?[ ]{0,20}"}
"""What may stand between the parts of a JSON value: a model that likes white space comes to an
end. A schema changes it with `x-guidance`."""


@lru_cache(maxsize=256)
def wrong_with(grammar: str, schema: str | None) -> str | None:
    """Say what is wrong with a grammar, behind the name of its field; None if it is well.

    Args:
        grammar: As llguidance takes it.
        schema: The JSON schema that it was made of, if it was: the message has the place in it.

    Raises:
        RuntimeError: The process failed by itself.
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
    if done.returncode < 0:  # a signal: of the limit of time, or where memory ran out
        return too_much
    if done.returncode > 0:
        raise RuntimeError(f"the check of a grammar failed: {done.stderr[-MOST_CHARS:]}")
    found: str | None = json.loads(done.stdout)
    return found


def _error(text: str) -> str:
    """What llguidance refuses a grammar for; empty if it takes it."""
    is_error, texts = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return texts[0].removesuffix("<non-verbose/>").strip() if is_error else ""


def find(grammar: str, schema: str | None) -> str | None:
    """The same in this process, for as long as it takes."""
    error, path = _error(grammar), ""
    if not error:
        return None
    if schema is not None:
        root = json.loads(schema)
        path, error = _place(root, root, error, iter(range(MOST_PLACES)))
    return f"{' at ' + path if path else ''}: {error[:MOST_CHARS]}"


def _place(schema: Any, root: Any, error: str, left: Iterator[int]) -> tuple[str, str]:
    """The JSON pointer of the innermost part that is refused by itself, and why it is."""
    for path, part in _parts(schema):
        if next(left, None) is None:
            break
        if not isinstance(part, Mapping):  # true or false: never refused by itself
            continue
        alone = dict(part)
        if isinstance(root, Mapping):
            alone = {k: root[k] for k in ("$defs", "definitions") if k in root} | alone
        why = _error(LLMatcher.grammar_from_json_schema(json.dumps(alone), defaults=JSON_OPTIONS))
        if why:
            inner, why = _place(part, root, why, left)
            return path + inner, why
    return "", error


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its JSON pointer from there."""
    if not isinstance(schema, Mapping):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                escaped = str(name).replace("~", "~0").replace("/", "~1")
                yield f"/{key}/{escaped}", part
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(schema[key]))
    for key in _ONES:
        if key in schema:
            yield f"/{key}", schema[key]


def main() -> None:
    """Check what comes on standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.write(json.dumps(find(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
