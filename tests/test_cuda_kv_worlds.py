"""Any plan, over pool, host memory and shared blocks of a device: tokens, KV bits and sums."""

import random
from typing import Any

import pytest
from device_world import BLOCK, DeviceWorld, limits_of, prompts_of
from fake_cuda import FakeCuda
from fake_streams import FakeStreams, install
from test_swap import SwapFuzz

from qllm.plugins import load_policy
from qllm.record import trace
from qllm.types import NS_PER_MS, Priority

LS, BE = Priority.LS, Priority.BE
CASES = [(seed, stages) for seed in range(6) for stages in (False, True)]


@pytest.mark.parametrize(("seed", "stages"), CASES)
def test_any_plan_keeps_tokens_and_sums(
    monkeypatch: pytest.MonkeyPatch, seed: int, stages: bool
) -> None:
    rng = random.Random(seed)
    streams, cuda = FakeStreams(rng), FakeCuda() if stages else None
    install(monkeypatch, streams, BLOCK, cuda)
    limits = limits_of(rng.choice([30, 40, 60]), rng.choice([20, 200]))
    policy: Any = SwapFuzz(seed) if seed % 2 else load_policy("qllm2")
    world = DeviceWorld(policy, limits, streams, num_kept=rng.choice([0, 4, 30]), stages=cuda)
    for i, ids in enumerate(prompts_of(rng, 7, world.real.shape.vocab_size)):
        world.ask(rng.choice([LS, BE, BE]), ids, rng.randint(2, 8), at_ns=i * 3 * NS_PER_MS)
    world.run()
    world.right()
    swapped = [e for e in world.record.events if isinstance(e, trace.SwappedIn)]
    assert len(swapped) <= world.both.moved
    assert streams.finishes == 0
    return len(swapped), world.both.compared
