"""GGUF files of each architecture: the values, config and logits of the safetensors they are of."""

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qllm.errors import ModelError
from qllm.models.loader import load, skeleton
from qllm.models.weights.gguf_config import ARCHITECTURES, ROPE_FACTORS, Metadata, config_of
from qllm.models.weights.gguf_file import checkpoint_of, open_file
from qllm.models.weights.quantised_experts import all_quantised
from qllm.models.weights.quantised_linears import all_linears
from qllm.sim.presets import model_spec
from tests.support.dense import save
from tests.support.gguf_files import convert, stored_as

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
    "llama, linear, wide heads, tied": (
        "llama",
        {"head_dim": 32, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    ),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 12, "num_experts_per_tok": 2}),
    "qwen2, yarn, tied": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": False}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "tie_word_embeddings": False},
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22},
    ),
}
"""A model of each kind: its type, and settings beside the sizes."""


class Saved:
    """A model with seeded weights in a folder, and files that were made of it."""

    def __init__(self, folder: Path, name: str) -> None:
        kind, settings = MODELS[name]
        settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | settings
        settings["rope_parameters"] = {"rope_theta": 1e4} | settings["rope_parameters"]
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **SIZES | settings), dtype=torch.bfloat16
        )
        for weight in model.parameters():  # norms and biases are not what they start as
            weight.data.copy_(torch.randn(weight.shape) / weight.shape[-1] ** 0.5)
        self.folder = save(model, folder / "bf16")

    def file(self, kind: str) -> Path:
        """A file whose matrices are of that kind."""
        path = self.folder.parent / f"{kind}.gguf"
        return path if path.exists() else convert(self.folder, path, kind)

    def rounded(self, kind: str) -> Path:
        """A folder with the values of such a file, as the package gguf computes them."""
        folder = self.folder.parent / f"of_{kind}"
        if folder.exists():
            return folder
        copytree(self.folder, folder)
        weights = load_file(self.folder / "model.safetensors")
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(self.file(kind)).tensors}
        assert kind in {tensor.tensor_type.name for tensor in stored.values()}
        save_file({name: _rounded(name, x, kind) for name, x in weights.items()}, folder / FILE)
        return folder


FILE = "model.safetensors"


def _rounded(name: str, value: Tensor, kind: str) -> Tensor:
    is_kept = "gate.weight" in name or "norm" in name
    number = gguf.GGMLQuantizationType["F32" if is_kept else stored_as(name, value, kind)]
    values = gguf.dequantize(gguf.quantize(value.float().numpy(), number), number)
    return torch.from_numpy(values).to(torch.bfloat16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {name: Saved(tmp_path_factory.mktemp("gguf"), name) for name in MODELS}


def _refuse_other_values(found: Any, wanted: Any) -> None:
    """Compare every parameter, those that stay quantised by what they stand for."""
    experts, linears = all_quantised(found), all_linears(found)
    own = dict(found.named_parameters())
    for key, value in wanted.named_parameters():
        module, _, which = key.rpartition(".")
        if module in linears and which == "weight":
            assert torch.equal(linears[module].weight.dequantised(), value), key
        elif own[key].is_meta:
            each = [experts[module].as_parameter(which, e) for e in range(len(value))]
            assert torch.equal(torch.stack(each), value), key
        else:
            assert own[key].dtype is value.dtype, key
            assert torch.equal(own[key], value), key


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_made_of(saved: dict[str, Saved], name: str) -> None:
    found, wanted = load(saved[name].file("BF16")).model, load(saved[name].folder).model
    _refuse_other_values(found, wanted)
    tokens = torch.arange(3, 220, 7).view(1, -1)
    assert torch.equal(found(tokens).logits, wanted(tokens).logits)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama, biases", "F16"),
        ("llama, biases", "Q8_0"),
        ("mixtral", "F32"),
        ("mixtral", "Q4_1"),
        ("granite", "Q4_0"),
    ],
)
def test_values_of_every_type_are_those_of_the_package(
    saved: dict[str, Saved], name: str, kind: str
) -> None:
    _refuse_other_values(load(saved[name].file(kind)).model, load(saved[name].rounded(kind)).model)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_says_what_that_of_the_safetensors_does(
    saved: dict[str, Saved], name: str
) -> None:
    found = skeleton(str(saved[name].file("BF16"))).config.to_dict()
    wanted = skeleton(str(saved[name].folder)).config.to_dict()
    own = ("architectures", "dtype", "_name_or_path", "transformers_version", "model_type")
    odd = {k: (found.get(k), v) for k, v in wanted.items() if k not in own and found.get(k) != v}
    if odd.get("head_dim", (0, 0))[1] is None:  # which a width and heads say as well
        assert odd.pop("head_dim")[0] == SIZES["hidden_size"] // SIZES["num_attention_heads"]
    assert not odd


def test_experts_that_are_tensors_of_their_own_are_read_as_stacks_are(
    saved: dict[str, Saved], tmp_path: Path
) -> None:
    """As files of Mixtral have them that were made before stacks were."""
    whole = saved["mixtral"]
    path = convert(whole.folder, tmp_path / "old.gguf", "Q8_0", stacks=False)
    assert "blk.1.ffn_gate.3.weight" in open_file(path).tensors
    _refuse_other_values(load(path).model, load(whole.rounded("Q8_0")).model)
    assert model_spec(str(path)) == model_spec(str(whole.file("Q8_0")))


# -- nothing is dropped


def _keys_of(part: type) -> Iterator[str]:
    """Keys that files may have under the name of their architecture."""
    for value in vars(part).values():
        if isinstance(value, type):
            yield from _keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


