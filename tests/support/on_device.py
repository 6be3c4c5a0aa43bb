"""The native scheduler with every decision made on a GPU, and records of rings written there.

One kernel launch per call and a wait for it: this shows that the device decides as the host does,
it is not how a device serves. All memory is page-locked memory of the host, which the device
reads and writes at the same address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qllm.device import layout, serving
from qllm.device.cubins import kernel_of
from qllm.policy import RankPolicy
from tests.support.native_scheduler import NativeScheduler

THREADS = 128
"""Threads of a block that fills a lane."""
Launch = Callable[..., int]
"""Launches a function by its index in CALLS, on a block or two, with numbers; its answer."""


class DeviceCalls:
    """The functions of the native scheduler and server, as kernel launches.

    Args:
        launch: Of a function of `layout.CALLS`, on a block of the scheduler.
        launch_server: Of a function of `serving.CALLS`, on a block of the server and that.
    """

    def __init__(self, launch: Launch, launch_server: Launch | None = None) -> None:
        self._launch, self._launch_server = launch, launch_server

    def __getattr__(self, name: str) -> Callable[..., int]:
        """A function of CALLS, as the host's: of blocks, rank and numbers. The rank is in the
        kernel."""
        of_server = name.removeprefix("server_")
        if name != of_server and of_server in serving.CALLS:
            which, launch = serving.CALLS.index(of_server), self._launch_server
            assert launch is not None
            return lambda server, state, rank, *numbers: launch(which, server, state, *numbers)
        if name not in layout.CALLS:
            raise AttributeError(name)
        which = layout.CALLS.index(name)
        return lambda address, rank, *numbers: self._launch(which, address, *numbers)


class DeviceTurns(DeviceCalls):
    """With the turns of the stage loop."""

    def __init__(self, kernels: "Kernels") -> None:
        super().__init__(kernels.call)
        self._kernels = kernels

    def turn_before(self, state: int, rank: int, server: int, lanes: int, now_ns: int) -> int:
        """Choose a stage and fill its lane with a block of threads."""
        return self._kernels.turn("qllm_before", THREADS, state, server, lanes, now_ns)

    def turn_fill(self, *_: int) -> None:
        """It is filled already."""

    def turn_after(
        self, state: int, rank: int, server: int, lanes: int, now_ns: int, stop: int
    ) -> int:
        """Take in what the stage did."""
        return self._kernels.turn("qllm_after", 1, state, server, lanes, now_ns, stop)


class Kernels:
    """The kernels of one policy on this machine's GPU.

    Raises:
        ConfigError: The policy cannot be compiled, or a package of the extra `device` is missing.
    """

    def __init__(self, policy: RankPolicy) -> None:
        import cupy

        number = str(cupy.cuda.Device().compute_capability)  # like "90"
        cubin = kernel_of(policy, (int(number[:-1]), int(number[-1])))
        self._folder = TemporaryDirectory(prefix="qllm-kernels-")
        file = Path(self._folder.name) / "scheduler.cubin"
        file.write_bytes(cubin)
        self._module = cupy.RawModule(path=str(file))
        self._synchronize = cupy.cuda.get_current_stream().synchronize
        self._answer = pinned_zeros(1)

    def _run(self, name: str, *arguments: Any, threads: int = 1) -> int:
        """Launch one block, wait, and return what it answered."""
        answer = np.uint64(self._answer.ctypes.data)
        self._module.get_function(name)((1,), (threads,), (*arguments, answer))
        self._synchronize()
        return int(self._answer[0])

    def call(self, which: int, address: int, *numbers: int) -> int:
        """A function of the scheduler."""
        padded = [*numbers, *[0] * (layout.MOST_NUMBERS - len(numbers))]
        return self._run("qllm_call", np.uint64(address), np.int32(which), *map(np.int64, padded))

    def server_call(self, which: int, server: int, state: int, *numbers: int) -> int:
        """A function of the server."""
        padded = [*numbers, *[0] * (layout.MOST_NUMBERS - len(numbers))]
        blocks = np.uint64(server), np.uint64(state)
        return self._run("qllm_server_call", *blocks, np.int32(which), *map(np.int64, padded))

    def turn(self, name: str, threads: int, *numbers: int) -> int:
        """A kernel of three addresses and numbers."""
        addresses = map(np.uint64, numbers[:3])
        return self._run(name, *addresses, *map(np.int64, numbers[3:]), threads=threads)

    def ring_read(self, end: int, now_ns: int, body: int, room: int) -> int:
        """Take the next record: its length, 0 if there is none, -1 if it is broken or too long."""
        return self._run(
            "qllm_ring_read", np.uint64(end), np.int64(now_ns), np.uint64(body), np.uint64(room)
        )

    def ring_write(self, end: int, kind: int, flags: int, body: int, num_body: int) -> int:
        """Write a record: 1, 0 if there is no room for it now, -1 if it exceeds the ring."""
        numbers = (np.uint32(kind), np.uint32(flags), np.uint64(body), np.uint64(num_body))
        return self._run("qllm_ring_write", np.uint64(end), *numbers)


def pinned_zeros(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Page-locked memory of the host, which the device sees at the same address."""
    import cupyx

    made: np.ndarray[Any, np.dtype[np.int64]] = cupyx.zeros_pinned(count, np.int64)
    return made


def device_scheduler(*args: Any, **settings: Any) -> NativeScheduler:
    """A native scheduler that lives on the GPU; arguments are those of `NativeScheduler`."""

    return NativeScheduler(*args, calls=device_calls, zeros=pinned_zeros, **settings)


def device_calls(policy: RankPolicy) -> DeviceCalls:
    """The functions of scheduler and server on this machine's GPU."""
    kernels = Kernels(policy)
    return DeviceCalls(kernels.call, kernels.server_call)


@contextmanager
def locked_pages() -> Iterator[Callable[[memoryview], None]]:
    """A function that lets the device see shared memory of the host, at the same address.

    What was locked is given back at the end, while it is there still: memory that comes later to
    the address of one that went while locked would not be what the device sees.
    """
    import cupy

    addresses: list[int] = []

    def lock(memory: memoryview) -> None:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        kind = cupy.cuda.runtime.pointerGetAttributes(address).type
        assert kind == 0, f"memory of type {kind}: an earlier mapping of this address stays locked"
        cupy.cuda.runtime.hostRegister(address, len(memory), 2)  # mapped
        addresses.append(address)

    try:
        yield lock
    finally:
        for address in addresses:
            cupy.cuda.runtime.hostUnregister(address)
