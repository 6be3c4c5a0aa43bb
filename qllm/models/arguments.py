"""The name of transformers' cache argument, which differs between releases."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHES = ("cache", "past_key_values", "cache_params", "past_key_value")
"""Names that transformers gave to its cache argument, the newest first."""


def parameters_of(module: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's own forward."""
    return _parameters(type(module).forward)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(function)).parameters


def finds_cache(module: Any) -> str | None:
    """Return the name of a module's cache argument; None if there is none."""
    return cache_of_function(type(module).forward)


def cache_of_function(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's cache argument; None if there is none.

    First choice is a name that transformers has used, then an argument declared as a `Cache`, then
    the only argument with "cache" in its name.
    """
    parameters = _parameters(function)
    for name in CACHES:
        if name in parameters:
            return name
    declared = [n for n, p in parameters.items() if "Cache" in _declared(p)]
    called = [n for n in parameters if "cache" in n.split("_") and n != "use_cache"]
    return next(iter(declared or called), None)


def _declared(parameter: inspect.Parameter) -> str:
    kind: Any = parameter.annotation
    return kind.__name__ if isinstance(kind, type) else str(kind)


def cache_argument(module: object) -> str:
    """Return the name under which a module takes the cache.

    A module that names no cache argument passes on its keywords: it takes the newest name.
    """
    return finds_cache(module) or CACHES[0]
