"""Several engines on virtual clocks behind one router, with the live fleet's routes and views.

Each engine has its own loop, scheduler and clock, on its own thread. One thread runs at a time.
Before the router places a request, every engine advances to the request's arrival time. So the
router knows all events until then, and no later ones. The same arguments give the same events.
"""

import copy
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from qllm.config import EngineConfig
from qllm.cores import no_collections
from qllm.engine.sizes import with_usual_sizes
from qllm.errors import MOVED, ConfigError, without_ticket
from qllm.fleet.rebalance import REBALANCE_S
from qllm.fleet.router import Entry, Router
from qllm.fleet.routes import RequestView, Route, RouteCosts, load_route
from qllm.ingress import Submission
from qllm.plugins import load_policy
from qllm.record.metrics import RequestMetrics
from qllm.record.trace import Arrived, Event, Finished, Trace
from qllm.sim.costs import CostFile
from qllm.sim.ingress import VirtualIngress
from qllm.sim.moving import MOVE_TOKEN_S, Arriving, Moves
from qllm.sim.run import Simulated, SimulatedEngine
from qllm.sim.runner import VirtualClock
from qllm.sim.timeline import Gathers
from qllm.types import NS_PER_S, FinishReason, RequestId, Sampled
from qllm.workloads.spec import RequestSpec

PROBE_TOKENS = 1024


class _Ingress(VirtualIngress):
    """An ingress that waits while the next request is routed.

    Args:
        clock: Clock of the engine.
        wait_for_others: Callback that returns once the next request has been routed.
    """

    def __init__(self, wait_for_others: Callable[[], None], clock: VirtualClock) -> None:
        super().__init__(clock)
        self._wait_for_others = wait_for_others
        self.until_ns: int | None = None
        """Time at which the next request of the fleet arrives."""

    def next_ns(self) -> int | None:
        times = [at_ns for at_ns in (super().next_ns(), self.until_ns) if at_ns is not None]
        return min(times, default=None)

    def arrive(self) -> None:
        """Take the items that are due, and the requests that the router has placed by now."""
        self.reach()
        super().arrive()

    def reach(self) -> None:
        """Wait until the router has placed all requests that arrived by now."""
        while self.until_ns is not None and self.until_ns <= self.clock.at_ns:
            self._wait_for_others()


class _Engine(SimulatedEngine):
    """One engine of a fleet, on a thread that runs during `advance`."""

    def __init__(
        self, name: str, router: Router, policy: Any, costs: CostFile, config: EngineConfig
    ) -> None:
        super().__init__(policy, costs, config, ingress=partial(_Ingress, self._yield))
        self.name = name
        self._router = router
        self.last_ns: dict[RequestId, int] = {}
        self.moves: dict[RequestId, int] = {}
        self.loop.newcomers = self._arriving = Arriving(self)
        self._num_tokens: dict[RequestId, int] = {}
        self._priorities: dict[RequestId, int] = {}
        self._runs, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"qllm-sim-{name}", daemon=True)
        self._thread.start()

    ingress: _Ingress

    def advance(self, until_ns: int | None) -> None:
        """Run up to a time, or until no work is left; None runs to the end."""
        self.ingress.until_ns = until_ns
        self._runs.release()
        self._rests.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Finish the current iteration, and end the thread."""
        self._is_over = True
        self.ingress.until_ns = None
        self._runs.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _yield(self) -> None:
        self._rests.release()
        self._runs.acquire()

    def _run(self) -> None:
        self._runs.acquire()
        try:
            while not self._is_over:
                if self.has_work:
                    self.step()
                else:
                    self._yield()
        except BaseException as error:  # noqa: BLE001 - raised where it was advanced
            self._error = error
        self._rests.release()

    def give(self, spec: RequestSpec, at_ns: int, request_id: RequestId) -> None:
        """Let a request arrive at this engine."""
        self._know(request_id, spec.priority, at_ns, 0, 0)
        self.submit(spec, at_ns, request_id)

    def take(self, item: Submission, at_ns: int, committed: int, num_moves: int) -> None:
        """Let a request of another engine arrive with its KV."""
        number = item.request_id
        self._know(number, item.priority, at_ns, item.num_output_tokens, num_moves)
        self._arriving.committed[number] = committed
        self.ingress.put_at(at_ns, item)

    def _know(
        self, number: RequestId, priority: int, at_ns: int, num_tokens: int, num_moves: int
    ) -> None:
        self._num_tokens[number], self._priorities[number] = num_tokens, priority
        self.last_ns[number], self.moves[number] = at_ns, num_moves

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        self.ingress.reach()
        number = sampled.request_id
        self._num_tokens[number] += 1
        self.last_ns[number] = at_ns
        self._router.heard(number, self._num_tokens[number], self._priorities[number])
        return super().on_token(sampled, at_ns)

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        self.ingress.reach()
        self._router.left(request_id)
        del self._num_tokens[request_id], self._priorities[request_id]
        del self.last_ns[request_id], self.moves[request_id]
        super().on_finish(request_id, reason, error, metrics)


def costs_of(costs: CostFile, config: EngineConfig) -> RouteCosts:
    """Return the machine's costs that a router uses."""
    capacity = costs.capacity(config)
    return RouteCosts(
        token_s=1 / capacity.prefill_tokens_per_s,
        step_s=costs.step_ns(1, 0, PROBE_TOKENS) / NS_PER_S,
        output_s=1 / capacity.output_tokens_per_s,
    )


