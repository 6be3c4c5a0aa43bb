"""One layer of a rank: products by columns, experts by units, and rows that are whole or split.

    attention    own heads on own KV             columns of the heads    -> all columns
    output       own columns of all rows, or all columns of own rows
    norm, router own rows                        normed rows, ids        -> all rows
    experts      units of own experts            slots                   -> all slots
    MLP          own inner values                inner values            -> all inner values
                 own columns                     columns                 -> all columns of own rows
    sums         own rows                        rows                    -> all rows

An arrow is a gather. Between two arrows no element depends on another rank's work, so both forms of
rows have the same bits.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention, Latents
from qllm.kernels.cpu.experts import on_top, swiglu
from qllm.kernels.cpu.quantised import expands, matrix_of
from qllm.kernels.quantised import Quantised
from qllm.runner.layers.attention import Step
from qllm.runner.layers.drivers import Rope
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import (
    HeadWeights,
    LatentWeights,
    MlpWeights,
    Projection,
    matrix,
    norm_of,
    router_of,
)
from qllm.runner.layers.work import Work
from qllm.sharded.group import Form, Member, joined
from qllm.sharded.plan import LayerShare
from qllm.sharded.weights import LayerWeights

UNIT_ROWS = 64
"""Most rows of a work unit of experts. No result depends on this number."""


class RankAttention:
    """Attention of a rank's query heads on their KV heads.

    Args:
        weights: Weights of all heads.
        share: Share of the rank.
        parts: Number of the layer in the cache, and its window.
        member: Rank in its group.
        arena: Allocator of the packed weights.
    """

    def __init__(
        self,
        weights: HeadWeights | LatentWeights,
        share: LayerShare,
        parts: tuple[int, int | None],
        member: Member,
        arena: cpu.Arena,
    ) -> None:
        (self._index, self._window), self._member, self._share = parts, member, share
        self._norm, self._gate = weights.norm, None
        self._qk_norm = None
        """Norms over all heads of queries and of keys, whose values other ranks have too."""
        self._has_own_keys = True
        """False if the rank before this one has the same keys."""
        self.kernel: Attention | Latents
        if isinstance(weights, LatentWeights):
            latents = weights.share(share.heads)
            refuse_lost_rounding(_stacked(weights), _stacked(latents))
            self.kernel = latents.kernel(arena)
            return
        heads = weights.share(share.heads, share.kv_heads)
        refuse_lost_rounding(_stacked(weights), _stacked(heads))
        if weights.norm_is_whole:
            self._qk_norm, heads = heads.qk_norm, heads._replace(qk_norm=None)
            per = weights.num_heads // weights.num_kv_heads
            self._has_own_keys = share.heads.start == share.kv_heads.start * per
        if heads.gate is not None:
            self._gate = matrix([heads.gate], arena)
        self.kernel = heads.kernel(arena)

    def __call__(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        """Write KV of all rows and attend; return the columns of the rank's heads."""
        spans = step.addresses(self.kernel.slab, x_TD)
        step.reach()
        place = self._index, spans.address, len(step.spans)
        kernel, norms = self.kernel, self._qk_norm
        if norms is not None:
            assert isinstance(kernel, Attention)
            rows = self._normed(kernel, x_TD)
            q = kernel.place(rows, rope[0], rope[-1], *place)
        else:
            q = kernel.enter(x_TD, rope[0], rope[-1], *place)
        out = kernel.attend(q, self._index, self._window, *place[1:], whole=True)
        if self._gate is not None:
            by = self._gate.linear(self._norm(x_TD))
            cpu.native.gate(out.data_ptr(), by.data_ptr(), out.numel())
        return out

    def _normed(self, kernel: Attention, x_TD: Tensor) -> Tensor:
        """Return the own queries, keys and values, after norms over the heads of all ranks."""
        assert self._qk_norm is not None
        width, share = kernel.slab[1], self._share
        num, num_kv = len(share.heads) * width, len(share.kv_heads) * width
        rows = kernel.qkv.linear(kernel.norm(x_TD))
        q, k, v = torch.split(rows, [num, num_kv, num_kv], 1)
        normed = []
        mine = (q, share.heads), (k if self._has_own_keys else k[:, :0], share.kv_heads)
        for norm, (part, heads) in zip(self._qk_norm, mine, strict=True):
            whole = norm(joined(self._member, part, 1))
            normed.append(whole[:, heads.start * width : heads.stop * width])
        return torch.cat([*normed, v], 1)


def _stacked(weights: HeadWeights | LatentWeights) -> list[Projection]:
    """Return the projections that are one matrix."""
    if isinstance(weights, LatentWeights):
        return [weights.queries if weights.low is None else weights.low, weights.latent]
    return [weights.queries, weights.keys, weights.values]


def refuse_lost_rounding(whole: Sequence[Projection], share: Sequence[Projection]) -> None:
    """Refuse a share that would read other activations than the whole weight.

    Weights of several formats become one bf16 matrix unless they end with a panel. A bf16 matrix
    rounds no activations.

    Raises:
        ModelError: The share and the whole differ in this, and the whole rounds activations.
    """
    found = [[p.weight for p in each] for each in (whole, share)]
    rounds = any(isinstance(w, Quantised) and w.activations != "bf16" for w in found[0])
    if rounds and expands(found[0]) != expands(found[1]):
        raise ModelError(
            "queries, keys and values are quantised in several formats, with rounded activations, "
            f"and a rank's share of them has {share[0].num_outputs} queries, no multiple of "
            f"{cpu.PANEL}; use one rank, or activations='bf16'"
        )


