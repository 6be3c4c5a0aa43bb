"""A front end's client of an engine loop in a process of its own.

Tokenising, detokenising and stop strings stay in the caller's process, away from the engine's core.
Requests, cancels and tokens go through shared memory. Start-up, statistics, trace and checkpoints
go through a connection. If the connection ends, the process at its other end has ended.
"""

import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from qllm.config import EngineConfig
from qllm.errors import ConfigError, EngineClosedError
from qllm.frontend.client import MakeHandle
from qllm.frontend.handle import Handle
from qllm.frontend.rings import CLOSE_S, RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd
from qllm.ingress.memory import ControlMemory, FrontEndMemory, Segment, available
from qllm.ingress.messages import Hello, Restored, Start
from qllm.ingress.remote.meeting import LIVENESS_S, is_silent
from qllm.ingress.shm import Doorbell
from qllm.models.tokenizer import import_tokenizers
from qllm.record.trace import Trace
from qllm.types import NS_PER_S

_BOOT = (  # torch and transformers make a million objects, all of them in use
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from qllm.engine.process import main; gc.freeze(); gc.enable(); main(int(sys.argv[2]))"
)


WATCH_S = 1.0
"""Largest number of seconds between two checks of the engine's heartbeat."""
MOST_RESTORED = 1 << 20
"""Largest number of request ids that a restore may take. The ids are not reused after a failure."""
SILENT = "the engine is silent"
NAP_S = 0.0002
"""Seconds between two looks into the token ring of a device. A device rings no doorbell."""


class Watchdog:
    """A check for an engine that has work and makes no progress.

    Between two checks, at most twice `WATCH_S` of time counts. So an engine still counts as alive
    after a suspension of the machine.
    """

    def __init__(self, limit_s: float, now_ns: int) -> None:
        self.limit_s = limit_s
        self._looked_ns = now_ns
        self._beat_ns = self._still_ns = 0

    def is_stuck(self, beat_ns: int, has_work: bool, now_ns: int) -> bool:
        """Check the engine's heartbeat once; return True if the engine is stuck."""
        passed_ns = min(now_ns - self._looked_ns, int(2 * WATCH_S * NS_PER_S))
        self._looked_ns = now_ns
        if beat_ns == self._beat_ns and has_work:
            self._still_ns += passed_ns
        else:
            self._beat_ns, self._still_ns = beat_ns, 0
        return self._still_ns > self.limit_s * NS_PER_S


def start_process(fd: int) -> "subprocess.Popen[bytes]":
    """Start a Python process that becomes the engine at the other end of the socket `fd`."""
    command = [sys.executable, "-c", _BOOT, json.dumps(list(map(str, sys.path))), str(fd)]
    return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)


