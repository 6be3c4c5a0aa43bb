"""Ranks on other hosts: one process per host, and rank 0 in the process of the runner.

    rank 0      connects to a host, and both prove that they have the same secret (Wire)
    rank 0      {"job": NUMBER, "rank": 1, "size": 2, "start": ADDRESS, ...}
    host        {"job": NUMBER, "software": TEXT, "kernels": NAME, "clock_ns": TIME}
    host        loads its share of the weights
    host        {"weights": DIGEST, "pid": PID}

Then the connection carries messages of kernels/cpu/link.h. Anything that does not match ends the
start, with the name of the host in `tp_hosts`. `host_rank.py` is the other side.
"""

import ctypes
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

from qllm.errors import ConfigError, DeviceError
from qllm.ingress.remote.meeting import MeetingError, Wire, parse_address
from qllm.kernels import cpu
from qllm.kernels.software import software
from qllm.models.depth import num_layers, whole_layers
from qllm.models.identity import identity
from qllm.sharded.group import END, FETCH, Calls, load_time
from qllm.sharded.host_memory import HostMemory
from qllm.sharded.memory import ADDRESS_BYTES
from qllm.sharded.rank import RankWeights, SplitModel

MOST_SKEW_S = 5.0
"""Most seconds between the clocks of two hosts, in addition to the time of the answer. Events of
both have times in logs."""
LOAD_S = 120.0
"""Seconds that a host may take, in addition to the time that a rank of this host may take. It reads
the model itself."""
RESET = struct.pack("ii", 1, 0)
"""Value of `SO_LINGER` with which closing a connection drops what is not sent."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
)
"""Options of a connection: TCP sends a probe after 10 s without data, then one every 5 s."""


class Asked(NamedTuple):
    """Rank 0's request to a host."""

    job: str
    """Random number of the model that the ranks compute."""
    rank: int
    size: int
    start: int
    """First address of the memory of all ranks."""
    group: int
    """Address of the `Group` of group.h."""
    deadline_s: float
    depth: int | None
    """Number of layers to load; None is all."""
    expert_weights: str
    activations: str


class LinkStruct(ctypes.Structure):
    """`Link` in link.h."""

    _fields_ = (
        ("start", c_void_p),
        ("num_bytes", c_int64),
        ("num", c_int64),
        ("files", c_void_p),
        ("ranks", c_void_p),
        ("changed", c_void_p),
        ("num_changed", c_int64),
        ("failed", c_int64),
        ("wires", c_void_p),
    )


class Link:
    """Connections of a rank to ranks on other hosts.

    Args:
        memory: Memory of this rank.
        wires: Connection to each rank, by its number.
    """

    def __init__(self, memory: HostMemory, wires: dict[int, Wire]) -> None:
        for wire in wires.values():
            wire.socket.setblocking(False)
        self._files = (c_int64 * len(wires))(*(wire.fileno() for wire in wires.values()))
        self._ranks = (c_int64 * len(wires))(*wires)
        self.struct = LinkStruct(
            start=memory.start,
            num_bytes=ADDRESS_BYTES,
            num=len(wires),
            files=ctypes.addressof(self._files),
            ranks=ctypes.addressof(self._ranks),
        )

    def join(self, own: RankWeights) -> None:
        """Let a rank use the connections."""
        own.struct.link = ctypes.addressof(self.struct)


class HostGroup(Calls):
    """Rank 0 of a split model, and one rank on each of some other hosts.

    Args:
        split: Model and its split.
        memory: Memory of rank 0.
        hosts: Addresses HOST:PORT of ranks 1, 2, ..., at which `qllm rank` listens.
        secret: Secret that all hosts have.
        rounding: Settings `expert_weights` and `activations` of the split.
        threads: Kernel threads of rank 0.
        deadline_s: Seconds that a rank waits for the others before all ranks fail.

    Raises:
        ConfigError: A host has other software, weights, kernels or time, or is named twice.
        DeviceError: A host does not answer, computes for another engine, or did not start its rank.
        ModelError: A layer cannot be split with the bits of one rank.
    """

    def __init__(
        self,
        split: SplitModel,
        memory: HostMemory,
        hosts: Sequence[str],
        secret: bytes,
        rounding: tuple[str, str],
        threads: int,
        deadline_s: float,
    ) -> None:
        super().__init__(1 + len(hosts), memory, deadline_s)
        self._memory, self.hosts = memory, tuple(hosts)
        found, whole = num_layers(split.model), whole_layers(split.model)
        depth = None if found == whole else found
        job, wires = secrets.token_hex(8), dict[int, Wire]()
        self._ending = weakref.finalize(self, _hang_up, wires, self._owner)
        place = memory.start, self._address
        try:
            asked = [
                Asked(job, rank, self.size, *place, deadline_s, depth, *rounding)
                for rank in range(1, self.size)
            ]
            for host, one in zip(hosts, asked, strict=True):
                wires[one.rank] = _connect(host, secret, deadline_s)
                _ask(host, wires[one.rank], one)
            cpu.set_threads(threads)
            begin, weights = time.monotonic(), identity(split.model, *rounding)
            self.own = RankWeights(split, 0)
            most_s = LOAD_S + load_time(deadline_s, begin)
            for rank, host in enumerate(hosts, 1):
                ready = _await_ready(host, wires[rank], most_s, deadline_s)
                if ready["weights"] != weights:
                    raise ConfigError(
                        f"tp_hosts: {host!r} has another model, or other weights; give `qllm rank` "
                        "on that host the model that this engine serves"
                    )
                self._pids[rank] = ready["pid"]
        except BaseException:
            self._ending()
            raise
        self._link = Link(memory, wires)
        self._link.join(self.own)
        self.own.struct.group, self.own.struct.processes = self._address, self._pids.data_ptr()
        memory.fetcher = weakref.WeakMethod(self._fetch)
        self._free = weakref.finalize(self, cpu.native.free_desks, self.own.address)
        self._free.atexit = False

    def _make(self, kind: int, what: int) -> None:
        if not self._ending.alive:  # other code may have taken the numbers of the connections
            raise DeviceError(
                f"the ranks on {', '.join(self.hosts)} have ended with their runner; make a new one"
            )
        regions, held = self._memory.changes()
        link = self._link.struct
        link.changed, link.num_changed = ctypes.addressof(regions), len(regions)
        super()._make(kind, what)
        held.clear()  # the call has carried them

    def _fetch(self, what: int) -> None:
        self.call(FETCH, what)

    def _where(self) -> str:
        rank = self._link.struct.failed
        return f" (rank {rank}, on {self.hosts[rank - 1]!r} of tp_hosts)" if rank else ""

    def _end(self) -> None:
        self._ending()

    def close(self) -> None:
        """End the other ranks. A host kills the process of a rank that is stopped."""
        if self._ending.alive and not self.has_failed and os.getpid() == self._owner:
            self._make(END, 0)
        self._end()


