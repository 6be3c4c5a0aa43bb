"""The processes of the ranks, and calls that all of them make.

Rank 0 is the process of the runner. The other ranks are forked from it, with the model in memory.
They compute in native code only (kernels/cpu/group.cpp): each waits for a call in shared memory,
makes it with its own weights, and waits for the next. Ranks on other hosts are in `hosts.py`.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int64
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import NamedTuple

import torch

from qllm.errors import DeviceError, InvariantError, QllmError
from qllm.kernels import cpu
from qllm.sharded.memory import SharedMemory
from qllm.sharded.rank import RankWeights, SplitModel

PR_SET_PDEATHSIG = 1
"""Number of a call of `prctl`, from linux/prctl.h."""
FIRST_FILE = 3
"""First open file of a process after its standard input and outputs."""
DEADLINE_S = 30.0
"""Seconds that a rank waits for the others."""
START_TIMES = 10
"""Times of rank 0's own load in which another rank must load, in addition to the deadline."""
END_S = 5.0
"""Seconds in which a rank must end by itself."""
GROUP_BYTES = 1 << 14
"""Bytes that hold a `Group` of group.h."""
SWEEP, HEAD, EMBED, END, FETCH = 1, 2, 3, 4, 5
"""Kinds of calls: `CallKind` in group.h."""
FAILURES = {
    1: "a rank did not come within {deadline:g} s",
    2: "the process of a rank has ended",
    4: "a rank on another host sent something else than a message",
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
        ("gathered_bytes", c_int64),
        ("waited_ns", c_int64),
    )


class _Process(NamedTuple):
    process: ForkProcess
    reports: Connection


class Calls(ABC):
    """Calls that all ranks of a model make. The process of rank 0 makes them.

    Args:
        size: Number of ranks.
        memory: Memory of the ranks.
        deadline_s: Seconds that a rank waits for the others before all ranks fail.
    """

    own: RankWeights
    """Weights of rank 0."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts of ranks 1, 2, ..., if they are on other hosts."""

    def __init__(self, size: int, memory: SharedMemory, deadline_s: float) -> None:
        self.size = size
        self._deadline_s = deadline_s
        self._shared = memory.empty((GROUP_BYTES,), torch.uint8).zero_()
        self._pids = memory.empty((self.size,), torch.int64)
        self._owner = self._pids[0] = os.getpid()
        self._address = self._shared.data_ptr()
        self._struct = group_at(self._address, size, deadline_s)

    @property
    def has_failed(self) -> bool:
        """True if the group will make no more calls."""
        return bool(self._struct.failure)

    @property
    def num_gathers(self) -> int:
        """Number of times at which all ranks waited for each other."""
        return int(self._struct.num_gathers)

    @property
    def gathered_bytes(self) -> int:
        """Number of bytes of gathered tensors that all ranks have written."""
        return int(self._struct.gathered_bytes)

    @property
    def waited_s(self) -> float:
        """Seconds in which rank 0 waited for parts of gathered tensors from other hosts."""
        return 1e-9 * int(self._struct.waited_ns)

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
        if os.getpid() != self._owner:
            raise DeviceError("ranks take calls from the process that made them, not from a copy")
        if not self.has_failed:
            self._make(kind, what)
        if not self.has_failed:
            return
        self._end()  # a rank that is stopped would hold up the end of this process
        if self._struct.failure == APART:
            raise InvariantError("ranks stopped in different ops (I11)")
        why = FAILURES[self._struct.failure].format(deadline=self._deadline_s) + self._where()
        raise DeviceError(f"{why}: {self.size} ranks of one model end together; start them again")

    def _make(self, kind: int, what: int) -> None:
        cpu.native.call_ranks(self.own.address, kind, what)

    def _where(self) -> str:
        """Return the place of the rank that failed, for messages; empty if it is not known."""
        return ""

    @abstractmethod
    def _end(self) -> None:
        """End the other ranks, whatever they do."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks."""


