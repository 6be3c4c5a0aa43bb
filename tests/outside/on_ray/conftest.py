"""A test on a cluster that waits for what does not come fails by itself, and the next one runs."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 400
"""A test has so long with what it sets up: a cluster, two replicas, on a machine that may be busy.

Counted second by second, so time in which the whole machine or this process stands still is none.
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let each test of this folder have its own time."""
    if item.path.parent != Path(__file__).parent:
        return (yield)  # with workers, pytest asks the hooks of all folders
    over = threading.Event()

    def late(*_: object) -> None:
        raise TimeoutError(f"{item.nodeid} takes longer than {LIMIT_S} s")

    def count() -> None:
        if not any(over.wait(1) for _ in range(LIMIT_S)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, late)
    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        return (yield)
    finally:
        over.set()
        counter.join()
        signal.signal(signal.SIGUSR1, before)
