"""Routed experts on a device: routing never leaves it, and a unit is a range of experts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qllm.errors import InvariantError
from qllm.kernels.routing import ExpertWeights, Routing, Rule, RuleKind, Sum
from qllm.kernels.select import Kernels
from qllm.models.fingerprints import router_kind
from qllm.models.heard import is_heard
from qllm.runner.cuts import Costs
from qllm.runner.layers.work import Unit, Work


class Router(NamedTuple):
    """A known router: a product, and what becomes of it."""

    weight_ED: Tensor
    bias_E: Tensor | None
    rule: Rule
    top_k: int
    dtype: torch.dtype
    """Dtype of the weights that it gives."""


def known_router(router: Any) -> Router | None:
    """What `choose` needs of a router of transformers, if it knows its kind and no hook listens."""
    weight, kind = getattr(router, "weight", None), router_kind(router)
    renormalised, dtype = RuleKind.RENORMALISED, getattr(weight, "dtype", torch.float32)
    rules = {"wide": Rule(renormalised), "chosen": Rule(renormalised)}
    if kind == "flag":
        rules[kind] = Rule(renormalised if router.norm_topk_prob else RuleKind.SOFTMAX)
    elif kind == "sparse_mixer":
        rules[kind] = Rule(RuleKind.SPARSE_MIXER, 2 * router.router_jitter_noise)
    if kind not in rules or weight is None or is_heard(router):
        return None
    bias = getattr(router, "bias", None)
    wide = torch.float32 if kind == "wide" else dtype
    return Router(
        weight.detach(), None if bias is None else bias.detach(), rules[kind], router.top_k, wide
    )


class DeviceExperts:
    """The experts of one layer.

    Args:
        weights: Of the layer.
        kernels: Sort, multiply and sum.
        hits: One int32 on the device that counts experts whose weights were read.
    """

    def __init__(self, weights: ExpertWeights, kernels: Kernels, hits: Tensor) -> None:
        self.weights, self.kernels, self._hits = weights, kernels, hits

    def run(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_tokens: Tensor,
        add: Sum | None = None,
    ) -> Tensor:
        """Weighted sum over the experts of each token, zero past `num_tokens`; then `add`."""
        routing = self.kernels.route(ids_TK, num_tokens, self.weights.num_experts, self._hits)
        return self._run(x_TD, routing, weights_TK, num_tokens, add)

    def choose_and_run(self, x_TD: Tensor, router: Router, num_tokens: Tensor, add: Sum) -> Tensor:
        """Choose experts, run them, and add their weighted sum to `add`.

        Args:
            x_TD: Input of the router and of the experts.
            router: Of the layer.
            num_tokens: Of x_TD, those that are real; one number on the device.
            add: What the answer is added to.
        """
        logits_TE = functional.linear(x_TD, router.weight_ED, router.bias_E)
        routing, weights_TK = self.kernels.choose(
            logits_TE, router.rule, router.top_k, num_tokens, self._hits, router.dtype
        )
        return self._run(x_TD, routing, weights_TK, num_tokens, add)

    def _run(
        self,
        x_TD: Tensor,
        routing: Routing,
        weights_TK: Tensor,
        num_tokens: Tensor,
        add: Sum | None,
    ) -> Tensor:
        w = self.weights
        slots = x_TD.new_empty((*routing.ids_TK.shape, w.down_EDI.shape[1]))
        self.kernels.run_experts(x_TD, w, routing, 0, w.num_experts, slots)
        out = slots.new_empty((x_TD.shape[0], slots.shape[2]))
        self.kernels.combine(slots, weights_TK, num_tokens, out, add)
        return out

    def begin(self, ids_TK: Tensor, num_ranges: int) -> "DeviceWork":
        """The experts in ranges that may be stopped between."""
        return DeviceWork(self, ids_TK, num_ranges, self._hits)


class DeviceWork(Work):
    """The EXPERTS op of one layer in ranges of experts.

    The host does not know which slots a range fills, only that all of them fill all slots.
    """

    __slots__ = ("_experts", "_num_tokens", "_routing", "bounds")

    def __init__(
        self, experts: DeviceExperts, ids_TK: Tensor, num_ranges: int, hits: Tensor
    ) -> None:
        self._experts, self.ids_TK = experts, ids_TK
        weights, num_slots = experts.weights, ids_TK.numel()
        num = max(1, min(num_ranges, weights.num_experts))
        self.bounds = [weights.num_experts * i // num for i in range(num + 1)]
        shares = [num_slots * i // num for i in range(num + 1)]
        self.units = [Unit(self.bounds[i], shares[i], shares[i + 1]) for i in range(num)]
        self.done = bytearray(num)
        dtype = weights.down_EDI.dtype
        shape = (num_slots, weights.down_EDI.shape[1])
        self.slots_SD = torch.empty(shape, dtype=dtype, device=ids_TK.device)
        self._num_tokens = torch.full(
            (1,), ids_TK.shape[0], dtype=torch.int32, device=ids_TK.device
        )
        self._routing = experts.kernels.route(ids_TK, self._num_tokens, weights.num_experts, hits)

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert range of [{start}, {stop}) would run twice (I1)")
        slots_TKD = self.slots_SD.view(*self.ids_TK.shape, -1)
        lo, hi = self.bounds[start], self.bounds[stop]
        self._experts.kernels.run_experts(
            x_TD, self._experts.weights, self._routing, lo, hi, slots_TKD
        )
        self.done[start:stop] = b"\1" * (stop - start)
        return self.units[stop - 1].hi - self.units[start].lo

    def end_of_range(self, start: int, costs: Costs) -> int:
        return start + 1

    def bytes_read(self, start: int, stop: int) -> int:
        return 0  # the device counts

    def combine(self, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        slots_TKD = self.slots_SD.view(*self.ids_TK.shape, -1)[lo:hi]
        out = slots_TKD.new_empty((hi - lo, slots_TKD.shape[2]))
        self._experts.kernels.combine(slots_TKD, weights_TK[lo:hi], self._num_tokens, out)
        return out.to(dtype)
