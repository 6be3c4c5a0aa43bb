"""A program with an engine of every kind, which forks: run by `test_forks`.

Each way is what one child does. Per way and host it prints one JSON line: how the child ended
and what the parent's engine answers afterwards.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.errors import EngineClosedError, QllmError, RequestFailedError
from qllm.frontend.handle import Handle
from qllm.ingress.remote.meeting import Address, Meeting
from tests.support.engines import LONG, SETTINGS, stand_still
from tests.support.waiting import wait_for

HANG_S = 120
LEFT = 7
"""Exit code of a child that found what it should."""
Engines = dict[str, QLLMEngine]
Handles = dict[str, Handle]


def use(engines: Engines, open_: Handles) -> None:
    """Every call is refused, and what was open is told so."""
    for name, engine in engines.items():
        calls: list[Callable[[], Any]] = [
            lambda e=engine: e.submit("abc"), lambda e=engine: e.call(os.getpid),
            lambda e=engine: e.drain(), engine.raise_if_closed,
        ]  # fmt: skip
        for call in calls if name != "remote" else (calls[0], *calls[2:]):
            refused(EngineClosedError, call)
        open_[name].cancel()
        refused(RequestFailedError, lambda h=open_[name]: h.result(0))


def refused(kind: type[QllmError], call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=f"belongs to process {os.getppid()}"):
        call()


def leave(engines: Engines, open_: Handles) -> None:
    """`sys.exit` alone: what the interpreter does at its end."""


def collect(engines: Engines, open_: Handles) -> None:
    engines.clear()
    open_.clear()
    gc.collect()


def close(engines: Engines, open_: Handles) -> None:
    for engine in engines.values():
        with engine:
            engine.close()


WAYS = {way.__name__: way for way in (leave, use, collect, close)}


def forked(way: str, engines: Engines, open_: Handles) -> int:
    """Fork while other threads hold the locks; the exit code of the child."""
    hold, held = threading.Event(), threading.Barrier(2)

    def holder() -> None:
        for name, engine in engines.items():
            engine._client.admission_lock.acquire()
            open_[name]._changed.acquire()
        held.wait()
        hold.wait()
        for name, engine in engines.items():
            open_[name]._changed.release()
            engine._client.admission_lock.release()

    thread = threading.Thread(target=holder)
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(HANG_S)
        WAYS[way](engines, open_)
        sys.exit(LEFT)
    hold.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def spawned(engines: Engines, open_: Handles) -> int:
    """The same by `multiprocessing`, started by fork."""

    def child() -> None:
        use(engines, open_)
        sys.exit(LEFT)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HANG_S)
    return process.exitcode or 0


def main(model: str, folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    meeting = Meeting(address, "tcp", b"")
    owner = QLLMEngine.from_pretrained(
        model, listen=f"{folder}/socket", meeting=meeting, **SETTINGS
    )
    engines = {
        "process": owner,
        "attached": QLLMEngine.attach(f"{folder}/socket"),
        "remote": QLLMEngine.connect(str(address)),
        "thread": QLLMEngine.from_pretrained(model, run_in="thread", **SETTINGS),
    }
    for way in (*WAYS, "multiprocessing"):
        gate, loops = Path(folder, way), (owner, engines["thread"])
        standing = [
            threading.Thread(target=e.call, args=(partial(stand_still, f"{gate}-{i}"),))
            for i, e in enumerate(loops)
        ]
        for i, thread in enumerate(standing):
            thread.start()
            wait_for(Path(f"{gate}-{i}-reached").exists)
        open_ = {n: e.submit("abc", "BE", 5, sampling=LONG) for n, e in engines.items()}
        is_mp = way == "multiprocessing"
        code = spawned(engines, open_) if is_mp else forked(way, engines, open_)
        for i, thread in enumerate(standing):
            Path(f"{gate}-{i}").touch()
            thread.join()
        for name, engine in engines.items():
            try:
                found = len(engine.submit("abc", "LS", 3, sampling=LONG).result(HANG_S).token_ids)
                found += len(open_[name].result(HANG_S).token_ids)
            except QllmError as error:
                found = str(error)
            line = {"way": way, "client": name, "child": code, "found": found}
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
    for engine in reversed(engines.values()):
        engine.close()
