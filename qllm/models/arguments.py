"""Names of arguments that transformers renames: that of its cache."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHES = ("cache", "past_key_values", "cache_params", "past_key_value")
"""Names that transformers gave to the argument that is its cache, the newest first."""


def parameters_of(module: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's own forward."""
    return _parameters(type(module).forward)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(function)).parameters


def finds_cache(module: Any) -> str | None:
    """The name of the argument of a module that is the cache; None if there is none."""
    return cache_of_function(type(module).forward)


def cache_of_function(function: Callable[..., Any]) -> str | None:
    """The name of the argument that is the cache; None if there is none.

    A name that transformers has used; else the argument that is declared to be a `Cache`; else the
    only one that is called so.
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
    """The name of the argument that is the cache, where the module may take it by another's name.

    A module that names none hands on what it is given: it takes the newest name.
    """
    return finds_cache(module) or CACHES[0]
