"""A front end of an engine on another host. It tokenises and detokenises, and holds no weights.

Requests and tokens go through rings over NIXL, rare messages through a TCP connection.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from qllm.config import EngineConfig, engine_config
from qllm.engine.remote import offer, peer_from
from qllm.errors import ConfigError, EngineClosedError
from qllm.frontend.client import FarClient
from qllm.frontend.rings import CLOSE_S, RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.messages import ModelInfo
from qllm.ingress.remote.meeting import Address, MeetingError, Wire, parse_address, read_secret
from qllm.ingress.remote.nixl import Link, NixlError, NixlFrontEnd
from qllm.ingress.remote.pull import PullingFrontEnd
from qllm.ingress.shm import Doorbell
from qllm.plan import ModelShape

CONNECT_S = 10.0
BEAT_S = 1.0
"""Seconds between two requests for the engine's time. The answers also show that the engine is
alive."""
IDLE_S = 0.05
"""Seconds between two looks at the rings if there are no open requests. With open requests the
front end's `nap_s` counts. No doorbell rings from another host."""
FIRST_ECHOES = 8


class Echo(NamedTuple):
    """The times of a question for the engine's time, and the answer, in nanoseconds."""

    round_trip_ns: int
    offset_ns: int
    """Engine time minus our clock, if both directions took the same time."""


class Clock:
    """The engine's clock, estimated on another host.

    The echo with the shortest round trip among the latest echoes counts. Its error is at most half
    of the round trip. New echoes replace old echoes, so the estimate follows clocks that drift.
    """

    MOST = 16

    def __init__(self) -> None:
        self._echoes: deque[Echo] = deque(maxlen=self.MOST)
        self._offset_ns = 0

    def add(self, sent_ns: int, engine_ns: int, received_ns: int) -> None:
        """Add an echo: our time at the question, the engine's time, and our time at the answer."""
        middle = (sent_ns + received_ns) // 2
        self._echoes.append(Echo(received_ns - sent_ns, engine_ns - middle))
        self._offset_ns = min(self._echoes).offset_ns

    def now_ns(self) -> int:
        """Return the present engine time in nanoseconds."""
        return time.monotonic_ns() + self._offset_ns

    @property
    def error_ns(self) -> int:
        """The largest error of `now_ns`, in nanoseconds."""
        return min(self._echoes).round_trip_ns // 2


class RemoteHello(NamedTuple):
    """An engine's description of itself."""

    info: ModelInfo
    config: EngineConfig
    trace_meta: dict[str, Any]
    model: str

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> "RemoteHello":
        """Return the hello that `EngineCard.to_json` wrote."""
        info = dict(message["info"])
        shape = ModelShape(**{**info["shape"], "is_moe": tuple(info["shape"]["is_moe"])})
        eos, drivers = frozenset(info["eos_token_ids"]), tuple(info["drivers"])
        made = {"shape": shape, "eos_token_ids": eos, "drivers": drivers}
        known = ModelInfo(**{**info, **made, "chosen": tuple(info["chosen"])})
        config = engine_config(message["config"])
        return cls(known, config, message["trace_meta"], str(message["model"]))


