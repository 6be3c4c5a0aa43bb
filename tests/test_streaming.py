"""Experts of a checkpoint are read while those before are packed, and no sooner."""

from pathlib import Path
from typing import Any

import published
import pytest
import torch
from families import make_model

from qllm.models import checkpoint, streaming
from qllm.models.loader import load
from qllm.models.quantised_experts import all_quantised
from qllm.models.quantised_weights import Weights


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_expert_is_read_before_those_two_steps_ahead_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """So codes of two steps are in memory beside what is packed, however many experts there are."""
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder, _ = published.publish(tmp_path / "plain", "awq", tmp_path)
    log: list[str] = []
    read, take = checkpoint._read, Weights.take

    def reading(name: str, weight: str, *rest: Any) -> Any:
        log.append(weight)
        return read(name, weight, *rest)

    def taking(self: Weights, first: int, weights: Any) -> None:
        take(self, first, weights)
        log.append(f"packed {first + len(weights)}")

    monkeypatch.setattr(checkpoint, "_read", reading)
    monkeypatch.setattr(Weights, "take", taking)
    monkeypatch.setattr(streaming, "AT_ONCE", at_once)
    held = all_quantised(load(folder).model)
    assert len(held) == 3
    for layer, experts in enumerate(held.values()):
        for names in (("w1", "w3"), ("w2",)):
            start = f"model.layers.{layer}.block_sparse_moe.experts."
            own = [f"{start}{e}.{w}.weight" for e in range(experts.num_experts) for w in names]
            assert all(log.count(name) == 1 for name in own), "each is read once"
            for expert in range(2 * at_once, experts.num_experts):
                ahead = f"packed {(expert // at_once - 1) * at_once}"
                for name in (f"{start}{expert}.{w}.weight" for w in names):
                    of_layer = log[min(map(log.index, own)) : log.index(name)]
                    assert ahead in of_layer, (name, of_layer)
