"""GGUF files: tiny ones that the package gguf writes, loaded as transformers loads them."""

import errno
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ConfigError, ModelError
from qllm.models import loader
from qllm.models.generation import eos_token_ids, sampling_defaults
from qllm.models.loader import load, skeleton
from qllm.models.weights import raw_file
from qllm.models.weights.gguf_file import open_file
from qllm.models.weights.quantised_experts import all_quantised
from qllm.models.weights.quantised_linears import all_linears
from qllm.runner.cpu import cpu_runner
from qllm.sim.presets import model_spec
from tests.support.device_weights import answer_of, on_device
from tests.support.gguf_blocks import raw_blocks
from tests.support.programs import logits_of, prompt_of

WIDTH, EXPERTS, LAYERS, VOCAB = 256, 4, 2, 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": EXPERTS,
    "norm_topk_prob": True,
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
TYPES = {"attn_v": "Q4_1", "attn_k": "Q8_0", "attn_q": "Q4_0", "attn_output": "Q6_K"}
TYPES |= {name: "F32" for name in NAMES if "norm" in name or "inp" in name}


def model_of(architecture: str) -> Any:
    torch.manual_seed(0)
    if architecture == "qwen3moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=64, **SIZES)).eval()
    config = Qwen2MoeConfig(shared_expert_intermediate_size=512, **SIZES)
    return Qwen2MoeForCausalLM(config).eval()


