"""Routed experts and their routing on a device; a work unit is a range of experts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qllm.errors import InvariantError
from qllm.kernels.routing import (
    Activation,
    ExpertWeights,
    Groups,
    Rule,
    RuleKind,
    SharedWeights,
    Sum,
)
from qllm.kernels.select import Kernels
from qllm.models.heard import is_heard
from qllm.models.parts.known import router_kind
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts
from qllm.models.weights.quantised_weights import DeviceWeights
from qllm.runner.cuts import CutCosts
from qllm.runner.layers.work import Unit, Work
from qllm.runner.residency import LayerResidency


class Router(NamedTuple):
    """A known router: a product, and the rule that gives weights for its logits."""

    weight_ED: Tensor
    bias_E: Tensor | None
    rule: Rule
    top_k: int
    dtype: torch.dtype
    """Dtype of the router's weights."""
    is_wide: bool
    """True if the router's product is in fp32, whatever the model's dtype."""

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return logits [T, E] of rows, which are in fp32 if the router is wide."""
        return functional.linear(x_TD, self.weight_ED, self.bias_E)


def known_router(router: Any) -> Router | None:
    """Return the router as `choose` needs it; None if the kind is unknown or a hook is on it."""
    weight, kind = getattr(router, "weight", None), router_kind(router)
    if kind in {None, "softmax_fp32"} or weight is None or is_heard(router):
        return None
    bias, is_wide = getattr(router, "bias", None), kind == "sigmoid"
    dtype = torch.float32 if kind in {"wide", "sigmoid"} else weight.dtype
    weight = weight.detach().float() if is_wide else weight.detach()
    bias = None if bias is None else bias.detach()
    return Router(weight, bias, _rule(router, kind), router.top_k, dtype, is_wide)


def _rule(router: Any, kind: str | None) -> Rule:
    if kind == "sigmoid":
        correction_E = router.e_score_correction_bias.detach()
        groups = Groups(
            correction_E,
            router.num_group,
            router.topk_group,
            router.norm_topk_prob,
            router.routed_scaling_factor,
        )
        return Rule(RuleKind.SIGMOID, groups=groups)
    if kind == "sparse_mixer":
        return Rule(RuleKind.SPARSE_MIXER, 2 * router.router_jitter_noise)
    if kind == "flag" and not router.norm_topk_prob:
        return Rule(RuleKind.SOFTMAX)
    return Rule(RuleKind.RENORMALISED)


def packed_weights(weights: ExpertWeights, held: QuantisedExperts) -> ExpertWeights | str:
    """Return the same experts with quantised weights, or the reason why no kernel supports them.

    Args:
        weights: Weights of the layer, of which the two products are on the meta device.
        held: Quantised values of the two products.
    """
    stacks = [held.weights[name] for name in WEIGHTS]
    up, down = (w.whole if isinstance(w, DeviceWeights) else None for w in stacks)
    if up is None or down is None:
        return f"its experts are quantised ({held.kind}) and packed for the CPU"
    bias_EF = weights.up_bias_EF
    if bias_EF is not None and weights.interleaved:  # quantised values have gates first
        bias_EF = torch.cat((bias_EF[:, 0::2], bias_EF[:, 1::2]), 1)
    return weights._replace(
        up_EFD=up.codes, down_EDI=down.codes, up_bias_EF=bias_EF, interleaved=False,
        packed=(up, down),
    )  # fmt: skip


class DeviceExperts:
    """The experts of one layer.

    Args:
        weights: Weights of the layer.
        kernels: Kernels that sort, multiply and sum.
        hits: Counter on the device of the experts whose weights were read.
    """

    def __init__(self, weights: ExpertWeights, kernels: Kernels, hits: Tensor) -> None:
        self.weights, self.kernels, self.hits = weights, kernels, hits

    def route(self, ids_TK: Tensor, num_tokens: Tensor) -> Any:
        """Return the slots of each expert, as `run_range` reads them."""
        return self.kernels.route(ids_TK, num_tokens, self.weights.num_experts, self.hits)

    def run_range(self, x_TD: Tensor, routing: Any, lo: int, hi: int, slots_TKD: Tensor) -> None:
        """Run experts [lo, hi) on the slots routed to them."""
        self.kernels.run_experts(x_TD, self.weights, routing, lo, hi, slots_TKD)

    def run(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_tokens: Tensor,
        add: Sum | None = None,
    ) -> Tensor:  # fmt: skip
        """Return `add` plus the weighted sum over each token's experts, zero past `num_tokens`."""
        routing = self.route(ids_TK, num_tokens)
        return self._run_all(x_TD, routing, ids_TK, weights_TK, num_tokens, add)

    def _run_all(
        self, x_TD: Tensor, routing: Any, ids_TK: Tensor, weights_TK: Tensor, num_tokens: Tensor,
        add: Sum | None,
    ) -> Tensor:  # fmt: skip
        slots = x_TD.new_empty((*ids_TK.shape, self.weights.down_EDI.shape[1]))
        self.run_range(x_TD, routing, 0, self.weights.num_experts, slots)
        return self._combine(slots, weights_TK, num_tokens, add)

    def can_share(self, shared: SharedWeights) -> bool:
        """Return True if shared experts can run as experts next to the layer's own."""
        w, (up, down) = self.weights, shared
        if w.packed is not None:
            return False
        inner, width = w.down_EDI.shape[2], w.down_EDI.shape[1]
        rows = {t.dtype for t in (w.up_EFD, w.down_EDI, up, down)}
        return (
            w.activation is Activation.SILU
            and not w.interleaved
            and w.up_bias_EF is None
            and w.down_bias_ED is None
            and len(rows) == 1
            and down.shape[1] % inner == 0
            and w.up_EFD.stride()[1:] == (width, 1)
            and w.down_EDI.stride()[1:] == (inner, 1)
            and up.is_contiguous()
            and down.is_contiguous()
        )

    def choose_and_run(
        self,
        x_TD: Tensor,
        logits_TE: Tensor,
        router: Router,
        num_tokens: Tensor,
        add: Sum,
        shared: SharedWeights | None = None,
    ) -> Tensor:
        """Choose experts, run them, and add their weighted sum to `add`.

        Args:
            x_TD: Input of the experts.
            logits_TE: Logits of the router.
            router: Router of the layer.
            num_tokens: Number of real tokens in x_TD, as one number on the device.
            add: Terms to which the result is added.
            shared: Shared experts that run with the routed ones; see `can_share`.
        """
        weights = self.weights._replace(shared=shared)
        routing, weights_TK = self.kernels.choose(
            logits_TE, router.rule, router.top_k, num_tokens, self.hits, router.dtype,
            weights.num_shared,
        )  # fmt: skip
        slots = x_TD.new_empty((*routing.ids_TK.shape, weights.down_EDI.shape[1]))
        num = weights.num_experts + weights.num_shared
        self.kernels.run_experts(x_TD, weights, routing, 0, num, slots)
        return self._combine(slots, weights_TK, num_tokens, add)

    def _combine(
        self, slots_TKD: Tensor, weights_TK: Tensor, num_tokens: Tensor, add: Sum | None
    ) -> Tensor:
        out = slots_TKD.new_empty((len(slots_TKD), slots_TKD.shape[2]))
        self.kernels.combine(slots_TKD, weights_TK, num_tokens, out, add)
        return out

    def begin(self, ids_TK: Tensor, num_ranges: int) -> "DeviceWork":
        """Return the experts as ranges; the work may stop between two ranges."""
        return DeviceWork(self, ids_TK, num_ranges)


