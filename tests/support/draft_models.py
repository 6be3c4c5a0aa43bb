"""Draft models on disk, and engines that draft with them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qllm import QLLMEngine
from qllm.drafters.model import DraftModel
from qllm.models.loader import load
from qllm.runner.kv import SlabKV
from tests.support.families import make_model
from tests.support.inside import loop_of

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
SAME, OTHER = 0, 1
"""Seeds of a draft model with the weights of the model, and of one with other weights."""
MTP = 2
"""In place of a seed: the draft model is the further layer of the model's own checkpoint."""
WITH_MTP = "deepseek_v3+mtp"
"""DeepSeek V3 with that layer behind the last one."""


def saved(folder: Path, family: str, seed: int = SAME) -> Path:
    """A folder with a random model of a family."""
    found = folder / f"{family}-{seed}"
    if not found.is_dir():
        if family == WITH_MTP:
            save_with_mtp(found)
        else:
            make_model(family, torch.bfloat16, seed=seed).save_pretrained(found)
    return found


def save_with_mtp(folder: Path, *, change: float = 0.05, aside: float = 0.1) -> None:
    """Write a model and a further layer whose drafts are often right, and often wrong.

    The layers of both change the embeddings little, and the further layer reads the same embedding.
    So it chooses the same token, if the states that it reads beside do not change this.

    Args:
        folder: The folder, which does not exist.
        change: Factor of all that layers add.
        aside: Size of the states' part of the further layer's input.
    """
    family = WITH_MTP.partition("+")[0]
    model = make_model(family, torch.bfloat16)
    num, width = model.config.num_hidden_layers, model.config.hidden_size
    longer = make_model(family, model.dtype, seed=7, num_layers=num + 1)
    longer.load_state_dict(model.state_dict(), strict=False)
    longer.save_pretrained(folder)
    begin, path = f"model.layers.{num}.", folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * change
    torch.manual_seed(8)
    other = torch.randn(width, width, dtype=torch.float32) * aside * width**-0.5
    extra = {
        "eh_proj.weight": torch.cat([torch.eye(width), other], 1),
        "enorm.weight": torch.ones(width),
        "hnorm.weight": torch.ones(width) + 0.1 * torch.randn(width),
        "shared_head.norm.weight": tensors["model.norm.weight"].float(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    tensors |= {begin + name: t.to(model.dtype).contiguous() for name, t in extra.items()}
    save_file(tensors, path, {"format": "pt"})
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)


def engine_of(folder: Path, family: str = "mixtral", **settings: Any) -> QLLMEngine:
    """An engine of a saved model: its rope is that of a draft model that is loaded too."""
    how: dict[str, Any] = {"threads": 1, "conformance": False, "max_kv_tokens": 4096, **settings}
    return QLLMEngine.from_model(load(saved(folder, family)).model, **how)


def drafting(
    folder: Path, family: str = "mixtral", seed: int = SAME, **settings: Any
) -> QLLMEngine:
    """An engine with a draft model that always drafts as much as it may."""
    draft = "mtp" if seed == MTP else f"model:{saved(folder, family, seed)}"
    engine = engine_of(folder, family, draft=draft, **settings)
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
