"""Draft models on disk, and engines that draft with them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.drafters.model import DraftModel
from qllm.models.loader import load
from qllm.runner.kv import SlabKV
from tests.support.families import make_model
from tests.support.inside import loop_of

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
SAME, OTHER = 0, 1
"""Seeds of a draft model with the weights of the model, and of one with other weights."""


def saved(folder: Path, family: str, seed: int = SAME) -> Path:
    """A folder with a random model of a family."""
    found = folder / f"{family}-{seed}"
    if not found.is_dir():
        make_model(family, torch.bfloat16, seed=seed).save_pretrained(found)
    return found


def engine_of(folder: Path, family: str = "mixtral", **settings: Any) -> QLLMEngine:
    """An engine of a saved model: its rope is that of a draft model that is loaded too."""
    how: dict[str, Any] = {"threads": 1, "conformance": False, "max_kv_tokens": 4096, **settings}
    return QLLMEngine.from_model(load(saved(folder, family)).model, **how)


def drafting(
    folder: Path, family: str = "mixtral", seed: int = SAME, **settings: Any
) -> QLLMEngine:
    """An engine with a draft model that always drafts as much as it may."""
    engine = engine_of(folder, family, draft=f"model:{saved(folder, family, seed)}", **settings)
    loop_of(engine).drafts._weighs = False
    model_in(engine)._turn_ns = 1 << 60  # no result depends on the time of this machine
    return engine


def model_in(engine: QLLMEngine) -> DraftModel:
    """The draft model of an engine that runs on a thread of this process."""
    found = loop_of(engine).drafts._model
    assert isinstance(found, DraftModel)
    return found


def poison_cut(patch: pytest.MonkeyPatch) -> None:
    """Overwrite KV that is cut with NaN, so that nothing may read it."""
    cut = SlabKV.cut

    def poisoned(kv: SlabKV, num_tokens: int, blocks: Any) -> None:
        for slab in kv.slabs:
            for t in slab or ():
                with torch.inference_mode():
                    t.narrow(2, num_tokens, max(0, kv.written - num_tokens)).fill_(math.nan)
        cut(kv, num_tokens, blocks)

    patch.setattr(SlabKV, "cut", poisoned)
