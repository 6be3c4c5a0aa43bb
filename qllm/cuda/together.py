"""Projections of one input as one product, with one tensor of weights that modules view."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Together:
    """Projections of one input as one product.

    Args:
        linears: Modules that all have a bias, or all have none. Otherwise each is a product of its
            own.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._linears = linears
        self.weight: Tensor | None = None
        """The joint weight, [F, D]; None while the weights are separate."""
        self._bias: Tensor | None = None
        self._sizes = [linear.out_features for linear in linears]
        biases = [linear.bias is not None for linear in linears]
        kinds = {(linear.weight.dtype, linear.weight.device) for linear in linears}
        self._can = len(kinds) == 1 and all(biases) == any(biases)

    def enter(self) -> None:
        """Join the weights into one tensor. The modules compute with views of the tensor."""
        if not self._can or self.weight is not None:
            return
        self.weight = _laid([linear.weight for linear in self._linears])
        if self._linears[0].bias is not None:
            self._bias = _laid([linear.bias for linear in self._linears])

    def leave(self) -> None:
        """Give each module tensors of its own again."""
        if self.weight is None:
            return
        for linear in self._linears:
            for parameter in linear.parameters(recurse=False):
                parameter.data = parameter.data.clone()
        self.weight = self._bias = None

    def __call__(self, x_TD: Tensor) -> list[Tensor]:
        """Return each projection's output, [T, F]; those of one product are views of a tensor."""
        if self.weight is None:
            return [linear(x_TD) for linear in self._linears]
        return list(torch.split(self.whole(x_TD), self._sizes, 1))

    def whole(self, x_TD: Tensor) -> Tensor:
        """Return all outputs in one tensor, side by side."""
        if self.weight is None:
            return torch.cat([linear(x_TD) for linear in self._linears], 1)
        return functional.linear(x_TD, self.weight, self._bias)


def _laid(parameters: list[nn.Parameter]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    views = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return whole
