"""Migration of BE requests between engines of a simulated fleet, by the live fleet's rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from qllm.errors import MOVED
from qllm.fleet.rebalance import LOOK_S, MoveCosts, Standing, choose_move
from qllm.fleet.router import Router
from qllm.fleet.routes import EngineView
from qllm.ingress import Call, Submission
from qllm.scheduler.request import Request
from qllm.sim.run import SimulatedEngine, blank
from qllm.types import NS_PER_S, FinishReason, Priority, RequestId

MOVE_TOKEN_S = 1.2e-4
"""Seconds to move the KV of one token to another engine. 0.5 s for 4,064 tokens were measured."""


class Arriving:
    """`EngineLoop.newcomers` of a simulated engine: the KV that arrives with requests.

    Args:
        engine: Engine that the requests enter.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self.committed: dict[RequestId, int] = {}
        """Number of tokens whose KV arrives."""

    def enter(self, item: Submission, request: Request) -> bool:
        """Enter a request (`qllm.engine.protocol.Newcomers`); without room, recompute its KV."""
        num = self.committed.pop(item.request_id, 0)
        loop, runner = self._engine.loop, self._engine.runner
        scheduler, now = loop.scheduler, loop.now_ns()
        if not num or scheduler.pool.blocks_for(num) > scheduler.pool.num_free:
            return False
        request.num_computed_tokens = num
        request.admitted_ns = request.last_progress_ns = now
        if item.num_output_tokens:
            request.first_token_ns = request.last_token_ns = now
        scheduler.adopt(request)
        state = runner.requests[item.request_id]
        state.num_computed, state.layer_work = num, num * runner.shape.num_layers
        return True


class Moving(Protocol):
    """Methods of a fleet's engine that a migration needs."""

    name: str
    last_ns: dict[RequestId, int]
    """Time at which each open request arrived, or received its last token."""
    moves: dict[RequestId, int]
    """Number of migrations of each open request."""
    loop: Any
    ingress: Any
    clock: Any

    def take(self, item: Submission, at_ns: int, committed: int, num_moves: int) -> None:
        """Let a request of another engine arrive with its KV."""
        ...


class Moves:
    """Decisions about migrations. They are `LOOK_S` apart, and one request migrates at a time.

    Args:
        engines: Engines of the fleet.
        router: Router of the fleet.
        after_s: Seconds, see `choose_move`.
        token_s: Seconds to move the KV of a token.
    """

    def __init__(
        self, engines: Sequence[Moving], router: Router, after_s: float, token_s: float
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._router, self._after_s, self._token_s = router, after_s, token_s
        self._costs = MoveCosts()
        self._costs.add(token_s, 1)
        self.next_ns = round(LOOK_S * NS_PER_S)
        self.giver: Moving | None = None
        """Engine that must release a request, and has not done so yet."""
        self._moving: tuple[Moving, RequestId] | None = None
        self.num_moved = 0

    def look(self, now_ns: int) -> None:
        """Start a migration if one is due. All engines must have reached this time."""
        self.next_ns = now_ns + round(LOOK_S * NS_PER_S)
        if self.giver is not None or self._is_moving():
            return
        requests = [
            standing
            for engine in self._engines.values()
            for request_id in engine.last_ns
            if (standing := self._seen(engine, request_id, now_ns)) is not None
        ]
        found = choose_move(requests, self._router.engines, self._after_s, self._costs)
        if found is not None:
            request, target = found
            self.giver = giver = self._engines[request.engine]
            number: Any = request.key
            giver.ingress.put(Call(lambda: self._leave(giver, target, number)))

    def _is_moving(self) -> bool:
        """Return True if the last migrated request has no token yet at its engine."""
        if self._moving is None:
            return False
        engine, request_id = self._moving
        live = engine.loop.live.get(request_id)
        arrives = request_id in engine.last_ns and live is None
        return arrives or (
            live is not None and live.request.num_output_tokens == live.submission.num_output_tokens
        )

    def _seen(self, engine: Moving, request_id: RequestId, now_ns: int) -> Standing | None:
        live = engine.loop.live.get(request_id)
        if live is None or live.request.is_open or live.request.priority <= Priority.LS:
            return None
        still_s = (now_ns - engine.last_ns[request_id]) / NS_PER_S
        request = live.request
        begun = request.num_output_tokens > 0
        moves = engine.moves[request_id]
        return Standing(request_id, engine.name, still_s, request.num_tokens, begun, moves)

    def _leave(self, giver: Moving, target: EngineView, request_id: RequestId) -> None:
        """Release the request between two programs, on its engine's thread. Its KV follows."""
        self.giver = None
        live = giver.loop.live.get(request_id)
        if live is None:
            return
        submission, request = live
        now_ns, num_moves = giver.clock.at_ns, giver.moves[request_id] + 1
        committed, done = request.num_computed_tokens, request.num_output_tokens
        item = replace(submission, token_ids=blank(request.num_tokens), num_output_tokens=done)
        giver.loop.finish(request_id, FinishReason.ERROR, MOVED)
        view = self._router.view(
            item.priority, item.token_ids, item.max_tokens - done, is_begun=done > 0
        )
        self._router.sent(request_id, view, target, done)
        taker = self._engines[target.name]
        at_ns = now_ns + round(committed * self._token_s * NS_PER_S)
        taker.take(item, at_ns, committed, num_moves)
        self._moving = taker, request_id
        self.num_moved += 1
