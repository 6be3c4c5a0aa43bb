"""How native code polls a stop by itself, before every task of an op: see course.h."""

import time
from typing import Any

from qllm.runner.protocol import NEVER, Stop, Watch
from qllm.types import Grain


def let_poll(call: Any, stop: Stop, below: int, grain: Grain) -> None:
    """Let a call go on past a segment until it is asked to stop, if it can find that out.

    Without a word to watch it returns after one segment; where a stop is due already, after one
    task, or as many as the watch says.

    Args:
        call: A struct of sweep.h with `grain`, `watch`, `seen`, `stop_ns` and `tasks_left`.
        stop: What to poll.
        below: A smaller stop word asks.
        grain: Where the program may stop; at Grain.STEP nothing is polled.
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
