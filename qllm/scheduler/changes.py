"""A request changes its class, stops for a while, or goes on: changes of state, no decisions.

Who is paused is shown to no policy and planned by nobody. It keeps its KV, and a frame that holds
no other request; for whoever needs KV it is the first victim, whatever its class.
"""

from typing import Protocol

from qllm.plan import CutRule, ModelShape
from qllm.policy import CostTable, FrameView, Freed, View
from qllm.scheduler.acquire import step_aside
from qllm.scheduler.blocks import BlockPool, SwapSpace
from qllm.scheduler.decision import Effect, Limits, Parked
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding
from qllm.types import FrameId, RequestId


class State(Protocol):
    """What is asked of a scheduler; `qllm.scheduler.scheduler.Scheduler` has it."""

    shape: ModelShape
    cuts: CutRule
    limits: Limits
    costs: CostTable
    riding: Riding
    pool: BlockPool
    swap: SwapSpace
    requests: dict[RequestId, Request]
    frames: dict[FrameId, Parked]
    paused: set[RequestId]


def change(
    state: State, request: Request, priority: int | None, paused: bool | None, now_ns: int
) -> list[Effect]:
    """Give a request another class, pause it, or let it go on; None leaves as it is.

    Paused, its row leaves a frame that it shares and keeps what it has computed. The time that it
    was paused is no stall.
    """
    if priority is not None:
        request.priority = priority
    if paused is None or paused is request.is_paused:
        return []
    request.is_paused = paused
    if not paused:
        state.paused.discard(request.request_id)
        # its time stood still: whether it has run since it was given KV is as it was
        request.last_progress_ns += now_ns - request.paused_ns
        request.admitted_ns += now_ns - request.paused_ns
        return []
    request.paused_ns = now_ns
    state.paused.add(request.request_id)
    return step_aside(state, request)


def active(state: State) -> list[Request]:
    """All requests but the paused ones."""
    if not state.paused:
        return list(state.requests.values())
    return [r for r in state.requests.values() if not r.is_paused]


def view_of(state: State, now_ns: int) -> View:
    """The state as policies see it: without paused requests, their KV as if it were free."""
    limits, requests, paused = state.limits, state.requests, state.paused
    pool, freed = state.pool, Freed(state.pool.shared)
    given_up = sum(freed.add(requests[i]) for i in paused)
    frames = [
        FrameView(frame_id, parked.live_rows(), parked.parked_ns, parked.alarm_ns)
        for frame_id, parked in state.frames.items()
    ]
    if paused:
        frames = [f for f in frames if not any(row.request_id in paused for row in f.rows)]
    return View(
        now_ns=now_ns,
        requests=tuple(active(state)),
        by_id=requests,
        frames=tuple(frames),
        shape=state.shape,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_step_tokens,
        block_size=limits.block_size,
        num_free_blocks=pool.num_free + given_up,
        num_blocks=limits.num_blocks,
        num_free_swap_blocks=state.swap.num_free,
        costs=state.costs,
        finest_grain=limits.grain,
        max_segment_ns=limits.max_segment_ns,
        ride_credit_ns=state.riding.credit_ns,
        ride_margin_ns=state.riding.margin_ns,
        ride_used_ns=state.riding.used_ns(now_ns),
        capabilities=limits.capabilities,
        cuts=state.cuts if limits.batch_invariant else None,
        whole_steps=limits.whole_steps,
        shared_blocks=pool.shared,
        found_blocks=_found_blocks(state) if pool.has_names else {},
    )


def _found_blocks(state: State) -> dict[RequestId, list[int]]:
    """Blocks that requests without KV would take by reference."""
    waiting = (r for r in state.requests.values() if r.found_pages and not r.is_admitted)
    found = {r.request_id: state.pool.find(r.found_pages) for r in waiting}
    return {request_id: blocks for request_id, blocks in found.items() if blocks}