def group_at(address: int, size: int, deadline_s: float) -> GroupStruct:
    """Return a new group at an address with zeros."""
    struct = GroupStruct.from_address(address)
    struct.size, struct.deadline_ns = size, int(deadline_s * 1e9)
    return struct


class Group(Calls):
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
        super().__init__(len(split.plan.ranks), memory, deadline_s)
        address = self._address

        def serve(rank: int, reports: Connection) -> None:
            end_with_parent(signal.SIGKILL)  # until the native code looks for rank 0 by itself
            gc.freeze()  # objects of rank 0 are finalised there
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
                cpu.set_threads(threads)
                own = RankWeights(split, rank)
                own.struct.group, own.struct.processes = address, self._pids.data_ptr()
            except Exception as error:  # noqa: BLE001 - rank 0 raises it
                reports.send(text_of(error))
                return
            reports.send(None)
            # the engine's clients must see its sockets closed as soon as rank 0 ends
            os.closerange(FIRST_FILE, 1 + max(map(int, os.listdir("/proc/self/fd"))))
            end_with_parent(0)  # the thread that made the ranks may end before its process
            cpu.native.serve(own.address)

        self._processes: list[_Process] = []
        self._ending = weakref.finalize(self, _end, self._processes, self._owner)
        try:
            self._start(serve)
            begin = time.monotonic()
            self.own = RankWeights(split, 0)
            most_s = load_time(deadline_s, begin)
            for rank, one in enumerate(self._processes, 1):
                _await_start(rank, one, most_s)
        except BaseException:
            self._end()
            raise
        self.own.struct.group, self.own.struct.processes = address, self._pids.data_ptr()
        self._free = weakref.finalize(self, cpu.native.free_desks, self.own.address)
        self._free.atexit = False

    def _start(self, serve: Callable[[int, Connection], None]) -> None:
        for rank in range(1, self.size):
            try:
                made = _forked(serve, rank)
            except OSError as error:
                raise DeviceError(
                    f"rank {rank} cannot be forked ({error}); free memory, allow more processes "
                    "(ulimit -u), or use a smaller tp"
                ) from error
            self._processes.append(made)
            self._pids[rank] = made.process.pid or 0

    def _end(self) -> None:
        self._ending()

    def close(self) -> None:
        """End the other ranks. A rank that does not end by itself is killed."""
        if self._ending.alive and not self.has_failed and os.getpid() == self._owner:
            self._make(END, 0)
            for process, _ in self._processes:
                process.join(END_S)
        self._end()


def _forked(serve: Callable[[int, Connection], None], rank: int) -> _Process:
    context = multiprocessing.get_context("fork")
    reports, others = context.Pipe(duplex=False)
    process = context.Process(
        target=serve, args=(rank, others), name=f"qllm-rank-{rank}", daemon=True
    )
    process.start()
    others.close()
    return _Process(process, reports)


def load_time(deadline_s: float, begin_s: float) -> float:
    """Return the seconds for which rank 0 waits for others that load, after its own load."""
    return deadline_s + START_TIMES * (time.monotonic() - begin_s)


def text_of(error: Exception) -> str:
    """Return the text with which rank 0 reports an error of another rank."""
    return str(error) if isinstance(error, QllmError) else traceback.format_exc()


def end_with_parent(number: int) -> None:
    """Get a signal when the thread that has forked this process ends; 0 is none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _await_start(rank: int, one: _Process, most_s: float) -> None:
    error = f"it has not loaded its weights {most_s:.0f} s after rank 0"
    try:
        if one.reports.poll(most_s):
            error = one.reports.recv()
    except EOFError:
        one.process.join(END_S)
        error = (
            f"its process has ended with code {one.process.exitcode}; if that is -9, memory was "
            "probably short: use a smaller model, or fewer other programs"
        )
    if error is not None:
        raise DeviceError(f"rank {rank} did not start: {error}")


def _end(processes: list[_Process], owner: int) -> None:
    if os.getpid() != owner:  # a process that the user forked ends
        return
    for process, reports in processes:
        reports.close()
        process.kill()
        process.join()
        with suppress(ValueError):  # other code has waited for it
            process.close()
