"""What the full policies share: filling a batch, naming victims, checking parameters."""

from collections.abc import Collection, Iterable
from functools import cached_property

from qllm.errors import ConfigError
from qllm.plan import Row
from qllm.policy import RequestView, View, next_row
from qllm.types import RequestId


class Room:
    """KV that a row may count on: the free blocks, and those of requests behind its own.

    Behind is what the engine lets a request evict: whoever is of a worse class, and, once it
    holds KV itself, younger requests of its class too (I6).
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._left = view.num_free_blocks

    def take(self, request: RequestView, row: Row) -> bool:
        """Set aside what `row` needs, if there is as much."""
        need = self._view.blocks_needed(row)
        if need > self._left and need > self._left + self._behind[request.request_id]:
            return False
        self._left -= need
        return True

    @cached_property
    def _behind(self) -> dict[RequestId, int]:
        """Blocks behind every request; only looked at when KV is short."""
        behind: dict[RequestId, int] = {}
        younger = worse = 0
        priority = None
        for r in sorted(self._view.requests, key=age, reverse=True):
            if r.priority != priority:
                priority, worse = r.priority, younger
            behind[r.request_id] = younger if r.is_admitted else worse
            younger += len(r.block_table)
        return behind


def age(request: RequestView) -> tuple[int, int, RequestId]:
    """Sort key of the engine's own order: better classes first, then by arrival."""
    return request.priority, request.arrival_ns, request.request_id


def fill(
    view: View,
    order: Iterable[RequestView],
    max_tokens: int | None = None,
) -> tuple[Row, ...]:
    """Return rows for as many requests of `order` as fit, best first.

    A newcomer for whom there is no KV holds up the newcomers behind it, which would take the
    blocks it waits for; who holds KV goes on. Of an order with every request that is in no
    frame, some row always fits: whoever has the best `age` may evict all others.

    Args:
        view: What there is.
        order: Requests that are in no parked frame.
        max_tokens: Most prefill tokens, below what the engine allows per step.
    """
    rows: list[Row] = []
    room = Room(view)
    tokens = view.max_step_tokens if max_tokens is None else min(max_tokens, view.max_step_tokens)
    blocked = False
    for request in order:
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


def behind_all(view: View, keep: Collection[RequestId]) -> list[RequestView]:
    """Requests that hold KV and may lose it for any of `keep` (see `Room`)."""
    kept = [view.by_id[i] for i in keep]
    last = max(kept, key=age)
    has_newcomer = any(r.priority == last.priority and not r.is_admitted for r in kept)
    return [
        r
        for r in view.requests
        if r.is_admitted and (r.priority > last.priority if has_newcomer else age(r) > age(last))
    ]


def check_at_least(policy: object, **least: int) -> None:
    """Refuse parameters that are not integers, or smaller than given.

    Raises:
        ConfigError: The message says what is allowed.
    """
    for name, bound in least.items():
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            raise ConfigError(f"{name}={value!r} must be an integer >= {bound}")
