"""The experts of a model on a GPU that are in the host's memory.

The module of such experts has its weights on the host, and all other modules on the GPU. So the
module's own forward cannot run.
"""

import mmap
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.kernels.quantised import Quantised
from qllm.models.weights.quantised_experts import WEIGHTS, quantised_in
from qllm.models.weights.quantised_weights import DeviceWeights, tensors_of
from qllm.models.weights.refused_forward import RefusedForward

ON_HOST = "qllm_on_host"
"""Attribute of a module of experts whose weights are on the host: an `OnHost`."""
LINE = 256
"""Alignment in bytes of the parts of an expert in a slot: that of memory which CUDA allocates."""


class OnHost(NamedTuple):
    """The place of one module's experts."""

    max_bytes: int
    """Most bytes of experts of all layers on the GPU."""
    num_bytes: int
    """Bytes of the module's experts in slots."""


def own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory in pages of its own, which can be page-locked alone."""
    memory = torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def in_lines(num_bytes: int) -> int:
    """Return the bytes of a part of an expert in a slot."""
    return -(-num_bytes // LINE) * LINE


class HostWeights(DeviceWeights):
    """E weights on the host, in pages of their own.

    Args:
        num: E.
        like: One of the weights.
    """

    def __init__(self, num: int, like: Quantised) -> None:
        super().__init__(num, like, torch.device("cpu"))

    def _empty(self, like: Tensor) -> Tensor:
        return own_pages((self.num, *like.shape), like.dtype)


def parts_of(module: Any) -> list[Tensor]:
    """Return the weights of a module's experts as they are: tensors with an entry per expert."""
    held = quantised_in(module)
    if held is None:
        return [getattr(module, name).detach() for name in WEIGHTS]
    stacks = [held.weights[name] for name in WEIGHTS]
    return [
        part for one in stacks if isinstance(one, DeviceWeights) for part in tensors_of(one.whole)
    ]


def leave_on_host(module: Any, path: str, max_bytes: int) -> None:
    """Mark a module of experts whose weights are on the host.

    Args:
        module: The module.
        path: Its path in the model.
        max_bytes: Most bytes of experts of all layers on the GPU.
    """
    num_bytes = sum(len(part) * in_lines(part[0].nbytes) for part in parts_of(module))
    setattr(module, ON_HOST, OnHost(max_bytes, num_bytes))
    module.forward = RefusedForward(
        path, "the host's memory", "use a runner, or load the model without max_expert_bytes"
    )


def on_host(module: object) -> OnHost | None:
    """Return the place of a module's experts on the host; None if they are not left there."""
    found: OnHost | None = getattr(module, ON_HOST, None)
    return found


def bytes_in_slots(model: nn.Module) -> int:
    """Return the most bytes that a GPU has of experts that are on the host."""
    found = [place for module in model.modules() if (place := on_host(module)) is not None]
    if not found:
        return 0
    return min(found[0].max_bytes, sum(place.num_bytes for place in found))
