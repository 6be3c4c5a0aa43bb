"""Headers of a request, by their names."""

import re

from starlette.types import Scope

NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl")
"""Content types of a body that is lines of JSON."""


def header(scope: Scope, name: str) -> str | None:
    """Return a header's value by its name in lower case: the first of several, None without one."""
    found: dict[bytes, bytes] | None = scope.get("qllm.headers")
    if found is None:
        found = scope["qllm.headers"] = dict(reversed(scope["headers"]))
    value = found.get(name.encode("latin-1"))
    return None if value is None else value.decode("latin-1")


def kind_of_body(scope: Scope) -> str:
    """Return the content type of a request's body; empty if the header is missing."""
    return (header(scope, "content-type") or "").partition(";")[0]


def is_ndjson(scope: Scope) -> bool:
    """Return True if the body of a request is lines of JSON."""
    return kind_of_body(scope).strip().lower() in NDJSON


def name_of(value: str) -> str:
    """Return a client's name for its request, if a header and the log can hold it.

    Raises:
        ValueError: They cannot.
    """
    if not re.fullmatch("[!-~]+", value):
        raise ValueError(f"{value!r:.80} must be printable ASCII without spaces, not empty")
    return value
