"""Which BE request that stands still goes on at another engine: a pure rule, and what it needs.

Work of LS goes first, so a BE request may stand still for long at an engine that LS keeps busy,
while another one has room. Where both hand over KV (docs/handover.md), it moves. What is to come is
not known; a request that has stood still for as long as moving takes is expected to stand still for
as long again, so whoever moves it then loses at most half of what knowing would have saved.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from statistics import median
from typing import NamedTuple

from qllm.fleet.routes import Engines, EngineView

REBALANCE_S = 5.0
"""For which a BE request stands still before it moves, unless another time is given."""
LOOK_S = 1.0
"""Between two looks for a request to be moved."""
LOST_S = 60.0
"""A request that was moved and has no token after this is not waited for: the next may move."""


class Standing(NamedTuple):
    """A BE request that an engine has; not one that is paused, or whose prompt still comes."""

    key: Hashable
    engine: str
    still_s: float
    """Since its last token there, or since it came."""
    num_tokens: int
    """Its prompt and its answer so far."""
    is_begun: bool
    """It has a first token."""
    num_moves: int
    """Times that it was moved by this rule."""


class MoveCosts:
    """What moving has cost lately: seconds from the order to the next token, per token of KV."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=5)

    def add(self, seconds: float, num_tokens: int) -> None:
        """Take a move in that is over."""
        self._last.append(seconds / max(1, num_tokens))

    def of(self, request: Standing, target: EngineView) -> float:
        """Seconds that a move would take: before any was measured, those of computing it there."""
        each_s = median(self._last) if self._last else target.costs.token_s
        return request.num_tokens * each_s


def choose_move(
    requests: Iterable[Standing], engines: Engines, after_s: float, costs: MoveCosts
) -> tuple[Standing, EngineView] | None:
    """Tell which request goes on where, if any does.

    Args:
        requests: The first of those that have stood longest counts.
        engines: Those that are up.
        after_s: A request that stands still for less is left alone; each move doubles it.
        costs: What moves take.
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
    """Whether a request would go on at once at an engine, beside less LS than where it is.

    A seat is free there and nobody waits.
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
