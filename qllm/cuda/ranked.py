"""A layer, experts and the head on ranks of devices.

    owner    norm        router                sums      norm                 head's norm, sampling
    ranks         heads          experts, MLP                 (next layer)    token ids

The owner is rank 0. It launches the work of all ranks in turn, so all ranks stop where it stops.
Outputs of products are split, never their inputs, and only the owner adds what several ranks
computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.cuda.experts import DeviceExperts, Router
from qllm.cuda.gathers import Gathers, on_ranks
from qllm.cuda.known import KnownLayer
from qllm.cuda.shares import RankPages, Ranks, Rows, share_of_attention, share_of_experts
from qllm.cuda.step import PagedStep
from qllm.cuda.together import Together
from qllm.kernels.routing import ExpertWeights, Routing, SharedWeights, Sum
from qllm.kernels.select import Kernels
from qllm.kernels.tiles import Tiles
from qllm.models.discover import LayerParts, ModelParts
from qllm.runner.layers.drivers import Rope, RouterExtras
from qllm.runner.layers.linears import Head
from qllm.sharded.plan import without_copies


def on_each(gathers: Gathers, value: Any) -> list[Any]:
    """Return a value on each rank: its tensors, and those inside its tuples, are spread."""
    if isinstance(value, Tensor):
        return list(gathers.spread(value))
    if not isinstance(value, tuple):
        return [value] * len(gathers.devices)
    columns = zip(*(on_each(gathers, x) for x in value), strict=True)
    make: Callable[..., Any] = getattr(type(value), "_make", tuple)
    return [make(column) for column in columns]


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return columns of ranks as one tensor, [T, F]."""
    return torch.cat(list(parts), 1)


def project(gathers: Gathers, linears: Sequence[Rows], parts: Sequence[Tensor]) -> Tensor:
    """Return a projection's outputs on the owner. Each rank computes some, from all inputs.

    Args:
        gathers: Ranks.
        linears: Share of the projection of each rank.
        parts: Inputs that each rank has, [T, some].
    """

    def outputs(own: Rows, inputs: Sequence[Tensor]) -> Any:
        return own(side_by_side(inputs))

    columns = on_ranks(gathers, outputs, linears, gathers.to_all(parts))
    return side_by_side(gathers.to_owner(columns))


class RankSteps:
    """The KV of one ATTN op, as a step of each rank.

    Args:
        pages: Pages of all ranks.
        kernels: Kernels of attention.
        tables_RP: Pages of each sequence.
        tiles: The queries.
        slots_T: Slots for the KV of each token; -1 for padding and dead rows.
    """

    def __init__(
        self, pages: RankPages, kernels: Kernels, tables_RP: Tensor, tiles: Tiles, slots_T: Tensor
    ) -> None:
        given = on_each(pages.gathers, (tables_RP, tiles, slots_T))
        both = zip(pages.parts, given, strict=True)
        self.of_ranks = [PagedStep(part, kernels, *own) for part, own in both]


