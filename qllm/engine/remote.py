"""A listener for front ends on other hosts.

Each front end has a TCP connection (`qllm.ingress.remote.meeting`) for rare messages, and rings
over NIXL for requests and tokens. A front end counts as gone once its connection ends or stays
silent.
"""

import base64
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from qllm.errors import ConfigError, QllmError
from qllm.ingress.memory import Memory
from qllm.ingress.messages import EngineCard
from qllm.ingress.remote.meeting import Meeting, MeetingError, Wire
from qllm.ingress.remote.nixl import KINDS, Link, Peer

LOG = logging.getLogger("qllm.engine")
MAX_STRANGERS = 8
"""Limit of connections that have not authenticated yet. A connection above it is closed at once."""
ACCEPT_AGAIN_S = 0.1
MAX_LATENCIES = 1000
"""Limit of latencies in one answer."""


class RemoteMemory(Protocol):
    """The memory of a front end: a `FrontEndMemory`, or a `qllm.device.rings.DeviceRings`."""

    @property
    def number(self) -> int: ...
    @property
    def capacities(self) -> tuple[int, ...]: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def is_pulled(self) -> bool: ...


class RemoteFrontEnd(NamedTuple):
    """A front end of another host that completed the handshake."""

    number: int
    block: Any
    """The memory of the front end's rings, made by `make_memory` of the listener."""
    link: Link
    wire: Wire


class RemoteListener:
    """A listener that serves each front end on a thread of its own.

    Args:
        meeting: Address, and the secret of allowed clients.
        make_memory: Function that makes the memory of one more front end. It refuses a front end
            with a `ConfigError`.
        enter: Callback that attaches a front end that is ready.
        leave: Callback for a front end that is gone.
        answer: Function that answers an operation of a front end by name.
        hand: Function that lets another engine read the KV of a ticket, over a connection.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(
        self,
        meeting: Meeting,
        make_memory: Callable[[], RemoteMemory],
        enter: Callable[[RemoteFrontEnd], None],
        leave: Callable[[RemoteFrontEnd], None],
        answer: Callable[[str, list[Any]], Any],
        hand: Callable[[Wire, str], None],
    ) -> None:
        self._meeting, self._hand = meeting, hand
        self._make_memory, self._enter, self._leave = make_memory, enter, leave
        self._answer = answer
        self._card: EngineCard | None = None
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._listener = socket.socket(meeting.address.family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(tuple(meeting.address))
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen on {meeting.address}: {error}") from error
        host, port = self._listener.getsockname()[:2]
        self.address = meeting.address._replace(host=host, port=port)

    def listen(self) -> None:
        """Accept connections. Front ends wait until `open`."""
        self._listener.listen()

    def open(self, card: EngineCard) -> None:
        """Serve front ends from now on."""
        self._card = card
        threading.Thread(target=self._listen, name="qllm-remote", daemon=True).start()
        LOG.info("front ends of other hosts meet the engine at %s", self.address)

    def _listen(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._listener.accept()
            except OSError as error:  # the front end left already, or no descriptors are left
                LOG.warning("a front end could not be let in: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._receive, args=(Wire(sock), host), daemon=True).start()

    def _receive(self, wire: Wire, host: str) -> None:
        front_end = None
        try:
            asked = self._know(wire)
            if "ticket" not in asked:
                front_end = self._meet(wire)
        except (QllmError, KeyError, TypeError, ValueError) as error:
            LOG.warning("a front end at %s was turned away: %s", host, error)
            with suppress(MeetingError):
                wire.send({"error": str(error)})
            wire.close()
            return
        finally:
            self._strangers.release()
        if front_end is None:
            self._serve_engine(wire, str(asked["ticket"]), host)
            return
        try:
            self._enter(front_end)
            while True:
                wire.send(self._reply(wire.receive()))
        except MeetingError:
            pass
        finally:
            self._leave(front_end)
            wire.close()

    def _serve_engine(self, wire: Wire, ticket: str, host: str) -> None:
        """Let another engine fetch KV."""
        try:
            self._hand(wire, ticket)
        except QllmError as error:
            LOG.warning("KV was not handed over to %s: %s", host, error)
            with suppress(MeetingError):
                wire.send({"error": str(error)})
        finally:
            wire.close()

    def _know(self, wire: Wire) -> dict[str, Any]:
        """Authenticate the connecting process; return its request."""
        wire.be_engine(self._meeting.secret)
        asked = wire.receive()
        if asked["profile"] != self._meeting.profile:
            raise ConfigError(
                f"profile={asked['profile']!r:.20} meets an engine with profile="
                f"{self._meeting.profile!r}; give both sides the same"
            )
        return asked

    def _meet(self, wire: Wire) -> RemoteFrontEnd:
        assert self._card is not None
        block = self._make_memory()
        name = f"engine-{block.number}-{os.urandom(4).hex()}"
        try:
            link = Link(name, self._meeting.profile, block.memory, is_pulled=block.is_pulled)
        except BaseException:
            block.memory.close()
            raise
        try:
            told = {"number": block.number, "capacities": block.capacities}
            wire.send({**self._card.to_json(), **told})
            link.connect(peer_from(wire.receive()))
            wire.send(offer(link))
        except BaseException:
            link.close()
            block.memory.close()
            raise
        return RemoteFrontEnd(block.number, block, link, wire)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": self._answer(str(message["op"]), list(message["args"]))}
        except (QllmError, KeyError, TypeError, ValueError) as error:
            return {"error": str(error)}


def offer(link: Link) -> dict[str, Any]:
    """Return the message that the other engine or front end needs to connect."""
    peer = link.offer._asdict()
    return {**peer, "metadata": base64.b64encode(peer["metadata"]).decode()}


def peer_from(message: dict[str, Any]) -> Peer:
    """Return the peer in an offer of another engine or front end.

    Raises:
        MeetingError: The message is a refusal; the error has its reason.
        ValueError: The message is not a valid offer.
    """
    if "error" in message:
        raise MeetingError(str(message["error"]))
    kind, is_pulled = message["kind"], message["is_pulled"]
    if kind not in KINDS or not isinstance(is_pulled, bool):
        raise ValueError(f"an offer of {kind!r:.20} memory, is_pulled={is_pulled!r:.20}")
    metadata = base64.b64decode(message["metadata"])
    return Peer(metadata, int(message["address"]), kind, int(message["device"]), is_pulled)


def trim_latencies(stats: dict[str, Any]) -> dict[str, Any]:
    """Return statistics with only the latest latencies, small enough to request often."""
    return {**stats, "preempt_latencies_ms": stats["preempt_latencies_ms"][-MAX_LATENCIES:]}
