"""Experts of a checkpoint are packed as they are read, and what cannot be read is named."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from families import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from qllm.errors import ModelError
from qllm.models import checkpoint, streaming
from qllm.models.loader import load
from qllm.models.quantised_experts import all_quantised
from qllm.models.quantised_weights import Weights

PARTS = 2
"""Weights that are read for a packed one, at most: gate and up are stored apart."""


def made(place: Path) -> Path:
    make_model("mixtral", torch.bfloat16).save_pretrained(place / "plain")
    return published.publish(place / "plain", "awq", place)[0]


@pytest.mark.parametrize("readers", [1, 2])
def test_a_reader_packs_an_expert_before_it_reads_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """So what is not packed yet is an expert per reader, however many a layer has."""
    folder = made(tmp_path)
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


@pytest.mark.parametrize("part", ["qweight", "qzeros"])
@pytest.mark.parametrize("cut", [lambda x: x[:0], lambda x: x[0, 0], lambda x: x[:-1]])
def test_parts_of_any_shape_name_the_weight(
    tmp_path: Path, part: str, cut: Callable[[Tensor], Tensor]
) -> None:
    path = made(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.block_sparse_moe.experts.0.w1.{part}"
    tensors[name] = cut(tensors[name]).clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\..*experts\.0\.w1\.weight: .* fit"):
        load(path.parent)