class Writer:
    """A file of one model."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.writer = writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(512)
        writer.add_block_count(LAYERS)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(512)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_key_length(64)
        letters = [chr(33 + i) for i in range(94)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(
            [*letters, "ab", "<|endoftext|>", *(f"<{i}>" for i in range(VOCAB - 96))]
        )
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(95)

    def put(self, name: str, weight: Tensor, kind: str) -> None:
        """A tensor of a type; K-quants are made at random, since the package has no writer."""
        array, number = weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind]
        if kind == "F32":
            self.writer.add_tensor(name, array)
        elif kind.endswith("_K"):
            raw = raw_blocks(kind, array.size // array.shape[-1], array.shape[-1] // 256)
            data = raw.view(*array.shape[:-1], -1).numpy()
            self.writer.add_tensor(name, data, raw_dtype=number)
        else:
            self.writer.add_tensor(name, gguf.quantize(array, number), raw_dtype=number)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write(
    path: Path,
    architecture: str,
    up: str = "Q4_K",
    down: str = "Q6_K",
    tied: bool = False,
    change: Callable[[dict[str, Tensor]], object] = len,
) -> Path:
    weights, writer = model_of(architecture).state_dict(), Writer(path, architecture)
    change(weights)
    writer.put("token_embd.weight", weights["model.embed_tokens.weight"], "Q8_0")
    writer.put("output_norm.weight", weights["model.norm.weight"], "F32")
    if not tied:
        writer.put("output.weight", weights["lm_head.weight"], "Q6_K")
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for name, ours in NAMES.items():
            for end in ("weight", "bias"):
                found = weights.get(f"{start}{ours}.{end}")
                if found is not None:
                    kind = "F32" if end == "bias" else TYPES.get(name, "Q5_K")
                    flat = found.reshape(-1) if name == "ffn_gate_inp_shexp" else found
                    writer.put(f"blk.{layer}.{name}.{end}", flat, kind)
        both = weights[f"{start}mlp.experts.gate_up_proj"]
        gate, other = both.chunk(2, dim=1)
        writer.put(f"blk.{layer}.ffn_gate_exps.weight", gate, up)
        writer.put(f"blk.{layer}.ffn_up_exps.weight", other, up)
        writer.put(
            f"blk.{layer}.ffn_down_exps.weight", weights[f"{start}mlp.experts.down_proj"], down
        )
    writer.close()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    made = {name: write(folder / f"{name}.gguf", name) for name in ("qwen3moe", "qwen2moe")}
    made["Q4_0"] = write(folder / "small.gguf", "qwen3moe", "Q4_0", "Q4_1")
    made["Q8_0"] = write(folder / "wide.gguf", "qwen3moe", "Q5_K", "Q8_0")
    made["tied"] = write(folder / "tied.gguf", "qwen3moe", "Q4_0", "Q4_0", tied=True)
    return made


@pytest.fixture(scope="module")
def theirs(files: dict[str, Path]) -> dict[str, Any]:
    """The models as transformers loads them: dequantised by the package gguf, then bf16.

    The config is ours: with its own, which has default widths, transformers loads none of them.
    """
    return {
        name: AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=skeleton(str(path)).config,
            gguf_file=path.name,
            dtype=torch.bfloat16,
        ).eval()
        for name, path in files.items()
    }


KINDS = {
    "qwen3moe": "u4 g32+i8 g16",
    "qwen2moe": "u4 g32+i8 g16",
    "Q4_0": "i4 g32+u4 g32",
    "Q8_0": "i8 g32",
    "tied": "i4 g32",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_has_the_values_that_transformers_gives(
    files: dict[str, Path], theirs: dict[str, Any], name: str
) -> None:
    ours = load(files[name]).model
    held, wanted = all_quantised(ours), dict(theirs[name].named_parameters())
    linears = all_linears(ours)
    assert len(held) == LAYERS
    assert len(linears) >= 4 * LAYERS
    for key, parameter in ours.named_parameters():
        module, _, which = key.rpartition(".")
        if module in linears and which == "weight":
            assert torch.equal(linears[module].weight.dequantised(), wanted[key]), key
        elif parameter.is_meta:
            found = [held[module].as_parameter(which, e) for e in range(EXPERTS)]
            assert torch.equal(torch.stack(found), wanted[key]), key
        else:
            assert parameter.dtype is wanted[key].dtype is torch.bfloat16
            assert torch.equal(parameter, wanted[key]), key


@pytest.mark.parametrize("name", KINDS)
def test_packed_blocks_compute_the_bits_of_bf16(
    files: dict[str, Path], theirs: dict[str, Any], name: str
) -> None:
    loaded = load(files[name])
    assert loaded.weights is not None
    assert f"experts of {LAYERS} layers kept as {KINDS[name]}," in loaded.weights
    wanted = theirs[name]
    for left in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(wanted).pop(left, None)
    found, plain = (logits_of(cpu_runner(m), prompt_of(9)) for m in (loaded.model, wanted))
    assert len(found) == len(plain) > 1
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of gates, to 0
@pytest.mark.parametrize("name", KINDS)
def test_blocks_on_a_device_compute_the_bits_of_bf16(
    files: dict[str, Path], theirs: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = theirs[name]
    for left in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(wanted).pop(left, None)
    found = answer_of(on_device(files[name], "auto", monkeypatch), packed=True)
    assert torch.equal(found, answer_of(wanted, packed=False))


def test_an_engine_serves_a_file_and_a_folder_with_one(
    files: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(files["qwen3moe"], tmp_path)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    tokens = []
    for place in (files["qwen3moe"], tmp_path):
        with QLLMEngine.from_pretrained(place, run_in="thread", threads=1) as engine:
            assert engine.kernels["weights"].startswith("gguf Q4_0 Q4_1 Q4_K Q6_K Q8_0: ")
            answer = engine.submit("ab", sampling=greedy, max_tokens=4).result(300)
            tokens.append(answer.token_ids)
    assert tokens[0] == tokens[1]
    loaded = load(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("ab")["input_ids"] == [94]
    assert 95 in loaded.eos_token_ids


@pytest.mark.parametrize("names", [("eot",), ("eom",), ("eot", "eom")])
def test_every_end_that_a_file_names_ends_an_answer(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Files tuned from a base model keep its end of text, and name that of a turn beside it."""
    path, ends = tmp_path / "chat.gguf", {"eot": 96, "eom": 97}
    writer = Writer(path, "qwen3moe")
    for name in names:
        writer.writer.add_uint32(f"tokenizer.ggml.{name}_token_id", ends[name])
    writer.put("token_embd.weight", torch.zeros(VOCAB, WIDTH), "F32")
    writer.close()
    model = skeleton(str(path))
    assert eos_token_ids({}, model, None) == {95, *(ends[name] for name in names)}


