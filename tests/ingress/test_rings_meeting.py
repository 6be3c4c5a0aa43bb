"""How two hosts meet: secrets, messages, clocks, addresses."""

import json
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.frontend.remote import Clock
from qllm.ingress.remote.meeting import (
    LIVENESS_S,
    MIN_SECRET_BYTES,
    VERSION,
    Address,
    MeetingError,
    Wire,
    parse_address,
    read_secret,
)
from qllm.server.config import load_config

SECRET = b"s" * MIN_SECRET_BYTES
LOOPBACK = Address("127.0.0.1", 0)


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


class Met:
    """An engine's and a front end's wire after their handshake, or what it ended with."""

    def __init__(self, engines: bytes, front_ends: bytes) -> None:
        front_end, engine = sockets()
        self.engine, self.front_end = Wire(engine), Wire(front_end)
        self.raw = engine
        self.errors: list[MeetingError] = []
        thread = threading.Thread(target=self._try, args=(self.engine, "be_engine", engines))
        thread.start()
        self._try(self.front_end, "be_front_end", front_ends)
        thread.join()

    def _try(self, wire: Wire, role: str, secret: bytes) -> None:
        try:
            getattr(wire, role)(secret)
        except MeetingError as error:
            self.errors.append(error)
            wire.close()

    def close(self) -> None:
        self.engine.close()
        self.front_end.close()


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_both_sides_know_the_secret(secret: bytes) -> None:
    met = Met(secret, secret)
    assert met.errors == []
    for n in range(3):
        met.front_end.send({"n": n, "text": "ü" * 10_000})
        assert met.engine.receive()["n"] == n
        met.engine.send({"n": -n})
        assert met.front_end.receive() == {"n": -n}
    met.close()


@pytest.mark.parametrize(("engines", "front_ends"), [(SECRET, b""), (b"", SECRET), (SECRET, b"t")])
def test_hosts_do_not_meet_without_the_same_secret(engines: bytes, front_ends: bytes) -> None:
    met = Met(engines, front_ends)
    assert len(met.errors) == 2
    assert any("does not know our secret" in str(error) for error in met.errors)


def test_a_false_engine_is_seen() -> None:
    front_end, engine = sockets()
    fake, wire = Wire(engine), Wire(front_end)
    fake.send({"qllm": VERSION, "nonce": "0" * 64})
    fake.send({"proof": "0" * 64})
    with pytest.raises(MeetingError, match="is it ours"):
        wire.be_front_end(SECRET)
    for sock in (fake, wire):
        sock.close()


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