class RankAttention:
    """The attention of one layer on all ranks.

    Args:
        parts: Parts of the layer.
        ranks: Ranks.
    """

    def __init__(self, parts: LayerParts, ranks: Ranks) -> None:
        attn: Any = parts.self_attn
        self._gathers, self._shares = ranks.gathers, ranks.shares(parts.index)
        each = list(zip(self._shares, ranks.puts(), strict=True))
        self._of = [share_of_attention(parts, share, put) for share, put in each]
        self._out = [Rows(attn.o_proj, share.columns, put) for share, put in each]
        self._norms = (attn.q_norm, attn.k_norm) if self._of[0].normed is not None else None
        self._width = int(getattr(attn, "head_dim", 0))

    def enter(self) -> None:
        """Join the weights that share an input into one tensor."""
        on_ranks(self._gathers, lambda own: own.enter(), self._of)

    def leave(self) -> None:
        """Do nothing: the modules of the model have kept their weights."""

    def __call__(self, x_TD: Tensor, rope: Rope, step: RankSteps) -> Tensor:
        """Return the attention's output for its normed input, on the owner."""
        gathers, angles = self._gathers, on_each(self._gathers, tuple(rope))
        projected = on_ranks(
            gathers, lambda own, x: list(own.project(x)), self._of, gathers.spread(x_TD)
        )
        if self._norms is not None:
            self._norm(projected)
        heads = on_ranks(
            gathers, lambda own, *given: own.heads(*given), self._of, projected, angles,
            step.of_ranks,
        )  # fmt: skip
        return project(gathers, self._out, heads)

    def _norm(self, projected: list[list[Tensor]]) -> None:
        """Norm queries and keys over all heads of a token, on the owner, in place of the parts."""
        assert self._norms is not None
        for i, norm in enumerate(self._norms):
            ranges = [share.kv_heads if i else share.heads for share in self._shares]
            parts = self._gathers.to_owner([own[i] for own in projected])
            every = without_copies(ranges)
            whole = [parts[rank][:, skip * self._width :] for rank, skip in every]
            normed = self._gathers.spread(norm(side_by_side(whole)))
            for own, heads, x in zip(projected, ranges, normed, strict=True):
                own[i] = x[:, heads.start * self._width : heads.stop * self._width]