def test_sampling_that_a_file_suggests_is_a_default(tmp_path: Path) -> None:
    path = tmp_path / "warm.gguf"
    writer = Writer(path, "qwen3moe")
    for key, value in {"temp": 0.6, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}.items():
        writer.writer.add_float32(f"general.sampling.{key}", value)
    writer.writer.add_int32("general.sampling.top_k", 20)
    writer.put("token_embd.weight", torch.zeros(VOCAB, WIDTH), "F32")
    writer.close()
    assert sampling_defaults("warm", open_file(path).sampling) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }


def test_widths_are_those_of_the_tensors(files: dict[str, Path]) -> None:
    """transformers leaves the widths of experts at what one published model has."""
    config = skeleton(str(files["qwen2moe"])).config
    assert config.moe_intermediate_size == 256
    assert config.shared_expert_intermediate_size == 512
    assert config.num_experts == EXPERTS


def test_a_plan_knows_the_bytes_of_blocks(files: dict[str, Path]) -> None:
    spec = model_spec(str(files["qwen3moe"]))
    assert spec.expert_bits == pytest.approx((2 * 6 + 10) / 3)
    held = all_quantised(load(files["qwen3moe"]).model)
    stored = sum(experts.num_bytes for experts in held.values())
    assert spec.expert_bytes * EXPERTS * LAYERS == stored


def test_what_is_no_file_says_so(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no GGUF file '.*gone\.gguf'"):
        load(tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match=r"5 GGUF files, .*give the path of one"):
        load(files["Q8_0"].parent)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["Q8_0"].read_bytes()[:100])
    with pytest.raises(ModelError, match="truncated or no GGUF file"):
        load(cut)
    cut.write_bytes(files["Q8_0"].read_bytes()[:-5000])
    with pytest.raises(ModelError, match="truncated or no GGUF file"):
        load(cut)
    with pytest.raises((ModelError, ConfigError)):
        load(tmp_path / "nothing")


