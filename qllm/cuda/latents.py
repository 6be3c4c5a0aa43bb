"""Multi-head latent attention (MLA) on a device, over latents that are never expanded.

MLA caches one vector per token, the latent. The keys and values of all heads are products of the
latent. Each query head is projected into the space of the latents before attention, and its output
is projected out of that space. These are two batched products with as many rows as queries, however
long the context is. `KnownLatents` runs attention of a known kind. Otherwise the module runs its
attention, up to that product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.heard import is_heard
from qllm.models.parts.known import expansion


def keeps_latents(module: nn.Module) -> bool:
    """Return True if an attention module caches latents and expands them itself."""
    return hasattr(module, "expand_kv")


class Latents:
    """The attention modules of a model that cache latents.

    Args:
        modules: Attention modules of all layers.

    Raises:
        ModelError: A module expands its latents in an unknown way, or has a hook that no kernel
            would call.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules: list[Any] = [m for m in modules if keeps_latents(m)]
        for module in self.modules:
            proj = module.kv_b_proj
            is_known = expansion(module).kind is not None
            if not (is_known and type(proj) is nn.Linear and proj.bias is None):
                raise ModelError(
                    f"layer {module.layer_idx}: {type(module).__name__} expands its latents in a "
                    "way that is not known; no device kernel attends over them"
                )
            if is_heard(proj):
                raise ModelError(
                    f"layer {module.layer_idx}: a hook listens to kv_b_proj, which no device "
                    "kernel calls: it is multiplied into the queries; remove the hook"
                )

    def enter(self) -> None:
        """Skip the expansion in steps that give the modules no latents to expand."""
        for module in self.modules:
            module.expand_kv = _unless_empty(module.expand_kv)

    def leave(self) -> None:
        """Restore the modules."""
        for module in self.modules:
            vars(module).pop("expand_kv", None)


def _unless_empty(expand: Any) -> Any:
    def expand_kv(kv_1GTR: Tensor, rot_1GTF: Tensor) -> tuple[Tensor, Tensor]:
        if kv_1GTR.shape[2] == 0:
            return kv_1GTR, rot_1GTF
        keys, values = expand(kv_1GTR, rot_1GTF)
        return keys, values

    return expand_kv


def _expansion(module: Any) -> tuple[Tensor, Tensor]:
    """Return the halves of the expansion's weight: keys [N, D, R] and values [N, E, R]."""
    rank, key, value = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight.view(-1, key + value, rank)
    keys, values = torch.split(weight, [key, value], 1)
    return keys, values


def into_latents(module: nn.Module, q_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries in the space of the latents [T, N, R], and their rotated part [T, N, F]."""
    keys_NDR, _ = _expansion(module)
    width = keys_NDR.shape[1]
    q_TND, q_rope_TNF = torch.split(q_TND, [width, q_TND.shape[2] - width], 2)
    return torch.bmm(q_TND.transpose(0, 1), keys_NDR).transpose(0, 1), q_rope_TNF


def out_of_latents(module: nn.Module, out_TNR: Tensor) -> Tensor:
    """Return the attention's output as values [T, N, E], contiguous."""
    _, values_NER = _expansion(module)
    values_TNE = out_TNR.new_empty((*out_TNR.shape[:2], values_NER.shape[1]))
    out_NTR, values_NRE = out_TNR.transpose(0, 1), values_NER.transpose(1, 2)
    torch.bmm(out_NTR, values_NRE, out=values_TNE.transpose(0, 1))
    return values_TNE
