"""An engine behind the rings of its front ends, as its process sees it.

    LoopEngine   the loop of the host (`qllm.engine.loop`)
    GpuEngine    the loop on the device (`qllm.engine.gpu`); the host watches

Which of them serves is the setting `loop`. Both take the same records and give the same answers.
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
"""Called with the number of a front end that was cut off, and why."""


class ProcessContext(NamedTuple):
    """What an engine needs of its process."""

    control: ControlMemory
    doorbell: Doorbell
    """What an idle engine sleeps on."""
    now_ns: Callable[[], int]
    broken: Broken
    profile: str | None
    """Profile of the links to front ends of other hosts; None if none may come."""
    threads: int | None
    pull: Pull | None = None
    """Fetches KV of other engines."""
    weights: str | None = None
    """Digest of the model's weights, if it was taken."""


class ServedEngine(ABC):
    """One engine. One thread calls `serve`, then `end` and `flush`; all else is for any thread.

    It has many methods because each is one question of a front end, most a line or two.

    Args:
        loaded: The model.
        policy: A policy object; `check` has seen it.
        config: Settings.
        context: Its place.

    Raises:
        ConfigError: A setting that is not for it, or something it needs is missing; says what.
        ModelError: The model cannot be driven safely.
    """

    prepared: LoadedRunner

    @staticmethod
    @abstractmethod
    def check(policy: Any, config: EngineConfig) -> None:
        """Return if it can run a policy: asked before a model is loaded.

        Raises:
            ConfigError: It cannot; says why.
        """

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, context: ProcessContext
    ) -> None:
        self.ended = threading.Event()
        """Set once every request has ended and no call is answered any more."""

    # -- the engine's thread

    @abstractmethod
    def serve(self) -> BaseException | None:
        """Serve until closed; return what the loop crashed with."""

    @abstractmethod
    def end(self, crash: BaseException | None) -> None:
        """End every request that is open: the loop will not come back."""

    @abstractmethod
    def flush(self) -> bool:
        """Write what found no room before; whether some of it must wait."""

    # -- front ends

    @abstractmethod
    def attach(self, block: FrontEndMemory, doorbell: Doorbell) -> None:
        """Serve one more front end of this machine, from soon on."""

    def remote_memory(self, number: int, capacities: tuple[int, int, int, int]) -> Any:
        """The memory of one more front end behind a link (`qllm.engine.remote.RemoteMemory`).

        Raises:
            ConfigError: There is no place for it.
        """
        return FrontEndMemory.create(number, capacities)

    def attach_over(self, block: Any, link: Link) -> None:
        """Serve one more front end, at the other end of a link, from soon on.

        Args:
            block: What `remote_memory` made.
            link: Connected; the engine closes it.
        """
        raise ConfigError(f"loop={self.prepared.config.loop!r} has no front ends over links")

    @abstractmethod
    def leave(self, number: int) -> None:
        """A front end has left: free its requests, soon, and its link."""

    @abstractmethod
    def close(self) -> None:
        """End every request with `cancelled` and stop serving, soon."""

    # -- what front ends may ask

    @abstractmethod
    def post(self, function: Callable[[], None]) -> None:
        """Have the loop's thread call something between two programs; it must not raise."""

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call something on the loop's thread and return its result."""
        done = threading.Event()
        box: list[Any] = [None, EngineClosedError("the engine was closed; make a new one")]

        def call() -> None:
            try:
                with contained():
                    box[:] = [function(), None]
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
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
        """Where requests are; None of those that are not known."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers of the run so far."""

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """What is new since an entry of the timeline; empty where the loop emits no events."""
        return {}

    def costs_ns(self) -> tuple[float, float, float] | None:
        """What a token of a prompt, a decode step of one row, and a token of a full one take.

        In nanoseconds; None if it is unknown.
        """
        return None

    def events(self, since: int) -> list[Event]:
        """Events of the trace from an index on."""
        return self.prepared.trace.events[since:]

    def checkpoint(self, path: str) -> int:
        """Write every unfinished request to a file; return how many."""
        raise self._has_none("checkpoint")

    def reset_prefix_cache(self) -> None:
        """Forget all kept KV."""
        raise self._has_none("a prefix cache")

    def delete_kv(self, tag: bytes) -> int:
        """Delete the kept KV of an owner (16 bytes) or a salt of it (32); the number of pages."""
        raise self._has_none("a prefix cache")

    def restore(self, path: str, first: RequestId) -> list[Restored]:
        """Take over the requests of a checkpoint, which get the numbers from `first` on."""
        raise self._has_none("restore")

    @property
    def handed(self) -> HandedIngress:
        """Where requests come from that another engine handed over; knows what hands over here.

        Raises:
            ConfigError: This engine does neither.
        """
        raise self._has_none("hand-over")

    def _has_none(self, what: str) -> ConfigError:
        loop = self.prepared.config.loop
        return ConfigError(f"{what} is not there with loop={loop!r}; make the engine without it")


class LoopEngine(ServedEngine):
    """The loop of the host."""

    @staticmethod
    def check(policy: Any, config: EngineConfig) -> None:
        """Every policy runs here."""

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
            weights=context.weights,
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
    """Return if native decisions can be made for a policy.

    Raises:
        ConfigError: They cannot, or the extension is missing; says why.
    """
    from qllm.device.native import load_native  # only native decisions need the extension
    from qllm.device.rank import rank_tree

    load_native()
    rank_tree(policy)
    refuse_policy(policy, CAPABILITIES)
