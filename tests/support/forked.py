"""Programs that start in a moment: forked from a process that has torch imported.

A program is code with arguments, as for `python -c`. It has pipes for its input and its output.
Engines that it starts are forked, too. Where engines start cold (`--lane outside`, or the first
start in an environment that is not that of the run) the program and its engines do.
"""

import os
import socket
import subprocess
import sys
from typing import Any

import qllm.frontend.process as product
from tests.support.files import ROOT
from tests.support.warm import ForkedProcess, Nurseries, Nursery, serve

BOOT = """
import os, sys, traceback
os.dup2(int(sys.argv[2]), 0)
os.close(int(sys.argv[2]))
from tests.support.forked import fork_engines
fork_engines()
sys.argv, status = {argv!r}, 0
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        sys.stderr.write(end.code)
except BaseException:
    status = 1
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


class Nested(Nursery):
    """A nursery that is forked from a program. It is no child of the program."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = os.fork()
            if child == 0:
                if os.fork() == 0:
                    self._link.close()
                    serve(theirs)
                os._exit(0)
            os.waitpid(child, 0)


def fork_engines() -> None:
    """Fork the engines of this program, from now on."""
    product.start_process = Nested().fork  # type: ignore[assignment]


class Program:
    """A running program, with the methods of a `subprocess.Popen` with pipes of text."""

    def __init__(self, nursery: Nursery, code: str, arguments: tuple[str, ...]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        boot = BOOT.format(code=code, argv=["-c", *arguments])
        self._process: ForkedProcess = nursery.fork(theirs_in, boot, theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """End it by SIGKILL, if it has not ended."""
        self._process.kill()

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self._process.returncode is None:
            os.kill(self.pid, number)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()


def start_program(code: str, *arguments: str) -> Any:
    """Start a program: a `Program`, or a `subprocess.Popen` with the same pipes."""
    nurseries = getattr(product.start_process, "__self__", None)
    nursery = nurseries.nursery() if isinstance(nurseries, Nurseries) else None
    if nursery is not None:
        return Program(nursery, code, arguments)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