class RankMlp:
    """A dense MLP, or the shared experts of a layer, on all ranks.

    Args:
        mlp: Module of the usual gated kind.
        layer: Index of the layer.
        ranks: Ranks.
        kernels: Kernels of the devices.
    """

    def __init__(self, mlp: Any, layer: int, ranks: Ranks, kernels: Kernels) -> None:
        self._gathers, self._kernels = ranks.gathers, kernels
        self._into, self._down = [], []
        for share, put in zip(ranks.shares(layer), ranks.puts(), strict=True):
            both = [Rows(x, share.inner, put) for x in (mlp.gate_proj, mlp.up_proj)]
            self._into.append(Together(both))
            self._down.append(Rows(mlp.down_proj, share.columns, put))

    def enter(self) -> None:
        """Join the weights that share an input into one tensor."""
        on_ranks(self._gathers, lambda own: own.enter(), self._into)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output [T, D] on the owner."""
        gathers, gated = self._gathers, self._kernels.silu_mul
        inner = on_ranks(
            gathers, lambda own, x: gated(own.whole(x)), self._into, gathers.spread(x_TD)
        )
        return project(gathers, self._down, inner)


class RankLayer(KnownLayer):
    """A layer on all ranks. The owner has its norms, its router and its sums.

    Args:
        parts: Parts of a layer that `plan_on_devices` accepts.
        experts: Experts of the layer, on all ranks.
        kernels: Kernels of the devices.
        ranks: Ranks.
    """

    def __init__(
        self, parts: LayerParts, experts: DeviceExperts | None, kernels: Kernels, ranks: Ranks
    ) -> None:
        super().__init__(parts, experts, kernels)
        # without `_gate_up`, shared experts are split and do not run as experts
        self._attention, self._gate_up = RankAttention(parts, ranks), None
        mlp = parts.shared if parts.is_moe else parts.mlp
        self._own_mlp = None if mlp is None else RankMlp(mlp, parts.index, ranks, kernels)

    def enter(self) -> None:
        super().enter()
        if self._own_mlp is not None:
            self._own_mlp.enter()

    def _mlp_of(self, x_TD: Tensor) -> Tensor:
        assert self._own_mlp is not None
        return self._own_mlp(x_TD)

    def _shared(self, x_TD: Tensor) -> dict[str, RouterExtras] | None:
        if self._own_mlp is None:
            return None
        shared, gate = self._own_mlp(x_TD), self._parts.shared_gate
        return {"shared": shared if gate is None else torch.sigmoid(gate(x_TD)) * shared}

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        return self._add(mid_TD, self._mlp_of(self._post_norm(mid_TD)))


class RankExperts(DeviceExperts):
    """The experts of one layer: each rank has a range of whole experts.

    Every rank sorts all slots, as one device does, and multiplies those of its experts. The owner
    combines the slots in the order of a token's choice.

    Args:
        weights: Weights of the layer.
        kernels: Kernels that sort, multiply and sum.
        hits: Counter on the owner of the experts whose weights were read.
        layer: Index of the layer.
        ranks: Ranks.
    """

    def __init__(
        self, weights: ExpertWeights, kernels: Kernels, hits: Tensor, layer: int, ranks: Ranks
    ) -> None:
        super().__init__(weights, kernels, hits)
        self._gathers, puts = ranks.gathers, ranks.puts()
        self._ranges = [share.experts for share in ranks.shares(layer)]
        both = zip(self._ranges, puts, strict=True)
        self._shares = [share_of_experts(weights, own, put) for own, put in both]
        unread = torch.zeros_like(hits)
        self._counts = [hits, *(put(unread.clone()) for put in puts[1:])]
        """Counters of each rank. Only that of the owner is read, since all ranks sort alike."""

    def route(self, ids_TK: Tensor, num_tokens: Tensor) -> list[Routing]:
        return self._on_all(super().route(ids_TK, num_tokens), num_tokens)

    def _on_all(self, own: Routing, num_tokens: Tensor) -> list[Routing]:
        """Return the slots of all experts in order on each rank, from those on the owner."""
        found, num_experts = [own], self.weights.num_experts
        for rank, (ids, num) in enumerate(on_each(self._gathers, (own.ids_TK, num_tokens))):
            if rank:
                with self._gathers.on(rank):
                    found.append(self.kernels.route(ids, num, num_experts, self._counts[rank]))
        return found

    def choose_and_run(
        self,
        x_TD: Tensor,
        logits_TE: Tensor,
        router: Router,
        num_tokens: Tensor,
        add: Sum,
        shared: SharedWeights | None = None,
    ) -> Tensor:
        own, weights_TK = self.kernels.choose(
            logits_TE, router.rule, router.top_k, num_tokens, self._counts[0], router.dtype, 0
        )
        routing = self._on_all(own, num_tokens)
        return self._run_all(x_TD, routing, own.ids_TK, weights_TK, num_tokens, add)

    def run_range(
        self, x_TD: Tensor, routing: list[Routing], lo: int, hi: int, slots_TKD: Tensor
    ) -> None:
        """Run experts [lo, hi) on their ranks, and write their slots on the owner.

        So a checkpoint inside EXPERTS is that of one device.
        """
        gathers, shape = self._gathers, slots_TKD.shape
        mine = [range(max(lo, own.start), min(hi, own.stop)) for own in self._ranges]

        def run(x: Tensor, own: range, weights: ExpertWeights, order: Routing) -> Tensor:
            part = x.new_empty(shape, dtype=slots_TKD.dtype)
            if own:
                self.kernels.run_experts(x, weights, order, own.start, own.stop, part)
            return part.flatten(1)

        parts = on_ranks(gathers, run, gathers.spread(x_TD), mine, self._shares, routing)
        ids_TK1 = routing[0].ids_TK[:, :, None]
        for own, part in zip(mine, gathers.to_owner(parts), strict=True):
            is_own = (ids_TK1 >= own.start) & (ids_TK1 < own.stop)
            slots_TKD.copy_(torch.where(is_own, part.view(shape), slots_TKD))


class RankHead(Head):
    """The output head: each rank multiplies by its token ids, in one block of all ids.

    Args:
        parts: Parts of the model.
        ranks: Ranks.
    """

    def __init__(self, parts: ModelParts, ranks: Ranks) -> None:
        self.norm, self._gathers = parts.norm, ranks.gathers
        self.vocab_size = self.block_size = parts.lm_head.out_features
        self.num_blocks, self._native = 1, None
        both = zip(ranks.plan.ranks, ranks.puts(), strict=True)
        self._of = [Rows(parts.lm_head, own.vocabulary, put) for own, put in both]
        self.kernel = f"torch on {len(self._of)} ranks"

    def __call__(self, x_BD: Tensor, block: int = 0) -> Tensor:
        """Return all logits [B, V], on the owner."""
        gathers = self._gathers
        columns = on_ranks(gathers, lambda own, x: own(x), self._of, gathers.spread(x_BD))
        return side_by_side(gathers.to_owner(columns))