def _connect(host: str, secret: bytes, deadline_s: float) -> Wire:
    address = parse_address(host)
    try:
        wire = Wire(socket.create_connection(address, timeout=deadline_s))
    except OSError as error:
        raise _no_answer(host, str(error)) from error
    try:
        wire.be_front_end(secret)
    except MeetingError as error:
        wire.close()
        raise _no_answer(host, str(error)) from error
    keep_alive(wire.socket, deadline_s)
    return wire


def keep_alive(sock: socket.socket, most_s: float) -> None:
    """Let TCP end a connection whose other side has gone, at most 15 s after a limit.

    TCP ends a connection whose probes or bytes the other side has not accepted for that long. It
    does so also after this process was killed. Otherwise a stopped rank with unread bytes would
    keep the connection: it would never see the end.

    Args:
        sock: Connection.
        most_s: Limit in seconds: the time for which this side waits for the other one.
    """
    for option in KEEPALIVE:
        sock.setsockopt(*option)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * most_s)))


def _no_answer(host: str, why: str) -> DeviceError:
    return DeviceError(
        f"tp_hosts: {host!r} does not answer as a rank: {why}; start `qllm rank MODEL --listen "
        "HOST:PORT` there, or leave the host out"
    )


def _ask(host: str, wire: Wire, asked: Asked) -> None:
    """Ask a host for a rank, and refuse an answer that does not match."""
    begin_ns = time.time_ns()
    try:
        wire.send(asked._asdict())
        found = wire.receive()
    except MeetingError as error:
        raise _no_answer(host, str(error)) from error
    took_ns = time.time_ns() - begin_ns
    if found.get("busy") == asked.job:
        raise ConfigError(
            f"tp_hosts: {host!r} answers twice: another name in tp_hosts leads to the same "
            "process; name each host once"
        )
    if "busy" in found:
        raise DeviceError(
            f"tp_hosts: {host!r} computes for another engine; end that one, or use another host"
        )
    if found.get("job") != asked.job:
        raise DeviceError(
            f"tp_hosts: {host!r} answers for job {found.get('job')!r:.40}, and this one is "
            f"{asked.job!r}; start `qllm rank` there again"
        )
    own = {"software": software(), "kernels": cpu.kind()}
    for name, mine in own.items():
        if found.get(name) != mine:
            raise ConfigError(
                f"tp_hosts: {host!r} has {name} {found.get(name)!r:.200}, and this engine has "
                f"{mine!r}: bits would differ; use the same release of qllm, and processors of one "
                "kind"
            )
    skew_s = abs(int(found["clock_ns"]) - begin_ns - took_ns / 2) / 1e9
    if skew_s > MOST_SKEW_S + took_ns / 1e9:
        raise ConfigError(
            f"tp_hosts: the clock of {host!r} differs by {skew_s:.0f} s from the clock here; at "
            f"most {MOST_SKEW_S:g} s are allowed: set the clocks, with NTP for example"
        )


def _await_ready(host: str, wire: Wire, most_s: float, deadline_s: float) -> dict[str, Any]:
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    if not poll.poll(1000 * most_s):
        raise DeviceError(
            f"tp_hosts: {host!r} has not loaded its weights {most_s:.0f} s after rank 0; use a "
            f"larger rank_deadline_s than {deadline_s:g}"
        )
    try:
        found = wire.receive()
    except MeetingError as error:
        raise DeviceError(
            f"tp_hosts: the rank on {host!r} ended before it had loaded its weights ({error}); "
            "`qllm rank` there prints the code of its process; if that is -9, memory was probably "
            "short: use more hosts, or a smaller model"
        ) from error
    if "error" in found:
        raise DeviceError(f"tp_hosts: {host!r} did not start its rank: {found['error']}")
    return found


def _hang_up(wires: dict[int, Wire], owner: int) -> None:
    if os.getpid() != owner:  # a process that the user forked ends
        return
    for wire in wires.values():
        wire.hang_up()
        with suppress(OSError):  # a rank that is stopped reads no more, and must see the end
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        wire.close()
    wires.clear()
