"""How native code polls a stop by itself, between segments: see sweep.h."""

from typing import Any

from qllm.runner.protocol import Stop, Watch
from qllm.types import Grain

FOREVER_NS = 1 << 62


def let_poll(call: Any, stop: Stop, below: int, grain: Grain) -> None:
    """Let a call go on past a segment until it is asked to stop, if it can find that out.

    Without a word to watch, or where somebody has asked already, it returns after one segment.

    Args:
        call: A struct of sweep.h with `grain`, `watch`, `seen` and `left_ns`.
        stop: What to poll.
        below: A smaller stop word asks.
        grain: Where the program may stop; at Grain.STEP nothing is polled.
    """
    call.grain = grain
    look = getattr(stop, "watch", None)
    watch: Watch | None = None if look is None or grain is Grain.STEP else look()
    if watch is None or stop.word < below:
        return
    late_ns = stop.stop_at_ns
    call.watch, call.seen = watch
    call.left_ns = FOREVER_NS if late_ns is None else late_ns - stop.now_ns()
