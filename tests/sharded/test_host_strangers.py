"""Hosts of ranks and peers that are wrong: bytes, silence, processes that end, and what is left."""

import ctypes
import errno
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from ctypes import c_int64
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm.errors import DeviceError
from qllm.ingress.remote.meeting import Wire, parse_address
from qllm.kernels import cpu
from qllm.kernels.software import software
from qllm.models.identity import identity
from qllm.scheduler.program import START
from qllm.sharded import host_rank, hosts
from qllm.sharded.group import FETCH, GROUP_BYTES, SWEEP
from qllm.sharded.host_memory import STARTS, RegionStruct
from qllm.sharded.hosts import Asked as AskedRank
from qllm.sharded.memory import ADDRESS_BYTES
from tests.support.hosts import SECRET
from tests.support.rank_hosts import (
    NAME,
    RankHost,
    StubHost,
    children_of,
    is_there,
    logging_to,
    runner_over,
    start_over,
)
from tests.support.sharded import group_of, wide_model
from tests.support.stops import add_prompts, whole_program
from tests.support.sweeps import Watched
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
MAGIC, CALL, PART, OTHER, REPORT = 0x32304B4E494C4C51, 1, 2, 4, 6
"""Magic number and kinds of messages: see link.cpp."""
LAST_BYTES = ADDRESS_BYTES - 8
"""Offset of the last 8 bytes of the ranks' memory."""


@pytest.fixture
def host() -> Any:
    with RankHost(lambda _: wide_model(NAME)) as made:
        yield made


# -- bytes that are no message


class Head(ctypes.Structure):
    """`Head` in link.cpp."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("magic", "kind", "call", "call_kind", "gather", "sender", "what", "num_regions"),
            "num_bytes",
        )
    )


def message(*region: int, data: bytes = b"", **head: int) -> bytes:
    """Return a message of the first call, with one region.

    Args:
        region: Fields of the region.
        data: Bytes of the region.
        head: Fields of the head that are not those of a report.
    """
    fields = {"magic": MAGIC, "kind": REPORT, "call": 1, "num_regions": 1, "num_bytes": len(data)}
    return bytes(Head(**fields | head)) + bytes(RegionStruct(*region)) + data


Garbled = Callable[..., bytes]
"""Function of the first address of the ranks' memory, and of fields of the head."""
GARBLED: dict[str, Garbled] = {
    "text": lambda start, **head: b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9,
    "not in the memory": lambda start, **head: message(4096, 8, 0, 1, -1, data=bytes(8), **head),
    "rows far apart": lambda start, **head: message(
        start, 8, 1 << 62, 3, -1, data=bytes(24), **head
    ),
    "fewer bytes": lambda start, **head: message(start, 1 << 20, 0, 1, -1, data=bytes(8), **head),
    "more bytes": lambda start, **head: message(start, 8, 0, 1, -1, data=bytes(16), **head),
    "2^64 bytes": lambda start, **head: message(start, 1 << 32, 0, 1 << 32, -1, **head),
    "rows of no bytes": lambda start, **head: message(start, 0, 0, 1 << 40, -1, **head),
}


def part(start: int, **head: int) -> bytes:
    """Return a part of a gather of the second call."""
    last = start + LAST_BYTES
    return message(last, 8, 0, 1, -1, data=bytes(8), **({"kind": PART, "call": 2} | head))


WRONG_PARTS: dict[str, Garbled] = {
    "a part twice": lambda start, **_: 2 * part(start),
    "a part of no gather": lambda start, **_: part(start, gather=-1),
    "a part of rank 0": lambda start, **_: part(start, kind=OTHER, sender=0),
    "a part of no rank": lambda start, **_: part(start, kind=OTHER, sender=7),
}


