"""Which replica gets a request: our route functions inside Ray Serve's router.

Ray Serve runs one router in every process that holds a handle of the deployment. What other
processes have sent to a replica it hears from the replica, at most a second late; what this one
has sent, it counts itself.
"""

import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from qllm.frontend.routes import (
    FALLBACK,
    WITHOUT_PAGES,
    EngineView,
    RequestView,
    load_route,
    page_names,
)

from .load import Load, added, front_end_of
from .wire import Ask

_log = logging.getLogger("qllm.ray")


class EngineRouter(RequestRouter):
    """Ray Serve's router with a route function of ours."""

    def initialize_state(self, route: str = "class") -> None:
        """Called once, with the `request_router_kwargs` of the deployment.

        Args:
            route: Name of a route function, as `load_route` takes it.
        """
        self._route = load_route(route)
        self._sent: dict[ReplicaID, Load] = {}
        """Requests of this process that a replica has."""
        self._keys: dict[str, str] = {}
        """What replicas call a request, by Ray's id."""
        self._has_raised = False

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for one call, the best first; none of them sends it later."""
        if pending_request is None:
            return [candidate_replicas]
        if (at := pending_request.kwargs.get("at")) is not None:
            named = [r for r in candidate_replicas if r.replica_id.unique_id == at]
            return [named or candidate_replicas]  # any other one says that it is not there
        ask = _ask_of(pending_request)
        if ask is None:
            return [candidate_replicas]
        same = [r for r in candidate_replicas if r.replica_metadata.get("identity") == ask.identity]
        return [[self._choose(ask, same)]] if same else []

    def _choose(self, ask: Ask, replicas: Sequence[RunningReplica]) -> RunningReplica:
        item = ask.local.item  # type: ignore[union-attr]  # `_ask_of` has seen to it
        pages = () if self._route in WITHOUT_PAGES else page_names(item.token_ids, item.cache_salt)
        output = item.max_tokens - item.num_output_tokens
        request = RequestView(item.priority, len(item.token_ids), output, pages=pages)
        front_end = front_end_of(ask.key)
        views = [self._view(replica, front_end) for replica in replicas]
        try:
            found = views.index(self._route(request, views))
        except Exception as error:  # noqa: BLE001 - a plug-in's: the request is served all the same
            found = views.index(FALLBACK(request, views))
            if not self._has_raised:
                self._has_raised = True
                _log.exception("the route failed (%s); the least loaded replica is taken", error)
        return replicas[found]

    def _view(self, replica: RunningReplica, front_end: str) -> EngineView:
        ours = self._sent.get(replica.replica_id)
        told = replica.routing_stats.get("backlogs", {})
        others = {name: both for name, both in told.items() if name != front_end}
        ls, be = added([others if ours is None else {**others, **ours.counts()}])
        return EngineView(
            name=replica.replica_id.unique_id,
            seats=int(replica.replica_metadata["seats"]),
            ls=ls,
            be=be,
            num_sent=0 if ours is None else ours.num_opened,
        )

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count what was sent."""
        ask = _ask_of(pending_request)
        if ask is None or ask.local is None:
            return
        item, load = ask.local.item, self._sent.setdefault(replica_id, Load())
        load.opened(
            ask.key,
            item.priority,
            item.arrival_ns,
            item.slo,
            len(item.token_ids),
            item.max_tokens - item.num_output_tokens,
        )
        ask.local.load = load
        self._keys[pending_request.metadata.internal_request_id] = ask.key

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it no more."""
        key, load = self._keys.pop(internal_request_id, None), self._sent.get(replica_id)
        if key is not None and load is not None:
            load.closed(key)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when there are others, or when they have told something new."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self._sent = {name: load for name, load in self._sent.items() if name in there}


def _ask_of(pending: PendingRequest) -> Ask | None:
    """The request of ours in a call; None in other calls."""
    args = pending.args
    is_ours = bool(args) and isinstance(args[0], Ask) and args[0].local is not None
    return args[0] if is_ours else None
