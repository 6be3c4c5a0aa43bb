"""KV on a device that outlives its row: shared, kept and swapped out, and no copy races.

A CPU stands in for the device; `fake_streams` runs copies as late as CUDA would allow and refuses
two accesses that nothing orders.
"""

import random
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from fake_streams import FakeStreams, install
from families import VOCAB, make_model

from qllm import QLLMEngine, SamplingParams, config
from qllm.cuda.backend import CudaBackend, cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.engine import build
from qllm.runner.runner import TorchRunner

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BUCKETS = [Bucket(8, False), Bucket(96, True)]
PAGE, BLOCK = 8, 4
SETTINGS: dict[str, Any] = {
    "conformance": False, "threads": 1, "max_num_seqs": 8, "block_size": BLOCK,
    "max_kv_tokens": 512, "kernels": "reference",
}  # fmt: skip


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


class Device:
    """What stands in for the device of the engines of a test."""

    def __init__(self, patch: pytest.MonkeyPatch, *, stages: bool = False) -> None:
        self.streams = FakeStreams(random.Random(1))
        self.cuda = FakeCuda() if stages else None
        patch.setattr(config, "PAGE_SIZE", PAGE)
        patch.setattr(build, "make_runner", self._runner)
        install(patch, self.streams, BLOCK, self.cuda)

    def _runner(self, model: Any, settings: Any) -> TorchRunner:
        graphs = False if self.cuda is None else self.cuda
        return cuda_runner(
            model, num_pages=settings.num_blocks, page_size=settings.block_size, max_num_seqs=8,
            max_total_tokens=256, graphs=graphs, buckets=BUCKETS, layers_per_stage=1,
            spare=build.spare_of(settings, CudaBackend.why_inexact, lambda: self.streams),
        )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["ops", "stages"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch, stages=request.param)


def engine_of(model: Any = None, **settings: Any) -> QLLMEngine:
    model = make_model("mixtral") if model is None else model
    return QLLMEngine.from_model(model, **{**SETTINGS, **settings})


def run(engine: QLLMEngine, ids: list[int], n: int = 6, priority: str = "LS") -> Any:
    return engine.submit(ids, priority, n, sampling=GREEDY).result(60)


def test_a_hit_has_the_tokens_of_a_cold_run(device: Device) -> None:
    shared = prompt_of(40)
    prompts = [shared + prompt_of(5 + i, i + 1) for i in range(3)]
    with engine_of(prefix_cache=False) as engine:
        cold = [run(engine, ids).token_ids for ids in prompts]
    with engine_of(prefix_cache="approximate") as engine:
        found = [run(engine, ids) for ids in prompts]
    assert [r.token_ids for r in found] == cold
    assert [r.metrics.num_cached_tokens for r in found] == [0, 40, 40]
    assert device.streams.copies["out"] > 0
    assert device.streams.copies["in"] == 2 * 2 * 40 // BLOCK
