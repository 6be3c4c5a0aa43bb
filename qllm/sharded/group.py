"""The processes of the ranks, and calls that all of them make.

Rank 0 is the process of the runner. The other ranks are forked from it, with the model in memory.
They compute in native code only (kernels/cpu/group.cpp): each waits for a call in shared memory,
makes it with its own weights, and waits for the next.
"""

import ctypes
import multiprocessing
import os
import traceback
import weakref
from collections.abc import Callable
from ctypes import c_int64
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import NamedTuple

import torch

from qllm.errors import DeviceError, InvariantError, QllmError
from qllm.kernels import cpu
from qllm.sharded.memory import SharedMemory
from qllm.sharded.rank import RankWeights, SplitModel

FIRST_FILE = 3
"""First open file of a process after its standard input and outputs."""
DEADLINE_S = 30.0
"""Seconds that a rank waits for the others."""
END_S = 5.0
"""Seconds in which a rank must end by itself."""
GROUP_BYTES = 1 << 14
"""Bytes that hold a `Group` of group.h."""
SWEEP, HEAD, EMBED, END = 1, 2, 3, 4
"""Kinds of calls: `CallKind` in group.h."""
FAILURES = {
    1: "a rank did not come within {deadline:g} s",
    2: "the process of a rank has ended",
}
"""Texts for `Failure` of group.h."""
APART = 3
"""The failure of ranks that stopped in different ops."""


class GroupStruct(ctypes.Structure):
    """`GroupHead` in group.h, the first part of a group."""

    _fields_ = (
        ("size", c_int64),
        ("deadline_ns", c_int64),
        ("failure", c_int64),
        ("num_gathers", c_int64),
    )


class _Process(NamedTuple):
    process: ForkProcess
    reports: Connection


class Group:
    """Rank 0 of a split model, and the processes of the other ranks.

    Args:
        split: Model and its split.
        memory: Memory that all ranks share.
        threads: Kernel threads of each rank.
        deadline_s: Seconds that a rank waits for the others before all ranks fail.

    Raises:
        DeviceError: A rank did not start.
        ModelError: A layer cannot be split with the bits of one rank.
    """

    def __init__(
        self,
        split: SplitModel,
        memory: SharedMemory,
        threads: int = 1,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.size = len(split.plan.ranks)
        self._deadline_s = deadline_s
        self._shared = memory.empty((GROUP_BYTES,), torch.uint8).zero_()
        self._pids = memory.empty((self.size,), torch.int64)
        self._pids[0] = os.getpid()
        address = self._shared.data_ptr()
        self._struct = GroupStruct.from_address(address)
        self._struct.size, self._struct.deadline_ns = self.size, int(deadline_s * 1e9)

        def serve(rank: int, reports: Connection) -> None:
            try:
                torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
                cpu.set_threads(threads)
                own = RankWeights(split, rank)
                own.struct.group, own.struct.processes = address, self._pids.data_ptr()
            except Exception as error:  # noqa: BLE001 - rank 0 raises it
                is_ours = isinstance(error, QllmError)
                reports.send(str(error) if is_ours else traceback.format_exc())
                return
            reports.send(None)
            # the engine's clients must see its sockets closed as soon as rank 0 ends
            os.closerange(FIRST_FILE, 1 + max(map(int, os.listdir("/proc/self/fd"))))
            cpu.native.serve(own.address)

        self._processes = [_start(serve, rank) for rank in range(1, self.size)]
        self._end = weakref.finalize(self, _end, self._processes)
        for rank, (process, _) in enumerate(self._processes, 1):
            self._pids[rank] = process.pid or 0
        self.own = RankWeights(split, 0)
        """Weights of rank 0."""
        self.own.struct.group, self.own.struct.processes = address, self._pids.data_ptr()
        self._free = weakref.finalize(self, cpu.native.free_desks, self.own.address)
        self._free.atexit = False
        for rank, (_, reports) in enumerate(self._processes, 1):
            _await_start(rank, reports)

    @property
    def num_gathers(self) -> int:
        """Number of times at which all ranks waited for each other."""
        return int(self._struct.num_gathers)

    @property
    def processes(self) -> list[int]:
        """Process ids of the ranks, in the order of their numbers."""
        return [int(pid) for pid in self._pids]

    def call(self, kind: int, what: int) -> None:
        """Make a call on all ranks. `what` is the address of its arguments in shared memory.

        Raises:
            DeviceError: A rank is missing. All further calls raise this error, too.
            InvariantError: Ranks stopped in different ops (I11).
        """
        if not self._struct.failure:
            cpu.native.call_ranks(self.own.address, kind, what)
        if not self._struct.failure:
            return
        self._end()  # a rank that is stopped would hold up the end of this process
        if self._struct.failure == APART:
            raise InvariantError("ranks stopped in different ops (I11)")
        why = FAILURES[self._struct.failure].format(deadline=self._deadline_s)
        raise DeviceError(f"{why}: {self.size} ranks of one model end together; start them again")

    def close(self) -> None:
        """End the other ranks. A rank that does not end by itself is killed."""
        if self._end.alive and not self._struct.failure:
            cpu.native.call_ranks(self.own.address, END, 0)
            for process, _ in self._processes:
                process.join(END_S)
        self._end()


def _start(serve: Callable[[int, Connection], None], rank: int) -> _Process:
    context = multiprocessing.get_context("fork")
    reports, others = context.Pipe(duplex=False)
    process = context.Process(
        target=serve, args=(rank, others), name=f"qllm-rank-{rank}", daemon=True
    )
    process.start()
    others.close()
    return _Process(process, reports)


def _await_start(rank: int, reports: Connection) -> None:
    try:
        error = reports.recv()
    except EOFError:
        error = "its process has ended"
    if error is not None:
        raise DeviceError(f"rank {rank} did not start: {error}")


def _end(processes: list[_Process]) -> None:
    for process, reports in processes:
        reports.close()
        process.kill()
        process.join()
        process.close()
