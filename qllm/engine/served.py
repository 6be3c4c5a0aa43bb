"""An engine behind the rings of its front ends, seen from its process.

    LoopEngine   the loop of the host (`qllm.engine.loop`)
    GpuEngine    the loop on the device (`qllm.engine.gpu`); the host watches

The setting `loop` selects the class. Both classes take the same records and give the same answers.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from qllm.config import EngineConfig
from qllm.engine import checkpoint
from qllm.engine.build import EngineCore, LoadedRunner
from qllm.engine.handover.arrivals import HandedIngress
from qllm.engine.handover.handover import Pull
from qllm.engine.memory import Claim
from qllm.errors import ConfigError, EngineClosedError, contained
from qllm.ingress import Call, Cancel
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.messages import Restored
from qllm.ingress.remote.nixl import Link, NixlIngress
from qllm.ingress.shm import Doorbell, FrontEndPort, RingSink, ShmIngress, front_end_of
from qllm.models.loader import LoadedModel
from qllm.record.trace import Event
from qllm.scheduler.rules import refuse_policy
from qllm.types import CAPABILITIES, RequestId, RequestStatus, SamplingParams

Broken = Callable[[int, str], None]
"""A callback with the number of a front end that was cut off, and the reason."""


class ProcessContext(NamedTuple):
    """Resources that an engine gets from its process."""

    control: ControlMemory
    doorbell: Doorbell
    """Doorbell that an idle engine sleeps on."""
    now_ns: Callable[[], int]
    broken: Broken
    profile: str | None
    """Profile of the links to front ends of other hosts; None allows none."""
    threads: int | None
    pull: Pull | None = None
    """Function that fetches KV of other engines."""
    weights: str | None = None
    """Digest of the model's weights, if it was computed."""
    claim: Claim | None = None
    """Claim on memory, from before the model was loaded."""


class ServedEngine(ABC):
    """One engine. One thread calls `serve`, then `end` and `flush`; any thread calls the rest.

    It has many methods because each answers one question of a front end, most in a line or two.

    Args:
        loaded: The model.
        policy: A policy object that passed `check`.
        config: Settings.
        context: Resources of the process.

    Raises:
        ConfigError: A setting does not apply, or a requirement is missing; the text names it.
        ModelError: The model cannot be run safely.
    """

    prepared: LoadedRunner

    @staticmethod
    @abstractmethod
    def check(policy: Any, config: EngineConfig) -> None:
        """Raise if the engine cannot run a policy. Called before a model is loaded.

        Raises:
            ConfigError: The policy cannot run; the text has the reason.
        """

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, context: ProcessContext
    ) -> None:
        self.ended = threading.Event()
        """Set once every request has ended and calls are no longer answered."""

    # -- the engine's thread

    @abstractmethod
    def serve(self) -> BaseException | None:
        """Serve until closed; return the error of a crash."""

    @abstractmethod
    def end(self, crash: BaseException | None) -> None:
        """End every open request. Used when the loop will not run again."""

    @abstractmethod
    def flush(self) -> bool:
        """Write records that found no room before; return True if some must still wait."""

    # -- front ends

    @abstractmethod
    def attach(self, block: FrontEndMemory, doorbell: Doorbell) -> None:
        """Queue one more front end of this machine, to be served soon."""

    def remote_memory(self, number: int, capacities: tuple[int, int, int, int]) -> Any:
        """Return memory for a front end behind a link (`qllm.engine.remote.RemoteMemory`).

        Raises:
            ConfigError: No place is left for one more front end.
        """
        return FrontEndMemory.create(number, capacities)

    def attach_over(self, block: Any, link: Link) -> None:
        """Queue one more front end, at the other end of a link, to be served soon.

        Args:
            block: Result of `remote_memory`.
            link: A connected link, which the engine closes.
        """
        raise ConfigError(f"loop={self.prepared.config.loop!r} has no front ends over links")

    @abstractmethod
    def leave(self, number: int) -> None:
        """Queue the release of the requests and the link of a front end that has left."""

    @abstractmethod
    def close(self) -> None:
        """Make the loop end every request with `cancelled` and stop serving, soon."""

    # -- questions of front ends

    @abstractmethod
    def post(self, function: Callable[[], None]) -> None:
        """Let the loop's thread call a function between two programs.

        The function must not raise.
        """

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop's thread and return its result."""
        done = threading.Event()
        box: list[Any] = [None, EngineClosedError("the engine was closed; make a new one")]

        def call() -> None:
            try:
                with contained():
                    box[:] = [function(), None]
            except Exception as error:  # noqa: BLE001 - raised again in the caller
                box[1] = error
            done.set()

        self.post(call)
        while not done.wait(0.2) and not self.ended.is_set():
            pass
        if box[1] is not None:
            raise box[1]
        return box[0]

    @abstractmethod
    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus | None]:
        """Return the status of each request; None for an unknown request."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the statistics of the run so far."""

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """Return timeline entries after number `since`; empty where the loop emits no events."""
        return {}

    def costs_ns(self) -> tuple[float, float, float] | None:
        """Return the costs of a prompt token, of a decode step of one row, and of a batched token.

        The costs are in nanoseconds. A batched token is one of a full step. None if unknown.
        """
        return None

    def events(self, since: int) -> list[Event]:
        """Return the events of the trace from an index on."""
        return self.prepared.trace.events[since:]

    def checkpoint(self, path: str) -> int:
        """Write every unfinished request to a file; return their number."""
        raise self._has_none("checkpoint")

    def reset_prefix_cache(self) -> None:
        """Delete all cached KV."""
        raise self._has_none("a prefix cache")

    def delete_kv(self, tag: bytes) -> int:
        """Delete the cached KV of an owner (16 bytes) or salt (32); return the number of pages."""
        raise self._has_none("a prefix cache")

    def restore(self, path: str, first: RequestId) -> list[Restored]:
        """Restore the requests of a checkpoint, with numbers from `first` on."""
        raise self._has_none("restore")

    @property
    def handed(self) -> HandedIngress:
        """The queue of requests that other engines migrated to this one.

        Raises:
            ConfigError: This engine does not migrate requests.
        """
        raise self._has_none("hand-over")

    def _has_none(self, what: str) -> ConfigError:
        loop = self.prepared.config.loop
        return ConfigError(f"{what} is not there with loop={loop!r}; make the engine without it")


