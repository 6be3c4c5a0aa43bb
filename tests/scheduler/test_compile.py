"""Programs against a naive compiler: the same ops, spelled out layer by layer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.plan import NO_CUTS, CutRule, ModelShape, Plan, Row, chunk_end
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import Index, Op, OpKind, Ops, Program

LAYERS = 5
SHAPE = ModelShape(LAYERS, 4, 2, (False, True, True, False, True), 97, 4096)
RULES = [
    NO_CUTS,
    CutRule(max_cost=92.75, attn_cost_per_kv=0.0038, glue_block=64, dense_block=32),
    CutRule(max_cost=300.0, attn_cost_per_kv=0.01, min_block=4, max_block=64, glue_block=16),
]


def naive_blocks(row: Row, cuts: CutRule, alone: int) -> tuple[int, ...]:
    marks = [row.lo]
    while marks[-1] < row.hi:
        at = marks[-1]
        size = 1 if at >= alone else cuts.block(at)
        stops = [row.hi, (at // size + 1) * size] + ([alone] if at < alone else [])
        marks.append(min(stops))
    return tuple(marks)


def naive_attn(program: Program, group: list[int], cuts: CutRule) -> list[tuple[int, int]]:
    spans, begin, at, cost = [], 0, 0, 0.0
    for r in group:
        for lo, hi in pairwise(program.row_blocks[r]):
            extra = (hi - lo) * (1.0 + cuts.attn_cost_per_kv * hi)
            if at > begin and cost + extra > cuts.max_cost:
                spans.append((begin, at))
                begin, cost = at, 0.0
            at, cost = at + hi - lo, cost + extra
    return [*spans, (begin, at)]


def naive_ops(program: Program, cuts: CutRule) -> list[Op]:
    ops: list[Op] = []
    rows = list(enumerate(program.rows))

    def add(kind: OpKind, layer: int, group: list[int], block: int = 1 << 40) -> None:
        number = program.groups.index(tuple(group))
        total = sum(program.rows[r].num_tokens for r in group)
        spans = [(a, min(a + block, total)) for a in range(0, total, block)]
        if kind is OpKind.ATTN:
            spans = naive_attn(program, group, cuts)
        ops.extend(Op(kind, layer, number, lo, hi) for lo, hi in spans)

    first = [r for r, row in rows if row.start_layer == 0]
    if first:
        add(OpKind.EMBED, 0, first)
    for layer, is_moe in enumerate(SHAPE.is_moe):
        group = [r for r, row in rows if row.start_layer <= layer < row.end_layer]
        if group:
            add(OpKind.ATTN, layer, group)
            if is_moe:
                add(OpKind.ROUTE, layer, group, cuts.glue_block)
                add(OpKind.EXPERTS, layer, group)
            add(OpKind.COMBINE, layer, group, cuts.glue_block if is_moe else cuts.dense_block)
    if any(program.samples):
        add(OpKind.HEAD, LAYERS, [r for r, _ in rows if program.samples[r]])
    return ops


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, CutRule]:
    cuts = draw(st.sampled_from(RULES))
    rows, alone = [], []
    for i in range(draw(st.integers(1, 4))):
        lo = draw(st.integers(0, 400))
        hi = lo + draw(st.sampled_from([1, 1, 7, 40, 300]))
        start = draw(st.integers(0, LAYERS - 1))
        rows.append(Row(i, lo, hi, start, draw(st.integers(start + 1, LAYERS))))
        alone.append(draw(st.integers(0, 800)))
    samples = [row.end_layer == LAYERS and draw(st.booleans()) for row in rows]
    program = compile_program(
        Plan(rows=tuple(rows)),
        frame_id=1,
        samples=samples,
        shape=SHAPE,
        cuts=cuts,
        one_query_from=alone,
    )
    for row, marks, a in zip(rows, program.row_blocks, alone, strict=True):
        assert marks == naive_blocks(row, cuts, a)
        end = chunk_end(row, row.hi + 50, cuts, a)
        cut = [m for m in naive_blocks(row._replace(hi=row.hi + 50), cuts, a)[1:] if m <= row.hi]
        assert end in cut or (not cut and end > row.hi)
    return program, cuts


@given(programs())
def test_a_program_is_the_flat_list_of_its_ops(made: tuple[Program, CutRule]) -> None:
    program, cuts = made
    flat = naive_ops(program, cuts)
    assert isinstance(program.ops, Ops)
    assert list(program.ops) == flat
    assert len(program.ops) == len(flat)
    assert [program.ops[i] for i in range(len(flat))] == flat
    assert [program.ops[-i] for i in range(1, len(flat) + 1)] == flat[::-1]
    middle = len(flat) // 2
    assert program.ops[:middle] == tuple(flat[:middle])
    assert program.ops == tuple(flat)
    assert program.ops == Ops(program.ops.stretches)
    assert hash(program.ops) == hash(Ops(program.ops.stretches))
    assert program.ops != tuple(flat[1:])
    for bad in (len(flat), -len(flat) - 1):
        with pytest.raises(IndexError):
            program.ops[bad]


@given(programs(), st.data())
def test_boundaries_and_the_rows_between_them(
    made: tuple[Program, CutRule], data: st.DataObject
) -> None:
    program, _ = made
    ops = list(program.ops)
    start = data.draw(st.integers(0, len(ops) - 1))
    stop = data.draw(st.integers(start + 1, len(ops)))
    ran = {r for op in ops[start:stop] for r in program.groups[op.group]}
    assert program.rows_between(Index(start), Index(stop)) == [program.rows[r] for r in sorted(ran)]
    assert program.rows_between(Index(start), Index(start)) == []
    assert program.rows_between(Index(start), Index(start, 1)) == program.rows_between(
        Index(start), Index(start + 1)
    )
    for index in (Index(start), Index(start, 1)):
        back = program.layer_start(index)
        assert back <= index
        assert not program.inside_layer(back)
        assert program.layer_at(back) == program.layer_at(index)
