"""The parts of an engine on a thread that tests look into: the one place that knows their names."""

from typing import Any


def loop_of(engine: Any) -> Any:
    """Return the `EngineLoop` of an engine that runs on a thread of this process."""
    return engine._client.loop


def runner_of(engine: Any) -> Any:
    """Return the runner of an engine that runs on a thread of this process."""
    return engine._client.runner
