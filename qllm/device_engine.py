"""The loop on the device, put together: memory of both sides, the kernel, the graph, the watch.

The host makes everything at start, launches the graph, and then reads a few words now and then.
It touches no request and no token. Never run on a GPU (docs/gpu-status.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qllm.cuda.homes import Pinned
from qllm.cuda.loop import KernelCall, LoopApi, LoopGraph, SelfLaunching, Watch, serve
from qllm.cuda.runner import CudaRunner
from qllm.decision import Limits
from qllm.device.loop import DeviceLoop
from qllm.device_rings import DeviceBlock, check_device, home_of
from qllm.errors import ConfigError
from qllm.ingress.memory import ControlBlock, FrontEndBlock, Segment
from qllm.native_loop import address_of, attach
from qllm.policy import RankPolicy

TURN = "qllm_turn"
"""The kernel of a turn, in `kernels/csrc/scheduler.cu`."""
HOW = ("conditional", "device-launch")
"""Ways to the next stage: the SWITCH of one graph, or a turn that launches a stage and itself."""
FROM_CAPABILITY = (9, 0)
"""Of a device that launches graphs; below, others have seen such launches fail silently."""


class OnDevice:
    """Copies of the blocks of a loop in the device's memory, where a turn reads them fast.

    The blocks hold offsets rather than pointers, so a copy is as good. The host keeps its own and
    sees of the device's only the words it asks for.

    Args:
        loop: Its blocks are complete: front ends are attached.
        device: Where the copies go.
    """

    def __init__(self, loop: DeviceLoop, device: torch.device) -> None:
        self._lanes = loop.lanes
        self._on_cuda = device.type == "cuda"
        cuda: Any = torch.cuda
        self._stream = cuda.Stream() if self._on_cuda else None
        memories = [block.memory for block in (loop.server.memory, loop.server.block, loop.lanes)]
        self._copies = [torch.from_numpy(np.array(m)).to(device) for m in memories]
        self.addresses: tuple[int, ...] = tuple(copy.data_ptr() for copy in self._copies)
        num = self._lanes.num_cells
        self._words = torch.zeros(num, dtype=torch.int64, pin_memory=self._on_cuda)

    @property
    def _head(self) -> Tensor:
        return self._copies[-1][: len(self._words)]

    def read(self, name: str) -> int:
        """A number of the device's LANES, also while the loop runs."""
        if self._stream is None:
            self._words.copy_(self._head)
        else:
            with torch.cuda.stream(self._stream):  # a stream of its own: it waits for nothing
                self._words.copy_(self._head, non_blocking=True)
            self._stream.synchronize()
        return int(self._words[self._lanes.index(name)])

    def write(self, **numbers: int) -> None:
        """Change numbers of the device's LANES, between two launches."""
        for name, value in numbers.items():
            self._head[self._lanes.index(name)] = value
        if self._on_cuda:
            torch.cuda.synchronize()


class DeviceEngine:
    """One loop on the device, and the front ends whose rings it reads.

    Args:
        runner: With captured stages.
        policy: A `RankPolicy`.
        limits: Settings.
        control: The engine's control block.
        front_ends: Their memory; all of them from the start. Those of this machine are page-locked
            here; where a `DeviceBlock` lies was chosen when it was made.
        now_ns: The engine's clock.
        max_total_tokens: Longest request, prompt and answer.
        api: Builds and launches graphs; None is CUDA's.
        function: The kernel of a turn; None is compiled for the policy and this device.
        how: One of HOW.
        turns: Most turns of one launch.
        settings: More of `DeviceLoop`.

    Raises:
        ConfigError: There are no captured stages; or the policy, the settings or the device are
            not fit for it; says why.
        ModelError: A stage holds what it may not under `how`; says which.
    """

    def __init__(
        self,
        runner: CudaRunner,
        policy: RankPolicy,
        limits: Limits,
        *,
        control: ControlBlock,
        front_ends: Sequence[FrontEndBlock | DeviceBlock],
        now_ns: Callable[[], int],
        max_total_tokens: int,
        api: LoopApi | None = None,
        function: Any = None,
        how: str = "conditional",
        **settings: Any,
    ) -> None:
        if runner.stages is None:
            raise ConfigError(
                f"the loop runs captured stages, and there are none: {runner.not_captured}"
            )
        device = runner.parts.lm_head.weight.device
        _check_how(how, device)
        for block in front_ends:
            if isinstance(block, DeviceBlock):
                check_device(block, device)
        self.home = home_of(device, None)
        """Of the control block and of the front ends of this machine."""
        self._pinned: list[Pinned] = []
        if device.type == "cuda":
            memories = [control.segment, *(block.memory for block in front_ends)]
            self._pin([memory for memory in memories if isinstance(memory, Segment)])
        self.loop = DeviceLoop(
            policy, runner.stages, runner.pages, runner.shape, limits,
            control=address_of(control.words), max_total_tokens=max_total_tokens, now_ns=now_ns,
            max_front_ends=max(1, len(front_ends)), **settings,
        )  # fmt: skip
        for block in front_ends:
            if isinstance(block, DeviceBlock):
                block.attach_to(self.loop.server)
            else:
                attach(self.loop.server, block)
        self.memory = OnDevice(self.loop, device)
        if api is None or function is None:
            api, function = _of_cuda(policy, device, how)
        captured = [runner.stages.captured[key] for key in self.loop.keys]
        turn = KernelCall(function, self.memory.addresses)
        self._graph = (
            LoopGraph(api, turn, captured)
            if how == "conditional"
            else SelfLaunching(api, turn, captured, self._takes_more)
        )

    def _takes_more(self) -> bool:
        read = self.memory.read
        return not read("stopped") and read("turns_left") > 0

    def _pin(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._pinned.append(Pinned(address_of(segment.words), len(segment.bytes)))

    def serve(self, hang_s: float = 10.0) -> int:
        """Serve until a front end asks to stop; return how many launches it took.

        Raises:
            DeviceError: See `qllm.cuda.loop.serve`.
        """
        watch = Watch(
            lambda: self.memory.write(**self.loop.words_of_launch()),
            lambda: self.memory.read("num_turns"),
            lambda: bool(self.memory.read("stopped")),
        )
        return serve(self._graph, watch, hang_s=hang_s)

    def close(self) -> None:
        """Give the pinned memory back."""
        for pinned in self._pinned:
            pinned.close()
        self._pinned.clear()


def _check_how(how: str, device: torch.device) -> None:
    if how not in HOW:
        raise ConfigError(f"how={how!r} is unknown; use {' or '.join(HOW)}")
    if how == "conditional" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FROM_CAPABILITY:
        raise ConfigError(
            "how='device-launch' needs a device of compute capability {}.{} or more, and this one "
            "has {}.{}; use 'conditional'".format(*FROM_CAPABILITY, *found)
        )


def _of_cuda(policy: RankPolicy, device: torch.device, how: str) -> tuple[LoopApi, Any]:
    from qllm.cubins import kernel_of
    from qllm.cuda.loop_api import CudaLoopApi

    api = CudaLoopApi()
    major, minor = torch.cuda.get_device_capability(device)
    cubin = kernel_of(policy, (major, minor), device_launch=how == "device-launch")
    return api, api.load(cubin, TURN)
