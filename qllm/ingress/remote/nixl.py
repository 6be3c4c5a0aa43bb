"""Rings over RDMA WRITE, through NIXL and UCX: a front end on another machine, or another card.

Both sides hold a copy of a front end's block. Each side writes its own part of its own copy, as
over shared memory. Then it pushes the written bytes to the same place in the other copy:

    front end   LS, BE and cancel rings, token tail   ── WRITE ──>   engine
    engine      token ring, request tails, progress   ── WRITE ──>   front end

At most one WRITE per direction is under way. WRITEs may overtake each other, and each WRITE also
zeroes the word behind its records. So a late WRITE could destroy a newer record. Nothing else is
assumed of their order. A record counts when it is whole (`qllm.ingress.ring`), so no notification
is sent. If a device writes the token ring, the front end fetches it instead
(`qllm.ingress.remote.pull`).

NIXL's progress thread is off, because on two cores it lengthened round trips from 25 us to 68 ms.
Polling makes the progress instead. Over tcp, polling also copies the data, so it costs time of the
engine's core.
"""

import itertools
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import ConfigError, QllmError, pip_install
from qllm.ingress.ends import Writer
from qllm.ingress.front_end import FrontEndRings, Heard
from qllm.ingress.layout import FRONT_END, cell
from qllm.ingress.memory import ControlMemory, FrontEndMemory, Memory
from qllm.ingress.protocol import Cancel, Item, Revision, Submission, Update
from qllm.ingress.shm import BEAT_NS, Doorbell, FrontEndPort, ShmIngress, ShmStop
from qllm.runner.protocol import Watch
from qllm.torchless import hide_torch
from qllm.types import NS_PER_S

NAP_NS = 200_000
"""Nanoseconds between two looks of an idle engine with front ends over NIXL, which have no
doorbell."""


class Profile(NamedTuple):
    """The transports that UCX may use."""

    says: str
    """Text about the CPU's work under this profile."""
    environment: dict[str, str]


PROFILES = {
    "rdma": Profile(
        "RDMA by a network card, no CPU on the path",
        {"UCX_TLS": "rc,self", "UCX_PROTO_EMULATION_ENABLE": "n"},
    ),
    "shm": Profile(
        "UCX over shared memory of one machine: the writer's CPU copies",
        {"UCX_TLS": "tcp,sm,self,cma", "UCX_PROTO_EMULATION_ENABLE": "y"},
    ),
    "tcp": Profile(
        "UCX over tcp: the target's CPU copies, in its progress calls",
        {"UCX_TLS": "tcp,self", "UCX_PROTO_EMULATION_ENABLE": "y"},
    ),
}
_STUCK: list["Link"] = []
"""Links with a transfer that could not be cancelled."""
SETTLE_S = 0.1
"""Seconds that a closing link waits for a READ."""
RDMA_DEVICES = Path("/sys/class/infiniband")
KINDS = ("DRAM", "VRAM")
"""Kinds of memory, as NIXL calls them."""


class NixlError(QllmError):
    """An error: the other side, or the connection to it, has failed."""


class Peer(NamedTuple):
    """Plain values that the other side needs to write into a block of this side."""

    metadata: bytes
    address: int
    """Address of the block that the other side mirrors."""
    kind: str = "DRAM"
    """Kind of the memory that the block lies in, one of KINDS."""
    device: int = 0
    """Number of the device that has the memory."""
    is_pulled: bool = False
    """True if the other side has to fetch new data, because this side does not push it."""


def check_profile(profile: str) -> None:
    """Raise unless links of this profile can be made here.

    Raises:
        ConfigError: NIXL is not installed, the profile is unknown, or it needs a card that is
            missing.
    """
    if profile not in PROFILES:
        raise ConfigError(f"profile={profile!r} is unknown; use one of {', '.join(PROFILES)}")
    if profile == "rdma" and not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
        raise ConfigError(
            f"profile='rdma' needs an RDMA device and {RDMA_DEVICES} lists none; use 'shm' "
            "or 'tcp', which emulate it in software"
        )
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL would write to our stdout
    hide_torch()
    try:
        import nixl._api  # noqa: F401 - loaded now rather than while an engine serves
    except ImportError as error:
        raise ConfigError(f"NIXL is not installed; {pip_install('rdma')}") from error


