"""`qllm2` without preemption inside a step.

A program that has begun runs to its end. Order, budget and stall bound are those of `qllm2`.
"""

from dataclasses import dataclass, field

from qllm.types import Grain

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class PriorityPolicy(Qllm2):
    """Strict priority between steps."""

    grain: Grain = field(default=Grain.STEP, metadata={"fixed": True})