@pytest.mark.parametrize("kind", [*GARBLED, *WRONG_PARTS])
def test_bytes_that_are_no_message_of_a_rank_end_the_engine(kind: str) -> None:
    def answer(wire: Wire) -> None:
        asked = wire.receive()
        own = {"software": software(), "kernels": cpu.kind(), "clock_ns": time.time_ns()}
        wire.send({"job": asked["job"]} | own)
        wire.send({"weights": identity(wide_model(NAME)), "pid": os.getpid()})
        sock = wire.socket
        sock.settimeout(60)
        assert sock.recv(1 << 20), "the engine calls"
        if kind in WRONG_PARTS:
            sock.sendall(part(asked["start"], kind=REPORT, call=1))
            assert sock.recv(1 << 20), "the engine calls again"
        sock.sendall((GARBLED | WRONG_PARTS)[kind](asked["start"]))
        while sock.recv(1 << 20):
            pass

    stub = StubHost(answer)
    runner = runner_over([stub.address], wide_model(NAME), deadline_s=60)
    add_prompts(runner, (21, 5))
    program = whole_program(runner)
    with pytest.raises(DeviceError, match="sent something else than a message"):
        runner.run(program, START, Watched())
    runner.close()
    stub.join()


WRONG_CALLS: dict[str, Garbled] = {
    "arguments not in the memory": lambda start, **_: message(
        start, 8, 0, 1, -1, data=bytes(8), kind=CALL, call_kind=SWEEP, what=4096
    ),
    "arguments at its last bytes": lambda start, **_: message(
        start, 8, 0, 1, -1, data=bytes(8), kind=CALL, call_kind=FETCH, what=start + LAST_BYTES
    ),
    "a call of no kind": lambda start, **_: message(
        start, 8, 0, 1, -1, data=bytes(8), kind=CALL, call_kind=99, what=start
    ),
}


def begun(address: str, start: int) -> Wire:
    """Start a rank as an engine does, without one."""
    wire = Wire(socket.create_connection(parse_address(address)))
    wire.be_front_end(SECRET)
    asked = AskedRank("0123", 1, 2, start, start, 5.0, None, "auto", "bf16")
    wire.send(asked._asdict())
    assert wire.receive()["job"] == "0123"
    assert "pid" in wire.receive()
    return wire


@pytest.mark.parametrize("kind", [*GARBLED, *WRONG_CALLS])
def test_bytes_that_are_no_call_end_the_rank(kind: str, tmp_path: Path) -> None:
    """The process of the rank ends by itself. No signal kills it."""
    log, start = tmp_path / "log", STARTS[-1]
    say = (GARBLED | WRONG_CALLS)[kind]
    with RankHost(lambda _: wide_model(NAME), before=logging_to(log)) as host:
        with closing(begun(host.address, start)) as wire:
            wire.socket.sendall(say(start, kind=CALL, call_kind=FETCH, what=start + GROUP_BYTES))
            wait_for(lambda: "has ended" in log.read_text())
        assert "job 0123 has ended\n" in log.read_text()


# -- clients that are no engine


def test_clients_that_say_nothing_delay_no_engine(host: RankHost) -> None:
    """A few of them have processes. The oldest ends for one more."""
    address, most = parse_address(host.address), host_rank.MOST_STRANGERS
    with ExitStack() as stack:
        for _ in range(3 * most):
            stack.enter_context(socket.create_connection(address))
        start_over(host.address)
        assert 0 < len(children_of(host.process.pid or 0)) <= most + 1
    wait_for(lambda: not children_of(host.process.pid or 0))


def test_an_engine_of_another_release_gets_the_name_of_this_one(host: RankHost) -> None:
    """Its request has other fields. It refuses the answer, with both names in its error."""
    with closing(Wire(socket.create_connection(parse_address(host.address)))) as wire:
        wire.be_front_end(SECRET)
        wire.send({"job": "0123", "field": "of later"})
        assert wire.receive()["software"] == software()
    start_over(host.address)


def broken_once(owner: type, name: str) -> None:
    """Let a method raise the system's error of too many open files, at its first call."""
    real = getattr(owner, name)

    def broken(*_: Any) -> None:
        setattr(owner, name, real)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    setattr(owner, name, broken)


