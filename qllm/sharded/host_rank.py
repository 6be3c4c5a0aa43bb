"""A rank on a host without an engine: the other side of `hosts.py`.

One process listens. It forks a process for each connection, so a client that says nothing delays
no engine. That process checks the secret and asks the listener, which lets one job run at a time. A
job is a model that an engine on another host computes. The process of a job loads its share of the
weights, makes calls until the engine ends, and ends.
"""

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch
from torch import nn

from qllm.errors import ConfigError
from qllm.ingress.remote.meeting import Address, MeetingError, Wire
from qllm.kernels import cpu
from qllm.kernels.software import software
from qllm.models.identity import identity
from qllm.sharded.group import end_with_parent, group_at, text_of
from qllm.sharded.host_memory import HostMemory
from qllm.sharded.hosts import Asked, Link, keep_alive
from qllm.sharded.rank import RankWeights, split_model

Load = Callable[[Asked], nn.Module]
"""Function that loads a model for a rank."""
POLLRDHUP = 0x2000
"""Event of `poll`: the other side has closed its half of the connection."""
PATIENCE = 2
"""Times of rank 0's deadline that a rank waits for rank 0, which notices a missing rank first."""
MOST_STRANGERS = 8
"""Most connections that have not asked for a rank yet. One more ends the oldest of them."""
ACCEPT_AGAIN_S = 1.0
"""Seconds until the listener accepts again, after an error of the system."""
_log = logging.getLogger("qllm")


class _Caller(NamedTuple):
    """A connection, and the process that answers it."""

    process: ForkProcess
    sock: socket.socket
    """Copy of the connection, by which the end of the engine is noticed."""
    pipe: Connection
    """Pipe on which the process sends the number of its job, and receives the number of the job
    that runs, or None if it may begin."""

    def end(self) -> int | None:
        """End the process. Return the code with which it had ended by itself, or None."""
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        with suppress(OSError):  # the other side has ended the connection
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        return code


class _Job(NamedTuple):
    number: str
    caller: _Caller


class RankServer:
    """The listener for engines that want a rank on this host. It serves one engine at a time.

    Args:
        address: Address to listen at.
        secret: Secret that the engine has, too.
        load: Function that loads the model.
        threads: Kernel threads of the rank.

    Raises:
        ConfigError: The address cannot be listened at.
    """

    def __init__(self, address: Address, secret: bytes, load: Load, threads: int) -> None:
        self._secret, self._load, self._threads = secret, load, threads
        try:
            self._listener = socket.create_server(address, family=address.family)
        except OSError as error:
            raise ConfigError(f"listen={str(address)!r}: {error.strerror or error}") from error
        self._strangers: list[_Caller] = []
        self._job: _Job | None = None

    @property
    def address(self) -> Address:
        """Address with the port that was taken."""
        return Address(*self._listener.getsockname()[:2])

    def serve(self) -> None:
        """Serve engines, one after the other, until this process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for a connection, for a request, or for the end of a job, and look after it."""
        poll, job = select.poll(), self._job
        poll.register(self._listener, select.POLLIN)
        for one in self._strangers:
            poll.register(one.pipe, select.POLLIN)
        if job is not None:
            poll.register(job.caller.process.sentinel, select.POLLIN)
            poll.register(job.caller.sock, POLLRDHUP)
        ready = {file for file, _ in poll.poll()}
        asking = [one for one in self._strangers if one.pipe.fileno() in ready]
        if job is not None and job.caller.process.sentinel in ready:
            job.caller.process.join()  # it is about to end
            self._end_job(job)
        elif job is not None and job.caller.sock.fileno() in ready:
            self._end_job(job)
        for one in asking:
            self._answer(one)
        if self._listener.fileno() in ready:
            self._accept()

    def close(self) -> None:
        """End all processes, and listen no more."""
        if self._job is not None:
            self._end_job(self._job)
        while self._strangers:
            self._strangers.pop().end()
        self._listener.close()

    def _end_job(self, job: _Job) -> None:
        self._job = None
        if code := job.caller.end():
            _log.warning(
                "job %s: the process of the rank has ended with code %s; if that is -9, memory was "
                "probably short",
                *(job.number, code),
            )
        else:
            _log.info("job %s has ended", job.number)

    def _accept(self) -> None:
        """Accept a connection, and fork the process that answers it."""
        try:
            sock, peer = self._listener.accept()
        except OSError as error:  # no descriptors are left, or the client has left already
            _log.warning("a connection cannot be accepted: %s", error)
            time.sleep(ACCEPT_AGAIN_S)
            return
        if len(self._strangers) == MOST_STRANGERS:
            self._strangers.pop(0).end()
        context = get_context("fork")
        try:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=self._run, args=(sock, peer[0], theirs), name="qllm-rank", daemon=True
            )
            process.start()
        except OSError as error:
            _log.warning("a connection from %s cannot be answered: %s", peer[0], error)
            sock.close()
            return
        theirs.close()
        self._strangers.append(_Caller(process, sock, ours))

    def _answer(self, caller: _Caller) -> None:
        """Let a process begin its job, or name the job that runs."""
        try:
            number = caller.pipe.recv()
            caller.pipe.send(None if self._job is None else self._job.number)
        except (EOFError, OSError):  # the process has ended
            self._strangers.remove(caller)
            caller.end()
            return
        if self._job is None:
            self._strangers.remove(caller)
            self._job = _Job(number, caller)

    def _run(self, sock: socket.socket, host: str, pipe: Connection) -> None:
        """Answer an engine, and be its rank. This is the forked process."""
        end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the listener, which ends this
        self._listener.close()
        for other in (*self._strangers, *([] if self._job is None else [self._job.caller])):
            other.sock.close()
            other.pipe.close()
        wire = Wire(sock)
        try:
            wire.be_engine(self._secret)
            message = wire.receive()
            pipe.send(str(message.get("job")))
            busy = pipe.recv()
            wire.send({"busy": busy} if busy is not None else _first_answer(message))
            if busy is not None:
                return
            asked = Asked(**message)  # rank 0 of another release has refused the answer
        except (MeetingError, TypeError) as error:
            _log.warning("refused a connection from %s: %s", host, error)
            return
        _log.info("job %s: rank %d of %d has begun", asked.job, asked.rank, asked.size)
        self._be_rank(wire, asked)

    def _be_rank(self, wire: Wire, asked: Asked) -> None:
        """Load the share of a rank, and make calls until the engine ends."""
        keep_alive(wire.socket, PATIENCE * asked.deadline_s)
        torch.set_num_threads(self._threads)
        try:
            memory = HostMemory(asked.start)
            own, weights = _loaded(self._load, asked)
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            with suppress(MeetingError):
                wire.send({"error": text_of(error)})
            return
        cpu.set_threads(self._threads)
        wire.send({"weights": weights, "pid": os.getpid()})
        link = Link(memory, {0: wire})
        link.join(own)
        group_at(asked.group, asked.size, PATIENCE * asked.deadline_s)
        own.struct.group = asked.group
        cpu.native.serve(own.address)


def _first_answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return what rank 0 compares before the weights are loaded."""
    return {
        "job": message.get("job"),
        "software": software(),
        "kernels": cpu.kind(),
        "clock_ns": time.time_ns(),
    }


def _loaded(load: Load, asked: Asked) -> tuple[RankWeights, str]:
    """Return the share of a rank, and the digest of the whole model."""
    rounding = asked.expert_weights, asked.activations
    model = load(asked)
    split = split_model(model, asked.size, expert_weights=rounding[0], activations=rounding[1])
    weights = identity(model, *rounding)
    return RankWeights(split, asked.rank), weights
