"""Plug-ins installed on this machine, from their entry points: policies and other kinds."""

import pickle
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from qllm.errors import ConfigError, OutsideError, contained, told
from qllm.policy import make_policy
from qllm.spelling import read_all
from qllm.types import Cap

GROUP = "qllm.policies"


def installed(group: str, kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. Two packages with the same name are an error.

    Args:
        group: Group of the entry points.
        kind: Kind of the plug-ins, for messages.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise ConfigError(
                f"{kind} {point.name!r} is installed twice: {other.value} and {point.value}; "
                "uninstall one of the packages"
            )
        found[point.name] = point
    return found


def loaded(point: EntryPoint, kind: str) -> Any:
    """Import the object of an entry point.

    Raises:
        ConfigError: The import raised an error of any kind; the message names the module.
    """
    try:
        with contained():
            return point.load()
    except Exception as error:
        raise ConfigError(
            f"{kind} {point.name!r} cannot be loaded from {point.value}: "
            f"{told(error)}; repair or uninstall its package"
        ) from error


def installed_policies() -> dict[str, EntryPoint]:
    """Return entry points by policy name; two packages with one name are an error."""
    return installed(GROUP, "policy")


def load_factory(point: EntryPoint) -> Any:
    """Import the class of a policy from an entry point.

    Raises:
        ConfigError: The import raised an error of any kind; the message names the module.
    """
    return loaded(point, "policy")


def load_policy(policy: str | Any, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a policy object, made from a name with settings, or given as it is.

    Raises:
        ConfigError: The name is unknown (the message lists the known ones), a setting is unknown,
            or the package of the policy is broken.
    """
    if not isinstance(policy, str):
        if settings:
            raise ConfigError("policy_settings go with a policy given by name; set them on it")
        return policy
    factory = _factory(policy)
    try:
        with contained():
            return make_policy(policy, factory, settings or {})
    except OutsideError as error:
        raise ConfigError(f"policy {policy!r} cannot be made: {error}") from error


def _factory(policy: str) -> Any:
    points = installed_policies()
    if policy not in points:
        raise ConfigError(f"unknown policy {policy!r}; installed: {', '.join(sorted(points))}")
    return load_factory(points[policy])


def spelled_for(policy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a policy with values read from text, each by its field's type.

    Raises:
        ConfigError: A text is not a value of its setting, or the policy is unknown.
    """
    factory = _factory(policy)
    return read_all(settings, get_type_hints(factory) if is_dataclass(factory) else {})


def cap_names(caps: Cap) -> str:
    """Return capabilities as text, such as `layer_range, yield_layer`."""
    return ", ".join((cap.name or "").lower() for cap in caps)


def pickled_policy(policy: Any) -> bytes:
    """Pickle a policy object for the engine's process.

    Raises:
        ConfigError: The object cannot be pickled.
    """
    try:
        with contained():
            return pickle.dumps(policy)
    except Exception as error:
        raise ConfigError(
            f"policy {policy!r} cannot be pickled ({told(error)}), so it cannot reach the engine's "
            "process; pass run_in='thread', or give it a name (see docs/guides/policies.md)"
        ) from error


def unpickled_policy(data: bytes) -> Any:
    """Return the policy object from its pickle.

    Raises:
        ConfigError: The class of the policy cannot be imported in this process.
    """
    try:
        with contained():
            return pickle.loads(data)
    except Exception as error:
        raise ConfigError(
            f"the policy object cannot be made again in the engine's process ({told(error)}); put "
            "its class into a module that can be imported there, or pass run_in='thread'"
        ) from error
