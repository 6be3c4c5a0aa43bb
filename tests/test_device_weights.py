"""Quantised experts as a device keeps them, in the CPU's memory: loaded, run, refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DTYPES, make_model
from test_cuda_runner import NUM_PAGES, forget, sampling_of, schedule
from torch import Tensor

from qllm.cuda.backend import cuda_runner
from qllm.engine.build import refuse_rounding
from qllm.errors import ConfigError, ModelError
from qllm.kernels.quantised import Quantised
from qllm.models import streaming
from qllm.models.loader import load
from qllm.models.quantised_experts import WEIGHTS, QuantisedExperts, all_quantised
from qllm.models.quantised_weights import DeviceWeights
from qllm.runner import conformance
from qllm.types import Grain

HERE = torch.device("cpu")


def on_device(folder: Path, rounding: str, patch: pytest.MonkeyPatch) -> Any:
    """A model whose experts are as a device keeps them, and nothing else of it is quantised."""
    patch.setattr(streaming, "Weights", partial(DeviceWeights, device=HERE))
    patch.setattr(streaming, "staying", lambda *_: set())
    return load(folder, expert_weights=rounding).model


def saved(family: str, folder: Path) -> Path:
    make_model(family, DTYPES["bf16"]).save_pretrained(folder)
    return folder


def in_bf16(model: Any) -> Any:
    """The same with the values of its weights, as parameters."""
    for held in all_quantised(model).values():
        assert isinstance(held, QuantisedExperts)
        module = held._module
        with held.in_place():
            full = {name: module._parameters[name].data.clone() for name in WEIGHTS}
        del module.forward
        delattr(module, "qllm_quantised")
        for name, weight in full.items():
            module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("family", "rounding", "kernels"),
    [
        ("qwen3_moe", "int4", "torch"),
        ("gpt_oss", "mxfp4", "torch"),
        ("mixtral", "mxfp4", "triton"),
        ("deepseek_v3", "int4", "torch"),
    ],
)
def test_tokens_are_those_of_the_values(
    family: str, rounding: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of gates that alternate, shared experts, ranges of experts; and the start-up check."""
    folder = saved(family, tmp_path)
    found = []
    for change in (lambda model: model, in_bf16):
        model = change(on_device(folder, rounding, monkeypatch))
        runner = cuda_runner(
            model, num_pages=NUM_PAGES, page_size=4, max_num_seqs=4, max_total_tokens=96,
            graphs=False, kernels_name=kernels,
        )  # fmt: skip
        experts = [e for e in runner.backend.layers.experts if e is not None]
        assert all((e.weights.packed is not None) == (change is not in_bf16) for e in experts)
        conformance.check(model, runner)
        for grain in (Grain.STEP, Grain.EXPERT):
            found.append(schedule(runner, sampling_of(0.0), grain))
            forget(runner)
        runner.close()
    assert found[0] == found[1] == found[2] == found[3]


def test_bytes_read_are_those_of_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device(saved("mixtral", tmp_path), "int4", monkeypatch)
    [held, *_] = all_quantised(model).values()
    runner = cuda_runner(model, num_pages=NUM_PAGES, page_size=4, graphs=False)
    experts = runner.backend.layers.experts[0]
    assert experts.weights.bytes_per_expert * experts.weights.num_experts == held.num_bytes
    runner.close()


def test_weights_that_are_packed_for_a_cpu_are_refused(tmp_path: Path) -> None:
    model = load(saved("mixtral", tmp_path), expert_weights="int4").model
    with pytest.raises(ModelError, match="packed for the CPU; no device kernel"):
        cuda_runner(model, num_pages=NUM_PAGES, page_size=4, graphs=False)


def _weight(codes: Tensor, scale: float) -> Quantised:
    return Quantised("e4m3", codes.view(torch.float8_e4m3fn), torch.full((2, 1), scale), None, 4)


@pytest.mark.parametrize(("byte", "scale"), [(127, 1.0), (255, 1.0), (1, float("inf"))])
def test_what_is_no_number_is_refused(byte: int, scale: float) -> None:
    good = torch.ones(2, 4, dtype=torch.uint8)
    weights = DeviceWeights(2, _weight(good, 1.0), HERE)
    weights.take(0, [[_weight(good, 2.0)]])
    bad = good.clone()
    bad[1, 2] = byte
    with pytest.raises(ModelError, match=r"not a number|not finite"):
        weights.take(1, [[_weight(bad, scale)]])
    assert torch.equal(weights.values(0), _weight(good, 2.0).dequantised())


def test_experts_are_rounded_as_they_are_loaded_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_device(saved("mixtral", tmp_path), "int4", monkeypatch)
    for asked in ("auto", "int4"):
        refuse_rounding(model, asked)
    for other, asked in ((model, "mxfp4"), (model, "int8"), (make_model("mixtral"), "int4")):
        with pytest.raises(ConfigError, match=f"expert_weights='{asked}': on CUDA .* int4 or mx"):
            refuse_rounding(other, asked)
