"""The engine's process, started by `ProcessClient`.

The loop runs on the main thread. Each front end has a thread that answers rare questions. Requests
and tokens travel only through rings. The connection to a front end carries start-up, checkpoints,
statistics and the trace. When the connection breaks, the engine treats the front end as gone and
frees its requests. The first front end owns the engine. When the owner ends, the engine ends.
"""

import logging
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from transformers.utils.logging import disable_progress_bar

from qllm.config import EngineConfig
from qllm.cores import freeze_garbage
from qllm.engine.build import crash_text, torch_threads
from qllm.engine.handover.transfer import Puller, give
from qllm.engine.memory import Claim
from qllm.engine.remote import RemoteFrontEnd, RemoteListener, trim_latencies
from qllm.engine.served import LoopEngine, ProcessContext, ServedEngine
from qllm.engine.storage.identity import weights_digest
from qllm.engine.storage.own_threads import set_own_torch_threads
from qllm.errors import ConfigError, EngineClosedError, QllmError, contained
from qllm.ingress.front_end import ring_bytes
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.messages import EngineCard, Hello, Restored, Source, Start
from qllm.ingress.remote.meeting import Wire
from qllm.ingress.remote.nixl import check_profile
from qllm.ingress.shm import Doorbell
from qllm.kernels.software import software
from qllm.logs import configured, inherited
from qllm.models.aliases import ALIASES
from qllm.models.loader import load
from qllm.plugins import load_policy, unpickled_policy
from qllm.record.trace import Event
from qllm.types import RequestId, RequestStatus

LOG = logging.getLogger("qllm.engine")
OWNER = 0
LISTEN_AGAIN_S = 0.1
"""Seconds until the engine accepts front ends again after it ran out of descriptors."""
GRACE_S = 5.0
"""Seconds that an engine continues without its owner, or with tokens that no client reads."""


