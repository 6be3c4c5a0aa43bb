"""What one ATTN op attends, as device tensors: the model's modules write and attend through it."""

from torch import Tensor, nn

from qllm.cuda.pages import Pages
from qllm.kernels.device import Kernels
from qllm.kernels.tiles import Tiles


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
        """Write keys and values; `attend` reads them from their pages."""
        k, v = k_1GTH[0].transpose(0, 1), v_1GTH[0].transpose(0, 1)
        self._pages.write(layer_idx, k, v, self._slots_T)
        return k_1GTH, v_1GTH

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
        out = q_TND.new_zeros((*q_TND.shape[:2], v_SGE.shape[2]))
        self._kernels.attend(
            q_TND,
            k_SGD,
            v_SGE,
            self._tables_RP,
            self._tiles,
            page_size=self._pages.page_size,
            scale=q_TND.shape[2] ** -0.5 if scaling is None else scaling,
            window=window,
            sinks_N=sinks_N,
            out_TNE=out,
        )
        return out.unsqueeze(0)
