"""Requests that ask for log-probabilities of their prompt, beside those that do not."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from qllm.engine.loop import EngineLoop
from qllm.ingress import InprocIngress, Submission
from qllm.policy import Ride
from qllm.runner.cpu import cpu_runner
from qllm.scheduler.decision import Limits
from qllm.scheduler.scheduler import Scheduler
from qllm.scheduler.scoring import TURN_NS
from qllm.types import (
    NS_PER_MS,
    FinishReason,
    Grain,
    Priority,
    PromptLogprobs,
    Sampled,
    SamplingParams,
    Slo,
)
from qllm_policies.chunked import Chunked
from qllm_policies.fcfs import Fcfs
from qllm_policies.qllm import Qllm
from qllm_policies.qllm2 import Qllm2
from tests.support.families import make_model
from tests.support.sweeps import prompt_of

LS, BE = Priority.LS, Priority.BE


class World:
    """The engine over a real model; its clock goes on by a tick whenever it is read.

    Args:
        policy: Decides.
        tick_ns: Once per boundary of a program, and a few times between two programs.
        cut: Length of a segment, in parts of the head of one token.
        step_tokens: Most prefill tokens of a step.
        seats: Most requests of a step.
    """

    def __init__(
        self,
        policy: Any,
        *,
        tick_ns: int,
        cut: float | None = None,
        step_tokens: int = 4096,
        seats: int = 8,
    ) -> None:
        self.at_ns, self.tick_ns = 0, tick_ns
        self.ingress = InprocIngress(self.now_ns)
        self.runner = cpu_runner(make_model("mixtral", torch.bfloat16))
        if cut is not None:
            costs = self.runner.backend.costs
            object.__setattr__(costs, "segment_ns", cut * costs.head_ns)
        limits = Limits(
            max_num_seqs=seats, max_step_tokens=step_tokens, block_size=16, num_blocks=64,
            grain=Grain.EXPERT, max_segment_ns=5 * NS_PER_MS,
        )  # fmt: skip
        self.scheduler = Scheduler(policy, self.runner.shape, self.runner.cuts, limits)
        self.loop = EngineLoop(self.ingress, self.scheduler, self.runner, self, self.now_ns)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.token_at: dict[int, list[int]] = defaultdict(list)
        """Per request, after how many ticks its tokens came."""
        self.prompts: dict[int, PromptLogprobs] = {}
        self.ended: dict[int, FinishReason] = {}

    def now_ns(self) -> int:
        self.at_ns += self.tick_ns
        return self.at_ns

    def submit(
        self, request: int, prompt: list[int], max_tokens: int, *, asks: bool = False, at: int = LS
    ) -> None:
        self.ingress.put(
            Submission(
                request_id=request, name=str(request), priority=at, token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0, prompt_logprobs=2 if asks else None),
                stop_ids=frozenset(), max_tokens=max_tokens, slo=Slo(), arrival_ns=self.now_ns(),
                deadline_ns=None,
            )
        )  # fmt: skip

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        self.tokens[sampled.request_id].append(sampled.token_id)
        self.token_at[sampled.request_id].append(at_ns // self.tick_ns)
        if sampled.prompt is not None:
            self.prompts[sampled.request_id] = sampled.prompt
        return False

    def on_finish(self, request_id: int, reason: FinishReason, error: Any, metrics: Any) -> None:
        assert error is None
        self.ended[request_id] = reason

    def step(self) -> None:
        self.loop.step()
        self.scheduler.check()

    def run(self, *requests: int) -> None:
        for _ in range(2000):
            if set(requests) <= set(self.ended):
                return
            self.step()
        raise AssertionError(f"of {requests} ended only {sorted(self.ended)}")


def test_the_scoring_of_a_prompt_is_no_cost_of_a_decode_step() -> None:
    world = World(Qllm2(), tick_ns=1000, step_tokens=39)
    world.submit(0, prompt_of(40, 1), 1, asks=True)
    world.step()
    before = world.loop.costs.table()
    world.step()  # the last chunk, of one token
    assert world.ended == {0: FinishReason.LENGTH}
    assert 0 in world.prompts
    assert world.loop.costs.table() == before
    world.submit(1, prompt_of(40, 1), 1)
    world.run(1)
    assert world.loop.costs.table() != before


@dataclass(frozen=True, kw_only=True)
class Together(Qllm2):
    """All classes share every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ride", Ride(unbounded=True))


def alone(asks: bool) -> World:
    """A world in which nobody was beside the request."""
    world = World(Qllm2(), tick_ns=NS_PER_MS, cut=0.3)
    world.submit(0, prompt_of(40, 1), 3, asks=asks)
    world.run(0)
    return world


