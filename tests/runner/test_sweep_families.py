"""Sweeps over every family, over int8 experts, and beside attention that stops between keys."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from qllm.errors import InvariantError
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, OpKind
from qllm.types import Grain
from tests.support.families import FAMILIES, make_model
from tests.support.sweeps import (
    GREEDY,
    Poll,
    Watched,
    assert_same,
    compiled,
    next_row,
    prompt_of,
    run_beside,
    runner_of,
)


def pair(model: nn.Module, expert_weights: str = "auto") -> list[TorchRunner]:
    """Ops one by one, and swept."""
    return [
        runner_of(model, native=native, fine=True, expert_weights=expert_weights)
        for native in (False, True)
    ]


def stop_between_keys(runner: TorchRunner) -> None:
    """After every block of them."""
    runner.backend.costs = replace(
        runner.backend.costs, query_key_ns=1e12, attn_ns=1.0, segment_ns=1.0
    )


def run_all(runners: list[TorchRunner], seed: int) -> int:
    """Two prompts and three steps, with stops at random; how many there were."""
    rng, stops = random.Random(seed), 0
    for request in range(2):
        prompt = prompt_of(rng.randint(70, 90), request)
        for runner in runners:
            runner.add(request, prompt, GREEDY, len(prompt), len(prompt) + 8)
    for step, grain in enumerate((Grain.EXPERT, Grain.LAYER, Grain.EXPERT)):
        rows = [next_row(runners[0], request) for request in range(2)]
        stops += run_beside(runners, compiled(runners[0], rows, grain), 0.4, seed + step)
    return stops


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_swept_as_it_is_run_one_by_one(family: str) -> None:
    runners = pair(make_model(family, torch.bfloat16))
    assert runners[1].names["sweep"] == "3 of 3 layers in one call"
    assert run_all(runners, 1) > 20


@pytest.mark.parametrize("weights", ["int8", "int8-g64"])
def test_int8_experts_are_swept(weights: str) -> None:
    runners = pair(make_model("gpt_oss", torch.bfloat16), weights)
    assert runners[1].backend.sweep.num_layers == 3
    assert run_all(runners, 2) > 20
    assert runners[1].expert_bytes > 0


def test_a_frame_that_stopped_between_keys_goes_on_where_they_are_swept() -> None:
    model = make_model("gpt_oss", torch.bfloat16)
    here, there = pair(model)
    stop_between_keys(here)
    prompt = prompt_of(150, 0)
    here.add(0, prompt, GREEDY, 150, 160)
    program = compiled(here, [next_row(here, 0)], Grain.EXPERT)
    here.accept(program)
    at = START
    while program.ops[at.op].kind is not OpKind.ATTN or not at.pos:
        at = here.run(program, at, Poll(0, 1.0))
    frame = here.export_frame(program, at)
    there.import_request(0, GREEDY, *here.export_request(0))
    there.import_frame(program, at, frame)
    for runner in (here, there):
        assert runner.run(program, at, Watched()) == program.end
    assert_same(there.export_frame(program, program.end), here.export_frame(program, program.end))


def test_a_runner_that_was_closed_sweeps_no_more() -> None:
    runner = runner_of(make_model("mixtral", torch.bfloat16), native=True)
    runner.add(0, prompt_of(9, 0), GREEDY, 9, 20)
    program = compiled(runner, [next_row(runner, 0)], Grain.EXPERT)
    runner.accept(program)
    at = runner.run(program, START, Poll(0, 1.0))
    runner.close()
    with pytest.raises(InvariantError, match="given back"):
        runner.run(program, at, Watched())
