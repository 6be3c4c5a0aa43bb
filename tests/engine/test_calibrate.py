"""Costs measured before an engine serves: real programs, and nothing is left behind."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qllm.engine.calibrate import ROUNDS, measure_costs
from qllm.engine.costs import StepCosts
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import Limits
from qllm.scheduler.program import Index, Program
from qllm.types import Grain
from tests.support.families import make_model

LIMITS = Limits(
    max_num_seqs=6, max_step_tokens=20, block_size=4, num_blocks=256, grain=Grain.LAYER,
    max_segment_ns=5_000_000,
)  # fmt: skip


class Timed:
    """A clock that a runner's programs move: 10 us, and 3 us per row or token."""

    def __init__(self, runner: TorchRunner) -> None:
        self.at_ns, self.programs = 0, list[Program]()
        run = runner.run

        def timed(program: Program, start: Index, stop: Any) -> Index:
            self.programs.append(program)
            self.at_ns += 10_000 + 3_000 * program.num_tokens
            return run(program, start, stop)

        runner.run = timed  # type: ignore[method-assign]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_table_is_what_steps_took_and_the_runner_is_empty(is_invariant: bool) -> None:
    torch.set_num_threads(1)
    runner = cpu_runner(make_model("mixtral"), batch_invariant=is_invariant)
    clock = Timed(runner)
    limits = replace(LIMITS, batch_invariant=is_invariant)
    table = measure_costs(runner, limits, lambda: clock.at_ns)
    runner.close()
    assert [table.decode(rows) for rows in (1, 2, 4)] == [13_000, 16_000, 22_000]
    assert table.prefill_token_ns == (10_000 + 20 * 3_000) // 20
    assert [p.num_tokens for p in clock.programs] == [20] * 4 + [1] * 3 + [2] * 3 + [4] * 3
    assert runner.requests == {}
    assert runner.frames == {}


def test_it_stays_within_the_limits() -> None:
    runner = cpu_runner(make_model("mixtral"))
    for num_blocks, seqs, most in ((10, 8, 4), (24, 8, 8), (1000, 3, 2), (4000, 500, 256)):
        clock = Timed(runner)
        measure = replace(LIMITS, num_blocks=num_blocks, max_num_seqs=seqs, max_step_tokens=2)
        measure_costs(runner, measure, lambda clock=clock: clock.at_ns)  # type: ignore[misc]
        decodes = [len(p.rows) for p in clock.programs if p.num_tokens == len(p.rows)]
        assert max(decodes) == most
        assert len(decodes) == ROUNDS * most.bit_length()
        runner.run = type(runner).run.__get__(runner)  # type: ignore[method-assign]
    runner.close()


def test_a_row_that_verifies_drafts_counts_as_so_many_decoded_tokens() -> None:
    """A step of one row with three drafts costs what a step of four rows costs."""
    costs, table = StepCosts(), None
    for lo, hi, samples, took_ns in ((9, 10, 1, 10_000), (9, 13, 4, 40_000), (0, 8, 1, 8_000)):
        plan = Plan(rows=(Row(1, lo, hi, 0, 1),))
        shape = ModelShape(1, 4, 2, (True,), 64, 64)
        program = compile_program(plan, frame_id=1, samples=[samples], shape=shape, cuts=NO_CUTS)
        table = costs.observe(program, took_ns)
    assert table is not None
    assert (table.decode(1), table.decode(4)) == (10_000, 40_000)
    assert table.prefill_token_ns == 1_000
