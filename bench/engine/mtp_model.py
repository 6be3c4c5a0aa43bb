"""A GLM-4.5 of about 300M random weights, with a further layer that predicts the next token (MTP).

The layers add little to the embedding, and the further layer passes the embedding on. So both know
the same, and most drafts are right. The work is that of any model of this shape.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from qllm.measure.random_moe import SIZES

QUIET = 0.005
"""Factor of what each layer adds to the residual stream."""
ASIDE = 0.05
"""Size of the part of the model's states in the further layer's input."""


def save_mtp_model(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint, as published ones are: the further layer is behind the last one."""
    shape = dict(SIZES["300m"])
    experts, num = shape.pop("num_experts"), shape.pop("num_hidden_layers")
    config = Glm4MoeConfig(
        **shape,
        num_hidden_layers=num + 1,
        n_routed_experts=experts,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        intermediate_size=4 * shape["moe_intermediate_size"],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model: Any = Glm4MoeForCausalLM(config).to(torch.bfloat16)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            size = 0.5 if "embed" in name else p.shape[-1] ** -0.5
            p.data.normal_(0, size * (QUIET if "o_proj" in name or "down_proj" in name else 1))
    model.save_pretrained(folder)
    path, begin, width = folder / "model.safetensors", f"model.layers.{num}.", shape["hidden_size"]
    tensors = load_file(path)
    beside = torch.randn(width, width) * ASIDE * width**-0.5
    further = {
        "eh_proj.weight": torch.cat([torch.eye(width), beside], 1),
        "enorm.weight": torch.ones(width),
        "hnorm.weight": torch.ones(width),
        "shared_head.norm.weight": torch.ones(width),
    }
    tensors |= {begin + name: t.to(torch.bfloat16) for name, t in further.items()}
    save_file(tensors, path, {"format": "pt"})
    config.num_hidden_layers, config.dtype = num, torch.bfloat16
    config.save_pretrained(folder)