def test_garbage_is_looked_for_before_a_file_is_read(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(files["Q4_0"])
    seen, looked, stream = list[bool](), list[bool](), loader.stream
    monkeypatch.setattr(loader.gc, "collect", lambda: looked.append(True))
    monkeypatch.setattr(loader, "stream", lambda *a: (seen.append(gc.isenabled()), stream(*a))[1])
    load(files["Q4_0"])
    assert looked == [True]
    assert seen == [False]


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = Writer(path, "gptneox")
    writer.put("token_embd.weight", torch.zeros(4, 32), "F32")
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'gptneox'; read are llama, qwen2, "):
        load(path)


def test_a_part_of_a_model_says_how_parts_are_joined(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"model-0000{number + 1}-of-00002.gguf"
        writer = Writer(path, "qwen3moe")
        writer.writer.add_uint16("split.no", number)
        writer.writer.add_uint16("split.count", 2)
        writer.put("token_embd.weight", torch.zeros(4, 32), "F32")
        writer.close()
        with pytest.raises(ModelError, match="is one of 2 parts of a model; join them"):
            load(path)


def test_a_plan_of_a_file_without_experts_says_so(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    writer = Writer(path, "qwen3moe")
    writer.put("token_embd.weight", torch.zeros(4, 32), "F32")
    writer.close()
    with pytest.raises(ModelError, match="has no experts"):
        model_spec(str(path))


def test_scales_that_are_not_finite_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    """A weight that becomes bf16; those of experts are refused as they are packed."""
    path = tmp_path / "broken.gguf"
    raw = bytearray(files["qwen3moe"].read_bytes())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(files["qwen3moe"]).tensors}
    at = tensors["blk.0.attn_q.weight"].data_offset
    raw[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"q_proj\.weight has codes or scales that are not finite"):
        load(path)


def test_an_error_of_the_disk_names_the_tensor_and_the_file(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, preadv = files["qwen3moe"], os.preadv
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    start = int(tensors["blk.1.ffn_up_exps.weight"].data_offset)

    def read(number: int, into: list[memoryview], at: int, flags: int = 0) -> int:
        if at == start:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(number, into, at, flags)

    monkeypatch.setattr(raw_file.os, "preadv", read)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up_exps\.weight could not .* error.*gguf"):
        load(path)


def test_tensors_on_the_same_bytes_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    """An offset that is wrong gives numbers that may well be finite: another tensor's."""
    path, at = tmp_path / "moved.gguf", {}
    raw = bytearray(files["Q4_0"].read_bytes())
    for tensor in gguf.GGUFReader(files["Q4_0"]).tensors:
        parts = tensor.field.parts
        at[tensor.name] = tensor.field.offset + sum(part.nbytes for part in parts[:-1])
    one, other = (at[f"blk.1.ffn_{name}_exps.weight"] for name in ("up", "gate"))
    raw[one : one + 8] = raw[other : other + 8]
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"ffn_gate_exps.* and .*ffn_up_exps.* the same bytes"):
        load(path)


@pytest.mark.parametrize("key", ["rope.scaling.type", "attention.sliding_window"])
def test_metadata_that_would_be_dropped_are_refused(tmp_path: Path, key: str) -> None:
    """As of models for long contexts, whose answers would be wrong from the first token on."""
    path = tmp_path / "long.gguf"
    writer = Writer(path, "qwen3moe")
    writer.writer.add_string(f"qwen3moe.{key}", "yarn")
    writer.put("token_embd.weight", torch.zeros(VOCAB, WIDTH), "F32")
    writer.close()
    for ask in (load, model_spec):
        with pytest.raises(ModelError, match=rf"qwen3moe\.{key} would be ignored"):
            ask(str(path))


@pytest.mark.parametrize(
    ("name", "tensor", "change_weight", "found"),
    [
        ("self_attn.v_proj", "attn_v", lambda x: x.t().contiguous(), r"\(256, 128\)"),
        ("mlp.gate", "ffn_gate_inp", lambda x: x[1:], r"\(3, 256\)"),
        ("input_layernorm", "attn_norm", lambda x: x[1:], r"\(255,\)"),
    ],
)
def test_tensors_of_another_shape_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensor: str,
    change_weight: Callable[[Tensor], Tensor],
    found: str,
) -> None:
    """One that is turned has as many numbers as it should."""
    monkeypatch.setitem(TYPES, "attn_v", "F32")
    key = f"model.layers.1.{name}.weight"

    def spoil(weights: dict[str, Tensor]) -> None:
        weights[key] = change_weight(weights[key])

    path = write(tmp_path / "odd.gguf", "qwen3moe", "Q4_0", "Q4_0", change=spoil)
    with pytest.raises(ModelError, match=rf"blk\.1\.{tensor}\.weight is {found}, and has to be"):
        load(path)


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q2_K", "TQ1_0"])
def test_other_types_of_tensors_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path, number = tmp_path / "odd.gguf", gguf.GGMLQuantizationType[kind]
    writer = Writer(path, "qwen3moe")
    size, bytes_of_block = gguf.GGML_QUANT_SIZES[number]
    data = np.zeros((4, 512 // size * bytes_of_block), dtype=np.uint8)
    writer.writer.add_tensor("token_embd.weight", data, raw_dtype=number)
    writer.close()
    with pytest.raises(ModelError, match=rf"tensors of type {kind}; read are Q4_0, Q4_1, Q8_0"):
        load(path)


def test_a_tensor_without_a_place_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "more.gguf"
    writer = Writer(path, "qwen3moe")
    writer.put("blk.0.attn_extra.weight", torch.zeros(4, 32), "F32")
    writer.put("blk.0.ffn_gate_exps.weight", torch.zeros(4, 256, 256), "Q8_0")
    writer.close()
    with pytest.raises(ModelError, match=r"blk\.0\.attn_extra\.weight has no place in the model"):
        load(path)


def test_without_the_package_it_says_what_to_install(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        load(files["Q8_0"])
