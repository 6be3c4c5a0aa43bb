"""Builder of the loop on the device: memory of both sides, kernel, CUDA graph and watchdog.

The host makes everything at start, launches the graph, and then reads a few words now and then. The
host touches no request and no token.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from qllm.cuda.backend import CudaBackend
from qllm.device import serving
from qllm.device.graph import KernelCall, LoopApi, LoopGraph, Watch, serve
from qllm.device.loop import DeviceLoop
from qllm.device.rings import DeviceRings, check_device, ring_memory_of
from qllm.device.server import WHY, CutOff, attach
from qllm.errors import ConfigError, DeviceError
from qllm.ingress.layout import offset
from qllm.ingress.memory import ControlMemory, FrontEndMemory, Segment
from qllm.ingress.words import address_of
from qllm.policy import CostTable, RankPolicy
from qllm.scheduler.decision import Limits

TURN = "qllm_turn"
"""Name of the kernel of a turn, in `csrc/scheduler.cu`."""
CONTROL = -1
SERVER, STATE, LANES = range(3)
"""Indexes of the blocks, in the order of the addresses that a turn takes."""


class OnDevice:
    """Copies of the blocks of a loop in the device's memory, where a turn reads them fast.

    The blocks hold offsets rather than pointers, so copies work too. The host keeps its own blocks
    and reads parts of the device's on request. All copies go through page-locked memory that is
    made here. They use a stream of their own, with a higher priority than the loop's. They do not
    wait for the loop, and the loop does not wait for them. They need no kernel. One thread copies
    at a time.

    Args:
        loop: Loop with complete blocks.
        device: Device for the copies.
        staging: Function that makes page-locked memory (`LoopApi.staging`).
    """

    def __init__(
        self, loop: DeviceLoop, device: torch.device, staging: Callable[[int], torch.Tensor]
    ) -> None:
        self._lanes = loop.lanes
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(priority=-1) if device.type == "cuda" else None
        self._hosts = [
            block.memory for block in (loop.server.memory, loop.server.block, loop.lanes)
        ]
        self._copies = [torch.from_numpy(np.array(m)).to(device) for m in self._hosts]
        self.addresses: tuple[int, ...] = tuple(copy.data_ptr() for copy in self._copies)
        self._staging = staging(max(copy.nbytes for copy in self._copies))
        self._lock = threading.RLock()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the `with` block's device work next to the loop; wait for it at the end."""
        with self._lock:
            if self.stream is None:
                yield
                return
            with torch.cuda.stream(self.stream):
                yield
            self.stream.synchronize()

    def read(self, name: str) -> int:
        """Return a number of the device's LANES, also while the loop runs."""
        at = 8 * self._lanes.index(name)
        return int(self.snapshot(LANES, at, at + 8).view(np.int64)[0])

    def write(self, **numbers: int) -> None:
        """Change numbers of the device's LANES, also while the loop runs. Each change is atomic."""
        for name, value in numbers.items():
            at = 8 * self._lanes.index(name)
            self._send(LANES, at, np.array([value], np.int64).view(np.uint8))

    def snapshot(
        self, which: int, start: int = 0, end: int | None = None
    ) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return the present bytes [start, end) of a block (SERVER, STATE or LANES)."""
        with self._lock:
            found = self._copies[which].view(torch.uint8)[start:end]
            staged = self._staging[: len(found)]
            with self.beside():
                staged.copy_(found, non_blocking=True)
            return np.array(staged.numpy())

    def push(self, which: int, start: int, end: int) -> None:
        """Copy the host's bytes [start, end) of a block to the device's."""
        self._send(which, start, self._hosts[which].view(np.uint8)[start:end])

    def _send(self, which: int, start: int, data: "np.ndarray[Any, Any]") -> None:
        with self._lock:
            staged = self._staging[: len(data)]
            staged.copy_(torch.from_numpy(data))
            with self.beside():
                there = self._copies[which].view(torch.uint8)[start : start + len(data)]
                there.copy_(staged, non_blocking=True)


class DeviceEngine:
    """One loop on the device, and the front ends whose rings it reads.

    Args:
        backend: Backend with captured stages.
        policy: A `RankPolicy`.
        limits: Settings that decisions depend on.
        control: Control block of the engine.
        front_ends: Memory of the first front ends; `attach` serves more. Memory of this machine is
            page-locked. A `DeviceRings` has its place from its construction.
        now_ns: The engine's clock.
        max_total_tokens: Tokens of the longest request, prompt and answer.
        api: Calls that build and launch graphs; None is CUDA's.
        function: Kernel of a turn; None compiles it for the policy and this device.
        look: Function that is called repeatedly while a launch runs.
        costs: Costs of steps, which the loop does not measure; None gives the policy none.
        settings: Further arguments of `DeviceLoop`.

    Raises:
        ConfigError: There are no captured stages, or the policy, the settings or the device do not
            fit the loop. The message contains the reason.
        ModelError: A stage holds a node that the body of a conditional node may not.
    """

    def __init__(
        self,
        backend: CudaBackend,
        policy: RankPolicy,
        limits: Limits,
        *,
        control: ControlMemory,
        front_ends: Sequence[FrontEndMemory | DeviceRings],
        now_ns: Callable[[], int],
        max_total_tokens: int,
        api: LoopApi | None = None,
        function: Any = None,
        look: Callable[[], None] = lambda: None,
        costs: CostTable | None = None,
        **settings: Any,
    ) -> None:
        if backend.stages is None:
            raise ConfigError(
                f"the loop runs captured stages, and there are none: {backend.not_captured}"
            )
        device = backend.device
        self.home = ring_memory_of(device, None)
        """Memory of the control block and of the rings of this machine's front ends."""
        self._device, self._look = device, look
        self._pinned: dict[int, Any] = {}
        """Page-locked memory per front end of this machine. The control block's memory is at
        CONTROL."""
        self._left: list[tuple[Any, Any]] = []
        """Page-locked memory of front ends that are gone, and their blocks."""
        self._blocks: dict[int, FrontEndMemory | DeviceRings] = {}
        """Blocks of front ends. Their memory must exist while the device may write it."""
        self._control = control
        if api is None or function is None:
            api, function = _cuda_api(policy, device)
        self._api = api
        self._pin(CONTROL, control.segment)
        settings.setdefault("max_front_ends", max(1, len(front_ends)))
        self.loop = DeviceLoop(
            policy, backend.stages, backend.pages, backend.shape, limits,
            control=address_of(control.words), max_total_tokens=max_total_tokens, now_ns=now_ns,
            **settings,
        )  # fmt: skip
        if costs is not None:
            self.loop.server.costs = costs
        for block in front_ends:
            self._take_in(block)
        self.memory = OnDevice(self.loop, device, api.staging)
        captured = [backend.stages.captured[key] for key in self.loop.keys]
        self._graph = LoopGraph(api, KernelCall(function, self.memory.addresses), captured)

    # -- front ends, between two launches

    def serves(self, number: int) -> bool:
        """Return True if a front end is attached."""
        return number in dict(self.loop.server.indexes())

    def _take_in(self, block: FrontEndMemory | DeviceRings) -> None:
        if isinstance(block, DeviceRings):
            check_device(block, self._device)
            block.attach_to(self.loop.server)
        else:
            attach(self.loop.server, block)
        self._blocks[block.number] = block
        if isinstance(block.memory, Segment):
            try:
                self._pin(block.number, block.memory)
            except DeviceError:
                del self._blocks[block.number]
                self.loop.server.forget(block.number)
                raise

    def _pin(self, number: int, segment: Segment) -> None:
        self._pinned[number] = self._api.pin(segment.bytes)

    def attach(self, block: FrontEndMemory | DeviceRings) -> None:
        """Serve one more front end.

        Raises:
            ConfigError: The server has no room for the front end (see `NativeServer.attach`).
            DeviceError: The front end's memory cannot be page-locked.
        """
        self._take_in(block)
        server = self.loop.server
        at = server.memory.span("front_ends", server.index_of(block.number))
        self.memory.push(SERVER, *at)
        self._push_word("bell_seen")
        self._push_word("num_silent")

    def _push_word(self, name: str) -> None:
        at = 8 * self.loop.server.memory.index(name)
        self.memory.push(SERVER, at, at + 8)

    def detach(self, number: int) -> None:
        """Let the next turns end the requests of a front end that left; `gone` then reports it."""
        server = self.loop.server
        index = server.index_of(number)
        server.memory.array("front_ends")["state"][index] = serving.LEAVING
        start, _ = server.memory.span("front_ends", index)
        at = start + offset(serving.FRONT_END, "state")
        self.memory.push(SERVER, at, at + 4)

    def gone(self) -> list[CutOff]:
        """Return the front ends that the device has detached since the last call, with reasons.

        The memory of these front ends stays page-locked until `unpin`.
        """
        found = []
        block = self.loop.server.memory
        num = len(block.array("front_ends"))
        start, end = block.span("front_ends", 0)[0], block.span("front_ends", num - 1)[1]
        ends = self.memory.snapshot(SERVER, start, end).view(serving.FRONT_END)
        for number, index in self.loop.server.indexes():
            if ends["state"][index] == serving.DETACHED:
                self.loop.server.forget(number)
                ours, pinned = self._blocks.pop(number), self._pinned.pop(number, None)
                if pinned is not None:
                    self._left.append((pinned, ours))
                found.append(CutOff(number, WHY[int(ends["why"][index])]))
        if found:
            self._push_word("num_silent")
        return found

    def unpin(self) -> None:
        """Unpin the memory of front ends that are gone. No loop may run, as CUDA would wait."""
        while self._left:
            pinned, _ = self._left.pop()
            pinned.close()

    # -- the loop

    def pause(self) -> None:
        """End the running launch after its present stage. `serve` then launches again."""
        self.memory.write(pause=1)

    def serve(self, hang_s: float = 10.0, between: Callable[[], None] = lambda: None) -> int:
        """Serve until a front end asks to stop; return the number of launches.

        Args:
            hang_s: Seconds without a turn that count as a hang.
            between: Function that is called before each launch, while nothing runs.

        Raises:
            DeviceError: A fault or a hang (see `qllm.device.graph.serve`).
        """

        def prepare() -> None:
            between()
            self.memory.write(**self.loop.words_of_launch())
            self.memory.write(launch_ns=self.loop.launch_ns())

        watch = Watch(
            prepare,
            lambda: self.memory.read("num_turns"),
            lambda: bool(self.memory.read("stopped")),
            lambda: bool(self.memory.read("goes_on")),
            self._look,
        )
        return serve(self._graph, watch, hang_s=hang_s)

    def close(self) -> None:
        """Unpin all memory."""
        self.unpin()
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()


def _cuda_api(policy: RankPolicy, device: torch.device) -> tuple[LoopApi, Any]:
    from qllm.device.cubins import kernel_of
    from qllm.device.graph_api import CudaLoopApi

    api = CudaLoopApi()
    return api, api.load(kernel_of(policy, torch.cuda.get_device_capability(device)), TURN)
