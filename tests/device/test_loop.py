"""The loop of the device from ring to ring: on the host in its place, and as one graph.

Front ends, rings and records are real, kernels are torch's, CUDA's graphs are fakes. What is
compared is the engine on the host: its tokens and the stages that it ran, in order.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qllm.cuda.backend import cuda_runner
from qllm.cuda.stages import Key
from qllm.device import launcher
from qllm.device.graph import Watch
from qllm.device.launcher import _cuda_api
from qllm.device.server import attach
from qllm.errors import ConfigError
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.types import FinishReason, SamplingParams
from tests.support.families import VOCAB, make_model
from tests.support.loop_world import THREADS, World, engine_of, jobs_of
from tests.support.native_stages import LIMITS, policy_of, runner_of
from tests.support.stage_worlds import STAGE_NS, HostWorld, Job


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    runner_of.cache_clear()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("mixtral", "qllm2"),
        ("mixtral", "priority-layered"),
        ("mixtral", "chunked-priority"),
        ("deepseek_v3", "qllm2"),
        ("gpt_oss", "fcfs"),
    ],
)
def test_tokens_and_branches_are_those_of_the_engine(family: str, policy: str) -> None:
    jobs = jobs_of(1)
    runner = runner_of(family)
    host = HostWorld(runner, policy_of(policy), LIMITS)
    wanted = host.run(jobs)
    for number in range(len(jobs)):
        runner.remove(number)
    worlds = [World(family, policy, jobs), World(family, policy, jobs, turns=7)]
    worlds[0].run_on_the_host()
    api = worlds[1].run_as_a_graph()
    for world in worlds:
        assert world.tokens() == wanted.tokens
        assert world.trace == wanted.trace
        assert set(world.ends().values()) == {FinishReason.LENGTH}
        assert world.control.read_stats().num_live == 0
    assert [worlds[1].loop.keys[branch] for branch in api.trace] == wanted.trace
    assert api.num_launches > 5
    assert policy != "qllm2" or wanted.parks > 0


def test_the_engine_put_together_works_on_copies_of_the_blocks() -> None:
    jobs = jobs_of(4)
    plain, world = World("mixtral", "qllm2", jobs), World("mixtral", "qllm2", jobs)
    plain.run_on_the_host()
    engine = engine_of(world, runner_of("mixtral"), "qllm2")
    assert not set(engine.memory.addresses) & set(engine.loop.addresses)
    launches = engine.serve()
    assert launches > 5
    assert world.tokens() == plain.tokens()
    api: Any = engine._graph._api
    assert [engine.loop.keys[branch] for branch in api.trace] == plain.trace
    assert engine.memory.read("num_turns") == world.num_looks
    assert engine.loop.heartbeat() == 0, "the blocks of the host are not written"
    engine.close()


def test_the_time_of_a_launch_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sets its clock by it: what is written after it would make the device late."""
    engine, sent = engine_of(World("mixtral", "qllm2", []), runner_of("mixtral"), "qllm2"), []
    write = engine.memory.write

    def noted(**numbers: int) -> None:
        sent.extend(numbers)
        write(**numbers)

    def launched(graph: Any, watch: Watch, **how: float) -> int:
        watch.prepare()
        return 1

    monkeypatch.setattr(engine.memory, "write", noted)
    monkeypatch.setattr(launcher, "serve", launched)
    assert engine.serve(between=lambda: sent.append("between")) == 1
    assert sent == ["between", *engine.loop.words_of_launch(), "launch_ns"]
    engine.close()


def test_a_loop_needs_stages_that_were_captured() -> None:
    runner = cuda_runner(make_model("mixtral"), num_pages=8, graphs=False)
    world = World("mixtral", "fcfs", [])
    with pytest.raises(ConfigError, match="there are none: not asked for"):
        engine_of(world, runner, "fcfs")


def test_the_kernel_is_compiled_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("qllm.device.graph_api.CudaLoopApi", lambda: SimpleNamespace(load=_pair))
    monkeypatch.setattr("qllm.device.cubins.kernel_of", lambda *what: what[1])
    _, loaded = _cuda_api(policy_of("fcfs"), torch.device("cuda"))
    assert loaded == ((9, 0), "qllm_turn")


def _pair(*both: Any) -> tuple[Any, ...]:
    return both


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_cancels_cost_no_other_request_a_token(seed: int) -> None:
    jobs, rng = jobs_of(seed, 12), random.Random(seed)
    cancels = [(jobs[n].at_ns + rng.randrange(9) * STAGE_NS, n) for n in rng.sample(range(12), 7)]
    calm = World("mixtral", "qllm2", jobs)
    calm.run_on_the_host()
    world = World("mixtral", "qllm2", jobs, cancels, turns=3)
    world.run_as_a_graph()
    ends = world.ends()
    assert len(ends) == 12
    for number, tokens in world.tokens().items():
        whole = calm.tokens()[number]
        if ends[number] is FinishReason.LENGTH:
            assert tokens == whole
        else:
            assert ends[number] is FinishReason.CANCELLED
            assert tokens == whole[: len(tokens)]
    assert FinishReason.CANCELLED in ends.values()
    world.loop.server.check()


