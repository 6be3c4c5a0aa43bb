"""The engine over the device runner: a CPU stands in for the device, and a fake for its graphs."""

import os
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.cuda.backend import cuda_runner
from qllm.engine import build
from qllm.errors import ConfigError
from qllm.runner.runner import TorchRunner
from tests.support.device_storms import BUCKETS, SAMPLING, on_device, storm
from tests.support.fake_cuda import FakeCuda
from tests.support.families import DTYPES, make_model


@pytest.mark.parametrize("policy", ["qllm2", "priority-layered"])
def test_a_storm_gives_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    wanted, _, _ = storm(policy)
    fakes: list[FakeCuda] = []
    on_device(monkeypatch, fakes)
    found, stats, engine = storm(policy)
    assert found == wanted
    assert len(fakes[0].replays) > 5
    assert stats["expert_bytes"] > 0
    assert "graphs" in engine._client.info.kernels["stages"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    with pytest.raises(ConfigError, match="device='cuda': torch sees no CUDA device"):
        QLLMEngine.from_pretrained("tiny", device="cuda")
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"  # set before torch is asked


@pytest.mark.parametrize("name", ["cuda:1", "cuda:7"])
def test_another_device_than_the_first_is_refused_with_what_to_do(name: str) -> None:
    index = name[-1]
    with pytest.raises(ConfigError, match=f"'{name}'.*CUDA_VISIBLE_DEVICES={index}"):
        QLLMEngine.from_pretrained("tiny", device=name)


def test_an_error_after_which_cuda_answers_no_more_is_a_fault_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cuda_runner(make_model("mixtral"), num_pages=8).backend
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert backend.fault(error) is None, "a CPU stands in for the device: nothing stays"
    monkeypatch.setattr(backend, "_on_cuda", True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    assert backend.fault(error) is None, "the device still answers"

    def gone(device: torch.device) -> None:
        raise error

    monkeypatch.setattr("torch.cuda.synchronize", gone)
    assert "lost (RuntimeError: CUDA error: an illegal" in str(backend.fault(error))


def test_a_model_on_cuda_gets_the_device_runner_and_no_level_two() -> None:
    class OnCuda:
        device = torch.device("cuda")

    with pytest.raises(ConfigError, match="batch-invariant"):
        build.make_runner(OnCuda(), EngineConfig(exactness="batch-invariant"))


def test_stages_hold_the_longest_sequence_that_the_shape_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The length comes from the shape alone: a config leaves out what dynamic NTK adds."""
    model = make_model("mixtral")

    class OnCuda:
        device = torch.device("cuda")

    def make(_: OnCuda, **how: Any) -> TorchRunner:
        return cuda_runner(model, **{**how, "graphs": FakeCuda(), "buckets": BUCKETS})

    monkeypatch.setattr("qllm.cuda.backend.cuda_runner", make)
    config = EngineConfig(max_num_seqs=2, max_kv_tokens=1 << 16)
    runner = build.make_runner(OnCuda(), config)
    assert runner.backend.stages is not None
    longest = runner.backend.stages.lanes[True].max_pages * config.block_size
    assert 0 <= longest - runner.shape.max_position < config.block_size
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_a_storm_is_repeatable(dtype: str) -> None:
    model = make_model("mixtral", DTYPES[dtype]).cuda()
    runs = []
    for _ in range(2):
        with QLLMEngine.from_model(model, threads=1, max_num_seqs=8, max_kv_tokens=4096) as engine:
            alone = [
                engine.submit([i, i + 1, i + 2] * 9, "BE", 8, sampling=SAMPLING).result(300)
                for i in range(4)
            ]
            runs.append([r.token_ids for r in alone])
    assert runs[0] == runs[1]


@pytest.mark.gpu
def test_on_a_gpu_serving_takes_no_memory_from_the_driver() -> None:
    """Every grain, class and size within the limits of an engine that has only just started."""
    model = make_model("mixtral", DTYPES["bf16"]).cuda()
    with QLLMEngine.from_model(
        model, policy="qllm2", max_num_seqs=8, max_kv_tokens=4096, max_step_tokens=256
    ) as engine:
        engine.submit([1, 2, 3], "LS", 2, sampling=SAMPLING).result(300)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        handles = [
            engine.submit([i + 1] * (7 + 60 * (i % 4)), "LS" if i % 3 == 0 else "BE", 8)
            for i in range(24)
        ]
        for handle in handles:
            handle.result(300)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
