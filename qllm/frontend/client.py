"""Clients of an engine loop: the ways in which `QLLMEngine` reaches the loop.

The thread client runs the loop on a thread of this process. The process client runs the loop in a
process of its own. The remote client reaches a loop on another host. Callers hold a `Handle` per
request. A client ends every handle that it received, even when the loop crashes.
"""

import _thread
import atexit
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from qllm.config import EngineConfig
from qllm.errors import ConfigError, EngineClosedError
from qllm.frontend.handle import Handle
from qllm.frontend.request_log import RequestLog
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Revision, Submission, Update
from qllm.ingress.messages import ModelInfo
from qllm.record.trace import Trace
from qllm.types import RequestId, RequestStatus, SamplingParams

MakeHandle = Callable[[RequestId, str | None, tuple[int, ...], SamplingParams], Handle]


class Client(ABC):
    """A client that runs or reaches one engine. Any thread may call any method."""

    info: ModelInfo
    can_hold = False
    """True if the client has `hold` and `release`. Then `submit` never blocks."""

    def __init__(self) -> None:
        self.admission_lock = threading.RLock()
        """Lock for new requests, so that no request enters a client that has ended."""
        self.handles: dict[RequestId, Handle] = {}
        """Open requests by id."""
        self.is_leaving = False
        """True if the client is closed or about to be closed, so that no engine can be asked."""
        self._numbers: Iterator[int] = itertools.count()
        self._pid = os.getpid()

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The engine's settings, with the sizes that it chose."""

    # -- how it ends

    def _register(self) -> None:
        """Register the client to be closed at exit.

        A subclass calls this once the client serves.
        """
        _OPEN.add(self)

    def _unregister(self) -> None:
        """Remove the client from the clients that are closed at exit."""
        _OPEN.discard(self)

    def close(self) -> None:
        """End the loop and wait for its end. Idempotent.

        In a child of `os.fork` this does nothing, because the engine belongs to the parent. A model
        on a thread keeps the engine's state.
        """
        if not self._is_inherited:
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End the loop and wait for its end, in the process that made the client."""

    @property
    def _is_inherited(self) -> bool:
        """True in a child of `os.fork` of the process that made the client."""
        return os.getpid() != self._pid

    def _whose(self) -> str:
        return (
            f"the engine belongs to process {self._pid}, from which this one was forked; make an "
            "engine here, or attach to one that listens"
        )

    def disown(self) -> None:
        """Release engine, rings and threads in a child of `os.fork`, because the parent owns them.

        Other threads of the parent may have held the locks.
        """
        self.admission_lock = threading.RLock()
        for handle in list(self.handles.values()):
            handle.disown(self._whose())
        self.handles.clear()

    def open_handles(self) -> list[Handle]:
        """Return the open requests."""
        return list(self.handles.values())

    def new_number(self) -> RequestId:
        """Return the id of the next request. The caller holds `admission_lock`."""
        return next(self._numbers)

    @abstractmethod
    def now_ns(self) -> int:
        """Return the engine's clock: nanoseconds since the engine was made."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """The reason why the loop ended by itself; None while it serves, and after `close`."""

    def raise_if_closed(self) -> None:
        """Raise if the loop has ended.

        Raises:
            EngineClosedError: The engine was closed, has crashed, or belongs to the parent of this
                forked process.
        """
        if self._is_inherited:
            raise EngineClosedError(self._whose())
        self._raise_if_closed()

    @abstractmethod
    def _raise_if_closed(self) -> None:
        """Raise if the loop has ended, in the process that made the client."""

    def hold(self) -> None:
        """Delay wake-ups of the engine until `release`, so that several requests wake it once."""
        raise NotImplementedError

    def release(self) -> None:
        """Wake the engine for the requests submitted since `hold`."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, submission: Submission, handle: Handle) -> None:
        """Submit a request. The caller holds `admission_lock`.

        Raises:
            QueueFullError: The engine has no room for the request now.
        """

    def replay(self, entry: SavedRequest) -> None:
        """Continue a request that another engine left unfinished.

        Raises:
            ConfigError: This client cannot continue requests of other engines.
            EngineClosedError: The engine has ended too.
            QueueFullError: The engine has no room for the request now.
        """
        raise ConfigError("an engine of this process takes over no requests")

    @abstractmethod
    def cancel(self, request_id: RequestId) -> None:
        """Send the engine a cancel for a request. Returns at once."""

    @abstractmethod
    def update(self, item: Update) -> None:
        """Send the engine a new class or a pause for a request. Returns at once.

        Raises:
            ConfigError: The engine's loop runs on a device.
            QueueFullError: The engine has no room for the update now.
        """

    @abstractmethod
    def revise(self, number: RequestId, item: Revision) -> None:
        """Replace the prompt of a streaming prompt. Returns at once.

        Args:
            number: Id of the request, which may have ended.
            item: New prompt, with times relative to now.

        Raises:
            QueueFullError: The engine has no room for the revision now. The prompt has not changed.
            InvalidRequestError: The revision would never fit.
        """

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Number of requests that hold no KV yet."""

    @abstractmethod
    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        """Return the states of unfinished requests."""

    def status(self, request_id: RequestId) -> RequestStatus:
        """Return the state of an unfinished request."""
        return self.statuses([request_id])[0]

    def costs_ns(self) -> Sequence[float] | None:
        """Return the engine's costs as in `RingClient.costs_ns`; None if they are unknown."""
        return None

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return numbers of the run so far."""

    @abstractmethod
    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """Return new entries of the timeline, see `QLLMEngine.watch`."""

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """Events of the run, recorded if the engine was made with `record=True`."""

    @abstractmethod
    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the loop's thread, between two programs, and return its result."""

    @abstractmethod
    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request to a file; return their number."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Delete all cached KV."""

    @abstractmethod
    def delete_kv(self, tag: bytes) -> int:
        """Delete cached KV of an owner (16 bytes) or a salt (32 bytes).

        Return the number of pages.
        """

    @abstractmethod
    def restore(self, path: str | os.PathLike[str], make: MakeHandle) -> list[Handle]:
        """Continue the requests of a checkpoint."""

    def end_if_stuck(self, after_s: float) -> None:
        """End an engine that has work and makes no progress for `after_s` seconds.

        Raises:
            ConfigError: The engine runs in this process, or belongs to another process.
        """
        raise ConfigError("only an engine in a process of its own, made here, can be ended")

    @abstractmethod
    def drain(self) -> None:
        """Refuse new requests from now on.

        Raises:
            EngineClosedError: The engine belongs to the parent of this forked process.
        """


