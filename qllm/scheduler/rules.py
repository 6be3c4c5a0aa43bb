"""Rules of plans, for every policy (I2, I4, I5, I10, budgets), and checks of the state."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from qllm.errors import ConfigError, InvariantError, contained, told
from qllm.plan import Plan, Row
from qllm.policy import RankPolicy, View
from qllm.scheduler.blocks import SwapSpace
from qllm.scheduler.decision import Parked
from qllm.scheduler.request import Request
from qllm.types import Cap, FrameId, Grain, RequestId


def refuse_policy(policy: Any, capabilities: Cap) -> None:
    """Refuse a policy that this engine cannot use (I7).

    Raises:
        ConfigError: The policy needs a capability that the engine lacks, or it has neither ranks
            nor plans.
    """
    try:
        with contained():
            missing = policy.needs & ~capabilities
            plans = isinstance(policy, RankPolicy) or callable(getattr(policy, "plan", None))
    except Exception as error:
        text = f"policy {type(policy).__name__} cannot say what it needs: {told(error)}"
        raise ConfigError(text) from error
    if missing:
        raise ConfigError(
            f"policy {type(policy).__name__} needs {missing}, which this engine does not have; it "
            f"has {capabilities}"
        )
    if not plans:
        raise ConfigError(
            f"policy {type(policy).__name__} is neither a RankPolicy nor has a plan(view)"
        )


def malformed(plan: Any) -> str | None:
    """Return a text that names the wrong type in a policy's plan; None if all types are right.

    The text is the end of a sentence, as in `broken_rule`.
    """
    if type(plan) is not Plan:  # a property of another class may change between two reads
        return f"returned {type(plan).__name__} instead of a Plan"
    rows = plan.rows if isinstance(plan.rows, tuple) else (plan.rows,)
    if not _are_rows(rows):
        wrong = next(row for row in rows if not _are_rows((row,)))
        return f"planned {wrong!r}, which is not a Row of integers"
    times = (plan.slice_ns, plan.wait_until_ns)
    whole = (plan.stop_below, *(time for time in times if time is not None))
    if not isinstance(plan.grain, Grain) or not all(isinstance(number, int) for number in whole):
        return (
            f"planned grain={plan.grain!r}, stop_below={plan.stop_below!r}, "
            f"slice_ns={times[0]!r}, wait_until_ns={times[1]!r}; they must be a Grain and integers"
        )
    for name in ("drop", "swap_out"):
        ids = getattr(plan, name)
        if not isinstance(ids, tuple) or not all(isinstance(i, int) for i in ids):
            return f"planned {name}={ids!r}, which is not a tuple of request ids"
    return None


def _are_rows(rows: Sequence[Any]) -> bool:
    return all([issubclass(kind, Row) for kind in set(map(type, rows))]) and all(
        [issubclass(kind, int) for kind in set(map(type, chain.from_iterable(rows)))]
    )


def broken_rule(
    plan: Plan,
    requests: Mapping[RequestId, Request],
    frames: Mapping[FrameId, Sequence[Row]],
    num_layers: int,
    view: View,
) -> str | None:
    """Return a text with the rule that a plan breaks.

    Args:
        plan: Plan that a policy returned.
        requests: Unfinished requests.
        frames: Live rows of the parked frames that the plan touches.
        num_layers: Number of layers of the model.
        view: State as policies see it, with the budgets.

    Returns:
        The end of a sentence that begins with the policy's name, or None.
    """
    planned = {row.request_id for row in plan.rows}
    if len(planned) < len(plan.rows):
        twice = next(i for i in planned if sum(r.request_id == i for r in plan.rows) > 1)
        return f"planned request {twice} twice in one step (I5)"
    get = requests.get
    for row in plan.rows:
        request = get(row[0])
        if request is None or request.is_paused or request.lacks_experts:
            return f"planned request {row.request_id}, which is {_why_not(request)}"
        wrong = _broken_row(row, request, num_layers)
        if wrong is not None:
            return wrong
    for request_id in plan.drop:
        if request_id not in requests or request_id in planned:
            return f"drops request {request_id}, which is unknown or planned"
    if plan.swap_out and (wrong := _broken_swap(plan, requests, planned, view)):
        return wrong
    for frame_id, rows in frames.items():
        live = {row.request_id for row in rows}
        if not live <= planned:
            return (
                f"planned {sorted(live & planned)} of frame {frame_id} without "
                f"{sorted(live - planned)}: a frame is resumed or replaced whole (I10)"
            )
    return _broken_budget(plan, requests, view)


def _why_not(request: Request | None) -> str:
    """Return why a request cannot be planned, as the end of a sentence."""
    if request is None:
        return "not live"
    return "paused" if request.is_paused else "in a frame that waits for experts"


def _broken_swap(
    plan: Plan,
    requests: Mapping[RequestId, Request],
    planned: Collection[RequestId],
    view: View,
) -> str | None:
    need = 0
    for request_id in dict.fromkeys(plan.swap_out):
        request = requests.get(request_id)
        if request is None or request_id in planned or request_id in plan.drop:
            return f"swaps out request {request_id}, which is unknown, planned or dropped"
        if not request.block_table or request.last_progress_ns <= request.admitted_ns:
            return (
                f"swaps out request {request_id}, which holds no KV or has not run since it was "
                "given some"
            )
        need += view.shape.blocks_for(request.num_written_tokens, view.block_size)
    if len(set(plan.swap_out)) < len(plan.swap_out):
        return f"swaps out {plan.swap_out}, some of them twice"
    if need > view.num_free_swap_blocks:
        return (
            f"swaps out {plan.swap_out}, which takes {need} blocks; there is room for "
            f"{view.num_free_swap_blocks} (view.num_free_swap_blocks)"
        )
    return None


def _broken_row(row: Row, request: Request, num_layers: int) -> str | None:
    _, lo, hi, start, end = row
    front = request.frontier
    is_draft = request.draft_row == (lo, hi, start)
    if is_draft and (end == request.exit_layer or request.num_swapped_tokens):
        return None  # after a swap the row gets the right end (`acquire`)
    if front is not None and front.lo > request.num_computed_tokens:
        return f"planned {row}, but the next row is {request.draft_row}: a draft row (I2)"
    if front is not None:
        if (lo, hi, start) != front:
            return f"planned {row}, which does not start at the frontier {front} (I2)"
    elif lo != request.num_computed_tokens or start != 0:
        return f"planned {row}, but {request.num_computed_tokens} tokens are computed (I2)"
    if start >= end and not (front is not None and start == end == num_layers):
        return f"planned {row}, which has no layers"
    if not lo < hi <= request.num_tokens + request.num_drafts or end > num_layers:
        return (
            f"planned {row}, which is out of range: {request.num_tokens} tokens, "
            f"{request.num_drafts} drafts, {num_layers} layers"
        )
    if end < num_layers and request.is_decoding:
        return f"planned {row}: a decode row must go full depth (I4)"
    return None


def _broken_budget(plan: Plan, requests: Mapping[RequestId, Request], view: View) -> str | None:
    planned = [requests[row[0]] for row in plan.rows]
    if all([request.frame_id is not None for request in planned]):
        return None
    tokens = sum([hi - lo for _, lo, hi, _, _ in plan.rows])
    if tokens > view.max_step_tokens:
        tokens = sum(
            row.num_tokens
            for row, request in zip(plan.rows, planned, strict=True)
            if request.frontier is None and not request.is_decoding
        )
    if tokens > view.max_step_tokens:
        return f"planned {tokens} new prefill tokens; max_step_tokens is {view.max_step_tokens}"
    if len(plan.rows) > view.max_num_seqs:
        return f"planned {len(plan.rows)} rows; max_num_seqs is {view.max_num_seqs}"
    return None


class Pool(Protocol):
    """KV blocks of a scheduler in Python or C++ (see `qllm.scheduler.blocks.BlockPool`)."""

    @property
    def num_free(self) -> int: ...
    def blocks_for(self, num_tokens: int) -> int: ...
    def check(self, tables: dict[RequestId, list[int]]) -> None: ...


def check_state(
    requests: Mapping[RequestId, Request],
    frames: Mapping[FrameId, Parked],
    pool: Pool,
    swap: SwapSpace,
    away: Mapping[RequestId, Parked],
) -> None:
    """Check that requests, frames, blocks and swap space agree with each other.

    Args:
        requests: Unfinished requests.
        frames: Parked frames.
        pool: All blocks.
        swap: Space for swapped-out KV.
        away: Frames of swapped-out requests.

    Raises:
        InvariantError: Requests, frames, blocks and swap space do not agree.
    """
    tables = {i: r.block_table for i, r in requests.items()}
    pool.check(tables)
    in_frames: dict[RequestId, FrameId] = {}
    for frame_id, parked in frames.items():
        held = parked.held_rows()
        if not held:
            raise InvariantError(f"frame {frame_id} has no live row")
        for row in held:
            if row.request_id in in_frames:
                raise InvariantError(f"request {row.request_id} is in two frames")
            in_frames[row.request_id] = frame_id
            if len(requests[row.request_id].block_table) < pool.blocks_for(row.hi):
                raise InvariantError(f"{row} is parked with fewer blocks than it writes to")
    _check_kv(requests, in_frames, pool)
    _check_swapped(requests, pool, swap, away)


def _check_kv(
    requests: Mapping[RequestId, Request], in_frames: Mapping[RequestId, FrameId], pool: Pool
) -> None:
    for request_id, request in requests.items():
        if request.frame_id != in_frames.get(request_id):
            raise InvariantError(f"request {request_id} says frame {request.frame_id}")
        if request.frontier and not (request.block_table or request.num_swapped_tokens):
            raise InvariantError(f"request {request_id} has a frontier and no KV")
        has_drafts = request.num_drafts or request.exit_layer
        if has_drafts and not (request.frontier or request.is_decoding):
            raise InvariantError(f"request {request_id} has drafts and does not decode")
        table = request.block_table
        elsewhere = 0 if table else max(request.num_found_tokens, request.num_swapped_tokens)
        if len(table) < pool.blocks_for(request.num_computed_tokens - elsewhere):
            raise InvariantError(f"request {request_id} has fewer blocks than KV")


def _check_swapped(
    requests: Mapping[RequestId, Request],
    pool: Pool,
    swap: SwapSpace,
    away: Mapping[RequestId, Parked],
) -> None:
    held = {}
    for request_id, request in requests.items():
        if swapped := request.num_swapped_tokens:
            if request.block_table or swapped != request.num_written_tokens:
                raise InvariantError(f"request {request_id} is swapped out in part")
            held[request_id] = pool.blocks_for(swapped)
    swap.check(held)
    for request_id, parked in away.items():
        ids = [row.request_id for row in parked.held_rows()]
        if ids != [request_id] or request_id not in held or not requests[request_id].frontier:
            raise InvariantError(f"request {request_id} is away with the rows of {ids}")
