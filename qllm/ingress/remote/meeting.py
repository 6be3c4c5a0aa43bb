"""Connections between an engine and a front end of another host: authenticated JSON over TCP.

    engine      {"qllm": VERSION, "nonce": A}
    front end   {"nonce": B, "proof": HMAC(secret, "front end" A B)}
    engine      {"proof": HMAC(secret, "engine" A B)}

After that every message carries a MAC under a key of this connection, with its direction and
number. So an attacker on the network cannot add, change, repeat or reorder a message. Messages and
rings are not encrypted, so use a private network. Messages are JSON. Pickle would let the other
side run code here.

A rank of a model on another host (`qllm/sharded/`) has the engine's half, and the engine that
connects to the rank has the front end's.
"""

import hashlib
import hmac
import ipaddress
import json
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import ConfigError, QllmError, naming

VERSION = 4
"""Version of these messages and of the layout of the rings that they set up."""
HANDSHAKE_S = 10.0
"""Longest time of the whole handshake, in seconds."""
LIVENESS_S = 10.0
"""Seconds of silence after which the other side counts as ended."""
LOOK_S = 1.0
"""Length in seconds of one wait for data. Silence is counted in such waits, so a suspension of the
machine counts as one wait."""
MAX_STRANGER_BYTES = 4096
"""Largest size of a message, in bytes, before the other side has proved itself."""
MAX_BYTES = 16 << 20
MIN_SECRET_BYTES = 16
SAME = "do both sides have the same secret_file?"
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")
_MAC_BYTES = hashlib.sha256().digest_size


class MeetingError(QllmError):
    """An error: the other side has ended, or is not the expected process."""


class Address(NamedTuple):
    """The address at which an engine listens for front ends of other hosts."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of sockets for this address."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        try:
            found = socket.getaddrinfo(self.host, None)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name has this form
            raise ConfigError(f"{self.host!r} cannot be resolved: {error}") from error
        return all(ipaddress.ip_address(str(f[4][0]).partition("%")[0]).is_loopback for f in found)


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigError: The text is neither.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{text!r} must be HOST:PORT, or [ADDRESS]:PORT for IPv6")
    return Address(host, int(port))


def read_secret(file: Path | None, address: Address, setting: str = "secret_file") -> bytes:
    """Return the secret that both sides share. It may be empty for a loopback address.

    Args:
        file: File with the secret; None if there is none.
        address: Address of one side.
        setting: Name of the setting with the file, for errors.

    Raises:
        ConfigError: The address needs a secret, and the secret is missing or short.
    """
    if file is None:
        if address.is_loopback():
            return b""
        raise ConfigError(
            f"{address} can be reached by other hosts: give both sides the same {setting}, with "
            f"{MIN_SECRET_BYTES} bytes or more, for example of `openssl rand -hex 32`"
        )
    with naming(setting, file):
        secret = file.read_bytes().strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{setting}={str(file)!r} holds {len(secret)} bytes; {MIN_SECRET_BYTES} are needed"
        )
    return secret


class Meeting(NamedTuple):
    """Settings under which an engine accepts front ends of other hosts."""

    address: Address
    profile: str
    secret: bytes


def is_silent(fd: int) -> bool:
    """Wait for data; return True if none came for `LIVENESS_S`.

    Args:
        fd: Descriptor of a connection. A closed connection counts as readable.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    looks = max(1, round(LIVENESS_S / LOOK_S))
    return not any(poll.poll(1000 * LOOK_S) for _ in range(looks))


