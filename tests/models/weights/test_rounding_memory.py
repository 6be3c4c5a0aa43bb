"""What rounding a checkpoint takes in memory while it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qllm.models.loader import load
from qllm.models.weights.formats import rounding
from qllm.models.weights.quantised_experts import all_quantised
from qllm.models.weights.quantised_linears import weight_bytes
from tests.support.families import make_model
from tests.support.loads import bytes_of_layer


@pytest.mark.parametrize("how", ["int4", "mxfp4"])
def test_rounding_takes_no_more_than_the_packed_model_and_a_layer(
    live: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is rounded is many bytes on its way, in a stack too."""
    model = make_model("gpt_oss", torch.bfloat16)
    most = bytes_of_layer(model)
    model.save_pretrained(tmp_path)
    del model
    monkeypatch.setattr(rounding, "AT_ONCE", 1 << 9)
    with live:
        model = load(tmp_path, expert_weights=how).model
    assert len(all_quantised(model)) > 1
    assert live.most <= weight_bytes(model) + most
    one, before = torch.ones(512, 64, dtype=torch.bfloat16), live.now
    live.most = before
    with live:
        rounding.ROUNDINGS[how](one)
    assert live.most - before < 2 * one.nbytes  # itself, its codes, and a part on its way
