"""Policies installed on this machine, by name: the entry-point group `qllm.policies`."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from qllm.errors import ConfigError
from qllm.policy import make_policy

GROUP = "qllm.policies"


def installed_policies() -> dict[str, EntryPoint]:
    """Entry points by policy name; two packages may not claim one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise ConfigError(
                f"policy {point.name!r} is installed twice: {other.value} and {point.value}; "
                "uninstall one of the packages"
            )
        found[point.name] = point
    return found


def load_policy(policy: str | Any, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a policy object, from a name with settings or as it is.

    Raises:
        ConfigError: The name is unknown (the message lists the known ones), or a setting is.
    """
    if not isinstance(policy, str):
        if settings:
            raise ConfigError("policy_settings go with a policy given by name; set them on it")
        return policy
    points = installed_policies()
    if policy not in points:
        raise ConfigError(f"unknown policy {policy!r}; installed: {', '.join(sorted(points))}")
    return make_policy(policy, points[policy].load(), settings or {})
