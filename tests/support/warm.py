"""Engines in processes that start in half a second, not in five: forked from one that waits.

Most of what it takes to start an engine's process is importing torch and transformers. A *nursery*
is a process that has imported them; it forks a keeper per engine, and the keeper forks the engine,
waits for it and says how it ended:

    worker  --fds, settings-->  nursery  --fork-->  keeper  --fork-->  engine
       <---------------- pid, then the exit code --------/

What differs from `qllm.frontend.process.start_process`: the parent is the keeper. With
`--lane outside`, another boot code, and the first time in an environment that is not that of the
whole run, processes start as in the product. So do those that a test starts by a command.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter
from typing import Any

import qllm.frontend.process as product
from tests.support.files import ROOT

BOOT, start_process = product._BOOT, product.start_process
CHANGING = {"PYTEST_CURRENT_TEST", "NIXL_LOG_LEVEL"}
LINKS = "UCX_"
"""What a process sets itself when it makes a link."""
MOST_NURSERIES = 2
MOST_BYTES = 1 << 18
"""Longest message to the nursery: boot code and search path."""


def environment() -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value)
        for name, value in os.environ.items()
        if name not in CHANGING and not name.startswith(LINKS)
    )


class ForkedProcess:
    """What is asked of a `subprocess.Popen`, of a process that is no child of ours."""

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self._lock = threading.Lock()
        said = keeper.recv(64)
        if not said:
            raise RuntimeError("the nursery of engines is gone")
        self.pid = int(said)
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)  # it stays a zombie until its end was heard of

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._keeper], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("engine", timeout or 0)
                self.returncode = int(self._keeper.recv(64))
                self._keeper.close()
            return self.returncode

    def __del__(self) -> None:
        self._keeper.close()


class Nurseries:
    """Start the engines of one test process: one nursery per environment, from its second start.

    The environment that they are made in has its nursery from the first start: many tests use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts = Counter([environment()])
        self._open: dict[frozenset[tuple[str, str]], Nursery] = {}
        self._places = [os.open(os.devnull, os.O_RDONLY) for _ in range(MOST_NURSERIES)]
        """Descriptors that links will have; a test that counts them sees no difference."""

    def start_process(self, fd: int) -> Any:
        """In place of the product's."""
        nursery = None if product._BOOT is not BOOT else self.nursery()
        return start_process(fd) if nursery is None else nursery.fork(fd)

    def nursery(self) -> "Nursery | None":
        """Return the nursery of this environment; None where a process has to start cold."""
        with self._lock:
            here = environment()
            self._starts[here] += 1
            if here not in self._open:
                if self._starts[here] == 1 or not self._places:
                    return None
                os.close(self._places.pop())
                self._open[here] = Nursery()
            return self._open[here]

    def close(self) -> None:
        """Let them end; engines that run go on."""
        for place in self._places:
            os.close(place)
        for nursery in self._open.values():
            nursery.close()


class Nursery:
    """A process that has imported what engines import."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def fork(self, fd: int, boot: str | None = None, out: int = 1) -> ForkedProcess:
        """Fork an engine for the other end of the socket `fd`, or what other boot code starts."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            how = {"boot": boot or product._BOOT, "path": sys.path, "folder": os.getcwd()}
            message = json.dumps(how, default=str).encode()
            socket.send_fds(self._link, [message], [fd, out, 2, theirs.fileno()])
        return ForkedProcess(ours)

    def close(self) -> None:
        """Let it end."""
        self._link.close()
        self._process.wait()


def serve(link: socket.socket) -> None:
    """Be the nursery, until nobody is at the other end."""

    import transformers  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

    import qllm.engine.process  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, fds, _, _ = socket.recv_fds(link, MOST_BYTES, 4)
        if not message:
            return
        if os.fork() == 0:
            link.close()
            keep(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def become(how: dict[str, Any], engine: int, out: int, err: int) -> None:
    """Be the engine: do what `python -c` would; does not return."""
    for fd, number in ((out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(how["folder"])
    sys.argv = ["-c", json.dumps(how["path"]), str(engine)]
    exec(how["boot"], {"__name__": "__main__"})


def keep(how: dict[str, Any], engine: int, out: int, err: int, said: int) -> None:
    """Be the keeper of one engine."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(said)
        try:
            become(how, engine, out, err)
        except BaseException:  # noqa: BLE001 - as Python does at the end of `-c`
            traceback.print_exc()
        finally:
            os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (engine, 1, 2, out, err):
        os.dup2(nothing, fd)
    with socket.socket(fileno=said) as worker:
        worker.send(str(pid).encode())
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        try:
            worker.send(str(code).encode())
            worker.recv(1)  # as a zombie it can still be signalled: nobody else has its number
        except OSError:
            pass
    os.waitpid(pid, 0)
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
