"""Packed experts and the weights that they were made of."""

from typing import Any

import torch
from torch import Tensor

from qllm.models.discover import discover


def bits(weight: Tensor) -> Tensor:
    """What is in memory, so that a NaN is equal to itself."""
    return weight.view(torch.int16)


def experts_of(model: Any) -> list[Any]:
    return [p.experts for p in discover(model).layers if p.experts is not None]


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_whole(model: Any, before: dict[str, Tensor]) -> None:
    now = dict(model.named_parameters())
    assert now.keys() == before.keys()
    for name, weight in before.items():
        assert now[name].stride() == weight.stride(), name
        assert torch.equal(bits(now[name].detach()), bits(weight)), name
