"""Families beyond the eight: they give `generate`'s tokens, or are refused by name."""

import json
import re

import pytest
import torch
from torch import nn

from qllm import QLLMEngine
from qllm.errors import ConfigError, ModelError
from tests.long import families as all_families
from tests.support import tiny_configs
from tests.support.all_families import DENSE, MOE
from tests.support.families import FAMILIES, make_model
from tests.support.files import ROOT

PAGE = (ROOT / "docs" / "guides" / "families.md").read_text()
RESULTS = ROOT / "bench" / "results" / "families.json"
PARTS = {
    "biogpt": "no norm before its output head",
    "ctrl": "no norm before its output head",
    "gemma3n_text": "hidden_size_per_layer_input is 16",
    "inkling2_text": "computes its output from hidden states of more than its last",
    "gpt2": "no norm before its output head",
    "gpt_bigcode": "no norm before its output head",
    "gpt_neox": "no norm before its output head",
    "modernbert-decoder": "no norm before its output head",
    "moshi": "no `rotary_emb`",
    "xglm": "no norm before its output head",
}
"""Refused families that once raised whatever came, and the part that is named."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "family",
    [
        # 15 s of processor time: a storm in tests/engine/test_hybrid_storm.py serves it, too
        pytest.param(family, marks=pytest.mark.slow) if family == "kimi_linear" else family
        for family in [*MOE, *DENSE]
    ],
)
def test_a_family_gives_the_tokens_of_generate(family: str) -> None:
    assert family in tiny_configs.model_types(), "take it off the list, here and in the docs"
    found = all_families.outcome(family, arms=["chunked"], kernels=False)
    assert (found["result"], found["reason"]) == ("equal", "")
    assert found["logprobs_vary_by"] > 20 * all_families.CLOSE, "it would not show a wrong step"


@pytest.mark.parametrize("family", ["gemma4_text", "jamba", "llama4_text", "mimo_v2_flash"])
def test_what_only_some_families_have_is_never_left_to_the_sample(family: str) -> None:
    """Positions by the type of a layer, capped logits, states, chunks of attention."""
    found = all_families.outcome(family, arms=["chunked"], kernels=False)
    assert (found["result"], found["reason"]) == ("equal", "")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("family", PARTS)
def test_a_family_that_cannot_be_driven_is_refused_by_name(family: str) -> None:
    assert family in tiny_configs.model_types(), "take it off the list"
    model = tiny_configs.tiny_model(family)
    named = f"model {model.config.model_type!r} cannot be driven: .*{PARTS[family]}"
    with pytest.raises(ModelError, match=named):
        QLLMEngine.from_model(model, threads=1)
    for module in model.modules():
        assert not hasattr(getattr(module, "config", None), "qllm_original")


def test_the_page_and_the_results_name_the_same_families() -> None:
    def listed(heading: str) -> list[str]:
        section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
        return re.findall(r"`([\w-]+)`", section.split("\n\n")[-1])

    assert listed("The eight") == sorted(FAMILIES)
    assert listed("Tried with tiny models: with experts") == MOE
    assert listed("Tried with tiny models: dense") == DENSE
    report = json.loads(RESULTS.read_text())
    results, counts = report["families"], report["counts"]
    assert {f for f, row in results.items() if row["result"] == "equal"} == {
        *FAMILIES,
        *MOE,
        *DENSE,
    }
    assert set(counts) == {"equal", "refused", "not made"}
    assert f"transformers {report['transformers']}" in PAGE
    for result, number in counts.items():
        assert f"{number} {result}" in PAGE


def test_what_the_start_up_check_raises_names_family_and_driver() -> None:
    model = make_model("mixtral")
    cause = RuntimeError("no such operator")

    def forward(*_: object, logits_to_keep: int = 0, **__: object) -> None:
        raise cause

    model.forward = forward
    named = r"model 'mixtral' cannot be driven: the start-up check \(drivers: fast\) raised Runt"
    with pytest.raises(ModelError, match=named + "imeError: no such operator") as caught:
        QLLMEngine.from_model(model, threads=1)
    assert caught.value.__cause__ is cause


def test_a_part_that_raises_names_the_family() -> None:
    model = make_model("mixtral")
    model.get_output_embeddings = lambda: 1 / 0
    with pytest.raises(ModelError, match=r"'mixtral' cannot be driven: finding its .*ZeroDivision"):
        QLLMEngine.from_model(model, threads=1)


@pytest.mark.parametrize("error", [ConfigError("wrong"), MemoryError("full")])
def test_settings_and_memory_are_not_blamed_on_the_family(error: Exception) -> None:
    model = make_model("mixtral")

    def fail() -> nn.Linear:
        raise error

    model.get_output_embeddings = fail
    with pytest.raises(type(error)) as caught:
        QLLMEngine.from_model(model, threads=1)
    assert caught.value is error


def test_an_embedding_of_positions_per_layer_type_is_seen_without_the_check() -> None:
    """Served without it, every layer would get the same positions."""
    model = make_model("mixtral")

    class PerType(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"full_attention": x}

    model.model.rotary_emb = PerType()
    with pytest.raises(
        ModelError, match=r"PerType does not give embeddings of positions: it returned dict"
    ):
        QLLMEngine.from_model(model, threads=1, conformance=False)


def test_layers_of_different_shapes_have_no_prefix_cache() -> None:
    """Their heads or widths differ by type of layer, so no tensor holds the KV of all."""
    model = tiny_configs.tiny_model("mimo_v2_flash")
    settings = {"threads": 1, "max_kv_tokens": 512, "conformance": False}
    with pytest.raises(ConfigError, match="have different shapes"):
        QLLMEngine.from_model(model, prefix_cache="approximate", **settings)
    with QLLMEngine.from_model(model, **settings) as engine:
        assert "different shapes" in engine.stats()["prefix_cache"]["off"]
