"""Requests that lose their KV when blocks are short (I6, I14): lower ranks, worst first."""

from collections.abc import Iterable, Mapping
from typing import Any

from qllm.errors import contained, shown
from qllm.plan import Row
from qllm.policy import Freed, RequestView, View
from qllm.scheduler.ranking import Ranking
from qllm.scheduler.request import Request
from qllm.types import Evict, RequestId


class BadVictimError(Exception):
    """Error of a policy that named a forbidden victim. The scheduler adds the policy's name."""


@contained()
def victims_for(
    policy: Any,
    ranking: Ranking | None,
    view: View,
    requests: Mapping[RequestId, Request],
    request: Request,
    num_blocks: int,
    keep: frozenset[RequestId],
    shared: Mapping[int, int],
) -> list[tuple[RequestId, Evict]]:
    """Return the fewest victims that free `num_blocks` blocks, each with an `Evict`; else none.

    Paused requests come first, whatever their class. Streaming prompts that wait for input come
    last. They lose their KV only if the request cannot run otherwise.

    A request of a worse tier may always be evicted. A request of the same tier may be evicted only
    for a request that already holds KV and needs more, and only if the victim ranks behind that
    request. So newcomers never evict requests of their tier, and two requests never evict each
    other in turns. A streaming prompt ranks behind all whole prompts of its tier. A cohort between
    two groups of layers is not evicted for requests of its tier. The cohort would lose its computed
    layers, and it advances in the same step as the requests that need more KV.

    Args:
        policy: Policy. It names victims itself if it has `victims` and no ranking.
        ranking: Order of the requests, if the policy ranks them.
        view: State to decide on.
        requests: Unfinished requests.
        request: Request that needs the blocks.
        num_blocks: Number of blocks that the request needs in addition to the free blocks.
        keep: Requests planned at or above the request's rank.
        shared: Number of holders of each block that has several holders.

    Raises:
        BadVictimError: The policy named a victim that the rules forbid.
        OutsideError: The policy raised `SystemExit`, or another error that is no `Exception`.
    """
    if ranking is not None:
        order = [(victim, Evict.SWAP) for victim in _by_rank(ranking, view, request)]
    elif hasattr(policy, "victims"):
        order = _named(policy.victims(view, num_blocks, keep), requests, request, keep)
    else:
        others = [r for r in requests.values() if r.is_admitted and _behind(r, request)]
        others = [r for r in others if not r.is_paused]
        others.sort(key=lambda r: (r.priority, r.arrival_ns, r.request_id), reverse=True)
        order = [(r.request_id, Evict.SWAP) for r in others]
    paused = [(i, Evict.SWAP) for i, r in requests.items() if r.is_paused and r.is_admitted]
    named = {victim for victim, _ in order}
    idle = [
        (i, Evict.SWAP)
        for i, r in requests.items()
        if r.is_idle and r.is_admitted and i not in named
    ]
    chosen: list[tuple[RequestId, Evict]] = []
    freed = Freed(shared)
    for victim, how in (*paused, *order, *idle):
        if num_blocks <= 0:
            break
        if victim not in keep:
            chosen.append((victim, how))
            num_blocks -= freed.add(requests[victim])
    return chosen if num_blocks <= 0 else []


def make_way(view: View, ranking: Ranking, row: Row) -> tuple[RequestId, ...] | None:
    """Choose requests to swap out so that `row`, itself swapped out, gets its blocks (I14).

    The worst rank is chosen first. Requests with better ranks than the row may be chosen too: they
    lose a slice, and no token. A request stays if it has not run since it got KV, or if the swap
    space lacks room.

    Returns:
        Ids of the chosen requests; empty if enough blocks are free; None if too few requests can be
        chosen.
    """
    need, room = view.blocks_needed(row) - view.num_free_blocks, view.num_free_swap_blocks
    out, freed = list[RequestId](), Freed.of(view)
    for x in reversed(ranking.admitted):
        if need <= 0:
            break
        r = x.request
        size = view.shape.blocks_for(r.num_written_tokens, view.block_size)
        if r.is_admitted and r.last_progress_ns > r.admitted_ns and size <= room:
            need, room = need - freed.add(r), room - size
            out.append(x.request_id)
    return tuple(out) if need <= 0 else None


def _by_rank(ranking: Ranking, view: View, request: Request) -> list[RequestId]:
    me = ranking.rank(request, view.now_ns)
    return [
        x.request_id
        for x in reversed(ranking.admitted)
        if x.request.is_admitted
        and (
            x.tier > me.tier
            or (x.tier == me.tier and x.is_open and not me.is_open)
            or (request.is_admitted and x[:4] > me[:4] and not _is_between_groups(x.request))
        )
    ]


def _is_between_groups(request: RequestView) -> bool:
    return request.frontier is not None and request.frame_id is None


def _named(
    pairs: Iterable[tuple[RequestId, Evict]],
    requests: Mapping[RequestId, Request],
    request: Request,
    keep: frozenset[RequestId],
) -> list[tuple[RequestId, Evict]]:
    order: dict[RequestId, Evict] = {}
    for victim, how in pairs:
        if victim in keep:
            raise BadVictimError(f"evicts request {victim}, which outranks the row (I6)")
        if not isinstance(how, Evict):
            raise BadVictimError(
                f"says {shown(how)} of request {victim}; it can be Evict.SWAP or Evict.RECOMPUTE"
            )
        if victim not in requests:
            raise BadVictimError(f"evicts request {victim}, which is not live")
        if not _behind(requests[victim], request):
            raise BadVictimError(
                f"evicts request {victim} for {request.request_id}, its equal or better (I6)"
            )
        order.setdefault(victim, how)
    return list(order.items())


def _behind(victim: Request, request: Request) -> bool:
    """Return True if `victim` is behind `request`, for policies without ranks."""
    if (theirs := (victim.priority, victim.is_open)) != (
        own := (request.priority, request.is_open)
    ):
        return theirs > own
    return request.is_admitted and (victim.arrival_ns, victim.request_id) > (
        request.arrival_ns,
        request.request_id,
    )