class Recorder:
    """A socket that keeps what is sent instead of sending it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)


@pytest.mark.parametrize("what", ["replayed", "swapped", "changed", "returned"])
def test_a_host_between_the_two_cannot_send_messages(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = Met(SECRET, SECRET)
    recorder = Recorder()
    real, met.engine._sock = met.engine._sock, recorder  # type: ignore[assignment]
    for n in range(2):
        met.engine.send({"op": n})
    met.engine._sock = real
    first, second = recorder.sent
    victim, least = met.front_end, 0
    if what == "replayed":
        sent, least = [first, first], 1
    elif what == "swapped":
        sent = [second, first]
    elif what == "changed":
        sent = [first.replace(b"0", b"1", 1) if b"0" in first[4:-32] else first]
        assert sent != [first]
    else:  # a front end's own message comes back to it as the engine's
        met.front_end._sock, ours = recorder, met.front_end._sock  # type: ignore[assignment]
        met.front_end.send({"op": 0})
        met.front_end._sock = ours
        sent = [recorder.sent[-1]]
    for data in sent:
        met.raw.sendall(data)
    for _ in range(least):
        victim.receive()
    with pytest.raises(MeetingError, match="has not sent like this"):
        victim.receive()
    met.close()


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(frame)), st.booleans())
def test_strangers_get_nowhere(data: bytes, is_engine: bool) -> None:
    stranger, ours = sockets()
    wire = Wire(ours)
    stranger.sendall(data)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(MeetingError):
        (wire.be_engine if is_engine else wire.be_front_end)(SECRET)
    wire.close()
    stranger.close()


@pytest.mark.parametrize("field", ["nonce", "proof"])
@pytest.mark.parametrize("is_engine", [True, False])
def test_a_proof_that_is_no_text_is_refused(is_engine: bool, field: str) -> None:
    """JSON may have halves of characters, which no bytes stand for."""
    said = {"qllm": VERSION, "nonce": "0" * 64, "proof": "0" * 64} | {field: "\ud800" * 64}
    stranger, ours = sockets()
    wire = Wire(ours)
    stranger.sendall(2 * frame(json.dumps(said).encode()))
    with pytest.raises(MeetingError, match=f"without a {field}"):
        (wire.be_engine if is_engine else wire.be_front_end)(SECRET)
    wire.close()
    stranger.close()


def test_a_stranger_cannot_drip_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qllm.ingress.remote.meeting.HANDSHAKE_S", 0.3)
    stranger, ours = sockets()
    wire, ended = Wire(ours), threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            stranger.sendall(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    stranger.sendall(struct.pack(">I", 4000))
    with pytest.raises(MeetingError, match="is silent"):
        wire.be_engine(SECRET)
    ended.set()
    thread.join()
    wire.close()
    stranger.close()


def test_a_stranger_cannot_make_us_wait_for_a_large_message() -> None:
    stranger, ours = sockets()
    stranger.sendall(struct.pack(">I", 1 << 31))
    wire = Wire(ours)
    with pytest.raises(MeetingError, match="at most 4096 are allowed"):
        wire.be_engine(SECRET)
    wire.close()
    stranger.close()


def test_addresses() -> None:
    assert parse_address("a.b:80") == Address("a.b", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    for wrong in ("", "a", "a:", ":1", "::1:80", "a:99999", "a:-1", "a:x"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_address(wrong)


def test_other_hosts_need_a_secret(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert read_secret(None, Address(host, 1)) == b""
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="the same secret_file"):
            read_secret(None, Address(host, 1))
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(file, Address("192.0.2.1", 1)) == SECRET
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="holds 5 bytes; 16 are needed"):
        read_secret(file, LOOPBACK)


@given(
    offset=st.integers(-(10**15), 10**15),
    ways=st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1, max_size=40),
)
def test_a_clock_is_off_by_half_a_round_trip_at_most(
    offset: int, ways: list[tuple[int, int]]
) -> None:
    clock, now = Clock(), 0
    for there, back in ways:
        clock.add(now, now + there + offset, now + there + back)
        now += there + back + 10**9
    assert abs(clock._offset_ns - offset) <= clock.error_ns + 1
    assert clock.error_ns == min(sum(way) // 2 for way in ways[-Clock.MOST :])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"role": "engine", "model": "tiny"}, "that needs it"),
        ({"role": "frontend"}, "engine_address=None: engine_address=HOST:PORT goes with"),
        ({"model": "tiny", "listen": "a:1"}, "listen='a:1': listen=HOST:PORT goes with"),
        ({"model": "tiny", "role": "all", "engine_address": "a:1"}, "role='frontend'"),
        ({"engine_address": "a:1", "route": "least"}, "route='least' chooses among engines"),
        (
            {"role": "frontend", "engine_address": "a:1", "policy": "fcfs"},
            "policy is a setting of the engine",
        ),
    ],
)
def test_roles_that_make_no_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, {}, settings)


class Looks:
    """A poll whose looks are counted; something comes at the last of them."""

    def __init__(self, num_empty: int, come: Callable[[], object]) -> None:
        self.left, self.come, self.asked_ms = num_empty, come, list[float]()

    def register(self, *_: object) -> None:
        pass

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.asked_ms.append(timeout_ms)
        self.left -= 1
        if self.left >= 0:
            return []
        self.come()
        return [(0, select.POLLIN)]


def test_a_side_is_gone_after_so_many_looks_and_not_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look may last an hour: this process stood still, and the other one with it."""
    met = Met(SECRET, SECRET)
    looks = Looks(9, lambda: met.engine.send({"n": 1}))
    monkeypatch.setattr("qllm.ingress.remote.meeting.select.poll", lambda: looks)
    assert met.front_end.receive() == {"n": 1}
    assert looks.asked_ms[:10] == [1000.0] * 10
    looks.left, looks.asked_ms = 99, []
    with pytest.raises(MeetingError, match="the other side is silent"):
        met.front_end.receive()
    assert sum(looks.asked_ms) == 1000 * LIVENESS_S
    met.close()
