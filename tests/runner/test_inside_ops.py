"""A program that stops inside its ops, at any task, has the bits of one that does not stop."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.runner import sweep
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain
from tests.support.families import FAMILIES, make_model
from tests.support.stops import (
    NUM_PROMPTS,
    add_prompts,
    assert_same_answers,
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
    model_of,
    next_row,
    qwen3,
    runner_of,
)

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stops_at_every_task(family: str, num_threads: int) -> None:
    cpu.set_threads(num_threads)
    runners = pair(make_model(family, torch.bfloat16))
    for runner in runners:
        add_prompts(runner, (21, 5))
    assert assert_same_answers(*runners, num_tasks=1) > 200


@pytest.mark.sampled
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("kernels", cpu.native.available())
def test_every_kind_of_kernel_stops_at_every_task(kernels: str, num_threads: int) -> None:
    runners = pair(model_of("part_dense"))
    cpu.native.use(kernels)
    cpu.set_threads(num_threads)
    for runner in runners:
        add_prompts(runner, (19, 3))
    assert assert_same_answers(*runners, num_tasks=1) > 200


@pytest.mark.sampled
@pytest.mark.parametrize("num_tasks", [2, 3, 7, 50])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "mxfp4"])
def test_every_format_of_experts_stops_after_some_tasks(weights: str, num_tasks: int) -> None:
    cpu.set_threads(2)
    runners = pair(model_of("qwen3"), expert_weights=weights)
    for runner in runners:
        add_prompts(runner, (100, 33))
    assert assert_same_answers(*runners, num_tasks=num_tasks) > 15


@pytest.mark.parametrize("kernels", cpu.native.available())
def test_rows_rounded_to_int8_stop_at_every_task(kernels: str) -> None:
    cpu.native.use(kernels)
    settings = {"expert_weights": "int4", "activations": "int8"}
    runners = pair(model_of("qwen3"), **settings)
    for runner in runners:
        add_prompts(runner, (19, 3))
    assert assert_same_answers(*runners, num_tasks=1) > 200


NARROW: dict[str, Any] = {"intermediate_size": 400, "moe_intermediate_size": 400}
"""Experts and MLPs whose second product reads more than the first, as the attention's here does."""


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("kernels", ["emulated AMX", cpu.native.available()[0]])
def test_an_op_that_is_left_early_keeps_what_its_later_products_have_no_room_for(
    kernels: str, activations: str
) -> None:
    """Each pass has a course of its own, whose memory is as large as what was done needed."""
    torch.manual_seed(0)
    model = qwen3(mlp_only_layers=[1], num_hidden_layers=2, num_attention_heads=8, **NARROW)
    model = model.bfloat16().eval()
    weights = "int4" if activations == "int8" else "auto"
    runners = pair(model, expert_weights=weights, activations=activations)
    cpu.native.use(kernels)
    for runner in runners:
        add_prompts(runner, (41, 20))
    program = whole_program(runners[0])
    assert runners[0].run(program, START, Watched()) == program.end
    expected = held(runners[0], program, program.end)
    runner, course._spare[:] = runners[1], []
    for first in range(1, 60, 2):
        program, at = whole_program(runner), START
        while at != program.end:
            at = runner.run(program, at, Asked(first))
        assert_same(held(runner, program, program.end), expected)
        runner.drop(program)
        course._spare.clear()


def test_the_number_of_tasks_is_kept_to_whatever_the_number_of_threads() -> None:
    found = []
    for num_threads in (1, 2, 4):
        cpu.set_threads(num_threads)
        runner = runner_of(model_of("qwen3"), native=True)
        add_prompts(runner, (100, 33))
        found.append(run_in_pieces(runner, whole_program(runner), 5))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 100


def test_the_number_of_tasks_goes_on_from_op_to_op() -> None:
    num_calls = []
    for num_tasks in (1, 50):
        runner = runner_of(model_of("qwen3"), native=True)
        add_prompts(runner, (100, 33))
        num_calls.append(len(run_in_pieces(runner, whole_program(runner), num_tasks)))
    assert num_calls[0] <= 50 * num_calls[1] < num_calls[0] + 50 * 10


def stopped_in(runner: TorchRunner, program: Program, kind: OpKind) -> Index:
    """Run up to the middle of an op of a kind in the second layer."""
    at = START
    while True:
        at = runner.run(program, at, Asked(2))
        op, inside = program.ops[at.op], runner.frames[program.frame_id].course
        if op.kind is kind and op.layer >= 1 and inside is not None:
            return at


INSIDE = [OpKind.ATTN, OpKind.ROUTE, OpKind.EXPERTS, OpKind.COMBINE, OpKind.HEAD]


@pytest.mark.parametrize("kind", INSIDE)
def test_a_checkpoint_inside_an_op_begins_it_again(kind: OpKind) -> None:
    model = model_of("qwen3")
    here, there = pair(model)
    add_prompts(here, (40, 17))
    program = whole_program(here)
    at = stopped_in(here, program, kind)
    frame = here.export_frame(program, at)
    for request in range(NUM_PROMPTS):
        there.import_request(request, GREEDY, *here.export_request(request))
    there.import_frame(program, at, frame)
    for runner in (here, there):
        assert runner.run(program, at, Watched()) == program.end
    assert_same(held(there, program, program.end), held(here, program, program.end))
    assert there.finish(program) == here.finish(program)


