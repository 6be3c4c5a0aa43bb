"""Quantised checkpoints: expanded and named, or refused by name; never served as garbage."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from qllm.models.loader import load
from qllm.models.quantised import Stored, refuse_integers
from qllm.models.unsafe import refuse_unsafe

FP8 = torch.float8_e4m3fn
BLOCK = 8
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in float8 with a scale per block, as DeepSeek stores it; the last block is cut."""
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    whole = (blocks / scale[:, None, :, None]).view(padded.shape)
    return whole[:rows, :columns].to(FP8).contiguous(), scale


def is_linear(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and "layers" in name and "proj" in name


def to_modelopt(tensors: dict[str, Tensor]) -> None:
    for name, weight in list(tensors.items()):
        if is_linear(name, weight):
            tensors[name], scale = scaled(weight)
            tensors[name.replace("weight", "weight_scale")] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)


def to_blocks(tensors: dict[str, Tensor]) -> None:
    for name, weight in list(tensors.items()):
        if is_linear(name, weight):
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(weight)


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
    assert load(folder).expanded is None


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_float8_without_scales_is_refused(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(dtype)}))
    with pytest.raises(ModelError, match=rf"has 1 tensors of 8 bits.*{WEIGHT} \(F8_E"):
        load(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "hqq", "torchao", "new"])
def test_methods_that_are_not_expanded_are_refused(folder: Path, method: str) -> None:
    configure(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=rf"quantised with '{method}'.*expanded.*fp8, mxfp4"):
        load(folder)


def test_bitsandbytes_is_refused(folder: Path) -> None:
    configure(folder, quantization_config={"load_in_8bit": True})
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


# -- what transformers expands


def block_fp8(folder: Path) -> None:
    change(folder, to_blocks)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    configure(folder, quantization_config={**said, "weight_block_size": [BLOCK, BLOCK]})


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and its checkpoint in block FP8."""
    model = make_model("deepseek_v3", torch.bfloat16)
    folder = saved(model, tmp_path_factory.mktemp("deepseek"))
    block_fp8(folder)
    return model, folder


def test_block_fp8_is_expanded_and_named(
    deepseek: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = deepseek
    with caplog.at_level(logging.WARNING, "qllm"):
        loaded = load(folder)
    assert loaded.expanded is not None
    stored = (folder / "model.safetensors").stat().st_size / 1e6
    now = sum(2 * p.numel() for p in loaded.model.parameters()) / 1e6
    assert loaded.expanded == f"{stored:.1f} MB of fp8 expanded to {now:.1f} MB of bfloat16"
    assert loaded.expanded in caplog.text
    before = dict(model.named_parameters())
    for name, weight in loaded.model.named_parameters():
        assert weight.dtype is torch.bfloat16
        error = (weight - before[name]).abs().max() / before[name].abs().max()
        assert error < 2**-4, name  # half a step of float8 with 3 bits of mantissa


def test_an_engine_says_what_was_expanded(deepseek: tuple[Any, Path], plain: Path) -> None:
    with QLLMEngine.from_pretrained(deepseek[1], run_in="thread", threads=1) as engine:
        assert "of fp8 expanded to" in engine.kernels["weights"]
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        assert (
            len(engine.submit([1, 2, 3], sampling=greedy, max_tokens=2).result(60).token_ids) == 2
        )
    with QLLMEngine.from_pretrained(plain, run_in="thread", threads=1) as engine:
        assert engine.kernels["weights"] == "as they were stored"


def test_a_float8_weight_that_lost_its_scales_is_refused(
    deepseek: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(deepseek[1], tmp_path / "model"))
    gone = "model.layers.0.self_attn.o_proj.weight"
    change(folder, lambda tensors: tensors.pop(f"{gone}_scale_inv"))
    with pytest.raises(ModelError, match=rf"has 1 tensors.*no {gone}_scale_inv"):
        load(folder)


def test_blocks_that_transformers_would_misplace_are_refused(tmp_path: Path) -> None:
    """24 rows in blocks of 16: transformers 5.23 takes two blocks of 12, without a word."""
    folder = saved(make_model("deepseek_v3", torch.bfloat16), tmp_path)
    block_fp8(folder)
    name = "model.layers.0.self_attn.q_a_proj.weight"

    def coarser(tensors: dict[str, Tensor]) -> None:
        assert tensors[name].shape[0] == 24
        tensors[f"{name}_scale_inv"] = torch.ones(2, tensors[name].shape[1] // BLOCK)

    change(folder, coarser)
    with pytest.raises(ModelError, match=rf"{name} of shape \(24, 64\) is no whole number"):
        load(folder)


def test_mxfp4_is_expanded_and_named(tmp_path: Path) -> None:
    model = make_model("gpt_oss", torch.bfloat16)
    folder = saved(model, tmp_path)
    expected: dict[str, Tensor] = {}

    def pack(tensors: dict[str, Tensor]) -> None:
        made = torch.Generator().manual_seed(0)
        for name in [
            n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
        ]:
            num, inner, outer = tensors.pop(name).shape
            codes = torch.randint(16, (num, outer, inner), generator=made, dtype=torch.uint8)
            scales = torch.randint(120, 128, (num, outer, inner // 32), generator=made)
            pairs = codes.view(num, outer, inner // 32, 16, 2)
            tensors[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
            tensors[f"{name}_scales"] = scales.to(torch.uint8)
            values = torch.tensor([*FP4, *(-x for x in FP4)])[codes.long()]
            factors = torch.exp2(scales - 127.0).repeat_interleave(32, -1)
            expected[name] = (values * factors).transpose(1, 2).to(torch.bfloat16)

    change(folder, pack)
    configure(folder, quantization_config={"quant_method": "mxfp4"})
    loaded = load(folder)
    assert loaded.expanded is not None
    assert "of mxfp4 expanded to" in loaded.expanded
    found = dict(loaded.model.named_parameters())
    assert expected
    assert all(torch.equal(found[name], values) for name, values in expected.items())


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
