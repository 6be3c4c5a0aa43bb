"""Policies with settings, as written on a command line."""

from itertools import product
from typing import Any, NamedTuple

from qllm.errors import ConfigError
from qllm.plugins import load_policy, spelled_for

KV_SIZES: dict[str, Any] = {
    "max_kv_tokens": 65536,
    "prefix_cache_tokens": 16384,
    "prefix_states_gib": 2.0,
}
"""Sizes of KV of measured engines, so that no result depends on a machine's memory."""


class Variant(NamedTuple):
    """A policy and its parameters."""

    label: str
    name: str
    settings: dict[str, Any]

    def make(self) -> Any:
        """Return the policy object.

        Raises:
            ConfigError: The name or a parameter is unknown; the message lists the known ones.
        """
        return load_policy(self.name, self.settings)


def parse_variants(text: str) -> list[Variant]:
    """Read a text like `qllm2,fcfs:chunk_tokens=128/256`. It gives three variants, one per value.

    Raises:
        ConfigError: No policy, the same one twice, or one that cannot be made.
    """
    found: list[Variant] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, *pairs = part.split(":")
        axes = [_axis(pair) for pair in pairs]
        for values in product(*(values for _, values in axes)):
            given = {key: value for (key, _), value in zip(axes, values, strict=True)}
            settings = spelled_for(name, given)
            shown = (f"{key}={value}" for key, value in given.items())
            found.append(Variant(":".join((name, *shown)), name, settings))
    labels = [variant.label for variant in found]
    if not found or len(set(labels)) < len(labels):
        raise ConfigError(f"policies {text!r} must be at least one, and none twice")
    for variant in found:
        variant.make()
    return found


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise ConfigError(f"policy setting {text!r} must be NAME=VALUE or NAME=VALUE/VALUE")
    return key, values.split("/")
