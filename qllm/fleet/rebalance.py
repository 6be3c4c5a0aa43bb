"""Choice of the stalled BE request that migrates to another engine.

LS work has priority. So a BE request may stall for long at an engine that LS keeps busy, while
another engine has room. If both engines can migrate KV (docs/design/handover.md), the request
migrates. The time for which a request will stall is unknown. A request that has stalled for as long
as a migration takes is expected to stall for the same time again. So a migration at that time saves
at least half of the time that the best choice would save.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from statistics import median
from typing import NamedTuple

from qllm.fleet.routes import Engines, EngineView

REBALANCE_S = 5.0
"""Default time in seconds for which a BE request stalls before it migrates."""
LOOK_S = 1.0
"""Seconds between two searches for a request to migrate."""
LOST_S = 60.0
"""Seconds after which a migration without a token no longer blocks the next migration."""


class Standing(NamedTuple):
    """A BE request at an engine. It is not paused, and its prompt is whole."""

    key: Hashable
    engine: str
    still_s: float
    """Seconds since the request's last token at the engine, or since its arrival."""
    num_tokens: int
    """Tokens of the prompt and of the answer so far."""
    is_begun: bool
    """True if the request has a first token."""
    num_moves: int
    """Number of migrations of the request by this rule."""


class MoveCosts:
    """Measured costs of migrations: seconds from the order to the next token, per token of KV."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=5)

    def add(self, seconds: float, num_tokens: int) -> None:
        """Add the measurement of a finished migration."""
        self._last.append(seconds / max(1, num_tokens))

    def of(self, request: Standing, target: EngineView) -> float:
        """Return the expected seconds of a migration.

        Without measurements, assume a recomputation.
        """
        each_s = median(self._last) if self._last else target.costs.token_s
        return request.num_tokens * each_s


def choose_move(
    requests: Iterable[Standing], engines: Engines, after_s: float, costs: MoveCosts
) -> tuple[Standing, EngineView] | None:
    """Choose a request to migrate and its engine, or return None.

    Args:
        requests: Candidates. Among the possible requests, the request that has stalled longest
            wins.
        engines: Engines that are up.
        after_s: Seconds of stalling before a migration. Each migration of a request doubles them.
        costs: Costs of migrations.
    """
    views = {engine.name: engine for engine in engines if engine.hands_over}
    late = [
        request
        for request in requests
        if request.still_s >= after_s * 2.0**request.num_moves and request.engine in views
    ]
    for request in sorted(late, key=lambda request: -request.still_s):
        own = views[request.engine]
        able = [engine for engine in views.values() if _has_room(engine, own, request.is_begun)]
        if not able:
            continue
        found = min(able, key=lambda engine: (engine.busy_s, engine.num_open))
        if costs.of(request, found) <= request.still_s:
            return request, found
    return None


def _has_room(engine: EngineView, own: EngineView, is_begun: bool) -> bool:
    """Return True if a request would run at once at the engine, with less LS than at its own.

    An engine with room has a free seat and no waiting request.
    """
    not_for_it = "prefill" if is_begun else "decode"
    waiting = engine.ls.num_waiting + engine.be.num_waiting
    return (
        engine is not own
        and engine.role != not_for_it
        and engine.ls.num < own.ls.num
        and engine.num_open < engine.seats
        and not waiting
    )
