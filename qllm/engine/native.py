"""The engine with the native server: claimed, decided and published in C++, computed by the host.

Statistics and statuses are read from the server's memory, which the loop goes on to write
meanwhile: each number is whole, and they may be of two moments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qllm.config import EngineConfig
from qllm.device.server import NativeServer, address_of, sizes_of, statuses_in
from qllm.engine.build import LoadedRunner, crash_text
from qllm.engine.native_loop import NativeLoop
from qllm.engine.served import ProcessContext, ServedEngine, check_compilable
from qllm.errors import ConfigError
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.models.loader import LoadedModel
from qllm.types import RequestId, RequestStatus


class NativeEngine(ServedEngine):
    """The native server around the host's runner."""

    @staticmethod
    def check(policy: Any, config: EngineConfig) -> None:
        check_compilable(policy)

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, context: ProcessContext
    ) -> None:
        super().__init__(loaded, policy, config, context)
        self.prepared = prepared = LoadedRunner(loaded, policy, config, context.threads)
        runner = prepared.runner
        self._server = NativeServer(
            policy, runner.shape, runner.cuts, prepared.limits,
            control=address_of(context.control.words), max_total_tokens=prepared.max_total_tokens,
            **sizes_of(config),
        )  # fmt: skip
        self._broken = context.broken
        self._loop = NativeLoop(
            self._server, runner, context.control, context.doorbell, context.now_ns, context.broken
        )

    def serve(self) -> BaseException | None:
        return self.prepared.run(self._loop.serve)

    def end(self, crash: BaseException | None) -> None:
        if crash is not None:
            self._loop.give_up(crash_text(crash))

    def flush(self) -> bool:
        return self._loop.flush()

    def attach(self, block: FrontEndMemory, doorbell: Doorbell) -> None:
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
