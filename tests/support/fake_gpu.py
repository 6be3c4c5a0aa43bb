"""An engine's process whose device is this CPU: all is real but CUDA.

`install` runs in the engine's process (see `BOOT`). The model is loaded on the CPU, stages are
captured by a fake and replayed with torch, graphs are launched on a thread by a fake with CUDA's
rules, and the kernel of a turn is the host build of the same source.
"""

import ctypes
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.device import lanes
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.errors import DeviceError
from qllm.plugins import load_policy
from qllm.runner.runner import TorchRunner
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_loop import FakeLoopApi
from tests.support.files import ROOT
from tests.support.warm import Nursery, serve

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.support import fake_gpu; fake_gpu.install(); "
    "from qllm.engine.process import main; main(int(sys.argv[2]))"
)
FAULT, HANG = 33, 34
"""A request with a prompt of so many tokens makes the device fault, or hang."""
LONGEST = 240
"""Tokens of a request; kernels of torch loop over all its pages."""


class FakeNursery(Nursery):
    """A process that forks such engines: it has imported what they import."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fake_gpu", str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )


class ThreadedApi(FakeLoopApi):
    """Launches return at once, as CUDA's do."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: threading.Thread | None = None
        self.crash: BaseException | None = None
        self._num_looks = 0

    def replay(self, stage: Any) -> None:
        with torch.inference_mode():
            super().replay(stage)

    def launch(self, made: Any) -> None:
        self.wait_for_its_last_turn()  # a stream runs one after the other
        assert not self.is_busy, "two launches at once"
        self.thread = threading.Thread(target=self._launched, args=(made,), daemon=True)
        self.thread.start()

    def _launched(self, made: Any) -> None:
        torch.set_num_threads(1)
        try:
            super().launch(made)
        except BaseException as error:  # noqa: BLE001 - told by `is_running`
            self.crash = error

    def is_running(self) -> bool:
        if self.crash is not None:
            raise DeviceError(f"the loop ended with {self.crash!r}; the CUDA context is lost")
        self._num_looks += 1
        return self.is_busy and self._num_looks % 3 != 0  # an event may say so too early

    def wait_for_its_last_turn(self) -> None:
        """Wait, and count naps rather than the time, in which a whole machine may stand still."""
        for _ in range(20_000):
            if not self.is_busy:
                return
            time.sleep(0.001)

    @property
    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Kernel:
    """The kernel of a turn."""

    def __init__(self, policy: Any) -> None:
        self._rank, self._native = compile_host(policy), load_native()
        self._zero_ns = 0
        self._at = {name: 8 * i for i, name in enumerate(lanes.LANES.names or ())}

    def _cell(self, lanes_at: int, name: str) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(lanes_at + self._at[name])

    def __call__(self, set_conditional: Any, *numbers: int) -> None:
        *addresses, run, stage = numbers
        branch, goes_on = self._turn(*addresses)
        set_conditional(stage, branch)
        set_conditional(run, int(goes_on))

    def _turn(self, server: int, state: int, at: int) -> tuple[int, bool]:
        launched = self._cell(at, "launch_ns")
        if launched.value:
            self._zero_ns, launched.value = time.monotonic_ns() - launched.value, 0
        now_ns, left = time.monotonic_ns() - self._zero_ns, self._cell(at, "turns_left")
        before = left.value
        branch = self._native.loop_turn(server, state, self._rank.address, at, now_ns, 1)
        if branch == lanes.NOTHING:
            time.sleep(0.0003)
        goes_on = bool(self._cell(at, "goes_on").value)
        # the next launch may be prepared by now: it has other turns left, and then says so too
        return branch, goes_on and left.value == before - 1


def runner_of(model: Any, config: Any) -> TorchRunner:
    """A runner with captured stages, on the CPU."""
    return cuda_runner(
        model, num_pages=config.num_blocks, page_size=config.block_size,
        max_num_seqs=config.max_num_seqs, max_step_tokens=config.max_step_tokens,
        max_total_tokens=LONGEST,
        graphs=FakeCuda(), layers_per_stage=1,
        buckets=[Bucket(4, False), Bucket(16, True), Bucket(104, True)],
    )  # fmt: skip


def install() -> None:
    """Put the fakes in the places of CUDA, in this process."""
    import qllm.device.launcher
    import qllm.engine.build
    import qllm.engine.gpu
    import qllm.engine.process as process

    load = process.load
    process.load = lambda name, **how: load(name, **{**how, "device": "cpu"})  # type: ignore[attr-defined]
    qllm.engine.build.make_runner = runner_of  # type: ignore[assignment]
    qllm.engine.build.LoadedRunner.max_total_tokens = LONGEST  # type: ignore[assignment,method-assign]

    api = ThreadedApi()

    def of_cuda(policy: Any, device: Any) -> tuple[Any, Any]:
        return api, _dangerous(Kernel(policy))

    qllm.device.launcher._cuda_api = of_cuda
    make_rings = qllm.engine.gpu.DeviceRings

    def rings(*arguments: Any) -> Any:
        api.needs_quiet("cudaMalloc")
        return make_rings(*arguments)

    qllm.engine.gpu.DeviceRings = rings  # type: ignore[assignment,misc]


def _dangerous(kernel: Any) -> Any:
    """A kernel that faults or hangs when a request of a certain length is live."""
    from qllm.device import layout

    names = layout.STATE.names or ()
    at = {name: 8 * i for i, name in enumerate(names)}

    def call(*arguments: Any) -> None:
        kernel(*arguments)
        _, state, *_ = [n for n in arguments if isinstance(n, int)]
        capacity = ctypes.c_int64.from_address(state + at["capacity"]).value
        first = ctypes.c_int64.from_address(state + at["at_requests"]).value
        raw = (ctypes.c_ubyte * (capacity * layout.REQUEST.itemsize)).from_address(state + first)
        requests = torch.frombuffer(raw, dtype=torch.uint8).numpy().view(layout.REQUEST)
        lengths = set(requests["num_prompt"][requests["live"] == 1].tolist())
        if FAULT in lengths:
            raise RuntimeError("cudaErrorIllegalAddress")
        if HANG in lengths:
            time.sleep(1000)

    return call


if __name__ == "__main__":
    compile_host(load_policy("qllm2"))  # the compiler is loaded, too
    load_native()
    serve(socket.socket(fileno=int(sys.argv[1])))