class LoopEngine(ServedEngine):
    """An engine with the loop of the host."""

    @staticmethod
    def check(policy: Any, config: EngineConfig) -> None:
        """Accept every policy."""

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, context: ProcessContext
    ) -> None:
        super().__init__(loaded, policy, config, context)
        ingress = ShmIngress if context.profile is None else NixlIngress
        self._ingress = ingress(
            context.control, context.doorbell, context.now_ns, self._close, context.broken
        )
        self._now_ns = context.now_ns
        self._links: dict[int, Link] = {}
        self.prepared = self._core = EngineCore(
            loaded, policy, config,
            ingress=self._ingress, sink=RingSink(self._ingress.ports), now_ns=context.now_ns,
            threads=context.threads, decided=self._ingress.decided, pull=context.pull,
            weights=context.weights, claim=context.claim,
        )  # fmt: skip

    def serve(self) -> BaseException | None:
        return self._core.serve()

    def end(self, crash: BaseException | None) -> None:
        self._core.end_all(list(self._core.loop.live), crash)

    def flush(self) -> bool:
        return self._ingress.flush()

    def attach(self, block: FrontEndMemory, doorbell: Doorbell) -> None:
        self.post(partial(self._ingress.attach, FrontEndPort(block, doorbell)))

    def attach_over(self, block: FrontEndMemory, link: Link) -> None:
        assert isinstance(self._ingress, NixlIngress)
        block.segment.close_fd()
        self._links[block.number] = link
        self.post(partial(self._ingress.attach_over, block, link))

    def leave(self, number: int) -> None:
        def free() -> None:
            self._ingress.detach(number)
            held = [item.request_id for item in self._core.held]
            for request_id in (*self._core.loop.live, *held):
                if front_end_of(request_id) == number:
                    self._ingress.put(Cancel(request_id))
            if (link := self._links.pop(number, None)) is not None:
                link.close()

        self.post(free)

    def close(self) -> None:
        self.post(self._close)

    def _close(self) -> None:
        self._core.loop.close()

    def post(self, function: Callable[[], None]) -> None:
        self._ingress.put(Call(function))

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus | None]:
        found = map(self._core.loop.live.get, request_ids)
        return [None if live is None else live.request.status for live in found]

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def costs_ns(self) -> tuple[float, float, float] | None:
        table, seats = self._core.loop.scheduler.costs, self._core.config.max_num_seqs
        return table.prefill_token_ns, table.decode(1), table.decode(seats) / seats

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        return self._core.watch(since, whole)

    def checkpoint(self, path: str) -> int:
        core = self._core
        return int(self.on_loop(lambda: checkpoint.save(core.loop, core.runner, path)))

    def reset_prefix_cache(self) -> None:
        self.on_loop(self._core.reset_prefix_cache)
        self._core.settle_file()

    def delete_kv(self, tag: bytes) -> int:
        count = int(self.on_loop(lambda: self._core.delete_kv(tag)))
        self._core.settle_file()
        return count

    @property
    def handed(self) -> HandedIngress:
        return self._core.handed

    def restore(self, path: str, first: RequestId) -> list[Restored]:
        core, numbers = self._core, itertools.count(first)

        def adopt(
            name: str, prompt: tuple[int, ...], sampling: SamplingParams, priority: int
        ) -> Restored:
            return Restored(next(numbers), name, prompt, sampling, priority)

        restored: list[Restored] = self.on_loop(
            lambda: checkpoint.load(core.loop, core.runner, path, adopt, self._now_ns())
        )
        return restored


def check_compilable(policy: Any) -> None:
    """Raise if native decisions cannot be made for a policy.

    Raises:
        ConfigError: The policy has no native decisions, or the extension is missing; the text has
            the reason.
    """
    from qllm.device.native import load_native  # only native decisions need the extension
    from qllm.device.rank import rank_tree

    load_native()
    rank_tree(policy)
    refuse_policy(policy, CAPABILITIES)