def simulate_fleet(
    requests: Iterable[RequestSpec],
    policy: str | Any,
    costs: CostFile,
    *,
    engines: int,
    route: str | Route = "class",
    policy_settings: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    seconds: float | None = None,
    rebalance_s: float = REBALANCE_S,
    move_token_s: float = MOVE_TOKEN_S,
    record: Callable[[Entry], object] | None = None,
) -> Simulated:
    """Serve requests with several equal engines on virtual clocks.

    Simulated prompts have no tokens, so no prefix is cached. The route `prefix` chooses as `class`
    does. With `handover_gib`, stalled BE requests migrate by the rule of a live fleet.

    Args:
        requests: Requests with their arrival times.
        policy: Policy of every engine: a name, or an object that is copied.
        costs: Costs of the model on the machine of each engine.
        engines: Number of engines.
        route: A name, `module:function`, or a function.
        policy_settings: Parameters of a policy given by name.
        config: Settings of every engine; None takes the defaults, with the machine's KV.
        seconds: Length of the window, as for `simulate`.
        rebalance_s: Seconds that a BE request stalls before it migrates; 0 turns migration off.
        move_token_s: Seconds to move the KV of one token.
        record: Callback with every entry of the router.

    Raises:
        ConfigError: The policy, a setting or the route is unknown, or `engines` is no count.
        PolicyError: A policy raised, broke an invariant, or stalls.
    """
    if engines < 1:
        raise ConfigError(f"engines={engines!r} must be >= 1")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds={seconds!r} must be > 0")
    requests = sorted(requests, key=lambda r: r.at_s)
    if any(spec.follows is not None for spec in requests):
        raise ConfigError(
            "the turns of sessions wait for answers, and a router has to know all arrivals before; "
            "simulate sessions with one engine"
        )
    config = with_usual_sizes(config or EngineConfig(max_kv_tokens=costs.max_kv_tokens))
    made = load_policy(policy, policy_settings)
    router = Router(load_route(route) if isinstance(route, str) else route, record)
    worlds = [
        _Engine(f"engine-{i}", router, copy.deepcopy(made), costs, config) for i in range(engines)
    ]
    known = costs_of(costs, config)
    hands_over = config.handover_gib > 0 and rebalance_s > 0
    for world in worlds:
        router.up(world.name, costs=known, seats=config.max_num_seqs, hands_over=hands_over)
    moves = Moves(worlds, router, rebalance_s, move_token_s) if hands_over else None
    begun, refused = time.process_time(), 0
    end_ns = None if seconds is None else round(seconds * NS_PER_S)
    with no_collections():
        for number, spec in enumerate(requests):
            at_ns = round(spec.at_s * NS_PER_S)
            if not worlds[0].fits(spec):
                refused += 1
            elif end_ns is None or at_ns < end_ns:
                _come_to(at_ns, worlds, moves)
                _route(number, spec, at_ns, worlds, router)
        _come_to_end(end_ns, worlds, moves)
        for world in worlds:
            world.end()
            world.close()
    events = heapq.merge(*(_of_fleet(world, i, engines) for i, world in enumerate(worlds)), key=_at)
    trace = Trace(list(_as_one(events)), meta=_meta(costs, made, router))
    trace.meta["moved"] = 0 if moves is None else moves.num_moved
    last_ns = max(world.clock.at_ns for world in worlds)
    return Simulated(
        trace=trace,
        start_ns=0,
        end_ns=last_ns if end_ns is None else end_ns,
        max_lag_ms=0.0,
        refused=refused,
        expert_loads=sum(world.runner.expert_loads for world in worlds),
        gathers=reduce(Gathers.plus, (world.runner.gathers for world in worlds)),
        decisions=sum(world.num_turns for world in worlds),
        cpu_s=time.process_time() - begun,
    )


