"""A rank on a host without an engine: the other side of `hosts.py`.

One process listens. It forks a process for each job: a model that an engine on another host
computes. That process loads its share of the weights, makes calls until the engine ends, and ends.
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
_log = logging.getLogger("qllm")


class _Job(NamedTuple):
    number: str
    process: ForkProcess
    wire: Wire
    """Copy of the connection, by which the end of the engine is noticed."""


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
        """Wait for an engine or for the end of a job, and look after it."""
        poll, job = select.poll(), self._job
        poll.register(self._listener, select.POLLIN)
        if job is not None:
            poll.register(job.process.sentinel, select.POLLIN)
            poll.register(job.wire, POLLRDHUP)
        ready = {file for file, _ in poll.poll()}
        if job is not None and ready & {job.process.sentinel, job.wire.fileno()}:
            self._end_job(job)
        if self._listener.fileno() in ready:
            self._meet(*self._listener.accept())

    def close(self) -> None:
        """End the rank, and listen no more."""
        if self._job is not None:
            self._end_job(self._job)
        self._listener.close()

    def _end_job(self, job: _Job) -> None:
        self._job = None
        job.process.kill()  # the engine has gone, or the process has
        job.process.join()
        _log.info("job %s has ended with code %s", job.number, job.process.exitcode)
        job.process.close()
        job.wire.hang_up()
        job.wire.close()

    def _meet(self, sock: socket.socket, peer: Any) -> None:
        """Answer one engine."""
        wire = Wire(sock)
        try:
            wire.be_engine(self._secret)
            asked = Asked(**wire.receive())
            if self._job is not None:
                wire.send({"busy": self._job.number})
                return
            self._begin(wire, asked)
        except (MeetingError, TypeError) as error:
            _log.warning("refused a connection from %s: %s", peer[0], error)
        finally:
            if self._job is None or self._job.wire is not wire:
                wire.hang_up()
                wire.close()

    def _begin(self, wire: Wire, asked: Asked) -> None:
        wire.send(
            {
                "job": asked.job,
                "software": software(),
                "kernels": cpu.kind(),
                "clock_ns": time.time_ns(),
            }
        )
        process = get_context("fork").Process(
            target=self._run, args=(wire, asked), name=f"qllm-rank-{asked.rank}", daemon=True
        )
        process.start()
        _log.info("job %s: rank %d of %d has begun", asked.job, asked.rank, asked.size)
        self._job = _Job(asked.job, process, wire)

    def _run(self, wire: Wire, asked: Asked) -> None:
        """Be the rank. This is the forked process."""
        end_with_parent(signal.SIGKILL)
        self._listener.close()
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


def _loaded(load: Load, asked: Asked) -> tuple[RankWeights, str]:
    """Return the share of a rank, and the digest of the whole model."""
    rounding = asked.expert_weights, asked.activations
    model = load(asked)
    split = split_model(model, asked.size, expert_weights=rounding[0], activations=rounding[1])
    weights = identity(model, *rounding)
    return RankWeights(split, asked.rank), weights