KEYS = sorted(set(_keys_of(gguf.Keys)))
OF_EACH = {
    "llama": "llama, biases",
    "qwen2": "qwen2, yarn, tied",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "ernie4_5-moe": "ernie4_5_moe",
    "minimax-m2": "minimax_m2",
    "granite": "granite",
}
"""Architecture -> a model of it."""


def test_each_architecture_is_tried() -> None:
    assert OF_EACH.keys() == ARCHITECTURES.keys()
    assert len(KEYS) > 80


def _outcome(said: Metadata) -> tuple[str, dict[str, Any] | None]:
    """Return the config that the metadata make, or the message that refuses them."""
    try:
        return "", config_of(said).to_dict()
    except ModelError as error:
        return str(error), None


@pytest.mark.parametrize("name", [*OF_EACH.values(), "mixtral"])
def test_every_key_changes_the_config_or_is_refused_by_name(
    saved: dict[str, Saved], name: str
) -> None:
    said = open_file(saved[name].file("BF16")).said
    config = config_of(said).to_dict()
    for key in KEYS:
        for value in (_other(said.values.get(key, 0)), [3, 4]):
            why, found = _outcome(said._replace(values={**said.values, key: value}))
            assert found != config, (key, value)
            if isinstance(value, list):
                assert f"{said.architecture}.{key} would be ignored" in why, (key, why)


def _other(value: Any) -> Any:
    return f"another {value}" if isinstance(value, str) else value + 2


@pytest.mark.parametrize("name", [*OF_EACH.values(), "mixtral"])
def test_a_key_that_is_missing_is_refused_or_what_the_tensors_say(
    saved: dict[str, Saved], name: str
) -> None:
    """But for the speed of rotations, which is 10000 where no key says it."""
    file = open_file(saved[name].file("BF16"))
    said, config = file.said, config_of(file.said).to_dict()
    for gone in said.values.keys() - {"rope.freq_base"}:
        rest = {key: value for key, value in said.values.items() if key != gone}
        changed = file._replace(said=said._replace(values=rest))
        why, found = _outcome(changed.said)
        if found is not None and found != config:  # the tensors do not fit it
            with torch.device("meta"), pytest.raises(ModelError, match="has to be"):
                checkpoint_of(changed, AutoModelForCausalLM.from_config(config_of(changed.said)))
        assert found is not None or "lacks" in why or "would be ignored" in why, gone


@pytest.mark.parametrize("name", [*OF_EACH.values(), "mixtral"])
def test_every_tensor_is_needed_and_no_other_is_taken(saved: dict[str, Saved], name: str) -> None:
    file = open_file(saved[name].file("BF16"))
    model = skeleton(str(file.path))
    assert checkpoint_of(file, model).plain
    for gone in file.tensors:
        rest = {key: tensor for key, tensor in file.tensors.items() if key != gone}
        with pytest.raises(ModelError, match=rf"lacks the tensor {re.escape(gone)} "):
            checkpoint_of(file._replace(tensors=rest), model)
    some = file.tensors["blk.0.attn_v.weight"]
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == file.said.architecture)
    forms = gguf.TENSOR_NAMES if name == "qwen3" else gguf.MODEL_TENSORS[kind]
    known = [gguf.TENSOR_NAMES[form].format(bid=0) + end for form in forms for end in ENDS]
    for more in known:
        if more not in file.tensors and not (more == ROPE_FACTORS and name in PAIRS):
            with pytest.raises(ModelError, match=rf"{re.escape(more)} has no place in the model"):
                checkpoint_of(file._replace(tensors={**file.tensors, more: some}), model)


ENDS = (".weight", ".bias")
PAIRS = ("llama, biases", "mixtral", "granite")


def test_a_tensor_that_is_there_in_two_forms_is_refused(saved: dict[str, Saved]) -> None:
    file = open_file(saved["mixtral"].file("BF16"))
    stack = file.tensors["blk.0.ffn_up_exps.weight"]
    one = stack._replace(shape=stack.shape[:2], data=stack.data[1])
    tensors = {**file.tensors, "blk.0.ffn_up.1.weight": one}
    with pytest.raises(ModelError, match=r"ffn_up\.1\.weight is there twice"):
        checkpoint_of(file._replace(tensors=tensors), skeleton(str(file.path)))


def test_rotations_that_are_not_those_of_a_llama_3_are_refused(saved: dict[str, Saved]) -> None:
    said = open_file(saved["llama 3"].file("BF16")).said
    assert said.rope_factors is not None
    assert config_of(said).rope_parameters["factor"] == 32.0
    bent = said.rope_factors.clone()
    bent[len(bent) // 2] *= 1.01
    with pytest.raises(ModelError, match=r"rope_freqs\.weight scales rotations in another way"):
        config_of(said._replace(rope_factors=bent))


@pytest.mark.parametrize("gone", ["factor", "original_context_length"])
def test_a_scaling_that_does_not_say_all_is_refused(saved: dict[str, Saved], gone: str) -> None:
    said = open_file(saved["qwen2, yarn, tied"].file("BF16")).said
    values = {key: value for key, value in said.values.items() if not key.endswith(gone)}
    with pytest.raises(ModelError, match=r"qwen2\.rope\.scaling\.type would be ignored"):
        config_of(said._replace(values=values))


def test_what_is_no_model_is_refused(saved: dict[str, Saved], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"adapter\.gguf holds no model, but what .* 'adapter'"):
        open_file(tmp_path / "adapter.gguf")
