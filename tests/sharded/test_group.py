"""Processes of a group: gathers, stops, deadlines, and ranks that end, hang or do not start."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm.errors import ConfigError, DeviceError
from qllm.kernels import cpu
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START
from qllm.sharded import group as group_module
from qllm.sharded.group import GROUP_BYTES, GroupStruct
from qllm.sharded.memory import SharedMemory
from qllm.sharded.rank import RankStruct
from qllm.sharded.runner import sharded_runner
from tests.support.sharded import gathers_of, group_of, wide_model
from tests.support.stops import add_prompts, whole_program
from tests.support.sweeps import Asked, Watched
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")


class Meeting:
    """Some ranks without weights, which meet in shared memory."""

    def __init__(self, size: int, deadline_s: float) -> None:
        self.memory = SharedMemory()
        self.shared = self.memory.empty((GROUP_BYTES,), torch.uint8).zero_()
        self.group = GroupStruct.from_address(self.shared.data_ptr())
        self.group.size, self.group.deadline_ns = size, int(deadline_s * 1e9)
        self.seen = self.memory.empty((size,), torch.int64).zero_()
        self.pids = self.memory.empty((size,), torch.int64)
        self.pids[:] = os.getpid()
        self.ranks = [
            RankStruct(group=self.shared.data_ptr(), rank=i, processes=self.pids.data_ptr())
            for i in range(size)
        ]

    def meet(self, rank: int, num_times: int) -> bool:
        """Meet so often; return True if all ranks had met as often as this one at each time."""
        address, seen, is_right = ctypes.addressof(self.ranks[rank]), self.seen, True
        for turn in range(1, num_times + 1):
            seen[rank] = turn
            cpu.native.meet(address)
            is_right &= bool((seen >= turn).all())
        return is_right

    def fork(self, rank: int, num_times: int) -> ForkProcess:
        def run() -> None:
            os._exit(0 if self.meet(rank, num_times) else 1)

        process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        process.start()
        return process


@pytest.mark.parametrize("num_times", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, 3])
def test_no_rank_leaves_a_gather_before_all_have_come(size: int, num_times: int) -> None:
    """Ranks are stopped and continued at random."""
    meeting, rng = Meeting(size, 60), random.Random(size)
    others = [meeting.fork(rank, num_times) for rank in range(1, size)]
    stopper = multiprocessing.get_context("fork").Process(
        target=stop_at_random, args=([p.pid for p in others], rng), daemon=True
    )
    stopper.start()
    assert meeting.meet(0, num_times)
    stopper.kill()
    for process in others:
        os.kill(process.pid or 0, signal.SIGCONT)
        process.join(60)
        assert process.exitcode == 0


def stop_at_random(pids: list[int], rng: random.Random) -> None:
    while True:
        pid = rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.random() * 0.01)
            os.kill(pid, signal.SIGCONT)
        time.sleep(rng.random() * 0.01)


# -- runners


def runner_of(size: int) -> TorchRunner:
    made = sharded_runner(wide_model("qwen3_moe"), size, max_segment_ms=float("inf"), deadline_s=2)
    add_prompts(made, (21, 5))
    return made


@pytest.fixture
def runner() -> Iterator[TorchRunner]:
    made = runner_of(2)
    yield made
    made.close()


def test_a_stop_takes_no_gather_of_its_own(runner: TorchRunner) -> None:
    """Each decode step has as many gathers as the other, whatever it is cut into."""
    gathers_of(runner, None)
    whole, _ = gathers_of(runner, None)
    assert whole > 0
    assert [gathers_of(runner, num_tasks)[0] for num_tasks in (1, 2, 7)] == [whole] * 3


def test_all_ranks_stop_in_the_same_op(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native call compares the ops of ranks after each stop (I11). Here it finds others."""
    program = whole_program(runner)
    at = runner.run(program, START, Asked(40))
    assert at != program.end
    real = group_module.cpu.native.call_ranks

    def apart(rank: int, kind: int, what: int) -> None:
        real(rank, kind, what)
        group_of(runner)._struct.failure = group_module.APART

    monkeypatch.setattr(group_module.cpu.native, "call_ranks", apart)
    with pytest.raises(Exception, match=r"ranks stopped in different ops \(I11\)") as apart_error:
        runner.run(program, at, Watched())
    fault = runner.backend.fault(apart_error.value)
    assert isinstance(fault, DeviceError), "the engine ends, and a server makes a new one"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_tasks", [0, 1, 30, 60])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 1), (3, 2)])
def test_a_rank_that_ends_or_hangs_is_an_error_of_all(
    size: int, rank: int, how: int, num_tasks: int
) -> None:
    runner = runner_of(size)
    program, at = whole_program(runner), START
    if num_tasks:
        at = runner.run(program, at, Asked(num_tasks))
    pids = group_of(runner).processes
    os.kill(pids[rank], how)
    why = {signal.SIGKILL: "process of a rank has ended", signal.SIGSTOP: "did not come within 2 s"}
    for _ in range(2):  # there is no way back
        with pytest.raises(DeviceError, match=why[signal.Signals(how)]) as error:
            runner.run(program, at, Watched())
    assert runner.fault(error.value) is error.value
    runner.close()
    assert not any(map(is_alive, pids[1:]))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_end_with_their_runner() -> None:
    runner = sharded_runner(wide_model("mixtral"), 3)
    pids = group_of(runner).processes[1:]
    assert all(map(is_alive, pids))
    runner.close()
    runner.close()
    assert not any(map(is_alive, pids))