def _come_to(at_ns: int, worlds: list[_Engine], moves: Moves | None) -> None:
    """Advance all engines to a time. Some of their requests may migrate meanwhile."""
    while moves is not None and moves.next_ns < at_ns:
        _advance(moves.next_ns, worlds, moves)
        moves.look(moves.next_ns)
    _advance(at_ns, worlds, moves)


def _come_to_end(end_ns: int | None, worlds: list[_Engine], moves: Moves | None) -> None:
    """Advance all engines to the end: a time, or the end of all their work."""
    if moves is not None:
        while any(w.has_work for w in worlds) and (end_ns is None or moves.next_ns < end_ns):
            _come_to(moves.next_ns + 1, worlds, moves)
    for world in worlds:
        world.advance(end_ns)


def _advance(at_ns: int, worlds: list[_Engine], moves: Moves | None) -> None:
    """Advance the engines. An engine that gives a request away is first, so no other is ahead."""
    giver = None if moves is None else moves.giver
    for world in sorted(worlds, key=lambda world: world is not giver):
        if world.clock.at_ns < at_ns:
            world.advance(at_ns)


def _route(
    number: RequestId, spec: RequestSpec, at_ns: int, worlds: list[_Engine], router: Router
) -> None:
    """Let a request arrive at the engine that the route chooses, once all reached its time."""
    request = RequestView(spec.priority, spec.longest_prompt, spec.max_tokens)
    found = router.choose(request, at_ns / NS_PER_S)
    assert found is not None
    router.sent(number, request, found)
    next(w for w in worlds if w.name == found.name).give(spec, at_ns, number)


def _meta(costs: CostFile, policy: Any, router: Router) -> dict[str, Any]:
    sent = {engine.name: engine.num_sent for engine in router.engines}
    return {"model": costs.title, "policy": repr(policy), "simulated": True, "sent": sent}


def _at(event: Event) -> int:
    return event.at_ns


def _as_one(events: Iterable[Event]) -> Iterable[Event]:
    """Yield the events, in which a migrated request arrives once and ends once."""
    arrived = set[RequestId]()
    for event in events:
        if isinstance(event, Arrived):
            if event.request_id in arrived:
                continue
            arrived.add(event.request_id)
        if not (isinstance(event, Finished) and event.error == without_ticket(MOVED)):
            yield event


def _of_fleet(world: _Engine, index: int, num: int) -> Iterable[Event]:
    """Yield the events of one engine, with frame numbers that no other engine has."""
    for event in world.record:
        changed: dict[str, Any] = {}
        for name in ("frame_id", "by_frame_id"):
            if hasattr(event, name):
                changed[name] = getattr(event, name) * num + index
        if hasattr(event, "from_frames"):
            changed["from_frames"] = tuple(f * num + index for f in event.from_frames)
        yield replace(event, **changed) if changed else event
