"""A part is known by what it computes: mutated copies are refused, rewritten ones are taken."""

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from qllm import QLLMEngine
from qllm.models.discover import discover
from qllm.models.loader import wrap
from qllm.models.parts import fingerprints, glue_trials, known, trials
from qllm.models.parts.inventory import changed, parts_of
from qllm.models.parts.known import SOURCE, TRIAL
from tests.support.families import make_model
from tests.support.rewritten import MUTANTS, REWRITES, models, rewritten, source_of

MODELS = models()
SAME = {
    ("olmoe", "gate and up change places"),  # it has no MLP
    ("olmoe", "MLP with a limit"),
    ("olmoe", "MLP that mixes tokens"),
    ("gpt_oss", "a softcap"),  # its attention function takes none
    ("qwen3_5_moe_text", "keys not turned"),  # those of images
    ("deepseek_v3 in halves", "rope in halves"),
    ("deepseek_v3 in halves", "router with another sum of groups"),  # it takes both
    ("deepseek_v3 in halves", "router that keeps all groups"),
    ("deepseek_v3", "rope in pairs"),
    ("deepseek_v3", "rope the other way"),
    ("deepseek_v3", "keys not turned"),
}
"""Mutations of what a family does not run."""


pytestmark = pytest.mark.usefixtures("one_thread")


def kinds(model: Any) -> set[tuple[str, str | None]]:
    """The role and the kind of every part."""
    return {(part.role, part.known.kind) for part in parts_of(model)}


def mutants() -> list[tuple[str, str]]:
    """Every mutation of every family whose file has its text."""
    texts = {family: source_of(make()) for family, make in MODELS.items()}
    found = [(f, name) for name, (old, _) in MUTANTS.items() for f in texts if old in texts[f]]
    assert {name for _, name in found} == MUTANTS.keys()
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("how", REWRITES)
@pytest.mark.parametrize("family", MODELS)
def test_a_part_whose_source_differs_and_whose_results_do_not_is_taken(
    family: str, how: str, tmp_path: Path
) -> None:
    model = MODELS[family]()
    assert REWRITES[how](source_of(model)) != source_of(model)
    copy = rewritten(model, REWRITES[how], tmp_path)
    assert kinds(copy) == kinds(model)
    assert {p.known.how for p in parts_of(copy) if p.known.kind != "layer"} == {TRIAL}
    drivers = [layer.driver for layer in discover(copy).layers]
    assert drivers == [layer.driver for layer in discover(model).layers]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("family", "name"), mutants())
def test_a_part_that_computes_something_else_is_refused(
    family: str, name: str, tmp_path: Path
) -> None:
    """It is of no kind, or of the one that it does compute now."""
    model, (old, new) = MODELS[family](), MUTANTS[name]
    copy = rewritten(model, lambda text: text.replace(old, new), tmp_path)
    is_same = (family, name) in SAME
    assert (kinds(copy) == kinds(model)) == is_same
    if is_same:
        ids = torch.arange(3, 20)[None]
        assert torch.equal(copy(ids).logits, model(ids).logits)
    for part in parts_of(copy):
        assert part.known.kind is not None or part.known.how.startswith("not ")


def test_a_mutated_part_is_run_by_its_own_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, (old, new) = MODELS["mixtral"](), MUTANTS["keys not turned"]
    copy = rewritten(model, lambda text: text.replace(old, new), tmp_path)
    with caplog.at_level(logging.WARNING, "qllm"):
        wrap(copy)
    said = caplog.records[-1].getMessage()
    assert "MixtralAttention.forward (not plain: its keys: they differ by" in said
    names = tokens_of(copy)
    assert "sdpa" in names["attention"]
    assert "attention: its own module (not plain: its keys" in names["parts"]


def test_a_rewritten_model_runs_as_fast_and_gives_the_same_tokens(tmp_path: Path) -> None:
    def edit(text: str) -> str:
        for one in REWRITES.values():
            text = one(text)
        return text

    model = MODELS["mixtral"]()
    copy = rewritten(model, edit, tmp_path)
    names, expected = tokens_of(copy), tokens_of(model)
    assert names.pop("parts").startswith("by a trial: ")
    assert expected.pop("parts").startswith("by their source: ")
    assert names == expected


