"""Files, folders and models that cannot have experts in a file: each is refused by name."""

import errno
import json
import logging
import os
import threading
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qllm import block_file
from qllm.cuda.backend import cuda_runner
from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.models.weights import checkpoint, experts_apart, experts_in_file
from qllm.models.weights.expert_source import ExpertSource
from qllm.models.weights.places import Place
from tests.support import published
from tests.support.experts_in_file import (
    EXPERTS_IN_FILE,
    flip_weight,
    loaded,
    saved,
)
from tests.support.families import make_model
from tests.support.programs import forward, prompt_of
from tests.support.streaming import STEM, change, made
from tests.support.tiny_configs import tiny_model

assert cpu.MISSING is None, cpu.MISSING
A_WEIGHT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


# -- files that do not fit


@pytest.mark.parametrize("changed", ["weights", "expert_weights", "kernels", "quantization"])
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    folder = made(tmp_path, "mixtral", "gptq") if changed == "quantization" else saved(tmp_path)
    _, file = loaded(folder)
    before, how = file.path.read_bytes(), "auto"
    if changed == "weights":
        flip_weight(folder, A_WEIGHT)
    elif changed == "expert_weights":
        how = "int4"
    elif changed == "kernels":
        monkeypatch.setattr(cpu, "_kind", "another kind")
    else:
        _, settings, _ = published.FORMATS["gptq-v2"]
        published.configure(folder, quantization_config=settings)
    said = f"its {changed} is .*"
    if changed in ("weights", "quantization"):
        said = "it was made from other weights"
    with pytest.raises(ConfigError, match=rf"cannot be used: {said}; .*delete this one"):
        loaded(folder, how)
    assert file.path.read_bytes() == before


def test_weights_that_were_changed_in_place_are_others(tmp_path: Path) -> None:
    _, file = loaded(saved(tmp_path))
    path = tmp_path / "model.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(ConfigError, match="it was made from other weights"):
        loaded(tmp_path)
    assert file.path.exists()


def test_a_file_of_other_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of such a file is right only if the config was changed."""
    monkeypatch.setattr(experts_in_file, "digest_of", lambda _: "same")
    loaded(saved(tmp_path / "a"), path=tmp_path / "one.experts")
    with pytest.raises(ConfigError, match="other layers or shapes than the model"):
        loaded(saved(tmp_path / "b", "qwen3_moe"), path=tmp_path / "one.experts")


def test_missing_room_is_named_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_file.os, "posix_fallocate", full)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("a byte is written"))
    with pytest.raises(ConfigError, match=r"\(No space left on device\): they take \d+ bytes, and"):
        loaded(saved(tmp_path))
    assert not (tmp_path / EXPERTS_IN_FILE).exists()


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, where: str) -> None:
    folder = tmp_path / where
    if where == "a file":
        folder.write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be used \(.*in a folder that exists and may be"):
        loaded(saved(tmp_path / "model"), path=folder / EXPERTS_IN_FILE)


def test_a_folder_without_rights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if str(path).startswith(str(tmp_path / "rights")) and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **more)

    (tmp_path / "rights").mkdir()
    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ConfigError, match="Permission denied"):
        loaded(saved(tmp_path / "model"), path=tmp_path / "rights" / EXPERTS_IN_FILE)


def test_a_link_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / EXPERTS_IN_FILE).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="it is a symbolic link"):
        loaded(saved(tmp_path))
    assert not (tmp_path / "other").exists()


# -- models that do not fit


def test_an_error_of_a_reader_names_the_weight_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    start = checkpoint._places_in(tmp_path / "model.safetensors")[A_WEIGHT][0]
    preadv = os.preadv

    def reading(number: int, into: Any, at: int, flags: int = 0) -> int:
        if at == start:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(number, into, at, flags)

    monkeypatch.setattr(os, "preadv", reading)
    with pytest.raises(ModelError, match=rf"{A_WEIGHT} could not be read .*Input/output error"):
        loaded(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.suffix in (".experts", ".new")]
    assert not [t for t in threading.enumerate() if t.name.startswith("qllm-read")]


@pytest.mark.parametrize(
    ("how", "said"),
    [("int8", "cannot be int8"), ("int4", "not finite cannot be rounded")],
)
def test_weights_that_cannot_be_rounded_are_named(tmp_path: Path, how: str, said: str) -> None:
    folder = change(saved(tmp_path), lambda tensors: tensors[A_WEIGHT].fill_(float("nan")))
    with pytest.raises(ModelError, match=rf"(experts\.3\.w2|expert 3 of model\.layers\.1).*{said}"):
        loaded(folder, how)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        for end, outputs in (("qweight", 1), ("qzeros", 1), ("scales", 8)):
            name = f"{STEM}.w2.{end}"
            tensors[name] = tensors[name][:, :-outputs].clone()

    with pytest.raises(
        ModelError, match=rf"{STEM}\.w2\.weight is \(\d+, 48\) and must be \(64, 48"
    ):
        loaded(change(made(tmp_path), cut))


def test_codes_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """Such codes become bf16, because their groups have no order."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.2.up_proj.scales"].fill_(float("inf"))

    folder = change(made(tmp_path, "qwen3_moe", "gptq-act-order"), spoil)
    with pytest.raises(ModelError, match=r"experts\.2\.up_proj\.weight has codes or .* not finite"):
        loaded(folder)


