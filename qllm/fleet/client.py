"""One front end of several engines: a client whose route chooses the engine of each request.

    submit -> Router.choose -> the engine's own client (`RemoteClient`, or `ProcessClient`)
                                   |
    the engine dies -> RequestLog -'-> another engine, with the tokens so far

The engines are equal (`Card.check`). So an answer does not depend on the engines that compute it,
and not on the number of migrations.
"""

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from qllm.config import EngineConfig
from qllm.errors import ConfigError, EngineClosedError, QllmError, QueueFullError
from qllm.fleet import rebalance
from qllm.fleet.members import Backoff, Card, Member, meet_all, none_serves, takes_requests
from qllm.fleet.rebalance import REBALANCE_S
from qllm.fleet.rebalancer import Rebalancer
from qllm.fleet.requests import FleetLog, SharedRouter
from qllm.fleet.router import Entry
from qllm.fleet.routes import Role, Route, RouteCosts, load_route
from qllm.fleet.stats import FleetStats, described
from qllm.frontend.client import FarClient, ManyClient
from qllm.frontend.handle import Handle
from qllm.frontend.process import ProcessClient
from qllm.frontend.remote import RemoteClient
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Revision, Submission, Update
from qllm.types import NS_PER_S, RequestId, RequestStatus

LOOK_S = 0.05
"""Seconds between two checks of engines, and of requests that wait for an engine."""
COST_EVERY = 20
"""Number of checks for each check that also asks for the engine's speed."""
_log = logging.getLogger("qllm.fleet")


def meet(
    address: str,
    profile: str,
    secret_file: str | os.PathLike[str] | None,
    fleet: Mapping[str, Any],
) -> "RemoteClient | FleetClient":
    """Connect to the engine at an address, or to several engines at addresses with commas between.

    Args:
        address: Address as for `QLLMEngine.connect`.
        profile: Transport of rings to other hosts.
        secret_file: File with the secret that front end and engines share.
        fleet: Arguments of `FleetClient.connect`, in which `route` may be a name.

    Raises:
        ConfigError: An error of `RemoteClient.connect` or `FleetClient.connect`, or arguments of a
            fleet for a single engine.
        EngineClosedError: No engine answers.
    """
    file = None if secret_file is None else Path(secret_file)
    names = [name.strip() for name in address.split(",") if name.strip()]
    if len(names) < 2:
        if fleet:
            raise ConfigError(f"{min(fleet)} is for several engines; name them with commas between")
        return RemoteClient.connect(address, profile, file)
    route = fleet.get("route", "class")
    settings = {**fleet, "route": load_route(route) if isinstance(route, str) else route}
    return FleetClient.connect(names, profile=profile, secret_file=file, **settings)