class FarClient(Client):
    """A client that refuses calls that need the engine's own host."""

    @property
    @abstractmethod
    def _why_not(self) -> str:
        """The owner and place of the engine: the end of an error message."""

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{what} is for {self._why_not}")

    @property
    def trace(self) -> Trace:
        self._refuse("the trace")

    def call(self, function: Callable[[], Any]) -> Any:
        self._refuse("call")

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        self._refuse("checkpoint")

    def restore(self, path: str | os.PathLike[str], make: MakeHandle) -> list[Handle]:
        self._refuse("restore")


class ManyClient(Client):
    """A client of several engines.

    Requests of an engine that has ended continue at another engine.
    """

    log: RequestLog
    """Requests that have left one engine and wait for another."""

    def now_ns(self) -> int:
        """Return the local clock that is used for all engines, in nanoseconds."""
        return time.monotonic_ns()

    @property
    def failure(self) -> str | None:
        """Always None, because the client does not end when an engine ends."""
        return None

    @property
    @abstractmethod
    def back_in_s(self) -> int:
        """Seconds until an engine may serve again, at least 1."""

    @property
    @abstractmethod
    def num_route_errors(self) -> int:
        """Number of choices that the route failed to make."""

    @abstractmethod
    def engines(self) -> list[dict[str, Any]]:
        """Return one record per engine, for health and metrics.

        Fields: `engine`, the name; `up`; `why`, the reason if it is not up; `met`, the number of
        connections; `sent`, the requests that the engine got; `taken`, the requests that were open
        when it ended; `moved`, the requests that migrated away; `pool`; and open requests by class.
        """


_OPEN: set[Client] = set()
"""Clients of this process that serve."""


def close_collected(client: Client) -> None:
    """Close a client whose `QLLMEngine` was garbage collected without `close`. Returns at once.

    A garbage collection may interrupt a thread that holds any lock. So this function waits for
    nothing, and starts no thread through `threading`.
    """
    if client in _OPEN:
        _thread.start_new_thread(client.close, ())
        client.is_leaving = True


def _close_all() -> None:
    for client in list(_OPEN):
        client.close()


def _disown_all() -> None:
    for client in list(_OPEN):
        client.disown()
    _OPEN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
