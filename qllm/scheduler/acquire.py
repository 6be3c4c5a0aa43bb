"""Changes of KV blocks and of parked frames: which request loses blocks, and which gets them.

    start over    a request loses its row, its blocks and everything computed
    swap out      a request loses its blocks; its KV and its unfinished row are stored
    cut back      a prompt changed: KV after the change is dropped
    acquire       rows of a plan get blocks: victims lose blocks, stored KV is loaded
    split         a parked frame ends between two layers; its rows keep their hidden states

A row that is alone in its frame is swapped out together with the frame, at any boundary inside a
layer. The frame waits in `away`. A row that shares its frame leaves the frame at the start of the
frame's current layer.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qllm.plan import Plan, Row
from qllm.policy import Tier
from qllm.scheduler.decision import (
    Drop,
    Effect,
    EvictKv,
    Kill,
    Leave,
    Parked,
    Split,
    SwapIn,
    SwapOut,
)
from qllm.scheduler.request import Request
from qllm.types import Evict, Frontier, RequestId

if TYPE_CHECKING:
    from qllm.scheduler.scheduler import Scheduler

Victims = Callable[[Request, int, frozenset[RequestId]], Sequence[tuple[RequestId, Evict]]]
"""Function (request, missing blocks, requests that must stay) -> victims, each with an `Evict`."""


def acquire(
    scheduler: "Scheduler",
    plan: Plan,
    rows: Sequence[Row],
    victims: Victims,
    now_ns: int,
    owed: list[Effect],
) -> list[Row]:
    """Give rows their blocks, in order. If blocks are short, requests of lower rank lose blocks.

    Requests that the plan drops or swaps out lose their blocks first.

    Args:
        scheduler: Owner of blocks and requests.
        plan: Plan of the policy.
        rows: Rows of the plan, best first. They end where chunks may end.
        victims: Function that chooses victims if blocks are short.
        now_ns: The engine's clock.
        owed: List to which effects are added, even if `victims` raises later.

    Returns:
        The rows that have their blocks. If a request decodes again after a swap, its row goes
        through all layers (I4).
    """
    for request_ids, how in ((plan.drop, Evict.RECOMPUTE), (plan.swap_out, Evict.SWAP)):
        for request_id in request_ids:
            owed += evict(scheduler, scheduler.requests[request_id], request_id, how)
    shared = _refer(scheduler, rows)
    try:
        return _give(scheduler, rows, shared, victims, now_ns, owed)
    finally:
        for request_id, blocks in shared.items():  # rows that got no blocks
            scheduler.pool.give_back(request_id, blocks)


def _give(
    scheduler: "Scheduler",
    rows: Sequence[Row],
    shared: dict[RequestId, list[int]],
    victims: Victims,
    now_ns: int,
    owed: list[Effect],
) -> list[Row]:
    gone: set[RequestId] = set()
    kept: list[Row] = []
    pool = scheduler.pool
    for row in rows:
        if row.request_id in gone:
            continue
        request = scheduler.requests[row.request_id]
        hi = row.hi if request.frontier is not None else row.hi + request.most_drafts
        need = pool.blocks_for(hi) - len(request.block_table)
        need -= len(shared.get(row.request_id, ()))
        has_drafts = hi > request.num_tokens and request.frontier is None
        if has_drafts and need > pool.num_free:  # nothing is evicted for drafted tokens
            request.end_drafting()
            row = row._replace(hi=request.num_tokens, end_layer=scheduler.shape.num_layers)
            need = pool.blocks_for(row.hi) - len(request.block_table)
        if need <= 0:
            kept.append(row)
            continue
        if need > pool.num_free:
            keep = frozenset(r.request_id for r in kept) | {row.request_id}
            for victim, how in victims(request, need - pool.num_free, keep):
                owed += evict(scheduler, scheduler.requests[victim], row.request_id, how)
                gone.add(victim)
        if need > pool.num_free:
            continue
        _take(scheduler, request, shared.pop(row.request_id, []), need, now_ns, owed)
        if request.is_decoding:
            is_draft = request.draft_row == row[1:4]
            end = request.exit_layer if is_draft else scheduler.shape.num_layers
            row = row._replace(end_layer=end)
        kept.append(row)
    return kept


def _refer(scheduler: "Scheduler", rows: Sequence[Row]) -> dict[RequestId, list[int]]:
    """Make new requests holders of the blocks that they share, so that no eviction frees them."""
    pool, found = scheduler.pool, dict[RequestId, list[int]]()
    for row in rows if pool.has_names else ():
        request = scheduler.requests[row.request_id]
        if request.found_pages and not request.is_admitted:
            found[row.request_id] = pool.find(request.found_pages)
            pool.share(row.request_id, found[row.request_id])
    return found


def _take(
    scheduler: "Scheduler",
    request: Request,
    shared: list[int],
    need: int,
    now_ns: int,
    owed: list[Effect],
) -> None:
    is_new, was_swapped = not request.is_admitted, request.num_swapped_tokens > 0
    if is_new:
        request.num_shared_tokens = len(shared) * scheduler.pool.block_size
        request.block_table = shared
    request.block_table += scheduler.pool.take(request.request_id, need)
    if not is_new:
        return
    request.admitted_ns = now_ns
    if was_swapped:
        owed.append(_come_back(scheduler, request))
    else:
        request.last_progress_ns = now_ns
    scheduler.touch(request)


def _come_back(scheduler: "Scheduler", request: Request) -> Effect:
    """Load the KV of a swapped-out request into new blocks, and restore the request's frame."""
    request_id = request.request_id
    back = SwapIn(request_id, request.num_swapped_tokens, tuple(request.block_table))
    scheduler.swap.release(request_id)
    request.num_swapped_tokens = 0
    if parked := scheduler.away.pop(request_id, None):
        request.frame_id = parked.program.frame_id
        scheduler.frames[request.frame_id] = parked
    return back