class FleetClient(FarClient, ManyClient):
    """A client of several engines. Any thread may call any method.

    Args:
        members: The engines.
        card: Properties that all engines share.
        met: Clients of the engines that answer.
        route: Function that chooses among the engines.
        max_replays: Largest number of times that a request continues at another engine after its
            engine died.
        max_trials: Number of engines that may die during a request's trial (see `RequestLog`).
        rebalance_s: Seconds after which a stalled BE request migrates with its KV to another
            engine, if both engines allow it (`rebalance.choose_move`); 0 disables migration.
        record: Function that is called with every entry of the router.
    """

    def __init__(
        self,
        members: list[Member],
        card: Card,
        met: dict[Member, RingClient],
        route: Route,
        *,
        max_replays: int = 3,
        max_trials: int = 2,
        rebalance_s: float = REBALANCE_S,
        record: Callable[[Entry], object] | None = None,
    ) -> None:
        super().__init__()
        self.members = {member.name: member for member in members}
        self._card = card
        self._routing = SharedRouter(route, record)
        self.log: FleetLog = FleetLog(max_replays, max_trials, self._routing)
        """Open requests that have left one engine and wait for another."""
        self.log.replay = self.replay
        self._rebalancer = None
        if rebalance_s:
            self._rebalancer = Rebalancer(self.members, self._routing, rebalance_s)
            self.log.heard = self._rebalancer.heard_of
        self._stats = FleetStats()
        self._counts = itertools.count()
        self._ended = threading.Event()
        self._drains = False
        self._watched: RingClient | None = None
        first = next(iter(met.values()))
        self.hello: Any = first.hello
        self.info = self.hello.info
        self._config: EngineConfig = self.hello.config
        for member, client in met.items():
            self._enter(member, client)
        self._threads: list[threading.Thread] = []
        self._register()

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        route: Route,
        *,
        profile: str = "tcp",
        secret_file: Path | None = None,
        backoff: Backoff | None = None,
        **settings: Any,
    ) -> "FleetClient":
        """Connect to several engines. Engines that are down are tried again later.

        Args:
            addresses: HOST:PORT of an engine's meeting, or the path at which it listens.
            route: Function that chooses among the engines.
            profile: Transport of rings to other hosts.
            secret_file: File with the secret that front end and engines share.
            backoff: Delays before the fleet connects again to an engine that has ended.
            **settings: Further arguments of the class.

        Raises:
            ConfigError: Engines differ, an address occurs twice, or a setting is wrong.
            EngineClosedError: No engine answers.
        """
        twice = {address for address in addresses if addresses.count(address) > 1}
        if twice:
            raise ConfigError(f"the engine at {min(twice)} is named twice; name each once")

        def meet(address: str) -> RingClient:
            if "/" not in address:
                return RemoteClient.connect(address, profile, secret_file)
            try:
                return ProcessClient.attach(address, may_be_silent=False)
            except ConfigError as error:  # no engine listens yet
                raise EngineClosedError(str(error)) from error

        backoff = backoff or Backoff()
        members = [Member(address, partial(meet, address), backoff) for address in addresses]
        card, met = meet_all(members)
        fleet = cls(members, card, met, route, **settings)
        fleet.start()
        return fleet

    def start(self) -> None:
        """Start the threads that watch the engines, one thread for each engine."""
        work: list[Callable[[], None]] = [self._look]
        work += [partial(self._keep, member) for member in self.members.values()]
        if self._rebalancer is not None:
            work.append(self._rebalance)
        for run in work:
            thread = threading.Thread(target=run, name="qllm-fleet", daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- engines come and go

    def _enter(self, member: Member, client: RingClient) -> None:
        client._unregister()  # the fleet closes the client
        client.number_from(self._counts)
        config = client.config
        with self._routing.lock:
            member.is_up(client)
            least = min(m.kv_tokens for m in self.members.values() if m.num_met)
            self._config = replace(self.hello.config, max_kv_tokens=least)
            seats, role = config.max_num_seqs, cast(Role, config.role)
            self._routing.router.up(
                member.name,
                role=role,
                seats=seats,
                kept_tokens=config.kept_tokens,
                hands_over=client.hands_over,
            )

    def _keep(self, member: Member) -> None:
        count = 0
        while not self._ended.wait(LOOK_S):
            self.look_at(member, asks_costs=count % COST_EVERY == 0)
            count += 1

    def look_at(self, member: Member, *, asks_costs: bool = False) -> None:
        """Check one engine, and connect again after the engine has ended.

        Args:
            member: The engine.
            asks_costs: True to ask the engine for its speed.
        """
        client = member.client
        if client is None:
            if time.monotonic() >= member.next_s:
                self._try(member)
        elif (why := client.failure) is not None:
            self._lose(member, client, why)
        elif asks_costs:
            self._ask_costs(member, client)

    def _try(self, member: Member) -> None:
        try:
            client = member.meet(self._card)
        except Exception as error:  # noqa: BLE001 - logged, and tried again
            wait_s = member.is_out(str(error))
            _log.warning("the engine at %s is out for %.1f s: %s", member.name, wait_s, error)
            return
        with self.admission_lock:
            is_late = self._ended.is_set()
            if not is_late:
                self._enter(member, client)
        if is_late:
            client.close()
            return
        _log.warning("the engine at %s serves", member.name)
        self.log.go_on(self.replay)

    def _lose(self, member: Member, client: RingClient, why: str) -> None:
        with self._routing.lock:
            self._routing.router.down(member.name)
            wait_s = member.is_out(why)
            others = self._serves
        _log.error("%s; it is tried again in %.1f s", why, wait_s)
        client.close()  # from now on the log has all requests of the client
        self._stats.gone(member.name)
        if others:
            self.log.go_on(self.replay)

    def _ask_costs(self, member: Member, client: RingClient) -> None:
        with suppress(QllmError):
            told = client.costs_ns()
            if told is not None:
                costs = RouteCosts(*(ns / NS_PER_S for ns in told))
                with self._routing.lock:
                    self._routing.router.cost(member.name, costs)

    def costs_ns(self) -> Sequence[float] | None:
        """Return the costs of the engine with the fastest prompts; None if no engine is up."""
        with self._routing.lock:
            all_ = [engine.costs for engine in self._routing.router.engines]
        best = min(all_, key=lambda costs: costs.token_s, default=None)
        if best is None:
            return None
        return [x * NS_PER_S for x in (best.token_s, best.step_s, best.output_s)]

    def _look(self) -> None:
        """Check requests that wait for an engine."""
        while not self._ended.wait(LOOK_S):
            self.log.look()

    def _rebalance(self) -> None:
        assert self._rebalancer is not None
        while not self._ended.wait(rebalance.LOOK_S):
            self._rebalancer.look()

    @property
    def config(self) -> EngineConfig:
        """Settings of the first engine, with the smallest KV of all that were met.

        So a request that the fleet accepts fits every engine that it may continue at.
        """
        return self._config

    @property
    def back_in_s(self) -> int:
        out = [m.next_s for m in self.members.values() if m.client is None]
        return max(1, math.ceil(min(out, default=0.0) - time.monotonic()))

    def engines(self) -> list[dict[str, Any]]:
        with self._routing.lock:
            views = {view.name: view for view in self._routing.router.engines}
        return [
            described(
                name,
                views.get(name),
                is_up=takes_requests(member),
                why=member.why,
                num_met=member.num_met,
                num_taken=self.log.num_taken[name],
                num_moved=0 if (moves := self._rebalancer) is None else moves.num_moved[name],
            )
            for name, member in self.members.items()
        ]

    @property
    def num_route_errors(self) -> int:
        return self._routing.router.num_errors

    # -- requests

    def submit(self, submission: Submission, handle: Handle) -> None:
        if self._drains:
            raise EngineClosedError("the fleet drains: it takes no new requests")
        handle.log = self.log
        self._on_some_engine(handle, submission, partial(self._submit, submission, handle))

    def _submit(self, submission: Submission, handle: Handle, client: RingClient) -> None:
        with client.admission_lock:
            client.raise_if_closed()
            number, by_ns = client.new_number(), client.now_ns() - time.monotonic_ns()
            deadline_ns = submission.deadline_ns
            item = replace(
                submission,
                request_id=number,
                arrival_ns=submission.arrival_ns + by_ns,
                deadline_ns=None if deadline_ns is None else deadline_ns + by_ns,
            )
            handle.move(number, client.cancel, client.status, client.update, client.revise)
            client.submit(item, handle)

    def replay(self, entry: SavedRequest) -> None:
        handle, rest, moves = entry.handle, entry.rest(0), self._rebalancer
        wanted = None if moves is None else moves.target_of(handle)
        self._on_some_engine(handle, rest, lambda client: client.replay(entry), wanted)

    def _on_some_engine(
        self,
        handle: Handle,
        submission: Submission,
        put: Callable[[RingClient], None],
        wanted: str | None = None,
    ) -> None:
        """Submit a request to the engine of the route, or to another engine that has room.

        Raises:
            EngineClosedError: No engine takes requests.
            QueueFullError: Engines that take requests have no room.
        """
        full = set[str]()
        for last in range(len(self.members), -1, -1):
            num_full = len(full)
            try:
                with self._routing.sent(handle, submission, self.members, wanted, full) as client:
                    put(client)
                return
            except EngineClosedError:
                if not last or not self._serves:
                    raise
            except QueueFullError:
                if not last or len(full) == num_full:
                    raise

    def _client_of(self, request_id: RequestId) -> RingClient | None:
        return next((c for c in self._up() if request_id in c.handles), None)

    def cancel(self, request_id: RequestId) -> None:
        if (client := self._client_of(request_id)) is not None:
            client.cancel(request_id)

    def update(self, item: Update) -> None:
        if (client := self._client_of(item.request_id)) is not None:
            client.update(item)

    def revise(self, number: RequestId, item: Revision) -> None:
        if (client := self._client_of(number)) is not None:
            client.revise(number, item)

    def open_handles(self) -> list[Handle]:
        """Return open requests, at engines and between engines."""
        found = [h for client in self._up() for h in client.open_handles()]
        return [*found, *self.log.handles()]

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        found: dict[RequestId, RequestStatus] = {}
        for client in self._up():
            ours = [number for number in request_ids if number in client.handles]
            if ours:
                found |= zip(ours, client.statuses(ours), strict=True)
        return [found.get(number, RequestStatus.WAITING) for number in request_ids]

    # -- as a client

    @property
    def _serves(self) -> bool:
        return any(map(takes_requests, self.members.values()))

    def _up(self) -> list[RingClient]:
        return [m.client for m in self.members.values() if m.client is not None]

    def _raise_if_closed(self) -> None:
        if self._ended.is_set():
            raise EngineClosedError("the fleet was closed; make a new one")
        if not self._serves:
            raise EngineClosedError(none_serves(self.members))

    @property
    def num_waiting(self) -> int:
        """Smallest number of requests without KV among the engines that take requests."""
        taking = [m.client for m in self.members.values() if takes_requests(m)]
        return min((c.num_waiting for c in taking if c is not None), default=0)

    def stats(self) -> dict[str, Any]:
        """Return sums and extremes over the engines. Counts include engines that have ended."""
        told = {}
        for name, member in self.members.items():
            if (client := member.client) is not None:
                with suppress(EngineClosedError):
                    told[name] = client.stats()
        if not told:
            raise EngineClosedError(none_serves(self.members))
        return self._stats.merged(told)

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """Return the timeline of the first engine that is up."""
        for name, member in self.members.items():
            if (client := member.client) is not None:
                since, self._watched = since if client is self._watched else 0, client
                return {**client.watch(since, whole), "engine": f"{name} #{member.num_met}"}
        raise EngineClosedError(none_serves(self.members))

    @property
    def _why_not(self) -> str:
        return "one engine, and this front end has several; ask that one"

    def reset_prefix_cache(self) -> None:
        with self._routing.lock:
            self._routing.router.forget_kept()
        self._at_all(lambda client: client.reset_prefix_cache())

    def delete_kv(self, tag: bytes) -> int:
        return sum(self._at_all(lambda client: client.delete_kv(tag)))

    def _at_all(self, ask: Callable[[RingClient], Any]) -> list[Any]:
        """Ask every engine.

        Raises:
            EngineClosedError: An engine that may have KV in a file is out. The other engines were
                asked.
        """
        answers, missed = [], []
        for name, member in self.members.items():
            try:
                if member.client is None:
                    raise EngineClosedError(member.why)
                answers.append(ask(member.client))
            except EngineClosedError:
                missed += [name] if member.keeps_file else []
        if missed:
            raise EngineClosedError(
                f"{', '.join(missed)} could not be asked and may have KV in a file; the other "
                "engines were: ask again when all serve"
            )
        return answers

    def drain(self) -> None:
        """Refuse new requests at this front end. The engines may have other front ends."""
        self.raise_if_closed()
        self._drains = True

    def disown(self) -> None:
        super().disown()
        for client in self._up():
            client.disown()
        self.log.disown(self._whose())

    def _close(self) -> None:
        with self.admission_lock:
            if self._ended.is_set():
                return
            self._ended.set()
        for thread in self._threads:  # a thread may be connecting to an engine that does not answer
            if thread is not threading.current_thread():
                thread.join(1)
        for handle in self.log.handles():
            handle.cancel()
        self.log.end_all("the fleet was closed")
        for client in self._up():
            client.close()
        self._unregister()
