"""The bound on preemptions: delays those of requests that reached `max_preemptions`.

    arrival stops a pass    all below the bound    preempted: the arrival goes first
                            one reached it         alarm: the pass continues to its end, or until
                                                   the arrival has waited; then: preempted

So the bound on an arrival's wait always holds, and the bound on preemptions may be exceeded: only
by arrivals that have waited for all of `max_preemption_wait_ms`.
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
    """Return True if a stopped pass is preempted; set its alarm if an arrival has to wait for it.

    Args:
        policy: Policy with the bounds.
        requests: Unfinished requests.
        parked: Frame of the pass.
        start_ns: Time when it began to run.
        now_ns: Time when it stopped.
        by_arrival: True if an arrival stopped it, False if its slice ended.
    """
    if not isinstance(policy, RankPolicy) or policy.max_preemptions is None:
        return by_arrival
    wait_ns = policy.max_preemption_wait_ms * NS_PER_MS
    if parked.alarm_ns is not None and start_ns >= parked.alarm_ns + wait_ns:
        parked.alarm_ns = None  # old: the pass was parked meanwhile (others were due, or a pause)
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