def tokens_of(model: Any) -> dict[str, str]:
    """Serve a prompt, which must give the tokens of `generate`; the kernels that did."""
    prompt = list(range(5, 40))
    made = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    with QLLMEngine.from_model(model, max_kv_tokens=1024) as engine:
        found = engine.submit(prompt, max_tokens=6, temperature=0).result(300)
        assert list(found.token_ids) == made[0, len(prompt) :].tolist()
        return engine.kernels


def test_a_forward_that_was_replaced_on_an_instance_is_refused() -> None:
    model = MODELS["qwen3_moe"]()
    layers = model.model.layers
    for name in ("self_attn", "mlp.gate", "mlp.up_proj", "input_layernorm"):
        module = next(m for layer in layers for n, m in layer.named_modules() if n == name)
        assert all(part.known.kind for part in parts_of(model))
        module.forward = partial(type(module).forward, module)
        assert None in {part.known.kind for part in parts_of(model)}, name
        del module.forward
    assert changed(model) == []


def test_a_method_that_was_replaced_on_an_instance_is_refused() -> None:
    """A source that was tested says nothing of what its forward calls then."""
    for family, name, method in (
        ("deepseek_v3", "self_attn", "expand_kv"),
        ("mixtral", "mlp.experts", "_apply_gate"),
        ("qwen3_next", "input_layernorm", "_norm"),
    ):
        model = MODELS[family]()
        layers = model.model.layers
        module = next(m for layer in layers for n, m in layer.named_modules() if n == name)
        assert all(part.known.kind for part in parts_of(model))
        own = getattr(type(module), method)
        setattr(module, method, partial(own, module))
        assert None in {part.known.kind for part in parts_of(model)}, name


@pytest.mark.parametrize("setting", [F.gelu, (F.gelu,), {"act": F.gelu}])
def test_parts_that_differ_in_any_setting_are_tried_each(setting: Any) -> None:
    """The layers of a model are alike in all but what one of them keeps."""
    mlp = make_model("deepseek_v3").model.layers[0].mlp
    usual, other = copy.copy(mlp), copy.copy(mlp)
    kind = type("Mlp", (type(usual),), {"__module__": "elsewhere", "forward": with_own_act})
    for mlp, how in ((usual, F.silu), (other, setting)):
        mlp.__class__, mlp.how = kind, how
    with known.one_look():
        assert known.mlp(usual) == ("swiglu", TRIAL)
        assert known.mlp(other).kind is None
    usual.how = setting
    assert known.mlp(usual).kind is None


def with_own_act(self: Any, x: Tensor) -> Tensor:
    how = self.how["act"] if isinstance(self.how, dict) else self.how
    act = how[0] if isinstance(how, tuple) else how
    out: Tensor = self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
    return out


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made or read."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in (*args, out):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.num_bytes = max(self.num_bytes, value.numel() * value.element_size())
        return out


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_trial_reads_no_weight_and_less_than_a_layer_is_given(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are on the meta device, and as wide as those of published models."""
    monkeypatch.setattr(fingerprints, "by_source", lambda *_: None)
    config = AutoConfig.for_model(family, num_hidden_layers=4 if family == "deepseek_v3" else 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with Largest() as largest:
        found = parts_of(model.eval())
    assert all(part.known.kind for part in found)
    assert TRIAL in {part.known.how for part in found}
    assert largest.num_bytes <= 2048 * config.hidden_size * 2


def test_a_source_that_was_tested_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise AssertionError("a trial was made")

    for name in ("norm", "mlp", "experts", "router", "attends", "keeps_latents"):
        monkeypatch.setattr(trials, name, fail)
    for name in ("layer", "block"):
        monkeypatch.setattr(glue_trials, name, fail)
    assert {p.known.how for make in MODELS.values() for p in parts_of(make())} == {SOURCE}


def test_a_copy_of_a_tested_class_is_tried() -> None:
    """A class of another file may call other functions by the same source."""
    norm = make_model("mixtral").model.layers[0].input_layernorm
    assert known.norm(norm).how == SOURCE
    copy = type("Copy", (type(norm),), {"__module__": "elsewhere"})(64)
    assert known.norm(copy) == ("rms", TRIAL)
