"""Quantised experts as a device keeps them, in the CPU's memory: loaded, run, refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralForCausalLM

from qllm.config import EngineConfig
from qllm.cuda.backend import cuda_runner
from qllm.engine.build import refuse_rounding
from qllm.errors import ConfigError, ModelError
from qllm.kernels.quantised import Quantised
from qllm.models.folders import weight_files
from qllm.models.loader import load
from qllm.models.weights import streaming
from qllm.models.weights.checkpoint import Shards, checkpoint_in
from qllm.models.weights.formats.int32 import awq
from qllm.models.weights.formats.layout import PLAIN
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts, all_quantised
from qllm.models.weights.quantised_weights import DeviceWeights
from qllm.runner import conformance
from qllm.types import Grain
from tests.support import published
from tests.support.captured import NUM_PAGES, forget, sampling_of, schedule
from tests.support.device_weights import HERE, answer_of, on_device
from tests.support.families import DTYPES, make_model


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
        pytest.param("mixtral", "mxfp4", "triton", marks=pytest.mark.slow),  # interpreted
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


@pytest.mark.parametrize("rounding", [None, "int4"])
def test_experts_are_kept_on_cuda(
    rounding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that is seen without one: the rest is put there by transformers."""
    cuda, asked = torch.device("cuda"), []

    def room(num: int, like: Quantised, device: torch.device) -> DeviceWeights:
        asked.append(device)
        return DeviceWeights(num, like, HERE)

    class Here:
        def _from_config(self, *args: Any, **how: Any) -> Any:
            return MixtralForCausalLM._from_config(*args, **how)

        def from_pretrained(self, *args: Any, device_map: Any, **how: Any) -> Any:
            assert device_map == {"": cuda}
            return MixtralForCausalLM.from_pretrained(*args, **how)

    monkeypatch.setattr(streaming, "DeviceWeights", room)
    folder = saved("mixtral", tmp_path / "plain")
    if rounding is None:
        folder, _ = published.publish(folder, "awq", tmp_path)
    form = PLAIN if rounding else awq({"bits": 4, "group_size": published.GROUP})
    opened, _ = checkpoint_in("it", Shards(weight_files(folder)), form)
    config = MixtralForCausalLM.config_class.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    given = Here(), config, opened, torch.bfloat16, cuda, rounding
    model, info, outcome = streaming.stream(*given)
    layers = config.num_hidden_layers
    assert asked == [cuda] * (2 * layers)
    assert outcome.kept == ["u4 g64+u4 g48" if rounding else "u4 g16"] * layers
    assert outcome.linears == []  # they are expanded, and it is said
    assert (outcome.expanded > 0) == (rounding is None)
    assert not info["missing_keys"]
    assert len(all_quantised(model)) == layers


KEPT = ["mxfp4", *(form for form in published.FORMATS if form != "gptq-act-order")]
PUBLISHED = {"mxfp4": "gpt_oss", "fp8": "deepseek_v3", "awq": "mixtral"}
"""Format -> family; the others are Qwen3."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", KEPT)
def test_what_is_published_computes_the_bits_of_its_values(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a checkpoint of the values that the kernels of bf16 read, in the layout they have."""
    plain = saved(PUBLISHED.get(form, "qwen3_moe"), tmp_path / "plain")
    folder, values = published.publish(plain, form, tmp_path)
    kept, plain = (on_device(where, "auto", monkeypatch) for where in (folder, values))
    assert torch.equal(answer_of(kept, packed=True), answer_of(plain, packed=False))


def test_bytes_read_are_those_of_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device(saved("mixtral", tmp_path), "int4", monkeypatch)
    [held, *_] = all_quantised(model).values()
    runner = cuda_runner(model, num_pages=NUM_PAGES, page_size=4, graphs=False)
    experts = runner.backend.layers.experts[0]
    assert experts.weights.bytes_per_expert * experts.weights.num_experts == held.num_bytes
    runner.close()


