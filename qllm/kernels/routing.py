"""What the fused experts are given and keep on the device."""

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.kernels.quantised import Quantised


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
    SIGMOID = 3
    """Sigmoid of each; a correction has a say in the choice, but not in the weights."""


class Groups(NamedTuple):
    """What SIGMOID adds to its choice and does with its weights: DeepSeek-V3's router."""

    correction_E: Tensor
    """Added to the sigmoids for the choice."""
    num: int
    """Groups of as many experts each, neighbours; the two best of a group are its score."""
    num_open: int
    """Groups, the best ones, that experts are chosen from."""
    renormalised: bool
    """Whether weights are divided by their sum over the chosen."""
    scaling: float
    """What weights are multiplied by at last."""


class Rule(NamedTuple):
    """What `choose` makes of logits."""

    kind: RuleKind
    jitter: float = 0.0
    """How far, for SPARSE_MIXER, below the best, relative to its size, an expert still counts."""
    groups: Groups | None = None
    """For SIGMOID, and only there."""


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys."""

    q_D: Tensor
    k_D: Tensor
    q_eps: float
    k_eps: float


class Norm(NamedTuple):
    """An RMS norm that rounds before it multiplies by its weight."""

    weight_D: Tensor
    eps: float


class Angles(NamedTuple):
    """How heads rotate: element i of the first half with element i of the second."""

    cos_TD: Tensor
    """By each token's position, contiguous rows; or [T, D / 2], the same for both halves."""
    sin_TD: Tensor
    """Likewise."""
    in_pairs: bool
    """Whether the halves alternate in what is given. They lie one after the other afterwards, and
    the angles of the first are those of both."""

    @property
    def apart(self) -> int:
        """Width of a head whose halves have angles of their own, or 0."""
        return 0 if self.in_pairs else self.cos_TD.shape[1]


class Sum(NamedTuple):
    """What the experts' answer is added to: residual + (answer + shared) * multiplier."""

    residual_TD: Tensor
    multiplier: float | None = None
    """None is 1."""
    shared_TD: Tensor | None = None
    """Output of the shared experts, contiguous, unless they ran as experts."""
    shared_gate_T1: Tensor | None = None
    """Its sigmoid multiplies `shared_TD`; None is 1. Contiguous."""


class SharedWeights(NamedTuple):
    """Experts that every token takes with weight 1, S of them as wide as the others."""

    up_FD: Tensor
    """All gates, then all ups; contiguous. F = 2 S I."""
    down_DF: Tensor
    """F = S I; contiguous."""


class ExpertWeights(NamedTuple):
    """The experts of one layer: F = 2 I rows of gates and ups, any strides."""

    up_EFD: Tensor
    down_EDI: Tensor
    up_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    interleaved: bool
    """Gate and up rows alternate; else all gates come first."""
    activation: Activation
    shared: SharedWeights | None = None
    """They follow as experts E to E + S."""
    packed: tuple[Quantised, Quantised] | None = None
    """Both as stacks of quantised weights, contiguous; the two above are then their codes."""

    @property
    def num_experts(self) -> int:
        """E, without those that are shared."""
        return self.up_EFD.shape[0]

    @property
    def num_shared(self) -> int:
        """S."""
        return 0 if self.shared is None else self.shared.down_DF.shape[1] // self.inner

    @property
    def inner(self) -> int:
        """I, the width between the two products."""
        return self.down_EDI.shape[2] if self.packed is None else self.packed[1].shape[1]

    @property
    def bytes_per_expert(self) -> int:
        """Weights read for one expert."""
        if self.packed is not None:
            whole = [t for w in self.packed for t in (w.codes, w.scale_NG, w.offset_NG)]
            return sum(t[0].nbytes for t in whole if t is not None)
        numbers = self.up_EFD[0].numel() + self.down_EDI[0].numel()
        return numbers * self.up_EFD.element_size()


class Routing(NamedTuple):
    """Slots (token, k) sorted by expert, and the row tiles of the sorted slots.

    Tiles of expert e are [tile_start[e], tile_start[e + 1]). Shared experts are among them: the
    last ones, in the last slots of a token.
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
