"""Transfer of KV between engines: the taker reads the giver's memory over NIXL.

    taker   {"profile", "ticket"}              -->        after the handshake of front ends
    giver   {"bytes", data for a READ}         <--
    taker   {data for the giver's NIXL}        -->
    giver   {"ready"}                          <--
    taker   READs of the header, then of the chosen ranges; {"done"}

During the READs the giver only lets UCX make progress. If UCX emulates a READ, UCX copies the
bytes here.
"""

import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from qllm.engine.handover.format import HEAD, header_bytes
from qllm.engine.handover.handover import Choose
from qllm.engine.remote import offer, peer_from
from qllm.errors import CheckpointError
from qllm.ingress.messages import Source
from qllm.ingress.remote.meeting import MeetingError, Wire, parse_address
from qllm.ingress.remote.nixl import Link, NixlError

CONNECT_S = 2.0
GIVE_S = 60.0
"""Seconds after which a giver stops, if the taker has not sent "done"."""
NAP_S = 0.0001
READ_BYTES = 4 << 20
"""Largest number of bytes of one READ. The taker can stop between two READs."""


class Bytes:
    """Memory of this process that another engine may read."""

    kind, device = "DRAM", 0

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return len(self.memory)

    def write(self, at: int, data: bytes) -> None:
        """Write bytes."""
        self.memory[at : at + len(data)] = data

    def close(self) -> None:
        """Do nothing. The memory is freed when nothing refers to it."""


def give(wire: Wire, profile: str, parcel: mmap.mmap) -> bool:
    """Let the engine at the other end read a parcel; return True if it reports success.

    Raises:
        MeetingError: The other engine is gone.
        NixlError: NIXL cannot offer the memory.
    """
    link = Link(_name("giver"), profile, Bytes(parcel))
    try:
        wire.send({"bytes": len(parcel), **offer(link)})
        link.connect(peer_from(wire.receive()))
        wire.send({"ready": True})
        until = time.monotonic() + GIVE_S
        while time.monotonic() < until:
            link.drive()
            if select.select([wire.fileno()], [], [], NAP_S)[0]:
                return bool(wire.receive().get("done"))
        return False
    finally:
        link.close()


class Puller:
    """A fetcher of parcels from engines that have the same secret. Callable from any thread.

    Args:
        secret: Secret of all engines and front ends.
        profile: Transport of NIXL.
    """

    def __init__(self, secret: bytes, profile: str) -> None:
        self._secret, self._profile = secret, profile

    def __call__(
        self,
        source: Source,
        allow: Callable[[int], None],
        choose: Choose,
        is_wanted: Callable[[], bool],
    ) -> mmap.mmap:
        """Fetch a parcel, see `qllm.engine.handover.handover.Pull`.

        Raises:
            CheckpointError: The ticket has no KV, or the request no longer waits for the KV.
            ConfigError: The address is invalid.
            MeetingError: The other engine is gone, or has another secret.
            NixlError: A READ failed.
        """
        address = parse_address(source.address)
        sock = socket.socket(address.family)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(tuple(address))
        except OSError as error:
            sock.close()
            raise MeetingError(f"no engine answers at {address}: {error}") from error
        wire = Wire(sock)
        try:
            wire.be_front_end(self._secret)
            wire.send({"profile": self._profile, "ticket": source.ticket})
            return self._fetch(wire, wire.receive(), allow, choose, is_wanted)
        finally:
            wire.close()

    def _fetch(
        self,
        wire: Wire,
        told: dict[str, Any],
        allow: Callable[[int], None],
        choose: Choose,
        is_wanted: Callable[[], bool],
    ) -> mmap.mmap:
        try:
            peer = peer_from(told)
            num_bytes = told["bytes"]
            if type(num_bytes) is not int or num_bytes < HEAD.size:
                raise ValueError(f"a parcel of {num_bytes!r:.20} bytes")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"an offer of KV that makes no sense: {error!r:.100}") from error
        allow(num_bytes)
        memory = mmap.mmap(-1, num_bytes)  # memory is allocated page by page as bytes come
        link = Link(_name("taker"), self._profile, Bytes(memory))
        try:
            wire.send(offer(link))
            link.connect(peer)
            if not wire.receive().get("ready"):
                raise CheckpointError("the other engine is not ready to give KV")
            ours = _Reader(link, wire, is_wanted)
            ours.read([(0, HEAD.size)])
            start = header_bytes(memory[: HEAD.size])
            if start > num_bytes:
                raise CheckpointError(f"a header of {start} bytes in a parcel of {num_bytes}")
            ours.read([(0, start)])
            ours.read(choose(memoryview(memory)[:start], num_bytes))
            wire.send({"done": True})
        finally:
            link.close()
        return memory


class _Reader:
    """READs over one link, until all are done or the request no longer waits."""

    def __init__(self, link: Link, wire: Wire, is_wanted: Callable[[], bool]) -> None:
        self._link, self._wire, self._is_wanted = link, wire, is_wanted

    def read(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read ranges (offset, length) of the other engine's memory to the same offsets here."""
        for group in _grouped(ranges):
            transfer = self._link.fetch([(at, at, size) for at, size in group])
            while not self._link.is_done(transfer):
                if not self._is_wanted():
                    raise CheckpointError("nobody waits for the KV any more")
                if select.select([self._wire.fileno()], [], [], 0)[0]:
                    raise NixlError("the other engine has ended the connection")
                self._link.drive()


def _grouped(ranges: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield groups of ranges of at most `READ_BYTES`. Touching ranges are joined, long ones cut."""
    joined: list[list[int]] = []
    for at, size in sorted(ranges):
        if joined and sum(joined[-1]) == at:
            joined[-1][1] += size
        elif size:
            joined.append([at, size])
    group, total = list[tuple[int, int]](), 0
    for at, size in joined:
        while size:
            part = min(size, READ_BYTES - total)
            group.append((at, part))
            at, size, total = at + part, size - part, total + part
            if total == READ_BYTES:
                yield group
                group, total = [], 0
    if group:
        yield group


def _name(who: str) -> str:
    return f"{who}-{os.getpid()}-{os.urandom(4).hex()}"