def test_a_connection_waits_while_the_system_accepts_none(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def before() -> None:
        logging_to(log)()
        broken_once(socket.socket, "accept")

    with RankHost(lambda _: wide_model(NAME), before=before) as host:
        start_over(host.address)
    assert "a connection cannot be accepted: [Errno 24] Too many open files" in log.read_text()


def test_a_host_serves_the_next_engine_after_it_could_not_fork(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def before() -> None:
        logging_to(log)()
        broken_once(host_rank.ForkProcess, "start")

    with RankHost(lambda _: wide_model(NAME), before=before) as host:
        with pytest.raises(DeviceError, match=f"{host.address}' does not answer as a rank: "):
            start_over(host.address)
        start_over(host.address)
    assert "cannot be answered: [Errno 24] Too many open files" in log.read_text()


# -- processes that end


def test_the_log_names_the_code_of_a_rank_that_was_killed_and_no_other(tmp_path: Path) -> None:
    """An engine ends while its rank is stopped, so the host kills the rank. Then a rank is killed.

    The second engine finds that its rank has gone.
    """
    log = tmp_path / "log"
    with RankHost(lambda _: wide_model(NAME), before=logging_to(log)) as host:
        for how in (signal.SIGSTOP, signal.SIGKILL):
            runner = runner_over([host.address], wide_model(NAME))
            os.kill(group_of(runner).processes[1], how)
            if how == signal.SIGKILL:
                wait_for(lambda: "code -9" in log.read_text())
            runner.close()
            wait_for(lambda: "has ended" in log.read_text())
            assert ("code" in log.read_text()) == (how == signal.SIGKILL)


def call_a_stopped_rank(address: str, pipe: Connection) -> None:
    """Make a call with more bytes than a rank that is stopped accepts."""
    runner = runner_over([address], wide_model(NAME), deadline_s=3)
    backend: Any = runner.backend
    pid = backend.ranks[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    large = backend._memory.copy(torch.ones(32 << 20, dtype=torch.uint8))
    pipe.send(pid)
    backend.compute.embed([1])
    assert large.numel() > 0


def has_unsent(address: str) -> bool:
    """Return True if a connection to an address has bytes that the other side does not accept."""
    port = f":{parse_address(address).port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(x[2].endswith(port) and int(x[4].partition(":")[0], 16) > 1 << 16 for x in lines)


def test_a_host_is_free_soon_after_the_end_of_an_engine_whose_rank_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is killed with bytes that were never sent, so its end comes after them."""
    soon = [(level, name, min(value, 1)) for level, name, value in hosts.KEEPALIVE]
    monkeypatch.setattr(hosts, "KEEPALIVE", tuple(soon))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with RankHost(lambda _: wide_model(NAME)) as host:
        engine = context.Process(target=call_a_stopped_rank, args=(host.address, theirs))
        engine.start()
        pid = ours.recv()
        wait_for(lambda: has_unsent(host.address))
        engine.kill()
        engine.join()
        assert is_there(pid)
        wait_for(lambda: not is_there(pid))
        start_over(host.address)


# -- what is left


def test_a_closed_runner_sends_nothing(host: RankHost) -> None:
    """Another connection of the process has the number of the one to the rank by then."""
    runner = runner_over([host.address], wide_model(NAME))
    backend: Any = runner.backend
    number = group_of(runner)._link._files[0]
    runner.close()
    pair = socket.socketpair()
    with ExitStack() as stack:
        for sock in pair:
            stack.enter_context(sock)
            sock.setblocking(False)
        if number not in {sock.fileno() for sock in pair}:
            os.dup2(pair[0].fileno(), number)
            stack.callback(os.close, number)
        with pytest.raises(DeviceError, match="have ended with their runner; make a new one"):
            backend.compute.embed([1])
        for sock in pair:
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def test_no_descriptor_and_no_process_is_left_of_an_engine(host: RankHost) -> None:
    def left() -> list[Any]:
        pids = [os.getpid(), host.process.pid or 0]
        return [*(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), children_of(pids[1])]

    before = left()
    assert before[2] == []
    for _ in range(3):
        start_over(host.address)
    wait_for(lambda: left() == before)
