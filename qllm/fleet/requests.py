"""Open requests of a fleet: their engines, for the router and the log."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qllm.errors import EngineClosedError, QllmError, QueueFullError
from qllm.fleet.members import Member, is_full, none_serves, takes_requests
from qllm.fleet.router import Entry, Router
from qllm.fleet.routes import RequestView, Route
from qllm.frontend.handle import Handle
from qllm.frontend.request_log import RequestLog
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission


class FleetLog(RequestLog):
    """The log of a fleet's requests. It also reports every token and end to the router."""

    def __init__(self, max_replays: int, max_trials: int, router: "SharedRouter") -> None:
        super().__init__(max_replays, lambda: None, max_trials)
        self._router = router
        self.num_taken = Counter[str]()
        """Number of requests that each engine had open when it ended."""
        self.replay: Callable[[SavedRequest], None] | None = None
        """Function that submits a request to the engine of the route."""
        self.heard: Callable[[Handle], None] = lambda _: None
        """Function that is called for each token and end."""

    def take(self, entry: SavedRequest, engine_ns: int, why: str, *, had_it: bool = True) -> None:
        if (name := self._router.left(entry)) is not None:
            self.num_taken[name] += 1
        super().take(entry, engine_ns, why, had_it=had_it)

    def move_on(
        self, entry: SavedRequest, engine_ns: int, back: Callable[[SavedRequest], None]
    ) -> None:
        self._router.left(entry)
        super().move_on(entry, engine_ns, self.replay or back)

    def heard_of(self, entry: SavedRequest) -> None:
        self._router.heard(entry)
        self.heard(entry.handle)
        super().heard_of(entry)


class SharedRouter:
    """A router that several threads share. Its keys are handles of open requests."""

    def __init__(self, route: Route, record: Callable[[Entry], object] | None) -> None:
        self.lock = threading.Lock()
        self.router = Router(route, record)
        self._numbers = itertools.count()
        self._keys: dict[Handle, int] = {}

    @contextmanager
    def sent(
        self,
        handle: Handle,
        submission: Submission,
        members: "dict[str, Member]",
        wanted: str | None,
        without: set[str],
    ) -> Iterator[RingClient]:
        """Choose an engine with room, and yield its client to the block that submits.

        Args:
            handle: Handle of the request.
            submission: The request.
            members: The engines.
            wanted: Engine that is preferred if it has room. Otherwise the route chooses.
            without: Engines without room. The chosen engine is added if it has no room.

        Raises:
            EngineClosedError: No engine takes requests.
            QueueFullError: Engines that take requests have no room.
        """
        request = self.router.view(
            submission.priority,
            submission.token_ids,
            submission.max_tokens - submission.num_output_tokens,
            submission.cache_salt,
            is_begun=submission.num_output_tokens > 0,
        )
        num_done = submission.num_output_tokens
        client, key = self._choose(handle, request, num_done, members, wanted, without)
        try:
            yield client
        except BaseException as error:
            name = self._leave(handle, key)
            if isinstance(error, QueueFullError) and name is not None:
                without.add(name)
            raise

    def _choose(
        self,
        handle: Handle,
        request: RequestView,
        num_done: int,
        members: "dict[str, Member]",
        wanted: str | None,
        without: set[str],
    ) -> tuple[RingClient, int]:
        with self.lock:
            closed = {n for n, member in members.items() if not takes_requests(member)}
            full = {n for n in members.keys() - closed if n in without or is_full(members[n])}
            found = None
            if wanted is not None and wanted not in closed | full:
                found = next((e for e in self.router.engines if e.name == wanted), None)
            if found is None:
                found = self.router.choose(request, time.monotonic(), sorted(closed | full))
            client = None if found is None else members[found.name].client
            if found is None or client is None:
                raise self._none(members, full)
            key = next(self._numbers)
            self._keys[handle] = key
            self.router.sent(key, request, found, num_done)
        return client, key

    @staticmethod
    def _none(members: "dict[str, Member]", full: set[str]) -> QllmError:
        if full:
            return QueueFullError(f"all of {len(full)} engines have full queues; try again later")
        return EngineClosedError(none_serves(members))

    def heard(self, entry: SavedRequest) -> None:
        handle = entry.handle
        with self.lock:
            key = self._keys.get(handle)
            if key is None:
                return
            if handle.has_ended:
                del self._keys[handle]
                self.router.left(key)
            else:
                self.router.heard(key, len(entry.token_ns), entry.priority)

    def left(self, entry: SavedRequest) -> str | None:
        with self.lock:
            key = self._keys.pop(entry.handle, None)
            return None if key is None else self.router.left(key)

    def _leave(self, handle: Handle, key: int) -> str | None:
        with self.lock:
            if self._keys.get(handle) == key:
                del self._keys[handle]
            return self.router.left(key)