class Link:
    """One NIXL agent, and the block that it offers.

    Args:
        name: Name that is unique among the agents that meet.
        profile: "rdma", "shm" or "tcp". "rdma" refuses every emulation in software.
        memory: Memory that the other side may write and read.
        is_pulled: Flag as in `Peer`.

    Raises:
        ConfigError: An error of `check_profile`.
        NixlError: The memory cannot be registered.
    """

    def __init__(self, name: str, profile: str, memory: Memory, *, is_pulled: bool = False) -> None:
        check_profile(profile)
        self.profile = PROFILES[profile]
        os.environ.update(self.profile.environment)  # read by UCX when an agent is made
        if memory.kind == "VRAM":  # UCX takes it for the host's without
            os.environ["UCX_TLS"] += ",cuda_copy"
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(name, config)
        self._place, self._is_pulled = memory, is_pulled
        self.address = memory.address
        with self._told(f"registering {memory.num_bytes} bytes of {memory.kind}"):
            self._memory: Any = self._agent.register_memory(
                [(self.address, memory.num_bytes, memory.device, "")], memory.kind
            )
        self._remote: str | None = None
        self._numbers = itertools.count()
        self._under_way: dict[int, Any] = {}
        """Transfers by number. Only this link may hold transfers, because each references the
        agent. Otherwise the agent would end with the last transfer. NIXL crashed if that happened
        on a thread that had not used the agent."""
        self._reads: set[int] = set()
        """Numbers of the transfers that are READs."""

    @property
    def offer(self) -> Peer:
        """Return the data that the other side needs."""
        place = self._place
        metadata = self._agent.get_agent_metadata()
        return Peer(metadata, self.address, place.kind, place.device, self._is_pulled)

    def connect(self, peer: Peer) -> None:
        """Connect to the other side.

        Raises:
            NixlError: The other side cannot be reached.
        """
        with self._told("meeting the other side"):
            self._remote = self._agent.add_remote_agent(peer.metadata)
        self._peer = peer

    def drive(self) -> None:
        """Let UCX make progress. This copies data where UCX emulates."""
        with self._told("driving the link"):
            self._agent.get_new_notifs()

    def post(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Begin to write ranges (offset, length) of our block; return the transfer."""
        return self._begin("WRITE", [(at, at, size) for at, size in ranges])

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Begin to read ranges (our offset, the other's, length); return the transfer."""
        return self._begin("READ", ranges)

    def _begin(self, what: str, ranges: Sequence[tuple[int, int, int]]) -> int:
        place, peer = self._place, self._peer
        ours = [(place.address + at, size, place.device) for at, _, size in ranges]
        theirs = [(peer.address + at, size, peer.device) for _, at, size in ranges]
        with self._told(f"a {what}"):
            number = next(self._numbers)
            self._under_way[number] = self._agent.initialize_xfer(
                what,
                self._agent.get_xfer_descs(ours, place.kind),
                self._agent.get_xfer_descs(theirs, peer.kind),
                self._remote,
            )
            if what == "READ":
                self._reads.add(number)
            self._agent.transfer(self._under_way[number])
        return number

    def is_done(self, number: int) -> bool:
        """Return True if a transfer has ended. An ended transfer is released.

        Raises:
            NixlError: The transfer failed.
        """
        with self._told("a transfer"):
            state = self._agent.check_xfer_state(self._under_way[number])
            if state == "PROC":
                return False
            self._agent.release_xfer_handle(self._under_way[number])
            del self._under_way[number]
            self._reads.discard(number)
        if state != "DONE":
            raise NixlError(f"a transfer over NIXL ended in {state}: {self.profile.says}")
        return True

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Convert NIXL's errors, whose only base class is Exception."""
        try:
            yield
        except Exception as error:
            raise NixlError(
                f"{what} over NIXL failed: {type(error).__name__}: {error} ({self.profile.says})"
            ) from error

    def close(self) -> None:
        """Free the memory. Idempotent.

        NIXL frees a transfer's resources together with the remote agent, so transfers under way are
        cancelled first. If a transfer cannot be cancelled, it and its link stay until the process
        ends. A READ that does not end soon stays too. After a cancel it could still write into
        freed memory.
        """
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        try:
            self._end_reads()
            for number in self._under_way:
                self._agent.release_xfer_handle(self._under_way[number])
        except Exception:  # noqa: BLE001 - NIXL's errors have no base of their own
            _STUCK.append(self)
            return
        self._under_way.clear()
        if self._remote is not None:
            self._agent.remove_remote_agent(self._remote)
        self._agent.deregister_memory(memory)
        self._agent = None  # on this thread, which used the agent; on another thread this crashed

    def _end_reads(self) -> None:
        limit = time.monotonic() + SETTLE_S
        for number in self._reads:
            while self._agent.check_xfer_state(self._under_way[number]) == "PROC":
                if time.monotonic() > limit:
                    raise NixlError("a READ does not end")
                self.drive()


class Mirror:
    """A copy of a block, whose new bytes are pushed to the other side. For one thread at a time.

    Args:
        link: Connected link.
        block: Our copy.
        words: Names of our words.
    """

    def __init__(self, link: Link, block: FrontEndMemory, words: Sequence[str]) -> None:
        self._link, self._block, self._words = link, block, block.segment.words
        self._rings: list[tuple[Writer, int, int]] = []
        self._pushed: list[int] = []
        self._cells = [cell(FRONT_END, name) for name in words]
        self._values = [0] * len(words)
        self._transfer: int | None = None
        self._failure: str | None = None
        """The message of a failure. The error itself is not stored, because its frames reference
        the link's agent."""

    def add_ring(self, name: str, writer: Writer) -> None:
        """Push the records of this writer, too."""
        capacity = len(self._block.rings[name][0])
        self._rings.append((writer, self._block.offsets[name], capacity))
        self._pushed.append(0)

    def pump(self) -> bool:
        """Push new bytes if no push is under way; return True if all have arrived.

        Raises:
            NixlError: A push failed, now or before.
        """
        if self._failure is not None:
            raise NixlError(self._failure)
        try:
            return self._pump()
        except NixlError as error:
            self._failure = str(error)
            raise

    def _pump(self) -> bool:
        self._link.drive()
        if self._transfer is not None:
            if not self._link.is_done(self._transfer):
                return False
            self._transfer = None
        ranges = [*self._new_bytes(), *self._new_words()]
        if ranges:
            self._transfer = self._link.post(ranges)
        return not ranges

    def _new_bytes(self) -> Iterator[tuple[int, int]]:
        for i, (writer, offset, capacity) in enumerate(self._rings):
            start, end = self._pushed[i], writer.head
            if start == end:
                continue
            at, size = start % capacity, end - start + 8  # with the zero after the last record
            first = min(size, capacity - at)
            yield offset + at, first
            if first < size:
                yield offset, size - first
            self._pushed[i] = end

    def _new_words(self) -> Iterator[tuple[int, int]]:
        for i, index in enumerate(self._cells):
            value = self._words[index]
            if value != self._values[i]:
                self._values[i] = value
                yield 8 * index, 8

    def ring(self) -> None:
        """Push new bytes (`Announcer`). The next `pump` reports a failure."""
        with suppress(NixlError):
            self.pump()

    def close(self) -> None:
        """Do nothing, because no push follows."""


class NixlFrontEnd(FrontEndRings):
    """A front end whose engine is at the other end of a link."""

    nap_s = NAP_NS / NS_PER_S
    """Seconds to wait before the next `receive` while requests are open."""

    def __init__(self, block: FrontEndMemory, link: Link) -> None:
        super().__init__(block)
        self._link, self._is_closed = link, False
        self._mirror = Mirror(link, block, ("token_tail",))
        self._mirror.add_ring("ls", self.ls)
        self._mirror.add_ring("be", self.be)
        self._mirror.add_ring("cancel", self.cancels)

    def _ring(self) -> None:
        if not self._is_closed:
            self._mirror.ring()

    def receive(self) -> Iterator[Heard]:
        """Take the records of the token ring. Repeated calls also drive the link."""
        with self._lock:
            if not self._is_closed:
                self._mirror.pump()
        yield from super().receive()

    def close(self) -> None:
        """Close the link. Nothing is sent or received after this."""
        with self._lock:
            self._is_closed = True
            self._link.close()


class RemotePort(FrontEndPort):
    """A port for a front end with another clock. An arrival is never later than now."""

    def __init__(self, block: FrontEndMemory, mirror: Mirror, now_ns: Callable[[], int]) -> None:
        super().__init__(block, mirror)
        self._now_ns = now_ns

    def take(self) -> tuple[list[Submission | Revision], list[Cancel | Update]]:
        """Take the records of the rings (`FrontEndPort.take`)."""
        prompts, cancels = super().take()
        now_ns = self._now_ns()
        return [self._by(item, now_ns) for item in prompts], cancels

    def _by(self, item: Submission | Revision, now_ns: int) -> Submission | Revision:
        if isinstance(item, Revision):
            return (
                item
                if item.arrival_ns <= now_ns
                else Revision(item.keep, replace(item.rest, arrival_ns=now_ns))
            )
        return replace(item, arrival_ns=min(item.arrival_ns, now_ns))


LOOK_NS = 500_000
"""Nanoseconds after which native code returns, so that Python can drive the links."""


class NixlStop(ShmStop):
    """The stop word for front ends without a bell. It looks at the first word of every ring."""

    __slots__ = ("has_news",)

    has_news: Callable[[], bool]

    def watch(self) -> Watch:
        """Return the bell. Links do not ring it: reading `word` looks at their rings."""
        return Watch(self._address, self.seen, look_ns=LOOK_NS)

    @property
    def word(self) -> int:
        """Smallest priority of all items that have arrived and were not drained."""
        if self._bell[0] != self.seen or self.has_news():
            self._look()
        return self.value

    @word.setter
    def word(self, value: int) -> None:
        self.value = value


class NixlIngress(ShmIngress):
    """The engine's end with front ends over links, in addition to those over shared memory.

    The arguments are those of `ShmIngress`. A poll drives every link and reads the first word of
    each ring. So a poll costs microseconds where UCX emulates.
    """

    def __init__(
        self,
        control: ControlMemory,
        doorbell: Doorbell,
        now_ns: Callable[[], int],
        close: Callable[[], None],
        broken: Callable[[int, str], None],
    ) -> None:
        super().__init__(control, doorbell, now_ns, close, broken)
        stop = NixlStop(self._bell, self._look, now_ns)
        stop.has_news = self._has_news
        self.stop = stop
        self._mirrors: dict[int, Mirror] = {}

    def attach_over(self, block: FrontEndMemory, link: Link) -> None:
        """Serve a front end at the other end of a connected link."""
        mirror = Mirror(link, block, ("ls_tail", "be_tail", "cancel_tail", "progress"))
        port = RemotePort(block, mirror, self._now_ns)
        mirror.add_ring("token", port.tokens)
        self._mirrors[port.number] = mirror
        self.attach(port)

    def detach(self, number: int) -> None:
        super().detach(number)
        self._mirrors.pop(number, None)

    def drain(self) -> list[Item]:
        items = super().drain()  # its `flush` drives the links first
        self._pump()  # the places of the taken records
        return items

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep in short naps: front ends on other hosts ring no doorbell."""
        if not self._mirrors:
            super().wait(timeout_ns)
            return
        limit_ns = BEAT_NS if timeout_ns is None else min(BEAT_NS, max(0, timeout_ns))
        end_ns = time.monotonic_ns() + limit_ns
        self.flush()
        while self._bell[0] == self.stop.seen and not self._has_news():
            left_ns = end_ns - time.monotonic_ns()
            if left_ns <= 0:
                return
            select.select((self.doorbell.fd,), (), (), min(left_ns, NAP_NS) / NS_PER_S)
        self.doorbell.clear()

    def _has_news(self) -> bool:
        self._pump()
        return any(self.ports[number].has_news for number in self._mirrors)

    def flush(self) -> bool:
        backlog = super().flush()
        return not self._pump() or backlog

    def _pump(self) -> bool:
        """Push new bytes over every link; return True if all have arrived."""
        is_done = True
        for number, mirror in list(self._mirrors.items()):
            try:
                is_done &= mirror.pump()
            except NixlError as error:
                self.detach(number)
                self._broken(number, str(error))
        return is_done
