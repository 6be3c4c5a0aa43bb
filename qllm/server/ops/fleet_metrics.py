"""Metrics of each engine in a fleet, labelled with its address."""

from typing import Any

from prometheus_client import Counter, Gauge

from qllm.frontend.client import ManyClient
from qllm.server.metrics import Metrics, new_since

CLASSES = ("LS", "BE")


class FleetMetrics:
    """The collectors of a fleet.

    Args:
        metrics: Metrics of the server. The collectors join theirs.
        model_name: Label of every metric.
        fleet: Fleet to observe.
    """

    def __init__(self, metrics: Metrics, model_name: str, fleet: ManyClient) -> None:
        self._model, self._fleet = model_name, fleet
        self._before: dict[Any, int] = {}
        self._names = set[str]()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            made: Gauge = metrics.made(Gauge, f"fleet_{name}", text, "engine", *labels)
            return made

        def counter(name: str, text: str, *labels: str) -> Counter:
            made: Counter = metrics.made(Counter, f"fleet_{name}", text, *labels)
            return made

        self._up = gauge("engine_up", "1 while the engine takes requests")
        self._open = gauge("requests_open", "Requests of this front end at the engine", "class")
        self._counts = {
            "sent": counter("requests_sent", "Requests that the engine got", "engine"),
            "taken": counter(
                "requests_taken", "Requests that were open when the engine ended", "engine"
            ),
            "moved": counter(
                "requests_moved", "Stalled BE requests that moved to another engine", "engine"
            ),
            "met": counter(
                "engine_meetings", "Times that the front end connected to the engine", "engine"
            ),
        }
        self._errors = counter(
            "route_errors", "Requests for which the route failed, and `least` chose"
        )

    def observe(self) -> None:
        """Update the metrics with the fleet's current numbers."""
        engines = self._fleet.engines()
        self._forget({engine["engine"] for engine in engines})
        for engine in engines:
            name = engine["engine"]
            self._up.labels(self._model, name).set(engine["up"])
            for label in CLASSES:
                self._open.labels(self._model, name, label).set(engine[label])
            for what, made in self._counts.items():
                made.labels(self._model, name).inc(self._new((name, what), engine[what]))
        new = self._new("errors", self._fleet.num_route_errors)
        self._errors.labels(self._model).inc(new)

    def _forget(self, there: set[str]) -> None:
        """Remove the series of engines that have left the fleet. Replicas do not come back."""
        gone, self._names = self._names - there, there
        for name in gone:
            self._up.remove(self._model, name)
            for label in CLASSES:
                self._open.remove(self._model, name, label)
            for what, made in self._counts.items():
                made.remove(self._model, name)
                del self._before[name, what]

    def _new(self, key: Any, now: int) -> int:
        before = self._before.get(key, 0)
        self._before[key] = now
        return new_since(before, now)
