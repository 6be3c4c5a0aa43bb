"""KV for the rows of a plan: blocks are taken, victims lose theirs, swapped KV comes back."""

from collections.abc import Callable, Sequence
from typing import Protocol

from qllm.plan import ModelShape, Plan, Row
from qllm.scheduler.blocks import BlockPool, SwapSpace
from qllm.scheduler.decision import Effect, SwapIn
from qllm.scheduler.request import Request
from qllm.types import Evict, RequestId

Victims = Callable[[Request, int, frozenset[RequestId]], Sequence[tuple[RequestId, Evict]]]
"""Who loses how many blocks for a request, and how; the last are those who must not."""


class Holder(Protocol):
    """What is asked of a scheduler; `qllm.scheduler.scheduler.Scheduler` has it."""

    requests: dict[RequestId, Request]
    pool: BlockPool
    swap: SwapSpace
    shape: ModelShape

    def evict(
        self, request_id: RequestId, for_request: RequestId, how: Evict = Evict.RECOMPUTE
    ) -> list[Effect]:
        """Take the KV of a request."""
        ...

    def touch(self, request: Request) -> None:
        """Note that a request holds KV now."""
        ...


def acquire(
    holder: Holder,
    plan: Plan,
    rows: Sequence[Row],
    victims: Victims,
    now_ns: int,
    owed: list[Effect],
) -> list[Row]:
    """Give rows their blocks, in order; lower ranks lose theirs where blocks are short.

    Whoever the plan drops or swaps out loses its blocks first.

    Args:
        holder: Owns blocks and requests.
        plan: What the policy wants.
        rows: Its rows, best first, ending where chunks may end.
        victims: Asked where blocks are short.
        now_ns: The engine's clock.
        owed: Takes what has to be done to the runner, also if `victims` raises later.

    Returns:
        The rows that have their blocks. That of a request whose KV comes back and that is decoding
        again goes full depth (I4).
    """
    for request_ids, how in ((plan.drop, Evict.RECOMPUTE), (plan.swap_out, Evict.SWAP)):
        for request_id in request_ids:
            owed += holder.evict(request_id, request_id, how)
    gone: set[RequestId] = set()
    kept: list[Row] = []
    pool, block_size = holder.pool, holder.pool.block_size
    for row in rows:
        if row.request_id in gone:
            continue
        request = holder.requests[row.request_id]
        need = -(-row.hi // block_size) - len(request.block_table)
        if need <= 0:
            kept.append(row)
            continue
        if need > pool.num_free:
            keep = frozenset(r.request_id for r in kept) | {row.request_id}
            for victim, how in victims(request, need - pool.num_free, keep):
                owed += holder.evict(victim, row.request_id, how)
                gone.add(victim)
        if need > pool.num_free:
            continue
        _take(holder, request, need, now_ns, owed)
        if request.is_decoding:
            row = row._replace(end_layer=holder.shape.num_layers)
        kept.append(row)
    return kept


def _take(holder: Holder, request: Request, need: int, now_ns: int, owed: list[Effect]) -> None:
    is_new = not request.is_admitted
    request.block_table += holder.pool.take(request.request_id, need)
    if not is_new:
        return
    if request.num_swapped_tokens:
        owed.append(SwapIn(request.request_id, request.num_swapped_tokens))
        holder.swap.release(request.request_id)
        request.num_swapped_tokens = 0
    request.admitted_ns = request.last_progress_ns = now_ns
    holder.touch(request)
