"""Layers of known attention: launches, replayed kernels, and whose weights are whose."""

import interpret  # noqa: F401 - mends the interpreter
import pytest
import torch
from families import make_model
from test_cuda_runner import PROMPTS, Driver, Poll, captured_runner

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.scheduler.program import START
from qllm.types import Grain
from scripts import launches


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"])
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
            assert {"_attend", "_join", "_up", "_down", "_combine", "_sample"} <= names
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
        *(("gpt_oss", 12), ("phimoe", 13), ("olmoe", 14), ("qwen2_moe", 16)),
    ],
)
def test_a_layer_of_known_attention_is_few_launches(family: str, most: int) -> None:
    model = make_model(family)
    model.config.clip_qkv = None  # OLMoE here sets it, its released checkpoints do not
    for layer in launches.of_layers(model)[1:]:
        assert sum(layer.values()) <= most, layer


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
