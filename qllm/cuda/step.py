"""What one ATTN op attends, as device tensors: the model's modules write and attend through it."""

from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.latents import into_latents, keeps_latents, out_of_latents
from qllm.cuda.pages import Pages
from qllm.kernels.select import Kernels
from qllm.kernels.tiles import Tiles
from qllm.runner.layers.drivers import Rope


class PagedStep:
    """Both the `past_key_values` that a module writes to and the context that it attends with.

    Args:
        pages: The KV.
        kernels: Attend.
        tables_RP: Pages of each sequence.
        tiles: The queries.
        slots_T: Where the KV of each token goes; -1 for padding and dead rows.
    """

    def __init__(
        self, pages: Pages, kernels: Kernels, tables_RP: Tensor, tiles: Tiles, slots_T: Tensor
    ) -> None:
        self._pages, self._kernels = pages, kernels
        self._tables_RP, self._tiles, self._slots_T = tables_RP, tiles, slots_T

    def update(
        self, k_1GTH: Tensor, v_1GTH: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, or latents and their rotated part; `attend` reads the pages.

        Returns:
            Nothing, [1, G, 0, H] each, so that no module works on what is not read.
        """
        k, v = k_1GTH[0].transpose(0, 1), v_1GTH[0].transpose(0, 1)
        self._pages.write(layer_idx, k, v, self._slots_T)
        return k_1GTH[:, :, :0], v_1GTH[:, :, :0]

    def rotate_and_write(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGE: Tensor, rope: Rope
    ) -> None:
        """Rotate queries in place; write rotated keys, and values, to their pages."""
        cos_1TH, sin_1TH = rope
        angles = cos_1TH[0].contiguous(), sin_1TH[0].contiguous()
        self._pages.rotate_and_write(layer, q_TND, k_TGD, v_TGE, angles, self._slots_T)

    def attend(
        self,
        module: nn.Module,
        q_1NTH: Tensor,
        scaling: float | None,
        window: int | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Attention of all queries: [1, T, N, H]; zeros for padding and dead rows."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        k_SGD, v_SGE = self._pages.layer(layer)
        q_TND = q_1NTH[0].transpose(0, 1)
        how: dict[str, Any] = {
            "scale": q_TND.shape[2] ** -0.5 if scaling is None else scaling,
            "window": window,
            "sinks_N": sinks_N,
        }
        if not keeps_latents(module):
            return self._call(q_TND, k_SGD, v_SGE, **how).unsqueeze(0)
        q_TNR, q_rope_TNF = into_latents(module, q_TND)
        how |= {"q_rope_TNF": q_rope_TNF, "k_rope_SF": v_SGE[:, 0]}
        out_TNR = self._call(q_TNR, k_SGD, k_SGD, **how)
        return out_of_latents(module, out_TNR).unsqueeze(0)

    def _call(self, q_TND: Tensor, k_SGD: Tensor, v_SGE: Tensor, **how: Any) -> Tensor:
        out = torch.zeros(
            (*q_TND.shape[:2], v_SGE.shape[2]), dtype=q_TND.dtype, device=q_TND.device
        )
        size, tables = self._pages.page_size, self._tables_RP
        self._kernels.attend(
            q_TND, k_SGD, v_SGE, tables, self._tiles, page_size=size, out_TNE=out, **how
        )
        return out