def test_bytes_read_are_those_of_each_layer_and_grow_past_31_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with one plain expert is expanded; 2^31 experts are read in a few hours."""
    plain = saved("mixtral", tmp_path / "plain")
    others = [(r"layers\.1\..*experts\.2\.w2", _plain)]
    folder, _ = published.publish(plain, "awq", tmp_path, others=others)
    model = on_device(folder, "auto", monkeypatch)
    runner = cuda_runner(model, num_pages=NUM_PAGES, page_size=4, graphs=False)
    layers = runner.backend.layers
    sizes = [e.weights.bytes_per_expert for e in layers.experts]
    assert len(set(sizes)) == 2
    runner.backend.layers.forget_bytes()
    for experts, times in zip(layers.experts, (2, 3, 5, 7), strict=False):
        x = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 1]])
        for _ in range(times):
            experts.run(x, ids, torch.ones(1, 2), torch.tensor([1]))
    read = 2 * sum(size * times for size, times in zip(sizes, (2, 3, 5, 7), strict=False))
    assert runner.expert_bytes == read
    for experts in layers.experts[:2]:
        experts.hits.fill_(2**31 - 1)
        experts.run(x, ids, torch.ones(1, 2), torch.tensor([1]))
    assert runner.expert_bytes == (2**31 + 1) * sum(set(sizes))
    layers.forget_bytes()
    assert runner.expert_bytes == 0
    runner.close()


def _plain(n: int, k: int, made: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    weight = torch.randn(n, k, generator=made).bfloat16()
    return {".weight": weight}, weight


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
    with pytest.raises(ModelError, match=r"not a number|is inf"):
        weights.take(1, [[_weight(bad, scale)]])
    assert torch.equal(weights.values(0), _weight(good, 2.0).dequantised())


@pytest.mark.parametrize("scale", [2.0**101, -(2.0**101), 2.0**-101, float("nan")])
def test_scales_that_the_kernels_of_a_cpu_refuse_are_refused(scale: float) -> None:
    """448 times 2^127 is no number, and beyond the last input it would be multiplied by zero."""
    codes = torch.ones(2, 4, dtype=torch.uint8)
    weights = DeviceWeights(1, _weight(codes, 1.0), HERE)
    for worth in (0.0, 2.0**100, -(2.0**-100)):
        weights.take(0, [[_weight(codes, worth)]])
    with pytest.raises(ModelError, match=r"a scale or offset is .* 2\^100 are allowed"):
        weights.take(0, [[_weight(codes, scale)]])
    kept = Quantised("i8", codes.view(torch.int8), torch.ones(2, 1), torch.ones(2, 1), 4)
    weights = DeviceWeights(1, kept, HERE)
    with pytest.raises(ModelError, match="a scale or offset is"):
        weights.take(0, [[kept._replace(offset_NG=torch.full((2, 1), scale))]])


def test_an_expert_of_another_size_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output would be copied to all others."""
    folder, _ = published.publish(saved("mixtral", tmp_path / "plain"), "float8", tmp_path)
    stem = "model.layers.1.block_sparse_moe.experts.2.w2"
    if not any(name.startswith(stem) for name in load_file(folder / "model.safetensors")):
        stem = "model.layers.1.mlp.experts.2.down_proj"
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(f"{stem}.")]:
        tensors[name] = tensors[name].view(torch.uint8)[:1].clone().view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{stem}.*: .* one is \(1, .*others of its stack"):
        on_device(folder, "auto", monkeypatch)


def test_what_only_a_cpu_computes_with_is_refused_before_a_weight_is_read() -> None:
    for value in ("auto", *ROUNDINGS):
        EngineConfig(expert_weights=value).check_place("thread", "cuda:0")
    for value in ("int8", "int8-g64"):
        config = EngineConfig(expert_weights=value)
        config.check_place("thread", "cpu")
        with pytest.raises(ConfigError, match=f"expert_weights='{value}' .* auto, int4, mxfp4"):
            config.check_place("process", "cuda")
    with pytest.raises(ConfigError, match="activations='int8' is for the CPU"):
        EngineConfig(activations="int8").check_place("thread", "cuda")


def test_experts_are_rounded_as_they_are_loaded_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_device(saved("mixtral", tmp_path), "int4", monkeypatch)
    for asked in ("auto", "int4"):
        refuse_rounding(model, asked)
    for other, asked in ((model, "mxfp4"), (model, "int8"), (make_model("mixtral"), "int4")):
        with pytest.raises(ConfigError, match=f"expert_weights='{asked}': on CUDA .* int4 or mx"):
            refuse_rounding(other, asked)