def test_ranks_end_with_the_process_of_rank_0() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        sender.send(group_of(sharded_runner(wide_model("mixtral"), 2)).processes)
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    _, pid = receiver.recv()
    assert is_alive(pid)
    process.kill()
    process.join()
    wait_for(lambda: not is_alive(pid))


def test_a_rank_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    real = group_module.RankWeights

    def broken(split: Any, rank: int) -> Any:
        if rank:
            raise MemoryError("no room for weights")
        return real(split, rank)

    monkeypatch.setattr(group_module, "RankWeights", broken)
    with pytest.raises(DeviceError, match=r"(?s)rank 1 did not start: .*no room for weights"):
        sharded_runner(wide_model("mixtral"), 2)


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("nan")])
def test_a_deadline_that_is_no_time_is_refused(deadline_s: float) -> None:
    with pytest.raises(ConfigError, match=r"deadline_s=.* is no time; use a number above 0"):
        sharded_runner(wide_model("mixtral"), 2, deadline_s=deadline_s)


def test_a_forked_process_of_the_user_leaves_ranks_and_memory_alone(runner: TorchRunner) -> None:
    """It has copies of all objects, and finalises them when it ends."""
    group, memory = group_of(runner), SharedMemory()
    large = memory.empty((4 << 20,), torch.uint8).fill_(7)

    def child() -> None:
        nonlocal large
        del large
        with pytest.raises(DeviceError, match="from the process that made them"):
            group.call(group_module.END, 0)
        runner.close()
        group._end()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert bool((large == 7).all())
    assert gathers_of(runner, None)[0] > 0


def test_a_dead_rank_is_found_if_other_code_has_waited_for_it() -> None:
    made = sharded_runner(wide_model("qwen3_moe"), 2, deadline_s=100)
    add_prompts(made, (21, 5))
    pid = group_of(made).processes[1]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(DeviceError, match="the process of a rank has ended"):
        gathers_of(made, None)
    made.close()


def test_ranks_that_have_started_end_if_another_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = group_module._forked, list[Any]()

    def forked(serve: Any, rank: int) -> Any:
        if rank == 2:
            raise OSError(12, "Cannot allocate memory")
        started.append(real(serve, rank))
        return started[-1]

    monkeypatch.setattr(group_module, "_forked", forked)
    with pytest.raises(DeviceError, match=r"rank 2 cannot be forked .*; free memory"):
        sharded_runner(wide_model("qwen3_moe"), 3)
    with pytest.raises(ValueError, match="closed"):
        started[0].process.is_alive()


def test_a_rank_that_hangs_while_it_loads_is_waited_for_no_longer_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = group_module.RankWeights

    def hanging(split: Any, rank: int) -> Any:
        if rank == 1:
            time.sleep(1000)
        return real(split, rank)

    monkeypatch.setattr(group_module, "RankWeights", hanging)
    with pytest.raises(DeviceError, match="rank 1 did not start: it has not loaded its weights"):
        sharded_runner(wide_model("qwen3_moe"), 2, deadline_s=0.5)


def test_copies_of_kv_heads_are_charged() -> None:
    """Ranks that read one KV head hold a copy each."""
    found = []
    for tp in (1, 2, 4):
        made = sharded_runner(wide_model("qwen3_moe"), tp)
        found.append(made.charge.token_bytes)
        made.close()
    assert found == [found[0], found[0], 2 * found[0]]


LOADS = """
import time
from qllm.sharded import group
from qllm.sharded.runner import sharded_runner
from tests.support.sharded import wide_model

real = group.RankWeights

def slow(split, rank):
    if rank == 1:
        print("loading", flush=True)
        time.sleep(1000)
    return real(split, rank)

group.RankWeights = slow
sharded_runner(wide_model("qwen3_moe"), 2, deadline_s=1000)
"""


def test_a_rank_that_loads_ends_with_the_process_of_rank_0() -> None:
    root = str(Path(__file__).parents[2])
    made = subprocess.Popen([sys.executable, "-c", LOADS], cwd=root, stdout=subprocess.PIPE)
    assert made.stdout is not None
    assert made.stdout.readline() == b"loading\n"
    (rank,) = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
    made.kill()
    made.communicate()
    wait_for(lambda: not Path(f"/proc/{rank}").exists())


def test_ranks_outlive_the_thread_that_made_them() -> None:
    found = list[TorchRunner]()
    thread = threading.Thread(
        target=lambda: found.append(sharded_runner(wide_model("qwen3_moe"), 2))
    )
    thread.start()
    thread.join()
    add_prompts(found[0], (21, 5))
    assert gathers_of(found[0], None)[0] > 0
    found[0].close()