def company(*at: int, policy: Any = None) -> World:
    """A world in which requests of these classes ask, beside two LS requests that decode."""
    world = World(policy or Qllm2(), tick_ns=NS_PER_MS, cut=0.3)
    world.submit(100, prompt_of(5, 2), 60)
    world.submit(101, prompt_of(6, 3), 60)
    while len(world.tokens[100]) < 6:
        world.step()
    for request, priority in enumerate(at):
        world.submit(request, prompt_of(40, 1), 3, asks=True, at=priority)
    world.run(100, 101, *range(len(at)))
    return world


def longest_gap(world: World, request: int) -> int:
    return max(b - a for a, b in pairwise(world.token_at[request]))


@pytest.mark.parametrize("policy", [Qllm2(), Together()], ids=["tiers", "together"])
@pytest.mark.parametrize("at", [(LS,), (LS, LS), (BE,), (LS, BE)])
def test_who_decodes_gets_tokens_while_prompts_are_scored(at: tuple[int, ...], policy: Any) -> None:
    free, world = company(policy=policy), company(*at, policy=policy)
    single = alone(asks=True)
    scoring = single.token_at[0][0]
    usual = longest_gap(free, 100)
    turn = max(TURN_NS // NS_PER_MS, usual)
    assert scoring > 6 * (usual + turn), "it would be seen"
    for request in (100, 101):
        assert longest_gap(world, request) <= turn + 3 * usual
        assert world.tokens[request] == free.tokens[request]
    for request in range(len(at)):
        assert world.tokens[request] == single.tokens[0]
        assert world.prompts[request] == single.prompts[0]


def test_who_arrives_while_a_prompt_is_scored_waits_for_a_turn_of_it() -> None:
    world = World(Qllm2(), tick_ns=NS_PER_MS, cut=0.3)
    world.submit(0, prompt_of(40, 1), 3, asks=True)
    for _ in range(6):
        world.step()
    begin = world.at_ns // NS_PER_MS
    world.submit(1, prompt_of(5, 2), 2)
    world.run(0, 1)
    free = World(Qllm2(), tick_ns=NS_PER_MS, cut=0.3)
    free.submit(1, prompt_of(5, 2), 2)
    free.run(1)
    turn, usual = TURN_NS // NS_PER_MS, free.token_at[1][0]
    assert world.token_at[1][0] - begin <= usual + 2 * turn
    assert world.token_at[0][0] > world.token_at[1][-1]
    assert world.prompts[0] == alone(asks=True).prompts[0]


@pytest.mark.parametrize("policy", [Fcfs(), Qllm(), Chunked(step_tokens=24)])
def test_under_every_policy_a_prompt_is_scored_in_a_program_of_its_own(policy: Any) -> None:
    world = World(policy, tick_ns=NS_PER_MS, cut=0.3)
    world.submit(100, prompt_of(5, 2), 40)
    world.submit(0, prompt_of(40, 1), 3, asks=True)
    world.submit(1, prompt_of(40, 1), 3, asks=True, at=BE)
    companions: list[tuple[int, ...]] = []
    finish = world.runner.finish

    def finished(program: Any) -> Any:
        sampled = finish(program)
        if any(x.prompt is not None for x in sampled):
            companions.append(program.request_ids)
        return sampled

    world.runner.finish = finished  # type: ignore[method-assign]
    world.run(100, 0, 1)
    assert sorted(companions) == [(0,), (1,)]
    assert world.prompts[0] == world.prompts[1] == alone(asks=True).prompts[0]


@pytest.mark.parametrize("seats", [1, 2])
def test_turns_need_no_seat_too_many(seats: int) -> None:
    world = World(Qllm2(), tick_ns=NS_PER_MS, cut=0.3, seats=seats)
    world.submit(100, prompt_of(5, 2), 30)
    world.submit(101, prompt_of(6, 3), 30)
    for request in range(3):
        world.submit(request, prompt_of(40, 1), 3, asks=True)
    world.run(100, 101, 0, 1, 2)
    assert set(world.ended.values()) == {FinishReason.LENGTH}


def test_after_its_first_token_a_request_shares_programs_again() -> None:
    world = World(Qllm2(), tick_ns=NS_PER_MS, cut=0.3)
    for request in range(3):
        world.submit(request, prompt_of(40, 1), 20, asks=request < 2)
    world.submit(5, prompt_of(5, 2), 200, at=BE)
    programs: list[tuple[int, ...]] = []
    finish = world.runner.finish

    def finished(program: Any) -> Any:
        programs.append(program.request_ids)
        return finish(program)

    world.runner.finish = finished  # type: ignore[method-assign]
    world.run(0, 1, 2)
    scored = [programs.index((request,)) for request in (0, 1)]
    assert not any(5 in rows for rows in programs[: max(scored)]), "BE waits for LS prompts"
    assert any({0, 1, 2} <= set(rows) for rows in programs)
