"""Changes of a request's class, prompt and pause, and the view that policies get of the state.

No policy sees or plans a paused request. A paused request keeps its KV, and keeps a frame that
holds no other request. When blocks are short, it is the first victim, whatever its class. Policies
do not see a streaming prompt that waits for input either, nor a request whose frame waits for
experts. Such requests keep their rank among victims.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from qllm.policy import FrameView, Freed, View
from qllm.scheduler.acquire import cut_back, step_aside
from qllm.scheduler.decision import Effect
from qllm.scheduler.request import Request
from qllm.types import RequestId

if TYPE_CHECKING:
    from qllm.scheduler.scheduler import Scheduler


def change(
    scheduler: "Scheduler", request: Request, priority: int | None, paused: bool | None, now_ns: int
) -> list[Effect]:
    """Give a request another class, pause it, or resume it; None changes nothing.

    If a paused request shares a frame with other requests, its row is taken out of the frame. The
    layers that the row has finished stay computed. The time of a pause does not count as a stall.
    """
    if priority is not None:
        request.priority = priority
    if paused is None or paused is request.is_paused:
        return []
    request.is_paused = paused
    if not paused:
        scheduler.paused.discard(request.request_id)
        # move both times by the pause, so that "has run since the request got KV" does not change
        request.last_progress_ns += now_ns - request.paused_ns
        request.admitted_ns += now_ns - request.paused_ns
        return []
    request.paused_ns = now_ns
    scheduler.paused.add(request.request_id)
    return step_aside(scheduler, request)


def revise(
    scheduler: "Scheduler", request: Request, num_kept: int, num_tokens: int, now_ns: int
) -> list[Effect]:
    """Replace the end of a streaming prompt. The prompt may be complete from now on.

    Args:
        scheduler: Owner of the request.
        request: Request without output. Its `is_open` is already updated.
        num_kept: Number of first tokens of the prompt that did not change.
        num_tokens: Length of the new prompt in tokens.
        now_ns: The engine's clock. The wait for the piece does not count as a stall.
    """
    was_idle = request.is_idle or not request.is_open
    effects = cut_back(scheduler, request, num_kept)
    request.num_prompt_tokens = request.num_tokens = num_tokens
    request.gave_way = False
    if was_idle and request.is_admitted:
        request.last_progress_ns = now_ns
    if not request.is_open:
        scheduler.open.discard(request.request_id)
    return effects


def active(scheduler: "Scheduler") -> list[Request]:
    """Return all requests except paused ones, and those that wait for input or for experts."""
    if not (scheduler.paused or scheduler.open or scheduler.has_waits):
        return list(scheduler.requests.values())
    return [r for r in scheduler.requests.values() if not r.is_hidden]


def ranked(scheduler: "Scheduler") -> list[Request]:
    """Return requests that have a rank: active requests, and waiting prompts that hold KV."""
    return [r for r in scheduler.requests.values() if has_rank(r)]


def has_rank(request: Request) -> bool:
    """Return True if the policy ranks a request, to plan it or as a possible victim."""
    return not request.is_paused and (request.is_admitted or not request.is_idle)


def view_of(scheduler: "Scheduler", now_ns: int) -> View:
    """Return the state as policies see it, without paused requests. Their KV counts as free."""
    limits, requests, paused = scheduler.limits, scheduler.requests, scheduler.paused
    pool, freed = scheduler.pool, Freed(scheduler.pool.shared)
    given_up = sum(freed.add(requests[i]) for i in paused)
    frames = [
        FrameView(frame_id, parked.live_rows(), parked.parked_ns, parked.alarm_ns)
        for frame_id, parked in scheduler.frames.items()
        if parked.waits_for is None
    ]
    if paused:
        frames = [f for f in frames if not any(row.request_id in paused for row in f.rows)]
    view = View(
        now_ns=now_ns,
        requests=tuple(active(scheduler)),
        idle=_idle(scheduler),
        by_id=requests,
        frames=tuple(frames),
        shape=scheduler.shape,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_step_tokens,
        block_size=limits.block_size,
        num_free_blocks=pool.num_free + given_up,
        num_blocks=limits.num_blocks,
        num_free_swap_blocks=scheduler.swap.num_free,
        costs=scheduler.costs,
        finest_grain=limits.grain,
        max_segment_ns=limits.max_segment_ns,
        ride_credit_ns=scheduler.riding.credit_ns,
        ride_margin_ns=scheduler.riding.margin_ns,
        ride_used_ns=scheduler.riding.used_ns(now_ns),
        capabilities=limits.capabilities,
        cuts=scheduler.cuts if limits.batch_invariant else None,
        whole_steps=limits.whole_steps,
        shared_blocks=pool.shared,
        found_blocks=_found_blocks(scheduler) if pool.has_names else {},
    )
    if view.idle and not any(r.is_admitted for r in view.requests):
        return without_idle(view)  # at least one request of a view must be able to get KV
    return view


def _idle(scheduler: "Scheduler") -> tuple[Request, ...]:
    """Return streaming prompts that hold KV and wait for input, by id."""
    found = (scheduler.requests[i] for i in sorted(scheduler.open))
    return tuple(r for r in found if r.is_idle and r.is_admitted and not r.is_paused)


def without_idle(view: View) -> View:
    """Return a view in which the KV of waiting streaming prompts counts as free.

    The scheduler uses this view when no request can run. So no request waits for a prompt that a
    client may never finish.
    """
    freed = view.blocks_freed(view.idle)
    return replace(view, num_free_blocks=view.num_free_blocks + freed, idle=())


def _found_blocks(scheduler: "Scheduler") -> dict[RequestId, list[int]]:
    """Return the blocks that requests without KV would share if they ran."""
    waiting = (r for r in scheduler.requests.values() if r.found_pages and not r.is_admitted)
    found = {r.request_id: scheduler.pool.find(r.found_pages) for r in waiting}
    return {request_id: blocks for request_id, blocks in found.items() if blocks}
