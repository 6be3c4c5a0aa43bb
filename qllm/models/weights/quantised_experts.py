"""Experts of a layer whose weights stay quantised.

The module of such experts keeps its parameters on the meta device, for their shapes. The module's
own forward still runs. It computes with the bf16 values of the weights, which are in memory only
during that call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from qllm.kernels import rounded
from qllm.kernels.quantised import INTEGERS, Quantised
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.quantised_weights import AnyWeights, Weights

WEIGHTS = ("gate_up_proj", "down_proj")
ATTRIBUTE = "qllm_quantised"
"""Attribute of a module of experts whose weights are quantised."""
PROVENANCE = "qllm_rounded"
"""Attribute of a module of experts whose bf16 weights were rounded before: a description."""
AT_ONCE = 16
"""Number of experts that are packed together."""


class QuantisedExperts:
    """The quantised weights of one module of experts.

    Args:
        weights: Weights by the name of the parameter, one per expert; the gate's outputs come
            first.
        rounding: Rounding from bf16; None if the checkpoint has them quantised.
    """

    def __init__(self, weights: Mapping[str, AnyWeights], rounding: str | None = None) -> None:
        self.weights, self.rounding = weights, rounding
        self.num_experts = weights[WEIGHTS[0]].num
        self.kind = "+".join(dict.fromkeys(found.kind for found in weights.values()))
        """Codes and group as text: "e2m1 g32"."""
        self.activations: str = "bf16"
        """Type of activations. `forward` rounds them in the same way, but has weights rounded to
        bf16."""
        self._module: Any = None

    def enter(self, module: Any) -> None:
        """Replace the weights of a transformers module, whose two parameters are on meta."""
        self._module = module
        for name in WEIGHTS:
            own = module._parameters[name]
            kept = torch.empty_like(own, device="meta")
            module._parameters[name] = nn.Parameter(kept, requires_grad=False)
        module.forward = self._forward()
        setattr(module, ATTRIBUTE, self)

    def leave(self) -> None:
        """Leave the module with parameters on meta. The caller restores its forward."""
        delattr(self._module, ATTRIBUTE)

    @property
    def reads(self) -> str:
        """Text of codes and group, and the type of activations if that is not bf16."""
        kinds = [found.like.reading(self.activations).kind for found in self.weights.values()]
        return "+".join(dict.fromkeys(kinds))

    @property
    def has_integers(self) -> bool:
        """True if products support rounded activations."""
        return any(found.like.code in INTEGERS for found in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(found.num_bytes for found in self.weights.values())

    def sample(self) -> bytes:
        """Return a few bytes of the weights, for the identity of the model."""
        return b"".join(found.sample() for found in self.weights.values())

    def digest(self) -> str:
        """Return a digest of every byte of the weights."""
        return repr([found.digest() for found in self.weights.values()])

    def as_parameter(self, name: str, expert: int) -> Tensor:
        """Return a weight in the parameter's layout: [k, n] if transposed, else [n, k]."""
        value = self.weights[name].values(expert)
        if name == WEIGHTS[0] and not self._module.is_concatenated:
            value = torch.stack(value.chunk(2), dim=1).flatten(0, 1)
        return value.t().contiguous() if self._module.is_transposed else value

    @contextmanager
    def in_place(self, experts: Sequence[int] | None = None) -> Iterator[None]:
        """Materialise the weights in bf16 inside the `with` block, then free them.

        Args:
            experts: Numbers of the needed experts; None is all.
        """
        module = self._module
        kept = {name: module._parameters[name] for name in WEIGHTS}
        try:
            for name, empty in kept.items():
                weights = self.weights[name]
                full = torch.empty_like(empty, device=weights.tensors()[0].device)
                scratch: Any = weights.scratch()
                for expert in range(len(full)) if experts is None else experts:
                    if name == WEIGHTS[0] and not module.is_concatenated:
                        full[expert] = self.as_parameter(name, expert)
                    else:
                        own = full[expert]
                        own = own.t() if module.is_transposed else own
                        weights.write(expert, own, scratch)
                module._parameters[name] = nn.Parameter(full, requires_grad=False)
            yield
        finally:
            module._parameters.update(kept)

    def _forward(self) -> Callable[..., Any]:
        own = MethodType(type(self._module).forward, self._module)

        @wraps(own)
        def forward(*args: Any, **given: Any) -> Any:
            ids = given["top_k_index"] if "top_k_index" in given else args[1]
            used = [e for e in ids.unique().tolist() if e < self.num_experts]
            if self.activations != "bf16":
                return self._rounded(*args, **given)
            with self.in_place(used):  # rows use no other experts
                return own(*args, **given)

        return forward

    def _rounded(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the module's forward with rounded activations and fp32 sums."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        out_TKD = x_TD.new_zeros((*top_k_index.shape, x_TD.shape[-1]))
        for expert in range(self.num_experts):
            tokens, slots = (top_k_index == expert).nonzero(as_tuple=True)
            if len(tokens):
                h = self._module._apply_gate(self._product(WEIGHTS[0], expert, x_TD[tokens]))
                out_TKD[tokens, slots] = self._product(WEIGHTS[1], expert, h)
        out_TD = (out_TKD * top_k_weights.unsqueeze(-1)).sum(1)
        return out_TD.to(hidden_states.dtype).view_as(hidden_states)

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        """Return activations times one weight, in fp32, plus its bias."""
        group, weight = self.weights[name].like.group, self.as_parameter(name, expert).float()
        rows = x.float()
        if self.weights[name].like.code in INTEGERS:
            rows = rounded.rounded(x, group).values(group)
        out = rows @ (weight if self._module.is_transposed else weight.t())
        if self._module.has_bias:
            out += getattr(self._module, f"{name}_bias")[expert].float()
        return out.to(x.dtype)


Room = Callable[[int, Quantised], AnyWeights]
"""A function that makes room for a number of weights like the given one."""


def pack_experts(
    module: Any, weights: dict[str, Sequence[Quantised]], room: Room = Weights
) -> dict[str, AnyWeights]:
    """Pack the weights of a module of experts.

    Args:
        module: Experts of transformers.
        weights: Weights by the name of the parameter, one [n, k] per expert; outputs in the order
            of the module.
        room: Function that makes room for the packed weights.

    Raises:
        ModelError: The kernels do not support such weights.
    """
    packed: dict[str, AnyWeights] = {}
    for name, found in weights.items():
        packed[name] = room(len(found), found[0])
        for first in range(0, len(found), AT_ONCE):
            some = [found[i] for i in range(first, min(first + AT_ONCE, len(found)))]
            if name == WEIGHTS[0] and not module.is_concatenated:
                some = [one.rows(gate_first(one.shape[0])) for one in some]
            packed[name].take(first, [[one] for one in some])
    return packed


def gate_first(n: int) -> Tensor:
    """Return the numbers of n outputs, in turn of gate and up, with the gate's outputs first."""
    order = torch.arange(n)
    return torch.cat((order[0::2], order[1::2]))


def round_experts(module: Any, rounding: str) -> QuantisedExperts:
    """Round the bf16 parameters of a module of experts, and free them.

    Args:
        module: Experts of transformers.
        rounding: Key of `ROUNDINGS`.
    """
    turned, rounded = bool(module.is_transposed), ROUNDINGS[rounding]
    weights: dict[str, AnyWeights] = {}
    for name in WEIGHTS:
        found = module._parameters[name].detach()
        all_of_it = [rounded(one.t() if turned else one) for one in found]
        weights |= pack_experts(module, {name: all_of_it})
        module._parameters[name] = nn.Parameter(found.to("meta"), requires_grad=False)
    held = QuantisedExperts(weights, rounding)
    held.enter(module)
    return held


def say_rounded(module: object, how: str) -> None:
    """Note that the bf16 weights of a module of experts were rounded before.

    Args:
        module: Experts of transformers.
        how: Text that names the format.
    """
    setattr(module, PROVENANCE, how)


def rounded_before(module: object) -> str | None:
    """Return how the bf16 weights of a module of experts were rounded; None if they were not."""
    found: str | None = getattr(module, PROVENANCE, None)
    return found


def quantised_in(module: object) -> QuantisedExperts | None:
    """Return the quantised weights of a module of experts; None if they are parameters."""
    found = getattr(module, ATTRIBUTE, None)
    return found if isinstance(found, QuantisedExperts) else None


def all_quantised(model: nn.Module) -> dict[str, QuantisedExperts]:
    """Return all quantised experts of a model, by the name of their module."""
    found = {name: quantised_in(module) for name, module in model.named_modules()}
    return {name: experts for name, experts in found.items() if experts is not None}
