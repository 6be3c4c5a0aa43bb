"""A writer of checkpoints with seeded noise for a config, tensor by tensor, in little memory.

One block of noise is drawn and repeated: each tensor begins where the one before it ended. The
length of the block is no multiple of a row's, so no two experts are alike.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

SEED = 1
BLOCK = (1 << 24) - 3
EMBEDDING = "embed_tokens"
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def skeleton(config: Any) -> Any:
    """Return the model of a config in bf16, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _is_drawn(name: str, like: Tensor) -> bool:
    return like.dim() >= 2 and not name.endswith("bias")


class Noise:
    """Weights of noise, by name and shape."""

    def __init__(self) -> None:
        rng = np.random.Generator(np.random.PCG64DXSM(SEED))
        self._block = torch.from_numpy(rng.standard_normal(BLOCK, np.float32))
        self._spread: dict[float, Tensor] = {}
        self._at = 0

    def parts(self, name: str, like: Tensor) -> list[Tensor]:
        """Return the parts of a tensor, in order."""
        if _is_drawn(name, like):
            spread = 1.0 if EMBEDDING in name else like.shape[-1] ** -0.5
            return [part.to(like.dtype) for part in self._drawn(spread, like.numel())]
        kind = name.rpartition(".")[2]
        if kind == "A_log":
            value = (torch.arange(like.numel()) % 15 + 1.0).log()
        else:
            value = torch.full(like.shape, 1.0 if kind in ("weight", "dt_bias") else 0.0)
        return [value.to(like.dtype)]

    def _drawn(self, spread: float, count: int) -> list[Tensor]:
        if spread not in self._spread:
            self._spread[spread] = (self._block * spread).bfloat16()
        block, found = self._spread[spread], []
        while count:
            part = block[self._at : self._at + count]
            found.append(part)
            count -= len(part)
            self._at = (self._at + len(part)) % BLOCK
        return found


def write(model: Any, folder: Path) -> None:
    """Write the files of `save_pretrained`, with noise for weights.

    Args:
        model: Result of `skeleton`.
        folder: New folder.
    """
    folder.mkdir(parents=True)
    stored: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, like in stored.items():
        end = at + like.numel() * like.element_size()
        about = {"dtype": DTYPES[like.dtype], "shape": list(like.shape)}
        header[name] = about | {"data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = Noise()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, like in stored.items():
            written = 0
            for part in noise.parts(name, like):
                file.write(part.contiguous().view(torch.uint8).numpy().data)
                written += part.numel()
            assert written == math.prod(like.shape)
    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
