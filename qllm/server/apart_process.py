"""The waiting process for work whose cost grows with a body, and the child processes for the work.

The waiting process forks a child for each piece of work. A child has the imports and the tokenizer
from the start. Damage by a body ends with the child.
"""

import gc
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from qllm.frontend.tokenizer import prepare
from qllm.server import app  # noqa: F401 - imports all functions before the forks
from qllm.server.requests.apart import MEMORY_BYTES, filled, too_much

_log = logging.getLogger("qllm.server")


def main(fd: int) -> None:
    """Wait for work and fork a child for each piece of work, until the server ends.

    Args:
        fd: Socket over which other sockets arrive, one for each work.
    """
    tokenizer = pickle.load(sys.stdin.buffer)
    if tokenizer is not None:
        prepare(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=fd) as control:
        while True:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                return
            try:
                if os.fork() == 0:
                    control.close()
                    _serve(fds[0], tokenizer)
                    os._exit(0)
            except OSError:  # no process available: the work's socket closes
                _log.exception("work cannot be done in a process of its own")
            os.close(fds[0])


def _serve(fd: int, tokenizer: Any) -> None:
    """Do one piece of work and reply.

    No reply is sent if the work exceeds its CPU time or is killed.
    """
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as file:
        cpu_s, nice, function, args = pickle.load(file)
        os.nice(nice)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            reply = True, function(*filled(args, tokenizer))
        except MemoryError:
            reply = False, too_much(cpu_s)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            error.add_note(traceback.format_exc())
            error.__cause__ = error.__context__ = None
            reply = False, error
        pickle.dump(reply, file, pickle.HIGHEST_PROTOCOL)
