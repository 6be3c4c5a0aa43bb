"""Checkpoints whose tensors a test changes before they are read."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import published
from tests.support.copies import copy_into
from tests.support.families import make_model


def made(place: Path, family: str = "mixtral", form: str = "awq") -> Path:
    """Make a quantised checkpoint. The one that it is made of lies beside it."""

    def make(folder: Path) -> None:
        make_model(family, torch.bfloat16).save_pretrained(folder / "plain")
        published.publish(folder / "plain", form, folder)

    copy_into(place, (family, form), make)
    return place / "published"


STEM = "model.layers.1.block_sparse_moe.experts.3"


def change(folder: Path, change_tensors: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
