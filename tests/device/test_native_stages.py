"""The native loop over a model's stages: the tokens and the branches of the engine on the host."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Limits
from qllm.types import SamplingParams
from tests.support.families import FAMILIES, VOCAB
from tests.support.native_stages import LIMITS, LONGEST, policy_of, runner_of
from tests.support.stage_loop import StageLoop
from tests.support.stage_worlds import STAGE_NS, HostWorld, Job, NativeWorld, Outcome, random_jobs

GREEDY = SamplingParams(temperature=0, seed=1)
POLICIES = ["fcfs", "priority", "chunked-priority", "qllm2", "layered", "priority-layered"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    runner_of.cache_clear()
    alone.cache_clear()


def loop_of(runner: TorchRunner, name: str, limits: Limits = LIMITS) -> StageLoop:
    assert runner.backend.stages is not None
    return StageLoop(
        policy_of(name),
        runner.backend.stages,
        runner.backend.pages,
        runner.shape,
        limits,
        max_total_tokens=LONGEST,
    )


def spoil(runner: TorchRunner) -> None:
    """Let nobody find what another left."""
    assert runner.backend.stages is not None
    tensors = [
        runner.backend.pages._k,
        runner.backend.pages._v,
        runner.backend.stages.lanes[True].hidden_SD,
    ]
    with torch.inference_mode():
        for t in tensors:
            assert t is not None
            t.fill_(1e3)


def both(family: str, name: str, jobs: list[Job], k: int = 1) -> tuple[Outcome, Outcome]:
    runner = runner_of(family, k)
    world = HostWorld(runner, policy_of(name), LIMITS)
    host = world.run(jobs)
    assert world.scheduler.pool.num_free == LIMITS.num_blocks
    spoil(runner)
    with torch.inference_mode():
        native = NativeWorld(loop_of(runner, name)).run(jobs)
    return host, native


PAIRS = [(family, name) for family in FAMILIES for name in ("qllm2", "priority-layered")]
PAIRS += [("mixtral", name) for name in POLICIES if ("mixtral", name) not in PAIRS]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_tokens_and_branches_are_those_of_the_host(family: str, name: str) -> None:
    sure = [Job(0, 10, tuple(range(45)), 4, GREEDY), Job(STAGE_NS, 0, (5, 7), 4, GREEDY)]
    jobs = sure + random_jobs(random.Random(f"{family} {name}"), 7, 45, VOCAB)
    host, native = both(family, name, sorted(jobs, key=lambda job: job.at_ns))
    assert native.tokens == host.tokens
    assert native.trace == host.trace
    assert native.parks == host.parks
    assert (native.parks > 0) == (name == "qllm2")
    assert len({token for tokens in native.tokens.values() for token in tokens}) > 8


def test_stages_of_two_layers_go_the_same_way() -> None:
    parks = 0
    for seed in (2, 8):
        jobs = random_jobs(random.Random(seed), 7, 45, VOCAB)
        host, native = both("qwen2_moe", "qllm2", jobs, k=2)
        assert native == host
        parks += native.parks
    assert parks > 0


# -- adversarial: the native side alone, against each request alone on the host


@cache
def alone(family: str, seed: int) -> tuple[list[Job], list[list[int]]]:
    """Jobs, and the tokens of each without the others."""
    jobs = random_jobs(random.Random(seed), 7, 45, VOCAB)
    runner, policy = runner_of(family), policy_of("fcfs")
    return jobs, [HostWorld(runner, policy, LIMITS).run([job]).tokens[0] for job in jobs]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["qllm2", "priority-layered"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_no_interleaving_changes_a_token(family: str, name: str) -> None:
    """False alarms, cancels between stages, too little KV: a frame may be parked at any stage."""
    runner, parks, evictions = runner_of(family), 0, 0
    for seed in (2, 8):
        jobs, wanted = alone(family, seed)
        rng = random.Random(seed)
        spoil(runner)
        loop = loop_of(runner, name, replace(LIMITS, num_blocks=14))
        cancels = [(rng.randrange(20_000_000), number) for number in (2, 5)]
        world = NativeWorld(loop, cancels=cancels, alarm=lambda rng=rng: rng.random() < 0.5)
        with torch.inference_mode():
            found = world.run(jobs)
        for number, tokens in found.tokens.items():
            whole = len(tokens) == len(wanted[number])
            assert tokens == wanted[number][: len(tokens)]
            assert whole or number in (2, 5)
        parks += found.parks
        evictions += world.evictions
    assert parks > 20 or name == "priority-layered"
    assert evictions > 0


def test_a_request_without_a_finite_logit_fails_alone() -> None:
    runner = runner_of("mixtral")
    jobs = [
        Job(0, 0, (i + 1, 7, 9, 30 + i), 5, SamplingParams(temperature=0, seed=i)) for i in range(3)
    ]
    wanted = HostWorld(runner, policy_of("qllm2"), LIMITS).run(jobs).tokens
    loop = loop_of(runner, "qllm2")
    assert runner.backend.stages is not None
    peaks = [lane.peaks_R for lane in runner.backend.stages.lanes.values()]

    def replay(branch: int) -> None:
        loop.replay(branch)
        key = loop._keys[branch]
        if key.head and 1 in world.slots and len(world.tokens[1]) == 2:
            for peaks_R in peaks:
                peaks_R[1] = float("inf")

    world = NativeWorld(loop, replay=replay)
    with torch.inference_mode():
        found = world.run(jobs)
    assert world.failed == [1]
    assert found.tokens == {0: wanted[0], 1: wanted[1][:2], 2: wanted[2]}
