"""Headers of a request, by their names."""

import re

from starlette.types import Scope

NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl")
"""Kinds of a body that is lines of JSON."""


def header(scope: Scope, name: str) -> str | None:
    """The value of a header by its name in lower case, of several the first; None without it."""
    found: dict[bytes, bytes] | None = scope.get("qllm.headers")
    if found is None:
        found = scope["qllm.headers"] = dict(reversed(scope["headers"]))
    value = found.get(name.encode("latin-1"))
    return None if value is None else value.decode("latin-1")


def kind_of_body(scope: Scope) -> str:
    """What a request calls its body; empty if it does not say."""
    return (header(scope, "content-type") or "").partition(";")[0]


def is_ndjson(scope: Scope) -> bool:
    """Whether the body of a request is lines of JSON."""
    return kind_of_body(scope).strip().lower() in NDJSON


def name_of(value: str) -> str:
    """Return what a client calls its request: a header and a line of the log must hold it.

    Raises:
        ValueError: They cannot.
    """
    if not re.fullmatch("[!-~]+", value):
        raise ValueError(f"{value!r:.80} must be printable ASCII without spaces, not empty")
    return value
