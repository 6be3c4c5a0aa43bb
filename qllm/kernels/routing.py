"""What the fused experts are given and keep on the device."""

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Activation(enum.IntEnum):
    """The gated activation between the two products of an expert."""

    SILU = 0
    """silu(gate) * up"""
    GPT_OSS = 1
    """(up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, up in [-7, 7]."""


class RuleKind(enum.IntEnum):
    """How the logits of a router become weights of the experts that it chose."""

    SOFTMAX = 0
    """Softmax over all experts."""
    RENORMALISED = 1
    """The same divided by its sum over the chosen: softmax over the chosen."""
    SPARSE_MIXER = 2
    """Softmax of each chosen expert among those within `jitter` of it, without those before it."""


class Rule(NamedTuple):
    """What `choose` makes of logits."""

    kind: RuleKind
    jitter: float = 0.0
    """How far, for SPARSE_MIXER, below the best, relative to its size, an expert still counts."""


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys."""

    q_D: Tensor
    k_D: Tensor
    q_eps: float
    k_eps: float


class Sum(NamedTuple):
    """What the experts' answer is added to: residual + (answer + shared) * multiplier."""

    residual_TD: Tensor
    multiplier: float | None = None
    """None is 1."""
    shared_TD: Tensor | None = None
    """Output of the shared experts, contiguous."""
    shared_gate_T1: Tensor | None = None
    """Its sigmoid multiplies `shared_TD`; None is 1. Contiguous."""


class ExpertWeights(NamedTuple):
    """The experts of one layer: F = 2 I rows of gates and ups, any strides."""

    up_EFD: Tensor
    down_EDI: Tensor
    up_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    interleaved: bool
    """Gate and up rows alternate; else all gates come first."""
    activation: Activation

    @property
    def num_experts(self) -> int:
        """E."""
        return self.up_EFD.shape[0]

    @property
    def bytes_per_expert(self) -> int:
        """Weights read for one expert."""
        numbers = self.up_EFD[0].numel() + self.down_EDI[0].numel()
        return numbers * self.up_EFD.element_size()


class Routing(NamedTuple):
    """Slots (token, k) sorted by expert, and the row tiles of the sorted slots.

    Tiles of expert e are [tile_start[e], tile_start[e + 1]).
    """

    ids_TK: Tensor
    counts_E: Tensor
    order_S: Tensor
    """Slot at each sorted place; past the last live slot undefined."""
    tile_start_E: Tensor
    """E + 1 numbers."""
    tile_expert: Tensor
    tile_row: Tensor
    """First sorted place of a tile."""
    tile_end: Tensor
    """End of the tile's expert in the sorted places."""


def expert_weights(module: nn.Module) -> ExpertWeights | str:
    """The experts of a module of transformers, or why the kernels are not made for them."""
    experts: Any = module
    up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    own = type(experts)._apply_gate.__module__ != "transformers.integrations.moe"
    activation = Activation.SILU
    if own:
        is_oss = getattr(experts, "alpha", None) == 1.702 and getattr(experts, "limit", 0) == 7.0
        if not is_oss:
            return f"{type(experts).__name__} has a gate of its own"
        activation = Activation.GPT_OSS
    elif (
        not isinstance(experts.act_fn, nn.SiLU)
        and type(experts.act_fn).__name__ != "SiLUActivation"
    ):
        return f"{type(experts).__name__} activates by {type(experts.act_fn).__name__}"
    return ExpertWeights(
        up_EFD=up,
        down_EDI=down,
        up_bias_EF=experts.gate_up_proj_bias.detach() if experts.has_bias else None,
        down_bias_ED=experts.down_proj_bias.detach() if experts.has_bias else None,
        interleaved=own or not experts.is_concatenated,
        activation=activation,
    )


def max_tiles(num_slots: int, num_experts: int, rows: int) -> int:
    """Most tiles of that many rows that slots of that many experts can fill."""
    return min(num_slots, num_slots // rows + num_experts)


def empty_routing(ids_TK: Tensor, num_experts: int, rows: int) -> Routing:
    """Tensors for a routing, to be filled by the kernels."""
    num_slots = ids_TK.numel()
    tiles = max_tiles(num_slots, num_experts, rows)

    def ints(num: int) -> Tensor:
        return torch.empty(num, dtype=torch.int32, device=ids_TK.device)

    return Routing(
        ids_TK, ints(num_experts), ints(num_slots), ints(num_experts + 1),
        ints(tiles), ints(tiles), ints(tiles),
    )  # fmt: skip