class RankMlp:
    """A rank's share of a dense layer's MLP, or of shared experts: inner values, and columns.

    Args:
        weights: Whole weights.
        share: Share of the rank.
        arena: Allocator of the packed weights.
    """

    def __init__(self, weights: MlpWeights, share: LayerShare, arena: cpu.Arena) -> None:
        inner, columns = share.inner, share.columns
        self._into: cpu.Matrix | None = None
        self._out: cpu.Matrix | None = None
        if inner:
            gate, up = (
                Projection(w).rows(inner.start, inner.stop).weight
                for w in (weights.gate, weights.up)
            )
            self._into = matrix_of([on_top(gate, up)], arena=arena)
        if columns:
            down = Projection(weights.down).rows(columns.start, columns.stop).weight
            self._out = matrix_of([down], arena=arena)
        self._share = None if weights.share is None else matrix_of([weights.share], arena=arena)

    def __call__(self, normed: Tensor, form: Form) -> Tensor:
        """Return the output of the own rows, from the normed input of all rows."""
        inner = normed.new_empty((len(normed), 0))
        if self._into is not None:
            inner = swiglu(self._into.linear(normed))
        inner = joined(form.member, inner, 1)
        out = normed.new_empty((len(normed), 0))
        if self._out is not None:
            out = self._out.linear(inner)
        if self._share is not None and self._out is not None:
            by = self._share.linear(normed).expand_as(out).contiguous()
            cpu.native.gate(out.data_ptr(), by.data_ptr(), out.numel())
        return form.all_columns(out)


class RankExperts:
    """The routed experts of a rank.

    Args:
        bank: Experts of all ranks.
        own: Numbers of the rank's experts.
    """

    def __init__(self, bank: NativeBank, own: range) -> None:
        self._bank, self._own = bank, own
        self._kernel = bank.packed(own)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, member: Member) -> Work:
        """Run the units of the own experts; return the work with the slots of all ranks."""
        work = Work(self._bank, ids_TK, UNIT_ROWS)
        units = [unit for unit in work.units if unit.expert in self._own]
        own = work.slots_SD[:0]
        if units:
            first = self._own.start
            flat = array("q", [x for e, lo, hi in units for x in (e - first, lo, hi)])
            address = flat.buffer_info()[0]
            self._kernel.run(x_TD, work.token_S, address, len(units), work.slots_SD)
            own = work.slots_SD[units[0].lo : units[-1].hi]
        work.slots_SD = joined(member, own, 0)  # slots are sorted by expert
        return work


class RankLayer:
    """One layer of a rank.

    Args:
        weights: Weights of the whole layer.
        share: Share of the rank.
        bank: Routed experts of the layer; None in a dense layer.
        member: Rank in its group.
        arena: Allocator of the packed weights.
    """

    def __init__(
        self,
        weights: LayerWeights,
        share: LayerShare,
        bank: NativeBank | None,
        member: Member,
        arena: cpu.Arena,
    ) -> None:
        parts = weights.parts
        attn: Any = parts.self_attn
        place = int(attn.layer_idx), parts.window
        self.attention = RankAttention(weights.attention, share, place, member, arena)
        self._out = matrix([weights.attention.out], arena)
        columns = share.columns
        self._own_out = self._out.columns(columns.start, columns.stop) if columns else None
        self._mlp = None if weights.mlp is None else RankMlp(weights.mlp, share, arena)
        self._experts = None if bank is None else RankExperts(bank, share.experts)
        post_norm = parts.post_attention_layernorm
        self._norm = norm_of(post_norm)
        self._router = None if parts.router is None else router_of(parts.router, post_norm)
        self._scale = parts.residual_multiplier

    def __call__(self, x_TD: Tensor, rope: Rope, step: Step, form: Form) -> Tensor:
        """Return the input of the next layer, all rows."""
        attended = self._project(self.attention(x_TD, rope, step), form)
        mid = self._add(x_TD[form.own.start : form.own.stop], attended)
        out = self._routed(mid, form) if self._experts is not None else self._dense(mid, form)
        return form.all_rows(self._add(mid, out))

    def _project(self, part: Tensor, form: Form) -> Tensor:
        """Return the attention's output of the own rows, from the own heads of all rows."""
        heads = form.all_columns(part)
        if form.split:
            return self._out.linear(heads)
        columns = heads.new_empty((len(heads), 0))
        if self._own_out is not None:
            columns = self._own_out.linear(heads)
        return form.all_columns(columns)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self._scale is None else x + y * self._scale

    def _dense(self, mid: Tensor, form: Form) -> Tensor:
        assert self._mlp is not None
        return self._mlp(form.all_rows(self._norm(mid)), form)

    def _routed(self, mid: Tensor, form: Form) -> Tensor:
        assert self._router is not None
        assert self._experts is not None
        normed, ids, weights = self._router(mid)
        normed, ids = form.all_rows(normed), form.all_rows(ids)
        work, top_k = self._experts(normed, ids, form.member), ids.shape[1]
        inverse = work.inverse_S[form.own.start * top_k : form.own.stop * top_k]
        out = cpu.combine(work.slots_SD, inverse, weights)
        return out if self._mlp is None else out + self._mlp(normed, form)
