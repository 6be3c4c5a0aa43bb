"""A request log in front of engines without processes."""

import time
from collections.abc import Callable
from typing import Any

from qllm import SamplingParams
from qllm.config import EngineConfig
from qllm.frontend.handle import Handle
from qllm.frontend.request_log import RequestLog
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission
from qllm.ingress.front_end import CANCEL_BYTES, FrontEndRings
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.ring import record_bytes
from qllm.types import NS_PER_MS, RequestStatus, Sampled, Slo
from tests.support.sizes import SIZES

LS, BE = 0, 10

WHY = "the engine process was killed"


class Takes:
    """Takes what is replayed on it, or raises."""

    def __init__(self, log: RequestLog) -> None:
        self.log = log
        self.taken: list[SavedRequest] = []
        self.raises: Exception | None = None
        self.before: Callable[[], None] = lambda: None

    def replay(self, entry: SavedRequest) -> None:
        self.before()
        if self.raises is not None:
            raise self.raises
        self.taken.append(entry)

    def die(self) -> None:
        taken, self.taken = self.taken, []
        for entry in taken:
            self.log.take(entry, time.monotonic_ns(), WHY)


class World:
    def __init__(self, max_replays: int = 3) -> None:
        self.num_replayed, self.zero_ns = 0, time.monotonic_ns()
        self.log = RequestLog(max_replays, self.count)
        self.engine = Takes(self.log)

    def count(self) -> None:
        self.num_replayed += 1

    def entry(
        self, number: int, priority: int = LS, num_done: int = 2, **changes: Any
    ) -> SavedRequest:
        handle = Handle(
            number=number, request_id=f"r{number}", prompt_token_ids=(1, 2, 3), detokenizer=None,
            cancel=lambda _: None, status=lambda _: RequestStatus.RUNNING,
            update=lambda _: None,
        )  # fmt: skip
        values: dict[str, Any] = {
            "request_id": number, "name": handle.request_id, "priority": priority,
            "token_ids": (1, 2, 3), "sampling": SamplingParams(seed=1),
            "stop_ids": frozenset({50}), "max_tokens": 5, "slo": Slo(),
            "arrival_ns": number * NS_PER_MS, "deadline_ns": None,
        }  # fmt: skip
        item = Submission(**{**values, **changes})
        entry = SavedRequest(handle, item.arrival_ns, priority, item)
        self.log.keep(handle)
        for n in range(num_done):
            self.token(entry, 60 + n)
        return entry

    def token(self, entry: SavedRequest, token_id: int = 7) -> None:
        entry.token_ns.append((10 + len(entry.token_ns)) * NS_PER_MS)
        entry.handle.on_token(Sampled(0, token_id))
        self.log.heard_of(entry)

    def die(self, *entries: SavedRequest) -> None:
        """The first engine dies."""
        for entry in entries:
            self.log.take(entry, time.monotonic_ns() - self.zero_ns, WHY)

    def go_on(self) -> list[str]:
        self.log.go_on(self.engine.replay)
        return self.names()

    def names(self) -> list[str]:
        return [entry.handle.request_id for entry in self.engine.taken]


class SilentRings(FrontEndRings):
    """The rings of an engine that takes nothing."""

    def _ring(self) -> None:
        pass


class SilentClient(RingClient):
    """The front end of an engine that does nothing."""

    failure = None
    draining = False
    config = EngineConfig(**SIZES)

    def __init__(self) -> None:
        block = FrontEndMemory.create(0, (1 << 20, 1 << 20, CANCEL_BYTES, 1 << 16))
        super().__init__(SilentRings(block))

    def now_ns(self) -> int:
        return time.monotonic_ns()

    @property
    def num_updates(self) -> int:
        return self._front_end.cancels.num_used // record_bytes(16)

    def _none(self, *_: Any) -> Any:
        raise NotImplementedError

    _close = _ask = call = checkpoint = costs_ns = delete_kv = _none
    drain = reset_prefix_cache = restore = trace = _none  # type: ignore[assignment]
