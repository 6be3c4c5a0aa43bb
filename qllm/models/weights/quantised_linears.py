"""Linear modules whose weight stays quantised: projections, dense layers, the head.

A module keeps its weight on the meta device, for its shape. Its own forward computes with the bf16
values, which are in memory only for that call. A runner whose kernels read codes packs them.
"""

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qllm.kernels import cpu, rounded
from qllm.kernels.cpu.quantised import problem_of
from qllm.kernels.quantised import Quantised
from qllm.models.weights.expert_file import all_in_file
from qllm.models.weights.on_demand import all_on_demand
from qllm.models.weights.on_host import bytes_in_slots, on_host
from qllm.models.weights.quantised_experts import (
    ATTRIBUTE,
    WEIGHTS,
    QuantisedExperts,
    all_quantised,
)
from qllm.models.weights.quantised_weights import checksum, sample_of, tensors_of


class QuantisedLinear:
    """The quantised weight of one linear module.

    Args:
        module: Linear module whose weight becomes a meta tensor.
        weight: Quantised weight, [out, in].
    """

    def __init__(self, module: nn.Linear, weight: Quantised) -> None:
        self.weight = weight
        self.kind = weight.kind
        """Codes and group as text."""
        self._module = module
        empty = torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
        module._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        setattr(module, ATTRIBUTE, self)
        self.restore()

    def restore(self) -> None:
        """Give the module the forward of this class, which expands the weight."""
        self._module.forward = self._forward  # type: ignore[method-assign]

    @property
    def rounds(self) -> bool:
        """True if the module rounds activations."""
        return self.weight.activations != "bf16"

    def read(self, activations: str) -> None:
        """Set the type of activations, if the weight's codes are integers."""
        self.weight = self.weight.reading(activations)

    def _forward(self, input: Tensor) -> Tensor:
        if self.rounds:
            return rounded.linear(input, self.weight, self._module.bias)
        return F.linear(input, self.weight.dequantised(), self._module.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return sum(tensor.nbytes for tensor in tensors_of(self.weight))

    def sample(self) -> bytes:
        """Return a few bytes of the weight, for the identity of the model."""
        return b"".join(map(sample_of, tensors_of(self.weight)))

    def digest(self) -> str:
        """Return a digest of every byte of the weight."""
        return self.kind + repr(list(map(checksum, tensors_of(self.weight))))


def linear_in(module: object) -> QuantisedLinear | None:
    """Return the quantised weight of a linear module; None if it is a parameter."""
    found = getattr(module, ATTRIBUTE, None)
    return found if isinstance(found, QuantisedLinear) else None


def weight_of(module: nn.Linear) -> Tensor | Quantised:
    """Return the weight of a linear module: its quantised weight, or else its parameter."""
    found = linear_in(module)
    return module.weight.detach() if found is None else found.weight


def values_of(module: nn.Linear) -> Tensor:
    """Return the weight of a linear module in the dtype that it computes in."""
    found = weight_of(module)
    return found if isinstance(found, Tensor) else found.dequantised()


def all_linears(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return all quantised linear modules of a model, by name."""
    found = {name: linear_in(module) for name, module in model.named_modules()}
    return {name: linear for name, linear in found.items() if linear is not None}


def is_read(module: Any) -> bool:
    """Return True if the CPU kernels can read the weight of a linear module."""
    return linear_in(module) is not None or cpu.is_usable(module.weight)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights where it computes; quantised weights count as stored.

    Of experts that come and go, these are the most that are there at a time.
    """
    hosts = [module for module in model.modules() if on_host(module) is not None]
    apart = {id(module._parameters[name]) for module in hosts for name in WEIGHTS}
    whole = [p for p in model.parameters() if p.device.type != "meta" and id(p) not in apart]
    plain = sum(p.nbytes for p in whole) + bytes_in_slots(model)
    quantised = all_quantised(model).items()
    held: list[QuantisedExperts | QuantisedLinear]
    held = [one for path, one in quantised if model.get_submodule(path) not in hosts]
    held += all_linears(model).values()
    # a runner has this much of the experts that are in a file
    found = [min(p.max_bytes, p.file.num_bytes) for p in all_in_file(model).values()]
    plain += sum(one.num_bytes for one in all_on_demand(model).values())
    return plain + sum(one.num_bytes for one in held) + max(found, default=0)


def staying(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the weights that can stay quantised: each is used only by calls of one linear module.

    Args:
        model: Model on the meta device.
        names: Names of parameters.
    """
    if cpu.MISSING is not None:
        return set()
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    called = [name for name in names if _is_only_called(model, name)]
    return {name for name in called if uses[id(model.get_parameter(name))] == 1}


def _is_only_called(model: nn.Module, name: str) -> bool:
    path, _, parameter = name.rpartition(".")
    parent_path, _, child = path.rpartition(".")
    if type(model.get_submodule(path)) is not nn.Linear or parameter != "weight":
        return False
    source = _source_of(type(model.get_submodule(parent_path)).__module__)
    return re.search(rf"\.{child}\.weight\b", source) is None


@functools.cache
def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return ""


def fits(weight: object) -> TypeGuard[Quantised]:
    """Return True if the kernels can read a weight as it is."""
    return isinstance(weight, Quantised) and weight.codes.dim() == 2 and problem_of(weight) is None
