"""Tests of known parts of a model, and of the message for a source that has changed."""

import logging
from pathlib import Path

import pytest
from transformers import FlexOlmoConfig, FlexOlmoForCausalLM
from typer.testing import CliRunner

from qllm.cli import app
from qllm.models.loader import wrap
from qllm.models.parts import fingerprints
from qllm.models.parts.fingerprints import TESTED_TRANSFORMERS
from qllm.models.parts.inventory import changed, parts_of
from qllm.models.parts.known import SOURCE
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
    assert all(part.known.kind and len(part.digest) == 12 for part in parts)
    assert {part.known.how for part in parts} == {SOURCE}
    roles = {part.role for part in parts}
    assert {"layer", "experts block", "attention", "router", "norm"} <= roles
    layers = model.config.num_hidden_layers
    assert sum(part.num_layers for part in parts if part.role == "attention") == layers
    assert sum(part.num_layers for part in parts if part.role == "layer") == layers


def test_nothing_is_said_of_other_families(caplog: pytest.LogCaptureFixture) -> None:
    model = unknown()
    with caplog.at_level(logging.WARNING, "qllm"):
        wrap(model)
    assert not caplog.records
    assert any(part.known.kind is None for part in parts_of(model))


def test_doctor_prints_digests(tmp_path: Path) -> None:
    model = make_model("mixtral")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # the config is enough
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for part in parts_of(model):
        assert part.digest in done.stdout
        assert part.source in done.stdout
    assert "its own module" not in done.stdout
    unknown().config.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", str(tmp_path)])
    assert "FlexOlmoDecoderLayer.forward" in done.stdout
    assert "its own module" in done.stdout
    done = CliRunner().invoke(app, ["doctor", "--fingerprints", "no such folder"])
    assert done.exit_code == 2
    assert "is no alias" in done.output