class RemoteClient(FarClient, RingClient):
    """A front end of an engine on another host.

    Args:
        address: Address of the engine, for messages.
        wire: Connection to the engine, after the handshake.
        hello: Description that the engine sent.
        front_end: Our copy of the rings, with a link to the engine's copy.
    """

    def __init__(
        self, address: Address, wire: Wire, hello: RemoteHello, front_end: NixlFrontEnd
    ) -> None:
        self._address, self._wire = address, wire
        self.meets_at = str(address)
        self.hello, self.info = hello, hello.info
        self.clock = Clock()
        self._far: dict[str, Any] = {"draining": False, "error": None, "costs_ns": None}
        """Latest report from the engine."""
        self._ask_lock = threading.Lock()
        self._drains = False
        self._ended = threading.Event()
        super().__init__(front_end)
        for _ in range(FIRST_ECHOES):
            self._beat()
        self._bell = Doorbell.create()
        self._receiver = threading.Thread(target=self._receive, name="qllm-receiver", daemon=True)
        self._receiver.start()
        threading.Thread(target=self._beats, name="qllm-beats", daemon=True).start()
        self._register()

    _front_end: NixlFrontEnd

    @classmethod
    def connect(cls, address: str, profile: str, secret_file: Path | None) -> "RemoteClient":
        """Connect to an engine.

        Raises:
            ConfigError: The address needs a secret, NIXL is missing, or the profiles differ.
            EngineClosedError: No program answers at the address, or another program than the engine
                answers.
        """
        where = parse_address(address)
        secret = read_secret(secret_file, where)
        try:
            sock = socket.create_connection(where, CONNECT_S)
        except OSError as error:
            raise EngineClosedError(f"no engine answers at {where}: {error}") from error
        wire = Wire(sock)
        try:
            wire.be_front_end(secret)
            return cls._meet(where, wire, profile)
        except (MeetingError, NixlError, KeyError, TypeError, ValueError) as error:
            wire.close()
            if isinstance(error, ConfigError):
                raise
            raise EngineClosedError(f"no engine at {where} would have us: {error}") from error
        except BaseException:
            wire.close()
            raise

    @classmethod
    def _meet(cls, where: Address, wire: Wire, profile: str) -> "RemoteClient":
        wire.send({"profile": profile})
        message = wire.receive()
        if "error" in message:
            raise ConfigError(f"the engine at {where} says: {message['error']}")
        hello = RemoteHello.from_json(message)
        first, second, third, fourth = (int(n) for n in message["capacities"])
        block = FrontEndMemory.create(int(message["number"]), (first, second, third, fourth))
        block.segment.close_fd()
        link = Link(f"front-end-{block.number}-{os.urandom(4).hex()}", profile, block.segment)
        try:
            wire.send(offer(link))
            peer = peer_from(wire.receive())
            link.connect(peer)
            make = PullingFrontEnd if peer.is_pulled else NixlFrontEnd
            return cls(where, wire, hello, make(block, link))
        except BaseException:
            link.close()
            raise

    # -- the receiver's thread

    def _receive(self) -> None:
        """Take tokens until the engine ends, then end the remaining requests."""
        poll = select.poll()
        poll.register(self._bell.fd, select.POLLIN)
        poll.register(self._wire.fileno(), select.POLLRDHUP)
        why: str | None = None
        while why is None:
            if self._open:
                time.sleep(self._front_end.nap_s)
            ready = dict(poll.poll(0 if self._open else 1000 * IDLE_S))
            if self._bell.fd in ready:
                self._bell.clear()
            if self._wire.fileno() in ready:
                why = "its connection has ended"
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - a broken link or ring, with its reason
                why = str(error)
        self._ended.set()
        self._wire.hang_up()
        self._end_all(f"the engine at {self._address} is gone: {self._far['error'] or why}")
        self._front_end.close()

    def _beats(self) -> None:
        """Request the engine's time repeatedly. An engine that does not answer counts as ended."""
        while not self._ended.wait(BEAT_S):
            try:
                self._beat()
            except EngineClosedError:
                self._wire.hang_up()  # the receiver sees the end of the connection
                return

    def _beat(self) -> None:
        with self._ask_lock:
            sent_ns = time.monotonic_ns()
            self._far = self._ask_locked("beat")
            self.clock.add(sent_ns, int(self._far["now_ns"]), time.monotonic_ns())

    # -- as a client

    @property
    def config(self) -> EngineConfig:
        config: EngineConfig = self.hello.config
        return config

    @property
    def draining(self) -> bool:
        return self._drains or bool(self._far["draining"])

    def costs_ns(self) -> Sequence[float] | None:
        told: Sequence[float] | None = self._far["costs_ns"]
        return told

    def now_ns(self) -> int:
        return self.clock.now_ns()

    @property
    def failure(self) -> str | None:
        return None if self._closing else self._over

    def _put(self, entry: SavedRequest, submission: Submission) -> None:
        super()._put(entry, submission)
        self._bell.ring()

    def _ask(self, op: str, *args: Any) -> Any:
        self.raise_if_closed()
        with self._ask_lock:
            return self._ask_locked(op, *args)

    def _ask_locked(self, op: str, *args: Any) -> Any:
        try:
            self._wire.send({"op": op, "args": list(args)})
            answer = self._wire.receive()
        except MeetingError as error:
            self._wire.hang_up()  # a late answer would be taken for the next answer
            raise EngineClosedError(f"the engine at {self._address} is gone: {error}") from error
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        return answer["ok"]

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache")

    def delete_kv(self, tag: bytes) -> int:
        return int(self._ask("delete_kv", tag.hex()))

    @property
    def _why_not(self) -> str:
        return f"the engine's own host; this front end meets it at {self._address}"

    def drain(self) -> None:
        """Refuse new requests at this front end only, because the engine has other front ends."""
        self.raise_if_closed()
        self._drains = True

    def _close(self) -> None:
        with self.admission_lock:
            if self._closing or threading.current_thread() is self._receiver:
                return
            self._closing = True
        if self._over is None:
            self._leave()
        self._wire.hang_up()
        self._receiver.join(CLOSE_S)
        with suppress(OSError):
            self._wire.close()
        self._bell.close()
        self._unregister()
