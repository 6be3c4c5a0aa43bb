"""Models whose linear modules are packed."""

from pathlib import Path

import torch

from tests.support import published
from tests.support.copies import copy_into
from tests.support.families import make_model


def made(
    place: Path, family: str = "qwen3_moe", form: str = "packed", others: published.Others = ()
) -> tuple[Path, Path]:
    """Make a checkpoint whose head is quantised too, and the one with its values."""

    def make(folder: Path) -> None:
        make_model(family, torch.bfloat16).save_pretrained(folder / "plain")
        published.publish(folder / "plain", form, folder, published.EVERY, others)

    copy_into(place, (family, form, tuple(others)), make)
    return place / "published", place / "values"