@pytest.mark.parametrize("kind", INSIDE)
def test_a_row_may_die_inside_an_op(kind: OpKind) -> None:
    both, alone = pair(model_of("qwen3"))
    add_prompts(both, (40, 17))
    add_prompts(alone, (40, 17))
    program = whole_program(both)
    at = stopped_in(both, program, kind)
    both.kill(program, 0)
    both.remove(0)
    assert both.run(program, at, Watched()) == program.end
    [left] = both.finish(program)
    row = compiled(alone, [next_row(alone, 1)], Grain.EXPERT)
    alone.accept(row)
    assert alone.run(row, START, Watched()) == row.end
    assert alone.finish(row) == [left]


def test_a_row_may_die_after_any_task_of_an_attention() -> None:
    """The tiles of the others have other numbers then, so what is done counts no more."""
    both, alone = pair(model_of("qwen3"))
    add_prompts(alone, (40, 17))
    row = compiled(alone, [next_row(alone, 1)], Grain.EXPERT)
    alone.accept(row)
    assert alone.run(row, START, Watched()) == row.end
    expected = held(alone, row, row.end)["head.x"]
    num_inside = 0
    for num_tasks in range(1, 60):
        add_prompts(both, (40, 17))
        program, at = whole_program(both), START
        while (program.ops[at.op].kind, program.ops[at.op].layer) != (OpKind.ATTN, 1):
            at = both.run(program, at, Poll(0, 1.0))
        at = both.run(program, at, Asked(num_tasks))
        num_inside += program.ops[at.op].kind is OpKind.ATTN
        both.kill(program, 0)
        assert both.run(program, at, Watched()) == program.end
        assert torch.equal(held(both, program, program.end)["head.x"][1:], expected), num_tasks
        both.drop(program)
        for request in range(NUM_PROMPTS):
            both.remove(request)
    assert num_inside > 20


def test_an_attention_in_which_a_row_is_dead_stops_at_every_task() -> None:
    """Tokens of no row get zeros, once."""
    expected, found = pair(model_of("qwen3"))
    ends = []
    for runner, num_tasks in ((expected, 1 << 40), (found, 1)):
        add_prompts(runner, (40, 17))
        program, at = whole_program(runner), START
        while (program.ops[at.op].kind, program.ops[at.op].layer) != (OpKind.ATTN, 1):
            at = runner.run(program, at, Poll(0, 1.0))
        runner.kill(program, 0)
        while at != program.end:
            at = runner.run(program, at, Asked(num_tasks))
        ends.append(held(runner, program, program.end))
    assert_same(ends[1], ends[0])


def test_a_frame_inside_an_op_says_what_it_keeps() -> None:
    runner = runner_of(model_of("qwen3"), native=True)
    add_prompts(runner, (40, 17))
    program = whole_program(runner)
    at = stopped_in(runner, program, OpKind.ATTN)
    frame = runner.frames[program.frame_id]
    inside = frame.course
    assert inside is not None
    assert inside.num_bytes > 57 * 128 * 2, "the normed rows at least"
    with_it = frame.num_bytes()
    frame.course = None
    assert with_it - frame.num_bytes() == inside.num_bytes
    frame.course = inside
    assert runner.run(program, at, Watched()) == program.end
    assert frame.course is None


def test_two_frames_stop_inside_the_same_op_and_go_on_in_turn() -> None:
    expected, found = pair(model_of("qwen3"))
    for runner in (expected, found):
        add_prompts(runner, (40, 17))
    tokens = []
    for request in range(NUM_PROMPTS):
        program = compiled(expected, [next_row(expected, request)], Grain.EXPERT)
        expected.accept(program)
        expected.run(program, START, Watched())
        tokens += [s.token_id for s in expected.finish(program)]
    programs = [compiled(found, [next_row(found, i)], Grain.EXPERT) for i in range(NUM_PROMPTS)]
    ends = [START] * NUM_PROMPTS
    for program in programs:
        found.accept(program)
    rng = random.Random(0)
    while any(at != p.end for at, p in zip(ends, programs, strict=True)):
        i = rng.randrange(NUM_PROMPTS)
        if ends[i] != programs[i].end:
            ends[i] = found.run(programs[i], ends[i], Asked(rng.choice([1, 2, 5])))
    assert [s.token_id for p in programs for s in found.finish(p)] == tokens


def test_nothing_stops_inside_an_op_at_the_grain_of_layers() -> None:
    runner = runner_of(model_of("qwen3"), native=True)
    add_prompts(runner, (40, 17))
    rows = [next_row(runner, request) for request in range(NUM_PROMPTS)]
    program = compiled(runner, rows, Grain.LAYER)
    runner.accept(program)
    for at in run_in_pieces(runner, program, 1):
        assert not program.inside_layer(at)
        assert runner.frames[program.frame_id].course is None


def logits_after(runner: TorchRunner, num_tasks: int) -> Tensor:
    found: list[Tensor] = []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    add_prompts(runner, (700, 90))
    run_in_pieces(runner, whole_program(runner), num_tasks)
    return torch.stack(found)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_keys_of_a_long_context_are_several_tasks_and_the_bits_stay(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the keys that one task goes through is made small for this test."""
    model = make_model(family, torch.bfloat16)
    expected = logits_after(runner_of(model, native=True), 1 << 40)
    monkeypatch.setattr(sweep, "KEY_VALUES", 64 * 200)
    assert torch.equal(logits_after(runner_of(model, native=True), 40), expected)


def test_a_spare_course_is_used_again_and_one_inside_an_op_is_not() -> None:
    runner = runner_of(model_of("qwen3"), native=True)
    add_prompts(runner, (40, 17))
    program = whole_program(runner)
    stopped_in(runner, program, OpKind.ATTN)
    inside = runner.frames[program.frame_id].course
    others = {course.take() for _ in range(3)}
    assert inside not in others
    for other in others:
        course.give_back(other)
    again = course.take()
    assert again in others
    course.give_back(again)
