"""The bound on preemptions, which delays preemptions of requests that reached `max_preemptions`.

    arrival stops a pass    all requests below the bound    preempted: the arrival goes first
                            one request reached it          alarm: the pass continues to its end, or
                                                            until the arrival has waited for its
                                                            limit; then the pass is preempted

So the bound on an arrival's wait always holds. Only arrivals that have waited for all of
`max_preemption_wait_ms` exceed the bound on preemptions.
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
    """Return True if a stopped pass is preempted; set the pass's alarm if an arrival has to wait.

    Args:
        policy: Policy with the bounds.
        requests: Unfinished requests.
        parked: Frame of the pass.
        start_ns: Time when the pass began to run.
        now_ns: Time when the pass stopped.
        by_arrival: True if an arrival stopped the pass, False if the pass's slice ended.
    """
    if not isinstance(policy, RankPolicy) or policy.max_preemptions is None:
        return by_arrival
    wait_ns = policy.max_preemption_wait_ms * NS_PER_MS
    if parked.alarm_ns is not None and start_ns >= parked.alarm_ns + wait_ns:
        # old alarm: the pass was parked meanwhile (other requests were due, or a pause)
        parked.alarm_ns = None
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
