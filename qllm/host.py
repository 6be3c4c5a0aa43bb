"""The host of the engine loop: a thread of the caller's process.

It ends every request when the loop ends, whatever the reason, so that nothing hangs.
"""

import atexit
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qllm.engine import EngineLoop
from qllm.errors import EngineClosedError
from qllm.ingress import Call, InprocIngress, Submission
from qllm.types import FinishReason, RequestId


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with `count` threads; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadHost:
    """Runs a loop on a thread of its own.

    Args:
        loop: Serves until `close`.
        ingress: What the loop takes from.
        open_requests: Ids of the requests that somebody waits for.
        threads: Threads torch computes with; None leaves torch's choice.
    """

    def __init__(
        self,
        loop: EngineLoop,
        ingress: InprocIngress,
        open_requests: Callable[[], Iterable[RequestId]],
        threads: int | None,
    ) -> None:
        self.door = threading.Lock()
        """Held while a request enters, so that none enters a host that has ended."""
        self._loop = loop
        self._ingress = ingress
        self._open_requests = open_requests
        self._threads = threads
        self._closed = False
        self._crash: BaseException | None = None
        # A full collection over all of torch and transformers stops every thread for 0.2-0.4 s.
        gc.collect()
        gc.freeze()
        self._thread = threading.Thread(target=self._serve, name="qllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # torch aborts when a thread of it outlives the interpreter

    def _serve(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            self._loop.serve()
        except BaseException as error:  # noqa: BLE001 - every handle ends, then the engine is dead
            self._crash = error
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Whatever is still open ends now: the loop will not come back."""
        with self.door:
            self._closed = True
        crash = self._crash
        reason = FinishReason.CANCELLED if crash is None else FinishReason.ERROR
        text = None if crash is None else f"the engine crashed: {type(crash).__name__}: {crash}"
        for item in (*self._loop.pending, *self._ingress.drain()):
            if isinstance(item, Call):
                item.answer(None, EngineClosedError("the engine was closed"))
            elif isinstance(item, Submission):
                self._loop.meet(item)
        for request_id in list(self._open_requests()):
            self._loop.end(request_id, reason, text)

    def raise_if_closed(self) -> None:
        """Refuse work for a loop that has ended.

        Raises:
            EngineClosedError: With the crash as its cause, if there was one.
        """
        if self._crash is not None:
            raise EngineClosedError(
                f"the engine crashed ({type(self._crash).__name__}); make a new one"
            ) from self._crash
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new one")

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the loop's thread, between two programs, and return its result."""
        self.raise_if_closed()
        done = threading.Event()
        box: list[Any] = [None, EngineClosedError("the engine was closed; make a new one")]

        def answer(result: Any, error: BaseException | None) -> None:
            box[:] = [result, error]
            done.set()

        self._ingress.put(Call(function, answer))
        while not done.wait(0.2) and self._thread.is_alive():
            pass
        if box[1] is not None:
            self.raise_if_closed()
            raise box[1]
        return box[0]

    def close(self) -> None:
        """End the loop and wait for its thread. Twice is once."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            atexit.unregister(self.close)
            self._ingress.put(Call(self._loop.close, lambda *_: None))
            self._thread.join()
            gc.unfreeze()
        self._closed = True
