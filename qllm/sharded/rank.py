"""A model that is split over ranks, and the weights of one rank."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.models.discover import ModelParts, base_model, discover
from qllm.models.unsafe import refuse_unsafe
from qllm.models.weights.activations import read_rows, refuse_other_activations
from qllm.runner.inference import inference
from qllm.runner.layers.experts import expert_banks
from qllm.runner.layers.linears import HEAD_BLOCK
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import Projection, matrix
from qllm.runner.layers.rows import PLAIN
from qllm.runner.sweep import LayerStruct
from qllm.sharded.layer import RankLayer
from qllm.sharded.plan import ShardPlan, plan_of
from qllm.sharded.weights import LayerWeights, refuse_unsplit, shape_of


class SplitModel(NamedTuple):
    """A model and its split. The modules keep their weights, of which ranks pack copies."""

    model: nn.Module
    parts: ModelParts
    plan: ShardPlan
    banks: tuple[NativeBank | None, ...]
    """Routed experts of every layer; None for a dense layer."""


def split_model(
    model: nn.Module, tp: int, *, expert_weights: str = "auto", activations: str = "bf16"
) -> SplitModel:
    """Return the split of a model over `tp` ranks.

    Args:
        model: Whole model in evaluation mode, which no runner drives.
        tp: Number of ranks.
        expert_weights: Format of experts: see `EngineConfig`. Formats of 4 bits round the model's
            weights permanently.
        activations: Dtype of the inputs of quantised products: see `EngineConfig`. The model's own
            forward uses them too.

    Raises:
        ModelError: A part of the model cannot be split.
        ConfigError: The model cannot be split over so many ranks, or has no such experts.
    """
    refuse_unsafe(model, on_ranks=True)
    with inference():
        parts = discover(model)
        refuse_other_activations(model, activations, "fast", expert_weights)
        refuse_unsplit(base_model(model).config.model_type, parts)
        plan = plan_of(shape_of(parts), tp)
        read_rows(model, activations)
        found = expert_banks(parts, PLAIN, True, expert_weights, activations)
    banks = tuple(bank if isinstance(bank, NativeBank) else None for bank in found)
    return SplitModel(model, parts, plan, banks)


class PieceStruct(ctypes.Structure):
    """`Piece` in group.h."""

    _fields_ = (("weight", c_void_p), ("first", c_int64), ("block", c_int64))


class RankStruct(ctypes.Structure):
    """`Rank` in group.h."""

    _fields_ = (
        ("group", c_void_p),
        ("rank", c_int64),
        ("processes", c_void_p),
        ("layers", c_void_p),
        ("pieces", c_void_p),
        ("num_pieces", c_int64),
        ("table", c_void_p),
        ("first_id", c_int64),
        ("num_ids", c_int64),
        ("row_bytes", c_int64),
        ("desks", c_void_p),
        ("call", c_int64),
        ("has_moved", c_int64),
        ("gathered_bytes", c_int64),
        ("link", c_void_p),
    )


class RankWeights:
    """The packed weights of one rank, in this process.

    Args:
        split: Model and its split.
        rank: Number of the rank.

    Raises:
        ModelError: A layer cannot be split with the bits of one rank.
    """

    def __init__(self, split: SplitModel, rank: int) -> None:
        parts, plan, arena = split.parts, split.plan.ranks[rank], cpu.Arena()
        with inference():
            given = zip(parts.layers, plan.layers, split.banks, strict=True)
            self.layers = [
                RankLayer(LayerWeights.of(layer), share, bank, arena)
                for layer, share, bank in given
            ]
            refuse_mixed(self.layers)
            head, own = Projection.of(parts.lm_head), plan.vocabulary
            cuts = sorted({own.start, own.stop, *_blocks_in(own)})
            self._pieces = [(a, matrix([head.rows(a, b)], arena)) for a, b in pairwise(cuts)]
        embed: Any = parts.embed
        self._table = embed.weight.detach()[own.start : own.stop].contiguous()
        self.structs = (LayerStruct * len(self.layers))(*(x.struct for x in self.layers))
        """The layers for a sweep."""
        self._heads = (PieceStruct * len(self._pieces))(
            *(PieceStruct(m.address, a, a // HEAD_BLOCK) for a, m in self._pieces)
        )
        self.struct = RankStruct(
            rank=rank,
            layers=ctypes.addressof(self.structs),
            pieces=ctypes.addressof(self._heads),
            num_pieces=len(self._pieces),
            table=self._table.data_ptr(),
            first_id=own.start,
            num_ids=len(own),
            row_bytes=self._table.shape[1] * self._table.itemsize,
        )
        self.address = ctypes.addressof(self.struct)
        """Address of the `Rank` of group.h."""


def refuse_mixed(layers: Sequence[RankLayer]) -> None:
    """Refuse layers that cannot run in one call.

    Raises:
        ModelError: Layers differ in their KV, or in the experts beside the routed ones.
    """
    slabs = {layer.mixer.slab for layer in layers}
    if len(slabs) > 1:
        raise ModelError(f"layers have KV of several shapes: {sorted(slabs)}; use one rank")
    routed = {(x.native.weights, x.has_shared) for x in layers if x.native.router is not None}
    if len(routed) > 1:
        raise ModelError(
            "layers have several kinds of routers, or shared experts in some layers only; use one "
            "rank"
        )


def _blocks_in(vocabulary: range) -> range:
    """Return the first ids of the head's blocks that start in a range of ids."""
    return range(-(-vocabulary.start // HEAD_BLOCK) * HEAD_BLOCK, vocabulary.stop, HEAD_BLOCK)