def evict(
    scheduler: "Scheduler", request: Request, for_request: RequestId, how: Evict
) -> list[Effect]:
    """Take a request's blocks, and swap the KV out or start the request over.

    The request starts over if the swap space is too small, or if computing is faster than moving
    the KV.
    """
    request_id, written = request.request_id, request.num_written_tokens
    blocks, request.gave_way = scheduler.pool.blocks_for(written), request.is_idle
    effects: list[Effect]
    pays = how is Evict.SWAP and scheduler.costs.pays_to_keep(Tier.MEMORY, written, written)
    if pays and scheduler.swap.put(request_id, blocks):
        effects = [*_move_out(scheduler, request), SwapOut(request_id, written, for_request)]
    else:
        lost = EvictKv(request_id, request.num_computed_tokens, for_request)
        effects = [*start_over(scheduler, request), lost]
        request.evictions += 1
    scheduler.touch(request)
    return effects


def start_over(scheduler: "Scheduler", request: Request) -> list[Effect]:
    """Drop a request's row, free its blocks, and forget everything computed."""
    effects = _die(scheduler, request)
    _free_blocks(scheduler, request)
    scheduler.swap.release(request.request_id)
    request.reset()
    return effects


def give_back_rest(scheduler: "Scheduler", request: Request, num_tokens: int) -> None:
    """Give back the blocks behind a request's first `num_tokens` tokens."""
    need = scheduler.pool.blocks_for(num_tokens)
    scheduler.pool.give_back(request.request_id, request.block_table[need:])
    request.block_table = request.block_table[:need]


def cut_back(scheduler: "Scheduler", request: Request, num_tokens: int) -> list[Effect]:
    """Drop the KV of a prompt after its first `num_tokens` tokens, where the prompt changed.

    An unfinished row is killed if it ends after `num_tokens`. Later blocks are freed. The block
    that contains the cut is freed too, with its tokens before the cut, if other requests may share
    the block.
    """
    pool, request_id = scheduler.pool, request.request_id
    if not (request.is_admitted or request.num_swapped_tokens):
        request.find(0)  # the prefix cache is searched again for the new prompt
        return []
    whole, rest = divmod(num_tokens, pool.block_size)
    if rest and whole < len(request.block_table) and pool.is_fixed(request.block_table[whole]):
        num_tokens -= rest
    effects: list[Effect] = []
    if request.frontier is not None and request.frontier.hi > num_tokens:
        effects = _die(scheduler, request)
    request.cut_back(num_tokens)
    if request.is_admitted:
        give_back_rest(scheduler, request, request.num_written_tokens)
    else:
        scheduler.swap.release(request_id)
        if need := pool.blocks_for(request.num_written_tokens):
            scheduler.swap.put(request_id, need)
    return effects


def _die(scheduler: "Scheduler", request: Request) -> list[Effect]:
    request_id, frame_id = request.request_id, request.frame_id
    if parked := scheduler.away.pop(request_id, None):
        return [Drop(parked.program)]
    if frame_id is None:
        return []
    parked = scheduler.frames[frame_id]
    parked.dead.add(request_id)
    if parked.held_rows():
        return [Kill(parked.program, request_id)]
    del scheduler.frames[frame_id]
    return [Drop(parked.program)]


def _move_out(scheduler: "Scheduler", request: Request) -> list[Effect]:
    effects = step_aside(scheduler, request)
    if request.frame_id is not None:
        parked = scheduler.away[request.request_id] = scheduler.frames.pop(request.frame_id)
        parked.waits_for = None  # the frame asks again when the KV is back
    _free_blocks(scheduler, request, moving=True)
    request.swap_out()
    return effects


def step_aside(scheduler: "Scheduler", request: Request) -> list[Effect]:
    """Take a request's row out of a frame that the row shares. Whole layers stay computed."""
    request_id, frame_id = request.request_id, request.frame_id
    if frame_id is None:
        return []
    parked = scheduler.frames[frame_id]
    if len(parked.held_rows()) == 1:
        return []
    parked.dead.add(request_id)
    assert request.frontier is not None
    request.leave_frame(request.frontier)
    return [Leave(parked.program, request_id, parked.program.layer_start(parked.index))]


def _free_blocks(scheduler: "Scheduler", request: Request, *, moving: bool = False) -> None:
    scheduler.pool.give_back(request.request_id, request.block_table, moving=moving)
    request.block_table = []


def let_go(scheduler: "Scheduler") -> list[Split]:
    """Split parked frames whose remaining rows have all run their last layer."""
    found = []
    for parked in [p for p in scheduler.frames.values() if p.dead and not p.live_rows()]:
        # only cancelled rows worked in this layer; live rows left the frame at its start
        parked.index = parked.program.layer_start(parked.index)
        found.append(split(scheduler, parked))
    return found


def split(scheduler: "Scheduler", parked: Parked) -> Split:
    """End a parked frame that is between two layers. Its rows keep their hidden states."""
    del scheduler.frames[parked.program.frame_id]
    for row in parked.held_rows():
        scheduler.requests[row.request_id].leave_frame(Frontier(row.lo, row.hi, row.start_layer))
    return Split(parked.program, parked.index)