class Wire:
    """One authenticated connection. One thread at a time uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        with suppress(OSError):  # the peer has ended already; the first message will show it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handshake_ends = time.monotonic() + HANDSHAKE_S
        self._key: bytes | None = None
        self._labels = (b"", b"")
        self._counts = [0, 0]

    @property
    def socket(self) -> socket.socket:
        """The socket, for what follows the messages."""
        return self._sock

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def be_engine(self, secret: bytes) -> None:
        """Do the engine's half of the handshake.

        Raises:
            MeetingError: The other side does not know the secret, or has ended.
        """
        ours = secrets.token_hex(32)
        self.send({"qllm": VERSION, "nonce": ours})
        answer = self.receive()
        nonces = ours + _text(answer, "nonce")
        if not _same(_proof(secret, "front end", nonces), _text(answer, "proof")):
            raise MeetingError("the other side does not know our secret")
        self.send({"proof": _proof(secret, "engine", nonces)})
        self._begin(secret, nonces, b"engine", b"front end")

    def be_front_end(self, secret: bytes) -> None:
        """Do the front end's half of the handshake.

        Raises:
            MeetingError: The other side is no engine of our version, does not know the secret, or
                has ended.
        """
        hello = self.receive()
        if hello.get("qllm") != VERSION:
            raise MeetingError(
                f"what answers speaks version {hello.get('qllm')!r:.20}, this is version "
                f"{VERSION}; run the same release of qllm on both sides"
            )
        ours = secrets.token_hex(32)
        nonces = _text(hello, "nonce") + ours
        self.send({"nonce": ours, "proof": _proof(secret, "front end", nonces)})
        try:
            answer = self.receive()
        except MeetingError as error:
            raise MeetingError(f"{error}; {SAME}") from error
        if "error" in answer:
            raise MeetingError(f"it says {answer['error']!r:.200}; {SAME}")
        if not _same(_proof(secret, "engine", nonces), _text(answer, "proof")):
            raise MeetingError("the other side does not know our secret; is it ours?")
        self._begin(secret, nonces, b"front end", b"engine")

    def _begin(self, secret: bytes, nonces: str, ours: bytes, theirs: bytes) -> None:
        self._key = hmac.digest(secret, b"session" + nonces.encode(), "sha256")
        self._labels = ours, theirs
        self._sock.settimeout(LIVENESS_S)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            MeetingError: The other side has ended.
        """
        data = json.dumps(message).encode()
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data + self._mac(0, data))
        except OSError as error:
            raise MeetingError(f"the connection has ended: {error}") from error

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            MeetingError: The other side has ended or is silent, or the message was forged.
        """
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        limit = MAX_STRANGER_BYTES if self._key is None else MAX_BYTES
        if size > limit:
            raise MeetingError(f"a message of {size} bytes; at most {limit} are allowed")
        data = self._read(size)
        mac = b"" if self._key is None else self._read(_MAC_BYTES)
        if not hmac.compare_digest(mac, self._mac(1, data)):
            raise MeetingError("a message that the other side has not sent like this")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MeetingError(f"a message that is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise MeetingError("a message that is no object")
        return message

    def _mac(self, way: int, data: bytes) -> bytes:
        """Return the MAC of the next message that is sent (`way` 0) or received (1)."""
        if self._key is None:
            return b""
        self._counts[way] += 1
        what = self._labels[way] + _COUNT.pack(self._counts[way]) + data
        return hmac.digest(self._key, what, "sha256")

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            if self._key is None:
                left_s = self._handshake_ends - time.monotonic()
                self._sock.settimeout(max(1e-3, left_s))
            elif is_silent(self._sock.fileno()):
                raise MeetingError("the other side is silent")
            try:
                part = self._sock.recv(min(size, 1 << 20))
            except TimeoutError as error:
                raise MeetingError("the other side is silent") from error
            except OSError as error:
                raise MeetingError(f"the connection has ended: {error}") from error
            if not part:
                raise MeetingError("the other side has ended the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        """Shut down the connection, so that both sides see its end. Callable from any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._sock.close()


def _proof(secret: bytes, who: str, nonces: str) -> str:
    return hmac.digest(secret, (who + nonces).encode(), "sha256").hex()


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) != 64 or not value.isascii():
        raise MeetingError(f"a handshake without a {name}")
    return value
