"""The engine loop on a thread of the caller's process."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from qllm.config import EngineConfig
from qllm.cores import freeze_garbage
from qllm.engine import checkpoint
from qllm.engine.build import EngineCore, crash_text
from qllm.errors import EngineClosedError, ModelError
from qllm.frontend.client import Client, MakeHandle
from qllm.frontend.handle import Handle
from qllm.ingress import Call, Cancel, InprocIngress, Revision, Submission, Update
from qllm.models.discover import base_model
from qllm.models.loader import LoadedModel
from qllm.record.metrics import RequestMetrics
from qllm.record.trace import Trace
from qllm.types import FinishReason, RequestId, RequestStatus, Sampled, SamplingParams


class ThreadClient(Client):
    """A client that runs the loop on its own thread. A model object has one such client at a time.

    It has many methods because it is both a client and the loop's receiver of tokens.

    Args:
        loaded: The model.
        policy: A policy object.
        config: Settings.
        threads: Number of threads of torch; None leaves torch's choice.

    Raises:
        ConfigError: The device does not support a setting.
        ModelError: Another engine serves this model, or the model cannot be driven safely.
    """

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, threads: int | None
    ) -> None:
        super().__init__()
        config.check_place("thread", loaded.model.device.type)
        self._zero_ns = time.monotonic_ns()
        self.ingress = InprocIngress(self.now_ns)
        self._closed = self._draining = False
        self._crash: BaseException | None = None
        self._ending = threading.RLock()
        """Lock for the end of the loop and the release of the model. Both happen once."""
        self._model_key = id(base_model(loaded.model))
        self._take_model()
        try:
            self._core = EngineCore(
                loaded,
                policy,
                config,
                ingress=self.ingress,
                sink=self,
                now_ns=self.now_ns,
                threads=threads,
            )
        except BaseException:
            del _SERVED[self._model_key]
            raise
        self.info = self._core.info
        self.loop, self.runner = self._core.loop, self._core.runner
        self._thread = threading.Thread(target=self._serve, name="qllm-engine", daemon=True)
        try:
            freeze_garbage()
            self._thread.start()
            self._register()  # torch aborts if one of its threads outlives the interpreter
        except BaseException:
            self._close()
            raise

    def _take_model(self) -> None:
        """Take the model, after an earlier engine of the model has closed.

        A runner and its start-up check change the model's modules. A second runner would compute
        with the changes of the first runner, and lose its own changes when the first runner is
        closed.

        Raises:
            ModelError: Another engine serves the model.
        """
        while (other := _SERVED.setdefault(self._model_key, self)) is not self:
            if not other.is_leaving:
                gc.collect()  # the model's earlier engine may be garbage
            if other.is_leaving or other.failure is not None:
                other.close()
            if _SERVED.get(self._model_key) is other:
                raise ModelError(
                    "another engine serves this model object, and a model serves one engine at a "
                    "time; close that engine first (`engine.close()`), or load the model once more"
                )

    def _serve(self) -> None:
        self._crash = self._core.serve()
        with self.admission_lock:
            self._closed = True
        self._core.end_all(self.handles, self._crash)

    # -- receiver of the loop's tokens

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        """Pass a token to its handle. The loop calls this."""
        return self.handles[sampled.request_id].on_token(sampled)

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        """Pass the end of a request to its handle. The loop calls this."""
        self.handles.pop(request_id).on_finish(reason, error, metrics)

    # -- as a client

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    @property
    def failure(self) -> str | None:
        return None if self._crash is None else crash_text(self._crash)

    def _raise_if_closed(self) -> None:
        if self._crash is not None:
            raise EngineClosedError(
                f"the engine crashed ({type(self._crash).__name__}); make a new one"
            ) from self._crash
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new one")

    def submit(self, submission: Submission, handle: Handle) -> None:
        if self._draining:
            raise EngineClosedError("the engine drains: it takes no new requests")
        self.handles[submission.request_id] = handle
        self.ingress.put(submission)

    def cancel(self, request_id: RequestId) -> None:
        self.ingress.put(Cancel(request_id))

    def update(self, item: Update) -> None:
        self.ingress.put(item)

    def revise(self, number: RequestId, item: Revision) -> None:
        self.ingress.put(item.put_at(number, self.now_ns()))

    @property
    def num_waiting(self) -> int:
        known = self.loop.live
        unseen = sum(1 for number in list(self.handles) if number not in known)
        return unseen + self.loop.num_waiting

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus]:
        found = map(self.loop.live.get, request_ids)
        return [RequestStatus.WAITING if x is None else x.request.status for x in found]

    @property
    def trace(self) -> Trace:
        return self._core.trace

    def stats(self) -> dict[str, Any]:
        return {**self._core.stats(), "num_waiting": self.num_waiting}

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        self.raise_if_closed()
        return self._core.watch(since, whole)

    def call(self, function: Callable[[], Any]) -> Any:
        self.raise_if_closed()
        done = threading.Event()
        box: list[Any] = [None, EngineClosedError("the engine was closed; make a new one")]

        def answer(result: Any, error: BaseException | None) -> None:
            box[:] = [result, error]
            done.set()

        self.ingress.put(Call(function, answer))
        while not done.wait(0.2) and self._thread.is_alive():
            pass
        if box[1] is not None:
            self.raise_if_closed()
            raise box[1]
        return box[0]

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        return int(self.call(lambda: checkpoint.save(self.loop, self.runner, path)))

    def reset_prefix_cache(self) -> None:
        self.call(self._core.reset_prefix_cache)
        self._core.settle_file()

    def delete_kv(self, tag: bytes) -> int:
        count = int(self.call(lambda: self._core.delete_kv(tag)))
        self._core.settle_file()
        return count

    def restore(self, path: str | os.PathLike[str], make: MakeHandle) -> list[Handle]:
        def adopt(
            name: str, prompt: tuple[int, ...], sampling: SamplingParams, priority: int
        ) -> Handle:
            with self.admission_lock:
                number = self.new_number()
                handle = make(number, name, prompt, sampling)
                self.handles[number] = handle
            return handle

        return list(
            self.call(lambda: checkpoint.load(self.loop, self.runner, path, adopt, self.now_ns()))
        )

    def drain(self) -> None:
        self.raise_if_closed()
        self._draining = True

    def _close(self) -> None:
        if threading.current_thread() is self._thread:
            self._closed = True
            self.runner.close()
            return
        self.is_leaving = True
        with self._ending:
            if self._thread.is_alive():
                self.ingress.put(Call(self.loop.close))
                self._thread.join()
                gc.unfreeze()
            self._closed = True
            # after this, another client may take the model
            if _SERVED.get(self._model_key) is self:
                self.runner.close()
                self._unregister()
                del _SERVED[self._model_key]

    def disown(self) -> None:
        super().disown()
        _SERVED.pop(self._model_key, None)


_SERVED: dict[int, ThreadClient] = {}
"""Client that serves a model, by the id of the model's decoder. Single operations change the dict,
without a lock."""
