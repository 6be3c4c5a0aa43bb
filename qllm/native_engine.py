"""The engine with the native server: claimed, decided and published in C++, computed by the host.

Statistics and statuses are read from the server's memory, which the loop goes on to write
meanwhile: each number is whole, and they may be of two moments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from qllm.config import EngineConfig
from qllm.core import Prepared, crash_text
from qllm.device.server import NativeServer
from qllm.errors import ConfigError
from qllm.ingress.memory import FrontEndBlock
from qllm.ingress.shm import Doorbell
from qllm.models.loader import LoadedModel
from qllm.native_loop import NativeLoop, address_of
from qllm.ring_engine import RingEngine, Seat, check_compilable
from qllm.types import RequestId, RequestStatus

MAX_FRONT_ENDS = 16
MIN_CAPACITY = 256
"""Requests that there is room for at least, in steps or waiting; further ones stay in the rings."""


def sizes_of(config: EngineConfig) -> dict[str, Any]:
    """How many requests and front ends a server has room for."""
    capacity = max(MIN_CAPACITY, 4 * config.max_num_seqs)
    return {"capacity": capacity, "max_front_ends": MAX_FRONT_ENDS}


class NativeEngine(RingEngine):
    """The native server around the host's runner."""

    @staticmethod
    def check(policy: Any, config: EngineConfig) -> None:
        check_compilable(policy)

    def __init__(self, loaded: LoadedModel, policy: Any, config: EngineConfig, seat: Seat) -> None:
        super().__init__(loaded, policy, config, seat)
        self.prepared = prepared = Prepared(loaded, policy, config, seat.threads)
        runner = prepared.runner
        self._server = NativeServer(
            policy, runner.shape, runner.cuts, prepared.limits,
            control=address_of(seat.control.words), max_total_tokens=prepared.max_total_tokens,
            **sizes_of(config),
        )  # fmt: skip
        self._broken = seat.broken
        self._loop = NativeLoop(
            self._server, runner, seat.control, seat.doorbell, seat.now_ns, seat.broken
        )

    def serve(self) -> BaseException | None:
        return self.prepared.run(self._loop.serve)

    def end(self, crash: BaseException | None) -> None:
        if crash is not None:
            self._loop.give_up(crash_text(crash))

    def flush(self) -> bool:
        return self._loop.flush()

    def attach(self, block: FrontEndBlock, doorbell: Doorbell) -> None:
        def attach() -> None:
            try:
                self._loop.attach(block, doorbell)
            except ConfigError as error:
                self._broken(block.number, str(error))

        self.post(attach)

    def leave(self, number: int) -> None:
        self.post(partial(self._loop.detach, number))

    def close(self) -> None:
        self.post(self._loop.close)

    def post(self, function: Callable[[], None]) -> None:
        self._loop.post(function)

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus | None]:
        found = statuses_in(self._server.block.array("requests"))
        return [found.get(request_id) for request_id in request_ids]

    def stats(self) -> dict[str, Any]:
        block = self._server.block
        return {
            **self.prepared.stats_of(self._loop, self._server),
            "kv_blocks_used": self.prepared.config.num_blocks - block.get("num_free"),
            "num_live": block.get("num_live"),
        }


def statuses_in(requests: "np.ndarray[Any, np.dtype[Any]]") -> dict[RequestId, RequestStatus]:
    """Where the live requests of a scheduler's state are (`layout.REQUEST`)."""
    now = requests[np.flatnonzero(requests["live"])]
    found = {}
    for request_id, frame, blocks in zip(
        now["id"].tolist(), now["frame"].tolist(), now["num_blocks"].tolist(), strict=True
    ):
        holds = RequestStatus.RUNNING if blocks else RequestStatus.WAITING
        found[request_id] = RequestStatus.PARKED if frame >= 0 else holds
    return found
