"""Who loses its KV when there is too little (I6): lower ranks, worst first, never for nothing."""

from collections.abc import Iterable, Mapping
from typing import Any

from qllm.errors import contained, shown
from qllm.plan import Row
from qllm.policy import Freed, RequestView, View
from qllm.scheduler.ranking import Ranking
from qllm.scheduler.request import Request
from qllm.types import Evict, RequestId


class BadVictimError(Exception):
    """A policy named a victim that the rules forbid; the scheduler adds the policy's name."""


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
    """The shortest prefix of the victims that frees `num_blocks` blocks, or nobody; and how.

    Paused requests come first, whatever their class; those that wait for more of their prompt come
    last, for whoever could not go on otherwise.

    A request of a worse tier may always be evicted. One of the same tier only for a request
    that already holds KV and has to grow, and only if it ranks behind it; so newcomers never
    evict their equals, and there is no ping-pong. A prompt that is open is behind those that are
    whole, no equal. A cohort between two groups of layers is not
    evicted for its equals either: the layers it has done would be lost, and it advances in the
    same step as those who have to grow.

    Args:
        policy: Names victims itself, if it has a `victims` and no ranking.
        ranking: The order of the requests, if the policy ranks them.
        view: The state it decides on.
        requests: Unfinished requests.
        request: Who needs the blocks.
        num_blocks: How many it needs beyond the free ones.
        keep: Requests planned at or above its rank.
        shared: Holders of each block that has more than one.

    Raises:
        BadVictimError: The policy named somebody it must not.
        OutsideError: It raised `SystemExit`, or kin.
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
    """Requests whose KV moves out so that `row` has its blocks; the last in rank go first.

    Better ones too: they lose a slice, and no token. Whoever has not run since it was given KV
    stays, and whoever finds no room in the swap space.

    Returns:
        Their ids, none if enough blocks are free; None if there are too few such requests.
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
    """Whether `victim` is behind `request` where no rank says it."""
    if (theirs := (victim.priority, victim.is_open)) != (
        own := (request.priority, request.is_open)
    ):
        return theirs > own
    return request.is_admitted and (victim.arrival_ns, victim.request_id) > (
        request.arrival_ns,
        request.request_id,
    )
