"""Draft rows, one state at a time: a request with ten known tokens, and rows through two layers."""

from types import SimpleNamespace
from typing import Any

import pytest

from qllm.engine.drafts import _ExitCosts
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.policy import CostTable, decode_tokens
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import Index, OpKind, Program
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding, settle
from qllm.scheduler.rules import _broken_row
from qllm.types import NS_PER_MS, Frontier, Slo

EXIT, LAYERS = 2, 4
SHAPE = ModelShape(LAYERS, 4, 2, (True,) * LAYERS, 64, 64)


def decoding(**more: Any) -> Request:
    """A request that decodes token 9, and whose rows draft up to two tokens."""
    request = Request(
        request_id=1, priority=0, arrival_ns=0, num_prompt_tokens=8, max_tokens=30, num_tokens=10,
        num_computed_tokens=9, block_table=[0], exit_layer=EXIT, most_drafts=2,
    )  # fmt: skip
    for name, value in more.items():
        setattr(request, name, value)
    return request


def made(rows: list[Row], samples: list[int], exits: tuple[int, ...] = ()) -> Program:
    plan = Plan(rows=tuple(rows))
    return compile_program(
        plan, frame_id=1, samples=samples, shape=SHAPE, cuts=NO_CUTS, exits=exits
    )


def test_each_token_has_a_draft_row_and_then_all_are_verified() -> None:
    request, seen = decoding(), []
    for _ in range(3):
        front = request.draft_row
        assert front is not None
        row = Row(1, *front, EXIT)
        seen.append((front, request.samples_of(row)))
        request.leave_frame(Frontier(row.lo, row.hi, EXIT))
        if seen[-1][1]:
            assert request.add_draft()
    assert seen == [((9, 10, 0), 1), ((10, 11, 0), 1), ((11, 12, 0), 0)]
    assert (request.draft_row, request.frontier) == (None, (9, 12, EXIT))
    assert request.samples_of(Row(1, 9, 12, EXIT, LAYERS)) == 3
    request.commit(12, 5, 2)
    assert (request.num_computed_tokens, request.num_tokens) == (11, 12)
    assert (request.exit_layer, request.most_drafts, request.num_drafts) == (0, 0, 0)
    assert request.draft_row is request.frontier is None


@pytest.mark.parametrize(
    ("front", "num_drafts", "left", "then"),
    [
        (None, 0, 0, None),
        (Frontier(9, 10, EXIT), 1, 0, None),
        (Frontier(9, 11, EXIT), 2, 1, None),
        (Frontier(9, 11, EXIT), 1, 1, None),
        (Frontier(10, 11, 1), 1, 1, Frontier(10, 11, 1)),
        (Frontier(9, 10, 1), 0, 0, Frontier(9, 10, 1)),
    ],
)
def test_a_request_that_drafts_no_more_verifies_what_has_passed_the_layers(
    front: Frontier | None, num_drafts: int, left: int, then: Frontier | None
) -> None:
    request = decoding(frontier=front, num_drafts=num_drafts)
    request.end_drafting()
    assert (request.num_drafts, request.draft_row) == (left, then)
    assert not request.add_draft()
    assert (request.exit_layer == 0) is (front is None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(1, 10, 11, 1, EXIT), None),
        (Row(1, 10, 11, 1, LAYERS), "a draft row"),
        (Row(1, 10, 11, 1, EXIT + 1), "a draft row"),
        (Row(1, 9, 11, EXIT, LAYERS), "a draft row"),
    ],
)
def test_a_draft_row_that_is_part_way_ends_at_its_layer(row: Row, said: str | None) -> None:
    found = _broken_row(row, decoding(frontier=Frontier(10, 11, 1), num_drafts=1), LAYERS)
    assert found is None if said is None else found is not None and said in found


def test_drafts_may_be_verified_early() -> None:
    request = decoding(frontier=Frontier(9, 10, EXIT), num_drafts=1)
    assert _broken_row(Row(1, 9, 10, EXIT, LAYERS), request, LAYERS) is None
    assert _broken_row(Row(1, 10, 11, 0, EXIT), request, LAYERS) is None
    assert _broken_row(Row(1, 10, 11, 0, LAYERS), request, LAYERS) is not None


def test_a_draft_row_is_one_token_of_a_step() -> None:
    assert decode_tokens([decoding()]) == 1
    assert decode_tokens([decoding(frontier=Frontier(9, 11, EXIT), num_drafts=2)]) == 1
    assert decode_tokens([decoding(frontier=Frontier(9, 12, EXIT), num_drafts=2)]) == 3


