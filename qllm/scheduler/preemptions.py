"""Whose pass an arrival does not stop at once: of who was preempted as often as it may be.

    arrival stops a pass    nobody in it is spent      preempted: the arrival goes first
                            somebody is                alarm: the pass goes on to its end, or until
                                                       the arrival has waited; then: preempted

So the wait of an arrival is the bound that holds, and the number of preemptions the one that gives
way: it is passed only by arrivals that have waited for all of `max_preemption_wait_ms`.
"""

from collections.abc import Mapping
from typing import Any

from qllm.policy import RankPolicy
from qllm.scheduler.decision import Parked
from qllm.scheduler.request import Request
from qllm.types import NS_PER_MS, Priority, RequestId


def preempts(
    policy: Any,
    requests: Mapping[RequestId, Request],
    parked: Parked,
    start_ns: int,
    now_ns: int,
    *,
    by_arrival: bool,
) -> bool:
    """Whether a pass that was stopped is preempted; if not, and it was an arrival, sets its alarm.

    Args:
        policy: Says how often a request may be preempted.
        requests: Unfinished requests.
        parked: The pass.
        start_ns: When it began to run,
        now_ns: and when it was stopped.
        by_arrival: By an arrival, not by the end of a slice.
    """
    if not isinstance(policy, RankPolicy) or policy.max_preemptions is None:
        return by_arrival
    wait_ns = policy.max_preemption_wait_ms * NS_PER_MS
    if parked.alarm_ns is not None and start_ns >= parked.alarm_ns + wait_ns:
        parked.alarm_ns = None  # it stood still meanwhile (others were due, it was paused)
    if parked.alarm_ns is not None:
        over = now_ns >= parked.alarm_ns + wait_ns
        parked.alarm_ns = None if over else parked.alarm_ns
        return over
    held = [requests[row.request_id] for row in parked.held_rows() if row.request_id in requests]
    if not by_arrival or not any(_is_spent(r, policy.max_preemptions) for r in held):
        return by_arrival
    parked.alarm_ns = now_ns
    return False


def _is_spent(request: Request, most: int) -> bool:
    return request.priority > Priority.LS and request.preemptions >= most
