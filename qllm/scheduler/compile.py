"""Compiler from plans to programs. It turns rows into ops, and cuts the ops by the cut rule.

A policy decides between any two steps, so a decision must be cheap. Its work is proportional to the
rows and cuts, never to the layers. Ops that repeat layer by layer are one `Stretch`. This module
has no tensors and no state.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from qllm.plan import CutRule, ModelShape, Plan, Row, chunk_end, row_blocks
from qllm.policy import RequestView
from qllm.scheduler.program import OpKind, Ops, Program, Stretch
from qllm.types import FrameId, RequestId


def align_rows(
    rows: Sequence[Row], requests: Mapping[RequestId, RequestView], cuts: CutRule | None
) -> list[Row]:
    """Shorten rows so that chunks end where level L2 lets them end.

    Args:
        rows: Planned rows.
        requests: Requests of the rows.
        cuts: Cut rule; None leaves every row unchanged.
    """
    if cuts is None:
        return list(rows)
    out = []
    for row in rows:
        request = requests[row.request_id]
        if request.frontier is None and row.hi < request.num_tokens:
            alone = request.num_prompt_tokens
            row = row._replace(hi=chunk_end(row, request.num_tokens, cuts, alone))
        out.append(row)
    return out


def _attn_cuts(
    group: Sequence[int], costs: Sequence[Sequence[tuple[int, float]]], max_cost: float
) -> list[tuple[int, int]]:
    """Pack the blocks of a group's rows, in order, into as few ops as `max_cost` allows.

    Args:
        group: Numbers of the rows.
        costs: Per row, the tokens and the cost of each of its blocks.
        max_cost: Highest cost of one op.
    """
    spans: list[tuple[int, int]] = []
    begin = at = 0
    total = 0.0
    for r in group:
        for num, cost in costs[r]:
            if total + cost > max_cost and at > begin:
                spans.append((begin, at))
                begin, total = at, 0.0
            at += num
            total += cost
    spans.append((begin, at))
    return spans


def _even_cuts(num_tokens: int, block: int) -> list[tuple[int, int]]:
    return [(a, min(a + block, num_tokens)) for a in range(0, num_tokens, block)]


def _alike(is_moe: Sequence[bool], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbouring layers of one type (dense or with experts)."""
    while start < end:
        last = start + 1
        while last < end and is_moe[last] == is_moe[start]:
            last += 1
        yield start, last
        start = last


def _stretch(
    start: int, end: int, group: int, attn: Sequence[tuple[int, int]], is_moe: bool, cuts: CutRule
) -> Stretch:
    total = attn[-1][1]
    glue = _even_cuts(total, cuts.glue_block if is_moe else cuts.dense_block)
    if not is_moe:
        return Stretch(start, end, group, ((OpKind.ATTN, attn), (OpKind.COMBINE, glue)))
    experts = ((OpKind.ROUTE, glue), (OpKind.EXPERTS, ((0, total),)), (OpKind.COMBINE, glue))
    return Stretch(start, end, group, ((OpKind.ATTN, attn), *experts))


def compile_program(
    plan: Plan,
    *,
    frame_id: FrameId,
    samples: Sequence[int],
    shape: ModelShape,
    cuts: CutRule,
    one_query_from: Sequence[int] | None = None,
    exits: tuple[int, ...] = (),
) -> Program:
    """Turn validated rows into ops. The same plan always gives the same program.

    Args:
        plan: Plan whose row ranges the scheduler has checked.
        frame_id: Id of the new frame.
        samples: Per row, the number of last positions at which a token is sampled.
        shape: Layers of the model.
        cuts: Rule that cuts ops by rows.
        one_query_from: Per row, the position from which every token is a block of its own. At level
            L2, tokens that were decoded one by one are recomputed one by one. In a row that
            verifies drafted tokens every token is a block of its own in any case.
        exits: Numbers of the draft rows.
    """
    rows = plan.rows
    num_layers, per_kv = shape.num_layers, cuts.attn_cost_per_kv
    marks = one_query_from or [row.hi for row in rows]
    # attention to a drafted token may give NaN, which no token before it may read, not even times 0
    alone = [
        row.lo if num > 1 else mark for row, num, mark in zip(rows, samples, marks, strict=True)
    ]
    blocks: list[tuple[int, ...]] = []
    costs: list[Sequence[tuple[int, float]]] = []
    for (_, lo, hi, _, _), a in zip(rows, alone, strict=True):
        if hi - lo == 1:
            blocks.append((lo, hi))
            costs.append(((1, 1.0 + per_kv * hi),))
        else:
            marks, priced = row_blocks(lo, hi, cuts, a)
            blocks.append(tuple(marks))
            costs.append(priced)
    starts, ends = [row.start_layer for row in rows], [row.end_layer for row in rows]
    sizes = [hi - lo for _, lo, hi, _, _ in rows]
    groups: dict[tuple[int, ...], int] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    stretches: list[Stretch] = []

    def one_op(kind: OpKind, layer: int, members: tuple[int, ...]) -> None:
        if members:
            total = sum([sizes[r] for r in members])
            g = groups.setdefault(members, len(groups))
            stretches.append(Stretch(layer, layer + 1, g, ((kind, ((0, total),)),)))

    everyone = tuple(range(len(rows)))
    in_step = starts.count(starts[0]) == ends.count(ends[0]) == len(rows)
    one_op(OpKind.EMBED, 0, tuple([r for r in everyone if starts[r] == 0]))
    for start, end in pairwise(sorted({*starts, *ends})):
        members = everyone
        if not in_step:
            members = tuple([r for r in everyone if starts[r] <= start and ends[r] >= end])
        if members:
            g = groups.setdefault(members, len(groups))
            if g not in spans:
                spans[g] = _attn_cuts(members, costs, cuts.max_cost)
            for first, last in _alike(shape.is_moe, start, end):
                stretches.append(_stretch(first, last, g, spans[g], shape.is_moe[first], cuts))
    complete = [r for r in everyone if samples[r] and (ends[r] == num_layers or r in exits)]
    one_op(OpKind.HEAD, num_layers, tuple(complete))
    return Program(
        frame_id=frame_id,
        rows=rows,
        groups=tuple(groups),
        ops=Ops(stretches),
        grain=plan.grain,
        stop_below=plan.stop_below,
        samples=tuple(samples),
        num_layers=num_layers,
        exits=exits,
        row_blocks=tuple(blocks),
    )
