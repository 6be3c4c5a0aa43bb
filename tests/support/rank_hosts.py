"""Hosts of ranks: processes that listen at addresses of their own."""

import ctypes
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import nn

from qllm.ingress.remote.meeting import Address, Wire
from qllm.models.loader import load
from qllm.runner.runner import TorchRunner
from qllm.sharded.host_memory import STARTS
from qllm.sharded.host_rank import Load, RankServer
from qllm.sharded.hosts import Asked
from qllm.sharded.memory import ADDRESS_BYTES
from qllm.sharded.runner import sharded_runner
from tests.support.hosts import SECRET
from tests.support.sharded import wide_model

CLONE_NEWNET = 0x40000000
"""Flag of `unshare`, from linux/sched.h."""
NAME = "qwen3_moe"
"""Name of the model of `start_over`: see `wide_model`."""


def runner_over(addresses: list[str], model: Any, **settings: Any) -> TorchRunner:
    """Return a runner whose other ranks are at these addresses. Its ops are in pieces."""
    settings = {"deadline_s": 5, "secret": SECRET, "piece_rows": 4} | settings
    return sharded_runner(model, 1 + len(addresses), hosts=addresses, **settings)


def start_over(address: str, **settings: Any) -> None:
    """Let a host compute a rank of a runner, which is closed at once."""
    runner_over([address], wide_model(NAME), **settings).close()


def is_there(pid: int) -> bool:
    """Return True if a process has not ended, or its parent has not waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children_of(pid: int) -> list[int]:
    """Return the processes that a process without threads has forked."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def logging_to(file: Path) -> Callable[[], None]:
    """Return a function after which a process writes its log to a file."""

    def begin() -> None:
        logger = logging.getLogger("qllm")
        logger.addHandler(logging.FileHandler(file))
        logger.setLevel(logging.INFO)

    file.touch()
    return begin


class StubHost:
    """A host that has the secret, and does what a test says. It ends with one connection.

    Args:
        answer: Function that receives and sends after the proofs.
    """

    def __init__(self, answer: Callable[[Wire], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.2", 0))
        self.address = str(Address(*self._listener.getsockname()))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._listener, closing(Wire(self._listener.accept()[0])) as wire:
            wire.be_engine(SECRET)
            self._answer(wire)

    def join(self) -> None:
        """Wait until the host has ended."""
        self._thread.join()


def nothing() -> None:
    """Do nothing."""


class RankHost:
    """A process that listens for engines and computes a rank for them.

    Args:
        model: Function that returns the model.
        address: Address that it listens at.
        before: Function that the process calls first.
        secret: Secret that engines must have.
        waits: True if the process listens after `listen` alone.
    """

    def __init__(
        self,
        model: Load,
        address: str = "127.0.0.2",
        before: Callable[[], Any] = nothing,
        *,
        secret: bytes = SECRET,
        waits: bool = False,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(model, address, before, secret, theirs))
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "begun"
        if not waits:
            self.listen()

    def listen(self) -> None:
        """Let the process listen."""
        self._pipe.send("listen")
        self.address: str = self._pipe.recv()
        """Address with its port."""

    def close(self) -> None:
        """Kill the process, and with it the rank."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    model: Load, address: str, before: Callable[[], Any], secret: bytes, pipe: Connection
) -> None:
    for start in STARTS:  # of runners of the process that forks
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(ADDRESS_BYTES))
    before()
    pipe.send("begun")
    pipe.recv()
    server = RankServer(Address(address, 0), secret, model, threads=1)
    pipe.send(str(server.address))
    server.serve()


def tiny_model(asked: Asked) -> nn.Module:
    """Load the model `tiny` as a rank of it does."""
    return load("tiny", tp=asked.size, depth=asked.depth).model


class Apart(NamedTuple):
    """A host, and the kind of its network."""

    host: RankHost
    network: str


@contextmanager
def host_apart(model: Load) -> Iterator[Apart]:
    """Yield a host in a network namespace of its own, behind a pair of virtual cards.

    Without the rights or the program `ip` for that, it is at a loopback address.
    """
    number = os.getpid() % (1 << 14)
    ends = [f"10.46.{number >> 6}.{4 * (number & 63) + i}" for i in (1, 2)]
    card, other = f"qllm-{number}a", f"qllm-{number}b"
    try:
        if shutil.which("ip") is None:
            raise FileNotFoundError("ip")
        host = RankHost(model, ends[1], _in_new_network, waits=True)
    except (EOFError, AssertionError, FileNotFoundError):
        with RankHost(model) as host:
            yield Apart(host, "loopback")
        return
    with host:
        pid = str(host.process.pid)
        ip("link", "add", card, "type", "veth", "peer", "name", other, "netns", pid)
        ip("addr", "add", f"{ends[0]}/30", "dev", card)
        ip("link", "set", card, "up")
        inside = ("nsenter", "--net", "--target", pid)
        ip("addr", "add", f"{ends[1]}/30", "dev", other, inside=inside)
        ip("link", "set", other, "up", inside=inside)
        host.listen()
        yield Apart(host, "two network namespaces")


def _in_new_network() -> None:
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        os._exit(1)


def ip(*words: str, inside: tuple[str, ...] = ()) -> None:
    """Call `ip`, perhaps inside a namespace."""
    subprocess.run([*inside, "ip", *words], check=True)
