"""Layers that carry a state stop inside their ops, at any task, and begin them again.

What an op reads it never writes, so a checkpoint, a dead row and a hand-over find the states from
which the op began, wherever it was left.
"""

from typing import Any

import pytest
import torch

from qllm.kernels import cpu
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain
from tests.support.hybrids import NATIVE, make_hybrid
from tests.support.stops import (
    NUM_PROMPTS,
    add_prompts,
    assert_same_answers,
    assert_same_ends,
    pair,
    run_in_pieces,
    whole_program,
)
from tests.support.sweeps import (
    GREEDY,
    Asked,
    Poll,
    Watched,
    assert_same,
    compiled,
    held,
    kv_of,
    next_row,
    run_beside,
    runner_of,
)

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
FAMILY = "qwen3_next"
LAYER = 2
"""A layer with a state, behind another one and one that attends."""


def cut_finely(runner: TorchRunner) -> None:
    """Give ops few rows, so that a layer has several that carry a state on."""
    runner.backend.cuts = runner.cuts._replace(max_cost=9.0, min_block=1, max_block=8)


def mark(runner: TorchRunner) -> None:
    """Let the first request leave states inside the tokens that it computes now."""
    kv = runner.requests[0].kv
    kv.states.marks = frozenset({kv.committed + 3, kv.committed + 10, kv.committed + 11})


@pytest.mark.sampled
@pytest.mark.parametrize("how", [None, cut_finely])
@pytest.mark.parametrize("marks", [None, mark])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("kernels", cpu.native.available())
@pytest.mark.parametrize("family", NATIVE)
def test_hybrids_stop_at_every_task(
    family: str, kernels: str, num_threads: int, marks: Any, how: Any
) -> None:
    runners = pair(make_hybrid(family))
    cpu.native.use(kernels)
    cpu.set_threads(num_threads)
    for runner in runners:
        assert runner.names["sweep"] == "4 of 4 layers in one call"
        assert runner.names["stops"] == "before every task of an op"
        add_prompts(runner, (21, 5))
        if how is not None:
            how(runner)
    assert assert_same_answers(*runners, num_tasks=1, before=marks) > 300


@pytest.mark.sampled
@pytest.mark.parametrize("num_tasks", [2, 3, 7, 50])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "mxfp4"])
def test_every_format_of_experts_stops_after_some_tasks(weights: str, num_tasks: int) -> None:
    cpu.set_threads(2)
    runners = pair(make_hybrid(FAMILY), expert_weights=weights)
    for runner in runners:
        add_prompts(runner, (150, 33))
    assert assert_same_answers(*runners, num_tasks=num_tasks, before=mark) > 15


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("family", NATIVE)
def test_every_boundary_holds_what_ops_one_by_one_leave(family: str, fine: bool) -> None:
    model, stops = make_hybrid(family), 0
    runners = [runner_of(model, native=native, fine=fine) for native in (False, True)]
    for runner in runners:
        add_prompts(runner, (30, 17))
        mark(runner)
    for seed, grain in enumerate((Grain.EXPERT, Grain.LAYER, Grain.STEP, Grain.EXPERT)):
        rows = [next_row(runners[0], request) for request in range(NUM_PROMPTS)]
        if seed == 0:  # a row that leaves below the last layer, then joins at its own
            first = rows[0]._replace(end_layer=2)
            stops += run_beside(runners, compiled(runners[0], [first], grain), 0.6, seed)
            rows = [rows[0]._replace(start_layer=2), rows[1]]
        stops += run_beside(runners, compiled(runners[0], rows, grain), 0.6, seed)
    assert stops > (40 if fine else 15)


def at_layer(runner: TorchRunner, program: Program) -> Index:
    """Run up to the first op of LAYER."""
    at = START
    while (program.ops[at.op].kind, program.ops[at.op].layer) != (OpKind.ATTN, LAYER):
        at = runner.run(program, at, Poll(0, 1.0))
    return at


def num_tasks_of(runner: TorchRunner) -> int:
    """Return the number of tasks of LAYER's first op."""
    program = whole_program(runner)
    at, num = at_layer(runner, program), 0
    first = at.op
    while at.op == first:
        at, num = runner.run(program, at, Asked(1)), num + 1
    runner.drop(program)
    return num


