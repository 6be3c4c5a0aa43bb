"""The scheduler and the rings in device code: what they say on a GPU is what they say here."""

import random
from collections import Counter

import numpy as np
import pytest

from bench.gpu.loop import LoopClient, limits_of
from qllm import QLLMEngine, SamplingParams
from qllm.cuda.backend import cuda_runner
from qllm.ingress.ring import OVERHEAD, RingReader, RingWriter
from qllm.ingress.structs import RING_END
from qllm.plugins import load_policy
from tests.support.differential import run_trace
from tests.support.families import VOCAB, make_model
from tests.support.native_lanes import random_dry_run
from tests.support.on_device import (
    DeviceTurns,
    Kernels,
    device_calls,
    device_scheduler,
    locked_pages,
    pinned_zeros,
)
from tests.support.ring_world import RingWorld

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qllm2", "priority-layered"])
def test_the_device_decides_as_the_python_scheduler(name: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(4):
        seen += run_trace(load_policy(name), f"{name}-{number}", device_scheduler).seen
    assert seen["accept"] > 50


def test_the_device_chooses_stages_and_fills_lanes_as_the_host() -> None:
    for number in range(6):
        world, mirror = random_dry_run(
            number, 0, device="cuda", calls=lambda policy: DeviceTurns(Kernels(policy)),
            zeros=pinned_zeros,
        )  # fmt: skip
        assert mirror.seen["whole"] + mirror.seen["stage"] > 20
        assert not world.slots


def test_the_device_reads_and_writes_records() -> None:
    kernels, rng = Kernels(load_policy("qllm2")), random.Random(0)
    capacity = 1024
    ring, tail, body = pinned_zeros(capacity // 8), pinned_zeros(1), pinned_zeros(capacity // 8)
    ends = pinned_zeros(2 * RING_END.itemsize // 8).view(RING_END)
    ends[:] = (ring.ctypes.data, tail.ctypes.data, capacity, *[0] * 7)
    ours = memoryview(ring).cast("B"), memoryview(tail).cast("B").cast("Q")
    writer, reader = RingWriter(*ours), RingReader(*ours)
    text = body.view(np.uint8)
    theirs = ends[0:1].ctypes.data, ends[1:2].ctypes.data
    for number in range(40):
        data = rng.randbytes(rng.randrange(300))
        if number % 2:
            text[: len(data)] = np.frombuffer(data, np.uint8)
            assert kernels.ring_write(theirs[0], 7, number, body.ctypes.data, len(data)) == 1
            record = reader.read()
            assert record is not None
            assert (record.kind, record.flags) == (7, number)
            assert record.body.rstrip(b"\0") == data.rstrip(b"\0")
            # each end keeps its own place: bring those that took no part along
            writer._head, writer._seq = reader._at, reader._seq
            ends[1] = ends[0]
        else:
            assert kernels.ring_read(theirs[1], 1, body.ctypes.data, capacity) == 0
            assert writer.write(7, number, data)
            length = kernels.ring_read(theirs[1], 1, body.ctypes.data, capacity)
            assert length >= len(data) + OVERHEAD
            assert text[: len(data)].tobytes() == data
            reader._at, reader._seq = writer._head, writer._seq
            ends[0] = ends[1]


def test_the_server_serves_the_same_records_from_the_device() -> None:
    with locked_pages() as lock:
        worlds = [
            RingWorld(load_policy("qllm2"), False, num_front_ends=2),
            RingWorld(
                load_policy("qllm2"), True, num_front_ends=2, prepare=lock, calls=device_calls,
                zeros=pinned_zeros,
            ),
        ]  # fmt: skip
        for world in worlds:
            for number in range(30):
                priority = 10 if number % 3 else 0
                world.submit(
                    number, priority, 9 + number, 7, at_ns=number * 10**6, front_end=number % 2
                )
            world.cancel(4, 10**7)
            world.run(30)
        here, there = worlds
        assert (dict(there.records), there.shown) == (dict(here.records), here.shown)


@pytest.mark.parametrize("policy", ["qllm2", "chunked-priority"])
def test_the_loop_on_the_device_gives_the_tokens_of_the_host(policy: str) -> None:
    """One launch of WHILE { turn; SWITCH { stages } }, fed and read through rings."""
    rng, model = random.Random(2), make_model("mixtral").cuda()
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([5, 40, 70]))] for _ in range(12)]
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    with QLLMEngine.from_model(model, max_num_seqs=8, max_kv_tokens=4096) as engine:
        handles = [engine.submit(ids, "BE", 9, sampling=greedy) for ids in prompts]
        wanted = [list(handle.result(300).token_ids) for handle in handles]
    runner = cuda_runner(
        model, num_pages=256, max_num_seqs=8, max_step_tokens=256, max_total_tokens=128,
        layers_per_stage=1,
    )  # fmt: skip
    client = LoopClient(runner, policy, limits_of(runner, 8, 256), 128, dry=False)
    try:
        found = client.ask(prompts[:6], 9, "BE") + client.ask(prompts[6:], 9, "LS")
    finally:
        client.close()
        runner.close()
    assert [[token.sampled.token_id for token in row] for row in found] == wanted
