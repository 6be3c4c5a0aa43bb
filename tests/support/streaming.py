"""Checkpoints whose tensors a test changes before they are read."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import published
from tests.support.families import make_model


def made(place: Path) -> Path:
    make_model("mixtral", torch.bfloat16).save_pretrained(place / "plain")
    return published.publish(place / "plain", "awq", place)[0]


STEM = "model.layers.1.block_sparse_moe.experts.3"


def change(folder: Path, change_tensors: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