def ready(how: Any, step: int) -> list[TorchRunner]:
    """Runners whose requests have a first prompt, or one decoded token more."""
    runners = pair(make_hybrid(FAMILY))
    for runner in runners:
        add_prompts(runner, (21, 6))
        if how is not None:
            how(runner)
        for _ in range(step):
            program = whole_program(runner)
            assert runner.run(program, START, Watched()) == program.end
            runner.finish(program)
    return runners


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("how", [None, cut_finely])
def test_a_checkpoint_after_any_task_begins_the_op_again(how: Any, step: int) -> None:
    here, there = ready(how, step)
    expected = whole_program(there)
    assert there.run(expected, START, Watched()) == expected.end
    wanted = {r: kv_of(there, r, 4) for r in range(NUM_PROMPTS)}
    end = held(there, expected, expected.end)
    there.drop(expected)
    num = num_tasks_of(here)
    assert num > 15
    for num_tasks in range(1, num):
        program = whole_program(here)
        at = here.run(program, at_layer(here, program), Asked(num_tasks))
        assert here.frames[program.frame_id].course is not None
        frame = here.export_frame(program, at)
        for request in range(NUM_PROMPTS):
            there.remove(request)
            there.import_request(request, GREEDY, *here.export_request(request))
        there.import_frame(program, at, frame)
        for runner in (there, here):
            assert runner.run(program, at, Watched()) == program.end
            assert_same(held(runner, program, program.end), end)
            for request in range(NUM_PROMPTS):
                assert_same(kv_of(runner, request, 4), wanted[request])
            runner.drop(program)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("how", [None, cut_finely])
def test_a_row_may_die_after_any_task(how: Any, step: int) -> None:
    """The finished tasks of the other rows are dropped. Their op restarts from the same states."""
    both, alone = ready(how, step)
    row = compiled(alone, [next_row(alone, 1)], Grain.EXPERT)
    alone.accept(row)
    assert alone.run(row, START, Watched()) == row.end
    expected, states = held(alone, row, row.end)["head.x"], kv_of(alone, 1, 4)
    for num_tasks in range(1, num_tasks_of(both)):
        program = whole_program(both)
        at = both.run(program, at_layer(both, program), Asked(num_tasks))
        both.kill(program, 0)
        assert both.run(program, at, Watched()) == program.end
        assert torch.equal(held(both, program, program.end)["head.x"][1:], expected), num_tasks
        assert_same(kv_of(both, 1, 4), states)
        both.drop(program)


def test_an_op_in_which_a_row_is_dead_stops_at_every_task() -> None:
    """Tokens of no row get zeros, once."""
    expected, found = ready(None, 0)
    ends = []
    for runner, num_tasks in ((expected, 1 << 40), (found, 1)):
        program = whole_program(runner)
        at = at_layer(runner, program)
        runner.kill(program, 0)
        while at != program.end:
            at = runner.run(program, at, Asked(num_tasks))
        ends.append(held(runner, program, program.end) | kv_of(runner, 1, 4))
    assert_same(ends[1], ends[0])


def test_states_that_others_have_too_stay_while_an_op_is_left_at_every_task() -> None:
    runner, _ = ready(None, 1)
    states = runner.requests[0].kv.states
    lent = states.lend(runner.num_committed(0))
    assert lent is not None
    before = {i: state.recurrent_states[0].clone() for i, state in lent.items()}
    for _ in range(3):
        program = whole_program(runner)
        run_in_pieces(runner, program, 1)
        runner.finish(program)
    for i, state in lent.items():
        assert torch.equal(state.recurrent_states[0], before[i])


def test_a_parked_frame_counts_the_states_that_it_has_not_stored() -> None:
    runner, _ = ready(None, 0)
    program = whole_program(runner)
    at = runner.run(program, at_layer(runner, program), Asked(3))
    frame = runner.frames[program.frame_id]
    carried = frame.carried
    assert carried is not None
    assert carried.num_bytes == NUM_PROMPTS * runner.charge.state_bytes // 2, "one of two layers"
    with_it = frame.num_bytes()
    frame.carried = None
    assert with_it - frame.num_bytes() == carried.num_bytes
    frame.carried = carried
    assert runner.run(program, at, Watched()) == program.end
    assert frame.carried is None


def test_two_frames_stop_inside_the_same_op_and_go_on_in_turn() -> None:
    expected, found = ready(None, 0)
    programs = [
        [compiled(runner, [next_row(runner, i)], Grain.EXPERT) for i in range(NUM_PROMPTS)]
        for runner in (expected, found)
    ]
    for runner, both in zip((expected, found), programs, strict=True):
        for program in both:
            runner.accept(program)
    for program in programs[0]:
        assert expected.run(program, START, Watched()) == program.end
    ends, turn = [START] * NUM_PROMPTS, 0
    while any(at != p.end for at, p in zip(ends, programs[1], strict=True)):
        i = turn = 1 - turn
        if ends[i] != programs[1][i].end:
            ends[i] = found.run(programs[1][i], ends[i], Asked(1 + i))
    for one, other in zip(*programs, strict=True):
        assert_same_ends(expected, found, [one, other])