def test_head_takes_draft_rows_that_choose_a_token() -> None:
    rows = [Row(1, 9, 10, 0, EXIT), Row(2, 3, 4, 0, LAYERS), Row(3, 9, 10, 0, EXIT)]
    program = made(rows, [1, 1, 0], exits=(0, 2))
    head = program.ops[-1]
    assert (head.kind, program.groups[head.group]) == (OpKind.HEAD, (0, 1))
    at = Index(len(program.ops) - 1)
    assert program.rows_between(at, program.end) == rows[:2]
    assert program.choosing_drafts == {1}


COSTS = CostTable((10, 20, 40, 80, 160), 1)


def earned(program: Program, credit: int = 0, tpot_ms: float | None = None) -> int:
    """The time that BE may take after a program of 12 ns of an LS request."""
    slo = Slo() if tpot_ms is None else Slo(ttft_ms=1, tpot_ms=tpot_ms)
    requests: list[Any] = [decoding(slo=slo), decoding(request_id=2, priority=10)]
    ranked: list[Any] = [SimpleNamespace(request_id=r.request_id, request=r, tier=r.priority)
                         for r in requests]  # fmt: skip
    policy = SimpleNamespace(ride=SimpleNamespace(frac=0.25))
    ranking: Any = SimpleNamespace(admitted=ranked, policy=policy, tiers=[0, 10])
    return settle(Riding(credit), ranking, COSTS, program, True, 100, 112).credit_ns


def test_a_draft_row_earns_time_for_others_as_a_decode_does() -> None:
    draft, other = Row(1, 9, 10, 0, EXIT), Row(2, 9, 10, 0, EXIT)
    alone = made([draft], [1], exits=(0,))
    assert earned(alone) == 3
    assert earned(alone, 7) == 10
    assert earned(alone, 15) == 16, "the cap of a decode"
    assert earned(alone, 40) == 40
    assert earned(alone, 7, tpot_ms=5) == 7, "a target bounds the gap to the next token"
    assert earned(made([draft, other], [1, 1], exits=(0, 1)), 7) == 7 - 12
    late = Row(1, 9, 11, EXIT, LAYERS)
    both = made([late, Row(2, 9, 10, EXIT, LAYERS)], [2, 1])
    assert earned(made([late], [2])) == 3, "its draft rows earned the rest"
    assert earned(made([late], [2]), tpot_ms=5) == 5 * NS_PER_MS - 20, "they earned nothing"
    assert earned(both) == 5, "a row of BE shares its time"
    assert earned(made([Row(1, 9, 11, 0, LAYERS)], [2])) == 5, "a quarter of a decode of two tokens"
    assert earned(made([Row(1, 9, 10, EXIT, LAYERS)], [1])) == 2, "a decode that was stopped"


def test_the_costs_of_drafts_are_those_of_rows_alone() -> None:
    costs = _ExitCosts(EXIT / LAYERS)
    assert [costs.extra_ns(COSTS, n) for n in (0, 1)] == [0, 2 * 5 + 10 - 20]
    draft = Row(1, 9, 10, 0, EXIT)
    costs.ran(made([draft, Row(2, 3, 4, 0, LAYERS)], [1, 1], exits=(0,)), 0, 999)
    assert costs.extra_ns(COSTS, 1) == 0
    costs.ran(made([draft], [1], exits=(0,)), 1000, 1008)
    assert costs.extra_ns(COSTS, 1) == 2 * 8 + 10 - 20
    costs.ran(made([Row(3, 9, 11, EXIT, LAYERS)], [2]), 1010, 1024)
    assert costs.extra_ns(COSTS, 1) == 2 * 8 + 14 - 20


def test_the_time_between_two_programs_of_a_request_is_part_of_a_draft() -> None:
    costs = _ExitCosts(EXIT / LAYERS)
    draft, other = Row(1, 9, 10, 0, EXIT), Row(2, 9, 10, 0, EXIT)
    costs.ran(made([draft], [1], exits=(0,)), 0, 8)
    costs.ran(made([draft], [1], exits=(0,)), 11, 19)
    assert costs.extra_ns(COSTS, 2) == 3 * (8 + 3) + 15 - 30
    costs.ran(made([other], [1], exits=(0,)), 700, 708)
    costs.ran(made([draft, other], [1, 1], exits=(0, 1)), 1708, 1716)
    costs.ran(made([other], [1], exits=(0,)), 2716, 2724)
    costs.paused()
    costs.ran(made([other], [1], exits=(0,)), 3716, 3724)
    assert costs.extra_ns(COSTS, 2) == 3 * (8 + 3) + 15 - 30