def test_stopping_ends_what_is_open() -> None:
    jobs = jobs_of(3)
    world = World("mixtral", "qllm2", jobs)
    world.loop.prepare()
    for _ in range(25):
        branch = world.turn()
        if branch >= 0:
            world.replay(branch)
    world.passes(jobs[-1].at_ns)
    assert len(world.ends()) < len(jobs)
    world.front_end.stop()
    world.run_on_the_host()
    assert len(world.ends()) == len(jobs)
    assert FinishReason.CANCELLED in world.ends().values()
    world.loop.server.check()


def test_a_broken_logit_ends_its_request_alone() -> None:
    how = SamplingParams(temperature=0, seed=0)
    jobs = [Job(0, 10, (5, 6, 7), 3, how), Job(0, 10, (9, 8, 7, 6), 3, how)]
    world = World("mixtral", "fcfs", jobs)
    replay, lane = world.stages.replay, world.stages.lanes

    def broken(key: Key) -> None:
        replay(key)
        if key.head:
            lane[key.whole].peaks_R[1] = float("nan")

    world.stages.replay = broken  # type: ignore[method-assign]
    try:
        world.run_on_the_host()
    finally:
        world.stages.replay = replay  # type: ignore[method-assign]
    assert world.ends() == {0: FinishReason.LENGTH, 1: FinishReason.ERROR}
    assert "the largest logit is not finite" in world.records[1][-1].error
    assert len(world.tokens()[0]) == 3


def test_a_deadline_ends_a_request_that_runs() -> None:
    how = SamplingParams(temperature=0, seed=0)
    world = World("mixtral", "qllm2", [Job(0, 10, tuple(range(1, 50)), 7, how)])
    late = replace(world._submission(0), deadline_ns=2 * STAGE_NS)
    world._submission = lambda number: late  # type: ignore[method-assign]
    world.run_on_the_host()
    assert world.ends() == {0: FinishReason.TIMEOUT}
    assert len(world.trace) == 2


class Neighbour:
    """A second front end of a world."""

    def __init__(self, world: World) -> None:
        self.block, bell = FrontEndMemory.create(1, (1 << 18,) * 4), Doorbell.create()
        attach(world.loop.server, self.block)
        self.front_end = FrontEnd(self.block, world.control, Doorbell(os.dup(bell.fd)), bell)

    def submit(self, world: World, number: int, **changes: Any) -> int:
        request_id = 1 << NUMBER_BITS | number
        item = replace(world._submission(0), request_id=request_id, **changes)
        self.front_end.submit(item)
        return request_id


def test_a_torn_record_keeps_no_other_front_end_waiting() -> None:
    how = SamplingParams(temperature=0, seed=0)
    world = World("mixtral", "fcfs", [Job(0, 0, (5, 6, 7), 2, how)] * 2, max_front_ends=2)
    other = Neighbour(world)
    world.loop.prepare()
    world.front_end.submit(world._submission(0))
    ring, _ = world.block.rings["ls"]
    ring[100] ^= 1
    wanted = other.submit(world, 0)
    late = replace(world._submission(0), request_id=1 << NUMBER_BITS | 1, deadline_ns=STAGE_NS)
    other.front_end.submit(late)
    for _ in range(6):
        branch = world.loop.turn(THREADS)
        if branch >= 0:
            world.replay(branch)
    ends = {r.request_id: r.reason for r in other.front_end.receive() if not isinstance(r, TokenAt)}
    assert ends == {wanted: FinishReason.LENGTH, 1 << NUMBER_BITS | 1: FinishReason.TIMEOUT}
    world.loop.server.check()


def test_a_front_end_that_writes_much_keeps_no_other_waiting() -> None:
    how = SamplingParams(temperature=0, seed=0)
    world = World("mixtral", "fcfs", [Job(0, 0, (5, 6, 7), 2, how)], max_front_ends=2)
    other, asked = Neighbour(world), 0
    world.loop.prepare()
    wanted = 1 << NUMBER_BITS
    seen: list[Any] = []
    for turn in range(6):
        for _ in range(70):  # each ends at once, and costs the block a reading
            bad = replace(world._submission(0), request_id=asked, token_ids=(VOCAB + 1,))
            world.front_end.submit(bad)
            asked += 1
        if turn == 0:
            other.submit(world, 0)
        branch = world.loop.turn(THREADS)
        if branch >= 0:
            world.replay(branch)
        world.front_end.receive()
        seen += other.front_end.receive()
    assert [isinstance(r, TokenAt) for r in seen] == [True, True, False]
    assert seen[-1].request_id == wanted


def test_a_prompt_that_waited_for_a_slot_is_read_into_the_one_it_gets() -> None:
    how = SamplingParams(temperature=0, seed=0)
    jobs = [Job(0, 10, tuple(range(n, n + 9)), 1 + n, how) for n in range(1, 9)]
    roomy, tight = (World("mixtral", "fcfs", jobs, capacity=num) for num in (64, 5))
    for world in (roomy, tight):
        world.run_on_the_host()
    assert tight.trace != roomy.trace, "nobody has waited"
    assert tight.tokens() == roomy.tokens()
