"""Who moves its KV out for a swapped-out request that has to go on (I14)."""

from qllm.plan import Row
from qllm.policy import Freed, View
from qllm.scheduler.ranking import Ranking
from qllm.types import RequestId


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
