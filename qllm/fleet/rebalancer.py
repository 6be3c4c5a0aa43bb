"""Migration of a fleet's stalled BE requests to engines with room (`choose_move`)."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from qllm.errors import QllmError
from qllm.fleet.members import Member
from qllm.fleet.rebalance import LOST_S, MoveCosts, Standing, choose_move
from qllm.fleet.requests import SharedRouter
from qllm.frontend.handle import Handle
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest

_log = logging.getLogger("qllm.fleet")


@dataclass(slots=True)
class _Move:
    """One migration that has begun."""

    handle: Handle
    target: str
    began_s: float
    num_tokens: int
    has_left: bool = False


class Rebalancer:
    """The part of a fleet that decides migrations, one at a time. Callable from any thread.

    Args:
        members: The fleet's engines.
        routing: Router of the fleet.
        after_s: Seconds as for `choose_move`.
    """

    def __init__(
        self, members: Mapping[str, Member], routing: SharedRouter, after_s: float
    ) -> None:
        self._members, self._routing, self._after_s = members, routing, after_s
        self.costs = MoveCosts()
        self.num_moved = Counter[str]()
        """Number of requests that each engine was ordered to give away."""
        self._lock = threading.Lock()
        self._move: _Move | None = None
        self._times: WeakKeyDictionary[Handle, int] = WeakKeyDictionary()
        """Number of migrations of each open request."""

    def look(self) -> None:
        """Begin a migration if one is due. The call waits for an engine's answer."""
        now_s = time.monotonic()
        with self._lock:
            move = self._move
            if move is not None:
                took_s = now_s - move.began_s
                if not (move.handle.has_ended or took_s > LOST_S):
                    return
                if not move.handle.has_ended:
                    self.costs.add(took_s, move.num_tokens)
                self._move = None
        standing = dict[Hashable, tuple[RingClient, Handle]]()
        requests: list[Standing] = []
        for name, member in self._members.items():
            if (client := member.client) is None or not client.hands_over:
                continue
            for entry, still_s in client.standing():
                requests.append(self._seen(len(requests), name, entry, still_s))
                standing[len(standing)] = client, entry.handle
        with self._routing.lock:
            engines = self._routing.router.engines
            found = choose_move(requests, engines, self._after_s, self.costs)
        if found is not None:
            request, target = found
            self._begin(request, target.name, *standing[request.key])

    def _seen(self, key: int, engine: str, entry: SavedRequest, still_s: float) -> Standing:
        handle = entry.handle
        num_done = len(handle.token_ids)
        num_tokens = len(handle.prompt_token_ids) + num_done
        moves = self._times.get(handle, 0)
        return Standing(key, engine, still_s, num_tokens, num_done > 0, moves)

    def _begin(self, request: Standing, target: str, client: RingClient, handle: Handle) -> None:
        move = _Move(handle, target, time.monotonic(), request.num_tokens)
        with self._lock:
            self._move = move
        text = "a BE request of %d tokens that stood still for %.1f s goes from %s to %s"
        _log.info(text, request.num_tokens, request.still_s, request.engine, target)
        self._times[handle] = request.num_moves + 1
        try:
            leaves = client.give_away(handle.number)
        except QllmError as error:
            _log.info("it stays: %s", error)
            leaves = False
        if leaves:
            self.num_moved[request.engine] += 1
            return
        with self._lock:
            if self._move is move and not move.has_left:
                self._move = None

    def target_of(self, handle: Handle) -> str | None:
        """Return the engine that takes a migrating request; None if no migration was decided."""
        with self._lock:
            move = self._move
            if move is None or move.handle is not handle or move.has_left:
                return None
            move.has_left = True
            return move.target

    def heard_of(self, handle: Handle) -> None:
        """Record that a request has a token, or has ended."""
        move = self._move
        if move is None or move.handle is not handle or not move.has_left:
            return
        with self._lock:
            if self._move is move:
                self._move = None
                if not handle.has_ended:
                    self.costs.add(time.monotonic() - move.began_s, move.num_tokens)
