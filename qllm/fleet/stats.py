"""Merged statistics of several engines: sums, and counts that never decrease."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qllm.fleet.routes import EngineView

COUNTS = {
    "num_preemptions", "num_spared", "expert_bytes", "queried_tokens", "hit_tokens",
    "shared_tokens", "evicted_pages", "refused_pages", "out_tokens", "in_tokens", "stored_bytes",
    "loaded_bytes", "damaged_pages", "late_requests", "quicker_requests", "revisions",
    "lost_tokens", "restarts", "ls_s", "be_s", "floor_s", "loads", "bytes", "waits_ms",
    "unused_bytes",
}  # fmt: skip
"""Names of numbers that never decrease while an engine lives."""
MOST = {"longest_segment_ms", "max_segment_ms", "longest_plan_ms", "LS", "BE", "min_be_share"}
"""Names of numbers that are merged by their largest value. Rings have the names of their
classes."""
LATENCIES = "preempt_latencies_ms"
MAX_LATENCIES = 1000
Path = tuple[str, ...]


def described(
    name: str,
    view: EngineView | None,
    *,
    is_up: bool,
    why: str | None,
    num_met: int,
    num_taken: int,
    num_moved: int = 0,
) -> dict[str, Any]:
    """Return the record of one engine for `ManyClient.engines`.

    Args:
        name: Address or another unique name of the engine.
        view: The router's view of the engine; None if the engine is not up.
        is_up: True if the engine takes requests.
        why: Reason why the engine takes no requests.
        num_met: Number of times that the fleet connected to the engine.
        num_taken: Number of requests that the engine had open when it ended.
        num_moved: Number of BE requests that migrated away from the engine.
    """
    return {
        "engine": name,
        "up": is_up,
        "why": why or None,
        "met": num_met,
        "taken": num_taken,
        "moved": num_moved,
        "sent": 0 if view is None else view.num_sent,
        "pool": view and ("short" if view.is_short else "long"),
        "LS": 0 if view is None else view.ls.num,
        "BE": 0 if view is None else view.be.num,
    }


class FleetStats:
    """Statistics of a fleet. Counts of an engine stay in the sums after it has ended."""

    def __init__(self) -> None:
        self._last: dict[str, dict[Path, float]] = {}
        """Latest counts of the engines that are up."""
        self._gone: dict[Path, float] = {}
        """Summed counts of engines that have ended."""
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)

    def gone(self, name: str) -> None:
        """Record that an engine has ended. The next engine of this name counts from 0."""
        for path, count in self._last.pop(name, {}).items():
            self._gone[path] = self._gone.get(path, 0) + count

    def merged(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Merge statistics of engines by name.

        An engine that does not answer keeps its last counts.
        """
        for name, stats in told.items():
            new = stats["num_preemptions"] - self._last.get(name, {}).get(("num_preemptions",), 0)
            self._latencies.extend(stats[LATENCIES][-int(new) :] if new else ())
            self._last[name] = dict(_counts(stats))
        found = merged(list(told.values()))
        for name, counts in (("", self._gone), *self._last.items()):
            for path, count in counts.items():
                if name not in told:
                    _add(found, path, count)
        found.pop("pid", None)
        return {**found, LATENCIES: list(self._latencies)}


def _counts(stats: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, float]]:
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _counts(value, (*path, name))
        elif name in COUNTS:
            yield (*path, name), value


def _add(found: dict[str, Any], path: Path, count: float) -> None:
    for name in path[:-1]:
        found = found.setdefault(name, {})
    found[path[-1]] = found.get(path[-1], 0) + count


def merged(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of engines (`QLLMEngine.stats`), name by name.

    Numbers are added; for names in MOST, the result is the largest number. Lists are joined. For
    texts, and for values of different types, the result is the first value. None is the result only
    if all values are None. The `pid` of several engines is "several".
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for stats in each for name in stats):
        values = [stats[name] for stats in each if stats.get(name) is not None]
        found[name] = "several" if name == "pid" and len(each) > 1 else _one(name, values)
    return found


def _one(name: str, values: list[Any]) -> Any:
    if values and all(isinstance(value, Mapping) for value in values):
        return merged(values)
    if values and all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if values and all(_is_number(value) for value in values):
        return max(values) if name in MOST else sum(values)
    return values[0] if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
