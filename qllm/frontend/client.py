"""Where the engine loop lives, as `QLLMEngine` sees it.

The thread client runs it on a thread of this process, the process client in a process of its own,
and the remote client reaches one on another host. Callers hold a `Handle` per request, and a client
ends every handle it was given, whatever happens to the loop.
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
    """Runs or reaches one engine. Every method may be called from any thread.

    It has many methods because callers must not see where the engine runs.
    """

    info: ModelInfo
    can_hold = False
    """Whether there are `hold` and `release`; submitting waits for nobody then."""

    def __init__(self) -> None:
        self.admission_lock = threading.RLock()
        """Held while a request enters, so that none enters a client that has ended."""
        self.handles: dict[RequestId, Handle] = {}
        """Open requests by id."""
        self.is_leaving = False
        """It is being closed, or will be: no engine is left to ask for anything."""
        self._numbers: Iterator[int] = itertools.count()
        self._pid = os.getpid()

    # -- how it ends

    def _register(self) -> None:
        """Close it at the end of this process. A subclass calls this once it serves."""
        _OPEN.add(self)

    def _unregister(self) -> None:
        """Nothing is left to close."""
        _OPEN.discard(self)

    def close(self) -> None:
        """End the loop and wait until it is gone. Twice is once.

        In a child of `os.fork` it does nothing: the engine is the parent's, and a model on a
        thread stays as the engine had it.
        """
        if not self._is_inherited:
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End the loop and wait until it is gone, in the process that made it."""

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a child that was forked from the one that made the client."""
        return os.getpid() != self._pid

    def _whose(self) -> str:
        return (
            f"the engine belongs to process {self._pid}, from which this one was forked; make an "
            "engine here, or attach to one that listens"
        )

    def disown(self) -> None:
        """Called in a child of `os.fork`: the engine, its rings and its threads are the parent's.

        Other threads of the parent may have held the locks.
        """
        self.admission_lock = threading.RLock()
        for handle in list(self.handles.values()):
            handle.disown(self._whose())
        self.handles.clear()

    def open_handles(self) -> list[Handle]:
        """Open requests."""
        return list(self.handles.values())

    def new_number(self) -> RequestId:
        """The id of the next request. The caller holds `admission_lock`."""
        return next(self._numbers)

    @abstractmethod
    def now_ns(self) -> int:
        """The engine's clock: nanoseconds since it was made."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the loop ended by itself; None while it serves, and after `close`."""

    def raise_if_closed(self) -> None:
        """Refuse work for a loop that has ended.

        Raises:
            EngineClosedError: The engine was closed or has crashed, or is that of the process
                from which this one was forked.
        """
        if self._is_inherited:
            raise EngineClosedError(self._whose())
        self._raise_if_closed()

    @abstractmethod
    def _raise_if_closed(self) -> None:
        """The same, in the process that made the client."""

    def hold(self) -> None:
        """Tell the engine of what is submitted only at `release`, so that it wakes once."""
        raise NotImplementedError

    def release(self) -> None:
        """Tell the engine of what was submitted since `hold`."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, submission: Submission, handle: Handle) -> None:
        """Hand over a request. The caller holds `admission_lock`.

        Raises:
            QueueFullError: There is no room for it now.
        """

    def replay(self, entry: SavedRequest) -> None:
        """Go on with a request that another engine has left unfinished.

        Raises:
            ConfigError: This client takes over no requests.
            EngineClosedError: The engine has ended too.
            QueueFullError: There is no room for it now.
        """
        raise ConfigError("an engine of this process takes over no requests")

    @abstractmethod
    def cancel(self, request_id: RequestId) -> None:
        """Tell the engine that nobody wants this request. Returns at once."""

    @abstractmethod
    def update(self, item: Update) -> None:
        """Tell the engine of another class, a pause, or its end. Returns at once.

        Raises:
            ConfigError: The engine's loop runs on a device.
            QueueFullError: There is no room for it now.
        """

    @abstractmethod
    def revise(self, number: RequestId, item: Revision) -> None:
        """Give an open request another prompt. Returns at once.

        Args:
            number: Of the request; it may have ended.
            item: With times that count from now on.

        Raises:
            QueueFullError: There is no room for it now; nothing has changed.
            InvalidRequestError: It would never fit.
        """

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that hold no KV yet."""

    @abstractmethod
    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        """Where requests are that have not ended."""

    def status(self, request_id: RequestId) -> RequestStatus:
        """Where a request is that has not ended."""
        return self.statuses([request_id])[0]

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers of the run so far."""

    @abstractmethod
    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """What is new since an entry of the timeline, see `QLLMEngine.watch`."""

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """Events of the run, kept if the engine was made with `record=True`."""

    @abstractmethod
    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the loop's thread, between two programs, and return its result."""

    @abstractmethod
    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request to a file; return how many."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget all kept KV."""

    @abstractmethod
    def delete_kv(self, tag: bytes) -> int:
        """Delete the kept KV of an owner (16 bytes) or a salt of it (32); the number of pages."""

    @abstractmethod
    def restore(self, path: str | os.PathLike[str], make: MakeHandle) -> list[Handle]:
        """Take over the requests of a checkpoint."""

    def end_if_stuck(self, after_s: float) -> None:
        """End an engine that has work and does not come round for so long.

        Raises:
            ConfigError: It is not ours to end: it runs in this process, or is another's.
        """
        raise ConfigError("only an engine in a process of its own, made here, can be ended")

    @abstractmethod
    def drain(self) -> None:
        """Take no new requests from now on.

        Raises:
            EngineClosedError: The engine is that of the process from which this one was forked.
        """


class FarClient(Client):
    """A client that refuses what is for the engine's own host."""

    @property
    @abstractmethod
    def _why_not(self) -> str:
        """Whose it is, and where this front end is: the rest of a sentence."""

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
    """A client of several engines, which carries requests of one that is gone over by itself."""

    log: RequestLog
    """Requests between two engines."""

    def now_ns(self) -> int:
        """The clock of all of them, here: nanoseconds."""
        return time.monotonic_ns()

    @property
    def failure(self) -> str | None:
        """Engines come and go; the client of all of them does not end by itself."""
        return None

    @property
    @abstractmethod
    def back_in_s(self) -> int:
        """While no engine serves: seconds until one may, at least 1."""

    @property
    @abstractmethod
    def num_route_errors(self) -> int:
        """Choices that the route did not make."""

    @abstractmethod
    def engines(self) -> list[dict[str, Any]]:
        """What is known of each engine, for health and metrics.

        Its name as `engine`, whether it is `up` and `why` not, times it was `met`, requests that it
        got (`sent`), had open when it went (`taken`) and gave away (`moved`), its `pool`, and open
        requests by class.
        """


_OPEN: set[Client] = set()
"""Clients of this process that serve."""


def close_collected(client: Client) -> None:
    """Close a client whose `QLLMEngine` was collected without `close`; returns at once.

    A collection may interrupt a thread that holds any lock, so nothing is waited for here, and
    not even `threading` may be asked for a thread.
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
