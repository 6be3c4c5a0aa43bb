"""How long one call keeps the interpreter's lock from other threads, in its own CPU time."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

BEAT_S = 0.0005
TRIES = 3


def longest_hold_s(do: Callable[[], object]) -> float:
    """The longest CPU time of a call in which a thread beside it could take no step.

    A machine that is busy lets the other thread wait too, so the best of a few tries counts.
    """
    return min(_longest_hold_s(do) for _ in range(TRIES))


def _longest_hold_s(do: Callable[[], object]) -> float:
    clock = time.pthread_getcpuclockid(threading.get_ident())
    beats: list[float] = []
    begun, over = threading.Event(), threading.Event()

    def beat() -> None:
        while not over.is_set():
            beats.append(time.clock_gettime(clock))
            begun.set()
            time.sleep(BEAT_S)

    thread = threading.Thread(target=beat)
    thread.start()
    begun.wait()
    try:
        do()
        beats.append(time.clock_gettime(clock))
    finally:
        over.set()
        thread.join()
    beats.sort()
    return max(b - a for a, b in pairwise(beats))
