"""Functions that the full policies share: filling a batch, choosing victims, parameter checks."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from qllm.errors import ConfigError
from qllm.plan import Plan, Row
from qllm.policy import Freed, RequestView, View, next_row
from qllm.types import RequestId


class Room:
    """KV that a row may count on: free blocks, and blocks of requests behind the row's request.

    The requests behind a request are those that the engine lets it evict: requests of a worse
    class; for a whole prompt, streaming prompts of its class; and for a request that holds KV,
    younger requests of its class (I6).
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._left = view.num_free_blocks

    def take(self, request: RequestView, row: Row) -> bool:
        """Reserve the blocks that `row` needs; return False if there are too few."""
        need = self._view.blocks_needed(row)
        if need > self._left and need > self._left + self._behind[request.request_id]:
            return False
        self._left -= need
        return True

    @cached_property
    def _behind(self) -> dict[RequestId, int]:
        """Return the number of blocks behind every request. Only needed when KV is short."""
        behind: dict[RequestId, int] = {}
        younger, worse, freed = 0, 0, Freed.of(self._view)
        group = None
        for r in sorted((*self._view.requests, *self._view.idle), key=age, reverse=True):
            if age(r)[:2] != group:
                group, worse = age(r)[:2], younger
            behind[r.request_id] = younger if r.is_admitted else worse
            younger += freed.add(r)
        return behind


def age(request: RequestView) -> tuple[int, bool, int, RequestId]:
    """Return the engine's own sort key: better classes first, whole prompts, then by arrival."""
    return request.priority, request.is_open, request.arrival_ns, request.request_id


def whole_first(order: Iterable[RequestView]) -> list[RequestView]:
    """Return the order with whole prompts before streaming ones in the places of each class."""
    found = list(order)
    if not any(r.is_open for r in found):
        return found
    sorted_ones = sorted(found, key=lambda r: r.is_open)
    of_class = {
        c: iter([r for r in sorted_ones if r.priority == c]) for c in {r.priority for r in found}
    }
    return [next(of_class[r.priority]) for r in found]


def fill(
    view: View,
    order: Iterable[RequestView],
    max_tokens: int | None = None,
) -> tuple[Row, ...]:
    """Return rows for as many requests of `order` as fit, best first.

    If KV for a newcomer is missing, later newcomers wait too, because they would take the blocks
    that it waits for. Requests that hold KV continue. If the order has every request that is in no
    frame, at least one row fits, because the request with the best `age` may evict all others.

    Args:
        view: State of the engine.
        order: Requests in no parked frame.
        max_tokens: Most prefill tokens, if fewer than the engine allows per step.
    """
    rows: list[Row] = []
    room = Room(view)
    tokens = view.max_step_tokens if max_tokens is None else min(max_tokens, view.max_step_tokens)
    blocked = False
    for request in whole_first(order):
        if len(rows) == view.max_num_seqs:
            break
        row = next_row(request, view, max(1, tokens))
        cost = 0 if request.is_decoding else row.num_tokens
        if cost > tokens:
            continue
        if blocked and not request.is_admitted:
            continue
        if not room.take(request, row):
            blocked = blocked or not request.is_admitted
            continue
        rows.append(row)
        tokens -= cost
    return tuple(rows)


def rotate(
    view: View, order: Sequence[RequestView], min_stay_ns: int, max_tokens: int | None = None
) -> Plan:
    """Plan the first requests of `order` that fit into all KV blocks; swap out the other requests.

    A planned request may take the blocks of the last requests of the order, even if these have the
    same rank. Such requests must have run since they got KV, at least `min_stay_ns` ago. The swap
    space must have room for their KV.

    Args:
        view: State of the engine, with `Cap.KV_SWAP`, and no parked frame.
        order: All requests, best first.
        min_stay_ns: Least time that KV stays in its place.
        max_tokens: Most prefill tokens, if fewer than the engine allows per step.
    """
    rows: list[Row] = []
    out: list[RequestId] = []
    planned: set[RequestId] = set()
    tokens = view.max_step_tokens if max_tokens is None else min(max_tokens, view.max_step_tokens)
    order, free, room = whole_first(order), view.num_free_blocks, view.num_free_swap_blocks
    leaving = [r for r in order if r.is_admitted and _may_leave(r, view, min_stay_ns)]
    freed = Freed.of(view)
    for request in order:
        if len(rows) == view.max_num_seqs:
            break
        if request.request_id in out:
            continue
        row = next_row(request, view, max(1, tokens))
        cost = 0 if request.is_decoding else row.num_tokens
        if cost > tokens:
            continue
        need, victims = view.blocks_needed(row), list[RequestView]()
        gained, taken, trial = 0, 0, freed.copy()
        for victim in reversed(leaving):
            if free + gained >= need or victim is request:
                break
            size = view.shape.blocks_for(victim.num_written_tokens, view.block_size)
            if victim.request_id not in planned and taken + size <= room:
                victims.append(victim)
                gained, taken = gained + trial.add(victim), taken + size
        if free + gained < need:
            continue
        leaving, freed = [r for r in leaving if r not in victims], trial
        free, room = free + gained - need, room - taken
        out += [v.request_id for v in victims]
        rows.append(row)
        planned.add(request.request_id)
        tokens -= cost
    return Plan(rows=tuple(rows), swap_out=tuple(out))


def _may_leave(request: RequestView, view: View, min_stay_ns: int) -> bool:
    ran = request.last_progress_ns > request.admitted_ns
    return ran and view.now_ns - request.admitted_ns >= min_stay_ns


def behind_all(view: View, keep: Collection[RequestId]) -> list[RequestView]:
    """Return the requests that may lose their KV for any request of `keep` (see `Room`)."""
    kept = [view.by_id[i] for i in keep]
    last = max(kept, key=age)
    group = age(last)[:2]
    has_newcomer = any(age(r)[:2] == group and not r.is_admitted for r in kept)
    return [
        r
        for r in (*view.requests, *view.idle)
        if r.is_admitted and (age(r)[:2] > group if has_newcomer else age(r) > age(last))
    ]


def check_at_least(policy: object, **least: int) -> None:
    """Refuse parameters that are not integers, or less than their minimum.

    Raises:
        ConfigError: The message contains the allowed values.
    """
    for name, bound in least.items():
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            raise ConfigError(f"{name}={value!r} must be an integer >= {bound}")
