"""A request as the engine loop keeps it."""

from typing import NamedTuple

from qllm.ingress import Submission
from qllm.scheduler.request import Request


class Live(NamedTuple):
    """What the loop keeps of a request beside the scheduler's counters."""

    submission: Submission
    request: Request


def request_of(item: Submission) -> Request:
    """A request that arrives, as the scheduler sees it."""
    return Request(
        request_id=item.request_id,
        priority=item.priority,
        arrival_ns=item.arrival_ns,
        num_prompt_tokens=item.num_prompt_tokens,
        num_tokens=len(item.token_ids),
        max_tokens=item.max_tokens,
        slo=item.slo,
        is_open=item.is_open,
    )