def main(fd: int) -> None:
    """Run an engine for the front end at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end handles Ctrl-C
    owner = Connection(fd)
    try:
        start: Start = owner.recv()
    except EOFError:
        os._exit(1)
    with configured(inherited()):
        code = EngineProcess(owner, start).run()
    os._exit(code)  # torch's threads may not survive the interpreter's end


class EngineProcess:
    """One engine and its front ends.

    Large because each question of a front end has a method.
    """

    def __init__(self, owner: Connection, start: Start) -> None:
        self._owner = owner
        self._start = start
        self._zero_ns = time.monotonic_ns()
        self._control = ControlMemory.create(self._zero_ns)
        self._doorbell = Doorbell.create()
        self._engine: ServedEngine | None = None
        self._num_front_ends = 0
        self._front_end_lock = threading.Lock()
        self._connections: dict[int, Connection | Wire] = {OWNER: owner}

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    @property
    def engine(self) -> ServedEngine:
        """The engine. Available once the model is loaded."""
        if self._engine is None:
            raise EngineClosedError("the engine has not loaded its model yet")
        return self._engine

    # -- the main thread

    def run(self) -> int:
        """Load, serve until closed, and return the exit code."""
        attendant = self._attend(self._owner, OWNER)
        try:
            listener = _listener(self._start.listen)
            remote = self._remote_listener()
        except ConfigError as error:
            self._owner.send(("failed", error))
            return 1
        try:
            with contained():
                self._engine = engine = self._load()
        except Exception as error:  # noqa: BLE001 - raised again in the front end
            self._unlink()
            self._owner.send(("failed", portable_error(error)))
            return 1
        freeze_garbage()
        if remote is not None:
            remote.listen()  # the starting process may publish the address now
        self._welcome(self._owner)
        if listener is not None:
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        if remote is not None:
            model = _absolute_model_path(self._start.model)
            prepared = engine.prepared
            remote.open(EngineCard(prepared.info, prepared.config, prepared.trace.meta, model))
        crash = engine.serve()
        if crash is not None:
            self._control.error = crash_text(crash)
            LOG.error("the engine crashed", exc_info=crash)
        engine.end(crash)
        self._unlink()
        self._send_rest(engine)
        engine.ended.set()
        if crash is None:
            attendant.join(GRACE_S)
        return 0 if crash is None else 1

    def _unlink(self) -> None:
        """Remove the socket file, so that no further front end can connect."""
        if self._start.listen is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._start.listen)

    def _load(self) -> ServedEngine:
        start = self._start
        if start.quiet:
            warnings.simplefilter("ignore")
            disable_progress_bar()  # type: ignore[no-untyped-call]
        if isinstance(start.policy, bytes):
            policy = unpickled_policy(start.policy)
        else:
            policy = load_policy(start.policy, start.policy_settings)
        kind = _kind_of(start.config)
        kind.check(policy, start.config)
        claim = Claim(str(start.load.get("device", "cpu")).split(":")[0])
        loaded = load(start.model, **start.load)
        weights, code = None, ""
        if start.takes_digest:  # must happen before the runner packs the weights
            with torch_threads(start.threads):
                weights, code = weights_digest(loaded.model), software()
        context = ProcessContext(
            control=self._control,
            doorbell=self._doorbell,
            now_ns=self._now_ns,
            broken=self._broken,
            profile=None if (met := start.meeting) is None else met.profile,
            pull=None if met is None else Puller(met.secret, met.profile),
            threads=start.threads,
            weights=weights,
            claim=claim,
        )
        engine = kind(loaded, policy, start.config, context)
        engine.prepared.info = engine.prepared.info._replace(weights=weights or "", software=code)
        return engine

    def _send_rest(self, engine: ServedEngine) -> None:
        """Wait until slow front ends have room for the last records."""
        deadline = time.monotonic() + GRACE_S
        while engine.flush():
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    # -- front ends

    def _welcome(self, connection: Connection) -> int:
        """Create a front end's rings, send their location and serve it; return its number."""
        prepared = self.engine.prepared
        block, doorbell = self._new_memory(), Doorbell.create()
        hello = Hello(
            prepared.info,
            prepared.config,
            prepared.trace.meta,
            _absolute_model_path(self._start.model),
            bool(self._start.load.get("trust_remote_code")),
        )
        control, engine = self._control.segment, self._doorbell
        try:
            connection.send(("hello", hello))
            with socket.socket(fileno=os.dup(connection.fileno())) as link:
                fds = [control.fd, block.segment.fd, engine.fd, doorbell.fd]
                socket.send_fds(link, [b"f"], fds)
        except OSError:
            doorbell.close()
            raise
        finally:
            block.segment.close_fd()
        self._connections[block.number] = connection
        self.engine.attach(block, doorbell)
        return block.number

    def _new_memory(self) -> FrontEndMemory:
        """Create the memory of one more front end of this machine."""
        return FrontEndMemory.create(*self._place())

    def _place(self) -> tuple[int, tuple[int, int, int, int]]:
        """Return the number of one more front end, and the bytes of its rings."""
        with self._front_end_lock:
            number = self._num_front_ends
            self._num_front_ends += 1
        prepared = self.engine.prepared
        shape = prepared.info.shape
        max_prompt = min(prepared.config.pool_tokens, shape.max_position)
        return number, ring_bytes(max_prompt, shape.vocab_size)

    def _listen(self, listener: socket.socket) -> None:
        while not self.engine.ended.is_set():
            try:
                link, _ = listener.accept()
            except OSError as error:  # no descriptors are left, for now
                LOG.warning("a front end cannot be met: %s", error)
                time.sleep(LISTEN_AGAIN_S)
                continue
            if _peer(link)[1] != os.getuid():
                link.close()
                continue
            connection = Connection(link.detach())
            try:
                number = self._welcome(connection)
            except OSError:  # the front end left already
                connection.close()
                continue
            self._attend(connection, number)

    def _attend(self, connection: Connection, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._serve_front_end, args=(connection, number))
        thread.daemon = True
        thread.start()
        return thread

    def _serve_front_end(self, connection: Connection, number: int) -> None:
        """Answer a front end's questions until it is gone."""
        poll, pidfd = select.poll(), None
        try:
            poll.register(connection.fileno(), select.POLLIN)
            with socket.socket(fileno=os.dup(connection.fileno())) as link:
                pidfd = _pidfd(_peer(link)[0])
            if pidfd is not None:
                poll.register(pidfd, select.POLLIN)
            while connection.fileno() in dict(poll.poll()):
                op, args = connection.recv()
                self._answer(connection, op, args)
        except (EOFError, OSError):
            pass
        finally:
            self._left(number)
            self._connections.pop(number).close()
            if pidfd is not None:
                os.close(pidfd)

    def _answer(self, connection: Connection, op: str, args: tuple[Any, ...]) -> None:
        try:
            answer = ("ok", getattr(self, f"_op_{op}")(*args))
        except Exception as error:  # noqa: BLE001 - raised again in the front end
            answer = ("error", portable_error(error))
        try:
            connection.send(answer)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - pickling the result may raise anything
            what = f"{type(error).__name__}: {error}"
            text = f"the answer of {op} cannot leave the engine's process: {what}; {THREAD}"
            connection.send(("error", ConfigError(text)))

    def _broken(self, number: int, why: str) -> None:
        """Disconnect a front end that wrote invalid data into its rings."""
        LOG.warning("front end %d is cut off: %s", number, why)
        if number == OWNER:
            self._control.error = why
        connection = self._connections.get(number)
        if connection is None:  # the front end has left
            return
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    def _left(self, number: int) -> None:
        """Free the requests of a front end that is gone."""
        if number != OWNER:
            self.engine.leave(number)
        elif self._engine is None:
            os._exit(1)
        else:
            timer = threading.Timer(GRACE_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
            self._engine.close()

    # -- front ends of other hosts

    def _remote_listener(self) -> RemoteListener | None:
        if (meeting := self._start.meeting) is None:
            return None
        check_profile(meeting.profile)
        return RemoteListener(
            meeting, self._new_remote_memory, self._enter, self._leave, self._answer_far, self._hand
        )

    def _new_remote_memory(self) -> Any:
        return self.engine.remote_memory(*self._place())

    def _enter(self, front_end: RemoteFrontEnd) -> None:
        self._connections[front_end.number] = front_end.wire
        self.engine.attach_over(front_end.block, front_end.link)

    def _leave(self, front_end: RemoteFrontEnd) -> None:
        self._connections.pop(front_end.number)
        self.engine.leave(front_end.number)

    def _hand(self, wire: Wire, ticket: str) -> None:
        """Let another engine fetch the KV of a request that migrated there."""
        assert self._start.meeting is not None
        set_own_torch_threads(1)
        outbox = self.engine.handed.giving.outbox
        if (parcel := outbox.read(ticket)) is None:
            raise ConfigError("no KV is kept under this ticket (any more)")
        if give(wire, self._start.meeting.profile, parcel):
            outbox.drop(ticket)

    def _answer_far(self, op: str, args: list[Any]) -> Any:
        """Answer a question of a front end on another host, or refuse a local-only one."""
        if op == "beat":
            control = self._control
            said = {"draining": control.draining, "error": control.error}
            return {"now_ns": self._now_ns(), "costs_ns": self._op_costs_ns(), **said}
        if op == "stats":
            return trim_latencies(self._op_stats())
        if op == "watch":
            return self._op_watch(int(args[0]), bool(args[1]))
        if op == "statuses":
            return self._op_statuses([int(i) for i in args[0]])
        if op == "give":
            return self._op_give(int(args[0]))
        if op == "expect":
            return self._op_expect(int(args[0]), str(args[1]), str(args[2]))
        if op == "reset_prefix_cache":
            return self._op_reset_prefix_cache()
        if op == "delete_kv":
            return self._op_delete_kv(bytes.fromhex(args[0]))
        raise ConfigError(f"{op!r:.40} is for front ends of the engine's own host")

    # -- questions of front ends, answered on their threads

    def _op_statuses(self, request_ids: list[RequestId]) -> list[RequestStatus | None]:
        return self.engine.statuses(request_ids)

    def _op_stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def _op_costs_ns(self) -> tuple[float, float, float] | None:
        return self.engine.costs_ns()

    def _op_watch(self, since: int, whole: bool) -> dict[str, Any]:
        return self.engine.watch(since, whole)

    def _op_events(self, since: int) -> list[Event]:
        return self.engine.events(since)

    def _op_last_events(self, since: int) -> list[Event]:
        self.engine.ended.wait()
        return self.engine.events(since)

    def _op_give(self, request_id: RequestId) -> str | None:
        handover = self.engine.handed.giving
        ticket: str | None = self.engine.on_loop(lambda: handover.give(request_id))
        return ticket

    def _op_expect(self, request_id: RequestId, address: str, ticket: str) -> None:
        self.engine.handed.expect(request_id, Source(address, ticket))

    def _op_call(self, function: bytes) -> Any:
        return self.engine.on_loop(pickle.loads(function))

    def _op_checkpoint(self, path: str) -> int:
        return self.engine.checkpoint(path)

    def _op_reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def _op_delete_kv(self, tag: bytes) -> int:
        return self.engine.delete_kv(tag)

    def _op_restore(self, path: str, first: RequestId) -> list[Restored]:
        return self.engine.restore(path, first)


THREAD = "with run_in='thread' nothing has to be pickled"


def portable_error(error: Exception) -> Exception:
    """Return the error if another process can unpickle it, else one with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return QllmError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the engine's process:\n{''.join(traceback.format_exception(error))}")
    return error


def _absolute_model_path(model: str) -> str:
    """Return the name of a model for a process that may have another working directory."""
    is_path = model not in ("tiny", *ALIASES) and os.path.exists(model)
    return os.path.abspath(model) if is_path else model


def _listener(path: str | None) -> socket.socket | None:
    if path is None:
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"listen={path!r} cannot be used: {error}; give a path that does not exist yet, in a "
            "folder that does"
        ) from error
    return listener


def _peer(link: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process ends; None for an invisible process."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _kind_of(config: EngineConfig) -> type[ServedEngine]:
    """Return the class of engine for the setting `loop`. All classes take the same arguments."""
    if config.loop == "host":
        return LoopEngine
    from qllm.engine.gpu import GpuEngine  # cuda-bindings are needed only here

    return GpuEngine
