"""Models whose linear modules are packed."""

from pathlib import Path
from typing import Any

import torch

from tests.support import published
from tests.support.families import make_model


def made(
    place: Path, family: str = "qwen3_moe", form: str = "packed", **more: Any
) -> tuple[Path, Path]:
    """A checkpoint whose head is quantised too, and the one with its values."""
    make_model(family, torch.bfloat16).save_pretrained(place / "plain")
    return published.publish(place / "plain", form, place, published.EVERY, **more)
