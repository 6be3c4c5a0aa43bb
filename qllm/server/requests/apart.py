"""Work whose cost grows with a body. Short work runs in the server, long work in its own process.

    a thread of the server --socket--> a waiting process --fork--> a process for one work

JSON, checks of fields, chat templates and lists of ids keep the interpreter's lock. On a thread of
the server such work would stall all streams. The process has limits of CPU time and memory. So a
body that exceeds a limit, or crashes the process, affects no other body. Results must be compact: a
text, an array, bytes, or a body with packed lists (`qllm.server.requests.bodies`).
"""

import asyncio
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any

from qllm.errors import ConfigError
from qllm.server.http.errors import RETRY_AFTER_S, ApiError
from qllm.server.requests.ask import SHORT

LONG = 16_384
"""Least size of a body, in bytes, whose work runs in its own process.

The slowest shorter work takes some milliseconds. A process takes two milliseconds.
"""
AT_ONCE = 4
"""Maximum number of bodies that are read at the same time, before their class is known."""
STARTS = 5
"""Most starts of the waiting process for one work, if the process is killed each time."""
CPU_S = 10
"""Seconds of CPU time that any work may take."""
CPU_S_PER_MIB = 3
"""Additional seconds of CPU time for each MiB of input."""
MEMORY_BYTES = 2 << 30
"""Limit of the process's address space, in bytes."""
NICE, READING_NICE = 19, 10
"""Niceness of best-effort work, and of reading a body whose class is not known yet."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qllm.server.apart_process import main; main(int(sys.argv[2]))"
)

Work = tuple[int, int, Callable[..., Any], Sequence[Any]]
"""Limit of CPU seconds, niceness, a function, and its arguments."""

_log = logging.getLogger("qllm.server")


class Given(Enum):
    """Placeholders for arguments that the waiting process already has."""

    TOKENIZER = "the tokenizer of the model"


class Apart:
    """A runner of functions whose cost grows with a body. Safe to use from any thread.

    Args:
        tokenizer: Function that returns the tokenizer of the model, or None.
    """

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(AT_ONCE, "qllm-apart")
        self._lock = threading.Lock()
        """Lock for starting the waiting process, and for sending work to this process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def do(self, num_bytes: int, function: Callable[..., Any], *args: Any, nice: int = 0) -> Any:
        """Call a function and return its result. Long work runs in a separate process.

        Args:
            num_bytes: Size of the input, approximately.
            function: Function of a module, because the process imports it by name.
            *args: Compact arguments. `Given.TOKENIZER` stands for the tokenizer.
            nice: Niceness of the process.

        Raises:
            ApiError: The work takes too much time or memory, or the function raises an ApiError.
        """
        if num_bytes < LONG:
            return function(*filled(args, self._tokenizer()))
        cpu_s, begun = CPU_S + CPU_S_PER_MIB * (num_bytes >> 20), time.monotonic()
        work = cpu_s, nice, function, args
        reply = self._try(work)
        if reply is None and time.monotonic() - begun < cpu_s:
            _log.warning("a process that read a body was ended; another one reads it again")
            reply = self._try(work)
        if reply is None:
            raise too_much(cpu_s)
        is_done, result = reply
        if not is_done:
            raise result
        return result

    def _try(self, work: Work) -> tuple[bool, Any] | None:
        """Send work to a process and return the reply.

        Return None if the process ended without a reply.
        """
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as file:
            with theirs:
                self._hand_over(theirs)
            try:
                ours.sendall(pickle.dumps(work, pickle.HIGHEST_PROTOCOL))
                reply: tuple[bool, Any] = pickle.load(file)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                return None
        return reply

    async def run(self, num_bytes: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call `do` from the event loop: directly if the work is short, else on a thread."""
        if num_bytes < SHORT:
            return self.do(num_bytes, function, *args)
        do = partial(self.do, num_bytes, function, *args, nice=READING_NICE)
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def start(self) -> None:
        """Start the waiting process if it does not run. The start takes about two seconds.

        Raises:
            ConfigError: The tokenizer cannot be pickled for the process.
        """
        with self._lock:
            self._start()

    def _start(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        try:
            tokenizer = pickle.dumps(self._tokenizer())
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            text = f"the tokenizer cannot be given to the process that reads long bodies: {error}"
            raise ConfigError(text) from error
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [path for path in sys.path if isinstance(path, str)]
            command = [sys.executable, "-c", _BOOT, json.dumps(paths), str(theirs.fileno())]
            env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], env=env
            )
        assert self._process.stdin is not None
        self._control = ours  # so that `_end` closes it if the write fails
        with self._process.stdin as pipe:
            pipe.write(tokenizer)
        return ours

    def _hand_over(self, theirs: socket.socket) -> None:
        """Send one end of a pair of sockets to a new process.

        Raises:
            ApiError: The waiting process was killed after each start.
        """
        with self._lock:
            for _ in range(STARTS):
                try:
                    socket.send_fds(self._start(), [b"."], [theirs.fileno()])
                    return
                except ConnectionError:  # the process has just ended
                    self._end()
        text = f"the process that reads long bodies was ended {STARTS} times; try again"
        raise ApiError(503, text, code="body_not_read", retry_after_s=RETRY_AFTER_S)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        """Cancel waiting work, and end the waiting process."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._end()


def filled(args: Sequence[Any], tokenizer: Any) -> list[Any]:
    """Return the arguments, with the tokenizer in place of `Given.TOKENIZER`."""
    return [tokenizer if arg is Given.TOKENIZER else arg for arg in args]


def too_much(cpu_s: int) -> ApiError:
    """Return the error for work that exceeds a limit, or that crashes every process."""
    text = f"to read the body takes more than {cpu_s} s of CPU time or {MEMORY_BYTES >> 30} GiB of "
    text += "memory; make it shorter"
    return ApiError(400, text, code="body_too_costly")
