"""The engine whose loop is on the device: this process launches the loop and reports its state.

Front ends connect and leave between two launches. A word in the device's memory ends a launch.
Statistics are read from copies of the device's blocks, made while the device works.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qllm.config import EngineConfig
from qllm.cuda.backend import CudaBackend
from qllm.cuda.calls import needs_bindings
from qllm.device import lanes, layout
from qllm.device.launcher import LANES, STATE, DeviceEngine
from qllm.device.ring_memory import RingMemory
from qllm.device.rings import DeviceRings, ring_memory_of
from qllm.device.server import sizes_of, statuses_in
from qllm.engine.build import LoadedRunner, time_stats
from qllm.engine.calibrate import measure_costs
from qllm.engine.served import ProcessContext, ServedEngine, check_compilable
from qllm.errors import QllmError
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.remote.nixl import Link
from qllm.ingress.remote.pull import LinkDriver
from qllm.ingress.shm import Doorbell
from qllm.models.loader import LoadedModel
from qllm.types import NS_PER_MS, RequestId, RequestStatus

LOOK_S = 0.1
"""Seconds between two checks for front ends that the device has cut off."""
POLICY_ERRORS = {
    layout.EMPTY_PLAN: "planned nothing although requests wait",
    layout.STALLS: "has waited for too long",
    layout.NO_KV: "planned more than the KV holds",
}


class GpuEngine(ServedEngine):
    """An engine with the loop on the device."""

    @staticmethod
    def check(policy: Any, config: EngineConfig) -> None:
        needs_bindings("loop='conditional'")
        check_compilable(policy)

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, context: ProcessContext
    ) -> None:
        super().__init__(loaded, policy, config, context)
        self.prepared = prepared = LoadedRunner(
            loaded, policy, config, context.threads, context.claim
        )
        config = prepared.config
        runner, backend = prepared.runner, prepared.runner.backend
        assert isinstance(backend, CudaBackend)  # `EngineConfig.check_place` checked the device
        self._context, self._calls = context, deque[Callable[[], None]]()
        self._leaving: set[int] = set()
        self._far: dict[int, DeviceRings] = {}
        self._looked_s = 0.0
        self._device = runner.parts.lm_head.weight.device
        self._links: LinkDriver | None = None
        self._remote_memory: RingMemory | None = None
        if context.profile is not None:
            self._remote_memory = ring_memory_of(self._device, context.profile)
            self._links = LinkDriver(context.profile, context.broken)
        costs = measure_costs(runner, prepared.limits, time.perf_counter_ns)
        self._engine = DeviceEngine(
            backend, policy, prepared.limits,
            control=context.control, front_ends=(), now_ns=context.now_ns, costs=costs,
            max_total_tokens=prepared.max_total_tokens, look=self._look, **sizes_of(config),
        )  # fmt: skip
        with self._engine.memory.beside():
            _ = runner.expert_bytes  # its first use takes memory from the driver

    # -- the engine's thread

    def serve(self) -> BaseException | None:
        return self.prepared.run(lambda: self._engine.serve(between=self._between))

    def _between(self) -> None:
        self._follow()
        while self._calls:
            self._calls.popleft()()

    def _look(self) -> None:
        if self._calls:
            self._engine.pause()
        if time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            self._follow()

    def _follow(self) -> None:
        """Find the front ends that the device has cut off."""
        for number, why in self._engine.gone():
            self.post(self._engine.unpin)
            self._forget(number)
            if number in self._leaving:
                self._leaving.remove(number)
            else:
                self._context.broken(number, why)

    def _forget(self, number: int) -> None:
        """Close the link of a front end at once. Its memory is freed between two launches."""
        if self._links is not None:
            self._links.remove(number)
        if (block := self._far.pop(number, None)) is not None:
            self.post(block.close)

    def end(self, crash: BaseException | None) -> None:
        """Do nothing: the device has ended all requests, or its context is lost."""

    def flush(self) -> bool:
        return False

    # -- front ends

    def attach(self, block: FrontEndMemory, doorbell: Doorbell) -> None:
        def attach() -> None:
            doorbell.close()  # the device rings no doorbell: its front ends poll
            try:
                self._engine.attach(block)
            except QllmError as error:
                self._context.broken(block.number, str(error))

        self.post(attach)

    def remote_memory(self, number: int, capacities: tuple[int, int, int, int]) -> DeviceRings:
        home = self._remote_memory
        assert home is not None
        rings: DeviceRings = self.on_loop(
            lambda: DeviceRings(number, capacities, home, self._device)
        )  # between two launches: CUDA allocates memory only while no loop runs
        return rings

    def attach_over(self, block: DeviceRings, link: Link) -> None:
        def attach() -> None:
            self._far[block.number] = block
            try:
                self._engine.attach(block)
            except QllmError as error:
                self._context.broken(block.number, str(error))

        assert self._links is not None
        self._links.add(block.number, link)
        self.post(attach)

    def leave(self, number: int) -> None:
        def detach() -> None:
            if self._engine.serves(number):
                self._leaving.add(number)
                self._engine.detach(number)
            else:
                self._forget(number)

        self.post(detach)

    def close(self) -> None:
        self._context.control.stop = True

    def post(self, function: Callable[[], None]) -> None:
        self._calls.append(function)

    # -- questions of front ends

    def statuses(self, request_ids: Sequence[RequestId]) -> list[RequestStatus | None]:
        block = self._engine.loop.server.block
        requests = block.view("requests", self._engine.memory.snapshot(STATE))
        found = statuses_in(requests)
        return [found.get(request_id) for request_id in request_ids]

    def stats(self) -> dict[str, Any]:
        memory, loop = self._engine.memory, self._engine.loop
        copy, config = memory.snapshot(LANES), self.prepared.config
        now, latest = loop.lanes.head(copy), loop.lanes.view("latencies", copy)
        num, most = now["num_preemptions"], lanes.MOST_LATENCIES
        latencies = np.roll(latest, -(num % most))[-min(num, most) :] if num else latest[:0]
        state = memory.snapshot(STATE)
        head, errors = loop.server.block.head(state), []
        if now["num_policy_errors"]:
            what = POLICY_ERRORS.get(now["policy_error"], "broke the scheduler's state")
            errors = [f"the policy {what} ({now['num_policy_errors']} times)"]
        with memory.beside():
            expert_bytes = self.prepared.runner.expert_bytes
        return {
            "longest_segment_ms": now["longest_ns"] / NS_PER_MS,
            "longest_segment_kind": "STAGE" if now["longest_ns"] else None,
            "max_segment_ms": config.max_segment_ms,
            "preempt_latencies_ms": [int(ns) / NS_PER_MS for ns in latencies],
            "expert_bytes": expert_bytes,
            "num_preemptions": num,
            "kv_blocks_used": config.num_blocks - head["num_free"],
            "kv_blocks": config.num_blocks,
            "policy_errors": errors,
            "longest_plan_ms": 0.0,
            "num_live": head["num_live"],
            "memory": self.prepared.memory,
            "time": time_stats(config, head),
            "frames": self._frames(state, head),
        }

    def _frames(self, state: Any, head: dict[str, int]) -> list[dict[str, Any]]:
        """Return the running and the parked frames, from a copy of the scheduler's state."""
        block, shape = self._engine.loop.server.block, self.prepared.info.shape
        frames, rows = block.view("frames", state), block.view("frame_rows", state)
        parked = block.view("parked", state)[: head["num_parked"]].tolist()
        running = [] if head["running"] < 0 else [head["running"]]
        hidden = self.prepared.runner.parts.lm_head.weight
        found = []
        for slot in (*running, *parked):
            frame, seats = frames[slot], block.sizes["seats"]
            its = rows[slot * seats : slot * seats + int(frame["num_rows"])]
            tokens = int((its["hi"] - its["lo"]).sum())
            found.append(
                {
                    "state": "running" if slot in running else "parked",
                    "layer": int(frame["layer"]),
                    "num_layers": shape.num_layers,
                    "op": "STAGE",
                    "units_done": 0,
                    "rows": len(its),
                    "tokens": tokens,
                    "bytes": tokens * hidden.shape[1] * hidden.element_size(),
                }
            )
        return found
