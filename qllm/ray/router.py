"""Choice of a replica for a request: the fleet's routes inside Ray Serve's router.

Ray Serve runs one router in every process that holds a handle of the deployment. The router records
the requests that this process has sent, as a fleet without Ray does (`qllm.fleet.router`). The
replicas report the requests of other processes, at most a second late. The router adds these
reports to the views.
"""

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from qllm.errors import ConfigError
from qllm.fleet.members import Card, card_of
from qllm.fleet.router import Router
from qllm.fleet.routes import Backlog, EngineView, load_route
from qllm.frontend.remote import RemoteHello
from qllm.ray.load import added, front_end_of
from qllm.ray.wire import Ask, Local, Seen

_log = logging.getLogger("qllm.ray.router")


class EngineRouter(RequestRouter):
    """Ray Serve's router with one of our routes."""

    def initialize_state(self, route: str = "class") -> None:
        """Set the route. Ray Serve calls this once, with the deployment's `request_router_kwargs`.

        Args:
            route: Name of the route, as for `load_route`.
        """
        self._router = Router(load_route(route))
        self._lock = threading.Lock()
        """Lock of the views, because another thread reports tokens."""
        self._told: dict[str, tuple[Any, tuple[Backlog, Backlog]]] = {}
        """Latest report of each replica, and the part of the report that the replica's view
        contains."""
        self._front_ends: set[str] = set()
        """Front ends of this process."""
        self._keys: dict[str, str] = {}
        """Ids of requests at replicas, by Ray's id."""
        self._watchers: weakref.WeakSet[Seen] = weakref.WeakSet()
        """Front ends of this process that receive the list of replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the views after replicas have come or gone."""
        super().update_replicas(replicas)
        self._tell(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a dead replica, before `update_replicas` does."""
        super().on_replica_actor_died(replica_id)
        self._tell(list(self.curr_replicas.values()))

    def _tell(self, replicas: Sequence[RunningReplica]) -> None:
        known = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        with self._lock:
            watchers = list(self._watchers)
        for seen in watchers:
            _refuse_others(seen, known)
            seen.look(known)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica chosen for one call, or no replica yet."""
        if pending_request is None:
            return [candidate_replicas]
        for arg in pending_request.args:
            if isinstance(arg, Seen):
                arg.router = self._router
                with self._lock:
                    self._watchers.add(arg)
                self._tell(candidate_replicas)
        if (at := pending_request.kwargs.get("at")) is not None:
            named = [r for r in candidate_replicas if r.replica_id.unique_id == at]
            return [
                named or candidate_replicas
            ]  # any other replica would report that it lacks the request
        ask = _ask_of(pending_request)
        if ask is None:
            return [candidate_replicas]
        return [[found]] if (found := self._choose(ask, candidate_replicas)) else []

    def _choose(self, ask: Ask, candidates: Sequence[RunningReplica]) -> RunningReplica | None:
        assert ask.local is not None
        item, local = ask.local.item, ask.local
        with self._lock:
            self._front_ends.add(front_end_of(ask.key))
            self._look(candidates)
            same = {
                replica.replica_id.unique_id: replica
                for replica in candidates
                if replica.replica_metadata.get("identity") == ask.identity
                and replica.replica_id.unique_id not in local.seen.refused
            }
            output = item.max_tokens - item.num_output_tokens
            local.view = self._router.view(item.priority, item.token_ids, output, item.cache_salt)
            others = [engine.name for engine in self._router.engines if engine.name not in same]
            found = self._router.choose(local.view, time.monotonic(), without=others)
        return None if found is None else same[found.name]

    def _look(self, candidates: Sequence[RunningReplica]) -> None:
        """Update the view of each replica, with the report of other front ends' requests."""
        views = {engine.name: engine for engine in self._router.engines}
        names = {replica.replica_id.unique_id for replica in candidates}
        for gone in views.keys() - names:
            self._router.down(gone)
            self._told.pop(gone, None)
        for replica in candidates:
            name, known = replica.replica_id.unique_id, replica.replica_metadata
            if name not in views:
                views[name] = self._router.up(
                    name, seats=known.get("seats", 1), kept_tokens=known.get("kept_tokens", 0)
                )
            said = replica.routing_stats.get("backlogs", {})
            before = self._told.get(name, ({}, (Backlog(), Backlog())))
            if said != before[0]:
                now = added(said, without=self._front_ends)
                _replace(views[name], before[1], now)
                self._told[name] = said, now

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request that was sent."""
        ask = _ask_of(pending_request)
        if ask is None or ask.local is None or (view := ask.local.view) is None:
            return
        key, local = ask.key, ask.local
        with self._lock:
            engines = {engine.name: engine for engine in self._router.engines}
            if (engine := engines.get(replica_id.unique_id)) is None:
                return
            self._router.sent(key, view, engine)
            self._keys[pending_request.metadata.internal_request_id] = key
        local.heard = lambda count, priority: self._heard(key, count, priority)

    def _heard(self, key: str, num_tokens: int, priority: int) -> None:
        with self._lock:
            self._router.heard(key, num_tokens, priority)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a request that has ended from the counts."""
        if (key := self._keys.pop(internal_request_id, None)) is not None:
            with self._lock:
                self._router.left(key)


def _replace(
    view: EngineView, before: tuple[Backlog, Backlog], now: tuple[Backlog, Backlog]
) -> None:
    """Replace the count of other front ends' requests at a replica by its latest report."""
    for backlog, old, new in zip((view.ls, view.be), before, now, strict=True):
        backlog.num += new.num - old.num
        backlog.num_waiting += new.num_waiting - old.num_waiting
        backlog.prompt_tokens += new.prompt_tokens - old.prompt_tokens
        backlog.output_tokens += new.output_tokens - old.output_tokens
    view.refresh()


def _refuse_others(seen: Seen, known: dict[str, Any]) -> None:
    """Record why the router skips replicas that differ from the front end's engine."""
    if (ours := seen.card) is None:
        return
    for name, metadata in known.items():
        if metadata.get("identity") != seen.identity and name not in seen.refused:
            why = _difference(ours, name, metadata)
            _log.error("the replica %s gets no requests: %s", name, why)
            seen.refused[name] = why


def _difference(ours: Card, name: str, metadata: dict[str, Any]) -> str:
    try:
        ours.check(card_of(name, RemoteHello.from_json(metadata["card"])))
    except ConfigError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"it is of another release: {error!r:.200}"
    return "it says the same in another way"


def _ask_of(pending: PendingRequest) -> Ask | None:
    """Return the request in a call of ours; None in other calls."""
    args = pending.args
    is_ours = bool(args) and isinstance(args[0], Ask) and isinstance(args[0].local, Local)
    return args[0] if is_ours else None
