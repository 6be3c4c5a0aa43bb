"""The KV of one ATTN op as device tensors, through which the model's modules write and attend."""

from typing import Any

from torch import Tensor, nn

from qllm.cuda.latents import into_latents, keeps_latents, out_of_latents
from qllm.cuda.pages import Pages
from qllm.kernels.routing import Angles, HeadNorms, Norm
from qllm.kernels.select import Kernels
from qllm.kernels.tiles import Tiles
from qllm.runner.layers.drivers import Rope


class PagedStep:
    """The `past_key_values` to which a module writes, and the context with which it attends.

    Args:
        pages: The KV.
        kernels: Kernels of attention.
        tables_RP: Pages of each sequence.
        tiles: The queries.
        slots_T: Slots for the KV of each token; -1 for padding and dead rows.
    """

    def __init__(
        self, pages: Pages, kernels: Kernels, tables_RP: Tensor, tiles: Tiles, slots_T: Tensor
    ) -> None:
        self._pages, self._kernels = pages, kernels
        self._tables_RP, self._tiles, self._slots_T = tables_RP, tiles, slots_T

    def update(
        self, k_1GTH: Tensor, v_1GTH: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, or latents and their rotated part. `attend` reads the pages.

        Returns:
            Empty tensors, [1, G, 0, H] each, so that no module computes with unused values.
        """
        k, v = k_1GTH[0].transpose(0, 1), v_1GTH[0].transpose(0, 1)
        self._pages.write(layer_idx, k, v, self._slots_T)
        return k_1GTH[:, :, :0], v_1GTH[:, :, :0]

    def attend_known(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        rope: Rope,
        norms: HeadNorms | None,
        limit: float | None,
        scaling: float,
        window: int | None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Norm, rotate, write and attend in three launches; return [T, N, E].

        Args:
            layer: Index of the layer.
            qkv: Queries [T, N, D], changed; keys [T, G, D]; values [T, G, E]. Not rotated yet.
            rope: Cos and sin of the tokens' positions, each [1, T, D] or [1, T, D / 2].
            norms: Norms of the heads of queries and keys.
            limit: Bound of projected values, clamped to [-limit, limit]; None is no bound.
            scaling: Factor of the scores.
            window: Number of keys that a query sees, itself included; None is all.
            sinks_N: Score per head of a sink, a key without a value.
        """
        q_TND, k_TGD, v_TGE = qkv
        cos, sin = (angles[0].contiguous() for angles in rope)
        out = q_TND.new_empty((*q_TND.shape[:2], v_TGE.shape[2]))
        pages = self._pages.of(layer, k_TGD, v_TGE)
        given = q_TND, k_TGD, v_TGE, cos, sin, *pages, self._slots_T, out, norms, limit
        self._kernels.rotate_and_write(*given)
        return self._call(q_TND, *pages, out, scale=scaling, window=window, sinks_N=sinks_N)

    def write_latents(
        self,
        layer: int,
        kv_TD: Tensor,
        norm: Norm,
        angles: Angles,
        out_TNR: Tensor,
        compressed: tuple[Tensor, Norm] | None,
    ) -> Tensor | None:
        """Norm and write latents, rotate their keys, and norm queries, in one launch.

        Args:
            layer: Index of the layer.
            kv_TD: A latent and its key for each token.
            norm: Norm of the latents.
            angles: Angles of the tokens' positions.
            out_TNR: Output of `attend_latents`, filled with zeros for padding and dead rows.
            compressed: Queries [T, Q] and their norm; None if queries are not compressed.

        Returns:
            The normed queries, if there are any.
        """
        c_T1R, k_T1F = kv_TD[:, None].tensor_split([out_TNR.shape[2]], 2)
        c_S1R, k_S1F = self._pages.of(layer, c_T1R, k_T1F)
        pages = c_S1R[:, 0], k_S1F[:, 0]
        given = kv_TD, norm, angles, *pages, self._slots_T, out_TNR, *(compressed or ())
        normed: Tensor | None = self._kernels.write_latents(*given)
        return normed

    def attend_latents(
        self,
        layer: int,
        q_TNR: Tensor,
        q_rope_TNF: Tensor,
        angles: Angles,
        scaling: float,
        out_TNR: Tensor,
    ) -> None:
        """Attend over the latents of a layer, in the latents' space, in two launches.

        Args:
            layer: Index of the layer.
            q_TNR: Queries in the space of the latents.
            q_rope_TNF: Rotating part of the queries, not rotated yet.
            angles: Angles of the tokens' positions.
            scaling: Factor of the scores.
            out_TNR: Output in the space of the latents; written in place.
        """
        c_S1R, k_S1F = self._pages.layer(layer)
        how = {"q_rope_TNF": q_rope_TNF, "k_rope_SF": k_S1F[:, 0], "q_angles": angles}
        self._call(q_TNR, c_S1R, c_S1R, out_TNR, scale=scaling, window=None, sinks_N=None, **how)

    def attend(
        self,
        module: nn.Module,
        q_1NTH: Tensor,
        scaling: float | None,
        window: int | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Return the attention of all queries, [1, T, N, H], zeros for padding and dead rows."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        k_SGD, v_SGE = self._pages.layer(layer)
        q_TND = q_1NTH[0].transpose(0, 1)
        how: dict[str, Any] = {
            "scale": q_TND.shape[2] ** -0.5 if scaling is None else scaling,
            "window": window,
            "sinks_N": sinks_N,
        }
        if not keeps_latents(module):
            return self._call(q_TND, k_SGD, v_SGE, None, **how).unsqueeze(0)
        q_TNR, q_rope_TNF = into_latents(module, q_TND)
        how |= {"q_rope_TNF": q_rope_TNF, "k_rope_SF": v_SGE[:, 0]}
        out_TNR = self._call(q_TNR, k_SGD, k_SGD, None, **how)
        return out_of_latents(module, out_TNR).unsqueeze(0)

    def _call(
        self, q_TND: Tensor, k_SGD: Tensor, v_SGE: Tensor, out: Tensor | None, **how: Any
    ) -> Tensor:
        if out is None:
            out = q_TND.new_zeros((*q_TND.shape[:2], v_SGE.shape[2]))
        size, tables = self._pages.page_size, self._tables_RP
        self._kernels.attend(
            q_TND, k_SGD, v_SGE, tables, self._tiles, page_size=size, out_TNE=out, **how
        )
        return out