class DeviceWork(Work):
    """The EXPERTS op of one layer in ranges of experts.

    The host does not know which slots a range fills. All ranges together fill all slots.
    """

    __slots__ = ("_experts", "_num_tokens", "_routing", "bounds")

    def __init__(self, experts: DeviceExperts, ids_TK: Tensor, num_ranges: int) -> None:
        weights, num_slots = experts.weights, ids_TK.numel()
        num = max(1, min(num_ranges, weights.num_experts))
        self.bounds = [weights.num_experts * i // num for i in range(num + 1)]
        shares = [num_slots * i // num for i in range(num + 1)]
        self._begin(
            experts,
            ids_TK,
            [Unit(self.bounds[i], shares[i], shares[i + 1]) for i in range(num)],
            None,
        )
        self._routing = experts.route(ids_TK, self._num_tokens)

    def _begin(
        self,
        experts: DeviceExperts,
        ids_TK: Tensor,
        units: list[Unit],
        residency: LayerResidency | None,
    ) -> None:
        self._experts, self.ids_TK, self.residency = experts, ids_TK, residency
        self._order(units)
        self.done = bytearray(len(units))
        weights, device = experts.weights, ids_TK.device
        dtype = weights.down_EDI.dtype if weights.packed is None else torch.bfloat16
        shape = (ids_TK.numel(), weights.down_EDI.shape[1])
        self.slots_SD = torch.empty(shape, dtype=dtype, device=device)
        self._num_tokens = torch.full((1,), ids_TK.shape[0], dtype=torch.int32, device=device)

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert range of [{start}, {stop}) would run twice (I1)")
        slots_TKD = self.slots_SD.view(*self.ids_TK.shape, -1)
        lo, hi = self.bounds[start], self.bounds[stop]
        self._experts.run_range(x_TD, self._routing, lo, hi, slots_TKD)
        self.done[start:stop] = b"\1" * (stop - start)
        return self.units[stop - 1].hi - self.units[start].lo

    def end_of_range(self, start: int, costs: CutCosts) -> int:
        return start + 1

    def bytes_read(self, start: int, stop: int) -> int:
        return 0  # the device counts instead

    def restore(self, slots_SD: Tensor, done: Tensor, units: Tensor | None) -> None:
        """See `Work.restore`. A checkpoint of ranges has no units, and one of units no ranges."""
        if len(done) != len(self.done) or (units is None) is not (self.residency is None):
            raise InvariantError("a checkpoint has other expert units than its op (I1)")
        super().restore(slots_SD, done, units)

    def combine(self, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        slots_TKD = self.slots_SD.view(*self.ids_TK.shape, -1)[lo:hi]
        out = slots_TKD.new_empty((hi - lo, slots_TKD.shape[2]))
        self._experts.kernels.combine(slots_TKD, weights_TK[lo:hi], self._num_tokens, out)
        return out.to(dtype)
