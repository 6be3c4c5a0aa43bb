"""A process that gives a parcel to another, or does what no giver of ours does."""

import os
import signal
import socket
import sys

import torch

from qllm.engine.handover.format import seal
from qllm.engine.handover.transfer import give
from qllm.errors import QllmError
from qllm.ingress.remote.meeting import Wire
from qllm.ingress.remote.nixl import Link, check_profile

PARCEL = seal({"of": "this"}, {"k": [torch.arange(1 << 20)], "v": [torch.arange(100)]})


def serve(secret: bytes) -> None:
    """Answer each connection in a process of its own, until this one is ended.

    The ticket that is asked for says how: `good`, `silent`, `refusing` or `mad`. The address comes
    first on stdout, and then a line with the number of each silent process.
    """
    check_profile("tcp")  # imports NIXL once, and makes no agent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        say(f"127.0.0.1:{server.getsockname()[1]}")
        while True:
            sock, _ = server.accept()
            if os.fork() == 0:
                server.close()
                wire = Wire(sock)
                try:
                    answer(wire, secret)
                except QllmError:
                    pass
                finally:
                    os._exit(0)
            sock.close()


def answer(wire: Wire, secret: bytes) -> None:
    """Answer one connection."""
    wire.be_engine(secret)
    asked = wire.receive()
    how, profile = asked["ticket"], asked["profile"]
    if how == "silent":
        say(f"{os.getpid()}")
        Link.drive = stand_still  # type: ignore[method-assign]
    if how == "refusing":
        wire.send({"error": "no KV is kept under this ticket"})
    elif how == "mad":
        wire.send({"bytes": -5, "kind": "DRAM"})
    else:
        give(wire, profile, PARCEL)


def stand_still(link: Link) -> None:
    """Do nothing where a link is to be driven."""


def say(line: str) -> None:
    """Write a line to stdout at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
