"""Linear modules and the head of quantised checkpoints: packed, and computed with exactly.

The other side of every comparison is a checkpoint in bf16 with the same values.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qllm import QLLMEngine
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.models.discover import discover
from qllm.models.loader import load
from qllm.models.weights import quantised_linears
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.quantised_experts import quantised_in
from qllm.models.weights.quantised_linears import (
    QuantisedLinear,
    all_linears,
    linear_in,
    weight_bytes,
)
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.cuts import CODE_BYTES_PER_NS
from qllm.runner.layers.linears import Linears
from qllm.runner.layers.rows import PLAIN
from tests.support import published
from tests.support.families import make_model
from tests.support.packed_linears import made
from tests.support.programs import forward, logits_of, prompt_of

assert cpu.MISSING is None, cpu.MISSING


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    assert len(found) == len(wanted) > 1
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("is_zero", [True, False])
def test_biases_that_a_model_has_not_are_zeros(tmp_path: Path, is_zero: bool) -> None:
    """AutoGPTQ wrote one for every linear module; one that is none of the model adds nothing."""
    quantised, values = made(tmp_path, "mixtral", "gptq")
    path = quantised / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".scales")]:
        bias = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        tensors[name.replace("scales", "bias")] = bias if is_zero else bias + 1
    save_file(tensors, path, metadata={"format": "pt"})
    if not is_zero:
        with pytest.raises(ModelError, match=r"unexpected keys, first .*\.bias"):
            load(quantised)
        return
    ours, plain = load(quantised).model, load(values).model
    assert same(
        logits_of(cpu_runner(ours), prompt_of(9)), logits_of(cpu_runner(plain), prompt_of(9))
    )


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"batch_invariant": True},
    {"kernels": "reference"},
    {"kernels": "reference", "batch_invariant": True},
    {"max_packed_bytes": 0},
)


@pytest.mark.parametrize(
    ("family", "form", "kind"),
    [
        ("qwen3_moe", "packed", "i4 g16"),
        ("mixtral", "awq", "u4 g16"),
        ("qwen2_moe", "fp8", "e4m3 g24"),
        ("deepseek_v3", "fp8", "e4m3 g24"),
    ],
)
def test_everything_packed_computes_the_bits_of_bf16(
    tmp_path: Path, family: str, form: str, kind: str
) -> None:
    ours, plain = (load(folder).model for folder in made(tmp_path, family, form))
    held = all_linears(ours)
    assert "lm_head" in held
    linears = [n for n, m in ours.named_modules() if type(m) is torch.nn.Linear]
    assert set(held) == {n for n in linears if not n.endswith("shared_expert_gate")}
    ids = prompt_of(9)
    wanted = forward(plain, ids)
    for settings in SETTINGS:  # each on a model that a runner before has left as it was
        runner, other = cpu_runner(ours, **settings), cpu_runner(plain, **settings)
        if settings in ({}, {"batch_invariant": True}):
            assert runner.names["head"] == f"qllm {cpu.kind()} {kind}"
            assert runner.names["sweep"].startswith("3 of 3")
        else:
            assert runner.names["head"] == f"torch linear, dequantised {kind}"
        assert same(logits_of(runner, ids), logits_of(other, ids))
        runner.close()
        other.close()
        assert same(forward(ours, ids), wanted)


def test_a_head_that_is_the_embedding_too_is_expanded(tmp_path: Path) -> None:
    """Its codes are stored beside an embedding in bf16, and the config says that both are one."""
    folders = made(tmp_path, "qwen3_moe", "packed")
    for folder in folders:
        published.configure(folder, tie_word_embeddings=True)
    ours, plain = (load(folder).model for folder in folders)
    assert "lm_head" not in all_linears(ours)
    assert torch.equal(ours.lm_head.weight, plain.lm_head.weight)
    ids = prompt_of(9)
    assert same(logits_of(cpu_runner(ours), ids), logits_of(cpu_runner(plain), ids))
    assert same(forward(ours, ids), forward(plain, ids))


def test_the_start_up_check_judges_them(tmp_path: Path) -> None:
    model = load(made(tmp_path)[0]).model
    runner = cpu_runner(model)
    conformance.check(model, runner)
    runner.close()
    assert weight_bytes(model) < 0.5 * weight_bytes(load(made(tmp_path / "again")[1]).model)


@pytest.mark.parametrize("is_quantised", [True, False])
def test_a_packed_linear_keeps_its_bias(is_quantised: bool) -> None:
    """The module is one that no kernel of whole layers covers."""
    module = nn.Linear(32, 64, dtype=torch.bfloat16).requires_grad_(False)
    if is_quantised:
        QuantisedLinear(module, ROUNDINGS["int4"](module.weight))
    parts: Any = SimpleNamespace(layers=[SimpleNamespace(layer=nn.Sequential(module))])
    linears = Linears(parts, PLAIN, native=True, covered=(), arena=cpu.Arena())
    linears.do()
    assert torch.equal(module(torch.zeros(3, 32).bfloat16()), module.bias.expand(3, 64))
    linears.undo()
    assert torch.equal(module(torch.zeros(3, 32).bfloat16()), module.bias.expand(3, 64))


def test_reading_costs_what_is_stored(tmp_path: Path) -> None:
    """Else blocks of queries become so short that most of a prefill reads weights again."""
    quantised, values = made(tmp_path)
    ours, plain = (cpu_runner(load(folder).model).backend for folder in (quantised, values))
    head = linear_in(ours._model.lm_head)
    experts = quantised_in(discover(ours._model).layers[0].experts)
    assert head is not None
    assert experts is not None
    assert ours.costs.head_ns == head.num_bytes / CODE_BYTES_PER_NS
    assert ours.costs.unit_ns == experts.num_bytes / experts.num_experts / CODE_BYTES_PER_NS
    attention = discover(ours._model).layers[0].self_attn
    held = [one for module in attention.modules() if (one := linear_in(module)) is not None]
    read_ns = sum(one.num_bytes for one in held) / CODE_BYTES_PER_NS
    assert len(held) == 4
    assert ours.costs.segment_ns - ours.costs.attn_ns == pytest.approx(read_ns)
    assert ours.costs.head_ns < plain.costs.head_ns / 5
    assert (ours.costs.row_ns, ours.costs.project_ns) == (
        plain.costs.row_ns,
        plain.costs.project_ns,
    )


def test_projections_of_one_input_in_two_formats(tmp_path: Path) -> None:
    """As GGUF files have them: values in more bits than queries."""
    others = [(r"v_proj|q_proj", published.packed_8)]
    quantised, values = made(tmp_path, others=others)
    ours = load(quantised)
    kinds = {x.kind for x in all_linears(ours.model).values()}
    assert kinds == {"i4 g16", "i8 g16"}
    ids = prompt_of(9)
    runner = cpu_runner(ours.model)
    assert runner.names["sweep"].startswith("3 of 3")
    assert same(logits_of(runner, ids), logits_of(cpu_runner(load(values).model), ids))


def test_a_weight_that_other_code_reads_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, values = made(tmp_path)
    source = "x = F.linear(x, self.o_proj.weight)"
    monkeypatch.setattr(quantised_linears, "_source_of", lambda kind: source)
    ours = load(quantised)
    assert not any(name.endswith("o_proj") for name in all_linears(ours.model))
    assert any(name.endswith("v_proj") for name in all_linears(ours.model))
    assert ours.weights is not None
    assert "3 other weights expanded to bfloat16" in ours.weights
    ids = prompt_of(9)
    plain = cpu_runner(load(values).model)
    assert same(logits_of(cpu_runner(ours.model), ids), logits_of(plain, ids))


def test_other_dtypes_expand_them(tmp_path: Path) -> None:
    quantised, values = made(tmp_path)
    ours, plain = (load(folder, dtype="float32").model for folder in (quantised, values))
    assert all_linears(ours) == {}
    assert torch.equal(ours.lm_head.weight, plain.lm_head.weight)


def test_an_engine_serves_them(tmp_path: Path) -> None:
    tokens = []
    for folder in made(tmp_path):
        with QLLMEngine.from_pretrained(folder, run_in="thread", threads=1) as engine:
            handle = engine.submit([1, 2, 3], max_tokens=6, temperature=0, ignore_eos=True)
            tokens.append(handle.result(300).token_ids)
            weights = engine.kernels["weights"]
            assert ("linear modules kept as i4 g16" in weights) == (folder.name == "published")
            assert "expanded" not in weights
    assert tokens[0] == tokens[1]


# -- rounded once


def test_what_was_quantised_and_expanded_is_not_rounded_again(tmp_path: Path) -> None:
    """Experts of GPTQ with act-order become bf16: as rounded as before."""
    quantised, _ = made(tmp_path, form="gptq-act-order")
    for how in ("int8", "int8-g64", "int4", "mxfp4"):
        model = load(quantised, expert_weights=how).model
        with pytest.raises(ConfigError, match=r"rounded before \(gptq\): they would be .* twice"):
            cpu_runner(model, expert_weights=how)
    cpu_runner(load(quantised).model).close()


def test_what_was_rounded_is_not_rounded_to_another_format(tmp_path: Path) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    model, ids = load(tmp_path).model, prompt_of(9)
    first = cpu_runner(model, expert_weights="int8")
    wanted = logits_of(first, ids)
    first.close()
    for how in ("int8-g64", "int4", "mxfp4"):
        with pytest.raises(ConfigError, match=r"rounded before \(int8\)"):
            cpu_runner(model, expert_weights=how)
    assert same(logits_of(cpu_runner(model, expert_weights="int8"), ids), wanted)


# -- names of kept KV


def test_a_digest_is_of_every_code_and_buffer(tmp_path: Path) -> None:
    quantised, _ = made(tmp_path, "deepseek_v3", "fp8")
    model = load(quantised).model
    digests = {weights_digest(model)}
    router = model.model.layers[-1].mlp.gate
    router.e_score_correction_bias[0] += 1
    digests.add(weights_digest(model))
    held = all_linears(model)["lm_head"]
    held.weight.codes.view(torch.uint8)[-1, -1] ^= 1
    digests.add(weights_digest(model))
    held.weight.scale_NG[-1, -1] *= 2
    digests.add(weights_digest(model))
    model.model.rotary_emb.inv_freq[0] += 1
    digests.add(weights_digest(model))
    assert len(digests) == 5
    runner = cpu_runner(model)
    assert weights_digest(model) in digests
    runner.close()


def test_a_digest_is_of_every_offset(tmp_path: Path) -> None:
    quantised, _ = made(tmp_path, "mixtral", "awq")
    model = load(quantised).model
    before = weights_digest(model)
    offset = all_linears(model)["lm_head"].weight.offset_NG
    assert offset is not None
    offset[-1, -1] += 1
    assert weights_digest(model) != before
