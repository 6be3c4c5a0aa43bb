"""What is known of the parts of a model, and what is said where a source has changed."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import FlexOlmoConfig, FlexOlmoForCausalLM
from typer.testing import CliRunner

from qllm import QLLMEngine
from qllm.cli import app
from qllm.models import fingerprints
from qllm.models.discover import discover
from qllm.models.fingerprints import TESTED_TRANSFORMERS, changed, parts_of
from qllm.models.loader import wrap
from qllm.types import Driver
from tests.support.families import FAMILIES, make_model
from tests.support.files import ROOT


def unknown() -> FlexOlmoForCausalLM:
    """A family whose layers are driven by hooks."""
    config = FlexOlmoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_experts=4,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return FlexOlmoForCausalLM(config).eval()


def test_the_tables_are_of_the_version_that_tests_install() -> None:
    assert f"transformers=={TESTED_TRANSFORMERS}" in (ROOT / "constraints.txt").read_text().split()


def test_the_tables_are_of_the_families_that_tests_run() -> None:
    assert set(FAMILIES) == fingerprints.FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_family_is_known(family: str) -> None:
    model = make_model(family)
    parts = parts_of(model)
    assert changed(model) == []
    assert all(part.kind and len(part.digest) == 12 for part in parts)
    roles = {part.role for part in parts}
    assert {"layer", "experts block", "attention", "router", "norm"} <= roles
    layers = model.config.num_hidden_layers
    assert sum(part.num_layers for part in parts if part.role == "attention") == layers
    assert sum(part.num_layers for part in parts if part.role == "layer") == layers


def test_a_changed_source_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen3_moe")
    with caplog.at_level(logging.WARNING, "qllm"):
        wrap(model)
    assert not caplog.records
    for table in ("ATTENTION", "ROUTER"):
        monkeypatch.setattr(fingerprints, table, {})
    with caplog.at_level(logging.WARNING, "qllm"):
        wrap(model)
    said = caplog.records[-1].getMessage()
    assert "Qwen3MoeAttention.forward, Qwen3MoeTopKRouter.forward are" in said
    assert f"tested with ({TESTED_TRANSFORMERS})" in said


def test_nothing_is_said_of_other_families(caplog: pytest.LogCaptureFixture) -> None:
    model = unknown()
    with caplog.at_level(logging.WARNING, "qllm"):
        wrap(model)
    assert not caplog.records
    assert any(part.kind is None for part in parts_of(model))


def test_doctor_prints_digests(tmp_path: Path) -> None:
    model = make_model("mixtral")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # the config is enough
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for part in parts_of(model):
        assert part.digest in done.stdout
        assert part.source in done.stdout
    assert "unknown" not in done.stdout.split("transformers")[0]
    unknown().config.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", str(tmp_path)])
    assert "FlexOlmoDecoderLayer.forward" in done.stdout
    assert "unknown" in done.stdout.split("transformers")[0]
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", "no such folder"])
    assert done.exit_code == 2
    assert "is no alias" in done.output


def _older_router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of GraniteMoeTopKRouter in transformers 5.17."""
    router_logits = F.linear(hidden_states, self.weight).float()
    top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)
    top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)
    return top_k_index, top_k_weights, router_logits


def _older_block(self: Any, layer_input: Tensor) -> Tensor:
    """The forward of GraniteMoeMoE in transformers 5.17."""
    bsz, length, emb_size = layer_input.size()
    hidden_states = layer_input.reshape(-1, emb_size)
    top_k_index, top_k_weights, _ = self.router(hidden_states)
    layer_output = self.experts(hidden_states, top_k_index, top_k_weights)
    return layer_output.view(bsz, length, self.input_size)


def test_granite_of_an_older_transformers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("granitemoe")
    prompt = torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(prompt).logits
        block = model.model.layers[0].block_sparse_moe
        monkeypatch.setattr(type(block), "forward", _older_block)
        monkeypatch.setattr(type(block.router), "forward", _older_router)
        assert torch.equal(model(prompt).logits, logits)
        expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 11:].tolist()
    assert changed(model) == []
    assert {layer.driver for layer in discover(model).layers} == {Driver.FAST}
    with QLLMEngine.from_model(model, max_kv_tokens=1024) as engine:
        handle = engine.submit(prompt[0].tolist(), max_tokens=8, temperature=0)
        assert list(handle.result(300).token_ids) == expected
