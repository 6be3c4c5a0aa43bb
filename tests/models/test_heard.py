"""Forward hooks of a user: parts that have them are computed by their own modules, others named."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.cuda.backend import cuda_runner
from qllm.errors import ModelError
from qllm.models.discover import discover
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.types import Grain
from tests.support.captured import BUCKETS, GREEDY, NUM_PAGES, PROMPTS, Driver, schedule
from tests.support.fake_cuda import FakeCuda
from tests.support.families import make_model

LAYER = "model.layers.2"
PARTS = [
    ("mixtral", "self_attn.q_proj"),
    ("qwen3_moe", "self_attn.k_norm"),
    ("mixtral", "self_attn"),
    ("mixtral", "mlp.gate"),
    ("qwen2_moe", "mlp.shared_expert.up_proj"),
    ("qwen2_moe", "mlp.shared_expert_gate"),
    ("mixtral", "post_attention_layernorm"),
    ("mixtral", "input_layernorm"),
]


def distort(module: Any, args: Any, out: Any) -> Any:
    """Change the output of a module, of a router the weights, so much that tokens change."""
    if isinstance(out, Tensor):
        return out * -20.0
    at = 1 if len(out) == 3 else 0
    return (*out[:at], out[at] * -20.0, *out[at + 1 :])


def hooked(family: str, path: str) -> Any:
    model = make_model(family)
    model.get_submodule(f"{LAYER}.{path}").register_forward_hook(distort)
    return model


def on_device(model: Any, graphs: Any = False) -> TorchRunner:
    return cuda_runner(
        model, num_pages=NUM_PAGES, page_size=4, max_num_seqs=4, max_total_tokens=96,
        graphs=graphs, buckets=BUCKETS, layers_per_stage=1,
    )  # fmt: skip


def tokens(runner: TorchRunner) -> dict[int, list[int]]:
    try:
        return schedule(runner, GREEDY, Grain.LAYER)
    finally:
        runner.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "path"), PARTS)
def test_what_a_hook_changes_is_changed_on_a_device_too(family: str, path: str) -> None:
    def reference(model: Any) -> dict[int, list[int]]:
        return tokens(cpu_runner(model, max_segment_ms=float("inf"), kernels="reference"))

    wanted = reference(hooked(family, path))
    assert wanted != reference(make_model(family))
    assert tokens(on_device(hooked(family, path))) == wanted
    assert tokens(on_device(hooked(family, path), FakeCuda())) == wanted


@pytest.mark.parametrize(("family", "path"), [*PARTS, ("deepseek_v3", "self_attn.kv_b_proj")])
def test_our_kernels_leave_a_part_with_a_hook_to_its_modules(
    family: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, rows = make_model(family).bfloat16(), []
    model.get_submodule(f"{LAYER}.{path}").register_forward_hook(
        lambda module, args, out: rows.append(out), prepend=True
    )
    with caplog.at_level(logging.WARNING):
        runner = cpu_runner(model, max_segment_ms=float("inf"))
    driver = Driver(runner)
    driver.add(0, PROMPTS[1])
    driver.sweep([driver.row(0)])
    assert len(rows) == 1
    assert not [record for record in caplog.records if "never called" in record.message]
    runner.close()


def test_hooks_that_nothing_calls_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("mixtral")
    for path in ("", "lm_head", LAYER, f"{LAYER}.mlp", f"{LAYER}.mlp.experts", "model.norm"):
        model.get_submodule(path).register_forward_hook(distort)
    with caplog.at_level(logging.WARNING):
        cpu_runner(model, max_segment_ms=float("inf"), kernels="reference").close()
    said = [record.getMessage() for record in caplog.records]
    of = f"MixtralForCausalLM, {LAYER}, {LAYER}.mlp, {LAYER}.mlp.experts, lm_head"
    assert [text for text in said if text.startswith(f"hooks on {of} are never called")], said


def test_a_hook_that_no_device_kernel_can_call_is_refused() -> None:
    model = make_model("deepseek_v3")
    attn: Any = discover(model).layers[2].self_attn
    attn.kv_b_proj.register_forward_hook(distort)
    with pytest.raises(ModelError, match="layer 2: a hook listens to kv_b_proj"), torch.no_grad():
        on_device(model)