def test_parts_of_a_stack_with_other_numbers_of_experts_are_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.down_proj_scales"
        tensors[name] = tensors[name][1:].clone()

    said = r"down_proj_blocks, .*down_proj_scales have \[7, 8\] weights: one weight of them cannot"
    with pytest.raises(ModelError, match=said):
        loaded(change(made(tmp_path, "gpt_oss", "mxfp4"), cut))


def test_experts_whose_places_are_not_known_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stay in memory."""
    real = experts_apart.places_of

    def places_of(*args: Any) -> dict[str, Place]:
        return {name: place for name, place in real(*args).items() if ".1." not in place.module}

    monkeypatch.setattr(experts_apart, "places_of", places_of)
    said = r"experts of model\.layers\.1\.mlp\.experts .* cannot be read expert by expert"
    with pytest.raises(ConfigError, match=said):
        loaded(saved(tmp_path))


def test_gate_and_up_apart_for_a_module_that_mixes_them_are_refused(tmp_path: Path) -> None:
    module = make_model("gpt_oss").model.layers[0].mlp.experts
    places = {
        f"{name} {part} {expert}": Place("experts", name, part, expert)
        for name, parts in (("gate_up_proj", 2), ("down_proj", 1))
        for part in range(parts)
        for expert in range(8)
    }
    nothing: Any = None
    with pytest.raises(
        ModelError, match=r"experts\.gate_up_proj is .* \(16 weights for 8 experts\)"
    ):
        ExpertSource("experts", module, list(places), places, nothing, None)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = change(saved(tmp_path), lambda tensors: tensors.pop(A_WEIGHT))
    with pytest.raises(ModelError, match=r"missing keys, first .*experts\.3\.w2\.weight"):
        loaded(folder)


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_quantised_weights_are_not_rounded_again(tmp_path: Path, how: str) -> None:
    with pytest.raises(ConfigError, match=f"expert_weights='{how}' rounds bfloat16 .*is quantised"):
        loaded(made(tmp_path), how)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "float32"}, "bfloat16, not torch.float32; use dtype='bfloat16'"),
        ({"load_format": "dummy"}, "load_format='dummy' on device='cpu' does not do so"),
    ],
)
def test_settings_that_have_no_experts_for_a_file_are_refused(
    tmp_path: Path, more: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(saved(tmp_path), **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_whose_own_dtype_is_not_bf16_are_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """A load without a file keeps their dtype, in which our kernels do not compute."""
    make_model("mixtral", dtype).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"bfloat16, not {dtype}; use dtype='bfloat16'"):
        loaded(tmp_path, dtype=None)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no experts that can be in a file"):
        loaded(tmp_path)


@pytest.mark.parametrize("odd", ["gate", "width"])
def test_experts_that_our_kernels_do_not_run_are_refused_by_name(tmp_path: Path, odd: str) -> None:
    """Experts that stay in memory would break the bound."""
    config = make_model("qwen3_moe").config
    if odd == "gate":
        config.hidden_act = "gelu"
    else:
        config.moe_intermediate_size = 49
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    said = "do not know how they compute" if odd == "gate" else "are not all even"
    with pytest.raises(ConfigError, match=rf"experts of model\.layers\.0\.mlp\.experts .*{said}"):
        loaded(tmp_path)


def test_experts_without_a_gate_are_refused_by_name(tmp_path: Path) -> None:
    tiny_model("nemotron_h").to(torch.bfloat16).save_pretrained(tmp_path)
    said = r"experts of model\.layers\.\d+\.mixer\.experts .*: our kernels do not know how they"
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path)


def test_code_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path) / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    code = tmp_path / "own.py"
    code.write_text(
        "from transformers import MixtralConfig, MixtralForCausalLM\n"
        "class OwnConfig(MixtralConfig):\n    model_type = 'own-of-a-test'\n"
        "class Own(MixtralForCausalLM):\n    config_class = OwnConfig\n"
    )
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    published.configure(tmp_path, model_type="own-of-a-test", auto_map=own)
    with pytest.raises(ModelError, match="own modelling code; load without a file of experts"):
        loaded(tmp_path, trust_remote_code=True)


def test_a_model_whose_experts_are_in_a_file_is_refused_by_other_runners(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "qllm"):
        model, file = loaded(saved(tmp_path))
    assert "compute something else" not in caplog.text
    assert "experts of 3 layers kept as bf16 in a file" in caplog.text
    with pytest.raises(ModelError, match=rf"are in {file.path}, and only a runner on one CPU"):
        cuda_runner(model)
    with pytest.raises(ModelError, match=r"experts of model\.layers\.0\.mlp\.experts are in .*"):
        forward(model, prompt_of(5))


def test_files_of_equal_sizes_and_times_have_other_digests(tmp_path: Path) -> None:
    """A sample finds a file whose time was kept or set to a constant."""
    paths = [tmp_path / name for name in "ab"]
    for value, path in enumerate(paths):
        path.write_bytes(bytes([value]) * 100_000)
        os.utime(path, ns=(0, 0))
    one, other = (experts_in_file.digest_of([path]) for path in paths)
    assert one != other
    copytree(tmp_path, tmp_path / "copy")
    assert experts_in_file.digest_of([tmp_path / "copy" / "a"]) == one
