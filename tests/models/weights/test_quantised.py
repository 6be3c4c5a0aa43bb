"""Quantised checkpoints that are not read: refused by name, never served as garbage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from qllm import QLLMEngine
from qllm.errors import ModelError
from qllm.models.loader import load
from qllm.models.unsafe import refuse_unsafe
from qllm.models.weights.formats.layout import Stored
from qllm.models.weights.quantised import refuse_integers
from tests.support.families import make_model

FP8 = torch.float8_e4m3fn
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(make_model("qwen3_moe", torch.bfloat16), tmp_path_factory.mktemp("plain"))


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


def change(folder: Path, change_tensors: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in float8 with one scale, as ModelOpt stores it."""
    scale = weight.float().abs().max() / 448
    return (weight.float() / scale).to(FP8), scale


def is_linear(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and "layers" in name and "proj" in name


def to_modelopt(tensors: dict[str, Tensor]) -> None:
    for name, weight in list(tensors.items()):
        if is_linear(name, weight):
            tensors[name], scale = scaled(weight)
            tensors[name.replace("weight", "weight_scale")] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BESIDE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


@pytest.mark.parametrize("said", ["nowhere", "beside", "config", "config without a method"])
def test_float8_of_modelopt_is_refused_by_name(folder: Path, said: str) -> None:
    change(folder, to_modelopt)
    names = r"tensors of 8 bits or fewer.*layers\.0\..*F8_E4M3"
    if said == "beside":
        (folder / "hf_quant_config.json").write_text(json.dumps(BESIDE))
        names = "quantised with 'modelopt FP8'"
    elif said == "config":
        configure(folder, quantization_config=MODELOPT)
        names = "quantised with 'modelopt'"
    elif said == "config without a method":
        configure(folder, quantization_config={"quant_algo": "FP8"})
        names = "quantised with 'FP8'"
    with pytest.raises(ModelError, match=names):
        load(folder)


def test_modelopt_that_quantised_no_weights_loads(folder: Path) -> None:
    nothing = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(nothing))
    assert load(folder).weights is None


@pytest.mark.parametrize(
    ("beside", "wrong"),
    [
        ([], "is not a JSON object"),
        ({"quantization": ["FP8"]}, "says quantization=.*must be an object"),
        ({"quantization": "FP8"}, "says quantization='FP8', which must be an object"),
        ({"producer": "me", **{"quantization": {"quant_algo": "FP8"}}}, "says producer='me'"),
        ({"quantization": {"quant_algo": 7}}, "quantised with 'hf_quant_config.json 7'"),
    ],
)
def test_odd_words_of_modelopt_are_refused(folder: Path, beside: object, wrong: str) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(ModelError, match=wrong):
        load(folder)


@pytest.mark.parametrize("how", ["auto", "int4"])
@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float64, r"dtype that is not read, first {} \(F64\); read are F32, F16, BF16"),
        (torch.complex64, r"dtype that is not read, first {} \(C64\); read are F32, F16, BF16"),
        (torch.bool, r"integer tensors .* first {} \(BOOL\)"),
    ],
)
def test_a_weight_of_a_dtype_that_is_not_read_is_refused(
    folder: Path, how: str, dtype: torch.dtype, said: str
) -> None:
    change(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(dtype)}))
    with pytest.raises(ModelError, match=said.format(WEIGHT)):
        load(folder, expert_weights=how)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_float8_without_scales_is_refused(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(dtype)}))
    with pytest.raises(ModelError, match=rf"has 1 tensors of 8 bits.*{WEIGHT} \(F8_E"):
        load(folder)


@pytest.mark.parametrize(
    "method", ["hqq", "eetq", "aqlm", "exl2", "quanto", "torchao", "bitsandbytes", "new"]
)
def test_methods_that_are_not_read_are_refused(folder: Path, method: str) -> None:
    configure(folder, quantization_config={"quant_method": method, "bits": 4})
    read = "read are mxfp4, fp8, awq, gptq, compressed-tensors and GGUF files"
    with pytest.raises(ModelError, match=rf"quantised with '{method}'.*{read}"):
        load(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_is_refused(folder: Path, bits: int) -> None:
    configure(folder, quantization_config={f"load_in_{bits}bit": True})
    with pytest.raises(ModelError, match="quantised with 'bitsandbytes'"):
        load(folder)


def test_integers_in_place_of_floats_are_refused(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(torch.int8)}))
    with pytest.raises(ModelError, match=rf"has 1 integer tensors.*{WEIGHT} \(I8\)"):
        load(folder)


def test_integers_that_a_model_has_itself_are_known() -> None:
    model = make_model("qwen3_moe")
    model.model.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    own = Stored("I64", (1,))
    refuse_integers(
        model, "m", {"model.steps": own, "steps": own, "lm_head.weight": own._replace(dtype="F32")}
    )
    with pytest.raises(ModelError, match=r"model\.stops \(I64\)"):
        refuse_integers(model, "m", {"model.stops": own})


def test_unexpected_keys_are_refused_by_name(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"1 unexpected keys, first model\.layers\.0\.mlp\.extra"):
        load(folder)


def test_keys_that_transformers_ignores_stay_harmless(folder: Path, tmp_path: Path) -> None:
    inv_freq = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)}
    change(folder, lambda tensors: tensors.update(inv_freq))
    load(folder)
    deepseek = saved(make_model("deepseek_v3", torch.bfloat16), tmp_path / "deepseek")
    predicts = {"model.layers.61.eh_proj.weight": torch.ones(4, 4)}  # the multi-token head
    change(deepseek, lambda tensors: tensors.update(predicts))
    load(deepseek)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=32, vocab_size=32))
    masks = {"gpt_neox.layers.0.attention.bias": torch.ones(2, 2, dtype=torch.uint8)}
    change(saved(neox, tmp_path / "neox"), lambda tensors: tensors.update(masks))
    load(tmp_path / "neox")


# -- models that are in memory already


class Packed(Tensor):
    """Looks like bf16 from outside, as torchao's tensors do."""


def as_int8(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)


def as_float8(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.ones(4, 4).to(FP8), requires_grad=False)


def as_subclass(model: Any) -> None:
    weight = model.lm_head.weight.detach().as_subclass(Packed)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)


def as_buffer(model: Any) -> None:
    model.lm_head.register_buffer("packed", torch.ones(2).to(FP8))


def as_flag(model: Any) -> None:
    model.is_quantized, model.quantization_method = True, "gptq"


@pytest.mark.parametrize(
    ("quantise", "reason"),
    [
        (as_int8, r"parameter lm_head\.weight is quantised \(torch\.int8\)"),
        (as_float8, r"parameter lm_head\.weight is quantised \(torch\.float8_e4m3fn\)"),
        (as_subclass, r"parameter lm_head\.weight is quantised \(Packed\)"),
        (as_buffer, r"buffer lm_head\.packed is quantised \(torch\.float8_e4m3fn\)"),
        (as_flag, "quantised with gptq"),
    ],
)
def test_a_quantised_model_in_memory_is_refused(
    quantise: Callable[[Any], None], reason: str
) -> None:
    model = make_model("mixtral", torch.bfloat16)
    refuse_unsafe(model)
    quantise(model)
    with pytest.raises(ModelError, match=reason):
        QLLMEngine.from_model(model, threads=1)
