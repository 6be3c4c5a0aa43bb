"""Polling of a stop by native code, before every task of an op: see course.h."""

import time
from typing import Any

from qllm.runner.protocol import NEVER, Stop, Watch
from qllm.types import Grain


def let_poll(call: Any, stop: Stop, below: int, grain: Grain) -> None:
    """Let a native call continue after a segment until a stop is due, if the call can poll.

    Without a word to watch, the call returns after one segment. If a stop is already due, the call
    returns after one task, or after the number of tasks in the watch.

    Args:
        call: Struct of sweep.h with `grain`, `watch`, `seen`, `stop_ns` and `tasks_left`.
        stop: Stop to poll.
        below: Limit of the stop word. A smaller word requests a stop.
        grain: Boundaries where the program may stop. At Grain.STEP the call does not poll.
    """
    call.grain, call.stop_ns, call.tasks_left = grain, NEVER, NEVER
    look = getattr(stop, "watch", None)
    watch: Watch | None = None if look is None or grain is Grain.STEP else look()
    if watch is None:
        return
    call.watch, call.seen, call.tasks_left, left_ns = watch
    if stop.word < below and watch.num_tasks == NEVER:
        call.tasks_left = 1
    if stop.stop_at_ns is not None:
        left_ns = min(left_ns, stop.stop_at_ns - stop.now_ns())
    if left_ns < NEVER:
        call.stop_ns = time.monotonic_ns() + left_ns