class ProcessClient(RingClient):
    """An engine in another process of this machine, reached over a connection.

    Args:
        connection: Connection to the engine's process, which already has its start message.
        process: The engine's process, if this process started it. `close` ends the engine's process
            then.
        listen: Path of the socket at which the engine takes further front ends.
        may_be_silent: True to wait for answers without a limit. Otherwise the engine counts as
            ended after `LIVENESS_S` without an answer.

    Raises:
        QllmError: The engine's process raised this error at start.
    """

    def __init__(
        self,
        connection: Connection,
        process: "subprocess.Popen[bytes] | None" = None,
        listen: str | None = None,
        *,
        may_be_silent: bool = True,
    ) -> None:
        self._connection, self._process, self._listen = connection, process, listen
        self._may_be_silent = may_be_silent
        self._watchdog: Watchdog | None = None
        self._verdict: str | None = None
        """The reason why this process killed the engine."""
        try:
            self.hello = self._receive_hello()
            control, block, engine, ours = self._receive_memory()
        except BaseException:
            connection.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        self.info = self.hello.info
        self._trace = Trace(meta=self.hello.trace_meta)
        self._control = control
        super().__init__(FrontEnd(block, control, engine, ours))
        self._ask_lock = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name="qllm-receiver", daemon=True)
        self._receiver.start()
        self._register()

    @classmethod
    def spawn(cls, start: Start) -> "ProcessClient":
        """Start an engine's process and wait until it serves.

        Raises:
            ConfigError: The system has no memfd and eventfd, or the policy cannot be pickled.
            QllmError: The engine's process raised this error at start.
        """
        if not available():
            raise ConfigError("run_in='process' needs Linux; pass run_in='thread'")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = start_process(theirs.fileno())
        connection = Connection(ours.detach())
        with suppress(BrokenPipeError):  # the process has ended already, and `recv` gets the reason
            connection.send(start)
        # runs while the engine's process imports torch
        import_tokenizers(start.model, start.load["trust_remote_code"])
        return cls(connection, process, start.listen)

    @classmethod
    def attach(cls, path: str, *, may_be_silent: bool = True) -> "ProcessClient":
        """Become a further front end of an engine that listens at `path`.

        Args:
            path: Path of the engine's socket.
            may_be_silent: Flag as for the class. An engine that still loads its model is silent.

        Raises:
            ConfigError: No engine listens at the path.
            EngineClosedError: The engine ended before the handshake, or is silent.
        """
        link = socket.socket(socket.AF_UNIX)
        try:
            link.settimeout(None if may_be_silent else LIVENESS_S)
            link.connect(path)
            link.settimeout(None)
        except OSError as error:
            link.close()
            raise ConfigError(f"no engine listens at {path!r}: {error}") from error
        return cls(Connection(link.detach()), may_be_silent=may_be_silent)

    def _receive_hello(self) -> Hello:
        if not self._may_be_silent and is_silent(self._connection.fileno()):
            raise EngineClosedError(f"{SILENT} before it could serve")
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineClosedError(f"{self._how_it_went()} before it could serve") from error
        if kind == "failed":
            raise value
        hello: Hello = value
        return hello

    def _receive_memory(self) -> tuple[ControlMemory, FrontEndMemory, Doorbell, Doorbell]:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            _, fds, _, _ = socket.recv_fds(link, 1, 4, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != 4:
            raise EngineClosedError(f"{self._how_it_went()} before it could serve")
        segments = [Segment(fd) for fd in fds[:2]]
        for segment in segments:
            segment.close_fd()
        control, block = ControlMemory(segments[0]), FrontEndMemory(segments[1])
        return control, block, Doorbell(fds[2]), Doorbell(fds[3])

    # -- the receiver's thread

    def _receive(self) -> None:
        """Take tokens until the engine ends, then end the remaining requests."""
        poll = select.poll()
        poll.register(self._front_end.doorbell.fd, select.POLLIN)
        # only for the hang-up, because other threads read answers
        poll.register(self._connection.fileno(), 0)
        pidfd = None if self._process is None else os.pidfd_open(self._process.pid)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        over, why = False, None
        naps = self.hello.config.on_device
        while not over:
            waits = not (naps and self._open)
            ready = poll.poll(WATCH_S * 1000 if waits else 0)
            over = any(fd != self._front_end.doorbell.fd for fd, _ in ready)
            self._watch()
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - a broken ring, and whatever it holds
                over, why = True, f"what the engine sends cannot be read: {error!r}"
            if not waits and not ready:
                time.sleep(NAP_S)
        if pidfd is not None:
            os.close(pidfd)
        self._hang_up()
        self._end_all(why or self._why())

    def _watch(self) -> None:
        dog, process = self._watchdog, self._process
        if dog is None or process is None or self._verdict is not None:
            return
        control = self._control
        has_work = bool(self._open) or control.num_live > 0
        if dog.is_stuck(control.heartbeat_ns, has_work, time.monotonic_ns()):
            self._verdict = (
                f"the engine process (pid {process.pid}) was killed: it had work and did not come "
                f"round for {dog.limit_s:g} s"
            )
            process.kill()

    def _hang_up(self) -> None:
        """Shut down the socket, so that the engine and the receiver thread see end of file."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    def _why(self) -> str:
        return self._over or self._verdict or self._control.error or self._how_it_went()

    def _how_it_went(self) -> str:
        process = self._process
        if process is None:
            return "the engine is gone"
        who = f"the engine process (pid {process.pid})"
        try:
            code = process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{who} hung up, did not end in {CLOSE_S:.0f} s and was killed"
        if code >= 0:
            return f"{who} exited with code {code}"
        note = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}{note}"

    # -- as a client

    _front_end: FrontEnd
    can_hold = True

    def hold(self) -> None:
        self._front_end.hold()

    def release(self) -> None:
        with suppress(OSError):  # the client was closed meanwhile, so there is no thread to wake
            self._front_end.release()

    def _put(self, entry: SavedRequest, submission: Submission) -> None:
        super()._put(entry, submission)
        if self.hello.config.on_device:
            self._front_end.doorbell.ring()  # wake the receiver, which looks by itself from now on

    @property
    def config(self) -> EngineConfig:
        config: EngineConfig = self.hello.config
        return config

    def costs_ns(self) -> Sequence[float] | None:
        told: Sequence[float] | None = self._ask("costs_ns")
        return told

    @property
    def draining(self) -> bool:
        return self._control.draining

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._control.zero_ns

    @property
    def failure(self) -> str | None:
        return None if self._closing else self._over or self._control.error

    @property
    def trace(self) -> Trace:
        """Return the events so far, after a fetch of new events from the engine."""
        if self.hello.config.record and self._over is None:
            with suppress(EngineClosedError), self._ask_lock:
                self._trace.events += self._ask_locked("events", len(self._trace.events))
        return self._trace

    def call(self, function: Callable[[], Any]) -> Any:
        try:
            data = pickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f"{function!r} cannot be pickled ({error}), so it cannot run in the engine's "
                "process; pass run_in='thread'"
            ) from error
        return self._ask("call", data)

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        return int(self._ask("checkpoint", os.path.abspath(path)))

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache")

    def delete_kv(self, tag: bytes) -> int:
        return int(self._ask("delete_kv", tag))

    def restore(self, path: str | os.PathLike[str], make: MakeHandle) -> list[Handle]:
        # the receiver waits with tokens of requests that it does not know
        with self.admission_lock:
            first = self.new_number()
            self._numbers = itertools.count(
                first + MOST_RESTORED
            )  # if it fails, no request has these numbers
            restored: list[Restored] = self._ask("restore", os.path.abspath(path), first)
            self._numbers = itertools.count(first + max(1, len(restored)))
            handles = []
            for request in restored:
                handle = make(request.number, request.name, request.prompt, request.sampling)
                for sampled in request.sampled:
                    handle.on_token(sampled)
                self._open[request.number] = SavedRequest(handle, self.now_ns(), request.priority)
                self.handles[request.number] = handle
                handles.append(handle)
        return handles

    def end_if_stuck(self, after_s: float) -> None:
        if self._process is None:
            return super().end_if_stuck(after_s)
        if self._watchdog is None:
            self._watchdog = Watchdog(after_s, time.monotonic_ns())
        self._watchdog.limit_s = after_s  # a new watchdog would start to count again

    def drain(self) -> None:
        self.raise_if_closed()
        self._control.draining = True

    def _close(self) -> None:
        until = time.monotonic() + CLOSE_S
        # `restore` holds the lock until the answer arrives
        has_lock = self.admission_lock.acquire(timeout=CLOSE_S)
        try:
            if self._closing or threading.current_thread() is self._receiver:
                return
            self._closing = True
        finally:
            if has_lock:
                self.admission_lock.release()
        if self._over is None and self._process is not None:
            self._end_engine(until)
        elif self._over is None and not self._control.error:
            self._leave()
        self._hang_up()
        self._receiver.join()
        if self._process is not None:
            self._how_it_went()  # no zombie process remains
        self._connection.close()
        self._front_end.close()
        self._unregister()
        if self._listen is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._listen)

    def _end_engine(self, until: float) -> None:
        """Tell the engine to end. Kill an engine that does not end or does not answer."""
        assert self._process is not None
        self._front_end.stop()
        if self._ask_lock.acquire(timeout=max(0.0, until - time.monotonic())):
            left_s = max(0.0, until - time.monotonic())
            try:
                since = len(self._trace.events)
                self._trace.events += self._ask_locked("last_events", since, timeout_s=left_s)
                return
            except (EngineClosedError, TimeoutError):
                pass
            finally:
                self._ask_lock.release()
        self._process.kill()

    def _ask(self, op: str, *args: Any) -> Any:
        self.raise_if_closed()
        with self._ask_lock:
            return self._ask_locked(op, *args)

    def _ask_locked(self, op: str, *args: Any, timeout_s: float | None = None) -> Any:
        try:
            self._connection.send((op, args))
            if not self._may_be_silent and is_silent(self._connection.fileno()):
                self._verdict = f"{SILENT}: it stands still, or is overloaded"
                self._hang_up()  # a late answer would be taken for the next answer
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            kind, value = self._connection.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            self.raise_if_closed()
            raise EngineClosedError(f"{self._why()}; make a new one") from error
        if kind == "error":
            raise value
        return value
