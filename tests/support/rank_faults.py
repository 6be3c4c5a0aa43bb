"""Ranks that get a signal at an operation of their engine."""

import os
import threading
import time
from typing import Any

from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START

METHODS = {
    "prefill": "run",
    "decode": "run",
    "resume": "run",  # a pass that was parked goes on
    "swap_out": "swap_out",
    "swap_in": "swap_in",
}
"""Operations, and the methods of a runner that make them."""


def is_at(operation: str, *given: Any) -> bool:
    """Return True if a call of the operation's method is the operation."""
    if METHODS[operation] != "run":
        return True
    program, start, *_ = given
    if start != START:
        return operation == "resume"
    longest = max(row.hi - row.lo for row in program.rows)
    return operation == ("prefill" if longest > 1 else "decode")


def signal_at(operation: str, rank: int, number: int, delay_s: float) -> None:
    """Send a signal to a rank after the start of the next operation. Call it in the engine's loop.

    Args:
        operation: Any of METHODS.
        rank: Number of the rank.
        number: Number of the signal.
        delay_s: Seconds from the start of the operation to the signal.
    """
    name = METHODS[operation]
    real = getattr(TorchRunner, name)

    def watched(runner: Any, *given: Any) -> Any:
        if is_at(operation, *given):
            setattr(TorchRunner, name, real)
            pid = runner.backend.group.processes[rank]
            threading.Thread(target=_send, args=(pid, number, delay_s), daemon=True).start()
        return real(runner, *given)

    setattr(TorchRunner, name, watched)


def _send(pid: int, number: int, delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(pid, number)
