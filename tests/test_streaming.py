"""Experts of a checkpoint are packed as they are read: few are in memory that are not packed."""

import threading
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

PARTS = 2
"""Weights that are read for a packed one, at most: gate and up are stored apart."""


@pytest.mark.parametrize("readers", [1, 2])
def test_a_reader_packs_an_expert_before_it_reads_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """So what is not packed yet is an expert per reader, however many a layer has."""
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder, _ = published.publish(tmp_path / "plain", "awq", tmp_path)
    lock, names, held, most = threading.Lock(), [], 0, 0
    read, take = checkpoint._read, Weights.take

    def reading(name: str, weight: str, *rest: Any) -> Any:
        nonlocal held, most
        if ".experts." in weight:
            with lock:
                names.append(weight)
                held += 1
                most = max(most, held)
        return read(name, weight, *rest)

    def taking(self: Weights, first: int, weights: Any) -> None:
        nonlocal held
        take(self, first, weights)
        with lock:
            held -= sum(map(len, weights))

    monkeypatch.setattr(checkpoint, "_read", reading)
    monkeypatch.setattr(Weights, "take", taking)
    monkeypatch.setattr(streaming, "READERS", readers)
    found = all_quantised(load(folder).model)
    num = sum(experts.num_experts for experts in found.values())
    assert num > 4 * len(found) > 0, "many more than readers"
    assert len(names) == len(set(names)) == 3 * num, "each is read once"
    assert held == 0
    assert most <= PARTS * readers
