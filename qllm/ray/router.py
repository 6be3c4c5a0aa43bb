"""Which replica gets a request: our route functions inside Ray Serve's router.

Ray Serve runs one router in every process that holds a handle of the deployment. What a replica
has to do it learns from the replica, at most a second old; what this process sent there since, it
counts itself.
"""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .wire import Ask

_log = logging.getLogger("qllm.ray")


class EngineRouter(RequestRouter):
    """Ray Serve's router with a route function of ours."""

    def initialize_state(self, route: str = "class") -> None:
        """Called once, with the `request_router_kwargs` of the deployment.

        Args:
            route: Name of a route function.
        """
        self._route = route
        self._sent: dict[ReplicaID, dict[str, Ask]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank replicas for one call, the best first; none sends it later."""
        if pending_request is None:
            return [candidate_replicas]
        if (at := pending_request.kwargs.get("at")) is not None:
            named = [r for r in candidate_replicas if r.replica_id.unique_id == at]
            return [named or candidate_replicas]  # any other one says that it is not there
        args = pending_request.args
        if not args or not isinstance(args[0], Ask) or args[0].asked is None:
            return [candidate_replicas]
        return self._ranked(candidate_replicas, args[0])

    def _ranked(self, replicas: list[RunningReplica], ask: Ask) -> list[list[RunningReplica]]:
        same = [r for r in replicas if r.replica_metadata.get("identity") == ask.identity]
        loads = [(self._load(r), i) for i, r in enumerate(same)]
        return [[same[i]] for _, i in sorted(loads)]

    def _load(self, replica: RunningReplica) -> int:
        stats = replica.routing_stats
        ours = sum(
            len(a.asked.token_ids) + a.asked.max_tokens
            for a in self._sent.get(replica.replica_id, {}).values()
            if a.asked
        )
        return max(ours, int(stats.get("ls_tokens", 0) + stats.get("be_tokens", 0)))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count what was sent."""
        if pending_request.args and isinstance(ask := pending_request.args[0], Ask):
            number = pending_request.metadata.internal_request_id
            self._sent.setdefault(replica_id, {})[number] = ask

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it no more."""
        self._sent.get(replica_id, {}).pop(internal_request_id, None)
        if not self._sent.get(replica_id, True):
            del self._sent[replica_id]
