"""Layers of known attention: launches, replayed kernels, and whose weights are whose."""

from typing import Any

import pytest
import torch

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.runner.cpu import cpu_runner
from qllm.scheduler.program import START
from qllm.types import Grain
from scripts import launches
from tests.support import interpret  # noqa: F401 - mends the interpreter
from tests.support.captured import PROMPTS, Driver, Poll, captured_runner, sampling_of, schedule
from tests.support.families import MAKERS, make_model
from tests.support.tiny_configs import tiny_model


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention divide a sequence in two: each part is a program that is interpreted."""
    monkeypatch.setattr("qllm.kernels.triton.attention.SPLITS", (2, 2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_captured_launches_of_kernels_give_the_tokens(family: str) -> None:
    """Padding, dead rows and the integers of lanes go through the real kernels, replayed."""
    drivers = []
    for name in ("torch", "triton"):
        buckets = [Bucket(2, False), Bucket(12, True)]
        runner, fake = captured_runner(
            family, kernels_name=name, buckets=buckets, layers_per_stage=2, max_total_tokens=16
        )
        if name == "triton":
            names = {op for graph in fake.graphs for op, *_ in graph.ops}
            assert {"_attend", "_join", "_up", "_down", "_combine", "_scan", "_weigh"} <= names
            assert ("_write_latents" in names) == (family == "deepseek_v3")
        driver = Driver(runner)
        for i in (0, 1):
            driver.add(i, PROMPTS[1][: 3 + i])
        driver.sweep([driver.row(0), driver.row(1)])
        program = driver.program([driver.row(0), driver.row(1)], Grain.LAYER)
        index = runner.run(program, START, Poll(p=1.0))
        runner.kill(program, 0)
        assert runner.run(program, index, Poll()) == program.end
        driver.finish(program)
        driver.sweep([driver.row(1)])
        assert len(fake.replays) == 4
        drivers.append(driver)
    assert drivers[0].tokens == drivers[1].tokens
    assert [len(tokens) for tokens in drivers[1].tokens.values()] == [1, 3]


@pytest.mark.parametrize(
    ("family", "most"),
    [
        *(("mixtral", 12), ("qwen3_moe", 12), ("granitemoe", 12)),
        *(("gpt_oss", 12), ("phimoe", 13), ("olmoe", 14), ("deepseek_v3", 15), ("qwen2_moe", 16)),
    ],
)
def test_a_layer_of_known_attention_is_few_launches(family: str, most: int) -> None:
    layers = launches.of_layers(make_model(family))[1:]  # the first one makes the pages
    assert max(sum(layer.values()) for layer in layers) == most, layers


@pytest.mark.parametrize(
    ("family", "most"), [("glm4_moe_lite", 15), ("dots1", 12), ("solar_open", 12), ("youtu", 14)]
)
def test_other_families_of_known_attention_are_few_launches_too(family: str, most: int) -> None:
    """MLA with experts and without; the router of DeepSeek behind attention over keys."""
    layers = launches.of_layers(tiny_model(family))[1:]
    assert max(sum(layer.values()) for layer in layers) == most, layers
    cpu = cpu_runner(tiny_model(family), max_segment_ms=float("inf"), kernels="reference")
    vocab = cpu.parts.lm_head.out_features
    prompts = [[i % vocab for i in ids] for ids in PROMPTS]
    wanted = schedule(cpu, sampling_of(0), Grain.STEP, prompts)
    how = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_total_tokens": 96}
    device = cuda_runner(tiny_model(family), **how, graphs=False)
    assert schedule(device, sampling_of(0), Grain.STEP, prompts) == wanted
    assert len({t for tokens in wanted.values() for t in tokens}) > 3


def test_queries_that_are_not_compressed_take_one_launch_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And two shared experts run beside the others as one does."""
    config, make = MAKERS["deepseek_v3"]

    def changed() -> Any:
        own = config()
        own.q_lora_rank, own.n_shared_experts, own.rope_interleave = None, 2, False
        return own

    monkeypatch.setitem(MAKERS, "deepseek_v3", (changed, make))
    layers = launches.of_layers(make_model("deepseek_v3"))[1:]
    assert max(sum(layer.values()) for layer in layers) == 14, layers
    cpu = cpu_runner(make_model("deepseek_v3"), max_segment_ms=float("inf"), kernels="reference")
    wanted = schedule(cpu, sampling_of(0), Grain.STEP)
    runner, _ = captured_runner("deepseek_v3", layers_per_stage=2)
    assert schedule(runner, sampling_of(0), Grain.STEP) == wanted


def test_the_modules_keep_weights_of_their_own_after_the_engine() -> None:
    model = make_model("qwen2_moe")
    before = {name: p.clone() for name, p in model.named_parameters()}
    runner = cuda_runner(model, num_pages=8, page_size=4, graphs=False)
    shared = model.model.layers[0].self_attn
    assert shared.q_proj.weight.untyped_storage().data_ptr() == (
        shared.k_proj.weight.untyped_storage().data_ptr()
    )
    runner.close()
    storages = [p.untyped_storage() for p in model.parameters()]
    assert all(s.nbytes() == p.nbytes for s, p in zip(storages, model.parameters(), strict=True))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
