"""Inputs of the fused experts, and the data that they keep on the device."""

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
    """The rule that makes weights of the chosen experts from the logits of a router."""

    SOFTMAX = 0
    """Softmax over all experts."""
    RENORMALISED = 1
    """Softmax over all experts, divided by the sum over the chosen ones. This equals a softmax over
    the chosen experts."""
    SPARSE_MIXER = 2
    """Softmax of each chosen expert among the experts within `jitter` of it. Experts that were
    chosen before are left out."""
    SIGMOID = 3
    """Sigmoid of each logit. A correction affects the choice, but not the weights."""


class Groups(NamedTuple):
    """The groups and the correction of SIGMOID: DeepSeek-V3's router."""

    correction_E: Tensor
    """Numbers added to the sigmoids for the choice."""
    num: int
    """Number of groups of adjacent experts. A group's score is that of its two best experts."""
    num_open: int
    """Number of best groups. Experts are chosen only from these groups."""
    renormalised: bool
    """True if weights are divided by their sum over the chosen."""
    scaling: float
    """Factor of the weights, applied last."""


class Rule(NamedTuple):
    """The rule by which `choose` turns logits into experts and weights."""

    kind: RuleKind
    jitter: float = 0.0
    """Distance below the best logit, relative to its size, within which SPARSE_MIXER counts an
    expert."""
    groups: Groups | None = None
    """Groups of SIGMOID; None for the other kinds."""


class HeadNorms(NamedTuple):
    """The RMS norms of each head of queries and of keys."""

    q_D: Tensor
    k_D: Tensor
    q_eps: float
    k_eps: float


class Norm(NamedTuple):
    """An RMS norm that rounds before it multiplies by its weight."""

    weight_D: Tensor
    eps: float


class Angles(NamedTuple):
    """Angles of heads. Element i of the first half rotates with element i of the second half."""

    cos_TD: Tensor
    """Cosines of each token's position, with contiguous rows. [T, D / 2] is used for both
    halves."""
    sin_TD: Tensor
    """Sines, in the same layout."""
    in_pairs: bool
    """True if the halves alternate in the input. In the output they follow each other. The angles
    of the first half are used for both."""

    @property
    def apart(self) -> int:
        """Width of a head whose halves have different angles, or 0."""
        return 0 if self.in_pairs else self.cos_TD.shape[1]


class Sum(NamedTuple):
    """Terms to which the experts' answer is added: residual + (answer + shared) * multiplier."""

    residual_TD: Tensor
    multiplier: float | None = None
    """Factor of the answer; None is 1."""
    shared_TD: Tensor | None = None
    """Output of the shared experts, contiguous; None if they ran as experts."""
    shared_gate_T1: Tensor | None = None
    """Logits, contiguous, whose sigmoid multiplies `shared_TD`; None is a factor of 1."""


class SharedWeights(NamedTuple):
    """Weights of S shared experts, as wide as the others; every token uses them with weight 1."""

    up_FD: Tensor
    """All gates, then all ups; contiguous. F = 2 S I."""
    down_DF: Tensor
    """F = S I; contiguous."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: F = 2 I rows of gates and ups, any strides."""

    up_EFD: Tensor
    down_EDI: Tensor
    up_bias_EF: Tensor | None
    down_bias_ED: Tensor | None
    interleaved: bool
    """True if gate and up rows alternate; False if all gates come first."""
    activation: Activation
    shared: SharedWeights | None = None
    """Shared experts, which are experts E to E + S."""
    packed: tuple[Quantised, Quantised] | None = None
    """Up and down weights as contiguous stacks of quantised weights. `up_EFD` and `down_EDI` are
    the codes of these stacks."""
    place_E: Tensor | None = None
    """Place of each expert in the stacks, as int64; None if expert e is at place e. Biases lie in
    the order of the experts. There are no shared experts then."""
    share: tuple[int, int] | None = None
    """First expert of the weights, and E, if the weights are those of one rank; None is all."""

    @property
    def first(self) -> int:
        """Number of the first expert that the weights contain."""
        return 0 if self.share is None else self.share[0]

    @property
    def num_experts(self) -> int:
        """Number of experts E of the layer, without the shared ones."""
        if self.place_E is not None:
            return self.place_E.shape[0]
        return self.up_EFD.shape[0] if self.share is None else self.share[1]

    @property
    def num_shared(self) -> int:
        """Number of shared experts, S."""
        return 0 if self.shared is None else self.shared.down_DF.shape[1] // self.inner

    @property
    def inner(self) -> int:
        """Width between the two products, I."""
        return self.down_EDI.shape[2] if self.packed is None else self.packed[1].shape[1]

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of weights read for one expert."""
        if self.packed is not None:
            whole = [t for w in self.packed for t in (w.codes, w.scale_NG, w.offset_NG)]
            return sum(t[0].nbytes for t in whole if t is not None)
        numbers = self.up_EFD[0].numel() + self.down_EDI[0].numel()
        return numbers * self.up_EFD.element_size()


class Routing(NamedTuple):
    """Slots (token, k) sorted by expert, and the row tiles of the sorted slots.

    Tiles of expert e are [tile_start[e], tile_start[e + 1]). Shared experts come last, in the last
    slots of a token.
    """

    ids_TK: Tensor
    counts_E: Tensor
    order_S: Tensor
    """Slot at each sorted place. Places after the last live slot are undefined."""
    tile_start_E: Tensor
    """First tile of each expert, and the end: E + 1 numbers."""
    tile_expert: Tensor
    tile_row: Tensor
    """First sorted place of a tile."""
    tile_end: Tensor
    """End of the tile's expert in the sorted places."""


def expert_weights(module: nn.Module) -> ExpertWeights | str:
    """Return the experts of a transformers module, or the reason that the kernels reject them."""
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
    """Return the largest number of tiles with `rows` rows that the slots of these experts fill."""
    return min(num_slots, num_slots // rows + num_experts)


def empty_routing(ids_TK: Tensor, num_experts: int, rows: int) -> Routing:
    """Return uninitialised tensors of a routing, which the kernels fill."""
    num_slots = ids_TK.numel()
    tiles = max_tiles(num_slots, num_experts, rows)

    def ints(num: int) -> Tensor:
        return torch.empty(num, dtype=torch.int32, device=ids_TK.device)

    return Routing(
        ids_TK, ints(num_experts), ints(num_slots), ints(num_experts + 1),
        ints(tiles), ints(tiles), ints(tiles),
    )  # fmt: skip
