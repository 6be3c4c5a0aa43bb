"""The numbers of several engines as those of one."""

from collections.abc import Mapping, Sequence
from typing import Any

LARGEST = ("longest_", "max_")
"""How names begin of which the largest counts; all other numbers are added up."""


def merged(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up what engines say of themselves (`QLLMEngine.stats`), name by name.

    Lists are put one behind the other; of texts, and of what differs in kind, the first counts.
    The process of several engines is none.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for stats in each for name in stats):
        values = [stats[name] for stats in each if name in stats]
        found[name] = "several" if name == "pid" and len(each) > 1 else _merge(name, values)
    return found


def _merge(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if all(isinstance(value, Mapping) for value in values):
        return merged(values)
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return first
    return max(numbers) if name.startswith(LARGEST) else sum(numbers)
