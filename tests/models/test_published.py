"""Quantised checkpoints as they are published: loaded, kept packed, and computed with exactly.

The other side of every comparison is a checkpoint in bf16 that holds the values of the quantised
one (`tests/support/published.py`): it takes the path that was there before.
"""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from qllm import QLLMEngine, SamplingParams
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights.quantised_experts import all_quantised
from qllm.models.weights.quantised_linears import all_linears, weight_bytes
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.sim.presets import model_spec, preset, spec_of
from tests.support import published
from tests.support.families import make_model
from tests.support.loads import Live, bytes_of_layer
from tests.support.programs import forward, logits_of, prompt_of

assert cpu.MISSING is None, cpu.MISSING
FAMILY = {"mxfp4": "gpt_oss", "fp8": "deepseek_v3", "awq": "mixtral", "gptq": "qwen2_moe"}
"""Format -> family that is published so; the others here are Qwen3."""
ALL = ("mxfp4", *published.FORMATS)
Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Makes the two folders of a format, once."""
    found: dict[str, tuple[Path, Path]] = {}

    def both(form: str) -> tuple[Path, Path]:
        if form not in found:
            place = tmp_path_factory.mktemp(form)
            family = FAMILY.get(form, "qwen3_moe")
            make_model(family, torch.bfloat16).save_pretrained(place / "plain")
            found[form] = published.publish(place / "plain", form, place)
        return found[form]

    return both


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    assert len(found) == len(wanted) > 1
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# -- the law


@pytest.mark.parametrize("form", ALL)
def test_packed_weights_compute_the_bits_of_bf16(folders: Folders, form: str) -> None:
    quantised, values = folders(form)
    runner = cpu_runner(load(quantised).model)
    conformance.check(runner.model, runner)
    kind = published.FORMATS[form][2] if form != "mxfp4" else "e2m1"
    assert (f" {kind} g" in runner.names["experts"]) == (kind != "")
    assert runner.names["sweep"].startswith("3 of 3")
    linears = all_linears(runner.model)
    named = {n for n, m in runner.model.named_modules() if type(m) is torch.nn.Linear}
    quantised_too = {n for n in named if published.LINEAR.search(n)}
    stay = form not in ("mxfp4", "gptq-act-order")
    assert set(linears) == (quantised_too if stay else set())
    assert {x.kind.split()[0] for x in linears.values()} == ({kind} if stay else set())
    plain = cpu_runner(load(values).model)
    ids = prompt_of(9)
    assert same(logits_of(runner, ids), logits_of(plain, ids))


@pytest.mark.parametrize("form", [form for form in ALL if form != "gptq-act-order"])
def test_the_models_own_forward_computes_the_bits_of_bf16(folders: Folders, form: str) -> None:
    quantised, values = (load(folder).model for folder in folders(form))
    ids = prompt_of(9)
    wanted = forward(values, ids)
    assert same(forward(quantised, ids), wanted)
    runner = cpu_runner(quantised)  # packs them; afterwards they are read from there
    assert same(forward(quantised, ids), wanted)
    runner.close()
    assert same(forward(quantised, ids), wanted)
    again = cpu_runner(quantised)
    plain = cpu_runner(values)
    assert same(logits_of(again, ids), logits_of(plain, ids))


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "awq"])
@pytest.mark.parametrize("settings", [{"kernels": "reference"}, {"batch_invariant": True}])
def test_other_ways_to_compute_have_their_bits(
    folders: Folders, form: str, settings: dict[str, Any]
) -> None:
    quantised, values = (load(folder).model for folder in folders(form))
    runner = cpu_runner(quantised, **settings)
    if "kernels" in settings:
        assert runner.names["experts"].startswith("torch mm, dequantised")
    ids = prompt_of(9)
    assert same(logits_of(runner, ids), logits_of(cpu_runner(values, **settings), ids))


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_values_are_those_of_transformers(folders: Folders, form: str, tmp_path: Path) -> None:
    quantised, _ = folders(form)
    if form == "fp8":  # transformers wants whole blocks: 24 x 24 has none here
        published_block = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        quantised = Path(shutil.copytree(quantised, tmp_path / "model"))
        tensors = load_file(quantised / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            n, k = tensors[name.removesuffix("_scale_inv")].shape
            tensors[name] = torch.rand(n // 8, k // 8) * 0.002 + 0.0001
        save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
        published.configure(quantised, quantization_config=published_block)
    theirs = dict(
        AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16).named_parameters()
    )
    ours = load(quantised).model
    held, linears = all_quantised(ours), all_linears(ours)
    assert held
    assert bool(linears) == (form == "fp8")
    for name, parameter in ours.named_parameters():
        module, _, which = name.rpartition(".")
        if module in held and parameter.is_meta:
            found = [held[module].as_parameter(which, e) for e in range(len(parameter))]
            assert torch.equal(torch.stack(found), theirs[name]), name
        elif module in linears and which == "weight":
            assert parameter.is_meta
            assert torch.equal(linears[module].weight.dequantised(), theirs[name]), name
        else:
            assert torch.equal(parameter, theirs[name]), name


def test_an_engine_serves_a_published_checkpoint(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, values = folders("mxfp4")
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    tokens = []
    with caplog.at_level(logging.WARNING, "qllm"):
        for folder in (quantised, values):
            with QLLMEngine.from_pretrained(folder, run_in="thread", threads=1) as engine:
                tokens.append(engine.submit([1, 2, 3], sampling=greedy, max_tokens=6).result(300))
                if folder == quantised:
                    assert (
                        engine.kernels["weights"] == "mxfp4: experts of 3 layers kept as e2m1 g32"
                    )
                    assert engine.kernels["weights"] in caplog.text
                    assert engine.stats()["weight_bytes"] < weight_bytes(load(values).model)
                else:
                    assert engine.kernels["weights"] == "as they were stored"
    assert tokens[0].token_ids == tokens[1].token_ids


def test_what_is_expanded_is_said(folders: Folders) -> None:
    assert load(folders("fp8")[0]).weights == (
        "fp8: experts of 2 layers kept as e4m3 g24, 24 linear modules kept as e4m3 g24"
    )
    expanded = load(folders("fp8")[0], dtype="float32")
    assert expanded.weights == "fp8: 72 weights expanded to float32"
    assert all_quantised(expanded.model) == {}
    assert load(folders("gptq-act-order")[0]).weights.startswith("gptq: ")
    assert "kept" not in load(folders("gptq-act-order")[0]).weights


def test_experts_with_inputs_first_are_expanded_so(folders: Folders, tmp_path: Path) -> None:
    """gpt-oss: its square matrices would fit either way."""
    quantised, values = folders("mxfp4")
    expanded = dict(load(quantised, dtype="float32").model.named_parameters())
    wanted = dict(load(values, dtype="float32").model.named_parameters())
    down = "model.layers.0.mlp.experts.down_proj"
    assert wanted[down].shape[1] == wanted[down].shape[2]
    assert all(torch.equal(expanded[name], weight) for name, weight in wanted.items())
    folder = Path(shutil.copytree(values, tmp_path / "model"))

    def to_fp8(tensors: dict[str, Tensor]) -> None:
        tensors[down] = tensors[down].to(published.FP8)
        tensors[f"{down}_scale_inv"] = torch.ones(8, 1, 1)

    change(folder, to_fp8)
    published.configure(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"down_proj is a stack of fp8 .* inputs first"):
        load(folder)


def test_fp16_checkpoints_are_bf16_on_a_cpu(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("awq")[0], tmp_path / "model"))
    published.configure(folder, dtype="float16")
    assert load(folder).model.dtype is torch.bfloat16
    assert load(folder, dtype="float16").model.dtype is torch.float16


# -- layers that cannot stay quantised


def change(folder: Path, change_tensors: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_layer_with_one_plain_expert_is_expanded(folders: Folders, tmp_path: Path) -> None:
    quantised, values = (
        Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders("packed")
    )
    stem = "model.layers.0.mlp.experts.3.up_proj"
    plain = load_file(values / "model.safetensors")[f"{stem}.weight"]

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(stem)]:
            del tensors[name]
        tensors[f"{stem}.weight"] = plain

    change(quantised, restore)
    loaded = load(quantised)
    assert loaded.weights is not None
    assert "experts of 1 layers kept" in loaded.weights  # of two; the third is dense
    ids = prompt_of(9)
    assert same(
        logits_of(cpu_runner(loaded.model), ids), logits_of(cpu_runner(load(values).model), ids)
    )


def test_experts_with_scales_of_two_dtypes_stay_quantised(folders: Folders, tmp_path: Path) -> None:
    """A zero of 8 needs no fp32, another one does: they are alike all the same."""
    folder = Path(shutil.copytree(folders("gptq")[0], tmp_path / "model"))

    def make_symmetric(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if ".experts.2." in name and name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensors[name], 0x77777777)

    change(folder, make_symmetric)
    loaded = load(folder)
    assert loaded.weights is not None
    assert "experts of 2 layers kept as u4 g16" in loaded.weights


def test_codes_that_lost_their_scales_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("fp8")[0], tmp_path / "model"))
    gone = "model.layers.0.self_attn.o_proj.weight"
    change(folder, lambda tensors: tensors.pop(f"{gone}_scale_inv"))
    with pytest.raises(ModelError, match=rf"{gone} \(F8_E4M3\) is there without {gone}_scale_inv"):
        load(folder)


def test_experts_that_cannot_be_packed_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("awq")[0], tmp_path / "model"))

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "layers.1." in name and ".experts.5." in name and name.endswith("scales"):
                tensors[name][0, 0] = torch.nan

    change(folder, spoil)
    with pytest.raises(ModelError, match=r"cannot be packed: a scale or offset .* is nan"):
        load(folder)


def test_a_linear_module_of_another_size_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("fp8")[0], tmp_path / "changed")

    def cut(tensors: dict[str, Tensor]) -> None:
        name = next(key for key in tensors if key.endswith("1.self_attn.o_proj.weight"))
        outputs = len(tensors[name]) // 2
        tensors[name] = tensors[name][:outputs].clone()
        scales = tensors[f"{name}_scale_inv"]
        tensors[f"{name}_scale_inv"] = scales[: len(scales) // 2].clone()

    change(folder, cut)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.o_proj"):
        load(folder)


def test_a_missing_expert_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("awq")[0], tmp_path / "model"))

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name and ".experts.7." in name]:
            del tensors[name]

    change(folder, drop)
    with pytest.raises(ModelError, match=r"weights of model|does not fit its config"):
        load(folder)


# -- memory


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "awq", "packed"])
def test_no_more_is_in_memory_than_the_packed_model_and_a_layer(
    folders: Folders, live: Live, form: str
) -> None:
    folder = folders(form)[0]  # made before anything is counted
    with live:
        model = load(folder).model
    held = all_quantised(model)
    packed = sum(experts.num_bytes for experts in held.values())
    assert packed > 0
    assert live.now > 0
    assert live.most <= weight_bytes(model) + bytes_of_layer(model)
    codes = {
        w.stack.packed.data_ptr() for e in held.values() for w in e.weights.values() if w.stack
    }
    for _ in range(2):  # the second runner finds what the first one leaves
        runner = cpu_runner(model)
        used = [bank._entered() for bank in runner.backend.compute.banks if bank is not None]
        assert {x.packed.data_ptr() for one in used for x in (one._up, one._down)} == codes
        assert not any(
            bank._parameters for bank in runner.backend.compute.banks if bank is not None
        )
        runner.close()
    assert weight_bytes(load(folders(form)[1]).model) > weight_bytes(model) + 0.4 * packed


# -- rounded as they are loaded


@pytest.mark.parametrize("how", ["int4", "mxfp4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_bf16_checkpoint_is_rounded_as_it_is_read(tmp_path: Path, family: str, how: str) -> None:
    make_model(family, torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(tmp_path, expert_weights=how)
    kind = {"int4": "u4 g", "mxfp4": "e2m1 g32"}[how]
    assert loaded.weights is not None
    assert loaded.weights.startswith(f"{how}: experts of ")
    assert kind in loaded.weights
    runner = cpu_runner(loaded.model, expert_weights=how)
    conformance.check(runner.model, runner)
    assert runner.names["experts"].startswith(f"qllm {cpu.kind()} {kind}")
    ids = prompt_of(9)
    from_file = logits_of(runner, ids)
    in_memory = cpu_runner(load(tmp_path).model, expert_weights=how)
    assert same(logits_of(in_memory, ids), from_file)
    exact = logits_of(cpu_runner(load(tmp_path).model), ids)
    assert not torch.equal(from_file[0], exact[0])
    assert (from_file[0] - exact[0]).abs().max() < 0.6 * exact[0].abs().max()


def test_rounding_what_is_quantised_already_is_refused(folders: Folders) -> None:
    model = load(folders("awq")[0], expert_weights="int4").model
    with pytest.raises(ConfigError, match=r"quantised already \(u4 g16\); use 'auto'"):
        cpu_runner(model, expert_weights="int4")


def test_an_engine_rounds(tmp_path: Path) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    with QLLMEngine.from_pretrained(
        tmp_path, run_in="thread", threads=1, expert_weights="int4"
    ) as engine:
        assert "u4 g" in engine.kernels["experts"]
        assert engine.kernels["weights"].startswith("int4: experts of 3 layers kept as u4 g64")
    with QLLMEngine.from_pretrained(
        tmp_path, run_in="thread", threads=1, expert_weights="int8"
    ) as engine:
        assert engine.kernels["weights"] == "as they were stored, experts rounded to int8"


# -- names of kept KV, and of models


def test_a_format_and_its_codes_are_part_of_a_models_name(folders: Folders, tmp_path: Path) -> None:
    quantised, values = folders("fp8")
    names, digests = set(), set()  # a name is of a sample of bytes
    changed = Path(shutil.copytree(quantised, tmp_path / "model"))
    scaled = Path(shutil.copytree(quantised, tmp_path / "scaled"))
    first = "model.layers.1.mlp.experts.0.up_proj.weight"

    def flip(tensors: dict[str, Tensor]) -> None:
        codes = tensors[first].view(torch.uint8) ^ 1
        tensors[first] = codes.view(published.FP8)

    def scale(tensors: dict[str, Tensor]) -> None:
        found = re.compile(r"mlp\.experts\.\d+\.down_proj\.weight_scale_inv")
        tensors[max(filter(found.search, tensors))] *= 2  # of the last expert

    change(changed, flip)
    change(scaled, scale)
    for folder in (quantised, values, changed, scaled):
        model = load(folder).model
        digests.add(weights_digest(model))
        runner = cpu_runner(model)
        names.add(runner.fingerprint())
        runner.close()
    assert len(digests) == 4
    assert len(names) >= 3
    model = load(quantised).model
    assert weights_digest(model) in digests
    runner = cpu_runner(model)
    assert runner.fingerprint() in names
    runner.close()
    assert weights_digest(model) in digests  # whoever packed or ran it


# -- what `qllm plan` expects


def test_packed_experts_take_the_bytes_of_their_format() -> None:
    """gpt-oss is published in 13.8 GB: in memory scales are bf16, which makes 0.6 GB more."""
    assert model_spec("gpt-oss").weights == pytest.approx(20.9e9, rel=0.01)
    assert model_spec("gpt-oss").weight_bytes == pytest.approx(14.3e9, rel=0.01)
    plain, rounded = preset("h200", "mixtral"), preset("h200", "mixtral", "int4")
    assert rounded.expert_bytes / plain.expert_bytes == pytest.approx(4.5 / 16)
    assert rounded.max_kv_tokens > plain.max_kv_tokens
    assert rounded.step_ns(16, 0, 1000) < 0.5 * plain.step_ns(16, 0, 1000)
    assert preset("h100", "mixtral", "mxfp4").expert_bytes == rounded.expert_bytes
    with pytest.raises(ConfigError, match="quantised already"):
        preset("h100", "gpt-oss", "int4")


def _packed_in(inputs: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "group_size": inputs, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**method, "config_groups": groups}


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "mxfp4"}, 4.5),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        (_packed_in(128, symmetric=True), 4.125),
        (_packed_in(128, symmetric=False), 4.25),
    ],
)
def test_a_config_says_the_bits_of_its_experts(settings: dict[str, Any], bits: float) -> None:
    config = MixtralConfig(quantization_config=settings)
    assert spec_of(config, "mine").expert_bits == bits
    config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(ModelError, match="quantised with 'hqq'"):
        spec_of(config, "mine")
