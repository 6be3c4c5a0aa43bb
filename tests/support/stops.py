"""Programs that stop inside their ops, at any task: what the tests of such stops share."""

import random
from collections.abc import Callable
from typing import Any

from torch import nn

from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, Program
from qllm.types import Grain
from tests.support.sweeps import (
    GREEDY,
    Asked,
    Watched,
    assert_same,
    compiled,
    held,
    kv_of,
    next_row,
    prompt_of,
    runner_of,
)

NUM_PROMPTS = 2
SHARE = 0.05
"""Part of the stops at which another request runs."""


def add_prompts(runner: TorchRunner, lengths: tuple[int, ...]) -> None:
    for request, length in enumerate(lengths):
        runner.add(request, prompt_of(length, request), GREEDY, length, length + 8)


def whole_program(runner: TorchRunner) -> Program:
    rows = [next_row(runner, request) for request in range(NUM_PROMPTS)]
    program = compiled(runner, rows, Grain.EXPERT)
    runner.accept(program)
    return program


class Interrupter:
    """Another request of the runner, which runs two steps at some stops of the first ones."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.number, self.rng = runner, 1000, random.Random(0)

    def __call__(self) -> None:
        if self.rng.random() > SHARE:
            return
        runner, self.number = self.runner, self.number + 1
        runner.add(self.number, prompt_of(5, self.number), GREEDY, 5, 16)
        for _ in range(2):
            program = compiled(runner, [next_row(runner, self.number)], Grain.EXPERT)
            runner.accept(program)
            assert runner.run(program, START, Watched()) == program.end
            runner.finish(program)
        runner.remove(self.number)


def run_in_pieces(
    runner: TorchRunner, program: Program, num_tasks: int, disturb: Any = None
) -> list[Index]:
    """Run to the end and return where it stopped."""
    at, found = START, []
    while at != program.end:
        end = runner.run(program, at, Asked(num_tasks))
        inside = runner.frames[program.frame_id].course
        assert end > at or (inside is not None and end == at), "it went on by a task at least"
        at = end
        if at != program.end:
            found.append(at)
            if disturb is not None:
                disturb()
    return found


def assert_same_answers(
    expected: TorchRunner,
    found: TorchRunner,
    num_tasks: int,
    before: Callable[[TorchRunner], None] | None = None,
) -> int:
    """Run two steps of both, the second runner's in pieces; returns how often it stopped."""
    stops = 0
    for _ in range(2):
        for runner in (expected, found):
            if before is not None:
                before(runner)
        programs = [whole_program(runner) for runner in (expected, found)]
        assert expected.run(programs[0], START, Watched()) == programs[0].end
        stops += len(run_in_pieces(found, programs[1], num_tasks, Interrupter(found)))
        assert_same_ends(expected, found, programs)
        sampled = [
            [s.token_id for s in runner.finish(program)]
            for runner, program in zip((expected, found), programs, strict=True)
        ]
        assert sampled[0] == sampled[1]
    return stops


def assert_same_ends(expected: TorchRunner, found: TorchRunner, programs: list[Program]) -> None:
    """Compare what both hold at the end of a program: the frame, and KV and states of requests."""
    ends = [
        held(runner, program, program.end)
        for runner, program in zip((expected, found), programs, strict=True)
    ]
    assert_same(ends[1], ends[0])
    for request in programs[0].request_ids:
        num_layers = found.shape.num_layers
        assert_same(kv_of(found, request, num_layers), kv_of(expected, request, num_layers))


def pair(model: nn.Module, **settings: Any) -> list[TorchRunner]:
    return [runner_of(model, native=True, **settings) for _ in range(2)]
