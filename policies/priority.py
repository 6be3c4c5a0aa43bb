"""`qllm2` without preemption inside a step: the same order, budget and stall bound.

The ablation of the one mechanism: a program that has begun runs to its end.
"""

from dataclasses import dataclass

from qllm.types import Grain

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class PriorityPolicy(Qllm2):
    """Strict priority between steps."""

    grain: Grain = Grain.STEP
